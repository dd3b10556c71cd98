"""Record: a training job's reads, from a program that nobody changed to a DLIO workload.

* log: what a process's log holds; files from their open to their close
* data: which of them are the data set, its samples, and checkpoints
* rhythm: workers, batches, and how long a step computes; headrace's own loaders tell exactly
* job: all of it, its epochs and their order, with how sure it is
* recording: from a command to the files; a job as YAML, as lines and as JSON
"""

"""Record: a training job's reads, from a program that nobody changed to a DLIO workload.

* log: what a process's log holds; files from their open to their close
* rhythm: workers, batches, and how long a step computes; headrace's own loaders tell exactly
* job: which files are the data set, its samples, checkpoints, epochs and their order, with how sure that is
* dftracer, darshan: their traces and logs as if they were ours
* recording: from a command to the files; a job as YAML, as lines and as JSON
"""

"""Record: a training job's reads, from a program that nobody changed to a DLIO workload.

* log: what a process's log holds
* visits: files from their open to their close
* data, shards: which of them are the data set, and its samples
* order: epochs, and in what order they read
* rhythm: workers, batches, and how long a step computes
* exact: the same from headrace's own loaders, which tell
* saves: checkpoints
* job: all of it, with how sure it is
* document: a job as YAML
* recording: from a command to the files
"""

from headrace.insight.record.job import RecordedJob
from headrace.insight.record.recording import Recording, RecordOptions, finish, record

__all__ = ["RecordOptions", "RecordedJob", "Recording", "finish", "record"]

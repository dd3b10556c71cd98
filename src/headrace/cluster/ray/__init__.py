"""Ray: the executor that rides on a cluster of Ray's, and what it runs there.

* executor: submits by Ray's jobs API, over HTTP alone: who submits needs no package of Ray's
* job: what the API starts: a driver, an actor on each node of the job, and what these start
"""

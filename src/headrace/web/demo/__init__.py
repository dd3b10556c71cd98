"""The recorded demo: a cluster that is not there, made by a seeded model, so that pages can be tried.

* words: what its users, jobs and file systems are called
* schedule: who had which GPUs when
* model: how each job fared at any moment
* source: the same as a real cluster would give
* images: a small store of pictures
"""

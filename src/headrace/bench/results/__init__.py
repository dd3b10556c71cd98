"""Results: what a run leaves in its folder, for people, for DLIO's tools and for `mlpstorage`.

* hosts: the machines of a run, and where the data lies
* summary: figures of all ranks as one document
* files: DLIO's files and their names
"""

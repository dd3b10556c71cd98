"""A job's global store: every node's share on its local disk, read by all nodes over NVMe/TCP.

`headrace stage` runs once on every node (`server`): the nodes meet in a shared folder (`meeting`), cut the
source into shares, copy each sample from the source once, export what they hold, and
keep copies of a neighbour's share where asked (`share`). `open_job` (`store`) is the other end: one
store over all shares, whose reads go to a share's owner, else to its replica, else to the source
(`engine`). No node is special once `job.json` stands in the folder.
"""

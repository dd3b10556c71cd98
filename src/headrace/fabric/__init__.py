"""NVMe/TCP: the control path of both ends, in Python on plain sockets; see docs/protocol-nvme.md.

A host connects, identifies and opens queues here, and a target answers it here; what moves samples
is native and takes the connected sockets over (`headrace._native`). Nothing here reads samples: a
target exports files and devices, of which a store may be made, and a host reads blocks. What a store's
files are and where they lie on namespaces is the catalog's business.
"""

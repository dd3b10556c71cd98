"""`headrace launch`: a job's ranks on all of its nodes, and nothing left when they have ended.

* place: what the job has, and what its scheduler does for it: time left, requeue
* plan: what runs where, with which variables: plain functions, shown by `preview`
* conductor: the first node's loop, and what runs beside the ranks
* nodes: all nodes as the first one knows them, and how they talk
* node: what runs on each node: a guard, and below it the supervisor, who works
* stop_page: how all ranks stop at the same step
* folders: what a launch holds on a node, and how it is given back
"""

"""`headrace launch`: a job's ranks on all of its nodes, and nothing left when they have ended.

* place: what the job has, and what its scheduler does for it: time left, requeue
* plan: what runs where, with which variables: plain functions, shown by `preview`
* conductor: the first node's loop; nodes: all of them as it knows them, and how they talk
* node: what runs on each node: a guard, and below it the supervisor, who works
* stop_page: how all ranks stop at the same step
* folders: what a launch holds on a node, and how it is given back
* helpers: staging, the node daemon, the agent
* report: how it ended, the run's manifest
"""

"""`headrace launch`: a job's ranks on all of its nodes, and nothing left when they have ended.

* plan, ranks: what runs where, with which variables: plain functions, shown by `preview`
* conductor: the first node's loop; nodes, connection: the others, as it knows them
* node: what runs on each node: a guard, and below it the supervisor, who works
* stop_page: how all ranks stop at the same step
* folders: what a launch holds on a node, and how it is given back
* helpers: staging, the node daemon, the agent
* scheduler, report: time left, requeue, how it ended, the run's manifest
"""

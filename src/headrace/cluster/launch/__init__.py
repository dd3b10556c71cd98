"""`headrace launch`: a job's ranks on all of its nodes, and nothing left when they have ended.

* options, plan, settings, ranks: what runs where, with which variables: plain functions, shown by `preview`
* conductor: the first node's loop; nodes, line: the others, as it knows them
* start_nodes, node, supervisor: what runs on each node: a guard, and below it the one who works
* page, agreement: how all ranks stop at the same step
* node_folder, meet, gpus, processes: what a launch holds on a node, and how it is given back
* helpers: staging, the node daemon, the agent
* scheduler, outcome, report, record: time left, requeue, how it ended, the run's manifest
"""

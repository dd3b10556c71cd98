"""Measures storage the way training uses it: DLIO's workloads, data sets and checkpoints.

* config, schema, values: workloads and command lines; every key of DLIO and what becomes of it
* dataset: what a data set is, and which samples each accelerator reads in each step, also of a recorded job
* dataset_files, content, formats: how its files are written, found and read
* engines: what reads; loop: accelerators that compute by the clock; ranks: how processes find each other
* run, checkpoints, staging: from a workload to recorded timelines; model: what its checkpoints hold
* metrics, summary, results: figures, and the files that a run leaves
* compare, report: what finished runs say
* session: `headrace bench run` and `sweep`; storage: `headrace bench storage`; scaling: more ranks
"""

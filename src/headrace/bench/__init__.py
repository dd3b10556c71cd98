"""Measures storage the way training uses it: DLIO's workloads, data sets and checkpoints.

* config, schema, values: workloads and command lines; every key of DLIO and what becomes of it
* dataset, dataset_files, content, generate, formats: what a data set is, and how it is written and found
* plan: which samples each accelerator reads in each step, also those of a recorded job
* engines: what reads; loop: accelerators that compute by the clock; ranks: how processes find each other
* run, checkpoints, staging: from a workload to recorded timelines
* metrics, summary, results: figures, and the files that a run leaves
* compare, report: what finished runs say
* session: `headrace bench run` and `sweep`; storage: `headrace bench storage`; scaling: more ranks
"""

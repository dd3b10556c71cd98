"""Measures storage the way training uses it: DLIO's workloads, data sets and checkpoints.

`config` reads workloads and command lines, `workloads` holds those that are shipped. `dataset` says
what a data set is, `formats` how each format is written and read, `generate` writes it.
"""

"""Engines under test: what reads the batches of emulated accelerators.

* base: what every engine is
* null: nothing is read; the harness alone
* files, extents: headrace's native readers, of whole files and of samples within files
* torch: PyTorch's DataLoader
* choose: which one a workload is run with
* custom: a class of the user's
"""

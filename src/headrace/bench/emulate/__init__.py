"""Emulation: accelerators that compute by the clock and wait for real data.

* plan: which samples each accelerator reads in each step
* ranks: how the processes of a run find each other, from the launcher's environment
* group: barrier, gather and broadcast among them, without MPI
* engines: what reads
* feeder: one thread for each accelerator that waits for its batches
* loop: all accelerators' step loops on one timer
* cache: what of the data set lies in the page cache, and evicting it
* run: from a workload to recorded timelines
"""

"""Training on a cluster, or on a laptop in the same words: jobs are asked for in GPUs, staged, watched, ended.

`executor` is what runs jobs (Slurm's, or this machine's processes); `snapshot` what a cluster looks like at a
moment; what is asked for becomes nodes, tasks, CPUs and memory from what the cluster says it has.
"""

"""What the machine, and the control groups that we run in, let us take, and what its counters say.

* host: memory and CPUs that we may take, how busy the processors are, which file system a path lies on
* sensors: counters of CPUs, disks, networks and file systems; what GPUs do, through NVML
"""

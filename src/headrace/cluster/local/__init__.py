"""Local: jobs as processes of this machine, with the words and options of sbatch.

No daemon: each job that runs has a keeper, a process that starts the script, holds its time limit, ends all
that it started, and then starts what waits (`schedule`). Whoever submits, asks or cancels does the same. What
is known lies in a folder of the user's (`folder`): jobs outlive the process that submitted them, and a keeper
that was killed is noticed by whoever looks next: its process is gone.
"""

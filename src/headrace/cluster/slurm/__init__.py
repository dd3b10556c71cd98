"""Slurm: submits, watches and cancels jobs through its commands, and reads what a cluster looks like.

Versions 20.11 to 25.x. Nothing of it runs between two calls, and no library of Slurm's is linked.
"""

from headrace.cluster.slurm.accounting import AccountedJob, NoAccounting, read_accounting
from headrace.cluster.slurm.commands import Commands, SlurmUnavailable
from headrace.cluster.slurm.executor import SlurmExecutor
from headrace.cluster.slurm.snapshot import Recording, read_snapshot, record

__all__ = [
    "AccountedJob",
    "Commands",
    "NoAccounting",
    "Recording",
    "SlurmExecutor",
    "SlurmUnavailable",
    "read_accounting",
    "read_snapshot",
    "record",
]

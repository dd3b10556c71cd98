"""Slurm: submits, watches and cancels jobs through its commands, and reads what a cluster looks like.

Versions 20.11 to 25.x. Nothing of it runs between two calls, and no library of Slurm's is linked.
"""

"""Daemons of this user: their folders, which of two may rule, and how they run in the background."""

from headrace.runtime.background import launch, tail, wait_for_end
from headrace.runtime.folder import Claim, RuntimeFolder, control_folder, runtime_folder

__all__ = [
    "Claim",
    "RuntimeFolder",
    "control_folder",
    "launch",
    "runtime_folder",
    "tail",
    "wait_for_end",
]

"""The node daemon's runtime folder, see `headrace.runtime`."""

from headrace.runtime import Claim, RuntimeFolder, runtime_folder

__all__ = ["Claim", "RuntimeFolder", "runtime_folder"]

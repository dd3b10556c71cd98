"""Files that user code opens by itself, read before it does: for loaders over files as they are."""

from headrace.plane.read_ahead.sample_files import SharedLog
from headrace.plane.read_ahead.stage import ReadAhead, ReadAheadOptions

__all__ = ["ReadAhead", "ReadAheadOptions", "SharedLog"]

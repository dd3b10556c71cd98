"""Files that user code opens by itself, read before it does: for loaders over files as they are."""

from headrace.plane.ahead.options import AheadOptions
from headrace.plane.ahead.read_ahead import ReadAhead
from headrace.plane.ahead.shared_log import SharedLog

__all__ = ["AheadOptions", "ReadAhead", "SharedLog"]

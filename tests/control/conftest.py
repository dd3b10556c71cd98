"""Controllers to be tested."""

from control.service import controller, own, parent

__all__ = ["controller", "own", "parent"]

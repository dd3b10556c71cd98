"""The control plane of one process: what is measured, what is decided, and who turns the knobs."""

from headrace.control.controller import PassEnded, Plane

__all__ = ["PassEnded", "Plane"]

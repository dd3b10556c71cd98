"""The control plane of one process: what is measured, what is decided, and who turns the knobs."""

from headrace.control.controller import TuningHandle, tune
from headrace.control.explain import Explanation, explain

__all__ = ["Explanation", "TuningHandle", "explain", "tune"]

"""Proof: that a run delivered every sample exactly once over all its ranks, and that two runs had one order.

* history: which traces belong together, and what counts of what several attempts delivered
* expected: what the order would have delivered, as sums of hashes
* epochs: whether an epoch was whole, and what is wrong with it if not
* verify: `verify_epochs`: all of it for a run
* same: `same_order`: two runs beside each other
"""

from __future__ import annotations

from headrace.insight.proof.same import Sameness, same_order
from headrace.insight.proof.verify import Proof, verify_epochs

__all__ = ["Proof", "Sameness", "same_order", "verify_epochs"]

"""Lock: how far the interpreter's lock was what Python code waited for, and whose code had it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.control.stalls.phases import around

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.control.stalls.evidence import Evidence
    from headrace.control.stalls.phases import Waits

__all__ = ["TURNS_MANY", "lost_share", "others_share", "taken", "turns"]

_CONTENDED_FROM: Final = 0.15
_CONTENDED: Final = 0.4
"""From such a share of looks on that find the interpreter's lock taken, it is what Python code waits for:
somewhat, and wholly. A busy machine alone makes a few."""

_LOOKS_LEAST: Final = 4.0

TURNS_MANY: Final = 0.25
"""Threads that wait for one another for such a share of their time are better off as processes."""


def taken(waits: Waits, seen: Evidence) -> NDArray[np.float64]:
    """How far the interpreter's lock was what Python code waited for, at each step: 0 to 1."""
    looks = around(waits.looks)
    share = np.divide(
        np.minimum(around(waits.contended), looks), looks,
        out=np.full(len(looks), seen.contended), where=looks >= _LOOKS_LEAST,
    )  # fmt: skip
    found: NDArray[np.float64] = np.clip(
        (share - _CONTENDED_FROM) / (_CONTENDED - _CONTENDED_FROM), 0.0, 1.0
    )
    return found


def lost_share(waits: Waits, seen: Evidence) -> NDArray[np.float64]:
    """Of the time of decoding each batch, that in which its threads waited for Python code of others.

    Threads that decode and do not compute wait for the interpreter's lock, if it is seen to be taken
    and is not taken by decoding itself.

    Returns:
        float64, shape (steps,): 0 to 1.
    """
    work, cpu = waits.work_s, np.minimum(waits.cpu_s, waits.work_s)
    stopped = np.divide(work - cpu, work, out=np.zeros_like(work), where=work > 0.0)
    others = others_share(waits, unseen=0.0)
    return np.where(waits.serial, 0.0, stopped * others * taken(waits, seen))


def others_share(waits: Waits, unseen: float) -> NDArray[np.float64]:
    """Of all Python code that ran while the lock was wanted, that which is not decoding.

    Args:
        waits: of some steps.
        unseen: what it is where nobody was seen to run.

    Returns:
        float64, shape (steps,): 0 to 1.
    """
    own = np.where(waits.serial, 0.0, np.minimum(waits.cpu_s, waits.work_s))
    if not waits.looks.any():  # nobody noted it with the steps
        return np.maximum(0.0, 1.0 - own / np.maximum(waits.every_s, 1e-9))
    other = around(waits.others_s)
    both = other + around(own)
    return np.divide(other, both, out=np.full_like(both, unseen), where=both > 0.0)


def turns(waits: Waits, seen: Evidence) -> float:
    """Of the time that this process's threads decoded, that in which they waited for one another's Python code.

    Returns:
        0 to 1.
    """
    work = np.where(waits.serial, 0.0, waits.work_s)
    stopped = np.maximum(0.0, work - waits.cpu_s)
    alone = stopped * (1.0 - others_share(waits, unseen=1.0)) * taken(waits, seen)
    total = float(work.sum())
    return float(alone.sum()) / total if total else 0.0

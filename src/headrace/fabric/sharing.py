"""Sharing: one engine per process for all who name the same host, options and targets.

Who borrows gives back; the last one closes the engine, and what is left at the interpreter's end is
closed then. A forked child has an empty register: what its parent had is left alone.
"""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.fabric.engine import FabricEngine

if TYPE_CHECKING:
    from headrace.fabric.options import FabricOptions

__all__ = ["borrow", "give_back"]


@dataclass(slots=True)
class _Lent:
    engine: FabricEngine
    borrowers: int = 0


@dataclass(slots=True)
class _Register:
    # Reentrant: a store that is dropped gives back from wherever its collector runs.
    lock: threading.RLock = field(default_factory=threading.RLock)
    lent: dict[FabricOptions, _Lent] = field(default_factory=dict)


_register = _Register()
# Their threads do not exist in this process, and destroying them could touch what the parent uses.
_inherited: list[_Register] = []


def borrow(options: FabricOptions) -> FabricEngine:
    """The engine of this process for these options."""
    with _register.lock:
        lent = _register.lent.get(options)
        if lent is None:
            lent = _register.lent[options] = _Lent(FabricEngine(options.identity, options.engine))
        lent.borrowers += 1
        return lent.engine


def give_back(options: FabricOptions, engine: FabricEngine) -> None:
    """Ends one loan; the last one closes the engine."""
    with _register.lock:
        lent = _register.lent.get(options)
        if lent is None or lent.engine is not engine:
            return  # a parent's, or closed at the interpreter's end
        lent.borrowers -= 1
        if lent.borrowers:
            return
        del _register.lent[options]
    _close(engine)


def _close(engine: FabricEngine) -> None:
    if engine.owns(threading.current_thread()):
        # The collector ran on one of its own threads, which cannot wait for itself.
        threading.Thread(target=engine.close, name="headrace-fabric-close", daemon=True).start()
    else:
        engine.close()


@atexit.register
def _close_all() -> None:
    with _register.lock:
        left = [lent.engine for lent in _register.lent.values()]
        _register.lent.clear()
    for engine in left:
        engine.close()


def _after_fork() -> None:
    global _register  # noqa: PLW0603 - a child's own
    _inherited.append(_register)
    _register = _Register()


os.register_at_fork(after_in_child=_after_fork)

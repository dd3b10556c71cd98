"""should_stop: whether to save and leave now, asked after each step.

    for batch in loader:
        step(batch)
        if hr.cluster.should_stop():
            save()
            break

Under `headrace launch` all ranks are told True at the same step, so that none is left waiting for the others
in a collective. A process alone (no launcher, one rank) listens to SIGUSR1 and SIGTERM itself.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from headrace.base.job import local_rank, restarts, which_rank
from headrace.cluster.launch.page import PAGE_VARIABLE, RankSlot
from headrace.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["attend", "note_progress", "restarts", "should_stop"]

_asked: _Asked | None = None


def should_stop() -> bool:
    """Whether this process should save its state and leave; to be asked by all ranks equally often.

    True on every rank of the job at the same call, at most two calls after the job was asked to stop: by
    SIGUSR1, by SIGTERM (`scancel`, preemption), or because its time is nearly over. Once True, always True.
    Costs a microsecond.
    """
    return _state().check()


def attend() -> None:
    """Tells the launcher that this process will ask: it is waited for from now on, not from its first step."""
    _state()


def note_progress(state: Mapping[str, Any], steps: int) -> None:
    """Tells the launcher where this rank's loader stands, for the run's manifest.

    Args:
        state: a loader's `state_dict()`.
        steps: of the whole run.
    """
    slot = _state().slot
    if slot is not None:
        slot.note(
            epoch=int(state["epoch"]), position=int(state["position"]),
            order_hash=int(state["order_hash"], 16), seed=int(state["seed"]), steps=steps,
        )  # fmt: skip


class _Asked:
    """This process's way of being asked."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.slot: RankSlot | None = None
        self._stopped = False
        self._signalled = False
        address = os.environ.get(PAGE_VARIABLE)
        if address:
            self.slot = RankSlot(address, local_rank())
        elif _is_one_of_several():
            return  # nobody could make the ranks agree
        if threading.current_thread() is not threading.main_thread():
            return
        # The scheduler signals every process of a job. Under a launcher that is the launcher's to answer;
        # dying of it would lose what is to be saved. A handler of the user's own stays.
        numbers = (signal.SIGTERM,) if self.slot else (signal.SIGTERM, signal.SIGUSR1)
        for number in numbers:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signalled = True

    def check(self) -> bool:
        if not self._stopped:
            self._stopped = self.slot.check() if self.slot else self._signalled
        return self._stopped


def _is_one_of_several() -> bool:
    try:
        return which_rank().world_size > 1
    except RankError:  # not known which, so not alone
        return True


def _state() -> _Asked:
    global _asked  # noqa: PLW0603 - a process has one answer
    if _asked is None or _asked.pid != os.getpid():
        _asked = _Asked()
    return _asked

"""Stopping and resuming: a training loop leaves when its job is asked to, and goes on exactly there.

    run = hr.cluster.resume("checkpoints/", loader=loader, model=model, optimizer=optimizer)
    while loader.epoch < 90:
        for batch in loader:
            train(batch)
            if run.step():
                raise SystemExit

`should_stop` says after each step whether to save and leave; `resume` asks it, and saves each part's
`state_dict()`. Under `headrace launch` all ranks are told True at the same step, so that none is left waiting
for the others in a collective. A process alone (no launcher, one rank) listens to SIGUSR1 and SIGTERM itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace import checkpoint
from headrace.base.job import local_rank, which_rank
from headrace.cluster.launch.stop_page import PAGE_VARIABLE, RankSlot
from headrace.errors import CheckpointNotFound, RankError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType


# -- stopping ------------------------------------------------------------------------------------------

_asked: _Asked | None = None


def should_stop() -> bool:
    """Whether this process should save its state and leave; to be asked by all ranks equally often.

    True on every rank of the job at the same call, at most two calls after the job was asked to stop: by
    SIGUSR1, by SIGTERM (`scancel`, preemption), or because its time is nearly over. Once True, always True.
    Costs a microsecond.
    """
    return _state().check()


def asked_by() -> int | None:
    """The signal by which this process was asked to stop, as it knows; 0: by its launcher; None: it was not."""
    if _asked is None or not _asked.stopped:
        return None
    return 0 if _asked.slot else _asked.number


class _Asked:
    """This process's way of being asked."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.slot: RankSlot | None = None
        self.stopped = False
        self.number = 0
        self._numbers: tuple[signal.Signals, ...] = ()
        address = os.environ.get(PAGE_VARIABLE)
        try:
            if address:
                self.slot = slot = RankSlot.open(address, local_rank())
                _tell_failure(slot)
            elif which_rank().world_size > 1:
                return  # nobody could make the ranks agree
        except RankError:  # not known which, so not alone
            return
        # The scheduler signals every process of a job. Under a launcher that is the launcher's to answer;
        # dying of it would lose what is to be saved. A handler of the user's own stays.
        self._numbers = (signal.SIGTERM,) if self.slot else (signal.SIGTERM, signal.SIGUSR1)

    def attend(self) -> None:
        """Takes part from now on: the launcher waits for this process, and signals do not end it."""
        numbers, self._numbers = self._numbers, ()
        if not numbers:
            return
        if self.slot:
            self.slot.attend()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(number, self._on_signal)
        # `functions` holds SIGUSR1 back until somebody listens.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.number = number

    def check(self) -> bool:
        self.attend()
        if not self.stopped:
            self.stopped = self.slot.check() if self.slot else bool(self.number)
        return self.stopped


def _tell_failure(slot: RankSlot) -> None:
    """Has the launcher know by which exception this process ends; it is printed as ever."""
    prints = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lines = traceback.TracebackException(kind, error, None)
        lines.__notes__ = []  # they follow the exception's own line
        slot.fail([*lines.format_exception_only()][-1].strip().partition("\n")[0])
        prints(kind, error, trace)

    sys.excepthook = tell


def _state() -> _Asked:
    global _asked  # noqa: PLW0603 - a process has one answer
    if _asked is None or _asked.pid != os.getpid():
        _asked = _Asked()
    return _asked


# -- resuming ------------------------------------------------------------------------------------------


class Stateful(Protocol):
    """A part of a run: a model, an optimizer, a loader, a schedule."""

    def state_dict(self) -> Mapping[str, Any]:
        """What it needs to go on."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Goes on from there."""
        ...


def resume(
    folder: str | os.PathLike[str], *, save_every: int | None = None, **parts: Stateful
) -> Resumed:
    """Loads the newest whole checkpoint of a folder into the parts, if there is one.

    Args:
        folder: that all nodes see; checkpoints go there.
        save_every: save after every so many steps, against ends without a warning (a node that dies); by
            default only when the job is asked to stop.
        parts: what has a `state_dict` and a `load_state_dict`, by names of your choice; a headrace loader
            among them is what makes the order exact.

    Raises:
        ValueError: the checkpoint has other parts, or `save_every` is below 1.
        CheckpointError: another number of ranks saved it, and a part has what nobody can share out.
        CorruptCheckpoint: its bytes are not what was saved.
        StateMismatch: the loader has other data or another order.
    """
    return Resumed(folder, save_every, parts)


class Resumed:
    """A run that can be stopped after any step. Made by `resume`.

    Attributes:
        steps: done so far, those before a restart too.
        restored: whether a checkpoint was loaded.
    """

    def __init__(
        self, folder: str | os.PathLike[str], save_every: int | None, parts: Mapping[str, Stateful]
    ) -> None:
        if save_every is not None and save_every < 1:
            raise ValueError(f"save_every is {save_every}, expected 1 or more")
        self.folder = str(Path(folder).absolute())
        self.steps = 0
        self.restored = False
        self._save_every = save_every
        self._parts = dict(parts)
        self._saved = -1
        state = _state()  # an error from now on is told
        self._load()
        state.attend()  # waited for from now on, not from its first step, nor while it still loads
        slot = state.slot
        if slot and self.restored:
            loader = next(filter(_is_loader, self._parts.values()), None)
            at = {"epoch": 0, "position": 0} if loader is None else loader.state_dict()
            slot.resume(self.steps, int(at["epoch"]), int(at["position"]))

    def _load(self) -> None:
        try:
            like = {name: _plain(part.state_dict()) for name, part in self._parts.items()}
            tree = checkpoint.load(self.folder, like={"parts": like}).tree
        except CheckpointNotFound:
            return
        names, expected = set(tree["parts"]), set(self._parts)
        if names != expected:
            raise ValueError(
                f"{self.folder}: the checkpoint has the parts {sorted(names)}, expected {sorted(expected)}"
            )
        for name, part in self._parts.items():
            part.load_state_dict(tree["parts"][name])
        self.steps = self._saved = int(tree["steps"])
        self.restored = True

    def step(self) -> bool:
        """To be called by all ranks after each step: saves when it is time to.

        Returns:
            True: everything is saved and on the disk; leave now.
        """
        self.steps += 1
        slot = _state().slot
        for part in self._parts.values() if slot else ():
            # Where this rank's loader stands, for the run's manifest.
            if slot and _is_loader(part):
                state = part.state_dict()
                slot.epoch, slot.position = int(state["epoch"]), int(state["position"])
                slot.order_hash, slot.seed = int(state["order_hash"], 16), int(state["seed"])
                slot.steps = self.steps
        stop = should_stop()
        if stop or (self._save_every is not None and self.steps % self._save_every == 0):
            self.save()
        if stop:
            checkpoint.wait()
            if slot:
                slot.saved = self.steps
        return stop

    def save(self) -> None:
        """Saves now, in the background; to be called by all ranks at the same step."""
        if self._saved == self.steps:
            return
        parts = {name: _plain(part.state_dict()) for name, part in self._parts.items()}
        checkpoint.save({"steps": self.steps, "parts": parts}, self.folder, self.steps)
        self._saved = self.steps


def _is_loader(part: Any) -> bool:
    return hasattr(part, "order_hash") and hasattr(part, "position")


def _plain(value: Any) -> Any:
    """Mappings as dicts: torch's are ordered ones."""
    if hasattr(value, "items"):
        return {key: _plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(part) for part in value)
    return value

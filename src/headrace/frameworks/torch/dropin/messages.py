"""What travels between the process that takes batches and its workers, beside torch's own tuples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.frameworks.torch.dropin.packing import Packed

if TYPE_CHECKING:
    from headrace.frameworks.torch.dropin.arena import Arena
    from headrace.frameworks.torch.dropin.position import DataState
    from headrace.frameworks.torch.dropin.randomness import Snapshot
    from headrace.plane.read_ahead import ReadAheadOptions, SharedLog

__all__ = ["Answer", "Begun", "Coming", "Mark", "Reading", "WorkerPlan"]


class Coming(NamedTuple):
    """To a worker: indices that it will be asked for later. Nothing depends on it but speed."""

    batches: list[list[Any]]


class Mark(NamedTuple):
    """Where a worker stands after a batch: enough to go on from there."""

    snapshot: Snapshot | None
    """The generators' states; None: as in the last mark."""

    data: DataState | None = None
    """Where the data set stands, if it has a state of its own."""

    under_way: bool = True
    """Within an epoch; otherwise between two."""


class Begun(NamedTuple):
    """In the place of a task's number: the worker has begun, or failed to."""

    worker: int


class Answer(NamedTuple):
    """From a worker: a batch, and what else there is to say."""

    worker: int
    idx: Any
    """Torch's number of the task."""

    data: Any
    """The batch, packed (`Packed`) or as it is."""

    mark: Mark | None
    """Where the worker stands, now and then."""

    note: str | None
    """What the worker does to be fast, when that changed."""

    made: tuple[float, ...] | None = None
    """When and how it was made: the fields of `timing.Made`."""

    def message(self) -> tuple[Any, ...]:
        """Return it as a bare tuple: pickling a class by its name costs more than the rest."""
        if type(self.data) is Packed:
            return (self.worker, self.idx, None, self.mark, self.note, self.made, *self.data)
        return tuple(self)

    @classmethod
    def of(cls, message: Any) -> Answer | None:
        """Return what `message()` was made of; None: it is a message of torch's own."""
        if len(message) == _PACKED_FIELDS:
            worker, idx, _, mark, note, made, *packed = message
            return cls(worker, idx, Packed(*packed), mark, note, made)
        return cls(*message) if len(message) == _FIELDS else None


_FIELDS = len(Answer._fields)
_PACKED_FIELDS = _FIELDS + len(Packed._fields)


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read ahead, and what all who do it learn."""

    options: ReadAheadOptions
    log: SharedLog | None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker is told when it starts."""

    worker: int
    arena: Arena | None
    """Where its batches go; None: as torch sends them."""

    reading: Reading | None
    """How files are read ahead, None for not at all."""

    mark: Mark | None
    """Where to go on from, instead of from torch's seeds."""

    every: int
    """A data set that has a state of its own is asked for it after so many tasks; 0: at ends only."""

    announced: bool
    """The consumer waits until the worker has begun."""

    replay: list[Any]
    """Tasks done after the mark whose batches were delivered: done again, for the generators' and
    iterators' sake, and not sent."""

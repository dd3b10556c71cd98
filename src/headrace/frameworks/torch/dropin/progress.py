"""Progress: where an epoch stands, counted when batches are delivered, and as a plain value.

What was drawn from the sampler but not delivered is kept as it is, so that the rest of the epoch
does not depend on how far ahead anything had read. For each worker there is a mark (the states of
its generators after some batch) and the batches that were delivered since: a resumed worker goes
on from the mark and does those again, unseen.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from headrace.errors import StateMismatch
from headrace.frameworks.torch.dropin.position import DataState, Drawn
from headrace.frameworks.torch.dropin.watching import without_storage
from headrace.plane import LoaderStats

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.frameworks.torch.dropin.pictures import NativePictures
    from headrace.frameworks.torch.dropin.position import DataPosition, SamplerPosition
    from headrace.frameworks.torch.dropin.watching import FileReading, Watcher
    from headrace.frameworks.torch.dropin.workers import WorkerContext


class Snapshot(NamedTuple):
    """States of the three global generators."""

    torch_state: bytes
    python_state: tuple[Any, ...]
    numpy_state: tuple[Any, ...]

    @classmethod
    def take(cls) -> Snapshot:
        """Return the states as they are in this process now."""
        state = np.random.get_state()  # noqa: NPY002 - users draw there
        # A dict if the user put another bit generator there, which is then the user's to keep.
        legacy = () if isinstance(state, dict) else (np.asarray(state[1]).tobytes(), *state[2:])
        return cls(torch.get_rng_state().numpy().tobytes(), random.getstate(), legacy)

    def restore(self) -> None:
        """Set the states in this process."""
        torch.set_rng_state(_tensor(self.torch_state))
        random.setstate(self.python_state)
        if self.numpy_state:
            keys, position, has_gauss, gauss = self.numpy_state
            np.random.set_state(  # noqa: NPY002
                ("MT19937", np.frombuffer(keys, np.uint32), position, has_gauss, gauss)
            )

    def plain(self) -> dict[str, Any]:
        """Return the states as text and numbers."""
        version, words, gauss = self.python_state
        return {
            "torch": _text(self.torch_state),
            "python": [version, _text(np.asarray(words, np.uint32).tobytes()), gauss],
            "numpy": [_text(self.numpy_state[0]), *self.numpy_state[1:]]
            if self.numpy_state
            else [],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot that `plain` was made of.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        version, words, gauss = plain["python"]
        legacy = plain["numpy"]
        python_words = tuple(np.frombuffer(_binary(words), np.uint32).tolist())
        return cls(
            _binary(plain["torch"]),
            (version, python_words, gauss),
            (_binary(legacy[0]), *legacy[1:]) if legacy else (),
        )


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Put the global generators back afterwards to where they were."""
    before = Snapshot.take()
    try:
        yield
    finally:
        before.restore()


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _save(generator: Any) -> dict[str, Any]:
    kind = type(generator).__name__
    if isinstance(generator, torch.Generator):
        return {"kind": kind, "state": _text(generator.get_state().numpy().tobytes())}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"kind": kind, "state": [version, list(words), gauss]}
    if isinstance(generator, np.random.Generator):
        return {"kind": kind, "state": _listed(generator.bit_generator.state)}
    return {"kind": kind, "state": _listed(generator.get_state(legacy=False))}


def _load_all(generators: list[Any], states: list[dict[str, Any]]) -> None:
    if len(generators) != len(states):
        raise ValueError(f"{len(states)} generators were saved, {len(generators)} are here")
    for generator, state in zip(generators, states, strict=True):
        _load(generator, state)


def _load(generator: Any, state: Mapping[str, Any]) -> None:
    if state["kind"] != type(generator).__name__:
        raise ValueError(f"a {state['kind']} was saved where a {type(generator).__name__} is")
    value = state["state"]
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(_binary(value)))
    elif isinstance(generator, random.Random):
        version, words, gauss = value
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = value
    else:
        generator.set_state(value)


def _listed(value: Any) -> Any:
    """Arrays as lists; numpy takes them back."""
    if isinstance(value, dict):
        return {name: _listed(one) for name, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _binary(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class WorkerMark(NamedTuple):
    """Where a worker stands after a batch: enough to go on from there."""

    snapshot: Snapshot | None
    """The generators' states; None: as in the last mark."""

    data: DataState | None = None
    """Where the data set stands, if it has a state of its own."""

    under_way: bool = True
    """Within an epoch; otherwise between two."""


FORMAT = "headrace.torch.DataLoader/2"
FORMAT_BEFORE = "headrace.torch.DataLoader/1"
"""Of headrace 0.1: one state for a data set and its iterator, none of samplers, none between epochs."""

_EPOCH_NAMES = ("epoch", "_epoch")


@dataclass(slots=True)
class Beginning:
    """What an epoch's order was drawn from: the main process before its iterator was made."""

    randomness: Snapshot
    generators: list[dict[str, Any]]
    epochs: list[dict[str, int]]

    @classmethod
    def take(cls, loader: Any) -> Beginning:
        """Return it, at the beginning of an epoch or between two."""
        return cls(
            Snapshot.take(),
            [_save(generator) for generator in _generators(loader)],
            [
                {name: vars(one)[name] for name in _EPOCH_NAMES if _counts(one, name)}
                for one in _samplers(loader)
            ],
        )

    def restore(self, loader: Any, *, everything: bool, compared: bool = False) -> None:
        """Bring samplers and their generators back.

        Args:
            loader: has them.
            everything: the global generators, too.
            compared: what is drawn will be, so generators that are not there do no harm.

        Raises:
            StateMismatch: the loader has other generators.
        """
        if everything:
            self.randomness.restore()
        for one, counts in zip(_samplers(loader), self.epochs, strict=False):
            vars(one).update({n: v for n, v in counts.items() if _counts(one, n)})
        try:
            _load_all(_generators(loader), self.generators)
        except (KeyError, TypeError, ValueError) as e:
            # A sampler may make its generator when it is first drawn from, as Accelerate's does.
            if compared:
                return
            raise StateMismatch(
                f"the state's random generators do not fit this loader: {e}.",
                next_step="Give the loader the same sampler and generator as in the run that saved it.",
            ) from e

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "randomness": self.randomness.plain(),
            "generators": self.generators,
            "epochs": self.epochs,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Beginning:
        """Return what `plain` was made of."""
        return cls(
            Snapshot.of(plain["randomness"]), list(plain["generators"]), list(plain["epochs"])
        )


@dataclass(slots=True)
class Track:
    """Where one worker stands."""

    delivered: int = 0
    """Batches of this epoch."""

    snapshot: Snapshot | None = None
    """Its generators at the mark; None: as torch seeds them."""

    latest: Snapshot | None = None
    """Its generators at the latest mark of any kind: what a mark without them means."""

    data: DataState | None = None
    """Where the data set stood at the mark, if it has a state of its own."""

    replay: list[Any] = field(default_factory=list)
    """Tasks whose batches were delivered since the mark."""

    under_way: bool = True
    """The mark was made within this epoch; otherwise before it."""

    ended: bool = False
    """The worker's iterable has given its last sample."""

    content: int | None = 0
    """Sum over the batches of `replay`, see `content_of`; None: an older state does not say."""

    def advance(
        self, index: Any, mark: WorkerMark | None, content: int, *, map_style: bool
    ) -> None:
        """Count a batch that was delivered."""
        self.delivered += 1
        if mark is not None and mark.snapshot is not None:
            self.latest = mark.snapshot
        if mark is not None and (map_style or mark.data is not None):
            self.snapshot, self.data = self.latest, mark.data
            self.replay, self.under_way, self.content = [], True, 0
        else:
            self.replay.append(index)
            if self.content is not None:
                self.content += content

    def end(self, mark: WorkerMark | None) -> None:
        """The worker's iterable ended: all stays as it is until the next epoch."""
        self.ended = True
        if mark is not None and mark.snapshot is not None:
            self.latest = mark.snapshot
        if mark is not None and mark.data is not None:
            self.snapshot, self.data = self.latest, mark.data
            self.replay, self.under_way, self.content = [], True, 0

    def between_epochs(self, *, map_style: bool) -> Track:
        """Return where the worker begins the next epoch."""
        if map_style:
            return Track(0, self.snapshot, self.latest, self.data, self.replay, under_way=False)
        return Track(0, self.latest, self.latest, self.data, under_way=False)

    def begin(self, mark: WorkerMark | None) -> None:
        """Begin an epoch where the last one left the worker, at the mark."""
        if mark is not None:
            self.latest = mark.snapshot
        self.delivered, self.replay, self.ended, self.under_way = 0, [], False, False
        self.content = 0
        self.snapshot, self.data = self.latest, None if mark is None else mark.data

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        data = (self.data or DataState()).plain()
        data["fetcher_state"]["fetcher_ended"] |= self.ended
        return {
            "delivered": self.delivered,
            "randomness": None if self.snapshot is None else self.snapshot.plain(),
            "replay": list(self.replay),
            "content": self.content,
            "under_way": self.under_way,
            **data,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any], *, under_way: bool) -> Track:
        """Return what `plain` was made of; `under_way`: what it means if it does not say."""
        snapshot = None if plain["randomness"] is None else Snapshot.of(plain["randomness"])
        return cls(
            plain["delivered"], snapshot, snapshot, DataState.of(plain), list(plain["replay"]),
            bool(plain.get("under_way", under_way)), content=plain.get("content"),
        )  # fmt: skip

    def beginning(self) -> tuple[WorkerMark | None, list[Any], int | None]:
        """Return what a worker needs to go on from here: a mark, what to do again, and what that is to hold."""
        content = None if self.data is not None else self.content
        if self.snapshot is None and self.data is None:
            return None, list(self.replay), content
        return WorkerMark(self.snapshot, self.data, self.under_way), list(self.replay), content


@dataclass(slots=True)
class Progress:
    """Where an epoch stands."""

    beginning: Beginning
    map_style: bool
    tracks: list[Track]
    base_seed: int | None = None
    fresh_workers: bool = True
    """Whether the workers were started for this epoch, which drew their seed."""

    delivered: int = 0
    turn: int = 0
    """The worker whose batch comes next."""

    pending: dict[int, Any] = field(default_factory=dict)
    """Tasks drawn and not delivered, by torch's number."""

    finished: bool = False

    samplers: SamplerPosition | None = None
    """Where the samplers stand, if they may have a state of their own."""

    loaded: int | None = None
    """Batches that had been delivered when a state was loaded for this epoch."""

    drawn: Drawn = field(default_factory=Drawn)
    """All that was drawn, delivered or pending."""

    def deliver(self, idx: int, worker: int, mark: WorkerMark | None, content: int) -> None:
        """Count a batch that is handed to the user; `content`: see `content_of`, 0 for map-style data."""
        index = self.pending.pop(idx, None)
        self.delivered += 1
        if self.tracks:
            self.turn = (worker + 1) % len(self.tracks)
            self.tracks[worker].advance(index, mark, content, map_style=self.map_style)

    def plain(self, *, under_way: bool) -> dict[str, Any]:
        """Return it as plain values."""
        workers = {f"worker_{i}": track.plain() for i, track in enumerate(self.tracks)}
        return {
            "format": FORMAT,
            "under_way": under_way,
            "map_style": self.map_style,
            "num_workers": len(self.tracks),
            "beginning": self.beginning.plain(),
            "base_seed": self.base_seed,
            "fresh_workers": self.fresh_workers,
            "delivered": self.delivered,
            "drawn": self.drawn.plain(),
            "turn": self.turn,
            "pending": [self.pending[idx] for idx in sorted(self.pending)]
            if self.map_style
            else [],
            "sampler": None if self.samplers is None else self.samplers.plain(),
            "_snapshot": {"_worker_snapshots": workers},
        }


@dataclass(slots=True)
class Resumption:
    """A state that was loaded and waits for the next epoch's iterator."""

    under_way: bool
    progress: Progress
    in_process: Snapshot | None
    """The generators of a loader without workers, at the moment of the state."""

    data: DataState | None
    """Where the data set of this process stands: of a loader without workers, or between epochs."""

    sampler: Mapping[str, Any] | None
    """Where the samplers stand, if they have a state of their own."""

    state: Mapping[str, Any]
    """The state itself: what is said again until a batch was delivered."""

    def begin_as(self, rank: int, world_size: int, *, in_order: bool) -> None:
        """Say which rank goes on. Lightning and Accelerate keep the state of one rank, and load it on all.

        Ranks stand at the same batch, and each draws its own: what the saving rank had drawn is no other's.

        Raises:
            StateMismatch: batches came out of order, so that a count does not say which.
        """
        saved = self.state.get("rank", rank), self.state.get("world_size", world_size)
        if saved == (rank, world_size) or saved[1] != world_size or not self.under_way:
            return  # where world sizes differ, what is drawn again will not be the same
        if not in_order:
            raise StateMismatch(
                f"the state is of rank {saved[0]}, this is rank {rank}, and in_order is False: how many "
                "batches another rank was given does not say which this one was.",
                next_step="Save each rank's state, or begin the epoch anew without it.",
            )
        self.progress.pending, self.progress.drawn = {}, Drawn(-1)
        for track in self.progress.tracks:
            track.content = None

    @property
    def compared(self) -> bool:
        """Whether what samplers draw again is compared with what they drew before."""
        return self.under_way and self.progress.map_style and self.progress.drawn.samples > 0

    @property
    def has_data(self) -> bool:
        """Whether there are states that belong to this number of workers alone."""
        tracks = any(track.data is not None for track in self.progress.tracks)
        return tracks or (self.under_way and self.data is not None)


def resumption_of(state: Mapping[str, Any]) -> Resumption:
    """Return what a state says.

    Raises:
        StateMismatch: it is no state of this loader.
    """
    if state.get("format") not in {FORMAT, FORMAT_BEFORE}:
        theirs = "_num_yielded" in state or "_steps_since_snapshot" in state
        raise StateMismatch(
            f"the state's format is {state.get('format')!r}, expected {FORMAT!r}"
            + (": it is of torchdata's StatefulDataLoader." if theirs else "."),
            next_step="Finish the epoch with the loader that saved it, and change loaders between epochs."
            if theirs
            else "Load a state that headrace.torch.DataLoader.state_dict() returned.",
        )
    try:
        under_way = bool(state["under_way"])
        if state["format"] == FORMAT:
            by_name = state["_snapshot"]["_worker_snapshots"]
            workers = [by_name[f"worker_{i}"] for i in range(len(by_name))]
        else:
            workers = state["workers"]
        progress = Progress(
            Beginning.of(state["beginning"]),
            bool(state["map_style"]),
            [Track.of(one, under_way=under_way) for one in workers],
            state["base_seed"],
            bool(state["fresh_workers"]),
            int(state["delivered"]),
            int(state["turn"]),
            dict(enumerate(state["pending"])),
            loaded=int(state["delivered"]),
            drawn=Drawn.of(state["drawn"]) if "drawn" in state else Drawn(-1),
        )
        in_process = state.get("in_process")
        return Resumption(
            under_way,
            progress,
            None if in_process is None else Snapshot.of(in_process),
            DataState.of(state),
            state.get("sampler"),
            copy.deepcopy(state),
        )
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise StateMismatch(
            f"the state is damaged: {type(e).__name__}: {e}.",
            next_step="Load the checkpoint again, or begin the epoch anew without the state.",
        ) from e


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a loader, outermost first, each once."""
    samplers: list[Any] = []
    waiting = [loader.batch_sampler, loader.sampler]
    while waiting and len(samplers) < 8:
        one = waiting.pop(0)
        if one is None or any(one is other for other in samplers) or not hasattr(one, "__dict__"):
            continue
        samplers.append(one)
        waiting += [vars(one).get("batch_sampler"), vars(one).get("sampler")]
    return samplers


def _counts(sampler: Any, name: str) -> bool:
    return type(vars(sampler).get(name)) is int


_SAMPLER_DEPTH = 4
"""Samplers within samplers that are searched for generators: batch sampler, shard, sampler, source."""


def _generators(loader: Any) -> list[Any]:
    """The generators that a loader and its samplers hold, each once, in an order that depends on code alone.

    Not those of data sets.
    """
    generators: list[Any] = []
    seen: set[int] = set()

    def look(thing: Any, depth: int) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, _GENERATORS):
            generators.append(thing)
        elif isinstance(thing, torch.utils.data.Sampler) and depth < _SAMPLER_DEPTH:
            held = vars(thing)
            for name in sorted(held):
                look(held[name], depth + 1)

    for root in (loader.generator, *_samplers(loader)):
        look(root, 0)
    return generators


@dataclass
class Epochs:
    """What a loader keeps beside what torch's has: in one attribute, as names are its subclasses' to give."""

    decode: Literal["native"] | None
    pictures: NativePictures | None
    arena_bytes: int
    ahead_bytes: int | None
    resumption: Resumption | None = None
    """A state that was loaded: the next epoch goes on from it."""

    stats: LoaderStats = field(default_factory=LoaderStats)
    epochs_begun: int = 0
    progress: Progress | None = None
    position: DataPosition | None = None
    placed: DataPosition | None = None
    """What put the data set where the last epoch went on."""
    starting: Resumption | None = None
    loaded: Resumption | None = None
    reading: FileReading | None = None
    watcher: Watcher | None = None
    context: WorkerContext | None = None
    starting_s: float = 0.0
    """How long the next batch's epoch took to begin: `iter()`, and the end of the epoch before."""
    explained: bool = False
    cached_first: bool = False
    """The files looked at lay in the page cache before the first epoch had read them."""

    def begin_epoch(self) -> None:
        """Count it, and remember what the first one showed."""
        if self.epochs_begun == 1:
            self.cached_first = bool(self.without_storage)
        self.epochs_begun += 1

    @property
    def without_storage(self) -> str:
        """What shows that samples waited for no storage; '': nothing does."""
        if self.watcher is not None:
            return without_storage([self.watcher.state], first=True)
        notes = self.context.results.notes.values() if self.context is not None else ()
        return without_storage(notes, first=self.epochs_begun == 1 or self.cached_first)

    def anew(self) -> Epochs:
        """For a copy of the loader, which nobody has iterated over."""
        return Epochs(
            self.decode, self.pictures, self.arena_bytes, self.ahead_bytes, self.resumption
        )


def kept() -> Any:
    """A loader's attribute of this name: the field of its `Epochs`, unless a subclass has its own."""
    return _Kept()


class _Kept:
    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        return self if loader is None else getattr(loader._headrace, self._name)  # noqa: SLF001

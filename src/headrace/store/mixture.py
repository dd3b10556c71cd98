"""Mixture: several stores as one, in proportions. Made by `mix`.

A mixture is a `Store`: the segments of its sources, one source behind the other. So whatever reads stores reads
mixtures, at the same speed: one reader, one plan for all samples of a batch, wherever they come from. Which
sample comes when is an order over it, `headrace.order.Mixed`, which `order_over` makes from the proportions
that are kept here.

Nothing is copied or opened twice: sources that were given open stay the caller's to close.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate
from math import gcd, isfinite, lcm
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from headrace.errors import OrderError, StoreError
from headrace.io.objects.location import shown
from headrace.order import Mixed, Subset
from headrace.order.hash import Purpose, derive_key
from headrace.order.mixed import PARTS_MAX, SOURCES_MAX, Stop
from headrace.order.order import SEED_MAX, checked
from headrace.store.manifest import Manifest
from headrace.store.opening import open_store
from headrace.store.store import Store

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    from headrace.order import Order

    Source = Store | str | os.PathLike[str]
    """An open store, or the path of one (or of a folder, a tar, ...)."""

Batches = Literal["mixed", "one source"]

NAME_CHARACTERS_MAX = 64


def whole_parts(proportions: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Return proportions as whole numbers in lowest terms: 0.7 and 0.3 are 7 and 3.

    Decimals are taken as they are written. Where the exact numbers would sum to more than 2^30, they are
    rounded to parts of 2^30. Raises OrderError if one is negative, not finite, or too small beside the
    others, or none is above 0.
    """
    exact = []
    for value in proportions:
        if isinstance(value, bool) or not isfinite(value) or value < 0:
            raise OrderError(f"a proportion is {value!r}, expected a finite number, at least 0")
        number = value if isinstance(value, (int, Fraction)) else Fraction(repr(float(value)))
        exact.append(Fraction(number))
    total = sum(exact, Fraction(0))
    if total == 0:
        raise OrderError(f"all {len(exact)} proportions are 0, expected at least one above 0")
    scale = lcm(*(each.denominator for each in exact))
    parts = [int(each * scale) for each in exact]
    common = gcd(*parts)
    if sum(parts) // common <= PARTS_MAX:
        return tuple(part // common for part in parts)
    shares = [each * PARTS_MAX / total for each in exact]
    parts = [int(share) for share in shares]
    behind = sorted(range(len(parts)), key=lambda i: (parts[i] - shares[i], i))
    for i in behind[: PARTS_MAX - sum(parts)]:
        parts[i] += 1
    for value, part in zip(exact, parts, strict=True):
        if value and not part:
            raise OrderError(
                f"a proportion is {float(value / total):.3g} of all, expected 0 or at least 1e-9"
            )
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportions:
    """What of a mixture comes when, beside its sources."""

    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """Proportions from a position of the epoch on, see `Mixed.phases`; by samples, where they are sizes."""

    temperature: float | None = None
    """Proportions are the sources' sizes to the power of 1 / temperature: samples, or windows of tokens."""

    seed: int = 0
    stop: Stop | int = "first"
    repeats: tuple[int, ...] = ()
    batches: Batches = "mixed"
    orders: Mapping[str, Any] = field(default_factory=dict)
    """Names of orders, or orders, of sources whose own order is not the loader's."""


def mix(
    sources: Mapping[str, Source | tuple[Source, float]],
    *,
    seed: int = 0,
    temperature: float | None = None,
    schedule: Sequence[tuple[int, Mapping[str, float]]] | None = None,
    global_batch: int | None = None,
    stop: Stop | Literal["counts"] | int = "first",
    repeats: int | Mapping[str, int] = 1,
    batches: Batches = "mixed",
    orders: Mapping[str, str | Order] | None = None,
) -> Mixture:
    """Mixes data sets in proportions: what `headrace.loader` takes in place of a store.

    After any number of samples, each source has had its share of them, to about one sample. Each source's
    samples come in an order of their own, with epochs of their own: all come once before any comes again.

    Args:
        sources: by name, pairs of an open store (or a path) and its proportion: `{"web": (web, 0.7), "code":
            (code, 0.3)}`. Proportions need not sum to 1, and may be 0. Without them (`{"web": web, "code":
            code}`) they are the numbers of samples, or as `temperature` or `schedule` says.
        seed: another seed, another order of each source's samples. It depends on the source's name, too, and
            on nothing else of the mixture.
        temperature: proportions are sizes to the power of 1 / temperature: 1 is as the data is, more is more
            even.
        schedule: a curriculum: pairs of a step and the proportions from there on, by name, the first from step
            0; sources that are not named get 0. Steps are counted within the epoch.
        global_batch: with `schedule`: samples of a step, of all ranks together. It is part of the order: a run
            that goes on with other ranks changes its proportions at the same samples.
        stop: when an epoch of the mixture ends: when the `first` source has given all of its samples, or when
            the `last` has (the others begin again meanwhile); `never`; after the `counts` that the proportions
            are; or after a number of samples.
        repeats: how often a source's samples come until it has given all; of each source, or by name.
        batches: `mixed`, or `one source`: all samples of a rank's batch come from one.
        orders: the own order of some sources, by name: as the loader's `order`, or an `Order` over its samples.

    Raises:
        OrderError: proportions, schedule or another number do not fit.
        StoreError: sources lie on remote storage with different options.
        ValueError: a name is not known, or an option is not.
        StoreNotFound, CorruptStore, SourceError, VolumeError: a path cannot be opened, as for `headrace.open`.
    """
    names, given, weights = _taken_apart(sources)
    if batches not in get_args(Batches):
        raise ValueError(f"batches is {batches!r}, expected one of {get_args(Batches)}")
    _known("orders", orders or {}, names)
    if not isinstance(repeats, int):
        _known("repeats", repeats, names)
        repeats_each = tuple(repeats.get(name, 1) for name in names)
    else:
        repeats_each = (repeats,) * len(names)
    if sum(each is not None for each in (weights, temperature, schedule)) > 1:
        raise ValueError(
            "proportions are given twice: give them with the sources, a temperature or a schedule"
        )
    opened: list[Store] = []
    try:
        stores = []
        for source in given:
            if not isinstance(source, Store):
                source = open_store(source)  # noqa: PLW2901 - the same, open
                opened.append(source)
            stores.append(source)
        if schedule is not None:
            phases = _phases(schedule, global_batch, names)
        else:
            phases = ((0, whole_parts(weights or _even(list(map(len, stores)), temperature))),)
        if stop == "counts":
            stop = _sum_of_counts(weights, phases[0][1])
        proportions = Proportions(
            phases=phases, temperature=None if weights or schedule else temperature or 1.0,
            seed=checked("seed", seed, 0, SEED_MAX), stop=stop,
            repeats=repeats_each, batches=batches, orders=dict(orders or {}),
        )  # fmt: skip
        return Mixture(dict(zip(names, stores, strict=True)), proportions, opened)
    except BaseException:
        for store in opened:
            store.close()
        raise


class Mixture(Store):
    """Several stores as one, in proportions; a `Store` like any other, with the samples of all its sources.

    Indices, names and labels count through the sources, in their order: `locate` says whose an index is. Labels
    are each source's own numbers. A name that several sources have is found in the first of them.

    Attributes:
        sources: the open stores, by name.
        proportions: what comes when.
    """

    def __init__(
        self, sources: dict[str, Store], proportions: Proportions, opened: Sequence[Store] = ()
    ) -> None:
        segments, base = [], 0
        for store in sources.values():
            segments += [replace(s, base=base + s.base) for s in store.segments]
            base += len(store)
        entries = tuple(s.entry for s in segments)
        prints = json.dumps([[name, store.fingerprint] for name, store in sources.items()])
        fingerprint = blake2b(prints.encode(), digest_size=16).hexdigest()
        self._own_engine, engine = _joined_engine(sources)
        super().__init__(
            f"mix://{'+'.join(sources)}", Manifest("0" * 32, fingerprint, entries), segments,
            direct=b"", objects=engine,
        )  # fmt: skip
        self.sources = sources
        self.proportions = proportions
        self._opened = list(opened)
        self._names = np.array(list(sources), object)
        self._starts = np.array([0, *accumulate(map(len, sources.values()))][:-1], np.int64)

    def __repr__(self) -> str:
        parts = self.proportions.phases[0][1]
        shares = ", ".join(
            f"{name} {part / sum(parts):.3g}"
            for name, part in zip(self.sources, parts, strict=True)
        )
        return f"Mixture({shares}; {len(self):,} samples{', closed' if self.closed else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Mixture, (self.sources, self.proportions)

    @property
    def mixture(self) -> Mixture:
        """Itself."""
        return self

    def of(self, stores: Sequence[Store]) -> Mixture:
        """The same mixture of other snapshots of its sources, in their order; those stay their owner's."""
        return Mixture(dict(zip(self.sources, stores, strict=True)), self.proportions)

    @property
    def seed(self) -> int:
        """Of all its sources' orders."""
        return self.proportions.seed

    def seed_of(self, name: str) -> int:
        """The seed of a source's own order: it depends on the mixture's seed and the name alone."""
        number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        return derive_key(self.seed, Purpose.SOURCES, number)

    def order_over(self, orders: Sequence[Order], batch_size: int = 1) -> Mixed:
        """The order of the mixture.

        Args:
            orders: of each source's samples, or of its windows of tokens, in the order of `sources`.
            batch_size: samples of a rank's batch, which comes from one source where that was asked for.

        Raises:
            OrderError: proportions and batches do not fit.
        """
        chosen = self.proportions
        phases = chosen.phases
        if chosen.temperature is not None:
            sizes = [o.length if isinstance(o, Subset) else o.samples for o in orders]
            phases = ((0, whole_parts(_even(sizes, chosen.temperature))),)
        return Mixed(
            tuple(orders), phases, seed=chosen.seed, stop=chosen.stop, repeats=chosen.repeats,
            block=batch_size if chosen.batches == "one source" else 1,
        )  # fmt: skip

    def source_names(self, indices: npt.ArrayLike) -> list[str]:
        """The name of the source of each index."""
        names: list[str] = self._names[self._numbers(indices)].tolist()
        return names

    def source_indices(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Each index within its source; int64, shaped like `indices`."""
        own: npt.NDArray[np.int64] = (
            np.asarray(indices, np.int64) - self._starts[self._numbers(indices)]
        )
        return own

    def locate(self, index: int) -> tuple[str, int]:
        """The source of a sample, and its index there."""
        (at,) = np.array([self.index_of(index)])
        return self.source_names([at])[0], int(self.source_indices([at])[0])

    def check_part(self, part: str) -> None:
        """Looks whether all sources have this part.

        Raises:
            ValueError: one has none of its name, and its samples could not be decoded.
        """
        for name, store in self.sources.items():
            if part not in store.parts:
                raise ValueError(
                    f"the part {part!r} is decoded, and samples of the source {name!r} have {store.parts}: "
                    "pack sources so that what is decoded has one name"
                )

    @property
    def classes(self) -> list[str] | None:
        """The names of labels 0, 1, ... where all sources have the same, or None."""
        first, *others = [store.classes for store in self.sources.values()]
        return first if all(classes == first for classes in others) else None

    def readers(self) -> int:
        """Who may read all of it, see `Store.readers`: who may read each source."""
        mode = 0o777
        for store in self.sources.values():
            mode &= store.readers()
        return mode

    def close(self) -> None:
        """Closes what the mixture opened itself; stores that were given open stay open."""
        self._closed = True
        self._catalog = None
        if self._own_engine is not None:
            self._own_engine.close()
        for store in self._opened:
            store.close()

    def _check_open(self) -> None:
        super()._check_open()
        for name, store in self.sources.items():
            if store.closed:
                raise ValueError(f"source {name!r} of the mixture, {shown(store.path)}, is closed")

    def _numbers(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._starts, np.asarray(indices, np.int64), "right") - 1


def _taken_apart(
    sources: Mapping[str, Source | tuple[Source, float]],
) -> tuple[list[str], list[Source], list[float] | None]:
    """Names, sources and proportions; None where there are none."""
    form = "mix({'web': ('web.hr', 0.7), 'code': ('code.hr', 0.3)})"
    if not isinstance(sources, Mapping):
        raise TypeError(
            f"sources is of type {type(sources).__name__}, expected a dict of sources by name: {form}"
        )
    if not 1 <= len(sources) <= SOURCES_MAX:
        raise OrderError(f"a mixture has {len(sources)} sources, expected 1 to {SOURCES_MAX:,}")
    given: list[Source] = []
    weights: list[float] = []
    for name, value in sources.items():
        if not name.isprintable() or not 0 < len(name) <= NAME_CHARACTERS_MAX:
            raise ValueError(
                f"a source is named {name[:80]!r}, expected 1 to {NAME_CHARACTERS_MAX} printable characters"
            )
        if isinstance(value, (tuple, list)):
            if len(value) != 2 or not isinstance(value[1], (int, float, np.number)):
                raise TypeError(
                    f"the source {name!r} is {value!r:.100}, expected a store, or a pair of one and its "
                    f"proportion: {form}"
                )
            given.append(value[0])
            weights.append(value[1])
        else:
            given.append(value)
    if len(weights) not in {0, len(given)}:
        raise ValueError(
            f"{len(weights)} of {len(given)} sources have a proportion, expected all or none"
        )
    return list(sources), given, weights or None


def _known(what: str, by_name: Mapping[str, object], names: Sequence[str]) -> None:
    for name in by_name:
        if name not in names:
            raise ValueError(f"{what} names the source {name!r}, the mixture has {names}")


def _even(sizes: Sequence[int], temperature: float | None) -> Sequence[float]:
    if temperature is None or temperature == 1:
        return sizes
    if not temperature > 0:
        raise OrderError(f"temperature is {temperature}, expected more than 0")
    largest = max(sizes)
    return [(size / largest) ** (1 / temperature) for size in sizes]


def _phases(
    schedule: Sequence[tuple[int, Mapping[str, float]]],
    global_batch: int | None,
    names: Sequence[str],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if global_batch is None or global_batch < 1:
        raise OrderError(
            f"a schedule counts steps and global_batch is {global_batch}, expected the samples of a step",
            next_step="Give global_batch: samples that all ranks together take at a step.",
        )
    phases = []
    for step, by_name in schedule:
        _known("the schedule", by_name, names)
        parts = whole_parts([by_name.get(name, 0) for name in names])
        phases.append((step * global_batch, parts))
    return tuple(phases)


def _sum_of_counts(weights: Sequence[float] | None, parts: tuple[int, ...]) -> int:
    """How long an epoch of these counts is; parts are the counts in lowest terms."""
    total = sum(weights or ())
    if any(int(count) != count for count in weights or ()) or not total:
        raise OrderError(
            f"stop is 'counts' and the proportions are {weights}, expected whole numbers"
        )
    if total % sum(parts):
        raise OrderError(
            f"stop is 'counts' and the counts sum to {total:,.0f}, expected at most 2^30 in lowest terms",
            next_step="Round the counts, to thousands for example.",
        )
    return int(total)


def _joined_engine(sources: Mapping[str, Store]) -> tuple[Any, Any]:
    """What reads the sources' remote volumes: an engine made for the mixture, or None; and which it is."""
    engines = list({id(s.objects): s.objects for s in sources.values() if s.objects}.values())
    if len(engines) < 2:
        return None, engines[0] if engines else None
    from headrace.io.objects.engine import ObjectEngine

    alike = [
        engine
        for engine in engines
        if isinstance(engine, ObjectEngine) and engine.storage_options == engines[0].storage_options
    ]
    if len(alike) < len(engines):
        raise StoreError(
            "The mixture's sources lie on remote storage of several kinds, or with different "
            "storage_options: one reader reads them all.",
            next_step="Open them with the same storage_options, or copy one: headrace.pack().",
        )
    joined = alike[0].joined_with(alike[1:])
    return joined, joined

"""The facade: the one place that joins stores, orders and the data plane."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.base.job import RankDecision
from headrace.config import (
    BUDGET_BYTES_MIN,
    TierOptions,
    reader_options,
    tier_options,
    trace_folder,
)
from headrace.control import PassEnded, Plane
from headrace.control.knob_limits import memory_policy
from headrace.order import (
    Balanced,
    Blocked,
    LabelMix,
    Opportunistic,
    Order,
    Sequential,
    Share,
    Shuffled,
    Weighted,
)
from headrace.plane import Loader
from headrace.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from numpy.typing import ArrayLike

    from headrace.config import ReaderOptions
    from headrace.order.token_windows import JoinedPlan, Packing
    from headrace.plane.batch import OnError
    from headrace.plane.images import Images
    from headrace.plane.pipeline import AddStage
    from headrace.plane.tokens import TokenDtype, TokenLoader
    from headrace.store.mixture import Mixture

__all__ = ["loader", "open", "order_for", "plane_over", "tokens"]

OrderName = Literal["shuffled", "sequential", "blocked", "balanced", "weighted", "opportunistic"]

BLOCK_BYTES = 256 << 10
"""Blocks of a blocked order: large enough that the disk reads them at its sequential speed."""

_PROBES = 500
"""Samples per segment whose sizes give the mean: 5 % of error do not matter to a block's size."""

_LABEL_MIX_MAX = 0.1
"""A loader warns of batches that are farther from the set's mix of labels: in `benchmarks/accuracy.py` networks
lose some points of accuracy from there on."""

_LABELS_LOOKED_AT = 1 << 16
"""For that warning: 20 ms."""

_BATCHES_TO_JUDGE = 16
"""In an epoch of fewer, labels are together by chance."""

_log = logging.getLogger("headrace")

_JOB = "headrace://"

_DIFFERENT_CACHES = (
    "order is 'opportunistic' over several ranks, whose page caches differ: pass the same "
    "headrace.order.Opportunistic to all of them"
)


def open(  # noqa: A001  # hr.open is the product's first word; this module never needs the builtin
    path: str | PathLike[str],
    *,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    format: str | None = None,  # noqa: A002 - as for `index`
    storage_options: Mapping[str, Any] | None = None,
    trust: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
) -> Store:
    """Opens a packed store, an index, a source directly, or a job's global store.

    Args:
        path: the store's folder or URL (`s3://`, `gs://`, `az://`, `https://`, ...), or the source. A
            source opened directly is listed anew each time and has no checksums (TFRecord excepted).
            `headrace://job` is what all nodes of this job have staged; see docs/howto/global-store.md.
        column: sources that are tables or arrays: as for `index`.
        label: the same.
        format: what a folder holds, where that is not plain: as for `index`.
        storage_options: for URLs: endpoint, region, credentials; see docs/howto/object-stores.md.
        trust: folders, files or URLs outside the store's folder that an index from elsewhere may read.
            This is asked once; what was indexed on this machine needs none. See docs/howto/trust.md.

    Raises:
        StoreNotFound: there is nothing at `path`.
        CorruptStore: the store is damaged, or a volume is missing or not the right one.
        SourceChanged: an indexed file is not as it was.
        SourceError: `path` is neither a store nor a source that can be opened directly.
        StoreError: its volumes lie outside its folder, and nobody on this machine has agreed to that.
        VolumeError: an object cannot be read.
        JobError: the job's nodes have not met.
    """
    if isinstance(path, str) and path.startswith(_JOB):
        from headrace.job.store import open_job

        return open_job(path, storage_options=storage_options)
    return open_store(
        path, column=column, label=label, format=format, storage_options=storage_options, trust=trust,
    )  # fmt: skip


def order_for(
    store: Store,
    order: OrderName | Order = "shuffled",
    *,
    seed: int = 0,
    weights: ArrayLike | None = None,
    batch_size: int = 1,
    window_bytes: int = 24 << 20,
    block_bytes: int = BLOCK_BYTES,
) -> Order:
    """Return an order over a store's samples.

    Args:
        store: an open store; or a mixture, each source of which has an order of this kind of its own.
        order: `shuffled` (an exact random permutation per epoch), `sequential`, `blocked` (whole
            blocks of neighbours, shuffled within windows: for tiny samples on slow storage), `balanced`
            (every class equally often), `weighted` (drawn in proportion to `weights`), `opportunistic`
            (in the first epoch, what is near already comes first: what a job's nodes have staged, or the
            page cache), or an `Order` of your own.
        seed: another seed, another sequence of epochs. A mixture has its own.
        weights: of a `weighted` order: one number a sample, not negative, in any scale.
        batch_size: of a mixture with one source a batch: samples of a rank's batch.
        window_bytes: samples of a blocked order that are shuffled together, and are in memory together.
        block_bytes: bytes that a blocked order reads together.

    Raises:
        OrderError: the order does not fit the store.
        ValueError: an unknown order, `balanced` over a store without labels, or weights without `weighted`.
    """
    if (weights is None) == (order == "weighted"):
        raise ValueError(f"order is {order!r} and weights are {weights!r}: one needs the other")
    if isinstance(order, Order):
        if order.samples != len(store):
            raise ValueError(
                f"the order is over {order.samples} samples, the store has {len(store)}"
            )
        return order
    if (mixture := store.mixture) is not None:
        if weights is not None:
            raise ValueError(
                "order is 'weighted' over a mixture: weigh the samples of its sources, "
                "headrace.mix(..., orders={name: headrace.order.Weighted(weights)})"
            )
        own = [
            order_for(
                source, mixture.proportions.orders.get(name, order), seed=mixture.seed_of(name),
                window_bytes=window_bytes, block_bytes=block_bytes,
            )
            for name, source in mixture.sources.items()
        ]  # fmt: skip
        return mixture.order_over(own, batch_size)
    if order == "blocked":
        mean_bytes = _mean_sample_bytes(store)
        block_samples = max(1, block_bytes // mean_bytes)
        window_blocks = max(1, window_bytes // (block_samples * mean_bytes))
        return Blocked(len(store), block_samples, window_blocks, seed=seed)
    return _order_named(store, order, seed, weights)


def _order_named(store: Store, order: str, seed: int, weights: ArrayLike | None) -> Order:
    if order == "shuffled":
        return Shuffled(len(store), seed=seed)
    if order == "sequential":
        return Sequential(len(store))
    if order == "balanced":
        if store.labels is None:
            raise ValueError("order is 'balanced', but the store has no labels")
        return Balanced(store.labels, seed=seed)
    if order == "weighted" and weights is not None:
        drawn = Weighted(weights, seed=seed)
        if drawn.samples != len(store):
            raise ValueError(f"{drawn.samples} weights are given for {len(store)} samples")
        return drawn
    if order == "opportunistic":
        return Opportunistic(len(store), store.resident_ranges(f"seed-{seed}"), seed=seed)
    raise ValueError(
        f"order is {order!r}, expected 'shuffled', 'sequential', 'blocked', 'balanced', 'weighted', "
        "'opportunistic' or an Order",
    )


def _mean_sample_bytes(store: Store) -> int:
    """Estimate from samples at even distances: the same for the same store."""
    bytes_seen = samples_seen = 0
    for segment in store.segments:
        last = segment.directory.samples - 1
        probes = np.unique(np.linspace(0, last, _PROBES).astype(np.int64))
        bytes_seen += int(segment.directory.extents_of(probes)["length"].sum())
        samples_seen += len(probes)
    return max(1, bytes_seen // max(1, samples_seen))


def loader(
    store: Store | str | PathLike[str],
    batch_size: int,
    *,
    order: OrderName | Order = "shuffled",
    weights: ArrayLike | None = None,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    tail: Literal["drop", "pad", "exact"] | None = None,
    parts: Sequence[str] = (),
    on_error: OnError = "raise",
    follow: bool = False,
    decode: Images | None = None,
    decode_threads: int | None = None,
    tune: bool = True,
    memory_bytes: int | None = None,
    trace: str | PathLike[str] | None = None,
    **options: Any,
) -> Loader:
    """Return a loader: iterate it for the batches of an epoch.

    Args:
        store: an open store, or the path of one (or of a folder, a tar, ...); or what `headrace.mix` returned.
        batch_size: samples per batch and rank.
        order: `shuffled`, `sequential`, `blocked`, `balanced`, `weighted`, `opportunistic`, or an `Order`; see
            `order_for` and docs/howto/mixtures.md.
        weights: with `order="weighted"`: one number a sample, in proportion to which samples are drawn.
        seed: another seed, another sequence of epochs. A mixture has its own.
        rank: this process's place among `world_size`. Not given, both are found out when the first epoch
            begins: from torch.distributed, JAX, TensorFlow or Ray Train if they joined the processes, else as
            torchrun, MPI or Slurm say, else 0 of 1; see docs/howto/pytorch.md. All ranks have the same number
            of steps.
        world_size: processes that share the samples.
        tail: what happens with samples that do not fill the last step of all ranks. `exact` (default
            for one rank): shared out as evenly as possible, each sample exactly once; a rank's last
            batch may be smaller, even empty (a loss's mean over it is NaN). `pad` (default for
            several): filled up with samples from the epoch's beginning. `drop`: left out.
        parts: parts to read of samples that have several; all if empty.
        on_error: `raise`, or `skip` samples that cannot be delivered and record them.
        follow: take up what is appended to the store, where an epoch begins; see docs/howto/mixtures.md.
        decode: what pictures become, decoded by native threads: batches are `headrace.ImageBatch`, see
            docs/howto/images.md. None: batches hold bytes.
        decode_threads: threads that decode; None: the tuner's choice, from this process's processors on.
        tune: let headrace turn the knobs: reads in flight and buffer bytes. Those given here or by
            HEADRACE_* are left alone. HEADRACE_TUNE=0 turns it off for all loaders.
        memory_bytes: what all buffers of this process may take; by default a part of what the job's
            own limits leave, see `headrace.control.knob_limits`. HEADRACE_MEMORY_BYTES likewise.
        trace: folder that the run's steps are written to, by a thread of its own, for `headrace report` and
            `headrace verify-epoch`; the same for all ranks. HEADRACE_TRACE likewise.
        options: fields of `headrace.config.ReaderOptions` and `headrace.config.TierOptions`
            (`cache_dir`, `ram_bytes`, `plane="node"`, ...), none of which changes what is delivered.

    Raises:
        OrderError: batch size, rank or world size do not fit.
        RankError: nobody says which rank this is, or two disagree; raised when an epoch begins.
        ValueError: an unknown order, part or option.
    """
    if not isinstance(store, Store):
        store = open(store)
    arguments = {**locals(), **options}
    del arguments["options"]
    if store.mixture is not None:
        seed = _seed_of(store.mixture, seed)
        if decode is not None:
            names = tuple(parts or store.parts)
            store.mixture.check_part(names[decode.part_of(names)])
    chosen = order_for(store, order, seed=seed, weights=weights, batch_size=batch_size)
    _warn_of_clustered_labels(store, chosen, batch_size * (world_size or 1))
    share = Share(
        chosen.length, batch_size, RankDecision(rank, world_size), tail,
        alone=_DIFFERENT_CACHES if order == "opportunistic" and not store.agrees else "",
    )  # fmt: skip
    tiers, reading, _ = tier_options(options)
    resolved, origins = reader_options(reading)
    memory_bytes, resolved = _within(memory_bytes, resolved, tiers)
    kind: Callable[..., Loader] = Loader
    if follow:
        from headrace.plane.follow import FollowingLoader

        _check_followed(store, order, trace)
        kind = partial(
            FollowingLoader,
            plan=lambda grown: (order_for(grown, order, seed=seed, batch_size=batch_size), None),
        )
    new_loader = kind(
        store, chosen, share, resolved,
        parts=parts, on_error=on_error, tiers=tiers, over=plane_over(tiers, resolved),
        decoding=None if decode is None else (decode, seed), decode_threads=decode_threads,
    )  # fmt: skip
    if decode_threads is not None:
        origins = {**origins, "decode_threads": "given"}
    new_loader.made_of = loader, arguments
    _introduce(new_loader, origins, share, tiers, tune=tune, memory_bytes=memory_bytes, trace=trace)
    return new_loader


def tokens(
    store: Store | str | PathLike[str],
    length: int,
    batch_size: int,
    *,
    pack: Packing = "cut",
    shuffle: bool = True,
    seed: int = 0,
    dtype: TokenDtype = "int32",
    stored: str | None = None,
    part: str | None = None,
    pad: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    tail: Literal["drop", "pad", "exact"] | None = None,
    follow: bool = False,
    tune: bool = True,
    memory_bytes: int | None = None,
    trace: str | PathLike[str] | None = None,
    **options: Any,
) -> TokenLoader:
    """Return a loader of windows of tokens: iterate it for the batches of an epoch.

    Args:
        store: an open store whose samples are documents of tokens, or the path of one (or of token files that
            say what they hold); or what `headrace.mix` returned of such stores, whose proportions are then
            those of windows. See docs/howto/tokens.md.
        length: inputs of a window. Windows are one token longer, so that each input has a target.
        batch_size: windows per batch and rank.
        pack: `cut`: all documents one behind the other, cut every `length` tokens; what is left at the end is
            left out. `best-fit`: whole documents, where each fits best, and padding; only longer ones are cut.
        shuffle: windows come in an exact random permutation per epoch; else one after the other.
        seed: another seed, another sequence of epochs.
        dtype: what tokens are delivered as: `int32` or `int64`.
        stored: what they are in the store: `uint16`, ...; None: what the store says.
        part: the part of samples that holds tokens; None: the only one, or `tokens`.
        pad: the token that fills a window (`best-fit`).
        rank: as in `loader`.
        world_size: as in `loader`.
        tail: as in `loader`, of windows.
        follow: as in `loader`; windows are planned anew with what was appended.
        tune: as in `loader`.
        memory_bytes: as in `loader`.
        trace: as in `loader`.
        options: fields of `headrace.config.ReaderOptions`, and of `headrace.config.TierOptions` where documents
            have at most 1 MiB: under caches and limits they are read whole. None changes what is delivered.

    Raises:
        OrderError: length, batch size, rank or world size do not fit.
        RankError: nobody says which rank this is, or two disagree; raised when an epoch begins.
        StoreError: a document is no whole number of tokens, or all of them make no window.
        ValueError: an unknown packing, part or option, or nobody says what the tokens are.
    """
    if not isinstance(store, Store):
        store = open(store)
    arguments = {**locals(), **options}
    del arguments["options"]
    from headrace.plane.tokens import Documents, FollowingTokenLoader, TokenLoader, WindowReader

    tiers, reading, tier_origins = tier_options(options)
    whole = any(origin != "default" for origin in tier_origins.values())
    if not whole:
        tiers = TierOptions(ram_bytes=0)
    if store.mixture is not None:
        seed = _seed_of(store.mixture, seed)

    def plan(of: Store) -> tuple[Order, WindowReader]:
        windows = WindowReader(Documents(of, part, stored), length, pack, dtype, pad, whole=whole)
        order = _order_of_windows(
            of.mixture, windows.plan, batch_size, length=length, pack=pack, seed=seed, shuffle=shuffle,
        )  # fmt: skip
        return order, windows

    order, windows = plan(store)
    kind: Callable[..., TokenLoader] = TokenLoader
    if follow:
        _check_followed(store, "shuffled", trace)
        kind = partial(FollowingTokenLoader, plan=plan)
    share = Share(order.length, batch_size, RankDecision(rank, world_size), tail)
    resolved, origins = reader_options(reading)
    memory_bytes, resolved = _within(memory_bytes, resolved, tiers)
    new_loader = kind(
        store, order, share, resolved, parts=(windows.documents.part,), tiers=tiers, windows=windows,
        over=plane_over(tiers, resolved),
    )  # fmt: skip
    new_loader.made_of = tokens, arguments
    _introduce(new_loader, origins, share, tiers, tune=tune, memory_bytes=memory_bytes, trace=trace)
    return new_loader


def _seed_of(mixture: Mixture, seed: int) -> int:
    if seed not in {0, mixture.seed}:
        raise ValueError(
            f"seed is {seed}, the mixture has {mixture.seed}: give it to headrace.mix alone"
        )
    return mixture.seed


def _order_of_windows(
    mixture: Mixture | None, plan: JoinedPlan, batch_size: int,
    *, length: int, pack: Packing, seed: int, shuffle: bool,
) -> Order:  # fmt: skip
    """The order over windows: of one store, or of a mixture's sources in their proportions."""
    from headrace.order.token_windows import Windows

    if mixture is None:
        return Windows(plan.windows, length, pack, seed=seed, shuffle=shuffle)
    named = {"shuffled": True, "sequential": False}
    own = []
    for name, each in zip(mixture.sources, plan.plans, strict=True):
        kind = mixture.proportions.orders.get(name, "shuffled" if shuffle else "sequential")
        if not isinstance(kind, str) or kind not in named:
            raise ValueError(
                f"the order of source {name!r} is {kind!r}: windows of tokens come 'shuffled' or 'sequential'"
            )
        own_seed = mixture.seed_of(name)
        own.append(Windows(each.windows, length, pack, seed=own_seed, shuffle=named[kind]))
    return mixture.order_over(own, batch_size)


def _warn_of_clustered_labels(store: Store, order: Order, batch_size: int) -> None:
    """Say what to do where an order that reads neighbours together meets neighbours of one class."""
    if not isinstance(order, (Blocked, Opportunistic)):
        return
    labels = store.labels
    if labels is None or order.length < _BATCHES_TO_JUDGE * batch_size:
        return
    mix = LabelMix.of(order, labels, batch_size, samples=_LABELS_LOOKED_AT)
    if mix.distance > _LABEL_MIX_MAX:
        mode = order.describe()["mode"]
        _log.warning(
            "%s: neighbours have the same labels, and the order %r keeps neighbours together: the label mix of "
            "its batches is %.2f (0: a full shuffle, 1: one class each). Networks learn less "
            "from them. Pack the data once in random order (headrace pack --shuffle SEED), or take "
            "order='shuffled'.",
            store.path, mode, mix.distance,
        )  # fmt: skip


def _introduce(
    new_loader: Loader,
    origins: Mapping[str, str],
    share: Share,
    tiers: TierOptions,
    *,
    tune: bool,
    memory_bytes: int | None,
    trace: str | PathLike[str] | None,
) -> None:
    """Introduce a loader to the controller, and to whoever writes its trace."""
    path = str(new_loader.source.path)
    tune = tune and tiers.plane == "process"  # the node daemon's knobs are its own
    tuning = _tuning(new_loader, origins, path, tune=tune, memory_bytes=memory_bytes)
    new_loader.tuning, new_loader.stats.rested = tuning, PassEnded(tuning, new_loader)
    if (folder := trace_folder(trace)) is not None:
        from headrace.trace import follow

        follow(folder, _about(new_loader, path), new_loader, plane=tuning, begun=share.facts)
    if tiers.plane == "node":
        from headrace.node.notes import watch

        watch(new_loader.stats)


def _check_followed(
    store: Store, order: OrderName | Order, trace: str | PathLike[str] | None
) -> None:
    """Refuse what does not fit a store that has grown."""
    own = store.mixture.proportions.orders.values() if store.mixture is not None else ()
    if any(isinstance(each, Order) or each == "weighted" for each in (order, *own)):
        raise ValueError(
            "follow is True: name the order by a word, which fits a store that has grown"
        )
    if trace_folder(trace) is not None:
        raise ValueError(
            "follow is True and a trace is written, which is of one snapshot: do one of them"
        )


_BUFFERS_WITH_CACHE = 3
"""The source's batches, those of the cache, and those that wait to be written to it."""


def _within(
    memory_bytes: int | None, options: ReaderOptions, tiers: TierOptions
) -> tuple[int | None, ReaderOptions]:
    """Share out what all buffers may take: what the tuner may give to one, and options that keep to it."""
    policy = memory_policy(memory_bytes)
    if policy is None:
        return None, options
    kept = tiers.ram_bytes if isinstance(tiers.ram_bytes, int) else 0
    left = max(policy[0] - kept, policy[0] // 2)
    share = left // (_BUFFERS_WITH_CACHE if tiers.cache_dir is not None else 1)
    least = max(share, BUDGET_BYTES_MIN)
    return max(1, share), replace(options, budget_bytes=min(options.budget_bytes, least))


def plane_over(tiers: TierOptions, reading: ReaderOptions) -> AddStage | None:
    """What puts the node daemon on top of a chain, where the options ask for it.

    Raises:
        ValueError: storage that is simulated in this process cannot be another's.
    """
    if tiers.plane == "process":
        return None
    if reading.simulate is not None:
        raise ValueError(
            "plane is 'node' and simulate is given: let the daemon simulate "
            "(headrace node start --simulate)"
        )
    from headrace.node.reads import over_node

    return over_node


_KNOB_OPTIONS = {
    "reads_in_flight": ("reads_in_flight", "queue_depth", "threads"),
    "buffer_bytes": ("budget_bytes",),
    "decode_threads": ("decode_threads",),
}
"""Options that say where a knob stands."""


def _about(new_loader: Loader, path: str) -> dict[str, Any]:
    """What a trace says of its loader."""
    order = new_loader.order
    source = path if "://" in path else os.path.abspath(path)  # noqa: PTH100
    return {
        "source": source, "fingerprint": new_loader.source.fingerprint, "samples": order.samples,
        "length": order.length, "batch_size": new_loader.share.batch_size,
    }  # fmt: skip


def _tuning(
    new_loader: Loader,
    origins: Mapping[str, str],
    name: str,
    *,
    tune: bool,
    memory_bytes: int | None,
) -> Plane:
    """Introduce a loader's stages to the controller."""
    frozen = [
        knob
        for knob, names in _KNOB_OPTIONS.items()
        if any(origins.get(name, "default") != "default" for name in names)
    ]
    if isinstance(new_loader.order, Blocked) and "buffer_bytes" not in frozen:
        frozen.append("buffer_bytes")  # it holds whole windows, of the order's size
    return Plane(
        f"loader of {name}",
        new_loader.stages_now,
        new_loader.stats.consumer,
        frozen=frozen,
        memory_bytes=memory_bytes,
        enabled=tune,
        source=name,
    )

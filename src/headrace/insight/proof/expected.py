"""Expected: what an order would have delivered: sums of hashes from the epoch's beginning to any position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.errors import HeadraceError
from headrace.order import Balanced, Blocked, Order, Sequential, Shuffled
from headrace.order.hash import position_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from headrace.trace import RankTrace

__all__ = ["length_of", "order_of", "sums_at"]

_TOGETHER: Final = 1 << 21
"""Positions that are hashed at a time: 100 MB of intermediate arrays."""

_LENGTH_MAX: Final = 1 << 33


def order_of(trace: RankTrace) -> tuple[Order | None, str]:
    """The order that a trace names, made again.

    Returns:
        The order, and why there is none.
    """
    described = trace.order
    if not described:
        return None, "the order is not headrace's"
    if trace.length > _LENGTH_MAX:
        return None, f"an epoch of {trace.length:,} positions is too long to go through"
    try:
        order = _made(described, trace)
    except (HeadraceError, ValueError, TypeError, KeyError, OSError, ImportError) as e:
        return None, f"the order cannot be made again: {e}"
    if order is None:
        return (
            None,
            f"an order of mode {str(described.get('mode'))[:40]!r} cannot be made again from the trace",
        )
    if order.digest() != trace.order_digest or order.length != trace.length:
        return None, "the order that the trace describes is not the one that it names"
    return order, ""


def _made(described: Mapping[str, Any], trace: RankTrace) -> Order | None:
    mode = described.get("mode")
    if mode == "shuffled":
        return Shuffled(described["samples"], seed=described["seed"])
    if mode == "sequential":
        return Sequential(described["samples"])
    if mode == "blocked":
        return Blocked(
            described["samples"],
            described["block_samples"],
            described["window_blocks"],
            seed=described["seed"],
        )
    if mode == "balanced":
        return _balanced(described, trace)
    return None


def _balanced(described: Mapping[str, Any], trace: RankTrace) -> Order:
    """Labels are not in the trace: the store has them, where it is still there and the same."""
    from headrace.api import open as open_store

    if "://" in trace.source:
        raise ValueError("its labels lie behind a URL, which is not asked for a proof")
    with open_store(trace.source) as store:
        if store.fingerprint != trace.fingerprint or store.labels is None:
            raise ValueError(f"{trace.source} is not the data of this run any more")
        return Balanced(
            np.array(store.labels), seed=described["seed"], epoch_length=described["length"]
        )


def length_of(
    order: Order, epoch: int, begin: int, lengths: tuple[int, int], order_hash: int
) -> int | None:
    """How many positions from `begin` on have together this hash; None: no number within the lengths."""
    least, most = lengths
    hashes = position_hashes(begin, order.wrapped(epoch, begin, begin + most))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    fits = np.flatnonzero(sums[least:] == np.uint64(order_hash))
    return least + int(fits[0]) if len(fits) else None


def sums_at(order: Order, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sums, mod 2^64, of the hashes of all deliveries before each position of an epoch.

    Args:
        order: what is delivered.
        epoch: which.
        positions: uint64; those past the epoch's end stand for padding, which begins the epoch again.

    Returns:
        uint64, shaped like `positions`: two of them differ by the order hash of what lies between.
    """
    found = np.zeros(len(positions), np.uint64)
    if not len(positions):
        return found
    by_place = np.argsort(positions, kind="stable")
    wanted = positions[by_place]
    before = np.uint64(0)
    for begin in range(0, int(wanted[-1]), _TOGETHER):
        end = min(begin + _TOGETHER, int(wanted[-1]))
        hashes = position_hashes(begin, order.wrapped(epoch, begin, end))
        sums = np.concatenate([[before], before + np.cumsum(hashes, dtype=np.uint64)])
        here = slice(*np.searchsorted(wanted, [np.uint64(begin), np.uint64(end + 1)]))
        found[by_place[here]] = sums[(wanted[here] - np.uint64(begin)).astype(np.int64)]
        before = sums[-1]
    return found

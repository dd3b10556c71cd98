"""Showing: a loader in a line, and as a notebook's card. Asks nobody but the loader: no storage is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.text import bytes_text
from headrace.pages.card import card

if TYPE_CHECKING:
    from headrace.plane.loader import Loader, LoaderStats

__all__ = ["delivered_rows", "loader_card", "loader_line", "waited_share"]


def loader_line(loader: Loader, kind: str = "Loader") -> str:
    """`Loader('photos.hr', shuffled, seed 7, batch 4, rank 0 of 2, epoch 1 at 16 of 36)`."""
    described = loader.order.describe()
    parts = [
        repr(_source(loader)),
        str(described.get("mode", type(loader.order).__name__)),
        f"seed {described['seed']}" if "seed" in described else "",
        f"batch {loader.cursor.share.batch_size}",
        str(loader.ranks),
        f"epoch {loader.epoch} at {loader.position:,} of {loader.order.length:,}",
    ]
    return f"{kind}({', '.join(part for part in parts if part)})"


def loader_card(loader: Loader, kind: str = "Loader") -> str:
    """The same with what was delivered, as HTML."""
    described, share = loader.order.describe(), loader.cursor.share
    order = str(described.get("mode", type(loader.order).__name__))
    rows: list[tuple[str, object]] = [
        ("samples", f"{loader.order.samples:,}"),
        ("order", f"{order}, seed {described['seed']}" if "seed" in described else order),
        ("batch", f"{share.batch_size:,} samples{share.steps_text()}"),
        ("rank", str(loader.ranks)),
        (
            "stands at",
            f"epoch {loader.epoch}, position {loader.position:,} of {loader.order.length:,}",
        ),
    ]
    rows += delivered_rows(loader.stats)
    return card(f"{kind}: {_source(loader)}", rows, waited=waited_share(loader.stats))


def delivered_rows(stats: LoaderStats) -> list[tuple[str, object]]:
    """What was delivered so far; nothing before the first batch."""
    if not stats.batches:
        return []
    told = f"{stats.batches:,} batches, {stats.samples:,} samples"
    return [("delivered", f"{told}, {bytes_text(stats.bytes)}" if stats.bytes else told)]


def waited_share(stats: LoaderStats) -> float | None:
    """Share of its consumer's time that was waited; None before there was any."""
    seconds = stats.stall_s + stats.worked_s
    return stats.stall_s / seconds if stats.batches and seconds > 0 else None


def _source(loader: Loader) -> str:
    return str(getattr(loader.source, "path", type(loader.source).__name__))

"""How another process opens the same data: what it must be told, and doing it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.io.objects.location import is_url
from headrace.store.store import Store, _reopen

if TYPE_CHECKING:
    from headrace.store.sources.scan import SourceOptions

__all__ = ["Recipe", "recipe_of", "reopen"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What opens a store again."""

    path: str
    """Absolute, or a URL."""
    segments: int
    """How many of its segments."""
    fingerprint: str
    """What must be found there."""
    direct: SourceOptions | None
    """How a source that is no store is listed; None: it is a store."""


def recipe_of(store: Store) -> Recipe | str:
    """What a process that shares nothing with this one needs to open the same data.

    Returns:
        The recipe, or why there is none.
    """
    direct = store._direct  # noqa: SLF001 - a store's other half
    if isinstance(direct, bytes):
        return "its directory lies in the memory of this process"
    if store.objects is not None and store.objects.storage_options:
        return "its storage_options are not passed on"
    path = store.path if is_url(store.path) else os.path.abspath(store.path)
    return Recipe(path, len(store.segments), store.fingerprint, direct)


def reopen(path: str, segments: int, fingerprint: str, direct: SourceOptions | None) -> Store:
    """Open a store by its recipe.

    Raises:
        SourceChanged: other data lies there.
        StoreNotFound, CorruptStore, SourceError, VolumeError: as for `open_store`.
    """
    return _reopen(path, segments, fingerprint, False, direct, None)

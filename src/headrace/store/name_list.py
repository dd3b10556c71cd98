"""Names: the names of a store's samples, as a sequence that is read when it is asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.store.store import Store

__all__ = ["Names"]

_NAMES_AT_ONCE = 4096


class Names(Sequence[str]):
    """The names of a store's samples, by index; read when asked for.

    Bytes that are no UTF-8 come as surrogates (`os.fsdecode`), and `os.fsencode` gives them back.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """One name, or the names of a slice."""
        self._store._check_open()  # noqa: SLF001 - its own other half
        if isinstance(index, slice):
            return self.many(range(*index.indices(len(self))))
        at = int(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"index {at}, expected {-len(self)} to {len(self) - 1}")
        return self.many([at + len(self) if at < 0 else at])[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _NAMES_AT_ONCE):
            yield from self[start : start + _NAMES_AT_ONCE]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, (str, bytes)) and int(self._store.find_many([name])[0]) >= 0

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """The index of a name, by the name tree.

        Raises:
            ValueError: no sample has it, in this range.
        """
        found = int(self._store.find_many([value])[0])
        if found < 0 or found not in range(len(self))[start:stop]:
            raise ValueError(f"{value!r} is not among the names")
        return found

    def many(self, indices: Sequence[int] | NDArray[Any]) -> list[str]:
        """The names of many samples."""
        wanted = np.asarray(indices, np.int64)
        out: list[str] = [""] * len(wanted)
        for segment in self._store.segments:
            inside = (wanted >= segment.base) & (wanted < segment.base + segment.directory.samples)
            where = np.flatnonzero(inside)
            local = np.ascontiguousarray(wanted[where] - segment.base)
            for k, name in zip(where, segment.directory.names(local), strict=True):
                out[k] = os.fsdecode(name)
        return out

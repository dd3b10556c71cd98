"""Closing: for what is used in a `with` block and ends with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Closing"]


class Closing:
    """Calls its own `close` at the end of a `with` block, however that ends."""

    if TYPE_CHECKING:
        close: Callable[[], object]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

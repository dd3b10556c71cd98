"""Functions of Python's that headrace stands in for: each has one owner, and layers over it.

Files that were read ahead are served by `open` itself, and a simulated storage slows `open`, `os.open` and
`os.read` down. Several of either may come and go in any order, on any thread. So nobody but this module
puts anything in the place of such a function: what stands there is its `Replaced`, while it has layers,
and a layer is taken away by what it is, never by what was there before it.
"""

from __future__ import annotations

import _io
import builtins
import functools
import io
import os
import posix
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

STORAGE, MEMORY = range(2)
"""Ranks: what is in memory is looked for before any storage is asked."""

real_open = _io.open
"""The interpreter's own `open`, whoever has replaced it since."""


class _Layer(NamedTuple):
    rank: int
    call: Callable[..., Any]


class Replaced:
    """A function with layers over it. It stands in the function's places exactly while it has one.

    No function itself: stored in a class, it must not bind.

    Args:
        original: the interpreter's own.
        places: the modules that have it.
    """

    def __init__(self, original: Callable[..., Any], *places: ModuleType) -> None:
        self._original = original
        self._places = places
        self._layers: tuple[_Layer, ...] = ()
        self._lock = threading.RLock()  # a layer's owner may be collected anywhere
        self._top = original
        self.__name__ = original.__name__
        self.__module__ = places[-1].__name__  # it is pickled by its name there
        self.__doc__ = original.__doc__
        os.register_at_fork(after_in_child=self._after_fork)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function: through the layers."""
        return self._top(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__name__

    def add(self, call: Callable[..., Any], rank: int) -> bool:
        """Put a layer over the function; above those of its rank, below those of a higher one.

        Args:
            call: is called with what is beneath it, and the function's own arguments.
            rank: `STORAGE` or `MEMORY`.

        Returns:
            Whether all callers see it. Somebody else's replacement stays where it is: it would be lost,
            or call us when we are gone.
        """
        with self._lock:
            self._change(lambda layers: (*layers, _Layer(rank, call)))
            return all(getattr(place, self.__name__) is self for place in self._places)

    def remove(self, call: Callable[..., Any]) -> None:
        """Take a layer away, wherever it is; the last one puts the function back."""
        with self._lock:
            self._change(lambda layers: tuple(one for one in layers if one.call is not call))

    def _change(self, change: Callable[[tuple[_Layer, ...]], tuple[_Layer, ...]]) -> None:
        while True:
            before = self._layers
            layers = tuple(sorted(change(before), key=lambda layer: layer.rank))
            top = self._original
            for layer in layers:
                top = functools.partial(layer.call, top)
            # Else an owner was collected meanwhile, and took its layer away.
            if self._layers is before:
                self._layers, self._top = layers, top
                break
        for place in self._places:
            here = getattr(place, self.__name__)
            if here is self and not self._layers:
                setattr(place, self.__name__, self._original)
            elif here is self._original and self._layers:
                setattr(place, self.__name__, self)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()


python_open = Replaced(real_open, builtins, io)
os_open = Replaced(posix.open, os)
os_read = Replaced(posix.read, os)

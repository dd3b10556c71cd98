"""headrace feeds deep-learning training: every sample, in exact random order, at full speed.

    import headrace as hr

    hr.pack("photos/", "photos.hr")
    with hr.open("photos.hr") as store:
        for batch in hr.loader(store, batch_size=256, seed=7):
            ...

What is named here is imported when it is first used, so that `import headrace` costs a millisecond.
It needs numpy only; `headrace.torch` and others import their framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.api import (  # noqa: A004
        append,
        index,
        loader,
        open,
        order_for,
        pack,
        repair,
        verify,
    )
    from headrace.plane import Batch, Loader
    from headrace.store import Store

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Loader",
    "Store",
    "__version__",
    "append",
    "index",
    "loader",
    "open",
    "order_for",
    "pack",
    "repair",
    "verify",
]

_HOMES = {
    "Batch": "headrace.plane",
    "Loader": "headrace.plane",
    "Store": "headrace.store",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "headrace.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

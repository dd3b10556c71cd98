"""headrace feeds deep-learning training: every sample, in exact random order, at the storage's speed.

    import headrace as hr

    hr.pack("photos/", "photos.hr")
    with hr.open("photos.hr") as store:
        for batch in hr.loader(store, batch_size=256, seed=7):
            ...

Importing this package needs numpy only; `headrace.torch` and others import their framework.
"""

import warnings

from headrace import _native
from headrace.api import append, index, loader, open, order_for, pack  # noqa: A004
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
]

if _native.build_type == "Debug":
    warnings.warn("headrace's native core is a debug build: it is slow", stacklevel=2)

"""headrace feeds deep-learning training: every sample, in exact random order, at the storage's speed.

    import headrace as hr

    hr.pack("photos/", "photos.hr")
    with hr.open("photos.hr") as store:
        for batch in hr.loader(store, batch_size=256, seed=7):
            ...

Names are imported when they are first used, so that importing this package costs nothing, for the
command line above all. It needs numpy only; `headrace.torch` and others import their framework.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace import _native

if TYPE_CHECKING:
    from headrace import checkpoint, cluster, errors
    from headrace.api import loader, open, order_for, tokens  # noqa: A004  # hr.open is the product's first word
    from headrace.control.explain import explain
    from headrace.plane import Batch, Loader
    from headrace.plane.augment import MixedLabels
    from headrace.plane.images import ImageBatch, Images
    from headrace.plane.tokens import TokenBatch, TokenLoader
    from headrace.store import Store, from_hf
    from headrace.store.mixture import mix
    from headrace.store.pack import append, index, pack
    from headrace.store.repair import repair
    from headrace.store.tokenizing import tokenize
    from headrace.store.verify import verify

__version__ = "0.2.0"

__all__ = [
    "Batch",
    "ImageBatch",
    "Images",
    "Loader",
    "MixedLabels",
    "Store",
    "TokenBatch",
    "TokenLoader",
    "__version__",
    "append",
    "checkpoint",
    "cluster",
    "errors",
    "explain",
    "from_hf",
    "index",
    "loader",
    "mix",
    "open",
    "order_for",
    "pack",
    "repair",
    "tokenize",
    "tokens",
    "verify",
]

_HOMES = {
    **dict.fromkeys(("loader", "open", "order_for", "tokens"), "headrace.api"),
    **dict.fromkeys(("Batch", "Loader"), "headrace.plane"),
    **dict.fromkeys(("ImageBatch", "Images"), "headrace.plane.images"),
    **dict.fromkeys(("TokenBatch", "TokenLoader"), "headrace.plane.tokens"),
    "MixedLabels": "headrace.plane.augment",
    **dict.fromkeys(("Store", "from_hf"), "headrace.store"),
    **dict.fromkeys(("append", "index", "pack"), "headrace.store.pack"),
    "explain": "headrace.control.explain",
    "mix": "headrace.store.mixture",
    "repair": "headrace.store.repair",
    "tokenize": "headrace.store.tokenizing",
    "verify": "headrace.store.verify",
}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "cluster", "errors"):
        return import_module(f"headrace.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if _native.build_type == "Debug":
    warnings.warn("headrace's native core is a debug build: it is slow", stacklevel=2)

"""The formats of data sets, one file each: how they are written, and where their samples lie."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from headrace.bench.formats.base import FileJob, FormatModule, Reader, SampleExtents

if TYPE_CHECKING:
    from headrace import _native
    from headrace.bench.dataset import DatasetSpec

__all__ = ["FileJob", "FormatModule", "Reader", "SampleExtents", "format_of", "layout_of"]


def format_of(spec: DatasetSpec) -> FormatModule:
    """The module that writes and reads a data set's files. Optional libraries are imported on use."""
    name = "recorded" if spec.requests is not None else spec.format.removeprefix("mmap_")
    return cast("FormatModule", importlib.import_module(f"headrace.bench.formats.{name}"))


def layout_of(spec: DatasetSpec, shape: tuple[int, ...]) -> _native.FileLayout | None:
    """What a file with samples of this shape consists of; None where only a library can write the format.

    Raises:
        SourceError: the format cannot hold such samples.
    """
    layout = getattr(format_of(spec), "layout", None)
    if layout is None or spec.compression != "none":
        return None
    return cast("_native.FileLayout", layout(spec, shape).native())

"""The formats of data sets, one file each: how they are written, and where their samples lie."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from headrace.bench.formats.base import FileJob, FormatModule, Reader, SampleExtents

if TYPE_CHECKING:
    from headrace.bench.dataset import DatasetSpec

__all__ = ["FileJob", "FormatModule", "Reader", "SampleExtents", "format_of"]


def format_of(spec: DatasetSpec) -> FormatModule:
    """The module that writes and reads a data set's files. Optional libraries are imported on use."""
    name = spec.format.removeprefix("mmap_")
    return cast("FormatModule", importlib.import_module(f"headrace.bench.formats.{name}"))

"""The formats of data sets: how each is written, and where its samples lie.

* base: what a format is
* arrays: npy, npz, csv, indexed_binary, recorded and synthetic files
* images: jpeg and png
* records: tfrecord, parquet and hdf5
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.bench.formats.arrays import Csv, IndexedBinary, Npy, Npz, RecordedFiles, Synthetic
from headrace.bench.formats.base import DatasetFormat, FileJob, SampleExtents, bad_file
from headrace.bench.formats.images import Jpeg, Png
from headrace.bench.formats.records import Hdf5, Parquet, TFRecord

if TYPE_CHECKING:
    from headrace import _native
    from headrace.bench.dataset import DatasetSpec

__all__ = ["FileJob", "SampleExtents", "bad_file", "format_of", "layout_of"]

_RECORDED = RecordedFiles()
_FORMATS: dict[str, DatasetFormat] = {
    "csv": Csv(), "hdf5": Hdf5(), "indexed_binary": IndexedBinary(), "jpeg": Jpeg(),
    "mmap_indexed_binary": IndexedBinary(), "npy": Npy(), "npz": Npz(), "parquet": Parquet(),
    "png": Png(), "synthetic": Synthetic(), "tfrecord": TFRecord(),
}  # fmt: skip


def format_of(spec: DatasetSpec) -> DatasetFormat:
    """What writes and reads a data set's files."""
    return _RECORDED if spec.requests is not None else _FORMATS[spec.format]


def layout_of(spec: DatasetSpec, shape: tuple[int, ...]) -> _native.FileLayout | None:
    """What a file consists of, for native code; None where only a library can write it.

    Raises:
        SourceError: the format cannot hold such samples.
    """
    plain = spec.compression == "none" or spec.requests is not None
    layout = format_of(spec).layout(spec, shape) if plain else None
    return None if layout is None else layout.native()

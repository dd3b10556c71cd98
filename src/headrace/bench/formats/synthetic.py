"""synthetic: tiny files that stand for samples; DLIO's synthetic loader reads none of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.formats.base import Reader, SampleExtents, whole_file
from headrace.bench.formats.npy import ArrayReader

if TYPE_CHECKING:
    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "open_reader", "sample_extents", "write"]


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes: its number."""
    out.write(str(job.number).encode())


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:  # noqa: ARG001 - of all formats
    """Size of the finished file."""
    return None


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """All of the file, for each sample."""
    return whole_file(path, spec)


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Each sample is the file's text."""
    data = np.frombuffer(Path(path).read_bytes(), np.uint8)
    return ArrayReader(np.tile(data, (spec.num_samples_per_file, 1)), axis=0)

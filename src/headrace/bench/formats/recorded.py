"""recorded: files of a record's names and sizes, which hold noise; their samples lie where they were read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.content import Layout, Run, noise, write_layout
from headrace.bench.formats.base import Reader, SampleExtents, bad_file
from headrace.bench.formats.npy import ArrayReader
from headrace.bench.replay import replay_of

if TYPE_CHECKING:
    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.bench.replay import Replay
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "layout", "open_reader", "sample_extents", "write"]


def layout(spec: DatasetSpec, shape: tuple[int, ...]) -> Layout:  # noqa: ARG001 - of all formats
    """All noise."""
    return Layout((Run(1, (noise(shape[0]),)),))


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    write_layout(out, layout(job.spec, job.shape), job.stream())


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:  # noqa: ARG001 - of all formats
    """Size of the finished file."""
    return shape[0]


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """Where its samples were read."""
    assert spec.requests is not None
    replay = replay_of(spec.requests)
    return SampleExtents.each(*replay.extents(_name(path, replay)))


def _name(path: str, replay: Replay) -> str:
    """A file's name in the record: the end of its path, wherever the data set was copied to."""
    at = path.find("/")
    while at >= 0:
        if replay.has(name := path[at + 1 :]):
            return name
        at = path.find("/", at + 1)
    raise bad_file(path, "its name", os.path.basename(path), "one of the record")


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Each sample is its bytes."""
    data = np.frombuffer(Path(path).read_bytes(), np.uint8)
    return ArrayReader(np.tile(data, (spec.num_samples_per_file, 1)), axis=0)

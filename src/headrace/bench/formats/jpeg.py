"""jpeg: a grey image of noise for each sample, as Pillow encodes it; its size is about 0.56 bytes a pixel."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from headrace.bench.formats.base import extra
from headrace.bench.formats.images import open_reader, sample_extents

if TYPE_CHECKING:
    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "open_reader", "sample_extents", "write"]


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    image = extra("PIL.Image", "writing jpeg", "bench")
    pixels = job.stream().take(job.sample_bytes).reshape(job.shape)
    encoded = io.BytesIO()
    image.fromarray(pixels).save(encoded, format="JPEG")
    out.write(encoded.getbuffer())


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:  # noqa: ARG001 - of all formats
    """Size of the finished file."""
    return None

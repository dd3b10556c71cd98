"""Records: the first samples within tar and TFRecord files, found by hopping from header to header.

Listing a shard takes as many reads as it has samples. Here it takes as many as the time allows: then the
shard has been seen to its end, or its samples are taken to go on as they began.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass, field
from typing import Final

from headrace.errors import SourceError
from headrace.store.sources.tfrecord import looks_like_tfrecord

__all__ = ["Hops", "hop_tar", "hop_tfrecord"]

_FRAME_BYTES: Final = 12
_FOOTER_BYTES: Final = 4
_RECORD_BYTES_MAX: Final = 1 << 40
_BLOCK: Final = 512


@dataclass(slots=True)
class Hops:
    """Samples of one shard.

    Attributes:
        places: (offset, bytes) of the parts that are samples' main ones.
        samples: in what was seen.
        seen_bytes: how far it went.
        complete: whether to the end.
        suffix: of a tar's members, `.jpg`.
    """

    places: list[tuple[int, int]] = field(default_factory=list)
    samples: int = 0
    seen_bytes: int = 0
    complete: bool = False
    suffix: str = ""


def hop_tfrecord(path: str, until: float) -> Hops:
    """Follow a TFRecord file until a moment of the monotonic clock.

    Raises:
        SourceError: it is none, or damaged.
        OSError: it cannot be read.
    """
    found = Hops()
    with open(path, "rb", buffering=_BLOCK) as file:
        size = os.fstat(file.fileno()).st_size
        while found.seen_bytes < size and time.monotonic() < until:
            header = file.read(_FRAME_BYTES)
            if not looks_like_tfrecord(header):
                raise SourceError(
                    f"{path}: no record begins at offset {found.seen_bytes:,}.", path=path,
                    offset_bytes=found.seen_bytes, next_step="Check the file.",
                )  # fmt: skip
            length = struct.unpack_from("<Q", header)[0]
            if length > min(size, _RECORD_BYTES_MAX):
                raise SourceError(
                    f"{path}: the record at offset {found.seen_bytes:,} leaves the file.", path=path,
                    offset_bytes=found.seen_bytes, next_step="Check the file.",
                )  # fmt: skip
            found.places.append((found.seen_bytes + _FRAME_BYTES, length))
            found.samples += 1
            found.seen_bytes += _FRAME_BYTES + length + _FOOTER_BYTES
            file.seek(found.seen_bytes)
        found.complete = found.seen_bytes >= size
    return found


def hop_tar(path: str, until: float) -> Hops:
    """Follow an uncompressed tar, WebDataset's keys as samples, until a moment of the monotonic clock.

    Raises:
        SourceError: it is none, or damaged.
        OSError: it cannot be read.
    """
    import tarfile

    found = Hops()
    key, main = b"", (0, -1, "")

    def finish() -> None:
        if main[1] >= 0:
            found.places.append((main[0], main[1]))
            found.samples += 1
            found.suffix = found.suffix or main[2]

    try:
        with (
            open(path, "rb", buffering=_BLOCK) as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            while time.monotonic() < until:
                member = tar.next()
                if member is None:
                    found.complete = True
                    break
                tar.members = []  # type: ignore[attr-defined]  # millions must not fill the memory
                found.seen_bytes = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                base = os.fsencode(os.path.basename(member.name))
                if not member.isreg() or base.startswith(b"."):
                    continue
                stem, dot, ending = os.fsencode(member.name).rpartition(b"/")[2].partition(b".")
                name = os.fsencode(os.path.dirname(member.name)) + b"/" + stem
                if name != key:
                    finish()
                    key, main = name, (0, -1, "")
                if member.size > main[1]:  # the largest part is the image; the others are labels
                    main = (member.offset_data, member.size, os.fsdecode(dot + ending).lower())
    except tarfile.TarError as e:
        raise SourceError(
            f"{path}: no tar can be read here: {e}.", path=path, next_step="Check the file."
        ) from e
    finish()
    return found

"""Files of tokens as a source: each document is a sample, where it lies.

* bare arrays, as nanoGPT writes them: one document a file. They say nothing of themselves, so the user says
  what they are (`format="uint16"`); a guess that is wrong would train on noise without an error.
* llm.c's: the same behind a header of 1,024 bytes, which says it.
* Megatron's pairs: `.bin` holds tokens, `.idx` where sequences and documents begin.

Every number of a header or an index is compared with the size of its file before anything is allocated by it.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.store.sources.scan import (
    Rows,
    damaged,
    file_volume,
    refused,
    scan_rows,
    source_entry,
    unreadable,
)

if TYPE_CHECKING:
    from headrace.store.sources.scan import Scan, SourceOptions

TOKEN_DTYPES: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
"""What tokens may be; as `format` they say what bare files hold."""

MEGATRON_MAGIC: Final = b"MMIDIDX\0\0"

_MEGATRON_DTYPES: Final = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
}  # fmt: skip
_MEGATRON_HEADER: Final = struct.Struct("<9sQBQQ")

_LLMC_BYTES: Final = 1024
_LLMC: Final = {20240520: ("uint16", 1), 20240801: ("uint32", 7)}
"""llm.c's magic numbers: what tokens are, and the version."""


def is_llmc(head: bytes) -> bool:
    """Whether a file that begins with `head` has llm.c's header."""
    return len(head) >= 12 and int.from_bytes(head[:4], "little") in _LLMC


def index_of_bin(path: str) -> str | None:
    """Megatron's index beside a file of tokens; None where there is none."""
    index = f"{path[:-4]}.idx"
    try:
        with open(index, "rb") as f:
            return index if f.read(9) == MEGATRON_MAGIC else None
    except OSError:
        return None


def scan_tokens(paths: list[str], options: SourceOptions) -> Scan:
    """Files of tokens without an index: each is one document."""
    stated = options.format if options.format in TOKEN_DTYPES else None
    files, dtypes = [], []
    for path in paths:
        try:
            with open(path, "rb") as f:
                status, head = os.fstat(f.fileno()), f.read(_LLMC_BYTES)
        except OSError as e:
            raise unreadable(path, e, "Check the path.") from e
        offset, dtype = _headed(path, head, status.st_size) if is_llmc(head) else (0, stated)
        if dtype is None or (stated is not None and dtype != stated):
            what = f"says that its tokens are {dtype}" if dtype else "does not say what it holds"
            raise refused(path, f"{what}, the format is {stated}.", "Check --as (format=...).")
        size = status.st_size - offset
        _check_whole(path, size, dtype)
        place = np.array([offset], np.uint64), np.array([size], np.uint64)
        files.append(Rows(file_volume(path, status), 1, {b"": place}))
        dtypes.append(dtype)
    return _joined("tokens", paths, files, dtypes, options)


def _headed(path: str, head: bytes, size: int) -> tuple[int, str]:
    """Where llm.c's tokens begin, and what they are."""
    magic, version, count = struct.unpack_from("<3i", head)
    dtype, known = _LLMC[magic]
    width = np.dtype(dtype).itemsize
    if version != known:
        raise refused(path, f"its version is {version}, expected {known}.", "Take another release.")
    if size < _LLMC_BYTES or count % (1 << 32) != (size - _LLMC_BYTES) // width % (1 << 32):
        expected = f"{max(0, size - _LLMC_BYTES) // width:,} in a file of {size:,} bytes"
        raise damaged(path, "number of tokens", f"{count:,}", expected, 8)
    return _LLMC_BYTES, dtype


def _check_whole(path: str, size: int, dtype: str) -> None:
    width = np.dtype(dtype).itemsize
    if size % width or not size:
        raise refused(
            path, f"has {size:,} bytes, expected a multiple of {width}, as tokens are {dtype}.",
            "Check --as (format=...), or fetch the file again.",
        )  # fmt: skip


def scan_megatron(paths: list[str], options: SourceOptions) -> Scan:
    """The documents of Megatron's pairs, each named by its `.bin` or `.idx`."""
    pairs = [(f"{path[:-4]}.bin", f"{path[:-4]}.idx") for path in paths]
    if len(set(pairs)) < len(pairs):
        raise refused(paths[0], "a pair is named twice.", "Name its .bin alone.")
    listed = [_list_documents(data, index) for data, index in pairs]
    return _joined(
        "megatron", [data for data, _ in pairs], [rows for rows, _ in listed],
        [dtype for _, dtype in listed], options,
    )  # fmt: skip


def _joined(
    kind: str, paths: list[str], files: list[Rows], dtypes: list[str], options: SourceOptions
) -> Scan:
    for path, dtype in zip(paths, dtypes, strict=True):
        if dtype != dtypes[0]:
            raise refused(
                path, f"its tokens are {dtype}, those of {paths[0]} are {dtypes[0]}, expected the same.",
                "Name files of one kind.",
            )  # fmt: skip
    source: dict[str, Any] = source_entry(kind, paths, options)
    source["tokens"] = {"dtype": dtypes[0]}
    return scan_rows(paths, files, source, options)


def _list_documents(data: str, index: str) -> tuple[Rows, str]:
    """A pair's documents, and what its tokens are."""
    try:
        status = os.stat(data)
        with open(index, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(_MEGATRON_HEADER.size)
            sequences, documents, dtype = _check_head(index, head, size)
            lengths = np.fromfile(f, "<i4", sequences).astype(np.int64)
            offsets = np.fromfile(f, "<i8", sequences)
            borders = np.fromfile(f, "<i8", documents)
    except OSError as e:
        raise unreadable(e.filename or index, e, "Megatron's .bin and .idx belong together.") from e
    width = np.dtype(dtype).itemsize
    at = _MEGATRON_HEADER.size
    if len(borders) < documents:
        raise damaged(index, "number of documents", documents, f"{len(borders)} that are there", at)
    _check_sequences(index, lengths, offsets, width, status.st_size)
    at += 12 * sequences
    if borders[0] != 0 or borders[-1] != sequences or (np.diff(borders) < 0).any():
        stated = f"{borders[0]:,} to {borders[-1]:,}"
        expected = f"ascending from 0 to {sequences:,}"
        raise damaged(index, "first sequences of the documents", stated, expected, at)
    # A document is one range of bytes: its sequences lie one behind the other.
    ends = offsets + lengths * width
    broken = np.flatnonzero(offsets[1:] != ends[:-1]) + 1
    inside = np.setdiff1d(broken, borders)
    if len(inside):
        raise refused(
            index, f"sequence {int(inside[0]):,} does not follow the one before it of the same document.",
            "Write the pair again with Megatron's tools.", at,
        )  # fmt: skip
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]) * width
    first = np.minimum(borders[:-1], max(0, sequences - 1))
    begin = offsets[first] if sequences else np.zeros(len(first), np.int64)
    length = sums[borders[1:]] - sums[borders[:-1]]
    begin[length == 0] = 0
    place = begin.astype(np.uint64), length.astype(np.uint64)
    return Rows(file_volume(data, status), len(length), {b"": place}), dtype


def _check_head(index: str, head: bytes, size: int) -> tuple[int, int, str]:
    """Numbers of sequences and of borders of documents, and what tokens are."""
    if len(head) < _MEGATRON_HEADER.size or not head.startswith(MEGATRON_MAGIC):
        raise damaged(
            index, "the head", head[:9].hex(" ") or "nothing", "an index of Megatron's", 0
        )
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(head)
    if version != 1:
        raise refused(index, f"its version is {version}, expected 1.", "Write it again.", 9)
    dtype = _MEGATRON_DTYPES.get(code)
    if dtype not in TOKEN_DTYPES:
        raise refused(
            index, f"its tokens are {dtype or f'of the type {code}'}, expected integers.",
            "Write it again.", 17,
        )  # fmt: skip
    left = size - _MEGATRON_HEADER.size
    # A byte for each sequence follows where there are several modes.
    if documents < 1 or left not in (
        12 * sequences + 8 * documents,
        13 * sequences + 8 * documents,
    ):
        stated = f"{sequences:,} sequences and {documents - 1:,} documents"
        raise damaged(index, "its content", stated, f"what fits into {size:,} bytes", 18)
    return sequences, documents, str(dtype)


def _check_sequences(
    index: str, lengths: np.ndarray, offsets: np.ndarray, width: int, size: int
) -> None:
    """Each sequence lies in the file of tokens; nothing is added up before that is known."""
    most = size // width
    wrong = (lengths < 0) | (lengths > most) | (offsets < 0) | (offsets > size)
    wrong |= lengths * width > size - np.clip(offsets, 0, size)
    if wrong.any():
        number = int(np.flatnonzero(wrong)[0])
        raise damaged(
            index, f"place of sequence {number:,}",
            f"{int(lengths[number]):,} tokens from byte {int(offsets[number]):,} on",
            f"inside of {size:,} bytes", _MEGATRON_HEADER.size + 4 * number,
        )  # fmt: skip

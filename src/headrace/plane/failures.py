"""Failures: what a batch met, as the error a user can act on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import CorruptSample, HeadraceError, SourceChanged, VolumeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OnError", "Skipped", "error_of"]

OnError = Literal["raise", "skip"]
"""`raise`: stop with an error that names the sample. `skip`: leave the sample out of its batch, keep
the number of steps, and record it."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that was left out of its batch."""

    index: int
    name: str
    reason: str


def error_of(failure: dict[str, Any], index: int, name_of: Callable[[int], str]) -> HeadraceError:
    """Return the error for one failed slot of a native batch.

    Args:
        failure: an element of `Catalog.failures`.
        index: the sample's index.
        name_of: gives the sample's name; asked only here, because names cost a look-up.
    """
    name = name_of(index)
    where = f"sample {index} ({name!r}) in {failure['path']} at offset {failure['offset']:,}"
    fields = {
        "path": failure["path"],
        "offset_bytes": failure["offset"],
        "index": index,
        "name": name,
    }
    kind = failure["kind"]
    if kind == "checksum":
        return CorruptSample(
            f"{where}: crc32c is {failure['crc_found']:08x}, expected "
            f"{failure['crc_expected']:08x} over {failure['length']:,} bytes.",
            next_step="Run `headrace verify` to list every bad sample and `headrace repair` to "
            "read them again from the source, or pass on_error='skip'.",
            **fields,
        )
    if kind == "short":
        return CorruptSample(
            f"{where}: the volume ends before the sample's {failure['length']:,} bytes do.",
            next_step="The volume was truncated: run `headrace verify`.",
            **fields,
        )
    if kind == "changed":
        return SourceChanged(
            f"{where}: the file vanished or is not as it was when it was indexed "
            f"(expected {failure['length']:,} bytes).",
            next_step="Index the folder again, or pass on_error='skip'.",
            **fields,
        )
    code = failure["errno"]
    return VolumeError(
        f"{where}: {os.strerror(code)} (errno {code}).",
        next_step="Look at the storage and at the kernel's log.",
        errno=code,
        **fields,
    )

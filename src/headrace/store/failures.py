"""What can go wrong with one sample, and the one error that says so.

Every reader (native, reference, verify) ends here, so a user meets the same words everywhere.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any

from headrace.errors import CorruptSample, HeadraceError, SourceChanged, VolumeError, VolumeTimeout


@dataclass(frozen=True, slots=True)
class Failure:
    """One extent that did not give its bytes.

    Attributes:
        kind: `checksum`, `short`, `changed` (a foreign file) or `system`.
        index: the sample.
        name: its name.
        path: the file.
        offset: of the extent in it.
        found: what was read.
        expected: what the directory says.
        errno: the system's error, for `system`.
        foreign: the file is not of our making.
    """

    kind: str
    index: int
    name: bytes
    path: str
    offset: int
    found: str
    expected: str
    errno: int = 0
    foreign: bool = False

    def to_error(self) -> HeadraceError:
        """The error to raise."""
        name = os.fsdecode(self.name)
        where = f"sample {self.index} ({name!r}): {self.path}"
        fields: dict[str, Any] = {
            "path": self.path, "offset_bytes": self.offset, "index": self.index, "name": name,
        }  # fmt: skip
        if self.kind == "system":
            kind = VolumeTimeout if self.errno == errno.ETIMEDOUT else VolumeError
            return kind(
                f"{where}: reading failed: {os.strerror(self.errno)} (offset {self.offset:,}).",
                errno=self.errno,
                next_step=_ADVICE.get(self.errno, "Check the disk and the file's permissions."),
                **fields,
            )
        if self.kind == "changed":
            return SourceChanged(
                f"{where}: {self.found}, expected {self.expected}: the file changed after it was "
                "indexed.",
                next_step="Index the source again.",
                **fields,
            )
        what = "checksum" if self.kind == "checksum" else "bytes"
        return CorruptSample(
            f"{where}: {what} {self.found}, expected {self.expected} (offset {self.offset:,}).",
            next_step=(
                "The source is damaged: restore it and index it again."
                if self.foreign
                else "Verify the store to list every bad sample, and repair it from its source."
            ),
            **fields,
        )


_ADVICE = {
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.EACCES: "Make the file readable for this user.",
    errno.ETIMEDOUT: "Look at the storage, or give a larger deadline_s.",
    errno.ECONNRESET: "Check the network and the storage's server.",
    errno.EIO: "The disk reports an error: check it, then verify the store.",
}

"""Manifest: what a generated folder holds, and whether all of it is there.

`headrace-dataset.json` in the data folder is written before the first file and again behind the last one. A
folder without it was made by someone else: it is read, and never written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.documents import DocumentKind
from headrace.base.files import replace_file
from headrace.bench.replay import fingerprint
from headrace.errors import SourceError

if TYPE_CHECKING:
    from headrace.bench.dataset import DatasetSpec

__all__ = ["FILE_NAME", "Manifest", "differences", "read_manifest", "wait_for"]

FILE_NAME = "headrace-dataset.json"
_KIND = DocumentKind(
    name="a data set's manifest",
    version=2,
    unchecked=1,
    error=SourceError,
    next_step="Generate the data set into another folder.",
    marks={"kind": "headrace data set"},
    bytes_max=1 << 20,
)
_POLL_S = 0.05

_NOT_DATA = ("data_folder", "keep_files", "generation_buffer_size", "record_length_bytes_resize")
"""Fields that the files do not depend on."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A data folder's manifest."""

    spec: dict[str, Any]
    """The fields that the files depend on, as JSON has them."""
    complete: bool
    files: int

    @classmethod
    def of(cls, spec: DatasetSpec, *, complete: bool) -> Manifest:
        """What `spec` asks for."""
        fields = {k: v for k, v in dataclasses.asdict(spec).items() if k not in _NOT_DATA}
        if spec.requests is None:
            del fields["requests"]
        else:
            fields = {"requests": fingerprint(spec.requests), "seed": spec.seed}
        return cls(json.loads(json.dumps(fields)), complete, spec.total_files)

    def write(self, folder: str) -> None:
        """Puts it in its place, durably. Several ranks may write the same at the same time."""
        text = _KIND.encode(dataclasses.asdict(self), indent=1)
        replace_file(Path(folder, FILE_NAME), text)


def read_manifest(folder: str) -> Manifest | None:
    """The manifest of a data folder; None where there is none.

    Raises:
        SourceError: it is damaged.
    """
    path = os.path.join(folder, FILE_NAME)
    try:
        with open(path, "rb") as f:
            text = f.read(_KIND.bytes_max + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    fields = _KIND.decode(text, path)
    return Manifest(
        fields.inner("spec").plain(), fields.flag("complete"), fields.integer("files", 0, 1 << 62)
    )


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What two manifests' specs differ in: "num_files_train 8 instead of 9"."""
    return [
        f"{key} {found.get(key)!r} instead of {value!r}"
        for key, value in expected.items()
        if found.get(key) != value
    ]


def wait_for(folder: str, expected: Manifest, deadline_s: float) -> None:
    """Waits until rank 0 has prepared the folder.

    Raises:
        SourceError: it has not, in time.
    """
    end = time.monotonic() + deadline_s
    while True:
        found = read_manifest(folder)
        if found is not None and found.spec == expected.spec:
            return
        if time.monotonic() > end:
            raise SourceError(
                f"{folder}: rank 0 has not begun this data set within {deadline_s:g} s.",
                path=folder,
                next_step="Look at rank 0's error; all ranks need the same workload and folder.",
            )
        time.sleep(_POLL_S)

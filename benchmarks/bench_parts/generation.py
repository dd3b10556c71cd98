"""Generation: headrace beside fio's sequential write of as many bytes, and beside DLIO's generator.

All write into new folders of one file system and count until it has everything on the disk: headrace calls
syncfs once at the end, fio fsync, DLIO nothing, so sync is called for it. Nothing is removed before the end:
ext4 searches long for inodes where many were just deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.bench_parts import own

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench_parts.peer import Dlio

LARGE, SMALL = 146_600_628, 100_000
"""Bytes of unet3d's samples, and of an image."""

_JPEG_PIXELS = 180_000
"""Of DLIO's jpegs of about 100,000 bytes: it calls pixels bytes."""

FIO_MODES = {
    "fio direct": ["--direct=1", "--ioengine=libaio", "--iodepth=4"],
    "fio buffered": ["--direct=0", "--ioengine=psync"],
}


@dataclass(frozen=True, slots=True)
class Case:
    """A data set to write."""

    name: str
    form: str
    files: int
    nbytes: int
    """Of a sample."""
    samples: int = 1
    dlio: bool = False

    @property
    def total(self) -> int:
        """Bytes of all samples."""
        return self.files * self.nbytes * self.samples


def cases(scale: float) -> list[Case]:
    """About 2 GB each of large files at scale 1, 0.8 GB of small ones."""
    large, small = max(2, round(14 * scale)), max(200, round(8000 * scale))
    return [
        Case("npz, 146 MB samples", "npz", large, LARGE),
        Case("npz, 100 kB samples", "npz", small, SMALL, dlio=True),
        Case("npy, 146 MB samples", "npy", large, LARGE),
        Case("indexed_binary, one file", "indexed_binary", 1, LARGE, large),
        Case("tfrecord, 1,251 samples a file", "tfrecord", large, 114_660, 1251),
        Case("jpeg, 100 kB samples", "jpeg", small, SMALL, dlio=True),
    ]


def fio(folder: Path, total: int, mode: str) -> dict[str, float]:
    """One sequential stream of writes into one file, and an fsync."""
    folder.mkdir(parents=True)
    command = [
        "fio", "--name=write", f"--directory={folder}", "--rw=write", "--bs=4M",
        f"--size={total // 4096 * 4096}", "--fallocate=none", "--end_fsync=1", *FIO_MODES[mode],
        "--output-format=json",
    ]  # fmt: skip
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    job = json.loads(text[text.index("{") :])["jobs"][0]
    shutil.rmtree(folder)
    return {"bytes": job["write"]["io_bytes"], "seconds": job["job_runtime"] / 1e3}


def one_round(
    folder: Path, case: Case, dlio: Dlio | None, *, have_fio: bool
) -> dict[str, dict[str, Any]]:
    """Everybody once; bytes and seconds, by who wrote."""
    seen: dict[str, dict[str, Any]] = {}
    os.sync()
    seen["headrace"] = own.call(
        "generate", folder / "headrace", case.form, case.files, case.nbytes, case.samples
    )
    for mode in FIO_MODES if have_fio else ():
        os.sync()
        seen[mode] = fio(folder / "fio", case.total, mode)
    if dlio is not None and case.dlio:
        os.sync()
        length = _JPEG_PIXELS if case.form == "jpeg" else case.nbytes
        files = max(1, case.files // 2)
        took = dlio.generate(folder / "dlio", case.form, files, length)
        nbytes = sum(f.stat().st_size for f in (folder / "dlio/train").iterdir())
        seen["DLIO"] = {"bytes": nbytes, "seconds": took["generate_synced_s"], **took}
    if case.files < 100:
        shutil.rmtree(folder)
    return seen

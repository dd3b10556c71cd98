"""Datasets of files for the tests of reading ahead, and what they must give."""

import os
import time
from pathlib import Path

from headrace.plane.read_ahead import ReadAhead


def content(index: int) -> bytes:
    return b"%08d" % index + bytes([index % 251]) * (100 + 997 * (index % 40))


def make_files(folder: Path, count: int) -> list[str]:
    """Files that are old enough to be trusted: younger than a clock tick may still change unseen."""
    folder.mkdir(exist_ok=True)
    paths = [str(folder / f"{i:05d}.bin") for i in range(count)]
    for i, path in enumerate(paths):
        Path(path).write_bytes(content(i))
    time.sleep(0.03)
    return paths


def drop_pages(path: str) -> None:
    """Have the file leave the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Hidden:
    """Opens one file a sample, and does not say which."""

    def __init__(self, paths: list[str]) -> None:
        self._where = dict(enumerate(paths))  # no list: nobody guesses

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> bytes:
        with open(self._where[index], "rb") as file:
            return file.read()


class Listed(Hidden):
    """The same, with the list that torchvision's folders have."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(paths)
        self.samples = [(path, 0) for path in paths]


def serve(ahead: ReadAhead, dataset, indices, *, ready: bool = True) -> list[bytes]:
    """One epoch. `ready`: every file is read before it is asked for, so that counts are exact."""
    indices = list(indices)
    ahead.coming(indices)
    delivered = []
    for index in indices:
        if ready:
            settle(ahead)
        with ahead.sample(index):
            delivered.append(dataset[index])
    return delivered


def settle(ahead: ReadAhead) -> None:
    """Wait until all that has room is read."""
    deadline = time.monotonic() + 30
    while any(not job.native.done for job in list(ahead._jobs) if job.native is not None):
        if ahead.stats().buffered_bytes >= ahead.knobs()["buffer_bytes"] // 2:
            return  # the rest waits for memory
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))

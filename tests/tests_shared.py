"""What tests of several rooms share: small images and folders of them, and what is open."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import random
import re
import shutil
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
CLIPART = Path("/usr/share/openclipart/png")  # Debian's openclipart-png, as `make demo` installs it
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

CLASSES = ("cats", "dogs", "owls")
IMAGES_PER_CLASS = 12


def png(seed: int, side: int = 8) -> bytes:
    """A valid PNG of noise, different for each seed."""
    noise = random.Random(seed)
    rows = b"".join(b"\0" + noise.randbytes(3 * side) for _ in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@contextlib.contextmanager
def opened_to_others(*paths: Path) -> Iterator[None]:
    """While it lasts, every user may read the paths and pass the folders above them; then all is as it was.

    For what root does as another user: pytest's folders are for their owner alone. Only what is ours
    and closed is touched: a mode set on a shared folder, such as /tmp, would outlive the tests. Processes that
    share the tests out share pytest's folders too: one at a time opens them.
    """
    changed: list[tuple[Path, int]] = []
    turn = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(turn, fcntl.LOCK_EX)
    try:
        for place in dict.fromkeys(place for path in paths for place in (path, *path.parents)):
            seen = place.stat()
            if seen.st_mode & 0o055 != 0o055 and seen.st_uid == os.geteuid():
                changed.append((place, seen.st_mode & 0o7777))
                place.chmod(changed[-1][1] | 0o055)
        yield
    finally:
        for path, mode in changed:
            path.chmod(mode)
        os.close(turn)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """A process that was forked now, and lives as long as the block runs."""
    ends, goes_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(goes_on)
        os.read(ends, 1)
        os._exit(0)
    os.close(ends)
    yield
    os.close(goes_on)
    os.waitpid(child, 0)


def write_photos(folder: Path, per_class: int = IMAGES_PER_CLASS) -> Path:
    """Writes a folder of PNG files, a folder per class."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            path = folder / name / f"{i}.png"
            path.write_bytes(png(label * per_class + i, side=4 + i))
    return folder


def write_real_images(folder: Path, per_class: int = 64) -> Path:
    """Writes a folder of three classes of clip art, or of noise where there is none."""
    if not CLIPART.is_dir():
        return write_photos(folder, per_class)
    for name in ("animals", "shapes", "transportation"):
        (folder / name).mkdir(parents=True)
        found = sorted((CLIPART / name).rglob("*.png"), key=lambda p: (p.stat().st_size, p))
        for i, path in enumerate(found[:per_class]):
            shutil.copy(path, folder / name / f"{i:03d}.png")
    return folder


def example(name: str) -> ModuleType:
    """A script of `examples/`, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in any of some languages."""
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def descriptors(*folders: Path | str) -> Counter[str]:
    """What this process has open below folders, and its rings and headrace's shared memory."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            name = str(fd.readlink())
        except OSError:  # closed meanwhile
            continue
        ours = "io_uring" in name or "memfd:headrace" in name
        if ours or any(Path(name).is_relative_to(folder) for folder in folders):
            found[name] += 1
    return found


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens now, below the range from which the kernel gives ports to connections."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(18_000, 30_000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("", port))
            ports.add(port)
    return list(ports)


def own_bytes(*processes: int) -> int:
    """Memory of processes (of this one, unless told otherwise) that lies in no file.

    Proportional (PSS), as shared memory counts once. What is mapped from files is left out: its share
    changes with every other process that has the same libraries.
    """
    total = 0
    for pid in processes or ("self",):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) << 10
    return total


STEADY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
"""Environment of a process whose memory is measured: what it frees it gives back. Otherwise the C library keeps
blocks of up to twice the largest that was ever freed, and two megabytes more or less are chance."""


_OF_ALL = {"headrace-control", "headrace-interpreter", "headrace-trace"}
"""A process has one of each for all its loaders; they come and go by themselves."""


def python_threads() -> int:
    """Python's threads of this process, but for those that serve all loaders."""
    return sum(thread.name not in _OF_ALL for thread in threading.enumerate())


def threads() -> int:
    """Threads of this process, native ones included, but for those that serve all loaders."""
    # By their numbers: one that ends between two counts would be missing for good in what is compared later.
    of_all = {thread.native_id for thread in threading.enumerate() if thread.name in _OF_ALL}
    return sum(int(task.name) not in of_all for task in Path("/proc/self/task").iterdir())


def until(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for what threads or processes bring about a moment later; returns what `holds` does then.

    Raises:
        AssertionError: it does not come true in time.
    """
    if found := comes_true(holds, seconds):
        return found
    raise AssertionError(f"not within {seconds:g} s: {holds}")


def comes_true(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What `holds` returns as soon as that is true, or in the end: nobody minds if it is not."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found

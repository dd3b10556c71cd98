"""What tests and experiments of users need: storage that is slow, or fails, on demand.

`simulated_files` lets plain Python code feel a slow storage. Within the context, opening and reading files
below the given folders takes as long as a simulated storage says, without the interpreter's lock while it
waits, so that threads overlap as they would. Processes that are forked meanwhile (a DataLoader's workers)
inherit it, and queue for the same storage.

Of this process's own code only Python's calls are seen: `open`, `io.open`, `os.open` and `os.read`, with
what is built on the first two (pathlib, PIL, numpy.load of a path); and headrace's reading ahead.
Libraries that open files in C are not. Files are read as a whole in most training programs; here the
delay of a file's bytes is paid when it is read, in requests of at most `REQUEST_BYTES`, read-ahead
included.
"""

from __future__ import annotations

import io
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from headrace.io.replaced import STORAGE, Replaced, os_open, os_read, python_open
from headrace.io.simulation import (
    PRESETS,
    SimulatedPaths,
    Simulation,
    simulate_paths,
    simulation_of,
    stop_simulating,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace import _native

__all__ = ["PRESETS", "Simulation", "SlowVolume", "simulated_files"]

REQUEST_BYTES = 1 << 20
"""The largest read that goes to a network file system in one piece (rsize, Lustre's RPC size)."""


class SlowVolume:
    """A simulated storage in use. Give it to `simulate=` of a loader, or to `simulated_files`.

    Its queues and steps are shared with processes that are forked after it was made; it cannot be
    sent to a process in another way.

    Args:
        simulation: what it is like: a preset's name or a `Simulation`.
    """

    def __init__(self, simulation: str | Simulation) -> None:
        self.simulation = simulation_of(simulation)
        self.model: _native.SlowModel = self.simulation.model()

    @property
    def label(self) -> str:
        """What to call figures that were measured on it: `simulated NAME`."""
        return self.model.label

    def scale_latency(self, factor: float) -> None:
        """Multiply all latencies by `factor` from now on: 1 is as the simulation says.

        Raises:
            ValueError: the factor is not positive.
        """
        self.model.scale_latency(factor)

    def stats(self) -> Mapping[str, float]:
        """`requests`, `bytes`, `errors` and `delay_s` (their sum) so far, of all processes."""
        return self.model.stats()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a SlowVolume cannot be pickled: its queues are shared by fork only")


class _SlowRaw(io.FileIO):
    """A raw file each of whose reads takes its time."""

    def __init__(self, file: Any, mode: str, volume: SlowVolume, opener: Any = None) -> None:
        super().__init__(file, mode, opener=opener)
        self._volume = volume

    def readinto(self, buffer: Any, /) -> int | None:
        with memoryview(buffer).cast("B") as view:
            count = super().readinto(view[:REQUEST_BYTES])
        self._pay(count or 0)
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        data = super().read(min(size, REQUEST_BYTES)) or b""
        self._pay(len(data))
        return data

    def readall(self) -> bytes:
        parts = []
        while part := self.read(REQUEST_BYTES):
            parts.append(part)
        return b"".join(parts)

    def _pay(self, count: int) -> None:
        error = self._volume.model.read_delay(count) if count else 0
        if error:
            raise OSError(error, f"{os.strerror(error)} ({self._volume.label})", self.name)


class _Layers:
    """What lies over the calls, and which files it slows down."""

    def __init__(self, volume: SlowVolume, roots: Sequence[str]) -> None:
        self._volume = volume
        self.roots = tuple(os.path.realpath(root) for root in roots)
        self._slow_fds: set[int] = set()

    def is_slow(self, file: Any) -> bool:
        if isinstance(file, int):
            return False
        try:
            path = os.path.realpath(os.fsdecode(file))
        except (TypeError, ValueError):
            return False
        return any(path == root or path.startswith(root.rstrip("/") + "/") for root in self.roots)

    def open(  # noqa: PLR0917 - the signature of `builtins.open`
        self,
        beneath: Callable[..., Any],
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        """As `builtins.open`; files that are only read, below the roots, are slow."""
        if not self.is_slow(file) or set(mode) - set("rbt"):
            return beneath(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if "b" in mode and (encoding or errors or newline is not None):  # let it say what is wrong
            return beneath(file, mode, buffering, encoding, errors, newline, closefd, opener)
        self._volume.model.open_delay()
        raw = _SlowRaw(file, "r", self._volume, opener)
        if buffering == 0 and "b" in mode:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered = io.BufferedReader(raw, size)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
        text.mode = mode  # type: ignore[misc]  # as `open` itself does
        return text

    def os_open(
        self, beneath: Callable[..., int], path: Any, flags: int, *args: Any, **kwargs: Any
    ) -> int:
        slow = self.is_slow(path) and flags & os.O_ACCMODE == os.O_RDONLY
        if slow:
            self._volume.model.open_delay()
        fd = beneath(path, flags, *args, **kwargs)
        (self._slow_fds.add if slow else self._slow_fds.discard)(fd)
        return fd

    def os_read(self, beneath: Callable[..., bytes], fd: int, length: int, /) -> bytes:
        data = beneath(fd, length)
        if data and fd in self._slow_fds:
            error = self._volume.model.read_delay(len(data))
            if error:
                raise OSError(error, f"{os.strerror(error)} ({self._volume.label})")
        return data


@contextmanager
def simulated_files(
    storage: str | Simulation | SlowVolume,
    *roots: str | os.PathLike[str],
) -> Iterator[SlowVolume]:
    """Make files below `roots` as slow to open and read as `storage`, for this process's Python code.

    Args:
        storage: a preset's name, a `Simulation`, or a `SlowVolume` that others use too.
        roots: folders (or files) that are on it.

    Yields:
        The storage: its label, its statistics, and its step changes.

    Raises:
        ValueError: no preset has this name, or no root is given.
        RuntimeError: somebody else has replaced one of these calls.
    """
    if not roots:
        raise ValueError("roots is empty, expected the folders that are on the simulated storage")
    volume = storage if isinstance(storage, SlowVolume) else SlowVolume(storage)
    layers = _Layers(volume, [os.fsdecode(root) for root in roots])
    paths = SimulatedPaths(volume.model, layers.roots)
    with ExitStack() as ending:
        for function, layer in (
            (python_open, layers.open),
            (os_open, layers.os_open),
            (os_read, layers.os_read),
        ):
            _lay(function, layer, ending)
        simulate_paths(paths)
        ending.callback(stop_simulating, paths)
        yield volume


def _lay(function: Replaced, layer: Callable[..., Any], ending: ExitStack) -> None:
    ending.callback(function.remove, layer)
    if not function.add(layer, STORAGE):
        raise RuntimeError(
            f"{function.__module__}.{function.__name__} was replaced by somebody else: files cannot be "
            "slowed down. Leave simulated_files until that is over."
        )

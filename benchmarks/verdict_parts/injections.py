"""Injections: known bottlenecks, on the real mechanisms of this machine where it has them.

Each is a context that yields a loader whose main cause of waiting is known. What is simulated (a slow
storage's delays) or stands in for what this machine has not (a device to copy to) says so in its label.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import headrace as hr
from benchmarks.verdict_parts.servers import serving
from headrace.base.causes import Cause
from headrace.frameworks.torch import deliveries
from headrace.io.simulation import Simulation
from headrace.testing import SlowVolume
from headrace.torch import DataLoader, StoreLoader

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 32


@dataclass(frozen=True)
class Place:
    """Where the data lie: a folder of files, and a store that they were packed into."""

    files: Path
    store: Path


def make_place(folder: Path, samples: int = 3000, size: int = 24_000, seed: int = 3) -> Place:
    """Write samples of random bytes, and pack them."""
    rng = np.random.default_rng(seed)
    place = Place(folder / "files", folder / "store.hr")
    for at in range(samples):
        path = place.files / f"class{at % 10}" / f"{at:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(int(size * rng.uniform(0.6, 1.4))))
    hr.pack(place.files, place.store)
    return place


Injection = Callable[[Place, float, int], AbstractContextManager[Any]]
"""Of a place, a strength (1: as usual) and a seed: a loader that waits for what is injected."""


@contextmanager
def slow_opens(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """Files, on a simulated storage that opens slowly."""
    storage = Simulation(
        name="slow opens", latency_s=0.0005, open_s=0.03 * strength, open_p99_s=0.06 * strength,
        seed=seed,
    )  # fmt: skip
    with hr.open(place.files) as store:
        yield hr.loader(store, BATCH, seed=seed, simulate=storage, tune=False)


@contextmanager
def slow_reads(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """A simulated storage that answers late, however little it is asked."""
    storage = Simulation(
        name="slow reads", latency_s=0.04 * strength, latency_p99_s=0.08 * strength, seed=seed
    )
    yield hr.loader(place.store, BATCH, seed=seed, simulate=storage, tune=False)


@contextmanager
def narrow_link(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """A simulated storage with a capped rate of bytes."""
    storage = Simulation(
        name="narrow link", latency_s=0.0005, latency_p99_s=0.001,
        bandwidth_bytes_per_s=30e6 / strength, seed=seed,
    )  # fmt: skip
    yield hr.loader(place.store, BATCH, seed=seed, simulate=storage, tune=False)


@contextmanager
def few_heads(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """A simulated storage that serves a few reads at a time, as a disk array does."""
    storage = Simulation(
        name="few heads", latency_s=0.004 * strength, latency_p99_s=0.008 * strength, parallelism=4,
        seed=seed,
    )  # fmt: skip
    yield hr.loader(place.store, BATCH, seed=seed, simulate=storage, tune=False)


@contextmanager
def slow_peer(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """Another node's disk over NVMe/TCP on loopback, every answer delayed."""
    with (
        serving("nvme", place.store, delay_s=0.1 * strength) as url,
        hr.open(url) as store,
    ):
        yield hr.loader(store, BATCH, seed=seed, tune=False)


@contextmanager
def narrow_peer(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """Another node's disk over NVMe/TCP on loopback, with a capped rate."""
    with (
        serving("nvme", place.store, bytes_per_s=25e6 / strength) as url,
        hr.open(url) as store,
    ):
        yield hr.loader(store, BATCH, seed=seed, tune=False)


@contextmanager
def slow_objects(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """A store behind HTTP on loopback, every answer delayed."""
    with (
        serving("http", place.store, delay_s=0.08 * strength) as url,
        hr.open(url) as store,
    ):
        yield hr.loader(store, BATCH, seed=seed, tune=False)


class Burn:
    """Computes for so long without the interpreter's lock, as native decoders do."""

    def __init__(self, seconds: float) -> None:
        self.data = bytes(1 << 16)
        began = time.thread_time()
        for _ in range(20):
            zlib.crc32(hashlib.sha256(self.data).digest())
        self.rounds = max(1, round(seconds / ((time.thread_time() - began) / 20)))

    def __call__(self, data: Any) -> Any:
        """Compute."""
        for _ in range(self.rounds):
            hashlib.sha256(self.data)
        return len(data)


@contextmanager
def busy_decode(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """Decoding that takes more processor time than there is."""
    with _store_loader(place, seed, Burn(0.001 * strength)) as loader:
        yield loader


def _python_work(rounds: int) -> Callable[[Any], int]:
    def work(data: Any) -> int:
        total = 0
        for at in range(rounds):
            total = (total * 31 + at) % 1_000_003
        return total + len(data)

    return work


@contextmanager
def python_decode(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """Decoding in plain Python: it holds the lock itself."""
    with _store_loader(place, seed, _python_work(int(15_000 * strength))) as loader:
        yield loader


@contextmanager
def hog(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """A thread of the user's that computes in Python and never waits, beside a light decode."""
    ending = threading.Event()

    def spin() -> None:
        total = 0
        while not ending.is_set():
            for at in range(1000):
                total += at

    def yielding(data: Any) -> int:
        time.sleep(0.0002)  # lets go of the lock, and wants it back
        return len(data)

    others = [threading.Thread(target=spin, daemon=True) for _ in range(max(1, int(strength)))]
    with _store_loader(place, seed, yielding) as loader:
        for other in others:
            other.start()
        try:
            yield loader
        finally:
            ending.set()
            for other in others:
                other.join()


@contextmanager
def slow_collate(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """A collate function that waits for something."""

    def collate(samples: list[Any]) -> int:
        time.sleep(0.03 * strength)
        return len(samples)

    with _store_loader(place, seed, len, collate_fn=collate) as loader:
        yield loader


@contextmanager
def slow_transfer(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """Copying to a device that this machine has not: the step is real, the device a pause."""

    def copy(value: Any) -> Any:
        time.sleep(0.03 * strength)
        return value

    before = deliveries.pinned
    deliveries.pinned = copy  # type: ignore[assignment]
    try:
        with _store_loader(place, seed, len, pin_memory=True) as loader:
            yield loader
    finally:
        deliveries.pinned = before


@contextmanager
def few_reads(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """One read at a time, because somebody said so."""
    storage = Simulation(name="fair", latency_s=0.001 * strength, latency_p99_s=0.002 * strength,
                         seed=seed)  # fmt: skip
    yield hr.loader(place.store, BATCH, seed=seed, simulate=storage, reads_in_flight=1)


@contextmanager
def small_buffer(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """Room for hardly more than one batch, because somebody said so."""
    storage = Simulation(name="fair", latency_s=0.015 * strength, latency_p99_s=0.02 * strength,
                         seed=seed)  # fmt: skip
    yield hr.loader(
        place.store, BATCH, seed=seed, simulate=storage, budget_bytes=1 << 20, tune=False
    )


@contextmanager
def throttled(place: Place, strength: float, seed: int) -> Iterator[Any]:
    """A limit on bytes per second."""
    # What the page cache serves costs no limit: the bytes must come from storage.
    storage = Simulation(name="fair", latency_s=0.0003, seed=seed)
    yield hr.loader(
        place.store, BATCH, seed=seed, bytes_per_s=20e6 / strength, simulate=storage, tune=False
    )


class Files:
    """A torch data set over files."""

    def __init__(self, folder: Path, decode: Callable[[bytes], Any]) -> None:
        self.paths = sorted(str(path) for path in folder.rglob("*.bin"))
        self.decode = decode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as f:  # noqa: PTH123
            return self.decode(f.read())


@contextmanager
def dropin_decode(place: Place, strength: float, _seed: int) -> Iterator[Any]:
    """Torch's loader by one changed import, two workers that decode too slowly."""
    yield DataLoader(
        Files(place.files, Burn(0.001 * strength)),  # type: ignore[arg-type]
        BATCH, num_workers=2, shuffle=True, collate_fn=len,
    )  # fmt: skip


class Sleeper:
    """A collate function for workers."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, samples: list[Any]) -> int:
        time.sleep(self.seconds)
        return len(samples)


@contextmanager
def dropin_collate(place: Place, strength: float, _seed: int) -> Iterator[Any]:
    """The same, whose collate function waits."""
    yield DataLoader(
        Files(place.files, len),  # type: ignore[arg-type]
        BATCH, num_workers=2, shuffle=True, collate_fn=Sleeper(0.05 * strength),
    )  # fmt: skip


@contextmanager
def _store_loader(
    place: Place, seed: int, decode: Callable[[Any], Any], **more: Any
) -> Iterator[Any]:
    with StoreLoader(
        place.store, BATCH, shuffle=True, seed=seed, decode=decode, threads=2,
        **{"collate_fn": len, "pin_memory": False, **more},
    ) as loader:  # fmt: skip
        yield loader


KINDS: dict[str, tuple[Injection, Cause]] = {
    "slow opens": (slow_opens, Cause.METADATA),
    "slow reads": (slow_reads, Cause.LATENCY),
    "capped rate": (narrow_link, Cause.BANDWIDTH),
    "few heads": (few_heads, Cause.BANDWIDTH),
    "peer, delayed": (slow_peer, Cause.PEER),
    "peer, capped": (narrow_peer, Cause.PEER),
    "objects, delayed": (slow_objects, Cause.NETWORK),
    "busy decode": (busy_decode, Cause.DECODE),
    "decode in Python": (python_decode, Cause.DECODE),
    "lock held": (hog, Cause.PYTHON),
    "sleep in collate": (slow_collate, Cause.COLLATE),
    "fake device": (slow_transfer, Cause.TRANSFER),
    "one read at a time": (few_reads, Cause.PREFETCH),
    "small buffer": (small_buffer, Cause.PREFETCH),
    "throttle": (throttled, Cause.POLICY),
    "drop-in: decode": (dropin_decode, Cause.DECODE),
    "drop-in: collate": (dropin_collate, Cause.COLLATE),
}
"""By name: how it is injected, and what is to be found."""


__all__ = ["BATCH", "KINDS", "Burn", "Place", "SlowVolume", "make_place"]

"""NodeOptions: how much a node daemon may take, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.config import ReaderOptions, TierOptions
from headrace.control.metrics import address_of
from headrace.machine.host import available_memory
from headrace.plane.memory_tier import memory_quota

if TYPE_CHECKING:
    from headrace.control.client import Endpoint

__all__ = ["NodeOptions", "automatic_ram_bytes"]


def automatic_ram_bytes() -> int:
    """Half of the memory that machine and cgroup have left, 2 GiB left alone."""
    everything = 1 << 60
    return memory_quota("auto", far=True, data_bytes=everything, available_bytes=available_memory())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a daemon may take. None of it changes what is delivered.

    Raises:
        ValueError: a value is out of bounds.
    """

    ram_bytes: int = field(default_factory=automatic_ram_bytes)
    """Memory for samples, of all data sets together."""

    job_ram_bytes: int | None = None
    """Memory for the data sets of one job. None: no limit of its own."""

    yielding: bool = True
    """Give memory for samples back when the machine or the cgroup runs short of it."""

    window_bytes: int = 256 << 20
    """Batches that one client may hold or be read for, beyond samples that are kept."""

    job_window_bytes: int = 1 << 30
    """The same for all clients of one job."""

    sessions_max: int = 1024
    """Clients at a time."""

    controller: Endpoint | None = None
    """Who says what jobs may take from file systems; None: nobody."""
    metrics: str | None = None
    """Where Prometheus may ask: `[HOST:]PORT`, on loopback without a host. None: nowhere."""

    reader: ReaderOptions = field(default_factory=ReaderOptions)
    tiers: TierOptions = field(default_factory=TierOptions)
    """`cache_dir`, `bytes_per_s`, ...; `ram_bytes` is shared out by the daemon."""

    def __post_init__(self) -> None:
        bounds = {
            "ram_bytes": (0, 1 << 50),
            "job_ram_bytes": (0, 1 << 50),
            "window_bytes": (1 << 20, 1 << 40),
            "job_window_bytes": (1 << 20, 1 << 40),
            "sessions_max": (1, 65536),
        }
        if self.metrics is not None:
            address_of(self.metrics)
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}, expected {low} to {high}")

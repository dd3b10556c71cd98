"""A target on loopback, with a namespace of known bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from headrace.fabric.identity import HostIdentity
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NQN = "nqn.2026-11.io.example:one"
HOST = HostIdentity("nqn.2026-11.io.example:host-a", bytes(range(1, 17)))
OTHER_HOST = HostIdentity("nqn.2026-11.io.example:host-b", bytes(range(2, 18)))
BYTES = (1 << 20) + 700
"""No multiple of a block: the last is filled up."""


class Exported(NamedTuple):
    target: Target
    subsystem: Subsystem
    path: Path
    data: np.ndarray

    @property
    def url(self) -> str:
        host, port = self.target.address
        return f"nvme+tcp://{host}:{port}/{self.subsystem.nqn}?ns=1"


def write_disk(path: Path, seed: int = 1, size: int = BYTES) -> np.ndarray:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    path.write_bytes(data.tobytes())
    return data


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[Exported]:
    path = tmp_path / "disk"
    data = write_disk(path)
    subsystem = Subsystem(NQN)
    subsystem.add(path)
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        yield Exported(target, subsystem, path, data)
    subsystem.close()

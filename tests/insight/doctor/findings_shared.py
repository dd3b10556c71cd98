"""Findings as an examination would have them, for what is concluded from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.insight.doctor.findings import (
    Cpu,
    DataPlace,
    DataSet,
    Decode,
    Environment,
    Findings,
    OpenRates,
    PlainReads,
    Point,
    StorageRates,
)

FREE = 64 << 30


def point(depth: int, per_s: float, size: float = 110e3) -> Point:
    return Point(
        depth=depth, per_s=per_s, bytes_per_s=per_s * size, p50_s=depth / per_s,
        p99_s=4 * depth / per_s, cpu_s=50e-6, reads=100,
    )  # fmt: skip


def findings(**changes: Any) -> Findings:
    """A data set of a million JPEGs on a parallel file system, beside 16 idle CPUs."""
    found = Findings(
        data=DataSet(
            path="/scratch/train", kind="folder", format="jpeg", samples=1_281_167, exact=True,
            files=1_281_167, folders=1000, nbytes=142e9, size_p10=40e3, size_p50=110e3,
            size_p90=180e3, size_max=15e6, size_mean=111e3, classes=1000,
        ),
        place=DataPlace(mount="/scratch", file_system="lustre", network=True),
        resident=0.02,
        opens=OpenRates(one_per_s=3000.0, many_per_s=20_000.0, threads=16),
        storage=StorageRates(
            points=(point(1, 310.0), point(4, 1200.0), point(16, 4000.0), point(64, 9800.0)),
            opened=point(64, 11_000.0), small=point(64, 14_000.0), engine="threads",
        ),
        plain=PlainReads(
            first_s=3.2e-3, first_cpu_s=120e-6, again_cpu_s=60e-6, reads=100
        ),
        decode=Decode(
            format="jpeg", decoder="Pillow 13", sample_s=1.6e-3, side=224,
            out_bytes=150_528.0, samples=500, pixels=200_000.0,
        ),
        cpu=Cpu(others=0.0, fresh_bytes_per_s=2.5e9, used_bytes_per_s=10e9),
        environment=Environment(
            kernel="6.1.0", cpus=16.0, cpus_machine=16, cpus_affinity=16, memory_bytes=2 * FREE,
            memory_free_bytes=FREE, nofile_soft=1 << 16, nofile_hard=1 << 20,
            shm_free_bytes=FREE, engine="uring",
        ),
        seconds=14.2,
    )  # fmt: skip
    for name, value in changes.items():
        before = getattr(found, name)
        setattr(found, name, replace(before, **value) if isinstance(value, dict) else value)
    return found

"""Advice about the machine: what would make training fail, and what else is worth knowing. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from headrace.base.text import bytes_text
from headrace.insight.doctor.findings import Advice
from headrace.insight.doctor.predict import fits_in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.doctor.findings import Expected, Findings

__all__ = ["what_fails", "what_is_worth_knowing"]

_PREFETCH: Final = 2
"""Batches that each of torch's workers keeps ready."""

_DESCRIPTORS: Final = 4096
_DESCRIPTORS_FAIL: Final = 512
_BATCHES_BEFORE_SHM_IS_FULL: Final = 0.8
_RSIZE: Final = 1 << 18


def what_fails(found: Findings, batch: int, workers: int) -> Iterator[Advice]:
    """Limits that torch's workers would run into; `blocking` where they surely would."""
    environment, decode = found.environment, found.decode
    if environment is None:
        return
    need = workers * _PREFETCH * batch * decode.out_bytes if decode is not None and workers else 0.0
    shm = environment.shm_free_bytes
    if shm is not None and need > _BATCHES_BEFORE_SHM_IS_FULL * shm:
        wanted = max(1, -(-int(2 * need) // (1 << 30)))
        yield Advice(
            key="shm", do=f"Give the container more shared memory ({wanted} GB), or use headrace's loader.",
            because=f"torch's {workers} workers keep {bytes_text(need)} of batches in /dev/shm, where "
            f"{bytes_text(shm)} are free: they die of a bus error. headrace does not use /dev/shm",
            gain="training does not crash", command=f"docker run --shm-size={wanted}g IMAGE",
            blocking=True,
        )  # fmt: skip
    if environment.nofile_soft < _DESCRIPTORS:
        can = environment.nofile_hard >= 2 * environment.nofile_soft
        more = min(environment.nofile_hard, 65_536)
        yield Advice(
            key="nofile", do="Let the process open more files.",
            because=f"the limit is {environment.nofile_soft:,} open files (hard limit "
            f"{_limit_text(environment.nofile_hard)}); workers and their batches need some thousands",
            gain='no "Too many open files" in the middle of training',
            command=f"ulimit -n {more}" if can else "ulimit -Hn  # ask your admin for 65536",
            blocking=environment.nofile_soft < _DESCRIPTORS_FAIL,
        )  # fmt: skip


def _limit_text(value: int) -> str:
    return "none" if value >= 1 << 60 else f"{value:,}"


def what_is_worth_knowing(found: Findings, torch: Expected | None, name: str) -> Iterator[Advice]:
    """What helps a little, or only some: each with what says so."""
    environment, data, place = found.environment, found.data, found.place
    assert data is not None
    if environment is not None and environment.engine_why and environment.engine != "uring":
        yield Advice(
            key="io_uring", do="Allow io_uring, where you can: headrace reads by threads without it.",
            because=environment.engine_why.rstrip("."),
            gain="less processor time for each read, and more of them from a local NVMe disk; nothing on a "
            "network",
            command="docker run --security-opt seccomp=unconfined IMAGE",
        )  # fmt: skip
    if environment is not None and data.nbytes and not fits_in_memory(found):
        limit = environment.memory_limit_bytes
        if limit is not None and data.nbytes < environment.memory_bytes and limit < data.nbytes:
            yield Advice(
                key="memory", do="Ask for memory enough to keep the data, if you can.",
                because=f"the job's limit is {bytes_text(limit)}, the data have "
                f"{bytes_text(data.nbytes)}, the machine {bytes_text(environment.memory_bytes)}",
                gain="later epochs come from memory",
                command=f"srun --mem={-(-int(1.4 * data.nbytes) >> 30)}G python train.py",
            )  # fmt: skip
    if place is not None:
        yield from _mount_options(place.options, place.file_system, place.mount)
    if torch is not None and torch.stall is None:
        yield Advice(
            key="step", do="Tell the doctor what a step of your model takes: does your GPU wait at all?",
            because="--step-ms was not given", gain="a verdict on your model",
            command=f"headrace doctor {name} --batch 256 --step-ms 100",
        )  # fmt: skip


def _mount_options(options: tuple[str, ...], kind: str, mount: str) -> Iterator[Advice]:
    if "strictatime" in options:
        yield Advice(
            key="mount", do="Mount with noatime.",
            because=f"{mount} is mounted with strictatime: each read writes when it was",
            gain="no writes while training reads",
            command=f"sudo mount -o remount,noatime {shlex.quote(mount)}",
        )  # fmt: skip
    rsize = next((o.removeprefix("rsize=") for o in options if o.startswith("rsize=")), "")
    if kind.startswith("nfs") and rsize.isdigit() and int(rsize) < _RSIZE:
        yield Advice(
            key="rsize", do="Mount with a larger rsize.",
            because=f"{mount} reads in pieces of {int(rsize):,} bytes", gain="fewer requests a file",
            command=f"sudo mount -o remount,rsize=1048576 {shlex.quote(mount)}",
        )  # fmt: skip

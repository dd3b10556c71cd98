"""Examine: measures one thing after the other within the time, and keeps what it has, however it ends.

The measuring runs in a thread of its own. Ctrl-C, or a storage that does not answer any more, ends the
waiting for it: what is known by then is returned, and the thread is left to end by itself.

Nothing is written, and nothing is put out of the page cache. What is read may come to lie in it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.text import printable
from headrace.errors import HeadraceError, VolumeTimeout
from headrace.insight.doctor.findings import DataPlace, Environment, Findings, StorageRates
from headrace.insight.doctor.reads import (
    FileReads,
    PieceReads,
    StoreReads,
    copy_speeds,
    open_rates,
    plain_reads,
    resident_share,
)
from headrace.insight.doctor.samples import Piece, measure_decoding, version_of
from headrace.insight.doctor.survey import survey
from headrace.io.objects.location import is_url, root_of, scheme_of, shown
from headrace.machine.host import (
    available_memory,
    byte_fields,
    cpu_quota,
    cpu_times,
    is_network,
    memory_usages,
    mount_of,
    mounts,
    read_text,
)
from headrace.store.residency import can_read_direct
from headrace.store.sources.contents import format_of_bytes
from headrace.testing import SlowVolume, simulated_files

if TYPE_CHECKING:
    from headrace.insight.doctor.findings import OpenRates, Point
    from headrace.insight.doctor.reads import RandomReads
    from headrace.insight.doctor.samples import SamplePool
    from headrace.io.simulation import Simulation
    from headrace.machine.host import CpuTimes

_ROOT: Final = Path("/")
_ALONE: Final = 0.95


def _wanted_by_others(findings: Findings, begun: CpuTimes) -> float:
    """CPUs that others want: what they used since, or by what a busy thread of ours did not get.

    How little one thread got in a moment says more of the scheduler's turns than of the others, who cannot
    want more than the run queue held.
    """
    used = max(0.0, begun.until(cpu_times()).others)  # 0 where nobody says
    decode, environment = findings.decode, findings.environment
    if decode is None or environment is None or decode.got >= _ALONE:
        return used
    queued = max(os.getloadavg()[0], _running() - 1.0)
    return max(used, min(queued, environment.cpus / max(1e-9, decode.got) - 1.0))


def _running() -> float:
    """Tasks that run or wait for a processor now, this one included."""
    match = re.search(r"^procs_running (\d+)$", read_text(_ROOT / "proc/stat"), re.MULTILINE)
    return float(match[1]) if match else 1.0


# -- examine -----------------------------------------------------------------------------------------

DEPTHS: Final = (1, 4, 16, 64)
"""Reads in flight: one worker, a few, many, and what an NVMe disk wants."""

THREAD: Final = "headrace-doctor"  # the name of the thread that measures

_COLD_FILES_MIN: Final = 100
_COLD: Final = 0.1  # of the data in the page cache, up to which reads are the device's
_OVERTIME_S: Final = 20.0
_TICK_S: Final = 0.1
_PATIENCE: Final = 1.3
_PATIENCE_S: Final = 2.0
"""A slow storage, or a busy machine, may make it last so much longer than asked for."""

_GROWN: Final = 1.1
_ENOUGH: Final = 0.9

_PARTS: Final = {
    "machine": ("looking at the machine", 0.0),
    "data": ("looking at the data set", 0.22),
    "opens": ("opening files", 0.06),
    "memory": ("asking what lies in memory", 0.04),
    "plain": ("reading as Python does", 0.08),
    "reads": ("reading at random", 0.36),
    "decode": ("decoding", 0.12),
    "pieces": ("reading pieces at random", 0.12),
}
"""In words, and their share of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamineOptions:
    """How an examination goes; raises ValueError if a value is out of bounds."""

    seconds: float = 15.0  # about how long it takes; less where there is little to measure
    simulate: str | Simulation | None = None
    """A storage to feel like: a preset's name or a `Simulation`. Figures are labelled."""
    storage_options: Mapping[str, Any] | None = None  # for URLs
    extensions: tuple[str, ...] = ()  # of a folder, look only at files that end so (`.png`)

    def __post_init__(self) -> None:
        if not 0.2 <= self.seconds <= 3600:
            raise ValueError(f"seconds is {self.seconds:g}, expected 0.2 to 3600")


Tell = Callable[[str, float], None]
"""Called with what is done next, and the share of the time that is over."""


def examine(
    target: str | os.PathLike[str], options: ExamineOptions | None = None, tell: Tell | None = None
) -> Findings:
    """Examine a data set where it lies, and the machine; `tell` is called before each part.

    What Ctrl-C ends is `interrupted`, and has what is known by then.

    Raises StoreNotFound if there is nothing at `target`, SourceError if it cannot be read, or there are no
    samples, VolumeTimeout if the storage does not even say what is there, and KeyboardInterrupt if Ctrl-C
    came before anything was known.
    """
    options = options or ExamineOptions()
    run = _Run(os.fsdecode(target), options, tell or (lambda _what, _share: None))
    thread = threading.Thread(target=run.work, name=THREAD, daemon=True)
    begun = time.monotonic()
    thread.start()
    try:
        _wait(run, thread, begun + options.seconds + _OVERTIME_S)
    except KeyboardInterrupt:
        run.stopped.set()
        run.findings.interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            thread.join(2.0)
        if run.findings.data is None:
            raise
    run.findings.seconds = time.monotonic() - begun
    if run.error is not None:
        raise run.error
    return run.findings


def _wait(run: _Run, thread: threading.Thread, until: float) -> None:
    while thread.is_alive():
        thread.join(_TICK_S)
        if time.monotonic() < until:
            continue
        run.stopped.set()
        silent = f"the storage did not answer for {_OVERTIME_S:.0f} s while {run.doing}."
        named = shown(run.target) if is_url(run.target) else run.target
        what, step = f"{named}: {silent}", "Look whether its server can be reached: df PATH."
        if run.findings.data is None:
            raise VolumeTimeout(what, path=named, next_step=step)
        run.findings.notes.append(what)
        return


class _Run:
    """One examination."""

    def __init__(self, target: str, options: ExamineOptions, tell: Tell) -> None:
        self.target, self._options, self._tell = target, options, tell
        self.findings = Findings()
        self.stopped = threading.Event()
        self.doing = ""
        self.error: BaseException | None = None
        self._over = 0.0
        self._volume = None if options.simulate is None else SlowVolume(options.simulate)
        self._until = time.monotonic() + _PATIENCE * options.seconds + _PATIENCE_S
        self._cold: Sequence[Piece] = ()
        self._samples: list[tuple[str, bytes]] = []  # by names

    def work(self) -> None:
        """All parts, one after the other; called in a thread of its own."""
        try:
            self._work()
        except BaseException as e:  # noqa: BLE001 - raised where it is waited for
            self.error = e

    def _begin(self, part: str) -> float:
        """Say what is done; returns the seconds that it may take."""
        self.doing, share = _PARTS[part]
        self._tell(self.doing, self._over)
        self._over = min(1.0, self._over + share)
        return share * self._options.seconds

    def _stop(self) -> bool:
        return self.stopped.is_set() or time.monotonic() > self._until

    def _work(self) -> None:
        findings, options = self.findings, self._options
        self._begin("machine")
        findings.environment = _environment()
        label = "" if self._volume is None else self._volume.label
        where = self.target if is_url(self.target) else os.path.abspath(self.target)
        findings.place = _place_of(where, label)
        begun = cpu_times()
        seconds = self._begin("data")
        findings.data, pool = survey(
            self.target, seconds, stop=self._stop, storage_options=options.storage_options,
            extensions=options.extensions,
        )  # fmt: skip
        findings.notes += findings.data.notes
        try:
            with contextlib.ExitStack() as stack:
                if self._volume is not None and not is_url(findings.data.path):
                    stack.enter_context(simulated_files(self._volume, findings.data.path))
                self._measure(pool)
        finally:
            pool.close()
        if findings.cpu is not None:
            findings.cpu = replace(findings.cpu, others=_wanted_by_others(findings, begun))

    def _measure(self, pool: SamplePool) -> None:
        findings = self.findings
        findings.cpu = copy_speeds()
        parts = (self._opens, self._memory, self._plain, self._reads, self._decode, self._pieces)
        for part in parts:
            name = part.__name__[1:]
            if self.stopped.is_set():
                return
            if self._stop():
                findings.notes.append(f"the time was over before {_PARTS[name][0]}")
                return
            seconds = self._begin(name)
            try:
                part(pool, seconds)
            except (HeadraceError, OSError) as e:
                findings.notes.append(f"{_PARTS[name][0]} failed: {e}")

    # -- the parts ---------------------------------------------------------------------------------

    def _opens(self, pool: SamplePool, seconds: float) -> None:
        if pool.whole_files:
            paths = [*pool.unopened, *(p.path for p in pool.pieces)]
            self.findings.opens = open_rates(paths, seconds, self._stop)

    def _memory(self, pool: SamplePool, seconds: float) -> None:
        if self._volume is not None:
            self.findings.resident = 0.0  # a simulated storage has nothing in memory
        elif pool.store is None:
            self.findings.resident, self._cold = resident_share(pool, seconds, self._stop)

    def _reads(self, pool: SamplePool, seconds: float) -> None:
        slot = seconds / len(DEPTHS)
        reads, cold, direct = self._reader(pool)
        points: list[Point] = []
        with contextlib.closing(reads):
            for depth in DEPTHS:
                if self._stop():
                    break
                point = reads.rate(depth, slot)
                if point is None:
                    self.findings.notes.append(f"with {depth} reads in flight, none came in time")
                    break
                if pool.whole_files and not isinstance(reads, FileReads):
                    point = _with_opens(point, self.findings.opens)
                points.append(point)
                # At once: who is interrupted keeps it.
                self.findings.storage = StorageRates(
                    points=tuple(points), cold=cold, direct=direct, engine=reads.engine
                )
                if len(points) > 2 and points[-1].per_s < _GROWN * points[-3].per_s:
                    break  # more in flight bring no more, and what waits in a queue takes the time

    def _reader(self, pool: SamplePool) -> tuple[RandomReads, bool, bool]:
        """Who reads; whether from the device; whether past the page cache."""
        volume, data, resident = self._volume, self.findings.data, self.findings.resident
        if pool.store is not None:
            catalog = pool.store.catalog
            reads = StoreReads(
                catalog, range(len(catalog.part_names)), len(pool.store), pool.mean_bytes,
                simulate=volume, stop=self._stop,
            )  # fmt: skip
            return reads, True, False
        direct = volume is None and can_read_direct(pool.pieces[0].path)
        cold = [p.path for p in (self._cold if volume is None else pool.pieces)]
        enough = volume is not None or len(cold) >= _COLD_FILES_MIN or (not direct and cold)
        if pool.whole_files and enough:
            simulate = None
            if volume is not None:  # in the place of the data set's folder
                assert data is not None
                folder = data.path if os.path.isdir(data.path) else os.path.dirname(cold[0])
                simulate = volume, folder
            return FileReads(cold, pool.mean_bytes, simulate, self._stop), True, direct
        from_device = volume is not None or direct or (resident is not None and resident <= _COLD)
        return self._open_pieces(pool, direct=direct), from_device, direct

    def _open_pieces(self, pool: SamplePool, *, direct: bool) -> PieceReads:
        reads = PieceReads(pool.pieces, direct=direct, simulate=self._volume, stop=self._stop)
        with contextlib.ExitStack() as closing:
            closing.callback(reads.close)
            reads.open_all()
            closing.pop_all()
        return reads

    def _pieces(self, pool: SamplePool, seconds: float) -> None:
        """The same samples from files that are open, and 4 KiB of each: what opens and bytes cost.

        With as many in flight as it takes for most of the full rate: more only wait in a queue.
        """
        storage = self.findings.storage
        if storage is None or pool.store is not None:
            return
        most = max(point.per_s for point in storage.points)
        depth = min(p.depth for p in storage.points if p.per_s >= _ENOUGH * most)
        direct = self._volume is None and can_read_direct(pool.pieces[0].path)
        with contextlib.closing(self._open_pieces(pool, direct=direct)) as reads:
            small = reads.small_rate(depth, 0.4 * seconds)
            opened = reads.rate(depth, 0.6 * seconds)
        self.findings.storage = replace(storage, opened=opened, small=small)

    def _plain(self, pool: SamplePool, seconds: float) -> None:
        if pool.store is not None:
            self._samples = _samples_of(pool)
            return
        pieces: Sequence[Piece] = pool.pieces
        if len(self._cold) >= _COLD_FILES_MIN:
            # Those that do not lie in memory, and will then: not the ones that are read next.
            own = len(self._cold) // 4
            pieces, self._cold = self._cold[:own], self._cold[own:]
        self.findings.plain, samples = plain_reads(
            pieces, seconds, self._stop, whole_files=pool.whole_files
        )
        data = self.findings.data
        root = f"{data.path}/" if data is not None else ""
        for piece, content in samples:
            name = piece.path.removeprefix(root)
            name += "" if pool.whole_files else f", {piece.length:,} bytes at {piece.offset:,}"
            self._samples.append((name, content))

    def _decode(self, pool: SamplePool, seconds: float) -> None:
        data = self.findings.data
        if pool.true_samples:
            mean_bytes = pool.mean_bytes if data is not None and data.huge else 0.0
            self.findings.decode = measure_decoding(
                self._samples, seconds, self._stop, mean_bytes=mean_bytes
            )
        decode = self.findings.decode
        if decode is not None and data is not None and data.format in ("bytes", "mixed"):
            self.findings.data = replace(data, format=decode.format)


def _with_opens(point: Point, opens: OpenRates | None) -> Point:
    """What was read from open files, as it would be with opening each."""
    if opens is None:
        return point
    opened = opens.one_per_s if point.depth == 1 else opens.many_per_s
    share = min(1.0, point.depth / opens.threads)
    opened = max(opens.one_per_s, opened * share)
    per_s = 1.0 / (1.0 / point.per_s + 1.0 / opened)
    return replace(point, per_s=per_s, bytes_per_s=point.bytes_per_s * per_s / point.per_s)


def _samples_of(pool: SamplePool) -> list[tuple[str, bytes]]:
    """Some samples of an open store, by their largest part."""
    store, samples = pool.store, list[tuple[str, bytes]]()
    for index in range(0, len(store), max(1, len(store) // 16))[:16]:
        parts = store.parts_of(index)
        content = bytes(store.read(index, part=max(parts, key=parts.__getitem__) or None))
        samples.append((f"sample {index}", content))
        if format_of_bytes(content[:16]) == "bytes":
            break
    return samples


# -- the machine, and where the data lie ---------------------------------------------------------------

_TRY_S: Final = 0.01
_TRY_MOST_S: Final = 2.0  # on a busy machine threads take their time to begin
_PACKAGES: Final = ("torch", "pillow", "numpy")


def _environment() -> Environment:
    """Look around. Nothing is tried that costs; what cannot be read is left at its default."""
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(_ROOT)
    memory = byte_fields(_ROOT / "proc/meminfo")
    infinite = resource.RLIM_INFINITY
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (1 << 62 if limit == infinite else limit for limit in limits)
    engine, why = _engine()
    disabled = read_text(_ROOT / "proc/sys/kernel/io_uring_disabled").strip()
    if why and disabled in ("1", "2"):
        why = f"{why.rstrip('.')} (kernel.io_uring_disabled is {disabled})"
    shm = None
    with contextlib.suppress(OSError):
        shm = os.statvfs(_ROOT / "dev/shm")
    return Environment(
        kernel=platform.release(),
        cpus=min(float(affinity), quota) if quota else float(affinity),
        cpus_machine=os.cpu_count() or affinity, cpus_affinity=affinity, cpu_quota=quota,
        memory_bytes=memory.get("MemTotal", 0), memory_free_bytes=available_memory(),
        memory_limit_bytes=min((usage.limit for usage in memory_usages(_ROOT)), default=None),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        nofile_soft=soft, nofile_hard=hard,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else None,
        engine=engine, engine_why=why,
        pressure={kind: _pressure(kind) for kind in ("cpu", "memory", "io")},
        gpus=_gpus(),
        packages={name: version for name in _PACKAGES if (version := version_of(name))},
    )  # fmt: skip


def _engine() -> tuple[str, str]:
    """What would read, and why it is not io_uring: found out by making one."""
    try:
        reads = PieceReads([Piece(os.path.realpath(sys.executable), 0, 4096)], direct=True)
    except Exception as e:  # noqa: BLE001 - the reason is the finding
        return "", f"no reader can be made: {e}"
    with contextlib.closing(reads):
        deadline = time.monotonic() + _TRY_MOST_S
        while True:
            reads.rate(1, _TRY_S)  # its threads say what they read with once they have begun
            if reads.engine or time.monotonic() > deadline:
                return reads.engine, reads.engine_why


def _pressure(kind: str) -> float:
    """Share of the last ten seconds in which some task waited; 0 where the kernel does not say."""
    text = read_text(_ROOT / "proc/pressure" / kind)
    share = re.search(r"^some avg10=([0-9.]+) ", text, re.MULTILINE)
    return float(share[1]) / 100 if share else 0.0


def _gpus() -> tuple[str, ...]:
    """Names of the GPUs that NVML knows; () where there are none, or the driver does not answer."""
    from headrace.machine.sensors import GPUs

    sensor = GPUs()
    try:
        if not sensor.read():
            return ()
        import pynvml

        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        texts = [n.decode(errors="replace") if isinstance(n, bytes) else n for n in names]
        return tuple(map(printable, texts))
    except Exception:  # noqa: BLE001 - a driver's errors are its own
        return ()
    finally:
        sensor.close()


def _place_of(path: str, simulated: str) -> DataPlace:
    """The mount and device of a path, or what a URL says; `simulated`: the label of a storage."""
    if is_url(path):
        mount, kind = shown(root_of(path)), scheme_of(path)
        return DataPlace(mount=mount, file_system=kind, network=True, simulated=simulated)
    there = mount_of(path, mounts())
    if there is None:
        return DataPlace(simulated=simulated)
    return DataPlace(
        mount=there.point, file_system=there.kind, source=there.source, options=there.options,
        network=is_network(there.kind, there.source), rotational=_rotational(there.device),
        device=there.device, simulated=simulated,
    )  # fmt: skip


def _rotational(device: str) -> bool | None:
    """Whether the disk behind a device number turns; None where there is no disk that says so.

    A virtual machine's disk says that it turns, whatever it is: nothing is known of it.
    """
    folder = _ROOT / "sys/dev/block" / device
    if "virtio" in os.path.realpath(folder):
        return None
    for place in ("queue/rotational", "../queue/rotational"):
        text = read_text(folder / place).strip()
        if text in ("0", "1"):
            return text == "1"
    return None

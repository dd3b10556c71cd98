"""Advice: what follows from the findings: expected rates, a verdict, and what to do. Pure.

Each advice has what says so, what it is expected to gain, and a command to paste. What would make training fail
comes first, then what gains most. Of things that would all gain nothing, the first is to train: there is always
one thing to do first.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause, cause_of
from headrace.base.text import bytes_text, counted, duration_text, rough_text
from headrace.insight.doctor.findings import (
    Advice,
    Curve,
    Diagnosis,
    Work,
    ahead_rate,
    expected_of,
    metadata_share,
    native_work,
    torch_rate,
    work_of,
)
from headrace.io.objects.location import is_url, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.doctor.findings import Decode, Expected, Findings

_PREFETCH: Final = 2  # batches that each of torch's workers keeps ready

_DESCRIPTORS: Final = 4096
_DESCRIPTORS_FAIL: Final = 512
_BATCHES_BEFORE_SHM_IS_FULL: Final = 0.8


def _what_fails(findings: Findings, batch: int, workers: int) -> Iterator[Advice]:
    """Limits that torch's workers would run into; `blocking` where they surely would."""
    environment, decode = findings.environment, findings.decode
    if environment is None:
        return
    need = workers * _PREFETCH * batch * decode.out_bytes if decode is not None else 0.0
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
    soft, hard = environment.nofile_soft, environment.nofile_hard
    if soft < _DESCRIPTORS:
        can = f"ulimit -n {min(hard, 65_536)}"
        yield Advice(
            key="nofile", do="Let the process open more files.",
            because=f"the limit is {soft:,} open files (hard limit "
            f"{'none' if hard >= 1 << 60 else f'{hard:,}'}); workers and their batches need some thousands",
            gain='no "Too many open files" in the middle of training',
            command=can if hard >= 2 * soft else "ulimit -Hn  # ask your admin for 65536",
            blocking=soft < _DESCRIPTORS_FAIL,
        )  # fmt: skip


def _worth_knowing(findings: Findings, torch: Expected | None, name: str) -> Iterator[Advice]:
    """What helps a little, or only some: each with what says so."""
    environment = findings.environment
    if environment is not None and environment.engine_why and environment.engine != "uring":
        yield Advice(
            key="io_uring", do="Allow io_uring, where you can: headrace reads by threads without it.",
            because=environment.engine_why.rstrip("."),
            gain="less processor time for each read, and more of them from a local NVMe disk; nothing on a "
            "network",
            command="docker run --security-opt seccomp=unconfined IMAGE",
        )  # fmt: skip
    if torch is not None and torch.stall is None:
        yield Advice(
            key="step", do="Tell the doctor what a step of your model takes: does your GPU wait at all?",
            because="--step-ms was not given", gain="a verdict on your model",
            command=_STEP.format(name=name),
        )  # fmt: skip


def _language(findings: Findings, name: str) -> Iterator[Advice]:
    """Of texts and tokens: models read neither texts nor whole documents."""
    data, decode = findings.data, findings.decode
    if data is not None and data.format == "tokens":
        yield Advice(
            key="windows", do="Read windows of tokens, all of one length: one loader does it.",
            because=f"the store has documents of tokens, typically {bytes_text(data.size_p50)} each, and the "
            "rates above are of whole documents, read one by one",
            gain="windows without padding, shuffled exactly, several read together",
            command="from headrace.torch import TokenDataLoader\n"
            f"TokenDataLoader({data.path!r}, length=1024, batch_size=8)", python=True,
        )  # fmt: skip
    elif decode is not None and decode.format == "text":
        yield Advice(
            key="tokenize", do="Encode the texts as tokens, once: a language model trains on these.",
            because="the samples are texts, and each epoch would encode them again",
            gain="nothing is encoded during training, and windows are shuffled exactly",
            command=f"headrace tokenize {name} tokens.hr --tokenizer tokenizer.json --eos '</s>'",
        )  # fmt: skip


WORTH: Final = 1.15  # what gains less than this factor is within what is not known

_COLD: Final = 0.1
_WORTH_IN_MEMORY: Final = 1.4  # where only copies are saved, which are known less well
_ENOUGH_STALL: Final = 0.05
"""A training that waits for less than this share of its time has what it needs."""

_FLAT: Final = 1.3
_OTHERS: Final = 0.5
_WORTH_ALONE: Final = 1.5
_ROOM: Final = 0.6  # of a processor, that another worker needs
_COMPUTES: Final = (Cause.DECODE.value, Cause.COLLATE.value, Cause.PYTHON.value)
_BLOCK_BYTES: Final = 256 << 10  # that a blocked order reads together
_FAST_BYTES_PER_S: Final = 1e9
_WORTH_IN_BLOCKS: Final = 1.5
_STORED_SIDE: Final = 256  # of the shorter side of images that are stored to be cropped to 224
_STEP: Final = "headrace doctor {name} --batch 256 --step-ms 100"
_PROVE: Final = "headrace ab --drop-in -- python train.py"
_CHANGE_IMPORT: Final = "from headrace.torch import DataLoader  # was: torch.utils.data"
_IMAGES: Final = """\
import headrace as hr
from headrace.torch import DataLoader
DataLoader({path!r}, batch_size={batch}, shuffle=True, decode=hr.Images(size=224))
# or, if your data set is torchvision's ImageFolder: DataLoader(dataset, ..., decode="native")"""


def _advice_of(
    findings: Findings, expected: tuple[Expected, ...], *, batch: int, workers: int,
    wanted: float | None, target: str,
) -> tuple[Advice, ...]:  # fmt: skip
    """What to do, the most important first; () where nothing is known."""
    if findings.data is None:
        return ()
    named = target or findings.data.path
    name = shlex.quote(shown(named) if is_url(named) else named)  # without the user's password
    failing = list(_what_fails(findings, batch, workers))
    given = [*(a for a in failing if a.blocking), *_language(findings, name)]
    torch, ahead = expected[:2] or (None, None)  # of both loaders, as things are now
    work = work_of(findings)
    if work is not None and torch is not None and ahead is not None:
        gains = sorted(
            _Gains(findings, work, torch, ahead, name, batch).all(),
            # What others want is a guess of a moment: it comes after what was measured of the data.
            key=lambda gain: (gain.key == "others", -gain.factor),
        )
        rate = rough_text(torch.per_s)
        if torch.stall is not None and torch.stall < _ENOUGH_STALL:
            gains = []  # of the loading, and none of the training
            given += [Advice(
                key="train", do="Train. The data are not what your model waits for.",
                because=f"it asks for {rough_text(wanted or 0.0)}/s, and torch's DataLoader gives about "
                f"{rate}/s",
                gain="none: a faster loading would not make it faster", command="python train.py",
            )]  # fmt: skip
        elif not gains:
            given += [Advice(
                key="step",
                do="Leave the loading as it is, and tell the doctor what a step of your model takes.",
                because=f"nothing that is known here would change the {rate}/s much; whether they are enough "
                "depends on your model",
                gain="to know whether your GPU waits", command=_STEP.format(name=name),
            )]  # fmt: skip
        given += gains
    given += (advice for advice in failing if not advice.blocking)
    known = {advice.key for advice in given}
    more = _worth_knowing(findings, torch, name)
    return (*given, *(advice for advice in more if advice.key not in known))


def _times(factor: float) -> str:
    return f"about {factor:.1f} x" if factor < 10 else f"about {factor:.0f} x"


@dataclass(frozen=True, slots=True)
class _Gains:
    """What would make loading faster, and by how much."""

    findings: Findings
    work: Work
    torch: Expected
    ahead: Expected
    name: str
    batch: int

    def all(self) -> Iterator[Advice]:
        """Each thing that is worth it."""
        yield from self._read_ahead()
        yield from self._more_workers()
        yield from self._others()
        if self.findings.decode is not None and self.torch.cause == Cause.DECODE.value:
            yield from self._decode(self.findings.decode)
            yield from self._more_cpus()
        yield from self._pack()
        yield from self._blocked()
        yield from self._nearer()

    def _factor(self, rate: float) -> float:
        return rate / max(1e-9, self.torch.per_s)

    def _from_to(self, rate: float) -> str:
        before = rough_text(self.torch.per_s)
        return f"{_times(self._factor(rate))}: {before} -> {rough_text(rate)} {unit_of(self.findings)}/s"

    def _read_ahead(self) -> Iterator[Advice]:
        work, storage = self.work, self.findings.storage
        factor = self._factor(self.ahead.per_s)
        if storage is None or factor < (WORTH if work.cold > _COLD else _WORTH_IN_MEMORY):
            return
        first, last = storage.points[0], max(storage.points, key=lambda point: point.per_s)
        if work.cold > _COLD:
            do = "Change one import: headrace reads the next files while the workers decode."
            because = (
                f"one read at a time gives {rough_text(first.per_s)}/s here, {last.depth} at a time give "
                f"{rough_text(last.per_s)}/s"
            )
        else:
            do = "Change one import: headrace hands batches over in memory that is used again."
            because = (
                f"copying a sample into fresh memory takes {duration_text(work.collate_s)}, into memory that "
                f"was used before {duration_text(work.ahead_collate_s)}; the files lie in memory already"
            )
        yield Advice(
            key="ahead", do=do, because=because, gain=self._from_to(self.ahead.per_s),
            command=_CHANGE_IMPORT, python=True, factor=factor, proof=_PROVE,
        )  # fmt: skip

    def _more_workers(self) -> Iterator[Advice]:
        cpus, workers = self.work.cpus, self.torch.workers
        rate = torch_rate(self.work, int(cpus))
        if self.torch.cause in _COMPUTES and cpus - self.work.others < workers + _ROOM:
            return  # others have what it would need
        if workers < int(cpus) and self._factor(rate) >= WORTH:
            yield Advice(
                key="workers", do=f"Use {int(cpus)} workers.",
                because=f"{cpus:g} CPUs may be used, and {max(1, workers)} of them decode "
                f"now ({counted(workers, 'worker')})",
                gain=self._from_to(rate), factor=self._factor(rate), python=True,
                command=f"DataLoader(..., num_workers={int(cpus)})",
            )  # fmt: skip

    def _others(self) -> Iterator[Advice]:
        """Where other programs have the processors."""
        work = self.work
        alone = torch_rate(replace(work, others=0.0), self.torch.workers)
        if work.others > _OTHERS and self._factor(alone) >= _WORTH_ALONE:
            yield Advice(
                key="others", do="Stop what else runs here, or train elsewhere: it takes your processors.",
                because=f"{work.cpus:g} CPUs may be used, and other programs want about "
                f"{work.others:.{work.others < 10:d}f} (a guess, from what this process did not get)",
                gain=f"up to {self._from_to(alone).removeprefix('about ')}", factor=self._factor(alone),
                command="ps -eo pcpu,user,pid,comm --sort=-pcpu | head",
            )  # fmt: skip

    def _decode(self, decode: Decode) -> Iterator[Advice]:
        """Where the processors are the limit: less to decode."""
        data = self.findings.data
        if decode.native_s is not None and data is not None:
            rate = ahead_rate(native_work(self.work, decode.native_s), max(1, int(self.work.cpus)))
            if rate >= WORTH * max(self.torch.per_s, self.ahead.per_s):
                left = f"; {decode.refused} of {decode.native_samples} are left to Pillow"
                left += f" ({decode.first_refused})"
                yield Advice(
                    key="images", do="Let headrace's native threads decode: one line.",
                    because=f"measured here: {duration_text(decode.sample_s)} of a core an image by "
                    f"{decode.decoder}, {duration_text(decode.native_s)} by headrace.Images"
                    + (left if decode.refused else ""),
                    gain=self._from_to(rate), factor=self._factor(rate), python=True,
                    command=_IMAGES.format(path=data.path, batch=self.batch),
                )  # fmt: skip
        # Of JPEGs the native stage decodes only as much as a crop needs.
        whole = decode.format != "jpeg" or decode.native_s is None or decode.huge is not None
        if whole and decode.pixels > 2 * _STORED_SIDE**2:
            work = replace(self.work, decode_s=decode.sample_s * _STORED_SIDE**2 / decode.pixels)
            factor = self._factor(torch_rate(work, self.torch.workers))
            jpeg = decode.format == "jpeg"
            images = f"short={_STORED_SIDE},quality=92" if jpeg else f"decoded,short={_STORED_SIDE}"
            yield Advice(
                key="smaller", do="Store the images smaller, once: now all their pixels are decoded in every "
                "epoch, to be thrown away.",
                because=f"an image has {decode.pixels / 1e6:.1f} million pixels on average and takes "
                f"{duration_text(decode.sample_s)} of a core; training on {decode.side} x {decode.side} "
                f"needs {decode.side**2 / 1e6:.2f} million",
                gain=f"{_times(factor)}, if decoding takes time in proportion to pixels"
                + ("" if jpeg else "; transparent pictures stay as they are"),
                factor=factor, command=f"headrace pack {self.name} smaller.hr --images {images}",
            )  # fmt: skip

    def _more_cpus(self) -> Iterator[Advice]:
        has = self.findings.environment
        if has is None or has.cpus_machine - has.cpus < 1:
            return
        limited = has.cpu_quota is not None and has.cpu_quota <= has.cpus_affinity
        why = f"its quota is {has.cpu_quota:g}" if limited else f"it may run on {has.cpus_affinity}"
        factor = min(4.0, has.cpus_machine / has.cpus)
        yield Advice(
            key="cpus", do="Ask for more CPUs.",
            because=f"this process gets {has.cpus:g} of the machine's {has.cpus_machine} ({why}), and "
            "decoding needs them",
            gain=f"up to {_times(factor).removeprefix('about ')}", factor=factor,
            command=f"srun --cpus-per-task={has.cpus_machine} python train.py",
        )  # fmt: skip

    def _pack(self) -> Iterator[Advice]:
        """Files that cost more to open than to read belong into one."""
        data, storage, work = self.findings.data, self.findings.storage, self.work
        if data is None or data.kind != "folder" or storage is None or not storage.cold:
            return
        if storage.opened is None:
            return
        most = max(storage.opened.per_s, work.curve.most)
        packed = ahead_rate(replace(work, curve=Curve.through([(1.0, most)])), self.torch.workers)
        factor = self._factor(packed)
        if factor >= WORTH and packed >= WORTH * ahead_rate(work, self.torch.workers):
            yield Advice(
                key="pack", do="Pack the files into one store: it is opened once, and read at any place.",
                because=f"opening takes {metadata_share(self.findings):.0%} of the time of reading a file; "
                f"files that are open already come at {rough_text(storage.opened.per_s)}/s",
                gain=f"{_times(factor)}, with hr.loader or headrace.torch.StoreLoader",
                command=f"headrace pack {self.name} packed.hr", factor=factor,
            )  # fmt: skip

    def _blocked(self) -> Iterator[Advice]:
        """Where each read costs the same and more at a time bring no more, larger ones do."""
        data, storage, work = self.findings.data, self.findings.storage, self.work
        flat = work.curve.most < _FLAT * work.curve.rates[0]
        if data is None or storage is None or not flat or work.cold <= _COLD:
            return
        opened, small = storage.opened, storage.small
        if opened is None or small is None:
            return
        size = opened.bytes_per_s / opened.per_s
        byte_s = max(1 / opened.per_s - 1 / small.per_s, size / _FAST_BYTES_PER_S) / size
        block_s = 1 / small.per_s + _BLOCK_BYTES * byte_s
        rate = max(1.0, _BLOCK_BYTES / max(1.0, data.size_mean)) / block_s
        curve = Curve.through([(1.0, rate)])
        factor = self._factor(ahead_rate(replace(work, curve=curve), self.torch.workers))
        if factor >= _WORTH_IN_BLOCKS:
            in_place = data.kind in ("store", "object")
            first = "" if in_place else f"  # headrace pack {self.name} packed.hr"
            where = self.name if in_place else "packed.hr"
            yield Advice(
                key="blocked", do="Read neighbours together and shuffle them in memory: a blocked order.",
                because=f"{storage.points[0].depth} or {storage.points[-1].depth} reads at a time give the "
                f"same {rough_text(work.curve.most)}/s, and one of 4 kB takes "
                f"{duration_text(1 / small.per_s)}: the reads cost, not their bytes",
                gain=f"{_times(factor)}, for an order that is shuffled within some megabytes",
                command=f"headrace.loader({where!r}, 256, order='blocked'){first}", python=True,
                factor=factor,
            )  # fmt: skip

    def _nearer(self) -> Iterator[Advice]:
        """What is far and slow belongs on a local disk, if the storage is what is waited for."""
        place, data, cause = self.findings.place, self.findings.data, self.torch.cause
        slow = cause in (Cause.BANDWIDTH, Cause.LATENCY, Cause.METADATA, Cause.NETWORK)
        if place is None or data is None or not slow:
            return
        if place.network or place.simulated or place.rotational:
            far = "a disk that turns" if place.rotational else place.file_system
            yield Advice(
                key="local", do="Keep a packed copy on a local disk, and train from there.",
                because=f"the data lie on {place.simulated or far}, and {cause} there is what would be "
                f"waited for; {bytes_text(data.nbytes)} must fit",
                gain="that of the local disk: headrace doctor on its folder says", factor=WORTH,
                command=f'headrace pack {self.name} "${{TMPDIR:-/tmp}}/packed.hr"',
            )  # fmt: skip


# -- diagnose ----------------------------------------------------------------------------------------

_WORKERS_MAX: Final = 8

_WHY: Final = {
    Cause.METADATA: "finding and opening files takes longer than reading them",
    Cause.LATENCY: "each worker waits for one read after the other",
    Cause.BANDWIDTH: "the storage already delivers all the bytes it can",
    Cause.NETWORK: "bytes come over a network, too slowly",
    Cause.DECODE: "decoding takes all the processor time there is",
    Cause.PYTHON: "Python's own work on each sample takes the time",
    Cause.COLLATE: "copying samples into batches takes the time",
}
"""As an end of a sentence about torch's DataLoader."""


def diagnose(
    findings: Findings,
    *,
    batch: int = 256,
    step_s: float | None = None,
    workers: int | None = None,
    target: str = "",
) -> Diagnosis:
    """Say what follows from findings, as far as the examination came.

    `step_s` is what a step of `batch` samples takes if there are always data; without `workers` there are
    as many as people would use here; `target` is how the user names the data, for commands.

    Raises ValueError if a number makes no sense.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}, expected 1 or more")
    if step_s is not None and not 0 < step_s < 86_400:
        raise ValueError(f"step_s is {step_s}, expected more than 0 seconds, up to a day")
    if workers is not None and not 0 <= workers <= 1024:
        raise ValueError(f"workers is {workers}, expected 0 to 1024")
    cpus = findings.environment.cpus if findings.environment is not None else 1.0
    count = max(1, min(_WORKERS_MAX, int(cpus))) if workers is None else workers
    wanted = None if step_s is None else batch / step_s
    expected = expected_of(findings, count, wanted)
    verdict, cause = _verdict(findings, expected, wanted)
    return Diagnosis(
        findings=findings, batch=batch, step_s=step_s, workers=count, wanted_per_s=wanted,
        expected=expected, verdict=verdict, cause=cause,
        advice=_advice_of(findings, expected, batch=batch, workers=count, wanted=wanted, target=target),
    )  # fmt: skip


def unit_of(findings: Findings) -> str:
    """What the data set is counted in."""
    data, decode = findings.data, findings.decode
    if decode is not None and decode.side:
        return "images"
    if data is not None and not data.in_place:
        return "blocks"
    return "documents" if data is not None and data.format == "tokens" else "samples"


def _verdict(
    findings: Findings, expected: tuple[Expected, ...], wanted: float | None
) -> tuple[str, str]:
    """One plain sentence, and the cause that it names."""
    if not expected:
        why = "the storage was not measured"
        if findings.interrupted:
            why = "the examination was interrupted"
        return f"Too little is known to say what to expect: {why}.", Cause.OTHER.value
    torch, ahead = expected[:2]  # as things are now
    unit = unit_of(findings)
    workers = counted(torch.workers, "worker") if torch.workers else "no workers"
    rate = f"With torch's DataLoader ({workers}) expect about {rough_text(torch.per_s)} {unit}/s"
    if findings.huge is not None and findings.decode is not None and findings.decode.side:
        huge, what = findings.huge
        rate += f" on average ({huge.count:,} of {huge.of:,} hold {huge.share:.0%} of all {what}, "
        rate += "and count by these)"
    main = cause_of(torch.cause)
    why = _WHY.get(main, main.sentence)
    if torch.stall is not None and wanted is not None:
        if torch.stall < _ENOUGH_STALL:
            asks = f"your model asks for {rough_text(wanted)}"
            return f"{rate}; {asks}: the data keep up, whoever loads them.", torch.cause
        asks = f"{rate} while your model asks for {rough_text(wanted)}"
        return f"{asks}: it would wait {torch.stall:.0%} of the time, because {why}.", torch.cause
    also = "; reading ahead does not change that" if ahead.per_s < 1.15 * torch.per_s else ""
    return f"{rate}: {why}{also}.", torch.cause

"""Advice: what to do, what says so, what it is expected to gain, and a command to paste. Pure.

What would make training fail comes first, then what gains most. Of things that would all gain nothing,
the first is to train: there is always one thing to do first.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause
from headrace.base.text import bytes_text, duration_text, rough_text
from headrace.insight.doctor.advice_machine import what_fails, what_is_worth_knowing
from headrace.insight.doctor.findings import Advice
from headrace.insight.doctor.model import Curve, Work, ahead_rate, torch_rate
from headrace.insight.doctor.predict import AHEAD, TORCH, metadata_share, work_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.doctor.findings import Expected, Findings

__all__ = ["WORTH", "advice_of"]

WORTH: Final = 1.15
"""What gains less than this factor is within what is not known."""

_COLD: Final = 0.1
_WORTH_IN_MEMORY: Final = 1.4
"""Where only copies are saved, which are known less well."""

_ENOUGH_STALL: Final = 0.05

_FLAT: Final = 1.3
_OTHERS: Final = 0.5
_WORTH_ALONE: Final = 1.5
_BLOCK_BYTES: Final = 256 << 10
"""That a blocked order reads together."""

_FAST_BYTES_PER_S: Final = 1e9
_WORTH_IN_BLOCKS: Final = 1.5
_STORED_SIDE: Final = 256
"""Of the shorter side of images that are stored to be cropped to 224."""

_PROVE: Final = "headrace ab --drop-in -- python train.py"
_CHANGE_IMPORT: Final = "from headrace.torch import DataLoader  # was: torch.utils.data"
_DRAFT: Final = """\
def load(path):  # for ImageFolder(..., loader=load)
    image = Image.open(path)
    image.draft("RGB", (224, 224))
    return image.convert("RGB")"""


def advice_of(
    found: Findings,
    expected: tuple[Expected, ...],
    *,
    batch: int,
    workers: int,
    wanted: float | None,
    target: str,
) -> tuple[Advice, ...]:
    """What to do, the most important first; () where nothing is known."""
    if found.data is None:
        return ()
    name = shlex.quote(target or found.data.path)
    failing = list(what_fails(found, batch, workers))
    given = [advice for advice in failing if advice.blocking]
    work = work_of(found)
    torch = next((e for e in expected if e.loader == TORCH and not e.when), None)
    ahead = next((e for e in expected if e.loader == AHEAD and not e.when), None)
    enough = torch is not None and torch.stall is not None and torch.stall < _ENOUGH_STALL
    if work is not None and torch is not None and ahead is not None:
        if enough:
            given.append(_train(torch, wanted))
        gains = [
            *_ahead(found, work, torch, ahead),
            *_more_workers(work, torch),
            *_others(work, torch),
            *_decode(found, work, torch, name),
            *_pack(found, work, torch, name),
            *_blocked(found, work, torch, name),
            *_nearer(found, torch, name),
        ]
        given += sorted(gains, key=lambda advice: -advice.factor)
        if not gains and not enough:
            given.append(_nothing(torch, name))
    given += (advice for advice in failing if not advice.blocking)
    known = {advice.key for advice in given}
    more = what_is_worth_knowing(found, torch, name)
    return (*given, *(advice for advice in more if advice.key not in known))


def _times(factor: float) -> str:
    return f"about {factor:.1f} x" if factor < 10 else f"about {factor:.0f} x"


# -- what gains ----------------------------------------------------------------------------------------


def _train(torch: Expected, wanted: float | None) -> Advice:
    assert wanted is not None
    return Advice(
        key="train", do="Train. The data are not what your model waits for.",
        because=f"it asks for {rough_text(wanted)}/s, and torch's DataLoader gives about "
        f"{rough_text(torch.per_s)}/s",
        gain="none to be had from loading", command="python train.py",
    )  # fmt: skip


def _nothing(torch: Expected, name: str) -> Advice:
    return Advice(
        key="step", do="Leave the loading as it is, and tell the doctor what a step of your model takes.",
        because=f"nothing that is known here would change the {rough_text(torch.per_s)}/s much; whether they "
        "are enough depends on your model",
        gain="to know whether your GPU waits",
        command=f"headrace doctor {name} --batch 256 --step-ms 100",
    )  # fmt: skip


def _ahead(found: Findings, work: Work, torch: Expected, ahead: Expected) -> Iterator[Advice]:
    storage = found.storage
    assert storage is not None
    factor = ahead.per_s / max(1e-9, torch.per_s)
    if factor < (WORTH if work.cold > _COLD else _WORTH_IN_MEMORY):
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
        key="ahead", do=do, because=because,
        gain=f"{_times(factor)}: {rough_text(torch.per_s)} -> {rough_text(ahead.per_s)} samples/s",
        command=_CHANGE_IMPORT, python=True, factor=factor, proof=_PROVE,
    )  # fmt: skip


def _more_workers(work: Work, torch: Expected) -> Iterator[Advice]:
    best = int(work.cpus)
    if torch.workers >= best:
        return
    rate = torch_rate(work, best)
    factor = rate / max(1e-9, torch.per_s)
    if factor >= WORTH:
        yield Advice(
            key="workers", do=f"Use {best} workers.",
            because=f"{work.cpus:g} CPUs may be used, and {torch.workers} workers leave "
            f"{work.cpus - torch.workers:g} of them idle",
            gain=f"{_times(factor)}: {rough_text(torch.per_s)} -> {rough_text(rate)} samples/s",
            command=f"DataLoader(..., num_workers={best})", python=True, factor=factor,
        )  # fmt: skip


def _others(work: Work, torch: Expected) -> Iterator[Advice]:
    """Where other programs have the processors."""
    alone = torch_rate(replace(work, others=0.0), torch.workers)
    factor = alone / max(1e-9, torch.per_s)
    if work.others > _OTHERS and factor >= _WORTH_ALONE:
        yield Advice(
            key="others", do="Stop what else runs here, or train elsewhere: it takes your processors.",
            because=f"{work.cpus:g} CPUs may be used, and other programs want {work.others:.1f} meanwhile",
            gain=f"{_times(factor)}: {rough_text(torch.per_s)} -> {rough_text(alone)} samples/s",
            command="ps -eo pcpu,user,pid,comm --sort=-pcpu | head", factor=factor,
        )  # fmt: skip


def _decode(found: Findings, work: Work, torch: Expected, name: str) -> Iterator[Advice]:
    """Where the processors are the limit: less to decode, or more processors."""
    decode, environment = found.decode, found.environment
    if decode is None or environment is None or torch.cause != Cause.DECODE.value:
        return
    if decode.draft_s is not None:
        faster = replace(work, decode_s=decode.draft_s)
        factor = torch_rate(faster, torch.workers) / max(1e-9, torch.per_s)
        if factor >= WORTH:
            yield Advice(
                key="draft", do="Let the JPEG decoder scale images down while it decodes.",
                because=f"measured here: {duration_text(decode.sample_s)} an image without, "
                f"{duration_text(decode.draft_s)} with it",
                gain=_times(factor), factor=factor, command=_DRAFT, python=True,
            )  # fmt: skip
    elif decode.pixels > 2 * _STORED_SIDE**2:
        smaller_s = decode.sample_s * _STORED_SIDE**2 / decode.pixels
        factor = torch_rate(replace(work, decode_s=smaller_s), torch.workers) / max(
            1e-9, torch.per_s
        )
        yield Advice(
            key="smaller", do="Store the images smaller, once: now all their pixels are decoded in every "
            "epoch, to be thrown away.",
            because=f"an image has {decode.pixels / 1e6:.1f} million pixels and takes "
            f"{duration_text(decode.sample_s)} of a core; training on {decode.side} x {decode.side} needs "
            f"{decode.side**2 / 1e6:.2f} million",
            gain=f"{_times(factor)}, if decoding takes time in proportion to pixels", factor=factor,
            command=f"cp -r {name} smaller\nfind smaller -type f -exec mogrify -resize '256x256^>' {{}} +",
        )  # fmt: skip
    idle = environment.cpus_machine - environment.cpus
    if idle >= 1:
        more = (
            f"its quota is {environment.cpu_quota:g}" if environment.cpu_quota is not None
            and environment.cpu_quota <= environment.cpus_affinity
            else f"it may run on {environment.cpus_affinity}"
        )  # fmt: skip
        factor = min(4.0, environment.cpus_machine / environment.cpus)
        yield Advice(
            key="cpus", do="Ask for more CPUs.",
            because=f"this process gets {environment.cpus:g} of the machine's {environment.cpus_machine} "
            f"({more}), and decoding needs them",
            gain=f"up to {_times(factor).removeprefix('about ')}", factor=factor,
            command=f"srun --cpus-per-task={environment.cpus_machine} python train.py",
        )  # fmt: skip


def _pack(found: Findings, work: Work, torch: Expected, name: str) -> Iterator[Advice]:
    """Files that cost more to open than to read belong into one."""
    data, storage = found.data, found.storage
    assert data is not None
    assert storage is not None
    if data.kind != "folder" or storage.opened is None or not storage.cold:
        return
    most = max(storage.opened.per_s, work.curve.most)
    packed = replace(work, curve=Curve.through([(1.0, most)]))
    factor = ahead_rate(packed, torch.workers) / max(1e-9, torch.per_s)
    files = ahead_rate(work, torch.workers)
    if factor < WORTH or ahead_rate(packed, torch.workers) < WORTH * files:
        return
    share = metadata_share(found)
    yield Advice(
        key="pack", do="Pack the files into one store: it is opened once, and read at any place.",
        because=f"opening takes {share:.0%} of the time of reading a file; files that are open already "
        f"come at {rough_text(storage.opened.per_s)}/s",
        gain=f"{_times(factor)}, with hr.loader or headrace.torch.StoreLoader",
        command=f"headrace pack {name} packed.hr", factor=factor,
    )  # fmt: skip


def _blocked(found: Findings, work: Work, torch: Expected, name: str) -> Iterator[Advice]:
    """Where each read costs the same and more at a time bring no more, larger ones do."""
    data, storage = found.data, found.storage
    assert data is not None
    assert storage is not None
    opened, small = storage.opened, storage.small
    flat = work.curve.most < _FLAT * work.curve.rates[0]
    if opened is None or small is None or not flat or work.cold <= _COLD:
        return
    size = opened.bytes_per_s / opened.per_s
    byte_s = max(1 / opened.per_s - 1 / small.per_s, size / _FAST_BYTES_PER_S) / size
    block_s = 1 / small.per_s + _BLOCK_BYTES * byte_s
    rate = max(1.0, _BLOCK_BYTES / max(1.0, data.size_mean)) / block_s
    blocked = ahead_rate(replace(work, curve=Curve.through([(1.0, rate)])), torch.workers)
    factor = blocked / max(1e-9, torch.per_s)
    if factor >= _WORTH_IN_BLOCKS:
        packed = "" if data.kind in ("store", "object") else f"  # headrace pack {name} packed.hr"
        where = name if not packed else "packed.hr"
        yield Advice(
            key="blocked", do="Read neighbours together and shuffle them in memory: a blocked order.",
            because=f"{storage.points[0].depth} or {storage.points[-1].depth} reads at a time give the same "
            f"{rough_text(work.curve.most)}/s, and one of 4 kB takes {duration_text(1 / small.per_s)}: the "
            "reads cost, not their bytes",
            gain=f"{_times(factor)}, for an order that is shuffled within some megabytes",
            command=f"headrace.loader({where!r}, 256, order='blocked'){packed}", python=True,
            factor=factor,
        )  # fmt: skip


def _nearer(found: Findings, torch: Expected, name: str) -> Iterator[Advice]:
    """What is far and slow belongs on a local disk, if the storage is what is waited for."""
    place, data = found.place, found.data
    assert data is not None
    slow = torch.cause in (Cause.BANDWIDTH, Cause.LATENCY, Cause.METADATA, Cause.NETWORK)
    if place is None or not slow:
        return
    if place.network or place.simulated or place.rotational:
        far = place.simulated or ("a disk that turns" if place.rotational else place.file_system)
        yield Advice(
            key="local", do="Keep a packed copy on a local disk, and train from there.",
            because=f"the data lie on {far}, and {torch.cause} there is what would be waited for; "
            f"{bytes_text(data.nbytes)} must fit",
            gain="that of the local disk: headrace doctor on its folder says", factor=WORTH,
            command=f'headrace pack {name} "${{TMPDIR:-/tmp}}/packed.hr"',
        )  # fmt: skip

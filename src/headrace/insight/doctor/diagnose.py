"""Diagnose: what follows from the findings: expected rates, a verdict, and what to do first. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause, cause_of
from headrace.base.text import rough_text
from headrace.insight.doctor.advice import advice_of
from headrace.insight.doctor.findings import Diagnosis
from headrace.insight.doctor.predict import AHEAD, TORCH, expected_of

if TYPE_CHECKING:
    from headrace.insight.doctor.findings import Expected, Findings

__all__ = ["ENOUGH_STALL", "diagnose", "unit_of", "workers_for"]

ENOUGH_STALL: Final = 0.05
"""A training that waits for less than this share of its time has what it needs."""

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


def workers_for(cpus: float) -> int:
    """Workers that people would use on so many CPUs, unless they say."""
    return max(1, min(_WORKERS_MAX, int(cpus)))


def diagnose(
    found: Findings,
    *,
    batch: int = 256,
    step_s: float | None = None,
    workers: int | None = None,
    target: str = "",
) -> Diagnosis:
    """Say what follows.

    Args:
        found: as far as the examination came.
        batch: samples that a step takes.
        step_s: what a step takes, if there are always data.
        workers: of the data loader; None: as many as people would use here.
        target: how the user names the data, for commands.

    Raises:
        ValueError: a number makes no sense.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}, expected 1 or more")
    if step_s is not None and not 0 < step_s < 86_400:
        raise ValueError(f"step_s is {step_s}, expected more than 0 seconds, up to a day")
    if workers is not None and not 0 <= workers <= 1024:
        raise ValueError(f"workers is {workers}, expected 0 to 1024")
    cpus = found.environment.cpus if found.environment is not None else 1.0
    count = workers_for(cpus) if workers is None else workers
    wanted = None if step_s is None else batch / step_s
    expected = expected_of(found, count, wanted)
    verdict, cause = _verdict(found, expected, wanted)
    return Diagnosis(
        findings=found, batch=batch, step_s=step_s, workers=count, wanted_per_s=wanted,
        expected=expected, verdict=verdict, cause=cause,
        advice=advice_of(found, expected, batch=batch, workers=count, wanted=wanted, target=target),
    )  # fmt: skip


def unit_of(found: Findings) -> str:
    """What the data set is counted in."""
    data, decode = found.data, found.decode
    if decode is not None and decode.side:
        return "images"
    if data is not None and not data.in_place:
        return "blocks"
    return "samples"


def _verdict(
    found: Findings, expected: tuple[Expected, ...], wanted: float | None
) -> tuple[str, str]:
    """One plain sentence, and the cause that it names."""
    if not expected:
        why = (
            "the examination was interrupted"
            if found.interrupted
            else "the storage was not measured"
        )
        return f"Too little is known to say what to expect: {why}.", Cause.OTHER.value
    torch = next(e for e in expected if e.loader == TORCH and not e.when)
    unit = unit_of(found)
    workers = (
        "no workers" if not torch.workers else f"{torch.workers} worker{'s' * (torch.workers > 1)}"
    )
    rate = f"With torch's DataLoader ({workers}) expect about {rough_text(torch.per_s)} {unit}/s"
    main = cause_of(torch.cause)
    why = _WHY.get(main, main.sentence)
    if torch.stall is not None and wanted is not None:
        if torch.stall < ENOUGH_STALL:
            asks = f"your model asks for {rough_text(wanted)}"
            return f"{rate}; {asks}: the data keep up, whoever loads them.", torch.cause
        asks = f"{rate} while your model asks for {rough_text(wanted)}"
        return f"{asks}: it would wait {torch.stall:.0%} of the time, because {why}.", torch.cause
    ahead = next(e for e in expected if e.loader == AHEAD and not e.when)
    also = "; reading ahead does not change that" if ahead.per_s < 1.15 * torch.per_s else ""
    return f"{rate}: {why}{also}.", torch.cause

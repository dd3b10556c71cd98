"""`headrace read`: reads a store as training would, and says how fast that went and why."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.base.text import bytes_text, count_text, duration_text
from headrace.cli.output import Json, Output, Quiet, Verbose
from headrace.cli.simulate import SimulateOption

if TYPE_CHECKING:
    from headrace.cli.progress import Report
    from headrace.plane import Loader

__all__ = ["read"]


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read, and what it cost."""

    samples: int
    bytes: int
    batches: int
    seconds: float
    cpu_s: float
    complete: bool

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / max(1e-9, self.bytes / 1e9)


def read(
    path: Annotated[str, typer.Argument(help="A store, or a source that can be opened directly.")],
    *,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1)] = 256,
    order: Annotated[
        str,
        typer.Option(help="`shuffled`, `sequential`, `blocked`, `balanced` or `opportunistic`."),
    ] = "shuffled",
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so long; default: an epoch.")
    ] = None,
    step_ms: Annotated[
        float, typer.Option(min=0.0, help="Time that the training step would take.")
    ] = 0.0,
    simulate: SimulateOption = None,
    tune: Annotated[bool, typer.Option(help="Let headrace turn the knobs.")] = True,
    trace: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write what it did, for `headrace report`.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Read an epoch as training would: throughput, CPU, stall, tiers, and what was tuned and why."""
    from headrace import api
    from headrace.cli.progress import progress

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    options: dict[str, Any] = {"order": order, "tune": tune, "trace": trace}
    if simulate is not None:
        options["simulate"] = simulate
    with api.open(path) as store:
        loader = api.loader(store, batch_size, seed=seed, **options)
        try:
            with progress(output, "reading") as tell:
                done = _run(loader, len(store), step_ms / 1e3, seconds, tell)
            stats, stages = loader.stats, loader.stats.stages
        finally:
            loader.close()
    told = api.explain()
    plane = told.as_dict()["planes"][-1] if told.as_dict()["planes"] else {}
    if as_json:
        output.document(
            {
                "read": done,
                "samples_per_s": done.samples / done.seconds,
                "bytes_per_s": done.bytes / done.seconds,
                "cpu_s_per_gb": done.cpu_s_per_gb,
                "stall_s": stats.stall_s,
                "stages": stages,
                "plane": plane,
            }
        )
        return
    text = f"read {count_text(done.samples)} samples, {bytes_text(done.bytes)}, in "
    text += f"{duration_text(done.seconds)}: {done.samples / done.seconds:,.0f} samples/s, "
    text += f"{bytes_text(done.bytes / done.seconds)}/s"
    output.line(text + ("" if done.complete else " (part of an epoch)"))
    output.line(f"CPU {done.cpu_s:.2f} s, {done.cpu_s_per_gb:.3f} s/GB (the emulated step's not)")
    share = stats.stall_s / max(1e-9, done.seconds)
    output.line(f"waited {duration_text(stats.stall_s)} for data, {share:.1%} of the time")
    if plane:
        output.line(str(told).split("\n\n")[-1])


def _run(
    loader: Loader, samples: int, step_s: float, seconds: float | None, tell: Report | None
) -> _Read:
    started, cpu_s = time.perf_counter(), _cpu_s()
    complete = True
    for _ in loader:
        if step_s:
            time.sleep(step_s)
        if tell is not None:
            tell(loader.stats.samples, samples, loader.stats.bytes, None)
        if seconds is not None and time.perf_counter() - started >= seconds:
            complete = loader.stats.batches >= len(loader)
            break
    elapsed_s = max(1e-9, time.perf_counter() - started)
    stats = loader.stats
    return _Read(stats.samples, stats.bytes, stats.batches, elapsed_s, _cpu_s() - cpu_s, complete)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

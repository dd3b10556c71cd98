"""`headrace whatif`: a job's steps and stall on other storage, nodes, batches, accelerators or workers."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer
from typer import Argument, Option

from headrace.base.text import bytes_text, seconds_text
from headrace.cli.options import QuietOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.bench.config import LoadedWorkload
    from headrace.insight.whatif.model import Check, JobFigures, Loader, Prediction
    from headrace.insight.whatif.storage import Storage
    from headrace.recorded import Recorded

_AS_RECORDED = "recorded"

_BOUNDS = {
    "compute": "data is there in time; only faster computing helps",
    "link": "the network or disk link is full: fewer bytes, or a faster one",
    "servers": "the storage serves no more requests at a time: fewer, larger ones",
    "processors": "decoding needs more processors, or less work",
    "workers": "decoding keeps the workers busy: more of them, if there are processors, or less work",
    "latency": "too few reads in flight: more workers, or --loader headrace",
}
"""What a row's last word means, and what would help."""


def whatif(
    job: str = Argument(
        ...,
        metavar="JOB",
        help="A workload's YAML, a shipped workload's name, or a traced run's folder.",
    ),
    *,
    storage: list[str] | None = Option(
        None,
        metavar="NAME|FILE.json",
        help="ssd, hdd, lustre, nfs, s3, memory, recorded, or what `headrace doctor --json` or "
        "`headrace bench storage --json` measured. May be given several times.",
    ),
    nodes: int = Option(1, min=1, help="With as many training processes each."),
    batch: int | None = Option(None, min=1, help="Of a training process."),
    gpu_speed: str = Option("1x", metavar="2x", help="How much faster a step computes."),
    latency: str = Option(
        "1x", metavar="3x", help="How much longer the storage takes: a busy one."
    ),
    workers: int | None = Option(None, min=0, help="Of each training process."),
    processors: int | None = Option(None, min=1, help="Of a node."),
    loader: str | None = Option(
        None, help="torch: workers that read one by one; headrace: its reader. As recorded."
    ),
    reads_in_flight: int = Option(
        16, min=1, help="Of headrace's reader, for each training process."
    ),
    ahead: int = Option(4, min=1, help="Batches that headrace's reader is ahead, at most."),
    decode: bool = Option(
        True, "--decode/--no-decode", help="Whether samples are decoded as recorded."
    ),
    shared: bool | None = Option(
        None, "--shared/--local", help="All nodes have one storage, or each its own."
    ),
    seed: int = Option(0, help="Of the draws."),
    output: QuietOutput,
) -> int:
    """Predict how long a job's steps take, and how much of that is waiting for data, elsewhere.

    A simulation of its reads, decoding and steps, with the recorded sizes and times. What it is worth
    is said with it: how far it is off on the record itself.
    """
    from headrace.insight.whatif.model import Scenario, check_of, predict, scenario_as_recorded
    from headrace.insight.whatif.storage import slower, storage_of

    figures, home, reader = known = _known(job)
    if not decode:
        figures = replace(figures, decode_s=figures.decode_s[:0], collate_s=0.0)
    storages = []
    for name in storage or [_AS_RECORDED if home is not None else "ssd"]:
        one = home if name == _AS_RECORDED else storage_of(name)
        if one is None:
            raise typer.BadParameter("--storage recorded needs a job of `headrace record`")
        storages.append(one)
    if (factor := _factor("--latency", latency)) != 1:
        storages = [slower(one, factor) for one in storages]
    if shared is not None:
        storages = [replace(one, shared="all" if shared else "none") for one in storages]
    wanted = Scenario(
        storage=storages[0], nodes=nodes, batch=batch or figures.batch,
        workers=figures.workers if workers is None else workers,
        gpu_speed=_factor("--gpu-speed", gpu_speed), processors=processors or figures.processors,
        loader=loader or reader,  # type: ignore[arg-type]  # checked there
        reads_in_flight=reads_in_flight, ahead=ahead,
    )  # fmt: skip
    check = None
    rows: list[tuple[str, Prediction]] = []
    if home is not None:
        check = check_of(known.figures, home, reader)
        base = scenario_as_recorded(known.figures, home, reader)
        rows.append(("as it was", predict(known.figures, base, seed)))
    rows += [(one.name, predict(figures, replace(wanted, storage=one), seed)) for one in storages]
    of_job = known.figures
    document = {
        "job": job,
        "recorded": {
            "batch": of_job.batch, "workers": of_job.workers, "step_s": of_job.step_s,
            "stall": of_job.stall, "compute_s": float(of_job.compute_s.mean()),
        },
        "check": None if check is None else asdict(check),
        "predictions": [{"name": name, **row.document()} for name, row in rows],
    }  # fmt: skip
    output.result(document, *_lines(job, of_job, rows, check))
    return 0


class _Known(NamedTuple):
    """What is known of a job.

    Attributes:
        home: the storage that it was recorded on; None: it was not.
        loader: what read it.
    """

    figures: JobFigures
    home: Storage | None
    loader: Loader


def _factor(option: str, text: str) -> float:
    try:
        return float(text.lower().removesuffix("x"))
    except ValueError as e:
        raise typer.BadParameter(f"{option} is {text!r}, expected a factor such as 2x") from e


def _known(job: str) -> _Known:
    """What is known of a workload, or of a traced run.

    Raises:
        WorkloadError: there is no such workload, or it is wrong.
        TraceError: a run's folder is damaged.
        ValueError: there is nothing to predict from.
    """
    from headrace.bench.config import load_workload, parse_command_line
    from headrace.insight.whatif.model import figures_of, figures_of_run
    from headrace.insight.whatif.storage import recorded_storage
    from headrace.recorded import read_recorded
    from headrace.trace import read_run

    if Path(job).is_dir():
        figures, home = figures_of_run(read_run(job))
        return _Known(figures, home, "headrace")
    loaded = load_workload(parse_command_line([f"workload={job}"]))
    requests, reader = loaded.workload.dataset.requests, loaded.workload.reader
    if requests is None:
        return _Known(_of_workload(loaded, None), None, "torch")
    recorded = read_recorded(Path(requests))
    if not recorded.batch or not len(recorded.compute_s):
        return _Known(_of_workload(loaded, recorded), None, "torch")
    # The workload may have been corrected by hand where the record had guessed.
    figures = replace(figures_of(recorded), batch=reader.batch_size, workers=reader.read_threads)
    home = recorded_storage(recorded) if len(recorded.read_s) else None
    return _Known(figures, home, "headrace" if recorded.traced else "torch")


def _of_workload(loaded: LoadedWorkload, recorded: Recorded | None) -> JobFigures:
    """Figures of a plain DLIO workload: drawn from its distributions."""
    import os

    import numpy as np

    from headrace.insight.whatif.model import JobFigures

    data, reader, train = loaded.workload.dataset, loaded.workload.reader, loaded.workload.train
    random = np.random.default_rng(train.seed)
    mean, stdev = data.nominal_bytes, data.record_length_bytes_stdev
    sizes = np.maximum(random.normal(mean, stdev, 4096), 1).astype(np.int64)
    if recorded is not None:
        sizes = recorded.sample_bytes[recorded.order]
    compute = np.abs(train.computation_time.draw(random, 4096))
    if not compute.any():
        raise ValueError(
            f"{loaded.at('train.computation_time')} is not given: how long a step computes is not known"
        )
    decode = np.abs(reader.preprocess_time.draw(random, 4096))
    # Batches of each worker, as DLIO has it.
    prefetch = -(-reader.prefetch_size // max(1, reader.read_threads)) or 2
    return JobFigures(
        sample_bytes=sizes, opens=data.num_samples_per_file == 1, batch=reader.batch_size,
        workers=reader.read_threads, prefetch=prefetch,
        processors=len(os.sched_getaffinity(0)), compute_s=compute,
        decode_s=decode if decode.any() else np.zeros(0),
    )  # fmt: skip


def _lines(
    job: str, figures: JobFigures, rows: Sequence[tuple[str, Prediction]], check: Check | None
) -> Iterator[str]:
    yield (
        f"{job}: batch {figures.batch}, {figures.workers} workers, "
        f"samples of {bytes_text(float(figures.sample_bytes.mean()))}, "
        f"{float(figures.compute_s.mean()) * 1e3:.1f} ms computing a step"
    )
    yield ""
    yield (
        f"{'storage':<13}{'nodes':>5}{'batch':>6}{'workers':>8}{'gpu':>6}{'step':>11}{'stall':>7}"
        f"{'samples/s':>11}  bound by"
    )
    for name, row in rows:
        s = row.scenario
        yield (
            f"{name[:12]:<13}{s.nodes:>5}{s.batch:>6}{s.workers:>8}{f'{s.gpu_speed:g}x':>6}"
            f"{seconds_text(row.step_s):>11}{row.stall:>7.1%}{row.samples_per_s:>11,.0f}  {row.bound}"
        )
    yield ""
    for bound in dict.fromkeys(row.bound for _, row in rows):
        yield f"{bound}: {_BOUNDS[bound]}"
    last = rows[-1][1]
    yield f"other draws change the step time by +-{last.step_spread_s / last.step_s:.1%}"
    if check is not None:
        yield (
            f"the model on the record itself: {seconds_text(check.predicted_s)} a step, it was "
            f"{seconds_text(check.recorded_s)} ({check.error:+.1%})"
        )
    else:
        yield "there are no recorded step times to hold the model against"
    for note in dict.fromkeys(note for _, row in rows for note in row.notes):
        yield f"note: {note}"

"""Recording: from a command, or another tracer's files, to a workload's YAML and its sidecar, lines and JSON.

What is recorded lies in a folder beside the output (`job.yaml.part`) until the two files are written. A
recording that was cut off leaves that folder, and `finish` makes of it what can be made. DLIO and `bench run`
accept the YAML. What is a measurement and what is a guess stands beside each value. Exact requests lie in the
sidecar (`headrace.trace.recorded`), which DLIO does not look at.
"""

from __future__ import annotations

import json
import shlex
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.files import replace_file
from headrace.base.text import bytes_text, counted, labelled
from headrace.errors import RecordError
from headrace.insight.record.darshan import import_darshan
from headrace.insight.record.dftracer import import_dftracer
from headrace.insight.record.job import job_of
from headrace.insight.record.log import read_log
from headrace.insight.record.rhythm import exact_rhythm
from headrace.posix.launch import (
    RUN,
    RUN_FILE,
    TRACE_FOLDER,
    ProgramEnd,
    RecordedRun,
    record_program,
)
from headrace.trace.recorded import SPLITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.insight.record.job import RecordedJob, Saves

_LOG_BYTES: Final = 1 << 30
_NUMBER_MAX: Final = 1 << 32
_SECONDS_MAX: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """How a command is recorded."""

    output: Path
    roots: Sequence[str] = ()  # folders of the data set; empty: it is found
    log_bytes: int = _LOG_BYTES  # what each process may log, at most
    keep: bool = False
    overwrite: bool = False

    @property
    def part(self) -> Path:
        """The folder of the logs."""
        return self.output.with_name(self.output.name + ".part")


@dataclass(frozen=True, slots=True)
class Recording:
    """What came of it."""

    run: RecordedRun
    job: RecordedJob | None  # None: nothing that could be described was read; `why` says so
    output: Path
    sidecar: Path | None
    cut_off: bool = False  # the recording did not see the program's end
    why: RecordError | None = None


def record(command: Sequence[str], options: RecordOptions) -> Recording:
    """Run a command to its end, and write what it read.

    Raises FileNotFoundError if there is no such program, PermissionError if it cannot be run, RecordError if
    an output is there already, and OSError if the output cannot be written.
    """
    part = options.part
    _refuse_to_replace(options)
    if part.exists():
        finish_it = f"headrace record --finish {part} -o {options.output}, or remove the folder."
        raise _refused(
            part, ": an earlier recording left its logs there", f"Finish it: {finish_it}"
        )
    run = record_program(command, part, options.log_bytes)
    return _write(run, options, part)


def finish(part: Path, options: RecordOptions) -> Recording:
    """Make of the folder that a recording left when it was cut off what can be made.

    Raises RecordError if it is none, or is still going on, or an output is there already.
    """
    run = _read_run(part)
    _refuse_to_replace(options)
    return _write(run, options, part, finishing=True)


def import_recording(paths: Sequence[Path], options: RecordOptions) -> Recording:
    """Write what other tracers' files, or the folders that they lie in, say that a job read.

    Raises RecordError if they cannot be read, have no data set's reads, or an output is there already, and
    MissingPackage if Darshan's logs are given without the package darshan.
    """
    _refuse_to_replace(options)
    files = [file for path in paths for file in _traces(path)]
    is_darshan = {file.name.endswith(_DARSHAN) for file in files}
    if len(is_darshan) == 2:
        raise RecordError(
            "traces of DFTracer and logs of Darshan are given together: which are the job?",
            next_step="Give the files of one of them.",
        )
    tracer = "Darshan" if is_darshan == {True} else "DFTracer"
    trace = import_darshan(files) if tracer == "Darshan" else import_dftracer(files)
    run = RecordedRun(list(trace.command), "", notes=trace.notes)
    job = job_of(
        trace.logs, command=trace.command, cwd="/", roots=options.roots, processors=0,
        wall_s=trace.wall_s, exact=trace.rhythm,
    )  # fmt: skip
    return _publish(replace(job, tracer=tracer), run, options)


_DARSHAN: Final = ".darshan"
_TRACES: Final = (".pfw", ".pfw.gz", _DARSHAN)


def _traces(path: Path) -> list[Path]:
    """A file of another tracer, or those of a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    kept = [file for file in files if file.name.endswith(_TRACES)]
    if not kept:
        what = " has no trace in it" if path.is_dir() else " is no trace"
        step = f"Give traces of DFTracer or logs of Darshan: {', '.join(_TRACES)}."
        raise _refused(path, what, step)
    return kept


def _refuse_to_replace(options: RecordOptions) -> None:
    output = options.output
    if output.suffix not in (".yaml", ".yml"):
        raise ValueError(f"the output is {output}, expected a name that ends with .yaml")
    if not output.parent.is_dir():
        raise RecordError(f"{output.parent}: there is no such folder.", path=str(output.parent))
    if output.exists() and not options.overwrite:
        step = "Choose another name, or pass --overwrite."
        raise _refused(output, " is there already", step)


def _refused(path: Path, what: str, next_step: str) -> RecordError:
    return RecordError(f"{path}{what}.", path=str(path), next_step=next_step)


def _write(
    run: RecordedRun, options: RecordOptions, part: Path, *, finishing: bool = False
) -> Recording:
    """What can be said of the logs in a folder; those that cannot be read are noted."""
    logs, cut_off = [], finishing and run.ended is None
    for path in sorted(part.glob("log-*")):
        try:
            logs.append(read_log(path))
        except RecordError as e:
            run.notes.append(f"a process's log is left out: {e.message}")
    exact, wrong = exact_rhythm(part / TRACE_FOLDER)
    run.notes += [wrong] if wrong else []
    try:
        job = job_of(
            logs, command=run.command, cwd=run.working_folder or "/", roots=options.roots,
            processors=run.processors, wall_s=run.wall_s, exact=exact,
        )  # fmt: skip
    except RecordError as e:
        if not options.keep and not finishing:
            shutil.rmtree(part, ignore_errors=True)
        return Recording(run, None, options.output, None, cut_off, e)
    recording = _publish(job, run, options, cut_off=cut_off)
    if not options.keep:
        shutil.rmtree(part, ignore_errors=True)
    return recording


def _publish(
    job: RecordedJob, run: RecordedRun, options: RecordOptions, *, cut_off: bool = False
) -> Recording:
    sidecar = options.output.with_name(f"{options.output.stem}.requests.npz")
    job.recorded.write(sidecar)
    text = workload_text(job, options.output.stem, sidecar.name)
    replace_file(options.output, text.encode("utf-8", "backslashreplace"))
    return Recording(run, job, options.output, sidecar, cut_off)


def _read_run(part: Path) -> RecordedRun:
    path = part / RUN_FILE
    try:
        with path.open("rb") as f:
            data = f.read(RUN.bytes_max + 1)
    except OSError as e:
        raise _refused(part, f": is no folder that a recording left: {e}", RUN.next_step) from e
    fields = RUN.decode(data, str(path))
    ended = fields.inner("ended") if fields.value("ended") is not None else None
    process = fields.integer("process", 0, _NUMBER_MAX)
    command = b""
    with suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    if ended is None and b"record" in command.split(b"\0"):
        what = f": process {process} is still recording there"
        raise _refused(part, what, "Wait until it has ended.")
    began_s = fields.number("began_unix_s", 0, _SECONDS_MAX)
    run = RecordedRun(list(fields.texts("command")), str(part), began_s)
    run.working_folder = fields.text("working_folder")
    run.processors = max(1, fields.integer("processors", 0, _NUMBER_MAX))
    run.wall_s = fields.number("wall_s", 0, _SECONDS_MAX)
    if ended is not None:
        status, signal = (ended.integer(name, 0, _NUMBER_MAX) for name in ("status", "signal"))
        run.ended = ProgramEnd(status, signal)
    return run


# -- workload ----------------------------------------------------------------------------------------

_PREPROCESS_S_LEAST: Final = 20e-6
_WHOLE: Final = 0.9  # of the longest epoch's reads: one with fewer was cut off


def workload_text(job: RecordedJob, name: str, sidecar: str) -> str:
    """The YAML of a workload; `sidecar`: the file of exact requests, relative to it."""
    by = "recorded by `headrace record`"
    if job.tracer != "headrace":
        by = f"as {job.tracer} has them, by `headrace record --from`"
    lines = [
        f"# A training job's reads, {by}.",
        f"# Command: {_safe(shlex.join(job.command))}",
        f"# Its files lie in {_safe(job.root)}",
        "# Run it elsewhere:  headrace bench run --workload THIS --data-folder DIR --generate",
    ]
    ranks, saves = job.rhythm.ranks, job.saves
    if ranks > 1:
        lines.append(f"# {ranks} training processes read together: add -n {ranks}")
    framework = job.framework if job.framework in {"pytorch", "tensorflow"} else "pytorch"
    lines += ["", f"framework: {framework}"]
    valid = int((job.recorded.file_split == SPLITS.index("valid")).sum())
    model: _Rows = [("name", name, "")]
    if saves is not None:
        model += [("model_size_bytes", saves.nbytes, f"{saves.count} checkpoints were written")]
    workflow: _Rows = [
        ("generate_data", False, ""), ("train", True, ""),
        ("evaluation", bool(valid), ""), ("checkpoint", saves is not None, ""),
    ]  # fmt: skip
    for section, rows in (
        ("model", model), ("workflow", workflow), ("dataset", _dataset(job, sidecar, valid)),
        ("reader", _reader(job, valid)), ("train", _train(job)),
        ("evaluation", [("eval_time", 0.0, "not known")] if valid else []),
        ("checkpoint", _checkpoint(job, saves) if saves is not None else []),
    ):  # fmt: skip
        lines += ["", f"{section}:"] if rows else []
        lines += [f"  {key}: {_yaml(value)}{'  # ' * bool(why)}{why}" for key, value, why in rows]
    return "\n".join(lines) + "\n"


_Rows = list[tuple[str, Any, str]]  # key, value, and how that is known


def _dataset(job: RecordedJob, sidecar: str, valid: int) -> _Rows:
    recorded = job.recorded
    train = recorded.file_split[recorded.sample_file] == 0
    files = int((recorded.file_split == 0).sum())
    sizes = recorded.sample_bytes[train]
    counts = np.bincount(recorded.sample_file[train], minlength=len(recorded.names))
    even = len(set(counts[recorded.file_split == 0].tolist())) == 1
    image = job.format in ("jpeg", "png")
    each = 1 if image else max(1, round(len(sizes) / max(1, files)))
    name = job.root.rstrip("/").rsplit("/", 1)[-1]
    if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum()):
        name = "recorded"
    rows: _Rows = [
        ("data_folder", f"./data/{name}", ""),
        ("format", job.format, f"by {job.format_by}"),
        ("num_files_train", files, "that were read"),
        ("num_samples_per_file", each, "" if even or image else "on average"),
        ("record_length_bytes", round(float(sizes.mean()), 2), "mean of a sample"),
    ]
    if sizes.std() >= 1:
        rows += [("record_length_bytes_stdev", round(float(sizes.std()), 2), "")]
    if valid:
        rows += [("num_files_eval", valid, "")]
    return [*rows, ("requests", sidecar, "exact sizes and order; headrace's own key")]


def _reader(job: RecordedJob, valid: int) -> _Rows:
    rhythm, shuffle = job.rhythm, job.statistics.shuffle
    sure = {
        "trace": "exact: from the loader", "messages": "from what workers sent",
        "bursts": "from pauses between reads", "none": "not known",
        "steps": "an epoch's reads over its steps" if rhythm.batch else "not known: set it",
    }[rhythm.source]  # fmt: skip
    if rhythm.source in ("messages", "bursts"):
        sure += f"; {rhythm.batch_fits:.0%} of the reads agree"
    order = f"order against names: correlation {job.statistics.correlation:+.2f}"
    if (same := job.statistics.same_each_epoch) is not None:
        order += ", the same in every epoch" if same else ", new in every epoch"
    threads = rhythm.workers or (rhythm.threads if rhythm.threads > 1 else 0)
    who = "processes that read" if rhythm.workers else "0: reads by itself"
    rows: _Rows = [
        ("data_loader", "tensorflow" if job.framework == "tensorflow" else "pytorch", ""),
        ("batch_size", max(1, rhythm.batch), sure),
        ("read_threads", threads, who),
        ("file_shuffle", "seed" if shuffle == "files" else "off", ""),
        ("sample_shuffle", "seed" if shuffle == "samples" else "off", order),
    ]
    if rhythm.ahead and threads:
        rows += [("prefetch_size", rhythm.ahead, "batches that were begun and not taken, at most")]
    if valid:
        rows += [("batch_size_eval", max(1, rhythm.batch), "as in training")]
    mean = float(rhythm.decode_s.mean()) if len(rhythm.decode_s) else 0.0
    decode_ms = mean * 1e3
    if mean >= _PREPROCESS_S_LEAST:
        rows += [
            (
                "preprocess_time",
                _times(rhythm.decode_s),
                f"{decode_ms:.3g} ms on average, per sample",
            )
        ]
    if job.direct:
        rows += [("odirect", True, "")]
    return rows


def _train(job: RecordedJob) -> _Rows:
    rhythm = job.rhythm
    reads = np.diff(job.recorded.epoch_starts)
    whole = max(1, int((reads >= _WHOLE * reads.max(initial=0)).sum()))
    cut = whole < job.recorded.epochs
    rows: _Rows = [("epochs", whole, "whole ones; the record has part of another" if cut else "")]
    if len(rhythm.compute_s):
        stall = float(rhythm.wait_s.sum() / max(1e-9, (rhythm.wait_s + rhythm.compute_s).sum()))
        why = f"{len(rhythm.compute_s):,} steps; waiting for data took {stall:.0%} of the time"
        rows += [("computation_time", _times(rhythm.compute_s), why)]
    else:
        rows += [("computation_time", 0.0, "not known: set it")]
    if job.statistics.same_each_epoch:
        rows += [("seed_change_epoch", False, "")]
    return rows


def _checkpoint(job: RecordedJob, saves: Saves) -> _Rows:
    rows: _Rows = [("fsync", saves.synced, "")]
    rhythm, epochs = job.rhythm, max(1, job.recorded.epochs)
    if saves.count > epochs and rhythm.step_s:
        gap_s = float(np.median(np.diff(saves.begin_ns))) / 1e9
        steps = max(1, round((gap_s - saves.seconds) / rhythm.step_s))
        rows += [("steps_between_checkpoints", steps, f"one about every {gap_s:.1f} s")]
    else:
        rows += [("epochs_between_checkpoints", max(1, epochs // max(1, saves.count)), "")]
    return rows


def _times(values: NDArray[np.floating[Any]]) -> dict[str, Any]:
    """A distribution with their mean and deviation; a normal one would draw times below 0 where they spread."""
    mean, stdev = float(values.mean()), float(values.std())
    if stdev > mean / 4:
        shape, scale = (mean / stdev) ** 2, stdev**2 / mean
        return {"type": "gamma", "shape": float(f"{shape:.6g}"), "scale": float(f"{scale:.6g}")}
    return {"mean": float(f"{mean:.6g}"), "stdev": float(f"{stdev:.6g}")}


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float):
        return format(value, ".10g")
    # Words such as off are none to YAML 1.1 without their quotes.
    return json.dumps(value) if isinstance(value, str) else str(value)


def _safe(text: str) -> str:
    """In a comment: no character that could end its line."""
    return json.dumps(text)[1:-1].replace('\\"', '"')


# -- lines and JSON --------------------------------------------------------------------------------------------


def lines_of(recording: Recording) -> Iterator[str]:
    """What a person wants to know, a line each, not more than 80 columns where numbers allow."""
    job, ended = recording.job, recording.run.ended
    if recording.cut_off:
        yield "cut off: the recording did not see the end; this is what it saw"
    elif ended is not None and ended.signal:
        yield f"the command was ended by signal {ended.signal}; this is what it did until then"
    elif ended is not None and ended.status:
        yield f"the command failed (exit status {ended.status}); this is what it did until then"
    if job is not None:
        sidecar = recording.sidecar.name if recording.sidecar is not None else "no sidecar"
        yield from _of(job)
        yield f"wrote     {recording.output}, and {sidecar} with the exact requests"
        yield f"next      headrace bench run --workload {recording.output} \\"
        yield "              --data-folder DIR --generate      (its reads, in DIR)"
        yield f"          headrace whatif {recording.output} --storage lustre --gpu-speed 2x"
    for note in recording.run.notes:
        yield from labelled("note", note, width=78)


def _of(job: RecordedJob) -> Iterator[str]:
    recorded, s = job.recorded, job.statistics
    sizes = recorded.sample_bytes
    train = int((recorded.file_split == 0).sum())
    valid = len(recorded.names) - train
    files = f"{train:,} files" + (f" and {valid:,} of evaluation" if valid else "")
    total = bytes_text(float(recorded.file_bytes.sum()))
    yield f"data      {files}, {total}, {job.format} (by {job.format_by})"
    yield f"          in {job.root}"
    mean, deviation = bytes_text(float(sizes.mean())), bytes_text(float(sizes.std()))
    yield f"samples   {len(sizes):,}, of {mean} on average (stdev {deviation})"
    new = {None: "", True: ", the same in each", False: ", new in each"}[s.same_each_epoch]
    words = {"samples": "shuffled", "files": "files shuffled", "none": "in order"}[s.shuffle]
    each = len(recorded.order) // max(1, recorded.epochs)
    yield f"order     {counted(recorded.epochs, 'epoch')} of about {each:,} reads, {words}{new}"
    yield from _rhythm(job)
    if (saves := job.saves) is not None:
        size = bytes_text(saves.nbytes)
        yield f"saves     {saves.count} checkpoints of {size}, {saves.seconds:.2f} s each"
    processes = max(1, job.rhythm.ranks * (1 + job.rhythm.workers))
    if job.tracer == "headrace":
        share = job.overhead_s / max(1e-9, job.wall_s * processes)
        of_run = f" ({share:.1%} of the run)" if job.wall_s else ""
        yield f"cost      logging {job.calls:,} calls took {job.overhead_s:.2f} s{of_run}"
    for note in job.notes:
        yield from labelled("note", note, width=78)


def _rhythm(job: RecordedJob) -> Iterator[str]:
    rhythm = job.rhythm
    ranks = f"{rhythm.ranks} training processes, each with " if rhythm.ranks > 1 else ""
    who = counted(rhythm.workers, "worker") if rhythm.workers else "no workers"
    how = {"trace": "exact", "messages": "from what workers sent", "bursts": "from pauses",
           "steps": "from reads and steps"}  # fmt: skip
    sure = f", {rhythm.batch_fits:.0%} of the reads agree" if rhythm.source != "trace" else ""
    known = rhythm.source != "none" and rhythm.batch
    batch = f"{rhythm.batch} ({how[rhythm.source]}{sure})" if known else "not known"
    yield f"batch     {batch}; {ranks}{who}"
    if len(rhythm.compute_s):
        share = rhythm.wait_s.sum() / max(1e-9, (rhythm.wait_s + rhythm.compute_s).sum())
        seen, computing = len(rhythm.compute_s), _ms(rhythm.compute_s)
        yield f"steps     {seen:,} seen: computing {computing}; {share:.1%} waiting"
    if len(rhythm.decode_s):
        yield f"decode    {_ms(rhythm.decode_s)} a sample, beside its reads"


def _ms(values: Any) -> str:
    return f"{np.mean(values) * 1e3:.2f} ms (stdev {np.std(values) * 1e3:.2f})"


def document_of(recording: Recording) -> dict[str, Any]:
    """The same for JSON."""
    job, run = recording.job, recording.run
    document: dict[str, Any] = {
        "command": run.command, "ended": None if run.ended is None else asdict(run.ended),
        "cut_off": recording.cut_off, "unseen": run.unseen, "wall_s": run.wall_s,
        "notes": [*run.notes, *(job.notes if job else ())],
        "error": None if recording.why is None else str(recording.why),
        "output": None if job is None else str(recording.output),
        "sidecar": None if recording.sidecar is None else str(recording.sidecar),
    }  # fmt: skip
    if job is None:
        return document
    recorded, rhythm, saves, sizes = job.recorded, job.rhythm, job.saves, job.recorded.sample_bytes
    document["job"] = {
        "root": job.root, "files": len(recorded.names), "bytes": int(recorded.file_bytes.sum()),
        "samples": len(sizes), "sample_bytes_mean": float(sizes.mean()),
        "sample_bytes_stdev": float(sizes.std()), "format": job.format, "format_by": job.format_by,
        "framework": job.framework, "epochs": recorded.epochs, "reads": len(recorded.order),
        "shuffle": job.statistics.shuffle, "order_correlation": job.statistics.correlation,
        "same_each_epoch": job.statistics.same_each_epoch, "batch": rhythm.batch,
        "batch_by": rhythm.source, "batch_fits": rhythm.batch_fits, "workers": rhythm.workers,
        "ranks": rhythm.ranks, "steps": len(rhythm.compute_s),
        "compute_s": _mean(rhythm.compute_s), "wait_s": _mean(rhythm.wait_s),
        "decode_s": _mean(rhythm.decode_s), "collate_s": rhythm.collate_s,
        "checkpoints": None if saves is None else {
            "count": saves.count, "bytes": saves.nbytes, "seconds": saves.seconds,
            "synced": saves.synced,
        },
        "recording": {"calls": job.calls, "seconds": job.overhead_s, "lost": job.lost, "blind": job.blind},
        "left_out": job.left_out,
    }  # fmt: skip
    return document


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None

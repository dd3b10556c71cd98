"""`headrace bench`: measures storage the way training uses it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import bench_results, bench_sweep
from headrace.cli.bench_storage import storage
from headrace.cli.output import Json, Output, Quiet, Verbose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.session import SessionReport

app = typer.Typer(
    help="Measure storage the way training uses it: DLIO's workloads, unchanged.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command()(storage)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command()(bench_results.report)
app.command()(bench_results.compare)
app.command()(bench_results.trace)
app.command(context_settings=_PASS_ON)(bench_sweep.sweep)

_RUN_HELP = """Run a DLIO workload: generate its data if it says so, train, evaluate, and report.

WORDS are DLIO's (hydra's): workload=unet3d_h100 ++workload.reader.batch_size=8 ++hydra.run.dir=DIR
--config-dir=DIR. The results are not MLPerf results.
"""


@app.command(context_settings=_PASS_ON, help=_RUN_HELP)
def run(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(help="workload=NAME and overrides.", metavar="WORDS")
    ] = None,
    *,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.yaml", help="workload=FILE.yaml, as `headrace record` writes it."
        ),
    ] = None,
    data_folder: Annotated[
        str | None, typer.Option("--data-folder", metavar="DIR", help="Where the data lies.")
    ] = None,
    generate_first: Annotated[
        bool, typer.Option("--generate", help="Generate the data before, where it is not there.")
    ] = False,
    accelerators: Annotated[
        int, typer.Option("--accelerators", "-n", min=1, help="Emulated in this process.")
    ] = 1,
    engine: Annotated[
        str | None,
        typer.Option(help="What reads: headrace, torch, tensorflow, null or custom:MODULE:CLASS."),
    ] = None,
    writer: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-writer", help="plain, fsync (as checkpoint.fsync), direct or headrace."
        ),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Put the data out of the page cache before; verified.")
    ] = False,
    ceiling: Annotated[
        bool, typer.Option("--ceiling", help="Run the steps without storage, too, and compare.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Repeat the run, for a confidence interval.")
    ] = 1,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Copy the data to DIR, read them there, remove them at the end."
        ),
    ] = None,
    barrier: Annotated[
        str, typer.Option(help="Where accelerators meet: at every step (as DLIO), or epoch.")
    ] = "step",
    formula: Annotated[
        str, typer.Option(help="Throughput in summary.json: mlcommons, or upstream's (steps - 2).")
    ] = "mlcommons",
    simulate: Annotated[
        str | None, typer.Option(metavar="NAME", help="Simulate a slow storage: lustre, nfs, ...")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Runs a workload."""
    from headrace.bench.run import RunOptions
    from headrace.io.simulation import simulation_of

    if barrier not in ("step", "epoch"):
        raise typer.BadParameter(f"--barrier is {barrier!r}, expected step or epoch")
    if formula not in ("mlcommons", "upstream"):
        raise typer.BadParameter(f"--formula is {formula!r}, expected mlcommons or upstream")
    if simulate is not None:
        simulation_of(simulate)
    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    given = [*(words or []), *context.args]
    if workload is not None:
        given.insert(0, f"workload={workload}")
    if data_folder is not None:  # quoted: a path need not be what YAML takes for text
        given.append(f"++workload.dataset.data_folder={json.dumps(data_folder)}")
    if generate_first:
        given.append("++workload.workflow.generate_data=True")
    if engine is not None:
        given.append(f"++workload.reader.engine={engine}")
    if writer is not None:
        given.append(f"++workload.checkpoint.writer={writer}")
    options: dict[str, Any] = {
        "run": RunOptions(accelerators=accelerators, barrier=barrier, simulate=simulate),  # type: ignore[arg-type]  # checked above
        "cold": cold, "ceiling": ceiling, "repeats": repeats, "stage": stage, "formula": formula,
    }  # fmt: skip
    _print(output, _session(output, given, "running", **options), simulate)
    return 0


def _session(output: Output, words: list[str], what: str, **options: Any) -> SessionReport:
    from headrace.bench.session import SessionOptions, run_session
    from headrace.cli.progress import progress

    with progress(output, what, "samples" if what == "generating" else "steps") as tell:

        def told(_: str, done: int, total: int | None) -> None:
            if tell is not None:
                tell(done, total, 0, None)

        return run_session(words, SessionOptions(**options, progress=told))


def _print(output: Output, report: SessionReport, simulate: str | None) -> None:
    for note in report.notes:
        output.remark(f"note: {note}")
    if output.as_json:
        output.document({
            "folder": report.folder, "rank": report.rank, "simulated": simulate,
            "generated_bytes": report.generated_bytes, "summary": report.summary,
        })  # fmt: skip
        return
    for line in report.lines:
        output.line(line)
    for line in _explained(report.summary):
        output.line(line)
    if simulate is not None:
        output.line(f"simulated {simulate}: the delays are not real")
    output.remark(f"results in {report.folder}")


def _explained(summary: dict[str, Any] | None) -> Iterator[str]:
    """Our own figures, for people."""
    if summary is None:
        return
    own = summary["headrace"]
    yield from _of_checkpoints(own.get("checkpoint"))
    if "time" not in own:  # checkpoints alone
        yield own["not_mlperf"]
        return
    time, total = own["time"], own["time"]["total_s"]
    if total:
        parts = ("compute", "wait", "barrier", "harness")
        yield "time: " + ", ".join(f"{name} {time[f'{name}_s'] / total:.1%}" for name in parts)
    yield from _of_solution(own["time_to_solution"])
    yield f"bound by: {own['bound']} ({own['bound_reason']})"
    if own["late_s"]:
        yield f"ends of steps were noticed {own['late_s']['p99'] * 1e3:.2f} ms late (p99)"
    if own["bytes"]:
        yield (
            f"read {own['bytes'] / 1e9:.3f} GB, {own['device_bytes'] / 1e9:.3f} GB of it from the "
            f"device, at {own['cpu_s_per_gb']:.2f} CPU s/GB"
        )
    share = own["residency_before"].get("share")
    if share is not None:
        yield f"in the page cache before the run: {share:.0%} of the data"
    if own["au_percent"].get("confidence_95") is not None:
        au = own["au_percent"]
        yield f"AU of {au['runs']} runs: {au['mean']:.2f} +- {au['confidence_95']:.2f} % (95 %)"
    yield own["not_mlperf"]


def _of_solution(split: dict[str, float]) -> Iterator[str]:
    if split:
        names = ("staging", "training", "evaluation", "checkpointing", "other")
        parts = [f"{name} {split[f'{name}_s']:.2f} s" for name in names if split[f"{name}_s"] > 0]
        yield f"time to solution: {split['total_s']:.2f} s: {', '.join(parts)}"


def _of_checkpoints(own: dict[str, Any] | None) -> Iterator[str]:
    if own is None:
        return
    if own["save_s"]:
        yield (
            f"checkpoints by {own['writer']}: {own['save_s']['mean']:.3f} s each, training stood still "
            f"for {own['blocking_s']['mean']:.3f} s"
        )
    share = own["page_cache_share_before_loads"]
    if share is not None:
        yield f"in the page cache before checkpoints were read: {share:.0%} of their bytes"


@app.command(context_settings=_PASS_ON)
def generate(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(help="workload=NAME and overrides.", metavar="WORDS")
    ] = None,
    *,
    threads: Annotated[
        int | None, typer.Option(min=1, help="That write; else two a processor and two more.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove another data set of ours that is there.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Generate a DLIO workload's data set, and do nothing else. Goes on where it was interrupted."""
    only = ("generate_data=True", "train=False", "evaluation=False", "checkpoint=False")
    given = [*(words or []), *context.args, *(f"++workload.workflow.{key}" for key in only)]
    output = Output(as_json=as_json, quiet=quiet)
    options = {"generate_threads": threads, "overwrite": overwrite}
    _print(output, _session(output, given, "generating", **options), None)
    return 0


@app.command()
def workloads(*, as_json: Json = False) -> int:
    """List the workloads that come with headrace."""
    from headrace.bench.config import load_workload, parse_command_line, shipped_workloads

    output = Output(as_json=as_json)
    rows = []
    for name in shipped_workloads():
        workload = load_workload(parse_command_line([f"workload={name}"])).workload
        data = workload.dataset
        rows.append({
            "name": name, "framework": workload.framework, "format": data.format,
            "files": data.num_files_train, "samples_per_file": data.num_samples_per_file,
            "sample_bytes": data.nominal_bytes, "batch_size": workload.reader.batch_size,
            "step_s": workload.train.computation_time.mean_s, "epochs": workload.train.epochs,
            "train": workload.workflow.train, "au": workload.metric.au,
        })  # fmt: skip
    if as_json:
        output.document({"workloads": rows})
        return 0
    for row in rows:
        if row["train"]:
            told = (
                f"{row['format']}, {row['files']:,} x {row['samples_per_file']:,} samples of "
                f"{row['sample_bytes']:,.0f} bytes, batch {row['batch_size']}, computing "
                f"{row['step_s']} s a step"
            )
        else:
            told = "generates data" if "datagen" in str(row["name"]) else "checkpoints"
        output.line(f"{row['name']:<24} {told}")
    return 0

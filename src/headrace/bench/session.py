"""Session: one `bench run` from its command line to its results, and sweeps, which are many of them.

A sweep looks for how many accelerators a storage feeds: the greatest number at which a condition does not hold
yet. More accelerators ask for more, so that utilisation only falls: the number is doubled until the condition
holds, and bisected below. Nothing is run with many more accelerators than are fed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from headrace.base.files import replace_file
from headrace.base.job import which_rank
from headrace.base.text import counted, rate_text, redacted
from headrace.bench import results
from headrace.bench.checkpoints import (
    checkpoint_problems,
    require_checkpoints,
    run_checkpoints,
    writer_name,
)
from headrace.bench.compare import MEASURES, value_of
from headrace.bench.config import SHIPPED, load_workload, parse_command_line
from headrace.bench.dataset_files import AT_REST_S, check_files, find_files, generate
from headrace.bench.engines import engine_name
from headrace.bench.iostat import sampled
from headrace.bench.metrics import BY_HOST, CACHED_LEAST, bounds_of
from headrace.bench.objects import check_options, object_problems, objects_of
from headrace.bench.ranks import join
from headrace.bench.run import SessionOptions, plans_of, run_ceiling, run_epochs, used
from headrace.bench.schema import KEYS
from headrace.bench.staging import Staged, make_cold, residency_of, stage_files
from headrace.bench.summary import (
    BenchRecord,
    gather_run,
    host_document,
    metric_lines,
    provenance,
    summary_document,
    together,
    window_of,
)
from headrace.bench.values import SchemaKey
from headrace.errors import BenchError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from headrace.bench.compare import Condition
    from headrace.bench.config import LoadedWorkload
    from headrace.bench.dataset import Split
    from headrace.bench.metrics import Block, CheckpointTimes
    from headrace.bench.ranks import RankGroup

_GENERATE_S: Final = 24 * 3600.0
_RESIDENCY_FILES: Final = 2000
"""Files that are looked at before a run, at most."""


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What a session did; `summary` is in rank 0 of a run that trained or wrote checkpoints."""

    folder: str
    rank: int
    summary: dict[str, Any] | None
    lines: tuple[str, ...]
    notes: tuple[str, ...]
    generated_bytes: int | None = None


def run_session(words: Sequence[str], options: SessionOptions | None = None) -> SessionReport:
    """Run DLIO's command line, the words after the program's name: generate if it says so, then train.

    Raises:
        WorkloadError: the command line or the workload is wrong, or asks for what is not done.
        BenchError: the data set is not whole, a rank is gone, a batch cannot be read.
        SourceError: the data set is another one.
        VolumeError: the disk is full.
    """
    options = options or SessionOptions()
    line = parse_command_line(words)
    loaded = load_workload(line)
    place = which_rank()
    world = options.accelerators * place.world_size
    check_supported(loaded, world)
    folder = results.default_folder(line, loaded)
    if place.world_size > 1 and not (line.run_dir or loaded.workload.output.folder):
        needs = f"{place.world_size} ranks need one folder for their results."
        raise BenchError(needs, next_step="Give ++hydra.run.dir=DIR.")
    plans_of(loaded, world)
    _check_options(loaded, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BenchError(f"{folder} cannot be made: {e.strerror}.", path=str(folder)) from e
    group = join(place, folder)
    try:
        notes = results.begin_run(folder, line, loaded) if place.is_first else ()
        with sampled(loaded.workload, folder) if place.is_first else contextlib.nullcontext():
            report = _Session(words, loaded, options, group, folder).run()
        return replace(report, notes=(*report.notes, *notes))
    finally:
        group.close()


def _check_options(loaded: LoadedWorkload, options: SessionOptions) -> None:
    """Refuse options that the workload cannot be run with.

    Nothing delays the reads of a framework's loader, and what is simulated cannot be copied from.
    """
    does = loaded.workload.workflow
    check_options(loaded.workload, options)
    engine = engine_name(loaded) if does.train else ""
    if options.simulate is not None and engine in ("torch", "tensorflow", "null"):
        raise BenchError(
            f"a slow storage cannot be simulated for the engine {engine}: it reads by itself.",
            next_step="Give ++workload.reader.engine=headrace, or no simulation.",
        )
    if does.train and options.stage is not None and options.simulate is not None:
        step = "Give one of --stage and --simulate."
        raise BenchError("a simulated storage is read, not copied from.", next_step=step)
    if does.checkpoint and not does.train:
        require_checkpoints(loaded)
    if does.checkpoint and options.repeats > 1 and writer_name(loaded) == "headrace":
        raise BenchError(
            f"{options.repeats} repeats would write each checkpoint so often, and the writer headrace "
            "writes none over.",
            next_step="Repeat with another checkpoint.checkpoint_folder.",
        )


def check_supported(loaded: LoadedWorkload, world: int) -> None:
    """Refuse what `run` does not do on so many accelerators.

    Raises:
        WorkloadError: with everything that is not done, and where it was asked for.
    """
    workload, does = loaded.workload, loaded.workload.workflow
    problems = list(object_problems(loaded))
    if does.checkpoint:
        problems += checkpoint_problems(loaded, world)
    if not (does.train or does.generate_data or does.checkpoint):
        problems.append(("workflow.train", "is false, so there is nothing to run"))
    if not workload.dataset.keep_files:
        problems.append(("dataset.keep_files", "false is not done: data sets are never deleted"))
    if problems:
        raise WorkloadError("\n".join(f"{loaded.at(key)}: {why}" for key, why in problems))


_OF_DATA: Final = ("dataset.", "reader.", "train.", "evaluation.")
_TFRECORD_ONLY: Final = ("reader.shuffle_size", "reader.transfer_size")


def notes_of(loaded: LoadedWorkload) -> list[str]:
    """A line for each key that the user gave, not a shipped workload, and that has no effect."""
    does = loaded.workload.workflow
    unused: dict[str, str] = {}
    if does.train and does.checkpoint:
        alone = (
            "time_between_checkpoints", "recovery_rank_shift", "num_checkpoints_write",
            "num_checkpoints_read",
        )  # fmt: skip
        why = ": it is for runs of checkpoints alone"
        unused |= {f"checkpoint.{name}": why for name in alone}
        if loaded.workload.checkpoint.steps_between_checkpoints >= 0:
            epochs = ("checkpoint.checkpoint_after_epoch", "checkpoint.epochs_between_checkpoints")
            why = ": checkpoint.steps_between_checkpoints says when they are written"
            unused |= dict.fromkeys(epochs, why)
    if loaded.listing_interval is None:
        unused["dataset.listing_validation_interval"] = " without dataset.skip_listing"
    if not does.generate_data:
        unused["reader.write_threads"] = ": nothing is generated"
    if not does.profiling:
        unused |= dict.fromkeys(
            ("profiling.profiler", "profiling.iostat_devices"), " without workflow.profiling"
        )
    own = [name for name, where in loaded.origins.items() if not where.startswith(f"{SHIPPED}/")]
    reasons = {name: unused.get(name) or _why_unused(loaded, name) for name in own}
    notes = [f"{loaded.at(name)} has no effect{why}" for name, why in reasons.items() if why]
    return notes + list(_deviations(loaded))


def _deviations(loaded: LoadedWorkload) -> Iterator[str]:
    """A line for each thing that is done, and that its user may not expect."""
    workload = loaded.workload
    does, data = workload.workflow, workload.dataset
    given = loaded.document.get("dataset", {}).get("record_element_type")
    if data.format in ("jpeg", "png") and given not in (None, "uint8"):
        yield f"{loaded.at('dataset.record_element_type')}: a {data.format} has uint8"
    if does.profiling and workload.profiling.profiler in ("darshan", "tensorboard"):
        name = workload.profiling.profiler
        yield f"{loaded.at('profiling.profiler')}: {name} is not started; the run has its own figures"
    if not does.train:
        return
    if does.evaluation and not data.num_files_eval:
        yield f"{loaded.at('dataset.num_files_eval')} is 0: evaluations have no steps"
    between, output = workload.checkpoint.steps_between_checkpoints, workload.output
    if does.checkpoint and between == 0:
        yield f"{loaded.at('checkpoint.steps_between_checkpoints')} is 0: no checkpoint is written"
    left_out = output.metric_exclude_start_steps + output.metric_exclude_end_steps
    if does.checkpoint and 0 < between <= left_out:
        # DLIO measures the steps between two checkpoints by themselves, and leaves out some of them.
        yield (
            f"{loaded.at('checkpoint.steps_between_checkpoints')} is {between}: AU leaves out {left_out} "
            "steps after each checkpoint, so there is none"
        )


def _why_unused(loaded: LoadedWorkload, name: str) -> str:
    """Why a key has no effect in this run; nothing where it has one."""
    does = loaded.workload.workflow
    key = KEYS.get(name) or KEYS.get(name.rpartition(".")[0]) or SchemaKey()
    honoured = loaded.workload.storage.is_objects and name.startswith("storage.storage_options")
    if key.unused and not key.engines:
        return "" if honoured else f": {key.unused}"
    if not does.train:
        reads_nothing = not does.generate_data and name.startswith(_OF_DATA)
        return ": no data set is read" if reads_nothing and name != "train.seed" else ""
    engine = engine_name(loaded)
    if engine == "null" or not key.engines:
        return ""
    if engine not in key.engines:
        return f" with the engine {engine}: {key.unused}"
    if name in _TFRECORD_ONLY and loaded.workload.dataset.format != "tfrecord":
        return ": it is for tfrecord files alone"
    return ""


class _Session:
    """One rank's part."""

    def __init__(
        self, words: Sequence[str], loaded: LoadedWorkload, options: SessionOptions,
        group: RankGroup, folder: Path,
    ) -> None:  # fmt: skip
        self._words, self._loaded, self._options = words, loaded, options
        self._workload, self._group, self._folder = loaded.workload, group, folder
        self._objects = objects_of(loaded.workload)
        self._started = time.time()
        self._report = SessionReport(
            str(folder), group.place.rank, None, (), (*loaded.notes, *notes_of(loaded))
        )

    def run(self) -> SessionReport:
        workflow = self._workload.workflow
        if workflow.generate_data:
            self._report = replace(self._report, generated_bytes=self._generate())
        if workflow.train:
            return self._train(self._files())
        if workflow.checkpoint:
            return self._checkpoints()
        return self._finish(None, [f"Generated data in {self._workload.dataset.data_folder}"])

    def _train(self, files: dict[str, list[str]]) -> SessionReport:
        """All repeats of a run that trains, on a staged copy of the data if there is to be one."""
        options, staged, folder = self._options, None, self._workload.dataset.data_folder
        if options.stage is not None:
            if options.cold:
                self._make_cold(files)
            staged = stage_files(files, folder, options.stage, self._group)
        try:
            runs = self._repeats(files if staged is None else staged.files, staged)
        finally:
            if staged is not None:
                staged.remove()
        return self._finish(together(runs) if runs else None)

    def _repeats(
        self, files: Mapping[str, Sequence[str]], staged: Staged | None
    ) -> list[BenchRecord]:
        options, residency = self._options, dict[str, Any]()
        if self._group.place.is_first and self._objects is None:
            every = [path for paths in files.values() for path in paths]
            residency = residency_of(every, _RESIDENCY_FILES).document()
        ceiling = run_ceiling(self._loaded, options, self._group) if options.ceiling else ()
        runs: list[BenchRecord] = []
        for number in range(1, options.repeats + 1):
            if options.cold:
                residency = self._make_cold(files)
            started = self._started if number == 1 else time.time()
            done: list[Block] = []
            try:
                record = run_epochs(
                    self._loaded, options, self._group, files, progress=self._progress, done=done
                )
            except BaseException as e:
                self._leave(done, e)
                raise
            if staged is not None:
                record.phases_s = {**record.phases_s, "staging": staged.seconds}
            record.ceiling, record.residency = ceiling, residency
            own = replace(record)
            gathered = self._gather(record, started)
            self._write_ranks(self._folder, own)
            if options.repeats > 1:  # at once: what a later repeat meets does not take it away
                folder = results.repeat_folder(self._folder, number)
                self._write_ranks(folder, own)
                if gathered:
                    summary = summary_document(self._workload, record)
                    results.write_json(folder / "summary.json", summary)
            if gathered:
                runs.append(record)
        return runs

    def _leave(self, done: list[Block], why: BaseException) -> None:
        """The files of a run that ends before its time: the epochs that are over, and a line in the log."""
        if done:
            self._write_ranks(
                self._folder, BenchRecord(engine=engine_name(self._loaded), blocks=done)
            )
        if self._group.place.is_first:
            epochs = max((b.epoch for b in done), default=0)
            over = f"after {epochs} of {self._workload.train.epochs} epochs"
            # SIGTERM is a SystemExit here, Ctrl-C a KeyboardInterrupt.
            reason = "terminated" if isinstance(why, SystemExit) else str(why) or "interrupted"
            line = f"Ended early, {over}: {reason}"
            results.write_log(self._folder, self._workload.output.log_file, [line])
            why.add_note(f"{over}; their times are in {self._folder}" if done else "nothing kept")

    def _checkpoints(self) -> SessionReport:
        """A run of checkpoints alone."""
        cpu_s, device_bytes = used()
        saved: list[CheckpointTimes] = []
        restored: list[CheckpointTimes] = []
        residency = None
        for _ in range(self._options.repeats):
            written, read_back, residency = run_checkpoints(
                self._loaded, self._options.accelerators, self._group,
                cold=self._options.cold,
                progress=lambda done, total: self._progress(done, total, "checkpointing"),
            )  # fmt: skip
            saved += written
            restored += read_back
        after = used()
        record = BenchRecord(
            engine="none", checkpoints=saved, restores=restored, restore_residency=residency,
            cpu_s=after[0] - cpu_s, device_bytes=after[1] - device_bytes,
        )  # fmt: skip
        self._write_ranks(self._folder, record)
        return self._finish(record if self._gather(record, self._started) else None)

    def _finish(self, record: BenchRecord | None, lines: Sequence[str] = ()) -> SessionReport:
        """Rank 0 writes the summary and the log; the others have neither."""
        summary = None
        if record is not None:
            summary = summary_document(self._workload, record)
            results.write_json(self._folder / "summary.json", summary)
            lines = metric_lines(summary)
        if self._group.place.is_first:
            results.write_log(self._folder, self._workload.output.log_file, lines)
        return replace(self._report, summary=summary, lines=tuple(lines))

    def _generate(self) -> int:
        def progress(done: int, total: int | None, *_: Any) -> None:
            if self._options.progress is not None:
                self._options.progress("generating", done, total)

        report = generate(
            self._workload.dataset, rank=self._group.place.rank,
            world_size=self._group.place.world_size,
            threads=self._workload.reader.write_threads, overwrite=self._options.overwrite,
            progress=progress, objects=self._objects,
            ready=lambda: self._group.barrier(_GENERATE_S),
        )  # fmt: skip
        self._group.barrier(_GENERATE_S)
        time.sleep(max(self._workload.storage.post_generation_settle_seconds, AT_REST_S))
        return report.bytes

    def _files(self) -> dict[str, list[str]]:
        data = self._workload.dataset
        splits: list[Split] = ["train"]
        if self._workload.evaluates:
            splits.append("valid")
        if data.format == "synthetic" and engine_name(self._loaded) == "null":
            return {split: [] for split in splits}  # as DLIO: nothing needs to be there
        every, objects = self._loaded.listing_interval, self._objects
        files = {str(split): find_files(data, split, every, objects) for split in splits}
        if self._group.place.is_first:
            check_files(data, files, objects)
        return files

    def _make_cold(self, files: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        every = [path for paths in files.values() for path in paths]
        mine = every[self._group.place.rank :: self._group.place.world_size]
        residency = make_cold(
            mine, _RESIDENCY_FILES, "the data set",
            "Another process may have the files open or mapped; on tmpfs it is impossible. Run without "
            "--cold, or with reader.odirect.",
        )  # fmt: skip
        self._group.barrier()
        return residency.document() | {"cold": True}

    def _progress(self, done: int, total: int, phase: str = "running") -> None:
        if self._options.progress is not None and self._group.place.is_first:
            self._options.progress(phase, done, total)

    def _write_ranks(self, folder: Path, record: BenchRecord) -> None:
        host, reader, data = host_document(), self._workload.reader, self._workload.dataset
        per_host_gb = data.num_samples("train") * data.nominal_bytes / 2**30 / self._group.hosts
        host["potential_caching"] = int(per_host_gb <= host["memory_gb"])
        first = self._options.accelerators * self._group.place.rank
        for rank in range(first, first + self._options.accelerators):
            results.write_rank_files(
                folder, rank, [b for b in record.blocks if b.accelerator == rank],
                offset_s=time.time() - time.perf_counter(),
                batches=(reader.batch_size, reader.batch_size_eval), window=window_of(self._workload),
                formula=self._options.formula, host=host, saved=record.checkpoints,
                restored=record.restores,
            )  # fmt: skip
            if self._options.trace:
                self._write_trace(folder, rank, record if rank == first else None)

    def _write_trace(self, folder: Path, rank: int, process: BenchRecord | None) -> None:
        """trace-R-of-N.pfw; `process` is the record of its process, which its first accelerator shows."""
        from headrace.bench.timeline import rank_trace, trace_text

        checkpoints: dict[str, Sequence[CheckpointTimes]] = {}
        if process is not None:
            checkpoints = {"capture": process.checkpoints, "restart": process.restores}
        alone = not self._workload.workflow.train
        between_s = max(0.0, self._workload.checkpoint.time_between_checkpoints) if alone else None
        events = rank_trace(
            list(results.blocks_of_rank(folder, rank)), (rank, self._started, time.time()),
            self._workload.dataset.format, checkpoints, between_s,
        )  # fmt: skip
        world = self._options.accelerators * self._group.place.world_size
        path = folder / f"trace-{rank}-of-{world}.pfw"
        replace_file(path, trace_text(events, lines=True).encode(), sync=False)

    def _gather(self, record: BenchRecord, started: float) -> bool:
        """Make the record one of all ranks; whether this is the rank that has it."""
        options, does, place = self._options, self._workload.workflow, self._group.place
        measured_folder = self._workload.dataset.data_folder
        if not does.train:
            measured_folder = self._workload.checkpoint.checkpoint_folder
        # What a simulated storage is called: a preset, a Simulation or a SlowVolume.
        simulation = getattr(options.simulate, "simulation", options.simulate)
        name = getattr(simulation, "name", simulation)
        record.formula, record.start_s = options.formula, started
        record.accelerators = options.accelerators * place.world_size
        record.checkpoint_writer = writer_name(self._loaded) if does.checkpoint else None
        record.notes = self._report.notes
        record.provenance = provenance(measured_folder, redacted(sys.argv)) | {
            "words": redacted(list(self._words)), "engine": record.engine_figures, "launcher": place.source,
            "simulated": None if name is None else str(name), "staged": options.stage,
        }  # fmt: skip
        return gather_run(self._group, record)


# -- sweeps ----------------------------------------------------------------------------------------

_STEPS_LEAST: Final = 3
"""Steps of an epoch that count; with fewer, what was read ahead before the first is most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A run with one number of accelerators; `over`: the condition holds, so that many are not fed."""

    accelerators: int
    value: float
    over: bool
    bound: str
    bound_reason: str
    folder: str
    measures: dict[str, float]
    page_cache_share: float | None = None
    """Of what it read; None where that cannot be known."""

    @property
    def cached(self) -> bool:
        """Whether most of what it read came from the page cache."""
        return (self.page_cache_share or 0) >= CACHED_LEAST


_TOO_BUSY: Final = (
    "its {processors} did not keep up with emulating them. Give it less to do besides, longer steps, or more "
    "hosts (bench run under mpirun)"
)
_UNTRIED: Final = {
    "harness": _TOO_BUSY, "processors": _TOO_BUSY,
    "compute": "they did not wait for data but for one another's steps, which compute for unequal times. Give "
    "all the same (train.computation_time without stdev), or an --until that allows for it",
}  # fmt: skip
"""Limits of a run that are not the storage's: why, and what to do."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep found.

    Attributes:
        most: the greatest number that is fed; None: not even the least.
        probes: all runs, by the number of accelerators.
        range: the least and the greatest number that were asked for.
        needs: what an accelerator reads, and what measures what the mount gives; empty where nothing can.
    """

    most: int | None
    probes: tuple[Probe, ...]
    range: tuple[int, int]
    needs: str = ""

    @property
    def first_over(self) -> Probe | None:
        """The run with the least number that is not fed; None: all are."""
        return next((probe for probe in self.probes if probe.over), None)

    @property
    def limit(self) -> str:
        """What bounds that run; `none` without one."""
        return "none" if self.first_over is None else self.first_over.bound

    @property
    def answer(self) -> str:
        """In a sentence."""
        what, cached = "this storage feeds", any(probe.cached for probe in self.probes)
        but = ": this says nothing of the storage" if cached else ""
        if cached:
            what = "the page cache feeds"
        if (over := self.first_over) is None:
            return f"{what} at least {self.range[1]} accelerators{but}"
        number = f"fewer than {self.range[0]}" if self.most is None else f"{self.most}"
        if number == "fewer than 1":
            number = "not even 1"
        noun = "accelerator" if number.endswith(" 1") or number == "1" else "accelerators"
        if self.limit in _UNTRIED:
            fed = f"nothing is known of {what.split(' feeds')[0]}"
            if self.most is not None:
                fed = f"{what} at least {number} {noun}"
            why = _UNTRIED[self.limit].format(processors=counted(os.cpu_count() or 1, "processor"))
            needs = f". {self.needs}" if self.needs and self.limit in BY_HOST else ""
            return f"{fed}{but}; {over.accelerators} could not be tried on this host: {why}{needs}"
        return f"{what} {number} {noun}{but}"


def most_before(over: Callable[[int], bool], least: int, greatest: int) -> int | None:
    """The greatest number in a range that is not over, if those that are come after those that are not.

    Returns:
        None if even the least is over.
    """
    good, bad = None, greatest + 1
    at = least
    while good is None or bad - good > 1:
        if over(at):
            bad = at
            if at == least:
                return None
        else:
            good = at
        assert good is not None
        # Doubled until the first that is over, halved from then on.
        at = (good + bad) // 2 if bad <= greatest else min(2 * good, greatest)
    return good


def sweep(
    words: Sequence[str],
    numbers: tuple[int, int],
    until: Condition,
    options: SessionOptions,
    progress: Callable[[Probe], None] | None = None,
) -> Sweep:
    """Run a workload with different numbers of accelerators.

    Raises:
        WorkloadError: the workload is wrong, or its data set too small for the greatest number.
        BenchError: there are several ranks, or a run has not what the condition is about.
    """
    least, greatest = numbers
    if which_rank().world_size > 1:
        raise BenchError(
            "a sweep is one process's: it changes the number of accelerators that ranks cannot change.",
            next_step="Run it outside of torchrun, srun and mpirun.",
        )
    line = parse_command_line(words)
    loaded = load_workload(line)
    if not loaded.workload.workflow.train:
        raise WorkloadError(f"workload={line.workload} does not train: there is nothing to sweep.")
    _check_steps(loaded, greatest)
    folder = results.default_folder(line, loaded)
    probes: list[Probe] = []

    def over(accelerators: int) -> bool:
        run_folder = os.path.join(folder, f"{accelerators:04d}-accelerators")
        more = [f"++hydra.run.dir={run_folder}", f"++workload.output.folder={run_folder}"]
        if probes:  # the first has generated it
            more.append("++workload.workflow.generate_data=False")
        report = run_session([*words, *more], replace(options, accelerators=accelerators))
        assert report.summary is not None
        probes.append(_probe(accelerators, report.summary, run_folder, until))
        if progress is not None:
            progress(probes[-1])
        return probes[-1].over

    most = most_before(over, least, greatest)
    ordered = tuple(sorted(probes, key=lambda probe: probe.accelerators))
    return Sweep(most, ordered, numbers, _needs_of(loaded, options))


def _needs_of(loaded: LoadedWorkload, options: SessionOptions) -> str:
    workload, step_s = loaded.workload, loaded.workload.train.computation_time.mean_s
    if step_s <= 0 or options.simulate is not None or workload.storage.is_objects:
        return ""
    data = workload.dataset
    rate = rate_text(data.nominal_bytes * workload.reader.batch_size / step_s)
    measure = f"headrace bench storage {data.data_folder}"
    return f"An accelerator that is fed reads {rate}: {measure} says what the mount gives"


def _check_steps(loaded: LoadedWorkload, accelerators: int) -> None:
    """Refuse a data set that leaves too few steps to the greatest number: its AU would be chance, or 0."""
    steps = plans_of(loaded, accelerators)["train"].steps
    output = loaded.workload.output
    counted = steps - output.metric_exclude_start_steps - output.metric_exclude_end_steps
    if counted < _STEPS_LEAST:
        raise WorkloadError(
            f"{accelerators} accelerators have {steps} steps an epoch, of which {max(0, counted)} count: "
            f"expected at least {_STEPS_LEAST}.",
            next_step="Generate more files (dataset.num_files_train), or sweep to fewer accelerators.",
        )


def _probe(accelerators: int, summary: dict[str, Any], folder: str, until: Condition) -> Probe:
    measures = {each.name: value_of(summary, each) for each in MEASURES}
    value = measures[until.measure.name]
    if value is None:
        raise BenchError(
            f"{until.written!r} cannot be told: the run has no {until.measure.name}.", path=folder
        )
    own, known = summary["headrace"], {n: v for n, v in measures.items() if v is not None}
    bound = bounds_of([own])[0]  # of repeats the most frequent, as the run's own report has it
    return Probe(
        accelerators=accelerators, value=value, over=until.holds(value), bound=bound.bound,
        bound_reason=bound.reason, folder=folder, measures=known,
        page_cache_share=own["page_cache_share"],
    )  # fmt: skip

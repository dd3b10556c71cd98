"""Session: one `bench run` from its command line to its results. What each rank does, and rank 0 besides."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headrace.base.job import which_rank
from headrace.bench.checkpoint_runs import require_checkpoints, run_checkpoints, writer_name
from headrace.bench.checks import check_supported, notes_of
from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.dataset_files import AT_REST_S, check_files, find_files
from headrace.bench.engines import engine_name
from headrace.bench.ranks import join
from headrace.bench.results import (
    default_folder,
    repeat_folder,
    write_configuration,
    write_json,
    write_log,
    write_rank_files,
)
from headrace.bench.run import (
    RunOptions,
    RunRecord,
    plans_of,
    run_ceiling,
    run_epochs,
    used,
)
from headrace.bench.staging import make_cold, residency_of, stage_files
from headrace.bench.summary import (
    RunFigures,
    gather_figures,
    host_document,
    metric_lines,
    provenance,
    summary_document,
    together,
    window_of,
)
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from headrace.bench.checkpoint_runs import CheckpointTimes
    from headrace.bench.config import CommandLine, LoadedWorkload
    from headrace.bench.dataset import Split
    from headrace.bench.metrics import Formula
    from headrace.bench.ranks import RankGroup
    from headrace.bench.staging import Residency, Staged

_RESIDENCY_FILES: Final = 2000
"""Files that are looked at before a run, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a workload is run and judged.

    Attributes:
        run: how steps are run.
        cold: put the data set out of the page cache before every repeat, and see that it is.
        ceiling: run the same steps on a null store, too.
        repeats: of the whole run; more than one give a confidence interval.
        stage: a folder, of each host or of all, to copy the data set to; it is read there, and removed at the
            end.
        overwrite: another data set of ours that is in the way is removed before data is generated.
        generate_threads: that write data; not given: reader.write_threads, or as many as suit this host.
        formula: DLIO's throughput formula in summary.json.
        progress: called with (what, done, total).
    """

    run: RunOptions = field(default_factory=RunOptions)
    cold: bool = False
    ceiling: bool = False
    repeats: int = 1
    stage: str | None = None
    overwrite: bool = False
    generate_threads: int | None = None
    formula: Formula = "mlcommons"
    progress: Callable[[str, int, int | None], None] | None = None


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What a session did.

    Attributes:
        summary: summary.json's document, in rank 0 of a run that trained; else None.
        generated_bytes: of this rank; None when nothing was to be generated.
    """

    folder: str
    rank: int
    summary: dict[str, Any] | None
    lines: tuple[str, ...]
    notes: tuple[str, ...]
    generated_bytes: int | None = None


def run_session(words: Sequence[str], options: SessionOptions | None = None) -> SessionReport:
    """Run DLIO's command line: generate if the workload says so, then train and evaluate.

    Args:
        words: the command line after the program's name.
        options: what DLIO has no words for.

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
    world = options.run.accelerators * place.world_size
    check_supported(loaded, world)
    folder = default_folder(line, loaded)
    if place.world_size > 1 and not (line.run_dir or loaded.workload.output.folder):
        raise BenchError(
            f"{place.world_size} ranks need one folder for their results.",
            next_step="Give ++hydra.run.dir=DIR.",
        )
    workflow = loaded.workload.workflow
    if workflow.train:
        plans_of(loaded, world)
        _check_training(engine_name(loaded), options)
    if workflow.checkpoint:
        _check_checkpoints(loaded, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BenchError(f"{folder} cannot be made: {e.strerror}.", path=str(folder)) from e
    group = join(place, folder)
    try:
        return _Session(line, loaded, options, group, folder).run(list(words))
    finally:
        group.close()


def _check_training(engine: str, options: SessionOptions) -> None:
    """Refuse to call a run simulated whose reads nothing delays, and to copy from a simulated storage."""
    if options.run.simulate is not None and engine in ("torch", "tensorflow", "null"):
        raise BenchError(
            f"a slow storage cannot be simulated for the engine {engine}: it reads by itself.",
            next_step="Give ++workload.reader.engine=headrace, or no simulation.",
        )
    if options.stage is not None and options.run.simulate is not None:
        raise BenchError(
            "a simulated storage is read, not copied from.",
            next_step="Give one of --stage and --simulate.",
        )


def _check_checkpoints(loaded: LoadedWorkload, options: SessionOptions) -> None:
    if not loaded.workload.workflow.train:
        require_checkpoints(loaded)
    if options.repeats > 1 and writer_name(loaded) == "headrace":
        raise BenchError(
            f"{options.repeats} repeats would write each checkpoint so often, and the writer headrace "
            "writes none over.",
            next_step="Repeat with another checkpoint.checkpoint_folder.",
        )


class _Session:
    """One rank's part."""

    def __init__(
        self,
        line: CommandLine,
        loaded: LoadedWorkload,
        options: SessionOptions,
        group: RankGroup,
        folder: Path,
    ) -> None:
        self._loaded = loaded
        self._workload = loaded.workload
        self._options = options
        self._group = group
        self._folder = folder
        self._rank = group.place.rank
        self._first = options.run.accelerators * self._rank
        self._notes = (*loaded.notes, *notes_of(loaded))
        if group.place.is_first:
            write_configuration(folder, line, loaded)

    def run(self, words: list[str]) -> SessionReport:
        started = time.time()
        generated = self._generate() if self._workload.workflow.generate_data else None
        if not self._workload.workflow.train and self._workload.workflow.checkpoint:
            return self._checkpoints(started, words, generated)
        if not self._workload.workflow.train:
            lines = [f"Generated data in {self._workload.dataset.data_folder}"]
            self._log(lines)
            return self._report(None, lines, generated)
        files = self._files()
        if self._options.stage is None:
            return self._train(started, words, files, generated)
        staged = self._stage(files)
        try:
            return self._train(started, words, staged.files, generated, staged.seconds)
        finally:
            staged.remove()

    def _train(
        self,
        started: float,
        words: list[str],
        files: Mapping[str, list[str]],
        generated: int | None,
        staging_s: float = 0.0,
    ) -> SessionReport:
        """All repeats of a run that trains."""
        residency = self._residency(files)
        ceiling = (
            run_ceiling(self._loaded, self._options.run, self._group)
            if self._options.ceiling
            else None
        )
        runs: list[RunFigures] = []
        for number in range(1, self._options.repeats + 1):
            if self._options.cold:
                residency = self._make_cold(files)
            began = time.time()
            recorded = run_epochs(self._loaded, self._options.run, self._group, files, self._tell)
            if recorded.phases_s:
                recorded.phases_s["staging"] += staging_s
            figures = self._gathered(recorded, started if number == 1 else began, words, ceiling)
            if figures is not None:
                figures.residency = residency
                runs.append(figures)
            self._write_ranks(self._folder, recorded)
            if self._options.repeats > 1:
                self._write_repeat(number, recorded, figures)
        if not runs:
            return self._report(None, [], generated)
        return self._finish(together(runs), generated)

    def _write_repeat(self, number: int, recorded: RunRecord, figures: RunFigures | None) -> None:
        """A repeat's own results, at once: what a later one meets does not take them away."""
        folder = repeat_folder(self._folder, number)
        self._write_ranks(folder, recorded)
        if figures is not None:
            write_json(folder / "summary.json", summary_document(self._workload, figures))

    def _checkpoints(
        self, started: float, words: list[str], generated: int | None
    ) -> SessionReport:
        """A run of checkpoints alone."""
        recorded = RunRecord("none")
        before = used()
        restored: list[CheckpointTimes] = []
        residency = None
        for _ in range(self._options.repeats):
            saved, read_back, residency = run_checkpoints(
                self._loaded, self._options.run.accelerators, self._group,
                cold=self._options.cold, progress=self._tell,
            )  # fmt: skip
            recorded.checkpoints += saved
            restored += read_back
        cpu_s, device_bytes = used()
        recorded.cpu_s, recorded.device_bytes = cpu_s - before[0], device_bytes - before[1]
        self._write_ranks(self._folder, recorded, restored)
        figures = self._gathered(recorded, started, words, restored=restored)
        if figures is None:
            return self._report(None, [], generated)
        figures.restore_residency = residency
        return self._finish(figures, generated)

    def _finish(self, figures: RunFigures, generated: int | None) -> SessionReport:
        summary = summary_document(self._workload, figures)
        write_json(self._folder / "summary.json", summary)
        lines = metric_lines(summary)
        self._log(lines)
        return self._report(summary, lines, generated)

    def _report(
        self, summary: dict[str, Any] | None, lines: list[str], generated: int | None
    ) -> SessionReport:
        return SessionReport(
            str(self._folder), self._rank, summary, tuple(lines), self._notes, generated
        )

    def _log(self, lines: list[str]) -> None:
        if self._group.place.is_first:
            write_log(self._folder, self._workload.output.log_file, lines)

    def _generate(self) -> int:
        from headrace.bench.generate import generate

        def tell(done: int, total: int | None, *_: Any) -> None:
            if self._options.progress is not None:
                self._options.progress("generating", done, total)

        report = generate(
            self._workload.dataset, rank=self._rank, world_size=self._group.place.world_size,
            threads=self._options.generate_threads or self._workload.reader.write_threads,
            overwrite=self._options.overwrite, progress=tell,
        )  # fmt: skip
        self._group.barrier(24 * 3600.0)
        time.sleep(max(self._workload.storage.post_generation_settle_seconds, AT_REST_S))
        return report.bytes

    def _files(self) -> dict[str, list[str]]:
        splits: list[Split] = ["train"]
        if self._workload.workflow.evaluation:
            splits.append("valid")
        synthetic = self._workload.dataset.format == "synthetic"
        if synthetic and engine_name(self._loaded) == "null":  # as DLIO: nothing needs to be there
            return {split: [] for split in splits}
        every = self._loaded.listing_interval
        data = self._workload.dataset
        files: dict[str, list[str]] = {split: find_files(data, split, every) for split in splits}
        for split in splits if self._group.place.is_first else ():
            check_files(data, split, files[split])
        return files

    def _residency(self, files: Mapping[str, list[str]]) -> dict[str, Any]:
        if not self._group.place.is_first:
            return {}
        residency = residency_of([p for paths in files.values() for p in paths], _RESIDENCY_FILES)
        return self._document(residency)

    def _make_cold(self, files: Mapping[str, list[str]]) -> dict[str, Any]:
        every = [path for paths in files.values() for path in paths]
        mine = every[self._rank :: self._group.place.world_size]
        residency = make_cold(
            mine,
            _RESIDENCY_FILES,
            "the data set",
            "Another process may have the files open or mapped; on tmpfs it is impossible. Run without "
            "--cold, or with reader.odirect.",
        )
        self._group.barrier()
        return self._document(residency) | {"cold": True}

    @staticmethod
    def _document(residency: Residency) -> dict[str, Any]:
        return {"files": residency.files, "bytes": residency.nbytes, "share": residency.share}

    def _place(self) -> str:
        """The folder whose storage is measured."""
        if self._workload.workflow.train:
            return self._workload.dataset.data_folder
        return self._workload.checkpoint.checkpoint_folder

    def _tell(self, done: int, total: int) -> None:
        if self._options.progress is not None and self._group.place.is_first:
            self._options.progress("running", done, total)

    def _write_ranks(
        self, folder: Path, recorded: RunRecord, restored: Sequence[CheckpointTimes] = ()
    ) -> None:
        host = host_document()
        reader = self._workload.reader
        for number in range(self._options.run.accelerators):
            rank = self._first + number
            write_rank_files(
                folder, rank, [b for b in recorded.blocks if b.accelerator == rank],
                offset_s=time.time() - time.perf_counter(),
                batches=(reader.batch_size, reader.batch_size_eval), window=window_of(self._workload),
                formula=self._options.formula, host=host, saved=recorded.checkpoints,
                restored=restored,
            )  # fmt: skip

    def _gathered(
        self,
        recorded: RunRecord,
        started: float,
        words: list[str],
        ceiling: RunRecord | None = None,
        restored: Sequence[CheckpointTimes] = (),
    ) -> RunFigures | None:
        """All ranks' figures; None in ranks other than 0."""
        figures = RunFigures(
            engine=recorded.engine,
            formula=self._options.formula,
            start_s=started,
            accelerators=self._options.run.accelerators * self._group.place.world_size,
            checkpoint_writer=(
                writer_name(self._loaded) if self._workload.workflow.checkpoint else None
            ),
            provenance=provenance(self._place(), list(sys.argv)) | {
                "words": list(words),
                "engine": recorded.engine_figures,
                "launcher": self._group.place.source,
                "barrier": self._options.run.barrier,
                "simulated": _name_of(self._options.run.simulate),
                "staged": self._options.stage,
            },
            notes=self._notes,
        )  # fmt: skip
        whole = gather_figures(self._group, figures, recorded, ceiling, restored)
        return figures if whole else None

    def _stage(self, files: dict[str, list[str]]) -> Staged:
        assert self._options.stage is not None
        if self._options.cold:
            self._make_cold(files)
        folder = self._workload.dataset.data_folder
        return stage_files(files, folder, self._options.stage, self._group)


def _name_of(simulate: Any) -> str | None:
    """What a simulated storage is called: a preset's name, a Simulation or a SlowVolume."""
    simulation = getattr(simulate, "simulation", simulate)
    name = getattr(simulation, "name", simulation)
    return None if name is None else str(name)

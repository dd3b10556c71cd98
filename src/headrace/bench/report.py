"""Report: a run as one HTML file, and its slowest steps for trace viewers (chrome://tracing, Perfetto).

The page has no script and no address: it works offline, prints, and nothing in it acts. Each chart is drawn
where the run's files have what it shows.

Files of results say how long steps waited and computed, not when they began. All
begin together, when the slowest has ended the one before; what then still lacks to the block's end was
the barrier between processes, and is given to all steps alike.

Names and categories of a trace are those that DFTracer's conventions for AI give and DLIO uses: `fetch.iter`
of `dataloader`, `compute`, `barrier` of `comm`, and `epoch.block`, `train`, `evaluate` of `pipeline`; so
DFTracer's analysis finds what it looks for. A process of the trace is an accelerator. Runs with DFTRACER_ENABLE
write a trace of every step, each accelerator its own, as DLIO does.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.text import bytes_text, counted, number_text, seconds_text
from headrace.bench.compare import MEASURES, measure_named, measured, value_of
from headrace.bench.results import flat, number_at, number_of
from headrace.bench.summary import NOT_MLPERF
from headrace.pages.charts import Part, bars, columns, figure, stacked, table
from headrace.pages.html import axis_text, card_list, document, measure_text, safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.bench.metrics import CheckpointTimes, Confidence
    from headrace.bench.results import RankBlock, RunResult


_RANKS_MOST: Final = 64
_BINS_MOST: Final = 120
_SLOWEST: Final = 15

_TIMES: Final = {
    "compute": ("compute", "c1"), "wait": ("waiting for data", "c2"),
    "barrier": ("at the barrier", "c3"), "harness": ("harness", "c4"),
}  # fmt: skip
_SOLUTION: Final = {
    "training": ("training", "c1"), "staging": ("staging", "c2"), "evaluation": ("evaluation", "c3"),
    "checkpointing": ("checkpointing", "c5"), "other": ("other", "c4"),
}  # fmt: skip
_WAITS: Final = {
    "p50": "median", "p90": "90 %", "p99": "99 %", "p99.9": "99.9 %", "max": "longest",
}  # fmt: skip


def report_page(runs: Sequence[RunResult], blocks: Sequence[RankBlock]) -> str:
    """The page of a run, or of its repeats, of which charts show the last."""
    run = runs[-1]
    model = run.workload.get("model")
    name = str(model.get("name", "")) if isinstance(model, dict) else ""
    title = f"Storage benchmark: {name or run.folder}"
    simulated = run.provenance.get("simulated")
    note = f"The storage was simulated ({simulated}): its delays are not real." if simulated else ""
    verdicts = Counter(
        (str(each.own.get("bound") or ""), str(each.own.get("bound_reason") or "")) for each in runs
    )
    figures = [
        (measure.title, with_confidence(value, measure.unit), measure.name)
        for measure in MEASURES
        if (value := measured(runs, measure)) is not None
    ]
    return document(title, [
        f"<h1>{safe(title)}</h1>",
        f'<p class="soft">{safe(_subtitle(runs))}</p>',
        f'<p class="not-mlperf">{NOT_MLPERF} {safe(note)}</p>',
        _cards(runs),
        *(
            f"<p><strong>Bound by: {safe(bound)}{_of_runs(count, runs)}.</strong> {safe(reason)}</p>"
            for (bound, reason), count in verdicts.most_common()
            if bound
        ),
        *_charts(runs, blocks),
        "<h2>All figures</h2>",
        table(["figure", "value", "its name in conditions"], figures),
        *_provenance(run),
    ])  # fmt: skip


def _of_runs(count: int, runs: Sequence[RunResult]) -> str:
    return f" ({count} of {len(runs)} runs)" if len(runs) > 1 else ""


def _charts(runs: Sequence[RunResult], blocks: Sequence[RankBlock]) -> Iterator[str]:
    run = runs[-1]
    phases = phases_of(blocks)
    target = run.au_target_percent
    line = None if target is None else (target, f"asked for: {number_text(target)} %")
    total = seconds_text(number_at(run.own, "time_to_solution.total_s") or 0.0)
    checkpoint = run.own.get("checkpoint")
    checkpoint = checkpoint if isinstance(checkpoint, dict) else {}
    yield from _titled("Training", (
        _split(run, "time", "Where the accelerators' time went", _TIMES),
        _split(
            run, "time_to_solution", f"Time to solution: {total}", _SOLUTION,
            "From the first byte that was staged to the end of the last epoch and its checkpoint.",
        ),
        _repeats(runs, line),
        _columns(
            "AU of each epoch", _parts(run.metric.get("train_au_percentage"), "{:.2f} %".format),
            _percent, ("epoch", "AU"), top=100, line=line,
        ),
        _columns(
            "Throughput of each epoch, samples/s",
            _parts(run.metric.get("train_throughput_samples_per_second"), number_text),
            axis_text, ("epoch", "samples/s"),
        ),
        _accelerators(blocks),
    ))  # fmt: skip
    yield from _titled("Waiting for data", (_waits(run), _over_time(phases)))
    yield _slowest(phases)
    yield _bytes(run)
    yield from _titled("Checkpoints", (
        _columns(
            "Time to save each checkpoint", _parts(checkpoint.get("saves_s"), seconds_text),
            seconds_text, ("checkpoint", "time"),
            "Of the slowest accelerator, until its bytes are where the writer promises them.",
        ),
        _columns(
            "Time to read each back", _parts(checkpoint.get("loads_s"), seconds_text, "c2"),
            seconds_text, ("checkpoint", "time"), "Of the slowest accelerator.",
        ),
    ))  # fmt: skip


def _titled(title: str, parts: Sequence[str]) -> Iterator[str]:
    """A heading and what there is below it; nothing without."""
    if any(parts):
        yield f"<h2>{title}</h2>"
        yield from parts


def _percent(value: float) -> str:
    return f"{number_text(value)} %"


def _with_table(
    title: str, svg: str, parts: Sequence[Part], head: Sequence[str], note: str = ""
) -> str:
    return figure(title, svg, table(head, [(part.name, part.text) for part in parts]), note)


def _columns(
    title: str, parts: Sequence[Part], text_of: Callable[[float], str], head: tuple[str, str],
    note: str = "", *, top: float | None = None, line: tuple[float, str] | None = None,
) -> str:  # fmt: skip
    """A column for each part, and their table; nothing without parts."""
    if not parts:
        return ""
    svg = columns(title, parts, text_of, below=head[0], top=top, line=line)
    return _with_table(title, svg, parts, head, note)


def _split(
    run: RunResult, path: str, title: str, kinds: Mapping[str, tuple[str, str]], note: str = ""
) -> str:
    """The parts of a time that has a total."""
    total = number_at(run.own, f"{path}.total_s") or 0.0
    parts = [
        Part(name, max(0.0, seconds), f"{100 * seconds / total:.1f} %", colour)
        for key, (name, colour) in kinds.items()
        if total > 0 and (seconds := number_at(run.own, f"{path}.{key}_s")) is not None
    ]
    svg = stacked(title, parts)
    rows = [(part.name, part.text, f"{part.value:.3f}") for part in parts]
    return figure(title, svg, table(["part", "share", "seconds"], rows), note) if svg else ""


def _repeats(runs: Sequence[RunResult], line: tuple[float, str] | None) -> str:
    measure = measure_named("au")
    values = [(n, value_of(run.summary, measure), run) for n, run in enumerate(runs, 1)]
    known = [(n, value, run) for n, value, run in values if value is not None]
    if len(runs) < 2 or not known:
        return ""
    parts = [Part(str(n), value, f"{value:.2f} %") for n, value, _ in known]
    rows = [(n, f"{value:.2f} %", run.folder) for n, value, run in known]
    svg = columns("AU of each run", parts, _percent, below="run", top=100, line=line)
    return figure("AU of each run", svg, table(["run", "AU", "results"], rows))


def _parts(values: object, text_of: Callable[[float], str], colour: str = "c1") -> list[Part]:
    """Parts of a list of a run's file, numbered from 1."""
    numbers = [number_of(value) for value in values] if isinstance(values, list) else []
    return [
        Part(str(n), max(0.0, value), text_of(value), colour)
        for n, value in enumerate(numbers, 1)
        if value is not None
    ]


def _accelerators(blocks: Sequence[RankBlock]) -> str:
    of_rank: dict[int, list[float]] = {}
    for block in blocks:
        if block.kind == "train" and block.au_percent is not None:
            of_rank.setdefault(block.rank, []).append(block.au_percent)
    if len(of_rank) < 2:
        return ""
    means = sorted((float(np.mean(aus)), rank) for rank, aus in of_rank.items())[:_RANKS_MOST]
    parts = [Part(str(rank), max(0.0, au), f"{au:.2f} %") for au, rank in means]
    note = f"The {len(parts)} lowest of {len(of_rank)}." if len(of_rank) > len(parts) else ""
    title = "AU of each accelerator, lowest first"
    return _columns(title, parts, _percent, ("accelerator", "AU"), note, top=100)


def _waits(run: RunResult) -> str:
    waits = run.own.get("wait_s")
    values = {key: number_of(waits.get(key)) for key in _WAITS} if isinstance(waits, dict) else {}
    parts = [
        Part(_WAITS[key], max(0.0, value), seconds_text(value), "c2")
        for key, value in values.items()
        if value is not None
    ]
    if not parts:
        return ""
    svg = bars("Percentiles of steps' waits for data", parts)
    note = "Of the steps of training that count: the first of an epoch does not, unless the workload says so."
    return _with_table("How long steps waited", svg, parts, ["of the steps", "wait"], note)


def _over_time(phases: Sequence[StepPhase]) -> str:
    train = [phase for phase in phases if phase.blocks[0].kind == "train"]
    if not train:
        return ""
    longest = np.concatenate([phase.waits_s.max(axis=0) for phase in train])
    median = np.concatenate([np.median(phase.waits_s, axis=0) for phase in train])
    edges = np.linspace(0, len(longest), min(_BINS_MOST, len(longest)) + 1).astype(int)
    parts, rows = [], []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        most = float(longest[begin:end].max())
        steps = f"{begin + 1}" if end == begin + 1 else f"{begin + 1}-{end}"
        parts.append(Part(str(begin + 1), most, seconds_text(most), "c2"))
        rows.append((steps, seconds_text(most), seconds_text(float(np.median(median[begin:end])))))
    svg = columns("The longest wait of each step, in order", parts, seconds_text, below="step")
    note = (
        f"All {len(longest)} steps of training in order, those that do not count, too; of each the "
        "accelerator that waited longest."
    )
    behind = table(["steps", "longest wait", "median wait"], rows)
    return figure("Waits over the run", svg, behind, note)


def _slowest(phases: Sequence[StepPhase]) -> str:
    if not phases:
        return ""
    title = "<h2>The slowest steps that waited</h2>"
    steps = [slow for slow in slowest_steps(phases, _SLOWEST) if slow.wait_s > 0]
    if not steps:
        return title + "<p>None of the slowest steps waited for data.</p>"
    rows = []
    for slow in steps:
        block = slow.phase.blocks[0]
        name = f"epoch {block.epoch}, {block.kind} step {slow.step + 1}"
        rows.append((name, slow.rank, seconds_text(slow.wait_s), seconds_text(slow.compute_s)))
    return title + table(["step", "slowest accelerator", "wait", "compute"], rows)


def _bytes(run: RunResult) -> str:
    device = number_of(run.own.get("device_bytes"))
    cached = number_of(run.own.get("page_cache_bytes"))
    if device is None or cached is None or device + cached <= 0:
        return ""
    sources = (
        ("from the device", device, "c1"),
        ("not from the device (page cache, memory)", cached, "c3"),
    )
    parts = [Part(name, max(0.0, n), bytes_text(n), colour) for name, n, colour in sources]
    title = "Where the bytes came from"
    return _with_table(title, stacked(title, parts), parts, ["source", "bytes"])


def _subtitle(runs: Sequence[RunResult]) -> str:
    summary, own = runs[-1].summary, runs[-1].own
    accelerators = int(number_of(summary.get("num_accelerators")) or 0)
    hosts = int(number_of(summary.get("num_hosts")) or 0)
    engine, checkpoint = own.get("engine"), own.get("checkpoint")
    ran = f"engine {'of DLIO' if engine is None else engine}"
    if engine is None and isinstance(checkpoint, dict):
        ran = f"checkpoints by {checkpoint.get('writer')}"
    # Without what a second has of parts, and the day once.
    times = (str(summary.get(name)).partition(".")[0] for name in ("start", "end"))
    start, end = (text.replace("T", " ", 1) for text in times)
    day, _, clock = end.partition(" ")
    text = (
        f"{counted(accelerators, 'emulated accelerator')} on {counted(hosts, 'host')}, {ran}; "
        f"{start} to {clock if clock and start.startswith(day) else end}"
    )
    return f"{text}; {len(runs)} runs, charts show the last" if len(runs) > 1 else text


def with_confidence(value: Confidence, unit: str, *, brief: bool = False) -> str:
    """A mean, and its interval where there are repeats; `brief`: what interval that is, stands elsewhere."""
    text = measure_text(value.mean, unit)
    if value.half_width is None:
        return text
    if value.half_width > abs(value.mean):
        return f"{text} ± more" if brief else f"{text} ± more than that (95 %, {value.runs} runs)"
    text += f" ± {measure_text(value.half_width, unit)}"
    return text if brief else f"{text} (95 %, {value.runs} runs)"


_CARDS: Final = (
    "au", "throughput", "io", "wait_share", "wait_p99", "checkpoint_s", "load_s", "checkpoint_size",
    "time_to_solution",
)  # fmt: skip


def _cards(runs: Sequence[RunResult]) -> str:
    cards = []
    for measure in map(measure_named, _CARDS):
        value = measured(runs, measure)
        if value is None:
            continue
        below = "AU, accelerator utilisation" if measure.name == "au" else measure.title
        if value.half_width is not None:
            below += f", ± {measure_text(value.half_width, measure.unit)} of {value.runs} runs"
        target = runs[-1].au_target_percent
        if measure.name == "au" and target is not None:
            met = value.mean >= target
            below += f"; {'✓ meets' if met else '✗ below'} {number_text(target)} %"
        number, _, unit = measure_text(value.mean, measure.unit).partition(" ")
        cards.append((number, unit, below))
    return card_list(cards)


def _provenance(run: RunResult) -> Iterator[str]:
    hosts = ("hostname", "host_processor_name", "host_cpu_count", "host_memory_GB")
    rows = [
        *_rows({k: v for k, v in run.provenance.items() if k != "words"}),
        *_rows(run.own.get("residency_before"), "page cache before: "),
        *_rows({key: run.summary[key] for key in hosts if key in run.summary}),
        ("results", run.folder),
    ]
    yield "<h2>Where and how it ran</h2>"
    yield table(["what", "value"], rows, words=True)
    if run.workload:
        keys = table(["key", "value"], list(_rows(run.workload)), words=True)
        yield f"<h2>The workload</h2><details><summary>All keys</summary>{keys}</details>"
    notes = run.own.get("notes")
    if isinstance(notes, list) and notes:
        yield "<h2>Notes</h2><ul>" + "".join(f"<li>{safe(note)}</li>" for note in notes) + "</ul>"


_LISTED_MOST: Final = 12
"""Values of a list that are shown, at most: what has more is a histogram."""


def _rows(document: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in flat(document, prefix).items():
        if not isinstance(value, list):
            yield key, _plain(value)
        elif len(value) > _LISTED_MOST and key.rpartition(".")[2] != "command":
            yield key, f"{len(value)} values: see summary.json"
        else:
            yield key, " ".join(_plain(each) for each in value)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "-", True: "yes", False: "no"}[value]
    number = number_of(value)
    return f"{number:.6g}" if isinstance(value, float) and number is not None else str(value)


# -- steps in time, and traces ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StepPhase:
    """The same block on all accelerators: an epoch's training or evaluation.

    Attributes:
        blocks: one for each accelerator, with as many steps each.
        begin_s: (accelerators, steps) when each step began, from the phase's own begin.
        end_s: (accelerators, steps) when it was over, with the barrier behind it.
    """

    blocks: tuple[RankBlock, ...]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    @property
    def steps(self) -> int:
        """Of each accelerator."""
        return self.blocks[0].steps

    @property
    def waits_s(self) -> NDArray[np.float64]:
        """(accelerators, steps) the waits for data."""
        return np.array([block.load_s for block in self.blocks])


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took long."""

    phase: StepPhase
    step: int
    rank: int
    duration_s: float
    wait_s: float
    compute_s: float


def phases_of(blocks: Sequence[RankBlock]) -> list[StepPhase]:
    """Place all steps of all accelerators in time; of those of one phase the steps that all have."""
    grouped: dict[tuple[int, bool, str], list[RankBlock]] = defaultdict(list)
    for block in blocks:
        grouped[block.epoch, block.kind == "eval", block.name].append(block)
    phases = [_phase(grouped[key]) for key in sorted(grouped)]
    return [phase for phase in phases if phase is not None]


def _phase(parts: Sequence[RankBlock]) -> StepPhase | None:
    steps = min(block.steps for block in parts)
    if not steps:
        return None
    even = [replace(b, load_s=b.load_s[:steps], compute_s=b.compute_s[:steps]) for b in parts]
    process = np.array([block.process_s for block in even])
    ends = np.cumsum(np.broadcast_to(process.max(axis=0), process.shape), axis=1)
    starts = [block.start_s for block in even if block.start_s is not None]
    over = [block.end_s for block in even if block.end_s is not None]
    if starts and over:
        slack = max(0.0, max(over) - min(starts) - float(ends[0, -1])) / steps
        ends = ends + slack * np.arange(1, steps + 1)
    begins = np.hstack([np.zeros((len(even), 1)), ends[:, :-1]])
    return StepPhase(tuple(even), begins, ends)


def slowest_steps(phases: Sequence[StepPhase], count: int) -> list[SlowStep]:
    """The steps that took longest on any accelerator, the longest first."""
    slow = []
    for phase in phases:
        process = np.array([block.process_s for block in phase.blocks], np.float64)
        longest, slowest = process.max(axis=0), process.argmax(axis=0)
        for step in np.argsort(-longest, kind="stable")[:count].tolist():
            block = phase.blocks[slowest[step]]
            seconds = map(float, (longest[step], block.load_s[step], block.compute_s[step]))
            slow.append(SlowStep(phase, step, block.rank, *seconds))
    return sorted(slow, key=lambda each: -each.duration_s)[:count]


def trace_events(blocks: Sequence[RankBlock], count: int) -> list[dict[str, Any]]:
    """The events of the `count` slowest steps on all accelerators, and of the epochs that they are in.

    Times are microseconds since 1970, or since the epoch's begin where the run's files do not tell.
    """
    phases = phases_of(blocks)
    chosen: dict[int, tuple[StepPhase, set[int]]] = {}
    for slow in slowest_steps(phases, count):
        chosen.setdefault(id(slow.phase), (slow.phase, set()))[1].add(slow.step)
    events = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0,
         "args": {"name": f"accelerator {rank}"}}
        for rank in sorted({block.rank for phase, _ in chosen.values() for block in phase.blocks})
    ]  # fmt: skip
    for phase, steps in chosen.values():
        for row in range(len(phase.blocks)):
            events += _of_steps(phase, row, sorted(steps))
    for parts in _by_epoch(phase for phase, _ in chosen.values()):
        for row in range(len(parts[0].blocks)):
            events += _of_epoch(parts, row)
    return [{"id": number, **event} for number, event in enumerate(events)]


def rank_trace(
    blocks: Sequence[RankBlock], run: tuple[int, float, float], data_format: str,
    checkpoints: Mapping[str, Sequence[CheckpointTimes]], between_s: float | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """All events of an accelerator's run, as DLIO has them with DFTracer: one `item` for each batch.

    Args:
        blocks: the accelerator's own.
        run: its number, and when its run began and ended in seconds since 1970.
        data_format: tfrecord's samples are not seen one by one, and synthetic ones need no preprocessing.
        checkpoints: those of its process: `capture` and `restart`.
        between_s: what is computed before each of them; None: nothing.
    """
    rank, began_s, ended_s = run
    yield _event(rank, "ai_root", "ai_root", began_s, ended_s)
    for parts in _by_epoch(phases_of(blocks)):
        yield from _of_epoch(parts, 0)
        for phase in parts:
            for event in _of_steps(phase, 0, range(phase.steps)):
                yield event
                if event["name"] == "fetch.iter":
                    yield from _of_batch(event, data_format)
    for name, each in checkpoints.items():
        for one in each:
            if one.nbytes:
                end_s = one.start_s + one.duration_s
                yield _event(rank, name, "checkpoint", one.start_s, end_s, epoch=one.epoch)
            if one.nbytes and between_s is not None:
                yield _event(rank, "compute", "compute", one.start_s - between_s, one.start_s)


def _of_batch(fetched: dict[str, Any], data_format: str) -> Iterator[dict[str, Any]]:
    if data_format == "tfrecord":
        return
    yield fetched | {"name": "item", "cat": "data"}
    if data_format != "synthetic":
        over = {"ts": fetched["ts"] + fetched["dur"], "dur": 0}
        yield fetched | {"name": "preprocess", "cat": "data"} | over


def _event(
    rank: int, name: str, category: str, begin_s: float, end_s: float, **more: int
) -> dict[str, Any]:
    return {
        "name": name, "cat": category, "ph": "X", "pid": rank, "tid": 0, "ts": round(begin_s * 1e6),
        "dur": max(0, round((end_s - begin_s) * 1e6)), "args": more,
    }  # fmt: skip


def _origin_s(phase: StepPhase) -> float:
    return min((b.start_s for b in phase.blocks if b.start_s is not None), default=0.0)


def _by_epoch(phases: Iterable[StepPhase]) -> Iterable[list[StepPhase]]:
    """The phases of each epoch's training, and of its evaluation: checkpoints part them."""
    of_epoch: dict[tuple[int, bool], list[StepPhase]] = defaultdict(list)
    for phase in phases:
        of_epoch[phase.blocks[0].epoch, phase.blocks[0].kind == "eval"].append(phase)
    return of_epoch.values()


def _of_epoch(parts: Sequence[StepPhase], row: int) -> Iterator[dict[str, Any]]:
    """Of an epoch's training, or of its evaluation."""
    block = parts[0].blocks[row]
    begin_s = min(_origin_s(phase) for phase in parts)
    end_s = max(_origin_s(phase) + float(phase.end_s[row, -1]) for phase in parts)
    names = ("evaluate",) if block.kind == "eval" else ("epoch.block", "train")
    for name in names:
        yield _event(block.rank, name, "pipeline", begin_s, end_s, epoch=block.epoch)


def _of_steps(phase: StepPhase, row: int, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    block, origin_s = phase.blocks[row], _origin_s(phase)
    for step in steps:
        begin_s = origin_s + float(phase.begin_s[row, step])
        there_s = begin_s + float(block.load_s[step])
        done_s = there_s + float(block.compute_s[step])
        end_s = origin_s + float(phase.end_s[row, step])
        of_step = {"epoch": block.epoch, "step": step}
        yield _event(block.rank, "fetch.iter", "dataloader", begin_s, there_s, **of_step)
        yield _event(block.rank, "compute", "compute", there_s, done_s, **of_step)
        if end_s - done_s >= 1e-6:
            yield _event(block.rank, "barrier", "comm", done_s, end_s, **of_step)


def trace_text(events: Iterable[dict[str, Any]], *, lines: bool) -> str:
    """The file's text.

    Args:
        events: of `trace_events`.
        lines: one event a line after `[`, as DFTracer's .pfw files; else one JSON document.
    """
    if lines:
        compact = (json.dumps(event, separators=(",", ":")) for event in events)
        return "\n".join(["[", *compact, "]", ""])
    return json.dumps({
        "traceEvents": list(events), "displayTimeUnit": "ms",
        "otherData": {"note": NOT_MLPERF},
    }) + "\n"  # fmt: skip

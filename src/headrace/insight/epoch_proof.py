"""Verify: that a run delivered every sample exactly once over all its ranks, and that two runs had one order.

Positions prove that nothing is missing or doubled; hashes prove that at each position there was the sample
that the order has there. A step says how many of its samples were left out, and their share of its hash; an
epoch that lacks samples is not proved, nor one of a trace that does not say.
Two runs may have had other numbers of ranks and other batches: what is compared is the sequence of all ranks
together, at the positions where steps of both runs end. Where the order is not headrace's, each rank's
steps are compared one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from headrace.base.text import counted
from headrace.insight.deliveries import (
    by_position,
    delivered_hashes,
    histories,
    order_of,
    sums_at,
    went_on,
    without_ranks,
)
from headrace.trace.format import finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.insight.deliveries import LoaderHistory, Passage
    from headrace.order import Order
    from headrace.trace import Run

FINDINGS_MAX: Final = 20  # of each kind that are told one by one; the rest are counted


class EpochState(StrEnum):
    """What is known of an epoch."""

    WHOLE = "whole"  # every position came exactly once
    UNKNOWN = "not known"  # so did all but those that only the trace of a killed process would have
    RUNNING = "running"  # so did all up to where the run stands, or ended: its last epoch
    LEFT = "left early"  # so did all up to where the loop left it, and another epoch came after it
    SKIPPED = "skipped"  # so did all but those that `on_error="skip"` asks to skip
    WRONG = "wrong"


class Finding(NamedTuple):
    """One thing that is wrong: what, at which positions (the end is not among them), on which rank and step."""

    kind: Literal["missing", "doubled", "other samples", "left out", "outside"]
    epoch: int
    positions: tuple[int, int]
    where: str

    def document(self) -> dict[str, Any]:
        """For JSON."""
        kind, epoch, (begin, end), where = self
        return {"kind": kind, "epoch": epoch, "from": begin, "to": end, "where": where}


@dataclass(slots=True)
class EpochProof:
    """An epoch, and how it went."""

    epoch: int
    state: EpochState = EpochState.WHOLE
    positions: int = 0  # that were delivered, each once, from the beginning on
    length: int = 0
    steps: int = 0
    padded: int = 0  # samples that came again to fill the last step
    dropped: int = 0  # samples that did not fill a last step of all ranks, as `tail="drop"` says
    left_out: int = 0  # samples that could not be delivered and were skipped
    order_hash: int = 0  # of what was delivered
    resumed_at: tuple[int, ...] = ()
    beginning: int = 0  # how often the loader had begun anew
    unknown: list[tuple[int, int]] = field(default_factory=list)
    """Positions (the end is not among them) between the end of a killed process's trace and its resume."""
    findings: list[Finding] = field(default_factory=list)
    more_findings: int = 0  # beyond those that are told

    def add(self, kind: Any, begin: int, end: int, where: str) -> None:
        """Add a finding, or count it."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(kind, self.epoch, (begin, end), where))
        else:
            self.more_findings += 1

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "state": str(self.state), "order_hash": f"{self.order_hash:016x}",
            "resumed_at": list(self.resumed_at),
            "findings": [finding.document() for finding in self.findings],
        }  # fmt: skip


def check_epoch(
    history: LoaderHistory, epoch: int, passages: Sequence[Passage], order: Order | None, *,
    last: bool,
) -> EpochProof:  # fmt: skip
    """Check the passages of one epoch; without an order only positions; `last`: no later one was begun."""
    about = history.about
    rows = by_position(p.deliveries for p in passages)
    resumed_at = tuple(p.begin for p in passages[1:])
    proof = EpochProof(epoch, length=about.length, steps=len(rows), resumed_at=resumed_at)
    limit = about.length + max(1, about.batch_size) * passages[-1].world_size
    reachable = (rows["begin"] <= limit) & (rows["samples"] <= limit)
    for row in rows[~reachable]:
        begin = int(row["begin"])
        proof.add("outside", begin, begin + int(row["samples"]), place(row))
    inside = rows[reachable]
    seen = inside
    _check_samples(inside, epoch, order, proof)
    if last and history.attempts[passages[-1].attempt].cut:
        # Some ranks were a few steps ahead: what all had come to counts.
        mine, steps = inside["attempt"] == passages[-1].attempt, inside["step"].astype(np.int64)
        ranks = [mine & (inside["rank"] == rank) for rank in passages[-1].ranks]
        together = ~mine | (steps <= min(int(steps[of].max(initial=-1)) for of in ranks))
        inside = inside[together]
    proof.order_hash = int(np.sum(delivered_hashes(inside), dtype=np.uint64))
    cut = [history.attempts[before.attempt].cut for before in passages[:-1]]
    killed = {at for at, why in zip(resumed_at, cut, strict=True) if why}
    end = _cover(proof, inside, about.length, killed)
    _end(proof, end, passages[-1], about.tail, last=last)
    if proof.findings:
        proof.state = EpochState.WRONG
    elif proof.unknown:
        proof.state = EpochState.UNKNOWN
    _left_out(history, seen, proof)
    if proof.left_out and proof.state is EpochState.WHOLE:
        proof.state = EpochState.SKIPPED
    return proof


def place(row: np.void) -> str:
    """Where a delivery was, for people."""
    attempt = int(row["attempt"])
    begun = f" of attempt {attempt + 1}" if attempt else ""
    return f"rank {int(row['rank'])}, step {int(row['step'])}{begun}"


def _left_out(history: LoaderHistory, rows: NDArray[np.void], proof: EpochProof) -> None:
    """What steps say of samples that could not be delivered: each by its name, where the trace has it."""
    for row in rows[rows["left_out"] > 0]:
        count, begin = int(row["left_out"]), int(row["begin"])
        end = begin + int(row["samples"])
        proof.left_out += count
        if len(proof.findings) >= FINDINGS_MAX:
            proof.more_findings += count
            continue
        step = proof.epoch, int(row["step"])
        events = history.attempts[row["attempt"]].traces[int(row["rank"])].of_kind("left out")
        named = {
            int(finite(event.get("position"), -1.0)): event
            for event in events
            if (event.get("epoch"), event.get("step")) == step
        }
        named = {at: event for at, event in named.items() if begin <= at < end}
        for at, event in sorted(named.items()):
            proof.add("left out", at, at + 1, f"{place(row)}: {str(event.get('reason'))[:1024]}")
        if (unnamed := count - len(named)) > 0:
            proof.add("left out", begin, end, f"{place(row)}: {counted(unnamed, 'sample')}")


def _check_samples(
    rows: NDArray[np.void], epoch: int, order: Order | None, proof: EpochProof
) -> None:
    """Whether each delivery's samples are those that the order has at its positions."""
    if order is None or not len(rows):
        return
    begins, lengths = rows["begin"], rows["samples"].astype(np.uint64)
    sums = sums_at(order, epoch, np.concatenate([begins, begins + lengths]))
    asked = sums[len(rows) :] - sums[: len(rows)]
    for row in rows[asked != rows["order_hash"]]:
        begin = int(row["begin"])
        proof.add("other samples", begin, begin + int(row["samples"]), place(row))


def _cover(proof: EpochProof, rows: NDArray[np.void], length: int, killed: set[int]) -> int:
    """Go along the positions: what is missing or doubled; returns where they end.

    `killed`: where passages began after a process was killed, whose trace lacks its last steps.
    """
    rows = rows[rows["samples"] > 0]  # an exact tail may give a rank nothing
    ends = rows["begin"] + rows["samples"].astype(np.uint64)
    reached = np.concatenate([np.zeros(1, np.uint64), np.maximum.accumulate(ends)])[:-1]
    for at in np.flatnonzero(rows["begin"] != reached):
        begin, before = int(rows["begin"][at]), int(reached[at])
        if begin > before and begin in killed:
            proof.unknown.append((before, begin))
        elif begin > before:
            earlier = (
                "" if before else " (if this run was resumed: the earlier one's trace has them)"
            )
            proof.add("missing", before, begin, f"before {place(rows[at])}{earlier}")
        else:
            until = min(before, int(ends[at]))
            if begin < until:
                where = place(rows[at])
                if len(proof.findings) < FINDINGS_MAX:  # the rest is only counted
                    other = rows[np.flatnonzero(ends[:at] > rows["begin"][at])[0]]
                    where = f"{place(other)} and {where}"
                proof.add("doubled", begin, until, where)
    end = int(ends.max()) if len(rows) else 0
    proof.padded = max(0, end - length)
    proof.positions = min(end, length)
    return end


def _end(proof: EpochProof, end: int, passage: Passage, tail: str, *, last: bool) -> None:
    """What it means that the positions end there."""
    left, rows = proof.length - end, passage.deliveries
    batch = int(rows["samples"].max()) if len(rows) else 1
    if left < 0 and tail != "pad":
        proof.add("outside", proof.length, end, "the end of the epoch")
    elif tail == "drop" and 0 < left < passage.world_size * batch:
        proof.dropped = left
    elif left > 0:
        proof.state = EpochState.RUNNING if last else EpochState.LEFT


# -- verify ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LoaderProof:
    """What is proved of one loader of the job."""

    history: LoaderHistory
    epochs: list[EpochProof]
    unchecked: str = ""
    """Why samples were not compared with the order, so that only positions are proved."""
    gaps: list[str] = field(default_factory=list)
    """Why nothing can be proved: ranks whose traces are not there, steps that were not written."""

    @property
    def ours(self) -> bool:
        """Whether the order is headrace's."""
        return bool(self.history.about.order)

    @property
    def skipped(self) -> int:
        """Samples that `on_error="skip"` left out."""
        return sum(epoch.left_out for epoch in self.epochs)

    @property
    def sound(self) -> bool:
        """Whether every sample but these came exactly once, in each epoch that was gone through."""
        states = (EpochState.WHOLE, EpochState.RUNNING, EpochState.SKIPPED)
        whole = all(epoch.state in states for epoch in self.epochs)
        return self.ours and bool(self.epochs) and whole and not self.gaps and not self.history.odd

    @property
    def holds(self) -> bool:
        """Whether every sample came exactly once, in each epoch that was gone through."""
        return self.sound and not self.skipped

    def document(self) -> dict[str, Any]:
        """For JSON."""
        history, about = self.history, self.history.about
        return {
            "source": about.source, "framework": about.framework, "order": dict(about.order),
            "fingerprint": about.fingerprint, "proved": self.holds,
            "checked": "samples" if not self.unchecked else "positions" if self.ours else "nothing",
            "unchecked_because": self.unchecked, "gaps": self.gaps, "odd": history.odd,
            "attempts": [
                {"world_size": a.world_size, "ranks": sorted(a.traces)} for a in history.attempts
            ],
            "steps_delivered_again": history.again,
            "epochs": [epoch.document() for epoch in self.epochs],
        }  # fmt: skip


@dataclass(slots=True)
class Proof:
    """What is proved of a run."""

    path: str
    loaders: list[LoaderProof]
    without_ranks: int = 0
    """Processes that ran at the same time as another, each as if there were no other."""

    @property
    def holds(self) -> bool:
        """Whether it is proved of all loaders with an order of headrace's, and there is one."""
        return bool(self.loaders) and all(loader.holds for loader in self.loaders)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        loaders = [loader.document() for loader in self.loaders]
        return {
            "run": self.path, "proved": self.holds, "processes_without_ranks": self.without_ranks,
            "loaders": loaders,
        }  # fmt: skip


def verify_epochs(run: Run) -> Proof:
    """Prove of each epoch of a run that every sample came exactly once over all ranks."""
    proof = Proof(run.path, [], without_ranks(run.ranks))
    for history in histories(run.ranks):
        order, unchecked = order_of(history.about)
        loader = LoaderProof(history, [], unchecked, _gaps(history))
        proof.loaders.append(loader)
        for beginning, epochs in enumerate(
            (*history.earlier, history.epochs) if loader.ours else ()
        ):
            last = max(epochs, default=0)
            for epoch, passages in epochs.items():
                if passages:
                    checked = check_epoch(history, epoch, passages, order, last=epoch == last)
                    checked.beginning = beginning
                    if epochs is not history.epochs and checked.state is EpochState.RUNNING:
                        checked.state = EpochState.LEFT
                    loader.epochs.append(checked)
    _find_runs_begun_anew(proof)
    return proof


def _find_runs_begun_anew(proof: Proof) -> None:
    """Where no loader of a start went on, it was no resume: what was delivered before came again."""
    attempts = [attempt for loader in proof.loaders for attempt in loader.history.attempts]
    resumed = {process for each in attempts if went_on(each) for process in each.processes}
    for loader in proof.loaders:
        before = set[str]()
        for number, attempt in enumerate(loader.history.attempts, 1):
            if before and not attempt.processes & (before | resumed):
                again = "it began without a state, and had again what came before"
                loader.gaps.append(f"attempt {number} is no resume: {again}")
            before |= attempt.processes


_RANKS_NAMED: Final = 8


def _gaps(history: LoaderHistory) -> list[str]:
    problems: list[str] = []
    for number, attempt in enumerate(history.attempts, 1):
        if attempt.missing:
            ranks = ", ".join(map(str, attempt.missing[:_RANKS_NAMED]))
            more = len(attempt.missing) - _RANKS_NAMED
            ran = f"attempt {number} ran on {attempt.world_size} ranks; there is no trace of rank {ranks}"
            problems.append(ran + (f" and {more} more" if more > 0 else ""))
        for rank, trace in attempt.traces.items():
            if trace.lost:
                lost = f"{trace.lost:,} steps faster than they were written"
                problems.append(f"rank {rank} delivered {lost}")
            if "HEADRACE_TRACE_BYTES" in trace.cut or "could not be written" in trace.cut:
                problems.append(f"the trace of rank {rank} ends early: {trace.cut}")
    return problems


# -- same --------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Where two runs part, in words; and the rank and step of each run there."""

    what: str
    epoch: int | None = None
    positions: tuple[int, int] | None = None
    a: str = ""
    b: str = ""


@dataclass(frozen=True, slots=True)
class SameOrder:
    """Two runs beside each other."""

    a: str
    b: str
    positions: int  # that were compared, over all epochs
    epochs: int
    first: Difference | None
    """The first difference; None: as far as both went, they had the same order."""

    @property
    def holds(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.first is None and self.positions > 0

    def document(self) -> dict[str, Any]:
        """For JSON."""
        difference = None
        if (first := self.first) is not None:
            begin, end = first.positions or (None, None)
            difference = {
                "what": first.what, "epoch": first.epoch, "a": first.a, "b": first.b, "from": begin, "to": end,
            }  # fmt: skip
        return {
            "a": self.a, "b": self.b, "same": self.holds, "positions": self.positions,
            "epochs": self.epochs, "first_difference": difference,
        }  # fmt: skip


def same_order(a: Run, b: Run) -> SameOrder:
    """Compare the order of two runs, as far as both went."""
    positions = epochs = 0
    first = None
    for one, other in zip_longest(histories(a.ranks), histories(b.ranks)):
        if one is None or other is None:
            path, loader = (b.path, other) if one is None else (a.path, one)
            first = Difference(f"only {path} has a loader of {loader.about.source}")
        elif one.about.fingerprint != other.about.fingerprint:
            data = [f"{h.about.source} ({h.about.fingerprint[:16]})" for h in (one, other)]
            first = Difference(f"they had other data: {' and '.join(data)}")
        else:
            for epoch in sorted(set(one.epochs) & set(other.epochs)):
                compared, first = _compare(one, other, epoch)
                positions, epochs = positions + compared, epochs + 1
                if first is not None:
                    break
        if first is not None:
            break
    return SameOrder(a.path, b.path, positions, epochs, first)


def _compare(a: LoaderHistory, b: LoaderHistory, epoch: int) -> tuple[int, Difference | None]:
    """Compare an epoch: how many positions, and the first difference."""
    rows, others = (by_position(p.deliveries for p in h.epochs[epoch]) for h in (a, b))
    if not a.about.order or not b.about.order:
        return _by_rank(rows, others, epoch)
    one, other = _Prefix(rows), _Prefix(others)
    both = np.intersect1d(one.ends, other.ends, assume_unique=True, return_indices=True)
    ends, at_one, at_other = both
    wrong = np.flatnonzero(one.sums[at_one] != other.sums[at_other])
    if not len(wrong):
        return int(ends[-1]) if len(ends) else 0, None
    first = int(wrong[0])
    begin = int(ends[first - 1]) if first else 0
    end = int(ends[first])
    if len(one.ends) == len(other.ends) and np.array_equal(one.ends, other.ends):
        begin = int(one.rows["begin"][at_one[first]])
    what = f"epoch {epoch}: other samples at positions {begin:,} to {end - 1:,}"
    return begin, Difference(what, epoch, (begin, end), one.at(begin), other.at(begin))


class _Prefix:
    """The deliveries from an epoch's beginning to the first gap, and their hashes added up."""

    def __init__(self, rows: NDArray[np.void]) -> None:
        rows = rows[rows["samples"] > 0]
        ends = rows["begin"] + rows["samples"].astype(np.uint64)
        expected = np.concatenate([np.zeros(1, np.uint64), ends])[:-1]
        gaps = np.flatnonzero(rows["begin"] != expected)
        whole = int(gaps[0]) if len(gaps) else len(rows)
        self.rows, self.ends = rows[:whole], ends[:whole]
        self.sums = np.cumsum(delivered_hashes(self.rows), dtype=np.uint64)

    def at(self, position: int) -> str:
        """Which delivery a position came with."""
        at = int(np.searchsorted(self.ends, np.uint64(position), side="right"))
        return place(self.rows[at]) if at < len(self.rows) else ""


def _by_rank(a: NDArray[np.void], b: NDArray[np.void], epoch: int) -> tuple[int, Difference | None]:
    """Each rank's steps, one by one: positions of other orders are of the rank alone."""
    compared = 0
    for rank in sorted({*a["rank"].tolist()} & {*b["rank"].tolist()}):
        one, other = (rows[rows["rank"] == rank] for rows in (a, b))
        many = min(len(one), len(other))
        wrong = np.flatnonzero(
            (delivered_hashes(one)[:many] != delivered_hashes(other)[:many])
            | (one["samples"][:many] != other["samples"][:many])
        )
        if len(wrong):
            first = int(wrong[0])
            what = f"epoch {epoch}: other samples at rank {rank}, step {int(one['step'][first])}"
            where = place(one[first]), place(other[first])
            return compared + first, Difference(what, epoch, None, *where)
        compared += int(one["samples"][:many].sum())
    return compared, None


# -- text --------------------------------------------------------------------------------------------

_EPOCHS_SHOWN: Final = 20


def proof_lines(proof: Proof) -> Iterator[str]:
    """What is proved, and what is not and why."""
    if not proof.loaders:
        yield f"{proof.path}: no step was written: nothing is proved."
        return
    for loader in proof.loaders:
        yield from _loader_lines(loader)
    if all(loader.sound for loader in proof.loaders):
        epochs = [epoch for loader in proof.loaders for epoch in loader.epochs]
        whole = sum(e.state in {EpochState.WHOLE, EpochState.SKIPPED} for e in epochs)
        where = f" in {counted(whole, 'whole epoch')}" if whole else ", as far as the run went"
        if whole and whole < len(epochs):
            where += f" and, as far as it went, in {counted(len(epochs) - whole, 'more')}"
        unchecked = any(loader.unchecked for loader in proof.loaders)
        what, limit = ("position", f"; {_POSITIONS_ONLY}") if unchecked else ("sample", "")
        but = ", but for those that fill last steps" if any(e.padded for e in epochs) else ""
        if skipped := sum(loader.skipped for loader in proof.loaders):
            but += f", but for {counted(skipped, 'sample')} skipped as on_error='skip' asks"
        ranks = max(a.world_size for loader in proof.loaders for a in loader.history.attempts)
        over = " over all ranks" if ranks > 1 else ""
        of = " of one process" if not over else ""
        if proof.without_ranks:
            of = f" of {proof.without_ranks} processes, each for itself"
        yield f"Proved: every {what} came exactly once{over}{where}{of}{but}{limit}."
    else:
        yield "Not proved that every sample came exactly once: see above."
    if proof.without_ranks:
        yield "  They ran at the same time, and each went through all of its data: nothing was shared out."
        yield "  If they are one job, start them with `headrace launch` or torchrun, which give them ranks."


def _loader_lines(loader: LoaderProof) -> Iterator[str]:
    history = loader.history
    about = history.about
    ranks, order = _ranks_text(history), about.order
    of = " of all ranks" if any(attempt.world_size > 1 for attempt in history.attempts) else ""
    mode = f"{order.get('mode')}, seed {order.get('seed')}" if order else "order of its own"
    chosen = f"{about.length:,} of " if order.get("mode") == "subset" else ""
    yield f"{about.source or about.framework}: {chosen}{about.samples:,} samples, {mode}, {ranks}"
    if not loader.ours:
        lives = (*history.earlier, history.epochs)
        rows = [p.deliveries for life in lives for passages in life.values() for p in passages]
        samples = sum(int(each["samples"].sum()) for each in rows)
        steps = counted(sum(map(len, rows)), "step") + of
        epochs = counted(sum(map(len, lives)), "epoch")
        many = f"{counted(samples, 'sample')} of {epochs} came in {steps}"
        yield f"  {many}; whether each came once is not known:"
        yield f"  the order is that of {about.framework or 'the program'}, which headrace cannot make again"
        yield "  Whether two runs had the same order can be checked: headrace verify-epoch RUN RUN2"
        return
    beginning = 0
    for epoch in loader.epochs[:_EPOCHS_SHOWN]:
        if epoch.beginning != beginning:
            beginning = epoch.beginning
            yield "  begun anew at epoch 0, without a state:"
        yield from _epoch_lines(epoch, of, unchecked=bool(loader.unchecked))
    if len(loader.epochs) > _EPOCHS_SHOWN:
        rest = loader.epochs[_EPOCHS_SHOWN:]
        whole = (EpochState.WHOLE, EpochState.RUNNING)
        wrong = [epoch for epoch in rest if epoch.state not in whole]
        yield f"  {counted(len(rest), 'more epoch')}, {len(wrong)} of them not whole"
        for epoch in wrong[:_EPOCHS_SHOWN]:
            yield from _epoch_lines(epoch, of, unchecked=bool(loader.unchecked))
    if history.again:
        again = f"{counted(history.again, 'step')}{of} came again after a resume"
        yield f"  {again}; only the last delivery counts"
    if loader.unchecked:
        yield f"  Why only positions were checked: {loader.unchecked}"
    for gap in (*loader.gaps, *history.odd):
        yield f"  ! {gap}"


def _ranks_text(history: LoaderHistory) -> str:
    sizes = [counted(attempt.world_size, "rank") for attempt in history.attempts[:8]]
    anew = len(history.earlier)
    resumes = len(history.attempts) - 1 - anew
    parts = [" then ".join(sizes)]
    if len(set(sizes)) == 1:
        parts = [sizes[0], *([counted(resumes, "resume")] if resumes else [])]
    return ", ".join(parts + [f"begun anew {counted(anew, 'time')}"] * bool(anew))


_STATES: Final = {
    EpochState.WHOLE: "every sample exactly once",
    EpochState.UNKNOWN: "no sample twice, and not known of all whether they came",
    EpochState.RUNNING: "each sample once up to position {positions:,} of {length:,}, where the run stands",
    EpochState.LEFT: "left early at position {positions:,} of {length:,}: the rest never came",
    EpochState.SKIPPED: "every sample exactly once, but for those that were skipped",
    EpochState.WRONG: "WRONG",
}


_POSITIONS_ONLY: Final = "that it was the right sample was not checked"


def _epoch_lines(epoch: EpochProof, of: str, *, unchecked: bool) -> Iterator[str]:
    state = _STATES[epoch.state].format(positions=epoch.positions, length=epoch.length)
    if unchecked and epoch.state is not EpochState.WRONG:
        state = f"{state.replace(' sample ', ' position ')}, {_POSITIONS_ONLY}"
    notes = [f"{counted(epoch.steps, 'step')}{of}", f"hash {epoch.order_hash:016x}"]
    if epoch.resumed_at:
        notes.append("resumed at position " + ", ".join(f"{at:,}" for at in epoch.resumed_at[:4]))
    if epoch.left_out:
        notes.append(f"{counted(epoch.left_out, 'sample')} skipped, as on_error='skip' says")
    if epoch.padded:
        notes.append(f"then {counted(epoch.padded, 'sample')} again to fill the last step")
    if epoch.dropped:
        notes.append(f"{counted(epoch.dropped, 'sample')} dropped, as tail='drop' says")
    yield f"  epoch {epoch.epoch}: {state} ({'; '.join(notes)})"
    for begin, end in epoch.unknown:
        why = "a process was killed, and its trace ends before what its state had"
        yield f"    positions {begin:,} to {end - 1:,} are not known: {why}"
    for finding in epoch.findings:
        begin, end = finding.positions
        where = f"{begin:,}" if end - begin == 1 else f"{begin:,} to {end - 1:,}"
        yield f"    {finding.kind}: position{'s' if end - begin != 1 else ''} {where}: {finding.where}"
    if epoch.more_findings:
        yield f"    and {epoch.more_findings:,} more"


def same_lines(same: SameOrder) -> Iterator[str]:
    """Whether two runs had one order."""
    first, both = same.first, f"{same.a} and {same.b}"
    if first is None and not same.positions:
        yield f"Nothing to compare: {both} have no epoch in common."
    elif first is None:
        where = f"{counted(same.positions, 'position')} of {counted(same.epochs, 'epoch')}"
        yield f"Same order: {both} delivered the same samples at {where}."
    if first is None:
        return
    yield f"Not the same order: {first.what}."
    for path, where in ((same.a, first.a), (same.b, first.b)):
        if where:
            yield f"  in {path}: {where}"

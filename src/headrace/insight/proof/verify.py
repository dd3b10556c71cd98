"""Verify: the proof of a run: each epoch of each of its loaders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headrace.insight.proof.epochs import EpochProof, State, check_epoch
from headrace.insight.proof.expected import order_of
from headrace.insight.proof.history import histories

if TYPE_CHECKING:
    from headrace.insight.proof.history import History
    from headrace.trace import Run

__all__ = ["LoaderProof", "Proof", "verify_epochs"]


@dataclass(slots=True)
class LoaderProof:
    """What is proved of one loader of the job."""

    history: History
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
    def holds(self) -> bool:
        """Whether every sample came exactly once, in each epoch that was gone through."""
        states = (State.WHOLE, State.RUNNING)
        whole = all(epoch.state in states for epoch in self.epochs)
        return self.ours and bool(self.epochs) and whole and not self.gaps and not self.history.odd


@dataclass(slots=True)
class Proof:
    """What is proved of a run.

    Attributes:
        path: the run's folder.
        loaders: in the order in which they began.
    """

    path: str
    loaders: list[LoaderProof]

    @property
    def holds(self) -> bool:
        """Whether it is proved of all loaders with an order of headrace's, and there is one."""
        return bool(self.loaders) and all(loader.holds for loader in self.loaders)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "run": self.path,
            "proved": self.holds,
            "loaders": [_document(p) for p in self.loaders],
        }


def verify_epochs(run: Run) -> Proof:
    """Prove of each epoch of a run that every sample came exactly once over all ranks."""
    return Proof(run.path, [_verify(history) for history in histories(run.ranks)])


def _verify(history: History) -> LoaderProof:
    order, unchecked = order_of(history.about)
    proof = LoaderProof(history, [], unchecked, _gaps(history))
    if not proof.ours:
        return proof
    last = max(history.epochs, default=0)
    proof.epochs = [
        check_epoch(history, epoch, passages, order, last=epoch == last)
        for epoch, passages in history.epochs.items()
        if passages
    ]
    return proof


_RANKS_TOLD: Final = 8


def _gaps(history: History) -> list[str]:
    found: list[str] = []
    for number, attempt in enumerate(history.attempts, 1):
        if attempt.missing:
            told = ", ".join(map(str, attempt.missing[:_RANKS_TOLD]))
            more = len(attempt.missing) - _RANKS_TOLD
            found.append(
                f"attempt {number} ran on {attempt.world_size} ranks; there is no trace of rank {told}"
                + (f" and {more} more" if more > 0 else "")
            )
        for rank, trace in attempt.traces.items():
            if trace.lost:
                found.append(
                    f"rank {rank} delivered {trace.lost:,} steps faster than they were written"
                )
            if "HEADRACE_TRACE_BYTES" in trace.cut or "could not be written" in trace.cut:
                found.append(f"the trace of rank {rank} ends early: {trace.cut}")
    return found


def _document(proof: LoaderProof) -> dict[str, Any]:
    history = proof.history
    return {
        "source": history.about.source,
        "framework": history.about.framework,
        "order": dict(history.about.order),
        "fingerprint": history.about.fingerprint,
        "proved": proof.holds,
        "checked": "samples" if not proof.unchecked else "positions" if proof.ours else "nothing",
        "unchecked_because": proof.unchecked,
        "gaps": proof.gaps,
        "odd": history.odd,
        "attempts": [
            {"world_size": a.world_size, "ranks": sorted(a.traces)} for a in history.attempts
        ],
        "steps_delivered_again": history.again,
        "epochs": [_epoch(epoch) for epoch in proof.epochs],
    }  # fmt: skip


def _epoch(epoch: EpochProof) -> dict[str, Any]:
    return {
        "epoch": epoch.epoch, "state": str(epoch.state), "positions": epoch.positions,
        "length": epoch.length, "steps": epoch.steps, "padded": epoch.padded, "dropped": epoch.dropped,
        "left_out": epoch.left_out, "order_hash": f"{epoch.order_hash:016x}",
        "resumed_at": list(epoch.resumed_at),
        "findings": [finding.document() for finding in epoch.findings], "more_findings": epoch.more,
    }  # fmt: skip

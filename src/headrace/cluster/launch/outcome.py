"""Outcome: what the ranks' ends mean for the job."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.cluster.launch.agreement import Phase
from headrace.cluster.launch.scheduler import REQUEUE_EXIT
from headrace.order import combine_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.cluster.launch.agreement import Agreement
    from headrace.cluster.launch.nodes import NodeState
    from headrace.cluster.launch.report import LaunchReport

__all__ = ["RankFailure", "add_notes", "judge"]


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first rank, or torchrun or mpirun, that failed.

    Attributes:
        node: where.
        what: it was and how it ended.
        code: exit status as shells have it: 128 + the signal where one ended it.
    """

    node: str
    what: str
    code: int

    @classmethod
    def among(cls, nodes: Sequence[NodeState]) -> RankFailure | None:
        """The first that is known of."""
        for node in nodes:
            for number, code in node.codes.items():
                if code:
                    return cls(
                        node.name, f"process {number} of the ranks {_how(code)}", _status(code)
                    )
        return None


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def judge(
    report: LaunchReport,
    nodes: Sequence[NodeState],
    failure: RankFailure | None,
    agreement: Agreement | None,
) -> None:
    """Sets outcome, reason and exit status."""
    asked = agreement is not None
    left = any(note.leaving for node in nodes for note in node.notes)
    if agreement is not None and agreement.reason.cancels:
        # torchrun passes the signal on, and so ends with a failure: that is no other one.
        report.outcome = "cancelled"
        saved = "; the ranks had saved and left" if left and not failure else ""
        report.why = agreement.reason.text + saved
        report.exit_code = 128 + agreement.reason.number
    elif failure is not None:
        report.outcome, report.exit_code = "failed", failure.code
        report.why = f"node {failure.node}: {failure.what}"
    elif agreement is not None and agreement.phase is Phase.LATE:
        report.outcome, report.exit_code = "failed", 128 + signal.SIGKILL
        report.why = f"the ranks did not leave in time after {agreement.reason.text}"
    elif asked and left and agreement is not None:
        report.outcome, report.exit_code = "stopped", REQUEUE_EXIT
        report.why = f"{agreement.reason.text}; the ranks have saved and left"
    else:
        report.outcome, report.exit_code = "completed", 0


def add_notes(report: LaunchReport, nodes: Sequence[NodeState]) -> None:
    """Where the loaders stood: the same on all ranks, but for the hash, which is of all together."""
    notes = [note for node in nodes for note in node.notes if note.steps]
    if not notes:
        return
    report.epoch = max(n.epoch for n in notes)
    last = [n for n in notes if n.epoch == report.epoch]
    report.position = max(n.position for n in last)
    report.order_hash = f"{combine_hashes(*(n.order_hash for n in last)):016x}"
    report.seed = last[0].seed
    report.steps = max(n.steps for n in notes)

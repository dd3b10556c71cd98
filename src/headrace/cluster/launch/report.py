"""LaunchReport: how a launch ended: for the job's log, for scripts, and for the run's manifest."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headrace.cluster.launch.place import REQUEUE_EXIT
from headrace.cluster.launch.stop_page import StopPhase
from headrace.cluster.manifest import (
    hardware,
    relevant_environment,
    script_facts,
    versions,
    write_manifest,
)
from headrace.order import combine_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.launch.nodes import NodeState
    from headrace.cluster.launch.plan import Launch
    from headrace.cluster.launch.stop_page import Agreement


# -- the report ----------------------------------------------------------------------------------------

Outcome = Literal["completed", "stopped", "requeued", "continued", "failed", "cancelled"]


@dataclass(slots=True, kw_only=True)
class LaunchReport:
    """What became of one launch.

    Attributes:
        job: its id; "" without a scheduler.
        restarts: how often it had been requeued before.
        lost: those of the nodes that were lost.
        outcome: `completed`; `stopped` (to be resumed: the ranks saved and left, or a node was lost);
            `requeued` (likewise, and the scheduler starts the job again); `continued` (a node was lost, and
            the launch begins again on the others); `failed`; `cancelled`.
        why: more about an end that is not `completed`.
        next_step: what the user can do about it.
        exit_code: of `headrace launch`.
        staged_samples, staged_bytes: on all nodes' local disks.
        source_bytes: read from the source to stage them.
        stage_s: from the start until what is staged could be read; copying goes on beside the ranks.
        epoch, position, order_hash, seed, steps: where the ranks' loaders stood last, if they said.
        ended: processes that had to be ended; 0 after a good run.
        stuck: processes that could not be ended.
    """

    job: str = ""
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    ranks: int = 0
    outcome: Outcome = "failed"
    why: str = ""
    next_step: str | None = None
    exit_code: int = 3
    wall_s: float = 0.0
    staged_samples: int = 0
    staged_bytes: int = 0
    source_bytes: int = 0
    stage_s: float | None = None
    epoch: int | None = None
    position: int | None = None
    order_hash: str | None = None
    seed: int | None = None
    steps: int | None = None
    ended: int = 0
    stuck: int = 0
    remarks: list[str] = field(default_factory=list)

    def line(self) -> str:
        """In one line."""
        who = f"job {self.job}" if self.job else "this machine"
        if self.restarts:
            who += f", restart {self.restarts}"
        nodes = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        text = f"{who}: {self.outcome}, {nodes}, {self.ranks} ranks, {self.wall_s:.1f} s"
        if self.staged_samples:
            text += f"; {self.staged_samples:,} samples staged"
            text += f", {self.source_bytes:,} bytes read from the source"
        if self.stage_s is not None:
            text += f", readable after {self.stage_s:.1f} s"
        if self.position is not None:
            text += f"; epoch {self.epoch}, position {self.position:,}, order {self.order_hash}"
        if self.stuck:
            text += f"; {self.stuck} processes cannot be ended"
        if self.why:
            text += f": {self.why}"
        return text


# -- what the ranks' ends mean -------------------------------------------------------------------------


class RankFailure(NamedTuple):
    """The first rank, or torchrun or mpirun, that failed; `code` as shells have it: 128 + its signal."""

    node: str
    what: str
    code: int

    @classmethod
    def among(cls, nodes: Sequence[NodeState]) -> RankFailure | None:
        """The first that is known of."""
        for node in nodes:
            for number, code in node.codes.items():
                if code:
                    how, status = f"ended with status {code}", code
                    if code < 0:
                        how, status = f"was ended by {signal.Signals(-code).name}", 128 - code
                    return cls(node.name, f"process {number} of the ranks {how}", status)
        return None


def judge(
    report: LaunchReport,
    nodes: Sequence[NodeState],
    failure: RankFailure | None,
    agreement: Agreement | None,
) -> None:
    """Sets outcome, reason and exit status."""
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
    elif agreement is not None and agreement.phase is StopPhase.LATE:
        report.outcome, report.exit_code = "failed", 128 + signal.SIGKILL
        report.why = f"the ranks did not leave in time after {agreement.reason.text}"
    elif agreement is not None and left:
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


# -- the run's manifest --------------------------------------------------------------------------------

FOLDER = "headrace-runs"


def _free(name: str) -> str:
    """A name of the folder's that no other launch of the job has taken."""
    paths = itertools.chain(
        [f"{FOLDER}/{name}.json"], (f"{FOLDER}/{name}-{n}.json" for n in itertools.count(2))
    )
    return next(path for path in paths if not Path(path).exists())


class RunRecord:
    """One run's manifest, written before its ranks run and when they have ended."""

    def __init__(self, launch: Launch, environment: Mapping[str, str]) -> None:
        place, options, plan, words = launch
        began = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began))
        name = f"{place.job_id}-{place.restarts}" if place.job_id else f"{stamp}-{os.getpid()}"
        self.path = Path(options.manifest or _free(name)).absolute()
        self._document: dict[str, Any] = {
            "run": {
                "job": place.job_id, "name": place.name, "restarts": place.restarts,
                "scheduler": place.scheduler, "nodes": list(plan.nodes), "host": socket.gethostname(),
                "began_s": round(began, 3),
            },
            "command": script_facts(words),
            "layout": {
                "framework": options.framework, "nodes": len(plan.nodes),
                "ranks_per_node": plan.ranks_per_node, "gpus_per_node": plan.gpus_per_node,
                "cpus_per_rank": plan.cpus_per_rank, "staged": list(options.stage),
                "replicas": options.replicas,
            },
            "versions": versions(),
            "hardware": {"0": hardware()},
            "environment": relevant_environment(environment),
        }  # fmt: skip

    def begin(self) -> None:
        """Writes what is known before the ranks run: a run that is killed has a manifest, too."""
        write_manifest(self.path, {**self._document, "result": {"outcome": "running"}})

    def finish(self, report: LaunchReport, nodes: Sequence[NodeState]) -> None:
        """Writes all of it; LaunchError if it cannot be written."""
        known = {str(n.index): n.hardware for n in nodes if n.hardware is not None}
        # Nodes that are alike are one entry: a thousand equal ones say nothing more.
        unlike = {i: h for i, h in known.items() if h != known.get("0")}
        self._document["hardware"] = {
            "0": known.get("0", self._document["hardware"]["0"]),
            **unlike,
        }
        self._document["order"] = {
            "seed": report.seed, "epoch": report.epoch, "position": report.position,
            "hash": report.order_hash, "steps": report.steps,
        }  # fmt: skip
        self._document["result"] = {
            "outcome": report.outcome, "why": report.why, "exit_code": report.exit_code,
            "wall_s": round(report.wall_s, 3), "staged_bytes": report.staged_bytes,
            "source_bytes": report.source_bytes, "remarks": report.remarks,
        }  # fmt: skip
        write_manifest(self.path, self._document)

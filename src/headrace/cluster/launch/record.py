"""Record: a launch's run manifest: begun before the ranks, finished with how they ended."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cluster.hardware import hardware
from headrace.cluster.manifest import relevant_environment, script_facts, versions, write_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.launch.nodes import NodeState
    from headrace.cluster.launch.options import LaunchOptions
    from headrace.cluster.launch.plan import LaunchPlan
    from headrace.cluster.launch.report import LaunchReport
    from headrace.cluster.place import JobPlace

__all__ = ["Record"]

FOLDER = "headrace-runs"


def _free(name: str) -> str:
    """A name of the folder's that no other launch of the job has taken."""
    number, path = 1, f"{FOLDER}/{name}.json"
    while Path(path).exists():
        number += 1
        path = f"{FOLDER}/{name}-{number}.json"
    return path


class Record:
    """One run's.

    Args:
        place: of the job.
        options: of the launch.
        plan: its layout.
        words: the user's.
        environment: the user's.

    Attributes:
        path: of the file.
    """

    def __init__(
        self,
        place: JobPlace,
        options: LaunchOptions,
        plan: LaunchPlan,
        words: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
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
        """Writes what is known before the ranks run: a run that is killed has a manifest, too.

        Raises:
            LaunchError: it cannot be written.
        """
        write_manifest(self.path, {**self._document, "result": {"outcome": "running"}})

    def finish(self, report: LaunchReport, nodes: Sequence[NodeState]) -> None:
        """Writes all of it.

        Raises:
            LaunchError: it cannot be written.
        """
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

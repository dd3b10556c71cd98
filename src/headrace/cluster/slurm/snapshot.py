"""Snapshot: a Slurm cluster at one moment, read from what its commands print, or from what they once printed.

Text is read unless JSON is asked for: of 50,000 jobs it is a quarter of the bytes, it is the same in all
versions, and it says everywhere which GPUs a job has on which node.
"""

from __future__ import annotations

import gc
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.cluster.slurm.commands import Commands
from headrace.cluster.slurm.documents import read_job_document, read_node_document
from headrace.cluster.slurm.text import read_jobs, read_nodes, read_partitions
from headrace.cluster.snapshot import ClusterSnapshot
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Recording", "read_snapshot", "record"]

Form = Literal["text", "json"]

_JSON_SINCE = (21, 8)
_WHOLE_NODES_SINCE = (23, 2)
"""From then on `sinfo --json` speaks of groups of nodes, and `scontrol` of each."""

_CONFIG = re.compile(r"^(\w+)\s*= (.*)$", re.MULTILINE)
_FILES = ("nodes", "jobs", "partitions", "config")


@dataclass(frozen=True, slots=True)
class Recording:
    """What the commands printed.

    Attributes:
        nodes, jobs: text, or JSON: it begins with `{`.
        partitions, config: text.
        taken_s: when, in Unix seconds.
    """

    nodes: str
    jobs: str
    partitions: str
    config: str
    taken_s: float

    def save(self, folder: Path) -> None:
        """Write it into a folder, a file each: `nodes`, `jobs`, `partitions`, `config`, `taken`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            (folder / name).write_text(getattr(self, name), encoding="utf-8")
        (folder / "taken").write_text(f"{self.taken_s!r}\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Recording:
        """Read one that was saved.

        Raises:
            ClusterError: the folder has none.
        """
        try:
            texts = {
                name: (folder / name).read_text(encoding="utf-8", errors="replace")
                for name in _FILES
            }
            taken_s = float((folder / "taken").read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise ClusterError(
                f"{folder}: no recording of a cluster ({e}); expected the files {', '.join(_FILES)} and "
                "taken.",
                path=str(folder),
            ) from e
        return cls(**texts, taken_s=taken_s)

    def read(self) -> ClusterSnapshot:
        """What it says. Jobs that are over are left out.

        Raises:
            ClusterError: it cannot be read.
        """
        config = dict(_CONFIG.findall(self.config))
        # A hundred thousand objects that all stay: to look through them for garbage takes as long as to make
        # them.
        collected = gc.isenabled()
        gc.disable()
        try:
            nodes = (read_node_document if _is_json(self.nodes) else read_nodes)(self.nodes)
            jobs = (read_job_document if _is_json(self.jobs) else read_jobs)(self.jobs)
            partitions = read_partitions(self.partitions)
        finally:
            if collected:
                gc.enable()
        return ClusterSnapshot(
            cluster=config.get("ClusterName", "").strip(),
            version=config.get("SLURM_VERSION", "").strip(),
            taken_s=self.taken_s,
            nodes=nodes,
            partitions=partitions,
            jobs=tuple(job for job in jobs if not job.state.is_over),
        )


def record(
    commands: Commands | None = None, form: Form = "text", *, jobs: bool = True
) -> Recording:
    """Ask all commands at once.

    Args:
        commands: how they are called.
        form: `json` needs version 21.08 or newer, with its JSON plugin.
        jobs: ask for them; to lay out a request they are not needed, and there may be many.

    Raises:
        ClusterError: Slurm is missing, does not answer, or has no JSON.
    """
    commands = commands or Commands()
    asked = {
        "nodes": ("scontrol", "--details", "show", "nodes"),
        "jobs": ("scontrol", "--details", "show", "jobs"),
        "partitions": ("scontrol", "show", "partitions"),
        "config": ("scontrol", "show", "config"),
    }
    if form == "json":
        version = commands.version()
        if version < _JSON_SINCE:
            raise ClusterError(
                f"Slurm {version[0]}.{version[1]:02d} has no JSON, expected 21.08 or newer.",
                next_step="Read its text.",
            )
        whole = version >= _WHOLE_NODES_SINCE
        asked["nodes"] = ("scontrol", "show", "nodes", "--json") if whole else ("sinfo", "--json")
        asked["jobs"] = ("squeue", "--json")
    if not jobs:
        del asked["jobs"]
    taken_s = time.time()
    with ThreadPoolExecutor(len(asked)) as pool:
        said = dict(
            zip(
                asked,
                pool.map(lambda command: commands.query(*command), asked.values()),
                strict=True,
            )
        )
    return Recording(**{"jobs": "", **said}, taken_s=taken_s)


def read_snapshot(
    commands: Commands | None = None,
    *,
    form: Form = "text",
    recorded: Path | None = None,
    jobs: bool = True,
) -> ClusterSnapshot:
    """The cluster as it is now, or as it was recorded.

    Args:
        commands: how Slurm's commands are called.
        form: which output of theirs is read.
        recorded: a folder that `Recording.save` wrote, in their place.
        jobs: ask for them.

    Raises:
        ClusterError: there is no Slurm, it does not answer in time, or says what cannot be read.
    """
    recording = record(commands, form, jobs=jobs) if recorded is None else Recording.load(recorded)
    return recording.read()


def _is_json(text: str) -> bool:
    return text[:64].lstrip().startswith("{")

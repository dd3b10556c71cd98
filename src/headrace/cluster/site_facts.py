"""SiteFacts: what files that are generated for a site must know of its cluster and of this installation."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import headrace
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cluster.snapshot import ClusterSnapshot, Node, Partition

__all__ = ["PartitionFacts", "SiteFacts", "site_facts", "write_files"]

_GONE = frozenset({"down", "drain", "drained", "fail", "future"})


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """One partition, as a form offers it.

    Attributes:
        name: of the partition.
        nodes: how many it has, those that are down too.
        gpus_per_node: of its largest node; 0: it has none.
        cpus_per_node: of its largest node.
        hours_max: its time limit, rounded down; None: none.
        is_default: Slurm takes it where nobody says otherwise.
    """

    name: str
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    hours_max: int | None
    is_default: bool

    @property
    def gpus_max(self) -> int:
        """In all."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """What is generated from.

    Attributes:
        cluster: its name, as Open OnDemand's cluster file has it.
        partitions: that jobs may go to.
        prefix: of the Python environment that has headrace.
        version: of headrace.
        site_file: the site's own settings; None: there are none.
    """

    cluster: str
    partitions: tuple[PartitionFacts, ...]
    prefix: Path
    version: str
    site_file: Path | None = None

    def __post_init__(self) -> None:
        for what, text in (
            ("the cluster's name", self.cluster),
            ("the prefix", str(self.prefix)),
            ("the site's file", str(self.site_file or "")),
            *(("a partition's name", partition.name) for partition in self.partitions),
        ):
            if not text.isprintable():
                raise ClusterRequestError(f"{what} is {text!r}, expected printable characters.")
        if not re.fullmatch(r"[\w.-]+", self.cluster):
            raise ClusterRequestError(
                f"the cluster's name is {self.cluster!r}, expected letters, digits, '.', '_' and '-'."
            )
        if not self.partitions:
            raise ClusterRequestError(f"{self.cluster} has no partition that is up.")

    @property
    def default_partition(self) -> PartitionFacts:
        """The default one, if it is there; else one with GPUs, if there is one."""
        return min(self.partitions, key=lambda p: (not p.is_default, not p.gpus_per_node))


def site_facts(
    snapshot: ClusterSnapshot, *, prefix: Path | None = None, site_file: Path | None = None
) -> SiteFacts:
    """What a cluster and this installation say of themselves.

    Args:
        snapshot: of the cluster.
        prefix: of the Python environment; this one's, if not given.
        site_file: the site's own settings.

    Raises:
        ClusterRequestError: the cluster has no partition that is up, or names that cannot be written.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    partitions = [
        _partition(partition, nodes) for partition in snapshot.partitions if partition.state == "up"
    ]
    return SiteFacts(
        snapshot.cluster,
        tuple(partitions),
        Path(sys.prefix) if prefix is None else prefix,
        headrace.__version__,
        site_file,
    )


def _partition(partition: Partition, nodes: Mapping[str, Node]) -> PartitionFacts:
    own = [nodes[name] for name in partition.nodes if name in nodes]
    own = [node for node in own if not _GONE & set(node.states)] or own
    return PartitionFacts(
        partition.name,
        len(partition.nodes),
        max((node.gpus for node in own), default=0),
        max((node.cpus for node in own), default=1),
        None if partition.max_minutes is None else max(1, partition.max_minutes // 60),
        partition.is_default,
    )


def write_files(
    folder: str | os.PathLike[str], files: Mapping[str, str], *, overwrite: bool = False
) -> list[Path]:
    """Write generated files below a folder; all of them are looked at before the first is written.

    Args:
        folder: is made if it does not exist.
        files: text by relative name; a name that ends with `.sh.erb` is made executable.
        overwrite: replace files of other content.

    Raises:
        ClusterError: a file is there with other content, or cannot be written.
    """
    targets = {Path(folder, name).absolute(): text for name, text in files.items()}
    for path, text in targets.items():
        if not overwrite and os.path.lexists(path) and not _is(path, text):
            raise ClusterError(
                f"{path}: is there already, with other content.",
                path=str(path),
                next_step="Give another folder, or --overwrite to replace what was generated.",
            )
    for path, text in targets.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            if path.name.endswith(".sh.erb"):
                path.chmod(0o755)
        except OSError as e:
            raise ClusterError(
                f"{path}: cannot be written: {e.strerror or e}.",
                path=str(path),
                next_step="Give a folder that you may write.",
            ) from e
    return list(targets)


def _is(path: Path, text: str) -> bool:
    try:
        return path.read_text("utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False

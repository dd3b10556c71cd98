"""Site files: modulefiles and Open OnDemand apps, generated from a cluster and this installation.

Modulefiles: `module load headrace`, for Lmod (Lua) and for Environment Modules (Tcl). Lmod prefers the Lua
file, Environment Modules passes over it: one folder serves both.

Open OnDemand: YAML is written as JSON where values come from the cluster: JSON is YAML, and quotes itself. What
the user types is quoted by the portal's ERB when it is used: as JSON in submit.yml, by shellescape in scripts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import headrace
from headrace.base.files import explained
from headrace.base.text import counted
from headrace.cluster.notation import time_text
from headrace.cluster.snapshot import is_away
from headrace.errors import ClusterError, ClusterRequestError
from headrace.runtime import SITE_SOCKET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cluster.snapshot import ClusterSnapshot, Partition


class NodeKind(NamedTuple):
    """GPUs, CPUs and MiB of memory of a node, and how many such nodes there are."""

    gpus: int
    cpus: int
    memory_mib: int
    number: int


class PartitionFacts(NamedTuple):
    """One partition, as a form offers it, with its nodes that are not down."""

    own: Partition
    kinds: tuple[NodeKind, ...]

    @property
    def nodes(self) -> int:
        """How many it has."""
        return sum(kind.number for kind in self.kinds)

    @property
    def gpus_per_node(self) -> int:
        """Of its largest node."""
        return max(kind.gpus for kind in self.kinds)

    @property
    def gpus_max(self) -> int:
        """That one job can have, as many on each of its nodes."""
        nodes = {k.gpus: sum(o.number for o in self.kinds if o.gpus >= k.gpus) for k in self.kinds}
        return max(gpus * min(n, self.own.max_nodes or n) for gpus, n in nodes.items())


class SiteFacts(NamedTuple):
    """What is generated from; `prefix` is of the Python environment that has headrace."""

    cluster: str
    partitions: tuple[PartitionFacts, ...]
    prefix: Path
    version: str
    site_file: Path | None = None

    @property
    def default_partition(self) -> PartitionFacts:
        """The default one, if it is there; else one with GPUs, if there is one."""
        return min(self.partitions, key=lambda p: (not p.own.is_default, not p.gpus_per_node))


def site_facts(
    snapshot: ClusterSnapshot, *, prefix: Path | None = None, site_file: Path | None = None
) -> SiteFacts:
    """What a cluster and this installation say of themselves.

    Raises:
        ClusterRequestError: a name cannot stand in the files, or no partition is up.
    """
    prefix, cluster = Path(sys.prefix) if prefix is None else prefix, snapshot.cluster
    texts = {"the prefix": str(prefix), "the site's file": str(site_file or "")}
    names = [("a partition's name", partition.name) for partition in snapshot.partitions]
    for what, text in (("the cluster's name", cluster), *texts.items(), *names):
        if not text.isprintable():
            raise ClusterRequestError(f"{what} is {text!r}, expected printable characters.")
    if not re.fullmatch(r"[\w.-]+", cluster):
        raise ClusterRequestError(
            f"the cluster's name is {cluster!r}, expected letters, digits, '.', '_' and '-'."
        )
    nodes = {node.name: node for node in snapshot.nodes}
    partitions = []
    for partition in snapshot.partitions:
        own = [nodes[name] for name in partition.nodes if name in nodes]
        own = [node for node in own if not is_away(node)] or own
        kinds = Counter((node.gpus, node.cpus, node.memory_mib) for node in own)
        if partition.state == "up" and kinds:
            counted_kinds = tuple(NodeKind(*kind, n) for kind, n in sorted(kinds.items()))
            partitions.append(PartitionFacts(partition, counted_kinds))
    if not partitions:
        raise ClusterRequestError(f"{cluster} has no partition that is up.")
    return SiteFacts(cluster, tuple(partitions), prefix, headrace.__version__, site_file)


def write_files(
    folder: str | os.PathLike[str], files: Mapping[str, str], *, overwrite: bool = False
) -> list[Path]:
    """Write generated files below a folder, scripts executable; all are looked at before.

    Raises:
        ClusterError: a file is there with other content, or cannot be written.
    """
    targets = {Path(folder, name).absolute(): text for name, text in files.items()}
    for path, text in targets.items():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if overwrite or (path.is_file() and path.read_text("utf-8") == text):
                continue
        if os.path.lexists(path):
            raise ClusterError(
                f"{path}: is there already, with other content.",
                path=str(path),
                next_step="Give another folder, or --overwrite to replace what was generated.",
            )
    for path, text in targets.items():
        next_step = "Give a folder that you may write."
        with explained(ClusterError, path, "cannot be written", next_step):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            if path.name.endswith(".sh.erb") or text.startswith("#!"):
                path.chmod(0o755)
    return list(targets)


# -- modulefiles ---------------------------------------------------------------------------------------

_TEMPLATES = Path(__file__).parent / "site_templates"
"""Texts with @NAMES@ for what `SiteFacts` says."""

_SUMMARY = "feeds deep-learning training, and runs it on Slurm"


def _filled(name: str, **values: object) -> str:
    text = (_TEMPLATES / name).read_text("utf-8")
    return re.sub("@([A-Z_]+)@", lambda place: str(values.get(place[1].lower(), place[0])), text)


def kubernetes_files(image: str) -> dict[str, str]:
    """What `kubectl apply -k` and a job's pods need, by name below a folder; `image` has headrace in it."""
    name, colon, tag = image.rpartition(":")
    if not colon or "/" in tag or "@" in image:
        raise ClusterRequestError(
            f"image is {image!r}, expected NAME:TAG, as registry.example.org/headrace:{headrace.__version__}."
        )
    folder = _TEMPLATES / "kubernetes"
    names = sorted(path.name for path in folder.iterdir())
    return {each: _filled(f"kubernetes/{each}", image=name, tag=tag) for each in names}


def modulefiles(facts: SiteFacts) -> dict[str, str]:
    """Lmod's, and Environment Modules', by their names below a folder of MODULEPATH."""
    version, prefix, site = facts.version, str(facts.prefix), str(facts.site_file)
    text = _filled("help.txt")
    lua = _filled(
        "module.lua", cluster=facts.cluster, help=text.rstrip("\n"), prefix=_lua(prefix),
        version_line=_lua(f"Version: {version}"), summary_line=_lua(f"Description: {_SUMMARY}"),
        site=f'setenv("HEADRACE_SITE", {_lua(site)})\n' if facts.site_file else "",
    )  # fmt: skip
    tcl = _filled(
        "module.tcl", cluster=facts.cluster, prefix=_tcl(prefix),
        help="\n".join(f"    puts stderr {_tcl(line)}" for line in text.splitlines()),
        summary_line=_tcl(f"headrace {version}: {_SUMMARY}"),
        site=f"setenv HEADRACE_SITE {_tcl(site)}\n" if facts.site_file else "",
    )  # fmt: skip
    return {f"headrace/{version}.lua": lua, f"headrace/{version}": tcl}


def _lua(text: str) -> str:
    r"""A string literal: bytes as they are but for `"` and `\`."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _tcl(text: str) -> str:
    """A word in double quotes, in which nothing is substituted."""
    return '"' + "".join(f"\\{c}" if c in '\\"$[]{}' else c for c in text) + '"'


# -- Slurm's prolog and epilogs ------------------------------------------------------------------------


def slurm_files(facts: SiteFacts) -> dict[str, str]:
    """The program that tells a node's agent of jobs, by its name below a folder that all nodes see."""
    name = "headrace-job"
    return {name: _filled(f"slurm/{name}", cluster=facts.cluster, socket=SITE_SOCKET)}


# -- Open OnDemand -------------------------------------------------------------------------------------

_NO_LIMIT_MINUTES = 7 * 24 * 60
"""A week, where a partition has no limit: a form wants one."""

_NODES_MAX = 1 << 16

_APPS = {"headrace_train": ["log_file"], "headrace_jupyter": list[str]()}
"""The portal's apps, and what their pages are told. Their menus and questions are among the templates.
A notebook is one task on one node."""


def ondemand_files(facts: SiteFacts) -> dict[str, str]:
    """Text of each file of the portal's apps, by its name below the folder of apps."""
    partitions, first = facts.partitions, facts.default_partition
    limits = {
        p.own.name: {
            "kinds": p.kinds, "minutes": p.own.max_minutes, "nodes": p.own.max_nodes,
            "mib_per_cpu": p.own.max_memory_per_cpu_mib,
        }
        for p in partitions
    }  # fmt: skip
    # Shell lines that put headrace's environment first.
    path = f'export PATH={shlex.quote(str(facts.prefix / "bin"))}:"$PATH"\n'
    if facts.site_file is not None:
        path += f"export HEADRACE_SITE={shlex.quote(str(facts.site_file))}\n"
    values = {
        "path_lines": path, "cluster": json.dumps(facts.cluster), "partition": json.dumps(first.own.name),
        "partitions": _ruby(json.dumps(limits, separators=(",", ":"))), "gpus": min(1, first.gpus_max),
        "minutes": min(60, first.own.max_minutes or 60),
        "minutes_max": max(p.own.max_minutes or _NO_LIMIT_MINUTES for p in partitions),
    }  # fmt: skip
    files = {
        "README.md": _filled("ondemand/README.md", cluster=facts.cluster, bin=facts.prefix / "bin")
    }
    for app, conn_params in _APPS.items():
        notebook = app == "headrace_jupyter"
        options = [_option(p, p.gpus_per_node if notebook else p.gpus_max) for p in partitions]
        values |= {
            "options": json.dumps(options), "gpus_max": max(o[2]["data-max-gpus"] for o in options),
            "one_task": str(notebook).lower(), "nodes_max": 1 if notebook else _NODES_MAX,
            "where": "on one node" if notebook else "on any number of them",
            "conn_params": json.dumps(conn_params), "job_name": json.dumps(app.replace("_", "-")),
        }  # fmt: skip
        files[f"{app}/submit.yml.erb"] = _filled("submit.yml.erb", **values)
        templates = (p for p in sorted((_TEMPLATES / "ondemand" / app).rglob("*")) if p.is_file())
        for name in (str(template.relative_to(_TEMPLATES)) for template in templates):
            files[name.removeprefix("ondemand/")] = _filled(name, **values)
    return files


def _option(partition: PartitionFacts, gpus_max: int) -> tuple[str, str, dict[str, int]]:
    """A partition in a menu: its text, its name, and what the portal's questions take at most there."""
    p, name, minutes = partition, partition.own.name, partition.own.max_minutes
    sizes = f"{counted(p.gpus_per_node, 'GPU')} a node" if p.gpus_per_node else "no GPUs"
    limit = f", up to {time_text(minutes)}" if minutes else ""
    most = {"data-max-gpus": gpus_max, "data-max-minutes": minutes or _NO_LIMIT_MINUTES}
    return f"{name} ({counted(p.nodes, 'node')}, {sizes}{limit})", name, most


def _ruby(text: str) -> str:
    r"""A string literal in single quotes, where only `\` and `'` mean something."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

"""Site files: modulefiles and Open OnDemand apps, generated from a cluster and this installation.

Modulefiles: `module load headrace`, for Lmod (Lua) and for Environment Modules (Tcl). Lmod prefers the Lua
file, Environment Modules passes over it: one folder serves both.

Open OnDemand: YAML is written as JSON where values come from the cluster: JSON is YAML, and quotes itself. What
the user types is quoted by the portal's ERB when it is used: as JSON in submit.yml, by shellescape in scripts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cluster.snapshot import ClusterSnapshot, Node, Partition


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
        _partition_facts(partition, nodes)
        for partition in snapshot.partitions
        if partition.state == "up"
    ]
    return SiteFacts(
        snapshot.cluster,
        tuple(partitions),
        Path(sys.prefix) if prefix is None else prefix,
        headrace.__version__,
        site_file,
    )


def _partition_facts(partition: Partition, nodes: Mapping[str, Node]) -> PartitionFacts:
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


# -- modulefiles ---------------------------------------------------------------------------------------

_SUMMARY = "feeds deep-learning training, and runs it on Slurm"
_HELP = """headrace feeds deep-learning training: every sample, in exact random order, at the storage's speed.

  headrace init NAME          a training project that runs as it is
  swrun, swbatch, swqueue     jobs by GPUs: run, submit, watch
  headrace launch train.py    in a job: ranks on all its nodes, staged, ended without a trace
  headrace starving           whose GPUs wait for data, and why

The Python of this environment comes first in PATH."""


def modulefiles(facts: SiteFacts) -> dict[str, str]:
    """Both files, by their names below a folder of MODULEPATH."""
    return {
        f"headrace/{facts.version}.lua": lua_modulefile(facts),
        f"headrace/{facts.version}": tcl_modulefile(facts),
    }


def lua_modulefile(facts: SiteFacts) -> str:
    """Lmod's."""
    site = ""
    if facts.site_file is not None:
        site = f'setenv("HEADRACE_SITE", {_lua(str(facts.site_file))})\n'
    return f"""-- Generated by `headrace cluster init --module` for {facts.cluster}.
help([==[
{_HELP}
]==])
whatis("Name: headrace")
whatis({_lua(f"Version: {facts.version}")})
whatis({_lua(f"Description: {_SUMMARY}")})
family("headrace")

local root = {_lua(str(facts.prefix))}
prepend_path("PATH", pathJoin(root, "bin"))
setenv("HEADRACE_ROOT", root)
{site}"""


def tcl_modulefile(facts: SiteFacts) -> str:
    """Environment Modules'; Lmod reads it, too."""
    site = ""
    if facts.site_file is not None:
        site = f"setenv HEADRACE_SITE {_tcl(str(facts.site_file))}\n"
    words = "\n".join(f"    puts stderr {_tcl(line)}" for line in _HELP.splitlines())
    return f"""#%Module1.0
# Generated by `headrace cluster init --module` for {facts.cluster}.
proc ModulesHelp {{ }} {{
{words}
}}
module-whatis {_tcl(f"headrace {facts.version}: {_SUMMARY}")}
conflict headrace

set root {_tcl(str(facts.prefix))}
prepend-path PATH $root/bin
setenv HEADRACE_ROOT $root
{site}"""


def _lua(text: str) -> str:
    r"""A string literal: bytes as they are but for `"` and `\`."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _tcl(text: str) -> str:
    """A word in double quotes, in which nothing is substituted."""
    return '"' + "".join(f"\\{c}" if c in '\\"$[]{}' else c for c in text) + '"'


# -- Open OnDemand -------------------------------------------------------------------------------------

_README = """# headrace in Open OnDemand

Generated by `headrace cluster init --ondemand` for the cluster {cluster}, whose file is
`/etc/ood/config/clusters.d/{cluster}.yml` on the portal. Both apps are of the kind "batch connect":

    cp -r headrace_train headrace_jupyter /var/www/ood/apps/sys/

| app | what it does |
|---|---|
| `headrace_train` | runs the batch script of a project (`headrace init`) on the GPUs that are asked for |
| `headrace_jupyter` | JupyterLab on a node, with headrace in its Python; it needs jupyterlab there |

They put `{bin}` first in PATH. Generate them again when partitions or limits change; change what you like.
"""


_NO_LIMIT_HOURS = 168
"""A week, where a partition has no limit: a form wants one."""

_TRAIN_QUESTIONS = {
    "project": {
        "label": "Project",
        "widget": "text_field",
        "required": True,
        "help": "The folder that `headrace init NAME` made, or any with a batch script.",
    },
    "batch_script": {"label": "Batch script", "widget": "text_field", "value": "job.sh", "required": True},
    "script_arguments": {
        "label": "Arguments",
        "widget": "text_field",
        "value": "",
        "required": False,
        "help": "As on the command line: --epochs 90",
    },
}  # fmt: skip

_TRAIN_BEFORE = """# What the page is told; there is nothing to connect to, but the portal wants a port.
export port=$(find_port ${host})
export password="none"
export log_file="${PWD}/train.log"
touch "${log_file}"
"""

# The script's own words are split as a shell would, without running anything in them.
_TRAIN_SCRIPT = """<%%-
  require "shellwords"
  words = Shellwords.split(context.script_arguments.to_s)
-%%>
#!/usr/bin/env bash
# The batch script runs in this job, in its project's folder; its #SBATCH lines were for sbatch.
%(path)s
cd -- <%%= File.expand_path(context.project.to_s.strip).shellescape %%> || exit 1
exec bash ./<%%= context.batch_script.to_s.strip.shellescape %%> <%%= words.shelljoin %%> >>"${log_file}" 2>&1
"""

_TRAIN_VIEW = """<%-
  require "cgi"
  place = log_file.split("/").map { |part| CGI.escape(part).gsub("+", "%20") }.join("/")
-%>
<p>Training on <strong><%= CGI.escapeHTML(host) %></strong>.</p>
<p><a class="btn btn-primary" target="_blank"
  href="/pun/sys/dashboard/files/fs<%= place %>">Show the log</a></p>
<p>A line for each epoch; at its end the job's report: GPU-hours, what they waited for, and a hint.</p>
"""

_JUPYTER_QUESTIONS = {
    "folder": {
        "label": "Folder",
        "widget": "text_field",
        "value": "~",
        "required": True,
        "help": "Where JupyterLab begins.",
    },
}

# The password reaches Jupyter through a file that its owner alone can read: what stands on a command line,
# all users of the node see.
_JUPYTER_BEFORE = """export port=$(find_port ${host})
export password=$(create_passwd 32)
(
  umask 077
  salt=$(create_passwd 16)
  digest=$(printf '%s' "${password}${salt}" | sha256sum | cut -d ' ' -f 1)
  cat > "${PWD}/config.py" <<PY
c.ServerApp.ip = "0.0.0.0"
c.ServerApp.port = ${port}
c.ServerApp.port_retries = 0
c.ServerApp.open_browser = False
c.ServerApp.base_url = "/node/${host}/${port}/"
c.PasswordIdentityProvider.hashed_password = "sha256:${salt}:${digest}"
c.ServerApp.allow_origin = "*"
PY
)
"""

_JUPYTER_SCRIPT = """#!/usr/bin/env bash
%(path)s
config="${PWD}/config.py"
cd -- <%%= File.expand_path(context.folder.to_s.strip).shellescape %%> || exit 1
exec jupyter lab --config="${config}"
"""

_JUPYTER_VIEW = """<form action="/node/<%= host %>/<%= port %>/login" method="post" target="_blank">
  <input type="hidden" name="password" value="<%= password %>">
  <button class="btn btn-primary" type="submit">Open JupyterLab</button>
</form>
"""


def ondemand_files(facts: SiteFacts) -> dict[str, str]:
    """Text of each file of the portal's apps, by its name below the folder of apps."""
    path = _path_lines(facts)
    train = {
        **_form_files(
            facts, "Train (headrace)", "Run a training project on the cluster's GPUs.", _TRAIN_QUESTIONS
        ),
        "submit.yml.erb": _submit_yml(facts, "headrace-train", ["log_file"]),
        "template/before.sh.erb": _TRAIN_BEFORE,
        "template/script.sh.erb": _TRAIN_SCRIPT % {"path": path},
        "view.html.erb": _TRAIN_VIEW,
    }  # fmt: skip
    jupyter = {
        **_form_files(
            facts, "Jupyter (headrace)", "JupyterLab on a node of the cluster.", _JUPYTER_QUESTIONS
        ),
        "submit.yml.erb": _submit_yml(facts, "headrace-jupyter", []),
        "template/before.sh.erb": _JUPYTER_BEFORE,
        "template/script.sh.erb": '<%- require "shellwords" -%>\n' + _JUPYTER_SCRIPT % {"path": path},
        "view.html.erb": _JUPYTER_VIEW,
    }  # fmt: skip
    files = {"README.md": _README.format(cluster=facts.cluster, bin=facts.prefix / "bin")}
    for app, own in (("headrace_train", train), ("headrace_jupyter", jupyter)):
        files |= {f"{app}/{name}": text for name, text in own.items()}
    return files


def _form_files(
    facts: SiteFacts, name: str, description: str, own: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """The portal's menu, and the questions: an app's own, then partition, GPUs, hours and account."""
    first = facts.default_partition
    attributes: dict[str, Mapping[str, Any]] = {
        **own,
        "partition": {
            "label": "Partition", "widget": "select", "value": first.name,
            "options": [[_partition_label(p), p.name] for p in facts.partitions],
        },
        "gpus": {
            "label": "GPUs", "widget": "number_field", "value": min(1, first.gpus_max), "min": 0,
            "max": max(p.gpus_max for p in facts.partitions), "step": 1,
            "help": "In all; nodes and CPUs follow from it. 0: CPUs only.",
        },
        "hours": {
            "label": "Hours", "widget": "number_field", "value": 1, "min": 1,
            "max": max(p.hours_max or _NO_LIMIT_HOURS for p in facts.partitions), "step": 1,
        },
        "account": {
            "label": "Account", "widget": "text_field", "value": "", "required": False,
            "help": "Empty: your default one.",
        },
    }  # fmt: skip
    menu = {
        "name": name, "category": "Interactive Apps", "subcategory": "Machine Learning",
        "role": "batch_connect", "description": description,
    }  # fmt: skip
    form = {"cluster": facts.cluster, "form": list(attributes), "attributes": attributes}
    return {"manifest.yml": _yaml(menu), "form.yml": _yaml(form)}


def _partition_label(partition: PartitionFacts) -> str:
    gpus = f"{partition.gpus_per_node} GPUs a node" if partition.gpus_per_node else "no GPUs"
    limit = f", up to {partition.hours_max} h" if partition.hours_max else ""
    return f"{partition.name} ({partition.nodes} nodes, {gpus}{limit})"


def _submit_yml(facts: SiteFacts, name: str, conn_params: list[str]) -> str:
    """How the answers become a job: as many GPUs on each node, as few nodes as can hold them."""
    each = json.dumps({p.name: p.gpus_per_node for p in facts.partitions}, separators=(",", ":"))
    cpus = json.dumps({p.name: p.cpus_per_node for p in facts.partitions}, separators=(",", ":"))
    return f"""<%-
  require "json"
  gpus_per_node = JSON.parse({_ruby(each)})
  cpus_per_node = JSON.parse({_ruby(cpus)})
  there = gpus_per_node.fetch(partition, 0)
  wanted = there.zero? ? 0 : gpus.to_i
  nodes = wanted.zero? ? 1 : (wanted.to_f / there).ceil
  nodes += 1 until wanted.zero? || (wanted % nodes).zero?
  per_node = wanted / nodes
  share = there.zero? ? 1.0 : [per_node, 1].max / there.to_f
  cpus = [(cpus_per_node.fetch(partition, 1) * [share, 1.0].min).floor, 1].max
-%>
---
batch_connect:
  template: "basic"
  conn_params: {json.dumps(conn_params)}
script:
  job_name: {json.dumps(name)}
  queue_name: <%= partition.to_json %>
  wall_time: <%= hours.to_i * 3600 %>
<%- unless account.to_s.strip.empty? -%>
  accounting_id: <%= account.strip.to_json %>
<%- end -%>
  native:
    - "--nodes=<%= nodes %>"
    - "--ntasks-per-node=<%= [per_node, 1].max %>"
    - "--cpus-per-task=<%= [cpus / [per_node, 1].max, 1].max %>"
<%- unless per_node.zero? -%>
    - "--gpus-per-node=<%= per_node %>"
<%- end -%>
"""


def _path_lines(facts: SiteFacts) -> str:
    """Shell lines that put headrace's environment first."""
    lines = f'export PATH={shlex.quote(str(facts.prefix / "bin"))}:"$PATH"\n'
    if facts.site_file is not None:
        lines += f"export HEADRACE_SITE={shlex.quote(str(facts.site_file))}\n"
    return lines


def _yaml(value: Mapping[str, Any]) -> str:
    """A document: each key's value as JSON on a line of its own."""
    lines = ["---"]
    for key, inner in value.items():
        if isinstance(inner, dict):
            lines.append(f"{key}:")
            lines += [f"  {name}: {json.dumps(one)}" for name, one in inner.items()]
        else:
            lines.append(f"{key}: {json.dumps(inner)}")
    return "\n".join(lines) + "\n"


def _ruby(text: str) -> str:
    r"""A string literal in single quotes, where only `\` and `'` mean something."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

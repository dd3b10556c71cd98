"""Form: what a user of the portal is asked, and how the answers become sbatch's options.

YAML is written as JSON where values come from the cluster: JSON is YAML, and quotes itself. What the user
types is quoted by the portal's ERB when it is used: as JSON in submit.yml, by shellescape in shell scripts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cluster.site_facts import SiteFacts

__all__ = ["form_yml", "manifest_yml", "path_sh", "submit_yml"]

_NO_LIMIT_HOURS = 168
"""A week, where a partition has no limit: a form wants one."""


def manifest_yml(name: str, description: str) -> str:
    """What the portal's menu shows."""
    told = {
        "name": name,
        "category": "Interactive Apps",
        "subcategory": "Machine Learning",
        "role": "batch_connect",
        "description": description,
    }
    return _yaml(told)


def form_yml(facts: SiteFacts, own: Mapping[str, Mapping[str, Any]]) -> str:
    """The questions: an app's own, then partition, GPUs, hours and account.

    Args:
        facts: of the site.
        own: attributes of the app's own questions, by name.
    """
    first = facts.default_partition
    attributes: dict[str, Mapping[str, Any]] = {
        **own,
        "partition": {
            "label": "Partition",
            "widget": "select",
            "value": first.name,
            "options": [[_told(partition), partition.name] for partition in facts.partitions],
        },
        "gpus": {
            "label": "GPUs",
            "widget": "number_field",
            "value": min(1, first.gpus_max),
            "min": 0,
            "max": max(partition.gpus_max for partition in facts.partitions),
            "step": 1,
            "help": "In all; nodes and CPUs follow from it. 0: CPUs only.",
        },
        "hours": {
            "label": "Hours",
            "widget": "number_field",
            "value": 1,
            "min": 1,
            "max": max(p.hours_max or _NO_LIMIT_HOURS for p in facts.partitions),
            "step": 1,
        },
        "account": {
            "label": "Account",
            "widget": "text_field",
            "value": "",
            "required": False,
            "help": "Empty: your default one.",
        },
    }
    return _yaml({"cluster": facts.cluster, "form": list(attributes), "attributes": attributes})


def submit_yml(facts: SiteFacts, name: str, conn_params: list[str]) -> str:
    """How the answers become a job: as many GPUs on each node, as few nodes as can hold them.

    Args:
        facts: of the site.
        name: of the job.
        conn_params: what the job tells the page, beside host, port and password.
    """
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


def path_sh(facts: SiteFacts) -> str:
    """Shell lines that put headrace's environment first."""
    import shlex

    lines = f'export PATH={shlex.quote(str(facts.prefix / "bin"))}:"$PATH"\n'
    if facts.site_file is not None:
        lines += f"export HEADRACE_SITE={shlex.quote(str(facts.site_file))}\n"
    return lines


def _told(partition: Any) -> str:
    gpus = f"{partition.gpus_per_node} GPUs a node" if partition.gpus_per_node else "no GPUs"
    limit = f", up to {partition.hours_max} h" if partition.hours_max else ""
    return f"{partition.name} ({partition.nodes} nodes, {gpus}{limit})"


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

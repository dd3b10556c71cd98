"""The site's file as `headrace cluster init` writes it: what the cluster says, and what each key does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from headrace.cluster.hostlist import compress_hosts
from headrace.cluster.site import KEYS, PARTITION_KEYS, VERSION, Key
from headrace.cluster.time_limit import time_text

if TYPE_CHECKING:
    from headrace.cluster.snapshot import ClusterSnapshot, Node, Partition

__all__ = ["site_text"]

_HEAD = """\
# What is special about this cluster, for `headrace cluster` and `swrun`, `swbatch`, `swqueue`.
# Partitions, nodes, GPUs and limits are asked of Slurm each time; here stands only what it cannot know.
# Keys that begin with # are examples: without them nothing is special.
"""


def site_text(snapshot: ClusterSnapshot) -> str:
    """The whole file."""
    derived = _derived(snapshot)
    lines = [_HEAD, *_facts(snapshot), "", f"version: {VERSION}", ""]
    group = ""
    for key in KEYS[1:]:
        if "." in key.path:
            head, _, name = key.path.partition(".")
            if head != group:
                lines += ["", f"# {head}:"]
                group = head
            lines.append(_example(Key(name, key.read, key.help, key.example), "#   "))
        elif key.path in derived:
            lines += [f"# {key.help}", f"{key.path}: {_scalar(derived[key.path])}"]
        else:
            lines.append(_example(key, "# "))
    lines += ["", "# The same keys for one partition only:", "# partitions:"]
    for partition in snapshot.partitions[:1]:
        lines += [
            f"#   {_scalar(partition.name)}:",
            *(_example(key, "#     ") for key in PARTITION_KEYS),
        ]
    lines += ["", "# Words for --node-type, beside x86, arm and ppc64le:", "# node_types:"]
    lines += ["#   fat:", "#     constraint: bigmem", "#   grace:", "#     partition: gh200", ""]
    return "\n".join(lines)


def _example(key: Key, indent: str) -> str:
    return f"{indent}{key.path}: {key.example}    # {key.help}"


def _scalar(text: str) -> str:
    """As YAML that is a string whatever it looks like."""
    import json

    plain = text.replace("_", "").replace("-", "")
    safe = plain.isalnum() and plain.isascii() and plain[0].isalpha()
    return (
        text
        if safe
        and text.lower() not in ("yes", "no", "on", "off", "true", "false", "null", "y", "n")
        else json.dumps(text)
    )


def _derived(snapshot: ClusterSnapshot) -> dict[str, str]:
    with_gpus = {node.name for node in snapshot.nodes if node.gpus}
    usable = [p for p in snapshot.partitions if p.state == "up"]
    gpu = [p for p in usable if with_gpus.intersection(p.nodes)]
    cpu = [p for p in usable if not with_gpus.intersection(p.nodes)]
    cpu = cpu or [p for p in usable if "cpu" in p.name.lower()]
    found = {"cluster": snapshot.cluster}
    if gpu:
        found["gpu_partition"] = next((p for p in gpu if p.is_default), gpu[0]).name
    if cpu:
        found["cpu_partition"] = cpu[0].name
    return {name: value for name, value in found.items() if value}


def _facts(snapshot: ClusterSnapshot) -> list[str]:
    lines = [
        f"# Cluster {snapshot.cluster or '-'}, Slurm {snapshot.version or '-'}, when this file was written:"
    ]
    for partition in snapshot.partitions:
        lines.append(f"#   {_partition(partition)}")
        inside = set(partition.nodes)
        shapes = Counter(_shape(node) for node in snapshot.nodes if node.name in inside)
        lines += [f"#     {count} x {shape}" for shape, count in shapes.most_common(8)]
    return lines


def _partition(partition: Partition) -> str:
    default = ", the default" if partition.is_default else ""
    names = compress_hosts(partition.nodes)
    shown = names if len(names) <= 60 else f"{names[:60]}..."
    return f"{partition.name}{default}: {shown}, {time_text(partition.max_minutes)} at most"


def _shape(node: Node) -> str:
    gpus = f"{node.gpus} {node.gpu_type or 'GPUs'}, " if node.gpus else ""
    architecture = f", {node.architecture}" if node.architecture else ""
    return f"{gpus}{node.cpus} CPUs, {node.memory_mib / 1024:.0f} GiB{architecture}"

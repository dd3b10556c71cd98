"""Site: what is special about one cluster, in one YAML file. All else comes from Slurm.

Each key is a field, declared once: reading, its errors, and the file that `headrace cluster init` writes come
from that.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.base.text import nearest
from headrace.cluster.notation import compress_hosts, memory_mib, read_minutes, time_text
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headrace.cluster.snapshot import ClusterSnapshot, Node


VERSION: Final = 1


class SiteKey(NamedTuple):
    """One key of the file; `read` makes its value, or raises ValueError."""

    path: str
    read: Callable[[Any], Any]
    help: str
    example: str


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("expected one line of text")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**6:
        raise ValueError("expected a number from 1 to 1,000,000")
    return value


def _time(value: Any) -> int:
    # YAML reads 24:00:00 as a number in base 60, so a number alone cannot be told from a time.
    if not isinstance(value, str):
        raise ValueError('expected a time in quotes, as "24:00:00" or "4h"')  # noqa: TRY004 - one kind of wrong
    minutes = read_minutes(value)  # its error is a ValueError
    if not minutes:
        raise ValueError("expected a time of at least a minute; leave the key out for no limit")
    return minutes


def _memory(value: Any) -> int:
    size = memory_mib(str(value)) if isinstance(value, (str, int)) else 0
    if size < 1:
        raise ValueError("expected a size as 64G")
    return size


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("expected a list, as [a, b]")  # noqa: TRY004 - one kind of wrong
    return tuple(_text(v) for v in value)


def _runtime(value: Any) -> str:
    if value not in ("apptainer", "pyxis", "enroot"):
        raise ValueError("expected apptainer, pyxis or enroot")
    return str(value)


def _version(value: Any) -> int:
    if value != VERSION:
        raise ValueError(f"expected {VERSION}; a newer headrace may have written it")
    return VERSION


def _key(read: Callable[[Any], Any], text: str, example: str, default: Any = "") -> Any:
    """A field that is a key of the file."""
    return field(default=default, metadata={"read": read, "help": text, "example": example})


@dataclass(frozen=True, slots=True)
class PartitionSite:
    """What holds in one partition, or in all; times in minutes, memory in MiB."""

    # fmt: off
    cpus_per_gpu: int | None = _key(_count, "CPUs per GPU where nobody says otherwise.", "16", None)
    cpus_per_gpu_max: int | None = _key(_count, "More per GPU are refused.", "40", None)
    memory_per_gpu: int | None = _key(_memory, "Memory per GPU where nobody says otherwise.", "60G", None)
    time: int | None = _key(_time, "Time limit where nobody says otherwise.", '"4:00:00"', None)
    time_max: int | None = _key(_time, "Longer limits are cut to it, with a warning.", '"24:00:00"', None)
    # fmt: on

    def over(self, other: PartitionSite) -> PartitionSite:
        """What this one says, and where it says nothing, the other."""
        given = {n: value for n in self.__slots__ if (value := getattr(self, n)) is not None}
        return replace(other, **given)


@dataclass(frozen=True, slots=True)
class NodeType:
    """What a site's word for a kind of nodes stands for: a constraint, or a partition."""

    constraint: str = _key(_text, "Features, as --constraint takes them.", "arm")
    partition: str = _key(_text, "The partition of such nodes.", "arm")


@dataclass(frozen=True, slots=True)
class Site:
    """A site's file, read; without one, nothing is special. `containers_runtime` is `containers.runtime`."""

    path: Path | None = None
    # fmt: off
    cluster: str = _key(_text, "The file is for this cluster; a remark says so on another.", "hal")
    gpu_partition: str = _key(_text, "Where jobs with GPUs go that name no partition.", "gpu")
    cpu_partition: str = _key(_text, "Where jobs without GPUs go that name no partition.", "cpu")
    short_partition: str = _key(_text, "Where jobs with GPUs go that are short enough.", "debug")
    short_time: int | None = _key(_time, "How long those are at most.", '"4:00:00"', None)
    everywhere: PartitionSite = PartitionSite()
    partitions: Mapping[str, PartitionSite] = field(default_factory=dict)
    node_types: Mapping[str, NodeType] = field(default_factory=dict)
    gpus_max: int | None = _key(_count, "More GPUs in one job are refused.", "64", None)
    mini_cpus: int = _key(_count, "CPUs of cpu_mini.", "8", 8)
    account: str = _key(_text, "Charged where nobody says otherwise.", "abc-123")
    qos: str = _key(_text, "Quality of service where nobody says otherwise.", "normal")
    containers_runtime: str = _key(_runtime, "apptainer, pyxis (enroot inside srun) or enroot.", "apptainer")
    containers_registry: str = _key(_text,
        "Folder of images by name; CONTAINER_REGISTRY variables win.", "/opt/images")
    containers_mounts: tuple[str, ...] = _key(_texts,
        "Host folders that containers see, HOST[:INSIDE[:ro]].", "[/data, /scratch]", ())
    modules_setup: tuple[str, ...] = _key(_texts,
        "Files to source before `module` works.", "[/etc/profile.d/modules.sh]", ())
    modules_load: tuple[str, ...] = _key(_texts, "Loaded in every job that loads any.", "[slurm]", ())
    conda_setup: str = _key(_text,
        "The file conda.sh, sourced before `conda activate`.", "/opt/conda/etc/profile.d/conda.sh")
    # fmt: on

    def of(self, partition: str) -> PartitionSite:
        """What holds in a partition."""
        return self.partitions.get(partition, PartitionSite()).over(self.everywhere)


_GROUPS: Final = ("containers", "modules", "conda")


def _keys(kind: type[PartitionSite | NodeType | Site]) -> Iterator[SiteKey]:
    for each in fields(kind):
        group, _, rest = each.name.partition("_")
        if each.name == "everywhere":
            yield from PARTITION_KEYS
        elif each.metadata:
            yield SiteKey(f"{group}.{rest}" if group in _GROUPS else each.name, **each.metadata)


PARTITION_KEYS: Final = tuple(_keys(PartitionSite))
"""Of all partitions at the top, and of one below `partitions.NAME`."""

KEYS: Final = (SiteKey("version", _version, "Of this file's format.", "1"), *_keys(Site))


def find_site(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file that holds here: HEADRACE_SITE, the user's, the machine's; None if there is none."""
    if named := environment.get("HEADRACE_SITE"):
        return Path(named)
    places = (own_site(environment), Path("/etc/headrace/site.yaml"))
    return next((place for place in places if place.is_file()), None)


def own_site(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the user's own file lies, or would."""
    home = Path(environment.get("HOME", "/nonexistent"))
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config", "headrace/site.yaml")


def read_site(path: Path | None) -> Site:
    """A site's file; None: nothing is special."""
    if path is None:
        return Site()
    import yaml

    try:
        return _site(yaml.safe_load(path.read_text(encoding="utf-8")), path)
    except OSError as e:
        raise ClusterRequestError(f"{path}: {e.strerror}.", path=str(path)) from e
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        at = getattr(e, "problem_mark", None)
        where = f", line {at.line + 1}" if at is not None else ""
        why = getattr(e, "problem", None) or "it is no YAML"
        raise ClusterRequestError(f"{path}{where}: {why}.", path=str(path)) from e
    except ValueError as e:
        raise ClusterRequestError(f"{path}: {e}", path=str(path)) from None


def _site(data: Any, path: Path) -> Site:
    tree = _mapping(data or {}, "the file")
    kinds: dict[str, tuple[type, tuple[SiteKey, ...]]] = {
        "partitions": (PartitionSite, PARTITION_KEYS), "node_types": (NodeType, tuple(_keys(NodeType))),
    }  # fmt: skip
    named: dict[str, Any] = {
        group: {
            str(name): kind(**_read(_mapping(inner, f"{group}.{name}"), keys, f"{group}.{name}."))
            for name, inner in _mapping(tree.pop(group, None), group).items()
        }
        for group, (kind, keys) in kinds.items()
    }
    for group in _GROUPS:  # one level deeper
        inner = _mapping(tree.pop(group, None), group)
        tree |= {f"{group}.{name}": value for name, value in inner.items()}
    values = _read(tree, KEYS, "")
    values.pop("version", None)
    everywhere = {key.path: values.pop(key.path) for key in PARTITION_KEYS if key.path in values}
    own = {name.replace(".", "_"): value for name, value in values.items()}
    return Site(path=path, everywhere=PartitionSite(**everywhere), **named, **own)


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict | None):
        raise ValueError(f"{where} is {type(value).__name__}, expected keys and values.")  # noqa: TRY004 - one kind
    return dict(value or {})


def _read(tree: dict[Any, Any], keys: tuple[SiteKey, ...], prefix: str) -> dict[str, Any]:
    """The values of a level, by their keys' paths; `prefix` is where it stands."""
    known = {key.path: key for key in keys}
    values: dict[str, Any] = {}
    for name, value in ((str(name), value) for name, value in tree.items()):
        if name not in known:
            more = () if prefix else ("partitions", "node_types", *_GROUPS)
            close = nearest(name, [*known, *more])
            hint = f"did you mean {prefix}{close}?" if close else f"expected {', '.join(known)}"
            raise ValueError(f"{prefix}{name} is no key; {hint}")
        try:
            values[name] = known[name].read(value)
        except ValueError as e:
            raise ValueError(f"{prefix}{name} is {value!r}: {e}.") from None
    return values


# -- the file that `headrace cluster init` writes ------------------------------------------------------

_HEAD = """\
# What is special about this cluster, for `headrace cluster` and `swrun`, `swbatch`, `swqueue`.
# Partitions, nodes, GPUs and limits are asked of Slurm each time; here stands only what it cannot know.
# Keys that begin with # are examples: without them nothing is special.
"""


def site_text(snapshot: ClusterSnapshot) -> str:
    """The whole file."""
    derived = _derived(snapshot)
    lines = [_HEAD, *_fact_lines(snapshot), "", f"version: {VERSION}", ""]
    group = ""
    for key in KEYS[1:]:
        if "." in key.path:
            head, _, name = key.path.partition(".")
            if head != group:
                lines += ["", f"# {head}:"]
                group = head
            lines.append(_example(SiteKey(name, key.read, key.help, key.example), "#   "))
        elif key.path in derived:
            lines += [f"# {key.help}", f"{key.path}: {_scalar(derived[key.path])}"]
        else:
            lines.append(_example(key, "# "))
    lines += ["", "# The same keys for one partition only:", "# partitions:"]
    for partition in snapshot.partitions[:1]:
        lines.append(f"#   {_scalar(partition.name)}:")
        lines += [_example(key, "#     ") for key in PARTITION_KEYS]
    lines += ["", "# Words for --node-type, beside x86, arm and ppc64le:", "# node_types:"]
    lines += ["#   fat:", "#     constraint: bigmem", "#   grace:", "#     partition: gh200", ""]
    return "\n".join(lines)


def _example(key: SiteKey, indent: str) -> str:
    return f"{indent}{key.path}: {key.example}    # {key.help}"


def _scalar(text: str) -> str:
    """As YAML that is a string whatever it looks like."""
    import yaml

    return yaml.safe_dump(text, width=1 << 20).partition("\n")[0]


def _derived(snapshot: ClusterSnapshot) -> dict[str, str]:
    with_gpus = {node.name for node in snapshot.nodes if node.gpus}
    usable = [p for p in snapshot.partitions if p.state == "up"]
    gpu = [p for p in usable if with_gpus.intersection(p.nodes)]
    gpu.sort(key=lambda p: not p.is_default)
    cpu = [p for p in usable if not with_gpus.intersection(p.nodes)]
    cpu = cpu or [p for p in usable if "cpu" in p.name.lower()]
    named = {"gpu_partition": gpu, "cpu_partition": cpu}
    derived = {"cluster": snapshot.cluster} if snapshot.cluster else {}
    return derived | {key: fitting[0].name for key, fitting in named.items() if fitting}


def _fact_lines(snapshot: ClusterSnapshot) -> list[str]:
    cluster, version = snapshot.cluster or "-", snapshot.version or "-"
    lines = [f"# Cluster {cluster}, Slurm {version}, when this file was written:"]
    for partition in snapshot.partitions:
        default = ", the default" if partition.is_default else ""
        names = compress_hosts(partition.nodes)
        shown = names if len(names) <= 60 else f"{names[:60]}..."
        limit = time_text(partition.max_minutes)
        lines.append(f"#   {partition.name}{default}: {shown}, {limit} at most")
        inside = set(partition.nodes)
        shapes = Counter(_shape(node) for node in snapshot.nodes if node.name in inside)
        lines += [f"#     {count} x {shape}" for shape, count in shapes.most_common(8)]
    return lines


def _shape(node: Node) -> str:
    gpus = f"{node.gpus} {node.gpu_type or 'GPUs'}, " if node.gpus else ""
    architecture = f", {node.architecture}" if node.architecture else ""
    return f"{gpus}{node.cpus} CPUs, {node.memory_mib / 1024:.0f} GiB{architecture}"

"""Layout: a request becomes nodes, tasks, CPUs and memory, from what the cluster has.

A pure function of request, snapshot and site. GPUs go to as few nodes as can hold them, evenly where that comes
out even; CPUs and memory are each GPU's share of its node unless said otherwise. What cannot be is refused with
the reason and the nearest request that can be.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.base.text import nearest
from headrace.cluster.notation import read_minutes, slurm_time, time_text
from headrace.cluster.request import Shorthand, apply_shorthand, read_shorthand
from headrace.cluster.script import Word
from headrace.cluster.snapshot import is_away
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.cluster.request import JobRequest
    from headrace.cluster.site import Site
    from headrace.cluster.snapshot import ClusterSnapshot, Node, Partition


# -- which nodes, and how GPUs lie on them -------------------------------------------------------------

ARCHITECTURES: Final = {
    "x86": "x86_64", "x86_64": "x86_64", "amd64": "x86_64", "arm": "aarch64", "arm64": "aarch64",
    "aarch64": "aarch64", "ppc64le": "ppc64le", "power": "ppc64le",
}  # fmt: skip
"""HAL's words for kinds of nodes, and others', as nodes report them."""

_FEATURES = re.compile(r"[\w.+-]+(?:[&,][\w.+-]+)*", re.ASCII)


class _Fit(NamedTuple):
    """How a job lies on nodes.

    Attributes:
        gpus_per_node: on each; where `even` is false, at most.
        even: all nodes have as many.
        nodes: all that could be taken, `size` or more.
    """

    size: int
    gpus_per_node: int
    even: bool
    gpu_type: str
    nodes: tuple[Node, ...]


def _eligible(nodes: Sequence[Node], request: JobRequest, site: Site) -> list[Node]:
    """The nodes that have what is asked for, apart from sizes."""
    able = [node for node in nodes if "future" not in node.states]
    if request.gpu_type:
        able = [n for n in able if n.gpu_type.lower() == request.gpu_type.lower()]
    features = request.constraint
    if request.node_type in site.node_types:
        features = ",".join(filter(None, (features, site.node_types[request.node_type].constraint)))
    elif request.node_type:
        kind = ARCHITECTURES.get(request.node_type.lower(), "?")
        able = [n for n in able if n.architecture == kind or request.node_type in n.features]
    if _FEATURES.fullmatch(features):
        # Anything else ("[a|b]", "a*2") is for Slurm to judge.
        wanted = set(re.split("[&,]", features))
        able = [n for n in able if wanted <= set(n.features)]
    return able


def _fit_gpus(
    nodes: Sequence[Node], gpus: int, count: int | None = None, count_max: int | None = None
) -> _Fit | None:
    """GPUs on as few nodes as can hold them, or on `count`; None: there are not so many.

    Where nodes have GPUs of several types, one is chosen: the one that needs the fewest nodes, and of these
    the one of which most nodes are free.
    """
    fits: list[tuple[tuple[int, int], _Fit]] = []
    for gpu_type in sorted({node.gpu_type for node in nodes if node.gpus}):
        same = [node for node in nodes if node.gpus and node.gpu_type == gpu_type]
        sizes = sorted(node.gpus for node in same)
        most = min(gpus, len(same), count_max or gpus)
        for k in [count] if count else range(-(-gpus // sizes[-1]), most + 1):
            per_node = -(-gpus // k)
            if k > most or len(sizes) - bisect_left(sizes, per_node) < k:
                continue
            able = tuple(n for n in same if n.gpus >= per_node)
            free = sum(not n.gpus_allocated and not is_away(n) for n in able)
            fits.append(((k, -free), _Fit(k, per_node, gpus % k == 0, gpu_type, able)))
            break
    return min(fits, key=itemgetter(0))[1] if fits else None


def _most_gpus(nodes: Sequence[Node], below: int, count: int | None, count_max: int | None) -> int:
    """The most GPUs, fewer than `below`, that one job can have; 0: none."""
    limit, sizes = count or count_max or len(nodes), defaultdict[str, list[int]](list)
    for node in nodes:
        sizes[node.gpu_type].append(node.gpus)
    tops = [sum(sorted(same, reverse=True)[:limit]) for same in sizes.values()]
    top = max(tops, default=0)
    sizes_down = range(min(top, below - 1), 0, -1)
    return next((g for g in sizes_down if _fit_gpus(nodes, g, count, count_max)), 0)


# -- which partition, and for how long -----------------------------------------------------------------


def candidates(
    request: JobRequest, snapshot: ClusterSnapshot, site: Site, *, minutes: int | None
) -> list[Partition]:
    """Partitions to try, the first one first: the named one, or the site's, the default, and the others."""
    known = {partition.name: partition for partition in snapshot.partitions}
    if not known:
        raise ClusterRequestError(f"the cluster {snapshot.cluster} has no partitions.")
    if request.partition:
        # A list is Slurm's: the job goes where it can start first.
        return [_named(known, name) for name in request.partition.split(",") if name]
    kind = site.node_types.get(request.node_type)
    if kind is not None and kind.partition:
        return [_named(known, kind.partition)]
    first = [site.gpu_partition] if request.gpus else [site.cpu_partition]
    is_short = minutes and minutes <= (site.short_time or minutes)
    if request.gpus and site.short_partition and is_short:
        first.insert(0, site.short_partition)
    names = [_named(known, name).name for name in first if name]
    open_ones = [p for p in snapshot.partitions if p.state == "up"]
    with_gpus = {node.name for node in snapshot.nodes if node.gpus}
    if not request.gpus:
        names += [p.name for p in open_ones if not with_gpus.intersection(p.nodes)]
    names += [p.name for p in open_ones if p.is_default]
    names += [p.name for p in open_ones]
    if not names:
        raise ClusterRequestError(f"no partition of {snapshot.cluster} is up.")
    return [known[name] for name in dict.fromkeys(names)]


def _named(known: dict[str, Partition], name: str) -> Partition:
    if (partition := known.get(name)) is None:
        hint = f"Did you mean {close}? " if (close := nearest(name, known)) else ""
        raise ClusterRequestError(
            f"there is no partition {name!r}.",
            next_step=f"{hint}There are: {', '.join(sorted(known))}; and gpuxN, cpunN, cpu_mini.",
        )
    if partition.state in ("drain", "inactive"):
        raise ClusterRequestError(
            f"partition {name} is {partition.state}: it takes no jobs now.",
            next_step="Name another one, or try again later.",
        )
    return partition


def time_limit(
    partition: Partition, asked: str, site: Site, remarks: list[str], *, bare_hours: bool
) -> tuple[str, bool]:
    """The limit as Slurm writes it ("": the partition's default), and whether it was cut; remarks say why.

    With `bare_hours` a number alone is hours, and zero the default, as HAL has it.
    """
    special = site.of(partition.name)
    limits = [limit for limit in (partition.max_minutes, special.time_max) if limit is not None]
    most = min(limits, default=None)
    minutes = special.time
    if not asked and minutes is None:
        return "", False
    if asked:
        minutes = read_minutes(asked, bare_hours=bare_hours)
        if asked.isdigit() and minutes:
            unit = "minutes, as sbatch counts"
            if bare_hours:
                unit = "hours, as HAL counts beside its short words; sbatch counts minutes"
            remarks.append(f"time {asked} is {time_text(minutes)}: {unit}.")
        if minutes == 0 and bare_hours:
            remarks.append("time 0: the default is taken.")
            return (slurm_time(special.time) if special.time else ""), False
        minutes = minutes or None
    if most is not None and (minutes is None or minutes > most):
        if asked:
            remarks.append(
                f"time {time_text(minutes)} is cut to {time_text(most)}, "
                f"the most in partition {partition.name}."
            )
        return slurm_time(most), bool(asked)
    return slurm_time(minutes), False


# -- the layout ----------------------------------------------------------------------------------------

_MEMORY_SHARE: Final = 0.95
"""Of a node's memory is shared out: sites keep some for the system, which a snapshot does not show."""

_NEARLY: Final = 1 << 30
"""How near a refusal comes whose GPUs and nodes are there."""

_MEMORY_LEAST_MIB: Final = 512
"""Less is no fact: nodes whose memory nobody configured have 1 MiB for Slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayout:
    """What Slurm is asked for.

    Attributes:
        partition: by name; "" leaves it to Slurm.
        tasks_per_node: None where GPUs are not the same number on each node.
        cpus_per_task: None leaves it to Slurm.
        gpus_per_node: None where they are not the same number on each node.
        gpu_type: where it must be said; else "".
        memory_per_node, memory_per_gpu: in MiB; one of them, or none: Slurm's default.
        time: the limit as Slurm writes it; "" for the partition's default.
        exclude: nodes of another kind.
        remarks: what was decided that the user may want to know.
    """

    partition: str
    nodes: int
    tasks: int
    tasks_per_node: int | None = 1
    cpus_per_task: int | None = None
    gpus: int = 0
    gpus_per_node: int | None = 0
    gpu_type: str = ""
    memory_per_node: int | None = None
    memory_per_gpu: int | None = None
    time: str = ""
    constraint: str = ""
    exclude: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def words(self) -> list[Word]:
        """As options of `sbatch`, sizes first."""
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        options: list[tuple[str, object]] = [("partition", self.partition), ("nodes", self.nodes)]
        if self.tasks_per_node is None:
            options += [("ntasks", self.tasks), ("gpus-per-task", f"{kind}1")]
        else:
            options += [("ntasks-per-node", self.tasks_per_node)]
            # --gres works with every select plugin, --gpus-per-node with cons_tres only.
            options += [("gres", f"gpu:{kind}{self.gpus_per_node}" if self.gpus else "")]
        options += [("cpus-per-task", self.cpus_per_task)]
        if self.memory_per_node is not None:
            options += [("mem", f"{self.memory_per_node}M" if self.memory_per_node else "0")]
        elif self.memory_per_gpu is not None:
            options += [("mem-per-gpu", f"{self.memory_per_gpu}M")]
        options += [("time", self.time)]
        return [Word(name, str(value)) for name, value in options if value not in (None, "")]


def lay_out(request: JobRequest, snapshot: ClusterSnapshot, site: Site) -> JobLayout:
    """The layout of a request; a bare number as time is hours beside one of HAL's short words, else minutes.

    Raises:
        ClusterRequestError: nothing of the cluster can meet it.
    """
    names = [p.name for p in snapshot.partitions]
    short = read_shorthand(request.partition, names) if request.partition else None
    remarks: list[str] = []
    if short is not None:
        request, remarks = apply_shorthand(request, short)
    if request.gpus is not None and site.gpus_max is not None and request.gpus > site.gpus_max:
        raise ClusterRequestError(
            f"{request.gpus} GPUs are more than {site.path} allows in one job, {site.gpus_max}.",
            next_step=f"Ask for --gpus {site.gpus_max} or fewer.",
        )
    nodes = {node.name: node for node in snapshot.nodes}
    hours = short is not None
    minutes = read_minutes(request.time, bare_hours=hours) if request.time else None
    refusals: list[_Refusal] = []
    capped: list[JobLayout] = []
    for partition in candidates(request, snapshot, site, minutes=minutes):
        everything = [nodes[n] for n in partition.nodes if n in nodes]
        try:
            inside = _Inside(partition, everything, request, site)
            layout, is_capped = inside.layout(short, hours=hours)
        except _Refusal as e:
            refusals.append(e)
            continue
        layout = dataclasses.replace(layout, remarks=(*remarks, *layout.remarks))
        if not is_capped or request.partition:
            return layout
        capped.append(layout)
    if capped:
        return capped[0]
    nearest = max(refusals, key=lambda e: e.near)
    more = f" None of {len(refusals)} partitions can take it." if len(refusals) > 1 else ""
    raise ClusterRequestError(nearest.message + more, next_step=nearest.next_step)


class _Refusal(ClusterRequestError):
    """Why one partition cannot take a request, and how near it comes (0: not at all); another may."""

    def __init__(self, message: str, *, near: int, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.near = near


class _Inside:
    """One request, tried on the nodes of one partition."""

    def __init__(
        self, partition: Partition, everything: list[Node], request: JobRequest, site: Site
    ) -> None:
        self.partition = partition
        self.everything = everything
        self.request = request
        self.site = site
        self.special = site.of(partition.name)
        self.able = _eligible(everything, request, site)
        self.remarks: list[str] = []
        self.fit = self._fit()

    def layout(self, short: Shorthand | None, *, hours: bool) -> tuple[JobLayout, bool]:
        """The layout, and whether its time limit was cut; `hours`: a number alone is a limit in hours."""
        request, fit = self.request, self.fit
        time, capped = time_limit(
            self.partition, request.time, self.site, self.remarks, bare_hours=hours
        )
        sizes = self._with_gpus() if request.gpus else self._without_gpus(short)
        up = sum(not is_away(node) for node in fit.nodes)
        if up < fit.size:
            self.remarks.append(
                f"{up} of the {len(fit.nodes)} nodes that could take it are up, it needs {fit.size}: "
                "it waits for the others."
            )
        # A type is said where it is asked for, or where Slurm could take others too.
        types = {node.gpu_type for node in self.everything if node.gpus}
        is_said = fit.gpus_per_node and (request.gpu_type or len(types) > 1)
        constraint, exclude = self._kind_of_node()
        layout = JobLayout(
            partition=self.partition.name, nodes=fit.size, gpus=request.gpus or 0,
            gpu_type=fit.gpu_type if is_said else "", time=time, constraint=constraint, exclude=exclude,
            remarks=tuple(self.remarks), **sizes,
        )  # fmt: skip
        return layout, capped

    def _refusal(self, text: str, next_step: str | None, near: int = _NEARLY) -> _Refusal:
        return _Refusal(f"partition {self.partition.name}: {text}", near=near, next_step=next_step)

    # -- nodes -------------------------------------------------------------------------------------

    def _fit(self) -> _Fit:
        gpus, count, most = self.request.gpus, self.request.nodes, self.partition.max_nodes
        if not self.able:
            raise self._nothing_eligible()
        if gpus is None:
            size, can = count or 1, min(len(self.able), most or len(self.able))
            if size > can:
                raise self._refusal(
                    f"{count} nodes are asked for, a job can have {can}.",
                    f"The nearest that can be: --nodes {can}.", can,
                )  # fmt: skip
            # Those without GPUs, where there are enough of them.
            plain = [node for node in self.able if not node.gpus]
            return _Fit(size, 0, True, "", tuple(plain if len(plain) >= size else self.able))
        if count is not None and count > gpus:
            raise self._refusal(
                f"{gpus} GPUs cannot lie on {count} nodes.",
                f"Ask for --nodes {gpus} or fewer, or leave --nodes out.",
            )
        if (fit := _fit_gpus(self.able, gpus, count, most)) is None:
            raise self._too_many_gpus(gpus, count, most)
        return fit

    def _nothing_eligible(self) -> _Refusal:
        request, everything = self.request, self.everything
        asked = (
            (request.gpu_type, "GPUs of type", {n.gpu_type or "without a type" for n in everything if n.gpus}),
            (request.constraint, "the features", {name for n in everything for name in n.features}),
            (request.node_type, "type", {n.architecture or "not known" for n in everything}),
        )  # fmt: skip
        wanted = [f"{kind} {value}" for value, kind, _ in asked if value]
        present = next((there for value, _, there in asked if value), set())
        has = f"; found: {', '.join(sorted(present)[:8])}" if present else ""
        return self._refusal(f"no node has {' and '.join(wanted) or 'anything'}{has}.", None, 0)

    def _too_many_gpus(self, gpus: int, count: int | None, most: int | None) -> _Refusal:
        nearest = _most_gpus(self.able, gpus, count, most)
        if not nearest:
            return self._refusal("its nodes have no GPUs.", "Name another partition.", 0)
        biggest = max(node.gpus for node in self.able)
        having = sum(node.gpus > 0 for node in self.able)
        on = f" on {count} node{'s' * (count > 1)}" if count else ""
        limit = f", at most {most} of them in a job" if most and most < having else ""
        kind = f" of type {self.request.gpu_type}" if self.request.gpu_type else ""
        other = ""
        if count and (free := _fit_gpus(self.able, gpus, None, most)) is not None:
            other = f", or --gpus {gpus} on --nodes {free.size}"
        return self._refusal(
            f"{gpus} GPUs{kind}{on} are asked for; "
            f"it has {having} nodes with GPUs, up to {biggest} each{limit}.",
            f"The nearest that can be: --gpus {nearest}{other}.", nearest,
        )  # fmt: skip

    def _kind_of_node(self) -> tuple[str, tuple[str, ...]]:
        """The constraint that says it, or the nodes to leave out."""
        kind = self.request.node_type
        if not kind:
            return "", ()
        if own := self.site.node_types.get(kind):
            return own.constraint, ()
        if all(kind in node.features for node in self.able):
            return kind, ()
        # Slurm knows no constraint on the architecture: the others are left out by name.
        able = {node.name for node in self.able}
        return "", tuple(node.name for node in self.everything if node.name not in able)

    # -- CPUs and memory ---------------------------------------------------------------------------

    def _least(self, amount: Callable[[Node], int]) -> int:
        """What each of as many nodes as are needed has, at least."""
        return sorted(map(amount, self.fit.nodes), reverse=True)[self.fit.size - 1]

    def _with_gpus(self) -> dict[str, Any]:
        request, fit = self.request, self.fit
        gpus, tasks, per_gpu = request.gpus or 0, request.tasks_per_node, self._cpus_per_gpu()
        if not fit.even:
            fewer = gpus - gpus % fit.size
            if tasks is not None:
                raise self._refusal(
                    f"{gpus} GPUs are not the same number on each of {fit.size} nodes, "
                    f"--tasks-per-node {tasks} cannot be.",
                    f"Ask for --gpus {fewer}, or leave --tasks-per-node out.",
                )
            self.remarks.append(
                f"{gpus} GPUs on {fit.size} nodes: not the same number on each; "
                f"{fewer} or {fewer + fit.size} would be."
            )
        memory = self._memory_per_gpu(per_gpu)
        on_node = memory and memory * fit.gpus_per_node
        share = on_node if fit.even else None
        return {
            "tasks": gpus if tasks is None else tasks * fit.size,
            "tasks_per_node": tasks or fit.gpus_per_node if fit.even else None,
            "gpus_per_node": fit.gpus_per_node if fit.even else None,
            "cpus_per_task": max(1, per_gpu * fit.gpus_per_node // tasks) if tasks else per_gpu,
            "memory_per_node": share if request.memory is None else request.memory, "memory_per_gpu": memory,
        }  # fmt: skip

    def _cpus_per_gpu(self) -> int:
        asked, fit = self.request.cpus_per_gpu, self.fit
        can = self._least(lambda node: node.cpus // fit.gpus_per_node)
        fair = max(1, min(_cpu_share(node) for node in fit.nodes))
        most = min(can, self.special.cpus_per_gpu_max or can)
        if can < 1:
            raise self._refusal(
                f"nodes have fewer CPUs than the {fit.gpus_per_node} GPUs asked for on each.",
                "Ask for fewer GPUs a node with --nodes.",
            )
        if asked is None:
            return min(self.special.cpus_per_gpu or fair, most)
        if asked > most:
            why = f"{fit.gpus_per_node} GPUs on a node leave {most} for each"
            if most < can:
                why = f"its site allows {most}"
            raise self._refusal(
                f"{asked} CPUs per GPU are asked for, {why}.",
                f"The nearest that can be: --cpus-per-gpu {most}.",
            )
        spare = min(n.gpus for n in fit.nodes) - fit.gpus_per_node
        if asked > fair and spare > 0:
            self.remarks.append(
                f"{asked} CPUs per GPU are more than a GPU's share, {fair}: "
                f"other GPUs of the node may have none left."
            )
        return asked

    def _check_memory(self, asked: int, can: int, what: str, flag: str) -> None:
        if asked > can >= _MEMORY_LEAST_MIB:
            raise self._refusal(
                f"{asked:,} MiB per {what} are asked for, there are {can:,}.",
                f"The nearest that can be: {flag} {can}M.",
            )

    def _memory_per_gpu(self, cpus: int) -> int | None:
        request, fit = self.request, self.fit
        if request.memory is not None:
            can = self._least(lambda node: node.memory_mib)
            self._check_memory(request.memory, can, "node", "--memory")
            return None
        can = self._least(lambda node: node.memory_mib // fit.gpus_per_node)
        if request.memory_per_gpu is not None:
            self._check_memory(request.memory_per_gpu, can, "GPU", "--memory-per-gpu")
            return request.memory_per_gpu
        if min(node.memory_mib for node in fit.nodes) < _MEMORY_LEAST_MIB:
            return self.special.memory_per_gpu
        share = min(int(node.memory_mib * _MEMORY_SHARE) // node.gpus for node in fit.nodes)
        limit = self.partition.max_memory_per_cpu_mib
        return min(self.special.memory_per_gpu or share, can, limit * cpus if limit else can)

    def _without_gpus(self, short: Shorthand | None) -> dict[str, Any]:
        request, fit = self.request, self.fit
        tasks, cpus, memory = request.tasks_per_node or 1, request.cpus, request.memory
        can = self._least(lambda node: node.cpus)
        if short is not None and cpus is None:
            cpus = max(1, (min(self.site.mini_cpus, can) if short.mini else can) // tasks)
        if cpus is not None and cpus * tasks > can:
            raise self._refusal(
                f"{cpus * tasks} CPUs a node are asked for, {fit.size} of its nodes have {can}.",
                f"The nearest that can be: --cpus {max(1, can // tasks)}.",
            )
        most = self._least(lambda node: node.memory_mib)
        if memory is not None:
            self._check_memory(memory, most, "node", "--memory")
        elif short is not None and cpus is not None and most >= _MEMORY_LEAST_MIB:
            memory = int(most * _MEMORY_SHARE) * cpus * tasks // can
            if limit := self.partition.max_memory_per_cpu_mib:
                memory = min(memory, limit * cpus * tasks)
        return {
            "tasks": tasks * fit.size, "tasks_per_node": tasks, "cpus_per_task": cpus,
            "memory_per_node": memory,
        }  # fmt: skip


def _cpu_share(node: Node) -> int:
    """Of one GPU, in whole cores: Slurm gives no less."""
    share, threads = node.cpus // node.gpus, max(1, node.threads_per_core)
    return share // threads * threads or share

"""Plan: which nodes run how many ranks on which GPUs; by which commands and variables ranks find each other.

Plain functions of what is asked and what the job has: `headrace launch --dry-run` prints what they return.
Each variable has its reason, and what the user has set stays as it is.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from headrace.cluster.launch import rank_start
from headrace.cluster.launch.place import JobPlace  # noqa: TC001 - of what nodes are told, as JSON
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# -- what was asked ------------------------------------------------------------------------------------

Framework = Literal["torch", "tensorflow", "jax", "mpi", "plain"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)


def _option(default: Any, text: str, flag: str = "", **shown: Any) -> Any:
    """A field with its flag of `headrace launch` (by default its name), its help and typer's settings."""
    return field(default=default, metadata={"flag": flag, "help": text, **shown})


_SECONDS: Final = {"metavar": "SECONDS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How a program is launched. `headrace launch` takes its options and their help from here.

    With TensorFlow and JAX a node has one rank by default: their processes drive several GPUs each.
    """

    # fmt: off
    nodes: tuple[int, int] | None = _option(None,
        "Go on with MIN nodes when others are lost.", show_default="requeue", metavar="MIN-MAX")
    gpus: int | None = _option(None, "GPUs in all.", show_default="all that the job has", min=1)
    framework: Framework = _option("torch",  # noqa: RUF009 - a field
        "What the ranks expect: torch, tensorflow, jax, mpi, plain.", metavar="NAME")
    ranks_per_node: int | None = _option(None,
        "Processes per node.", show_default="one per GPU, or the job's tasks", min=1)
    stage: tuple[str, ...] = _option((), "Copy this onto the nodes' disks: headrace://job.", metavar="SRC")
    local: str | None = _option(None,
        "Folder on the local disks.", show_default="Slurm's for the job, TMPDIR, /tmp", metavar="DIR")
    meet: str | None = _option(None, "Seen by all nodes.", show_default="the current one", metavar="DIR")
    replicas: int = _option(1, "Nodes that hold each staged sample.", min=1, max=2)
    daemon: bool = _option(True, "A node daemon on each node.")
    agent: bool = _option(True, "The telemetry agent on each node.")
    stop_before_s: float = _option(120.0, "Save and leave so long before the time limit.", "--stop-before",
        **_SECONDS)
    # Slurm's KillWait is 30 s by default.
    grace_s: float = _option(25.0, "Time to save and leave after SIGTERM.", "--grace", **_SECONDS)
    connect_s: float = _option(120.0, "How long to wait for the nodes.", "--connect-wait", **_SECONDS)
    # Its copying goes on beside the ranks.
    stage_s: float = _option(600.0, "How long staging may take to begin.", "--stage-wait", **_SECONDS)
    silence_s: float = _option(30.0, "A node silent for so long is lost.", "--silence", **_SECONDS)
    requeue: bool = _option(True,
        "Start the job again after SIGUSR1, near its limit, or without a lost node.")
    manifest: str | None = _option(None, "Of the run.", show_default="headrace-runs/JOB-RESTARTS.json",
        metavar="FILE")
    # fmt: on

    def __post_init__(self) -> None:
        if self.framework not in FRAMEWORKS:
            raise ValueError(f"framework is {self.framework!r}, expected one of {FRAMEWORKS}")
        seconds = ("stop_before_s", "grace_s", "connect_s", "stage_s", "silence_s")
        for name, least in (("gpus", 1), ("ranks_per_node", 1), *((name, 0) for name in seconds)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} is {value}, expected {least} or more")
        if self.gpus is not None and self.ranks_per_node is not None and self.framework == "torch":
            raise ValueError("gpus and ranks_per_node are given: torch has one rank for each GPU")
        if self.nodes is not None and not 1 <= self.nodes[0] <= self.nodes[1]:
            raise ValueError(
                f"nodes is {self.nodes[0]}-{self.nodes[1]}, expected MIN-MAX, MIN from 1 to MAX"
            )
        if self.nodes is not None and self.gpus is not None:
            raise ValueError("gpus and nodes are given: GPUs in all depend on the number of nodes")
        if self.replicas not in (1, 2):
            raise ValueError(f"replicas is {self.replicas}, expected 1 or 2")


# -- the layout ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The layout."""

    nodes: tuple[str, ...]
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    remarks: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """In all."""
        return len(self.nodes) * self.ranks_per_node


def lay_out(place: JobPlace, options: LaunchOptions) -> LaunchPlan:
    """What runs where; raises LaunchError, with the nearest that can be, if the job has not what is asked."""
    if place.index != 0:
        raise LaunchError(
            f"This is node {place.index} of {len(place.nodes)}, expected the first one.",
            next_step="Start `headrace launch` once, in the batch script, and not by srun: it starts "
            "one launcher on each node itself.",
        )
    nodes, gpus, remarks = _gpus(place, options)
    ranks = options.ranks_per_node
    if ranks is None:
        drives_all = options.framework in ("tensorflow", "jax")
        ranks = 1 if drives_all else gpus or place.tasks_per_node or 1
    cpus = max(1, place.cpus_per_node // ranks)
    if place.cpus_per_node < ranks:
        remarks += (
            f"{ranks} ranks share the {place.cpus_per_node} CPUs of each node: they will be slow.",
        )
    if gpus and ranks > gpus:
        remarks += (f"{ranks} ranks share the {gpus} GPUs of each node.",)
    return LaunchPlan(nodes, ranks, gpus, cpus, remarks)


class Launch(NamedTuple):
    """One launch of a program (the user's words) in a job, laid out."""

    place: JobPlace
    options: LaunchOptions
    plan: LaunchPlan
    words: tuple[str, ...]

    @classmethod
    def of(cls, place: JobPlace, options: LaunchOptions, words: Sequence[str]) -> Launch:
        """Laid out by `lay_out`."""
        return cls(place, options, lay_out(place, options), tuple(words))


def _gpus(place: JobPlace, options: LaunchOptions) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """The nodes that take part, GPUs on each, and remarks."""
    each, nodes = place.gpus_per_node, place.nodes
    wanted = options.gpus
    if options.nodes is not None:
        least, most = options.nodes
        if len(nodes) < least:
            raise LaunchError(
                f"{least} nodes at least are asked for, {len(nodes)} are there: {', '.join(nodes)}.",
                next_step="Submit the job with more nodes, or allow fewer: --nodes MIN-MAX.",
            )
        nodes = nodes[:most]
    if wanted is None:
        return nodes, each, ()
    have = each * len(nodes)
    if wanted > have:
        raise LaunchError(
            f"{wanted} GPUs are asked for, the job has {have}: {len(nodes)} nodes with {each} each.",
            next_step=f"Ask for {have} or fewer (--gpus), or submit the job with more."
            if have
            else "Submit the job with GPUs (--gres=gpu:N or --gpus-per-node=N), or leave --gpus out.",
        )
    for count in range(1, len(nodes) + 1):
        if wanted % count == 0 and wanted // count <= each:
            some = f"{count} of the job's {len(nodes)} nodes take part"
            remarks = (f"{some}: {wanted} GPUs are asked for.",) if count < len(nodes) else ()
            return nodes[:count], wanted // count, remarks
    fits = {count * gpus for count in range(1, len(nodes) + 1) for gpus in range(1, each + 1)}
    near = sorted(sorted(fits, key=lambda n: (abs(n - wanted), n))[:2])
    raise LaunchError(
        f"{wanted} GPUs cannot be spread evenly over {len(nodes)} nodes with {each} each.",
        next_step=f"Ask for {' or '.join(map(str, near))}: --gpus.",
    )


# -- variables -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankVariable:
    """One variable, and the reason for it; `kept`: the user has set it to this, and it stays."""

    name: str
    value: str
    reason: str
    kept: bool = False


def settings_for(
    plan: LaunchPlan, framework: str, interface: str | None, environment: Mapping[str, str]
) -> tuple[RankVariable, ...]:
    """What the ranks of one node get; the other nodes reach it by `interface`, if that is known."""
    cpus, several = str(plan.cpus_per_rank), len(plan.nodes) > 1
    gpus, torch = bool(plan.gpus_per_node), framework in ("torch", "plain")
    shared = f"{plan.ranks_per_node} ranks on a node: its CPUs, shared out evenly"
    reach = (
        "the interface by which the nodes reach each other; a host's name may stand for another one"
        if several
        else "one node: no other interface is needed"
    )
    # "=": this one exactly; InfiniBand is found by NCCL itself, this is for its bootstrap.
    wanted = (
        (framework == "tensorflow", "TF_NUM_INTRAOP_THREADS", cpus, shared),
        (True, "OMP_NUM_THREADS", cpus, shared),
        (interface and torch, "GLOO_SOCKET_IFNAME", str(interface), reach),
        (interface and gpus and several and framework != "mpi", "NCCL_SOCKET_IFNAME", f"={interface}", reach),
        (gpus and (torch or framework == "jax"), "NCCL_DEBUG", "WARN",
         "a failing network says so in the job's log"),
        (gpus and framework == "torch", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1",
         "a rank whose peer is gone ends instead of waiting"),
        (True, "PYTHONUNBUFFERED", "1", "what a rank prints is in the log when it happens"),
    )  # fmt: skip
    return tuple(
        RankVariable(name, environment.get(name, value), reason, kept=name in environment)
        for holds, name, value, reason in wanted
        if holds
    )


# -- commands ------------------------------------------------------------------------------------------


class NodeFacts(NamedTuple):
    """The address by which the others reach a node, and free ports: one for each rank and one more."""

    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeCommands:
    """What one node starts; nothing where another one does (mpirun). `environments` add to what is common."""

    commands: tuple[tuple[str, ...], ...]
    environments: tuple[Mapping[str, str], ...] = ()


def program_of(words: Sequence[str]) -> tuple[str, ...]:
    """The command that the user's words mean: `train.py ARGS`, `-m module ARGS` or any program."""
    if not words:
        raise ValueError("nothing to launch: name a script, -m MODULE or a program")
    if words[0] == "-m" or words[0].endswith(".py"):
        return (sys.executable, *words)
    return tuple(words)


def commands_for(
    launch: Launch, node: int, facts: Sequence[NodeFacts], common: Iterable[str] = ()
) -> NodeCommands:
    """What the node of this index starts; mpirun needs the names of the `common` variables to hand on."""
    framework, plan, program = launch.options.framework, launch.plan, program_of(launch.words)
    start = (sys.executable, "-I", "-S", rank_start.__file__)
    if framework == "torch":
        # Static rendezvous: who is there is known, nothing needs to be found out.
        torchrun = (
            sys.executable, "-m", rank_start.__name__, rank_start.TORCHRUN,
            f"--nnodes={len(plan.nodes)}", f"--node-rank={node}",
            f"--nproc-per-node={plan.ranks_per_node}",
            "--rdzv-backend=static",
            f"--master-addr={facts[0].address}", f"--master-port={facts[0].ports[0]}",
            "--max-restarts=0",  # a rank that fails ends the job; the scheduler starts it again
            "--no-python", *start, *program,
        )  # fmt: skip
        return NodeCommands((torchrun,), ({},))
    if framework == "mpi":
        return NodeCommands(()) if node else _mpirun(plan, program, common)
    each = plan.ranks_per_node
    environments = (_rank_variables(framework, node, i, plan, facts) for i in range(each))
    return NodeCommands(((*start, *program),) * each, tuple(environments))


def _rank_variables(
    framework: str, node: int, local: int, plan: LaunchPlan, facts: Sequence[NodeFacts]
) -> dict[str, str]:
    """Under torchrun's names, which most programs know, and under those of the framework."""
    first, each = facts[0], plan.ranks_per_node
    rank = node * each + local
    values = {
        "RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": plan.ranks, "LOCAL_WORLD_SIZE": each,
        "GROUP_RANK": node, "GROUP_WORLD_SIZE": len(plan.nodes),
        "MASTER_ADDR": first.address, "MASTER_PORT": first.ports[0],
    }  # fmt: skip
    if framework == "jax":
        values |= {
            "JAX_COORDINATOR_ADDRESS": f"{first.address}:{first.ports[0]}",
            "JAX_NUM_PROCESSES": plan.ranks, "JAX_PROCESS_ID": rank,
        }  # fmt: skip
        if each > 1 and plan.gpus_per_node:
            share = max(1, plan.gpus_per_node // each)
            begin = local * share % plan.gpus_per_node
            values["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(begin, begin + share)))
    elif framework == "tensorflow":
        # MultiWorkerMirroredStrategy: every rank is a worker with a port of its own.
        workers = [f"{n.address}:{port}" for n in facts for port in n.ports[1 : each + 1]]
        cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        values["TF_CONFIG"] = json.dumps(cluster)
    return {name: str(value) for name, value in values.items()}


def _mpirun(plan: LaunchPlan, program: Sequence[str], common: Iterable[str]) -> NodeCommands:
    """One mpirun, on the first node; by srun or ssh it starts its own daemons on the others."""
    n = str(plan.ranks)
    path = Path(shutil.which("mpirun") or "/nonexistent/mpirun").resolve()
    is_hydra = path.name.startswith("mpiexec.hydra") or (path.parent / "mpiexec.hydra").exists()
    if not is_hydra:
        hosts = ",".join(f"{name}:{plan.ranks_per_node}" for name in plan.nodes)
        handed = [word for name in common for word in ("-x", name)]
        # Oversubscribed: of an allocation it counts the step that it runs in, a task on each node.
        command = [
            "mpirun", "-np", n, "--host", hosts, "--map-by", f"ppr:{plan.ranks_per_node}:node:OVERSUBSCRIBE",
            "--bind-to", "none", *handed, *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        ]  # fmt: skip
    else:  # MPICH and Intel MPI: Hydra
        command = [
            "mpirun", "-n", n, "-ppn", str(plan.ranks_per_node), "-hosts", ",".join(plan.nodes),
            "-genvlist", ",".join(common),
        ]  # fmt: skip
    return NodeCommands(((*command, *program),), ({},))


_HEADRACE = (sys.executable, "-c", "from headrace.cli import main; main()")


def helper_commands(
    launch: Launch, node: int, meeting: str, folder: Path, *, socket_fits: bool
) -> dict[str, tuple[str, ...]]:
    """What the node of this index runs beside its ranks, by name; `meeting`: where the nodes meet to stage."""
    options, nodes, commands = launch.options, len(launch.plan.nodes), {}
    if options.stage:
        commands["stage"] = (
            *_HEADRACE, "stage", *options.stage, "--quiet", "--meet", meeting, "--local", str(folder / "local"),
            "--nodes", str(nodes), "--node-rank", str(node),
            "--replicas", str(min(options.replicas, nodes)), "--wait", f"{options.stage_s:g}",
        )  # fmt: skip
    if options.daemon and socket_fits:
        commands["node"] = (*_HEADRACE, "node", "start", "--foreground")
    if options.agent:
        commands["agent"] = (*_HEADRACE, "agent")
    return commands


def node_command() -> list[str]:
    """What runs on each node."""
    return [sys.executable, "-m", "headrace.cluster.launch.node"]


def srun_command(place: JobPlace, nodes: tuple[str, ...]) -> list[str]:
    """The job step: one task on each node, with all that the job has there."""
    count = str(len(nodes))
    return [
        "srun", "--overlap",  # beside other steps of the job, a second launch among them
        f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        f"--cpus-per-task={place.cpus_per_node}", "--cpu-bind=none", "--mem=0",
        "--kill-on-bad-exit=0", "--wait=0",  # how nodes end is the first node's to judge
        "--input=none", "--unbuffered", "--job-name=headrace-launch",
        *node_command(),
    ]  # fmt: skip


# -- the preview ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preview:
    """What would run. Addresses and ports are found when it does: they are shown as NODE and 0."""

    plan: LaunchPlan
    starter: tuple[str, ...]
    helpers: tuple[str, ...]
    settings: tuple[RankVariable, ...]
    commands: tuple[NodeCommands, ...]

    def text(self) -> str:
        """For people."""
        plan = self.plan
        shape = (
            f"# {len(plan.nodes)} nodes, {plan.ranks_per_node} ranks and {plan.gpus_per_node} GPUs on each, "
            f"{plan.cpus_per_rank} CPUs for each rank"
        )
        lines = [shape, *(f"# {remark}" for remark in plan.remarks)]
        lines += ["", "# once: a launcher on each node", shlex.join(self.starter)]
        if self.helpers:
            lines += ["", "# on each node, beside the ranks", *self.helpers]
        lines += ["", "# variables of the ranks"]
        for s in self.settings:
            kept = " (yours: kept)" if s.kept else ""
            lines.append(f"{s.name}={shlex.quote(s.value)}  # {s.reason}{kept}")
        for name, node in zip(plan.nodes, self.commands, strict=True):
            lines += ["", f"# node {name}"]
            for command, environment in zip(node.commands, node.environments, strict=True):
                words = [f"{k}={shlex.quote(v)}" for k, v in environment.items()]
                lines.append(" ".join([*words, shlex.join(command)]))
            if not node.commands:
                lines.append("# nothing: the first node starts its ranks, too")
        return "\n".join(lines) + "\n"


def preview(launch: Launch, environment: Mapping[str, str]) -> Preview:
    """What `headrace launch` would run."""
    place, options, plan, _ = launch
    facts = [NodeFacts(name, (0,) * (plan.ranks_per_node + 1)) for name in plan.nodes]
    interface = None if len(plan.nodes) > 1 else "lo"
    settings = settings_for(plan, options.framework, interface, environment)
    common = [s.name for s in settings if not s.kept]
    is_slurm = place.scheduler == "slurm"
    starter = srun_command(place, plan.nodes) if is_slurm else node_command()
    helpers = []
    if options.stage:
        helpers.append(f"headrace stage {shlex.join(options.stage)} --replicas {options.replicas}")
    if options.daemon:
        helpers.append("headrace node start --foreground")
    nodes = range(len(plan.nodes))
    commands = tuple(commands_for(launch, node, facts, common) for node in nodes)
    return Preview(plan, tuple(starter), tuple(helpers), settings, commands)

"""Job: which rank, node and job this process is, and by whose word. The only reader of launchers' variables.

Whose word counts for the rank, the first that speaks:

1. the caller's arguments;
2. a framework that has already joined its processes: torch.distributed, JAX, TensorFlow, Ray Train. They are
   asked only where the program has imported them; nothing is imported or initialised here;
3. RANK and WORLD_SIZE: torchrun, Ray Train with torch, DeepSpeed, `headrace launch`;
4. TF_CONFIG, in a process that has imported TensorFlow;
5. MPI and those who start its processes: Open MPI, MVAPICH, PMI (MPICH, Intel MPI), LSF's jsrun;
6. Slurm, if this process is a task of a step. A batch script, the shell of an allocation and that of
   `srun --pty` are one process, however many tasks were asked for: SLURM_NTASKS counts nothing there;
7. nobody: then the process is alone, rank 0 of 1.

**Launchers nest**, so several may speak and all be right: srun starts a torchrun on each of 2 nodes (Slurm: 1
of 2), which starts 4 ranks each (RANK: 7 of 8). The inner one counts ranks, the outer one what the ranks are
parts of. Two words fit if the inner one's ranks fill the outer one's places (7 of 8 lies in place 1 of 2), or
if the inner launcher demonstrably stands inside: the ranks' parent process has the outer variables and not the
inner ones (torchrun's rendezvous may number nodes in another order than Slurm). Anything else is an error that
names both: a RANK that was exported before srun, a srun inside a rank of torchrun, a process group of one in
each of four tasks. Where it is meant so, rank= and world_size= say so.

LOCAL_RANK, RANK or WORLD_SIZE alone say that there are other processes, and not which of them this is: so it is
in what Lightning's own launcher starts, until training begins. That is refused rather than guessed.

A process that a rank starts inherits its variables, and is taken for the same rank, as by every framework. What
such a process is to have for itself alone needs rank=0, world_size=1.

**When it is decided.** Frameworks join their processes long after loaders are made, so a loader decides when
its first epoch begins (`RankDecision`), and an answer that changes afterwards is an error. Workers, forked
children and whoever unpickles the loader keep the parent's answer: their own environment may say something
else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ALONE: Final = "none"


@dataclass(frozen=True, slots=True)
class Rank:
    """A process's place among those that share the samples."""

    rank: int  # 0 to `world_size` - 1
    world_size: int  # how many there are
    source: str = "arguments"
    """By whose word: `torch.distributed`, `torchrun`, `srun`, ...; `none`: nobody's, so it is alone."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def __str__(self) -> str:
        by = "" if self.source == _ALONE else f" by {self.source}"
        return f"rank {self.rank} of {self.world_size}{by}"


class _Launcher(NamedTuple):
    """The names of the variables in which a launcher tells its processes where they are."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""
    nodes: str = ""


_TORCHRUN: Final = _Launcher(
    "RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE",
)  # fmt: skip
_MPI: Final = (
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
              "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
              "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("LSF", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
              "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
)  # fmt: skip
_SLURM: Final = _Launcher(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID", "SLURM_STEP_NUM_NODES",
)  # fmt: skip
_LAUNCHERS: Final = (_TORCHRUN, *_MPI, _SLURM)
_OWN_NODE: Final = ("HEADRACE_NODE_RANK", "HEADRACE_NODES")


# -- ranks ---------------------------------------------------------------------------------------------


def which_rank(
    rank: int | None = None,
    world_size: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Rank:
    """This process's rank, as of now: as given, or by the word of its environment and its frameworks.

    With an `environment` of variables, by these alone. Raises ValueError if only one of `rank` and
    `world_size` is given, and RankError if two that should know disagree, or somebody says half of it.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank} and world_size is {world_size}: give both or neither")
    if rank is not None and world_size is not None:
        return Rank(rank, world_size)
    given = os.environ if environment is None else environment
    words = list(_words(given))
    joined = list(_joined()) if environment is None else []
    if joined:
        # Frameworks number processes as they like; only RANK says how.
        numbered = [word.rank for word in words[:1] if word.variable == _TORCHRUN.rank]
        for other in (*joined[1:], *numbered):
            if not _fits(joined[0], other):
                raise _disagreement(joined[0], other)
        if words and joined[0].world_size % words[0].rank.world_size:
            raise _disagreement(joined[0], words[0].rank)
        return joined[0]
    for word in words[1:]:
        if not _fits(words[0].rank, word.rank) and not (
            environment is None and _inside(words[0].variable, word.variable)
        ):
            raise _disagreement(words[0].rank, word.rank)
    answer = words[0].rank if words else Rank(0, 1, _ALONE)
    _refuse_half(given, answer)
    if environment is None and not words and _is_fresh_worker():
        raise RankError(
            "This is a spawned worker of a DataLoader, and nobody tells it which rank it works for.",
            next_step="Pass rank= and world_size= to the loader, or start the workers by fork.",
        )
    return answer


class RankDecision:
    """A loader's rank: open until its first epoch begins, and the same ever after.

    Without `rank` and `world_size` it is found out later. Raises ValueError if only one of the two is given.
    """

    __slots__ = ("_answer", "_pid", "_stated_in")

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        given = rank is not None or world_size is not None
        self._answer = which_rank(rank, world_size) if given else None
        self._pid, self._stated_in = 0, os.getpid() if given else 0

    @property
    def is_open(self) -> bool:
        """Whether the answer may still become another one."""
        return self._answer is None

    def now(self) -> Rank:
        """The answer, or what it would be now.

        Raises RankError as `which_rank`.
        """
        return which_rank() if self._answer is None else self._answer

    def decide(self) -> Rank:
        """The answer, which stands from now on; asked whenever an epoch begins.

        Raises RankError as `which_rank`, or if the answer stood and this process has become another rank, or is
        one of several workers of torch's DataLoader, each of which would deliver the same.
        """
        if self._stated_in != os.getpid():
            _refuse_copies()
        if self._answer is None:
            self._answer, self._pid = which_rank(), os.getpid()
        elif self._pid == os.getpid():
            self._refuse_change(self._answer)
        return self._answer

    def _refuse_change(self, before: Rank) -> None:
        # Who speaks no more (a process group that was taken down) does not contradict.
        now = which_rank()
        if now.source != _ALONE and (now.rank, now.world_size) != (before.rank, before.world_size):
            raise RankError(
                f"This loader began as {before}; now this process is {now}. Its epochs would miss samples "
                "or repeat them.",
                next_step="Join the processes (init_process_group) before the loader's first batch, make a "
                "new loader, or pass rank= and world_size=.",
            )

    def __getstate__(self) -> Rank:
        """Whoever unpickles it works for this process."""
        return self.decide()

    def __setstate__(self, answer: Rank) -> None:
        self._answer, self._pid, self._stated_in = answer, 0, 0

    def __repr__(self) -> str:
        try:
            return f"{self.now()}{' so far' * self.is_open}"
        except RankError as e:
            return f"rank not known yet: {e}"


class _Word(NamedTuple):
    rank: Rank
    variable: str  # whose presence in a process shows that the launcher had started it


def _words(environment: Mapping[str, str]) -> Iterator[_Word]:
    """What launchers say, the nearest first."""
    for launcher in _LAUNCHERS:
        if launcher is _SLURM and not _is_task(environment):
            continue
        pair = _pair(environment, launcher.rank, launcher.size, "rank= and world_size=")
        if pair is not None:
            name = launcher.name
            if launcher is _TORCHRUN and "TORCHELASTIC_RUN_ID" in environment:
                name = "torchrun"
            yield _Word(Rank(*pair, name), launcher.rank)
        if launcher is _TORCHRUN and environment.get("TF_CONFIG") and "tensorflow" in sys.modules:
            yield _Word(_of_tf_config(environment["TF_CONFIG"]), "TF_CONFIG")


def _pair(
    environment: Mapping[str, str], name: str, count_name: str, instead: str
) -> tuple[int, int] | None:
    texts = environment.get(name, ""), environment.get(count_name, "")
    if not all(texts):
        return None
    if not (all(t.isascii() and t.isdigit() for t in texts) and int(texts[0]) < int(texts[1])):
        raise RankError(
            f"{name}={texts[0]!r} and {count_name}={texts[1]!r} are not a number and what it counts among.",
            next_step=f"Pass {instead}.",
        )
    return int(texts[0]), int(texts[1])


def _of_tf_config(text: str) -> Rank:
    """Only chief and workers train, so only they share the samples."""
    training = ("chief", "master", "worker")
    try:
        config = json.loads(text)
        members = {kind: len(config["cluster"].get(kind, ())) for kind in training}
        kind, index = config["task"]["type"], int(config["task"]["index"])
        place = range(members[kind])[index]
        before = sum(members[other] for other in training[: training.index(kind)])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise RankError(
            f"TF_CONFIG={text!r} does not name a chief or worker and its cluster.",
            next_step="Pass rank= and world_size=.",
        ) from e
    return Rank(before + place, sum(members.values()), "TF_CONFIG")


def _joined() -> Iterator[Rank]:
    """What frameworks say that have joined their processes."""
    torch: Any = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        yield Rank(torch.get_rank(), torch.get_world_size(), "torch.distributed")
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if getattr(state, "client", None) is not None:
        yield Rank(int(state.process_id), int(state.num_processes), "jax.distributed")
    elif getattr(
        bridge, "backends_are_initialized", bool
    )():  # else the question would initialise them
        jax = sys.modules["jax"]
        if jax.process_count() > 1:
            yield Rank(jax.process_index(), jax.process_count(), "jax")
    context: Any = getattr(
        sys.modules.get("tensorflow.python.eager.context"), "context_safe", bool
    )()
    server = context.get_server_def() if context and hasattr(context, "get_server_def") else None
    if server is not None:
        cluster = {job.name: ["" for _ in job.tasks] for job in server.cluster.job}
        task = {"type": server.job_name, "index": server.task_index}
        place = _of_tf_config(json.dumps({"cluster": cluster, "task": task}))
        yield Rank(place.rank, place.world_size, "tf.distribute")
    if (ask := getattr(sys.modules.get("ray.train"), "get_context", None)) is not None:
        # Outside of a training function it raises, as does Ray Tune's in a trial, or knows no rank.
        with contextlib.suppress(RuntimeError, DeprecationWarning):
            own = ask()
            if (rank := own.get_world_rank()) is not None:
                yield Rank(int(rank), int(own.get_world_size()), "Ray Train")


def _fits(inner: Rank, outer: Rank) -> bool:
    """Whether the ranks of `inner` fill the places of `outer` one after the other."""
    each, over = divmod(inner.world_size, outer.world_size)
    return not over and inner.rank // each == outer.rank


def _disagreement(one: Rank, other: Rank) -> RankError:
    return RankError(
        f"This process is rank {one.rank} of {one.world_size} by {one.source}, but {other.rank} of "
        f"{other.world_size} by {other.source}.",
        next_step="One of them was inherited from another program: take it out of the environment, or pass "
        "rank= and world_size=.",
    )


def _refuse_half(environment: Mapping[str, str], answer: Rank) -> None:
    """Half a word of torchrun's kind must fit the answer."""
    halves = {"RANK": answer.rank, "WORLD_SIZE": answer.world_size, "LOCAL_RANK": None}
    if all(environment.get(name) for name in ("RANK", "WORLD_SIZE")):
        return
    launcher = next((one for one in _LAUNCHERS if one.name == answer.source), None)
    if launcher is not None:
        halves["LOCAL_RANK"] = _number(environment.get(launcher.local_rank, ""), 1 << 30, -1)
    for name, value in halves.items():
        if environment.get(name) and environment[name] != str(value):
            raise RankError(
                f"{name}={environment[name]!r} says that there are other processes, but nobody says which "
                f"rank of how many this one is ({answer}).",
                next_step="Join the processes (torch.distributed.init_process_group; Lightning and "
                "Accelerate do it when training begins) before the first batch, or pass rank= and "
                "world_size=.",
            )


def torch_worker() -> Any:
    """What torch knows of this process as a DataLoader's worker; None: it is none."""
    # Without that function where another thread has just begun to import torch.
    known = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    return None if known is None else known()


def _refuse_copies() -> None:
    worker = torch_worker()
    if worker is not None and worker.num_workers > 1:
        raise RankError(
            f"This loader is iterated in worker {worker.id} of {worker.num_workers} of torch's DataLoader: "
            "each of them would deliver the same samples.",
            next_step="Iterate it in the training process, where it reads ahead by itself; or make it in the "
            "worker with rank= and world_size= of its own.",
        )


def _is_fresh_worker() -> bool:
    """Whether this is a DataLoader's worker that knows nothing of its parent: started, not forked."""
    if torch_worker() is None:
        return False
    return any("multiprocessing" in word and "import" in word for word in sys.orig_argv)


# -- Slurm: is this a task? ----------------------------------------------------------------------------

_NO_STEP: Final = 0xFFFFFFF0
"""Numbers from here on stand for batch scripts, interactive shells and the like."""
_SHELLS: Final = frozenset(("bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh", "dash"))


def _is_task(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task of a Slurm step, or was started by one.

    A step's variables are not enough: the shell of `srun -n 4 --pty bash` has them, and so has a batch script
    that was submitted within a step. What Slurm started as this task (SLURM_TASK_PID) tells them apart.

    Raises RankError if it might be either.
    """
    step, tasks = environment.get("SLURM_STEP_ID", ""), environment.get(_SLURM.size, "")
    if not (step.isdigit() and tasks.isdigit() and int(step) < _NO_STEP):
        return False
    if tasks == "1":
        return True
    pid = _number(environment.get("SLURM_TASK_PID", ""), 1 << 30)
    words = _command_line(pid) if pid in list(_ancestors()) else []
    if words:
        shell = Path(words[0].lstrip("-")).name in _SHELLS
        given = [word for word in words[1:] if not word.startswith("--")]
        waits = shell and all(word.startswith("-") and "c" not in word for word in given)
        return not waits and not any(word.endswith("/slurm_script") for word in words)
    doubts = [
        f"{name}={environment[name]!r}"
        for name, fine in (("SLURM_NTASKS", tasks), ("SLURM_JOB_NAME", ""), ("SLURM_PTY_PORT", ""))
        if (value := environment.get(name))
        and (value in ("interactive", *_SHELLS) if name == "SLURM_JOB_NAME" else value != fine)
    ]
    if doubts:
        raise RankError(
            f"SLURM_STEP_NUM_TASKS is {tasks!r}, but {' and '.join(doubts)}: this may be a task of the "
            "step, or a program that was started by hand in its shell.",
            next_step="Start the tasks with srun, or pass rank= and world_size= (0 and 1 for a program "
            "that runs alone).",
        )
    return True


# -- what the processes above this one began with ------------------------------------------------------


def _ancestors() -> Iterator[int]:
    """This process, its parent, and so on."""
    pid = os.getpid()
    for _ in range(64):
        yield pid
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        pid = int(status.rpartition(")")[2].split()[1])
        if pid <= 1:
            return


def _command_line(pid: int) -> list[str]:
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).rstrip("\0").split("\0")
    except OSError:
        return []


def _inside(inner: str, outer: str) -> bool:
    """Whether the launcher of one variable was itself started by that of another.

    Then fewer of the processes above this one began with the inner variable.
    """

    def generations(name: str) -> int:
        entry = os.fsencode(f"{name}={os.environ[name]}")
        count = 0
        for pid in _ancestors():
            try:
                began_with = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                break
            if entry not in began_with:
                break
            count += 1
        return count

    return generations(inner) < generations(outer)


# -- nodes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node among a job's nodes."""

    rank: int
    nodes: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.nodes:
            raise ValueError(f"node rank is {self.rank}, expected 0 to {self.nodes - 1}")


def which_node(
    rank: int | None = None,
    nodes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> NodePlace | None:
    """This node's place: as given, else as the launcher says; None where nobody says.

    Launchers that number nodes themselves (torchrun, Slurm) are believed. MPI numbers ranks only: with one
    process a node, or ranks that fill node after node, the node follows; any other mapping is refused rather
    than guessed. (Open MPI's OMPI_COMM_WORLD_NODE_RANK is a process's rank on its node, not the node's.)
    A Slurm batch script runs on the first node of its job and speaks for none of the others.

    Raises ValueError if only one of the two is given, or the environment (`os.environ`) contradicts itself
    (RankError), or is of an MPI whose ranks do not fill node after node.
    """
    if rank is not None and nodes is not None:
        return NodePlace(rank, nodes)
    if nodes == 1:
        return NodePlace(0, 1)
    if rank is not None:
        raise ValueError(
            f"node rank is {rank}, but how many nodes there are is not given (--nodes)"
        )
    place = _node_of(os.environ if environment is None else environment)
    if place is not None and nodes is not None and place.nodes != nodes:
        raise ValueError(
            f"{nodes} nodes are given, but the launcher says {place.nodes}: pass the node rank too"
        )
    if place is None and nodes is not None:
        raise ValueError(f"{nodes} nodes are given, but not which of them this is (--node-rank)")
    return place


def _node_of(environment: Mapping[str, str]) -> NodePlace | None:
    counted = [_OWN_NODE, (_TORCHRUN.node, _TORCHRUN.nodes)]
    if _is_task(environment):
        counted.append((_SLURM.node, _SLURM.nodes))
    for names in counted:
        if (pair := _pair(environment, *names, "--node-rank and --nodes")) is not None:
            return NodePlace(*pair)
    for mpi in _MPI:
        texts = [environment.get(name, "") for name in mpi[1:5]]
        if not all(text.isdigit() for text in texts):
            continue
        rank, size, local, local_size = map(int, texts)
        if local_size < 1 or size % local_size or rank % local_size != local:
            raise RankError(
                f"{mpi.rank}={rank}, {mpi.local_rank}={local} and {mpi.local_size}={local_size}: the "
                "ranks do not fill node after node, so the node's rank does not follow.",
                next_step="Pass --node-rank and --nodes.",
            )
        return NodePlace(rank // local_size, size // local_size)
    return NodePlace(0, 1) if environment.get("SLURM_NNODES") == "1" else None


def local_rank(environment: Mapping[str, str] | None = None) -> int:
    """Which of its launcher's processes on this node this one is; 0 if nobody says."""
    given = os.environ if environment is None else environment
    name = next((one.local_rank for one in _LAUNCHERS if given.get(one.local_rank)), "")
    local = _number(given.get(name, ""), 1 << 20)
    if name == _TORCHRUN.local_rank:
        rank, ranks, each, nodes = (
            _number(given.get(key, ""), 1 << 30)
            for key in (_TORCHRUN.rank, _TORCHRUN.size, _TORCHRUN.local_size, _TORCHRUN.nodes)
        )
        if each and each * nodes == ranks:  # with --virtual-local-rank all of them are told 0
            return rank % each
    return local


def is_first_on_node(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is the first of its launcher's on this node, or the only one."""
    return local_rank(environment) == 0


def local_ranks_of(environment: Mapping[str, str]) -> int:
    """How many processes of this one's kind run on this node; 0: nobody says."""
    for name in (*(one.local_size for one in _LAUNCHERS[:-1]), "LOCAL_SIZE"):  # DeepSpeed's
        if count := _number(environment.get(name, ""), 1024):
            return count
    # Slurm writes `2(x4),1`: two tasks on each of four nodes, one on the fifth.
    tasks: list[int] = []
    for each, times in re.findall(
        r"(\d{1,6})(?:\(x(\d{1,6})\))?", environment.get(_SLURM.local_size, "")
    ):
        tasks += [int(each)] * min(int(times or 1), 1 << 16)
    node = _number(environment.get(_SLURM.node, ""), 1 << 16)
    return min(tasks[node], 1024) if node < len(tasks) else 0


# -- jobs ----------------------------------------------------------------------------------------------

NAME_CHARACTERS_MAX: Final = 128
_GPUS_MAX: Final = 1024
_CPUS_MAX: Final = 1 << 16
_MIB_MAX: Final = 1 << 28
_JOB_IDS: Final = (
    "HEADRACE_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID",
)  # fmt: skip
_RESTARTS: Final = ("HEADRACE_RESTARTS", "SLURM_RESTART_COUNT", "HEADRACE_JOB_RESTARTS")
_START: Final = (
    "HEADRACE_LAUNCH", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """A job, as a process of it is told."""

    job_id: str  # what the scheduler counts jobs with; tasks of an array have one each
    alias: str = ""  # how people write it, if otherwise ("17_3" for a task of an array); "" if not
    name: str = ""  # of the job
    user: str = ""  # who submitted it
    account: str = ""  # who pays
    gpus: int = 0  # how many it has on this node
    gpu_indices: tuple[int, ...] = ()  # which, as the node counts them; () if that is not said
    cpus: int = 0  # how many it has on this node; 0 if that is not said
    restarts: int = 0  # how often it was requeued
    node: str = ""
    """What the scheduler calls this node; "" if that is not said. One machine may be several nodes."""
    partition: str = ""  # that it runs in
    memory_bytes: int = 0  # how much it may take on this node; 0 if that is not said


def identity_of(environment: Mapping[str, str], job_id: str = "") -> JobIdentity | None:
    """The job that an environment tells of, another user's perhaps; None: none.

    What is not said, or not in a form that makes sense, is not known: an environment may hold anything. With
    `job_id` the job is called so, whatever the scheduler says.
    """

    def first(*names: str) -> str:
        values = (environment.get(name, "") for name in names)
        return clean(next((value for value in values if value), ""))

    job_id = clean(job_id) or first("HEADRACE_JOB_ID", "SLURM_JOB_ID", "SLURM_JOBID")
    if not job_id:
        return None
    array, task = first("SLURM_ARRAY_JOB_ID"), first("SLURM_ARRAY_TASK_ID")
    indices = _indices(first("HEADRACE_JOB_GPUS", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"))
    gpus = _gpus(environment, indices)
    # Where all nodes have as many, `8(x4)`, the whole job's list says it of this one.
    of_job = first("SLURM_JOB_CPUS_PER_NODE").partition("(")[0]
    cpus = first("HEADRACE_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE") or of_job
    cpu_count = _number(cpus, _CPUS_MAX)
    per_node, per_cpu, per_gpu = (
        _number(first(f"SLURM_MEM_PER_{each}"), _MIB_MAX) for each in ("NODE", "CPU", "GPU")
    )
    return JobIdentity(
        job_id=job_id,
        alias=f"{array}_{task}" if array and task else "",
        name=first("HEADRACE_JOB_NAME", "SLURM_JOB_NAME"),
        user=first("SLURM_JOB_USER", "USER", "LOGNAME"),
        account=first("HEADRACE_JOB_ACCOUNT", "SLURM_JOB_ACCOUNT"),
        gpus=gpus,
        gpu_indices=indices,
        cpus=cpu_count,
        restarts=_number(first("HEADRACE_JOB_RESTARTS", "SLURM_RESTART_COUNT"), 1 << 16),
        node=first("HEADRACE_NODE", "SLURMD_NODENAME"),
        partition=first("SLURM_JOB_PARTITION"),
        memory_bytes=(per_node or per_cpu * cpu_count or per_gpu * gpus) << 20,
    )


def job_id(environment: Mapping[str, str] | None = None) -> str | None:
    """What the scheduler calls this job, where there is one."""
    given = os.environ if environment is None else environment
    ids = (given.get(name) for name in _JOB_IDS)
    # torchrun's default of a single node names no job.
    return next((one for one in ids if one and one != "none"), None)


def job_name(environment: Mapping[str, str] | None = None) -> str:
    """What this process is a part of: clients of one job share a quota.

    HEADRACE_JOB says it, or whoever runs the job; else the processes that one shell command started are a job.
    """
    given = os.environ if environment is None else environment
    name = given.get("HEADRACE_JOB") or job_id(given) or given.get("TORCHELASTIC_RUN_ID")
    return (name or f"group-{os.getpgid(0)}")[:256]


def start_of_job() -> str:
    """The same for all ranks of one start of a job, and another for its next start."""
    names = list(_START)
    if any(word.variable == _SLURM.rank for word in list(_words(os.environ))[:1]):
        names.append("SLURM_STEP_ID")  # others may start their processes by several steps
    return "/".join(os.environ.get(name, "") for name in names)


def restarts() -> int:
    """How often the job was started again before this time: 0 in its first life."""
    counts = (os.environ.get(name, "") for name in _RESTARTS)
    return next((int(count) for count in counts if count.isdigit()), 0)


def tell_resumed(rank: int, epoch: int, position: int, length: int) -> None:
    """Say in the log of a launched job, on one rank, where its loader goes on; not in that one's workers."""
    from multiprocessing import parent_process  # which takes its time

    if (
        rank == 0
        and (epoch or position)
        and os.environ.get("HEADRACE_LAUNCH")
        and not parent_process()
    ):
        sys.stderr.write(
            f"headrace: resumed from epoch {epoch}, sample {position:,} of {length:,}\n"
        )


def clean(text: str) -> str:
    """A name as it may be kept and shown: bounded, without control characters or lone surrogates."""
    kept = "".join(c if c.isprintable() else "?" for c in text[:NAME_CHARACTERS_MAX])
    return kept.encode("utf-8", "replace").decode().strip()


def _gpus(environment: Mapping[str, str], indices: tuple[int, ...]) -> int:
    if environment.get("HEADRACE_JOB_GPUS") == "":  # those that were asked for are processes
        return 0
    for name in ("HEADRACE_JOB_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if environment.get(name):
            return _number(environment[name], _GPUS_MAX)
    if indices:
        return len(indices)
    # What the driver shows may be named by number or by UUID; "-1" and "NoDevFiles" hide all.
    visible = [word for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return 0 if visible[:1] in (["-1"], ["NoDevFiles"]) else min(len(visible), _GPUS_MAX)


def _indices(text: str) -> tuple[int, ...]:
    """`0,1` or `0-3,6`; () if it is neither."""
    indices: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        low, high = _number(first, _GPUS_MAX, -1), _number(last, _GPUS_MAX, -1)
        if low < 0 or (dash and high < low):
            return ()
        indices += range(low, (high if dash else low) + 1)
    return tuple(dict.fromkeys(indices))[:_GPUS_MAX]


def _number(text: str, most: int, otherwise: int = 0) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        return otherwise
    return min(int(text), most)

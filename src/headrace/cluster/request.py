"""Request: what a user asks for. Each field of `JobRequest` is declared once, with all that is known of it.

From `JOB_OPTIONS` come the options of `headrace cluster run|batch`, those of HAL's `swrun`, what is understood
in a script's directives, the variables of the environment, what goes to Slurm, and the documentation.
Nothing here knows a cluster: `layout` does.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.base.text import nearest
from headrace.cluster.notation import memory_mib
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from headrace.cluster.script import Word


class OptionKind(Enum):
    """What the value of an option is."""

    TEXT = "TEXT"
    TEXTS = "NAME"
    """May be given more than once."""
    COUNT = "N"
    GPUS = "[TYPE:]N"
    MEMORY = "SIZE"
    FLAG = ""


_DEFAULTS: Final[dict[OptionKind, Any]] = {
    OptionKind.TEXT: "", OptionKind.TEXTS: (), OptionKind.FLAG: False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOption:
    """One thing that can be asked for.

    Attributes:
        flags: on our command line, the long one first.
        slurm: the long option of `sbatch` that says the same; "" if none does.
        variable: of the environment, by which `sbatch` takes it; "" if none.
        hal: the letter of HAL's `swrun`; "" if it has none.
        words: other names in a script's directives, which `sbatch` itself refuses.
        metavar: for help, where the kind's own says too little.
    """

    field: str
    flags: tuple[str, ...]
    kind: OptionKind
    help: str
    slurm: str = ""
    variable: str = ""
    hal: str = ""
    words: tuple[str, ...] = ()
    metavar: str = ""

    @property
    def flag(self) -> str:
        """The long one."""
        return self.flags[0]


def _option(flags: str, kind: OptionKind, text: str, **more: Any) -> Any:
    """A field of `JobRequest` that has these flags, and what `JobOption` names in `more`."""
    known = {"flags": tuple(flags.split()), "kind": kind, "help": text, **more}
    return dataclasses.field(default=_DEFAULTS.get(kind), metadata=known)


_TEXT, _TEXTS, _COUNT = OptionKind.TEXT, OptionKind.TEXTS, OptionKind.COUNT
_MEMORY, _FLAG = OptionKind.MEMORY, OptionKind.FLAG


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What is asked for; None and "" where nothing is said.

    Memory is in MiB. `time` stays as it was written: what a number alone means depends on the command.
    """

    # fmt: off
    gpus: int | None = _option("--gpus -g", OptionKind.GPUS,
        "GPUs in all; nodes, tasks, CPUs and memory follow from it.", slurm="gpus", variable="SBATCH_GPUS")
    gpu_type: str = _option("--gpu-type", _TEXT, "Only GPUs of this type.", metavar="TYPE")
    nodes: int | None = _option("--nodes -N", _COUNT, "Nodes. [default: as few as can hold the GPUs]",
        slurm="nodes")
    tasks_per_node: int | None = _option("--tasks-per-node", _COUNT,
        "Tasks that srun starts on each node. [default: one a GPU]", slurm="ntasks-per-node")
    cpus_per_gpu: int | None = _option("--cpus-per-gpu -c", _COUNT,
        "CPUs per GPU. [default: the GPU's share of its node]", slurm="cpus-per-gpu",
        variable="SBATCH_CPUS_PER_GPU", hal="c", words=("cpu_per_gpu", "cpu-per-gpu"))
    cpus: int | None = _option("--cpus", _COUNT, "CPUs per task of a job without GPUs.",
        slurm="cpus-per-task")
    memory_per_gpu: int | None = _option("--memory-per-gpu", _MEMORY,
        "Memory per GPU. [default: the GPU's share of its node]", slurm="mem-per-gpu",
        variable="SBATCH_MEM_PER_GPU")
    memory: int | None = _option("--memory", _MEMORY, "Memory per node; 0: all of it.", slurm="mem",
        variable="SBATCH_MEM_PER_NODE")
    partition: str = _option("--partition -p", _TEXT,
        "Partition, or HAL's short words: gpuxN (N GPUs), cpunN (N nodes), cpu_mini.", slurm="partition",
        variable="SBATCH_PARTITION", hal="p", metavar="NAME")
    time: str = _option("--time -t", _TEXT, "Time limit: 90m, 4h, 2-12:00:00, any form of Slurm's.",
        slurm="time", variable="SBATCH_TIMELIMIT", hal="t", metavar="TIME")
    container: str = _option("--container -s", _TEXT,
        "Container image: a file, a name in the registry, or docker://, oras://, library://.", hal="s",
        words=("singularity",), metavar="IMAGE")
    modules: tuple[str, ...] = _option("--module -m", _TEXTS,
        "Load this environment module.")
    conda: str = _option("--conda", _TEXT, "Activate this conda environment: name or folder.", metavar="ENV")
    venv: str = _option("--venv", _TEXT, "Activate this Python environment.", metavar="DIR")
    reservation: str = _option("--reservation -r", _TEXT, "Use this reservation.", slurm="reservation",
        variable="SBATCH_RESERVATION", hal="r", metavar="NAME")
    node_type: str = _option("--node-type -n", _TEXT,
        "Only nodes of this kind: x86, arm, ppc64le, or a site's word.", hal="n",
        words=("node_type", "node-type"), metavar="TYPE")
    account: str = _option("--account -A", _TEXT, "Charge this account.", slurm="account",
        variable="SBATCH_ACCOUNT", metavar="NAME")
    qos: str = _option("--qos -q", _TEXT, "Quality of service.", slurm="qos", variable="SBATCH_QOS",
        metavar="NAME")
    constraint: str = _option("--constraint -C", _TEXT,
        "Features that nodes must have, as Slurm writes them.", slurm="constraint",
        variable="SBATCH_CONSTRAINT", metavar="FEATURES")
    nodelist: str = _option("--nodelist -w", _TEXT, "On these nodes.", slurm="nodelist", metavar="NODES")
    exclude: str = _option("--exclude -x", _TEXT, "Not on these nodes.", slurm="exclude", metavar="NODES")
    exclusive: bool = _option("--exclusive", _FLAG, "Whole nodes: nobody else's jobs beside.",
        slurm="exclusive")
    array: str = _option("--array -a", _TEXT, "Many jobs of one script: 0-15, 1,3,5, 0-99%4.", slurm="array",
        variable="SBATCH_ARRAY_INX", metavar="INDICES")
    dependency: str = _option("--dependency -d", _TEXT, "Wait for other jobs: afterok:17, singleton.",
        slurm="dependency", metavar="JOBS")
    name: str = _option("--job-name -J", _TEXT, "Name of the job.", slurm="job-name",
        variable="SBATCH_JOB_NAME", words=("job_name",), metavar="NAME")
    output: str = _option("--output -o", _TEXT, "Where standard output goes (%j: job, %x: name, %a: index).",
        slurm="output", variable="SBATCH_OUTPUT", words=("output_file",), metavar="FILE")
    error: str = _option("--error -e", _TEXT, "Where standard error goes. [default: with the output]",
        slurm="error", variable="SBATCH_ERROR", words=("error_file",), metavar="FILE")
    directory: str = _option("--chdir -D", _TEXT, "The job's working directory.", slurm="chdir",
        metavar="DIR")
    requeue: bool = _option("--requeue", _FLAG, "Start again when a node fails or the job is preempted.",
        slurm="requeue", variable="SBATCH_REQUEUE")
    signal: str = _option("--signal", _TEXT, "Send a signal before the time is over: B:USR1@120.",
        slurm="signal", variable="SBATCH_SIGNAL", metavar="SIGNAL")
    slurm: tuple[str, ...] = _option("--slurm", _TEXTS,
        "An option of sbatch as it is, such as --slurm=--mail-type=END.", metavar="OPTION")
    # fmt: on

    def over(self, other: JobRequest) -> JobRequest:
        """What this one says, and where it says nothing, the other."""
        return dataclasses.replace(other, **{name: getattr(self, name) for name in self.said()})

    def said(self) -> frozenset[str]:
        """The names of the fields that say something."""
        return frozenset(
            f.name for f in dataclasses.fields(self) if _is_said(getattr(self, f.name))
        )


JOB_OPTIONS: Final = tuple(
    JobOption(field=f.name, **f.metadata) for f in dataclasses.fields(JobRequest)
)
"""In the order of help and documentation."""

_BY_FIELD: Final = {option.field: option for option in JOB_OPTIONS}
_BY_WORD: Final = {word: o for o in JOB_OPTIONS for word in (o.slurm, *o.words) if word}
_BY_FLAG: Final = {option.flag[2:]: option for option in JOB_OPTIONS}

NOT_IN_THE_FOREGROUND: Final = frozenset({"array", "output", "error", "requeue"})
"""Fields that make no sense for a command in the foreground."""

WORDS_OF_OURS: Final = frozenset(word for option in JOB_OPTIONS for word in option.words)
"""What may stand in `#SBATCH` lines as HAL has them, though `sbatch` refuses it."""

_GPUS = re.compile(r"(?:([\w.\-]+):)?(\d{1,7})", re.ASCII)
_COUNT_MAX: Final = 10**6


def _is_said(value: object) -> bool:
    """Zero is: `--memory 0` means all of it."""
    return value is not None and value is not False and value not in ("", (), [])


def read_request(values: Mapping[str, Any], where: str) -> JobRequest:
    """A request from texts by field; `where` they come from is for messages."""
    stated = {field: value for field, value in values.items() if _is_said(value)}
    read = {field: _read(_BY_FIELD[field], value, where) for field, value in stated.items()}
    if isinstance(gpus := read.get("gpus"), tuple):
        read["gpus"] = gpus[1]
        if gpus[0] and read.setdefault("gpu_type", gpus[0]) != gpus[0]:
            raise ClusterRequestError(
                f"{where}: --gpus asks for {gpus[0]}, --gpu-type for {read['gpu_type']}."
            )
    return JobRequest(**read)


def request_of_words(words: Iterable[Word], where: str, *, ours: bool = False) -> JobRequest:
    """What the options of a script say, without those that only Slurm understands. The last one wins.

    With `ours` they are from `#HEADRACE` lines, in which our own options stand and nothing else may.

    Raises:
        ClusterRequestError: a value makes no sense; an option is none of ours.
    """
    known = _BY_FLAG if ours else _BY_WORD
    values: dict[str, Any] = {}
    for word in words:
        option = known.get(word.name)
        if option is None and ours:
            close = nearest(word.name, _BY_FLAG)
            meant = f"did you mean --{close}?" if close else "see `headrace cluster batch --help`"
            raise ClusterRequestError(f"{where}: --{word.name} is no option of ours; {meant}")
        is_read = option and (ours or word.name in option.words or _is_ours(option, word, where))
        if option is None or not is_read:
            continue
        if option.kind is OptionKind.FLAG:
            values[option.field] = True
        elif option.kind is OptionKind.TEXTS:
            values[option.field] = (*values.get(option.field, ()), word.value or "")
        else:
            values[option.field] = word.value or ""
    return read_request(values, where)


def _is_ours(option: JobOption, word: Word, where: str) -> bool:
    """Whether we read the value as Slurm does; it takes more: `--nodes=2-4`, `--gpus=a100:2,h100:2`."""
    if option.kind is OptionKind.FLAG:
        return word.value is None
    try:
        _read(option, word.value or "", where)
    except ClusterRequestError:
        return False
    return True


def _read(option: JobOption, value: Any, where: str) -> Any:
    """A value of an option's kind; of GPUs their type and number."""
    kind, expected = option.kind, "one line of printable text"
    text = str(value).strip()
    if kind is OptionKind.FLAG:
        return bool(value)
    if kind is OptionKind.TEXTS:
        texts = [value] if isinstance(value, str) else value
        return tuple(_read(dataclasses.replace(option, kind=_TEXT), each, where) for each in texts)
    if kind is OptionKind.TEXT:
        # A line end would begin a line of the script.
        if text.isprintable():
            return text
    elif kind is OptionKind.MEMORY:
        try:
            return memory_mib(text)
        except ValueError:
            expected = "MiB, or a size as 512M, 64G"
    else:
        expected = f"a number from 1 to {_COUNT_MAX:,}"
        if kind is OptionKind.GPUS:
            expected += ", or TYPE:NUMBER"
            if "," in text:
                raise ClusterRequestError(
                    f"{where}: {option.flag} is {text!r}: more than one type of GPU in one job.",
                    next_step="Ask for one type, or size the job in Slurm's own words (--gres).",
                )
        match, typed = _GPUS.fullmatch(text), kind is OptionKind.GPUS
        if match and 1 <= int(match[2]) <= _COUNT_MAX and (typed or not match[1]):
            return (match[1] or "", int(match[2])) if typed else int(match[2])
    raise ClusterRequestError(f"{where}: {option.flag} is {value!r}, expected {expected}.")


# -- HAL's short words for sizes -----------------------------------------------------------------------

_SHORT = re.compile(r"(gpux|cpun|cpux)(\d{1,6})", re.ASCII)


class Shorthand(NamedTuple):
    """What a short word asks for."""

    text: str
    gpus: int = 0
    nodes: int = 0
    mini: bool = False


def read_shorthand(text: str, partitions: Collection[str]) -> Shorthand | None:
    """The size a partition's name stands for; None if it is a partition, or no such word."""
    if text in partitions:
        return None
    if text == "cpu_mini":
        return Shorthand(text, nodes=1, mini=True)
    if (match := _SHORT.fullmatch(text)) is None:
        return None
    if (count := int(match[2])) == 0:
        raise ClusterRequestError(
            f"partition {text!r} asks for none.", next_step=f"{match[1]}1 is the least."
        )
    return Shorthand(text, gpus=count) if match[1] == "gpux" else Shorthand(text, nodes=count)


def apply_shorthand(request: JobRequest, short: Shorthand) -> tuple[JobRequest, list[str]]:
    """The request without the short word, and remarks: words for CPUs ignore what is said of GPUs."""
    sizes = [("GPUs", "gpus", request.gpus, short.gpus)]
    sizes += [] if short.gpus else [("nodes", "nodes", request.nodes, short.nodes)]
    for what, flag, asked, meant in sizes:
        if asked is not None and asked != meant:
            raise ClusterRequestError(
                f"partition {short.text} stands for {meant} {what}, --{flag} asks for {asked}.",
                next_step="Give one of them.",
            )
    plain = dataclasses.replace(request, partition="")
    if short.gpus:
        return dataclasses.replace(plain, gpus=short.gpus), []
    remark = f"{short.text} has no GPUs: {request.cpus_per_gpu} CPUs per GPU are ignored."
    remarks = [] if request.cpus_per_gpu is None else [remark]
    return dataclasses.replace(plain, nodes=short.nodes, cpus_per_gpu=None), remarks

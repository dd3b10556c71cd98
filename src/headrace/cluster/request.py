"""Request: what a user asks for. One table names every option once.

From `ASKS` come the options of `headrace cluster run|batch`, those of HAL's `swrun`, what is understood in a
script's directives, the variables of the environment, what goes to Slurm, and the documentation.
Nothing here knows a cluster: `layout` does.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from headrace.cluster.script import Word


# -- time limits ---------------------------------------------------------------------------------------

FORMS: Final = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, "
    "days-hours:minutes:seconds, 90m, 36h, 2d12h or UNLIMITED"
)
"""What may be written, for help and errors."""

_MINUTES_MAX: Final = 1_000 * 366 * 24 * 60
"""A thousand years: beyond it a digit was typed twice. Slurm's own counter is of 32 bits."""

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_CLOCK = re.compile(r"(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_TIME_WORDS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?", re.ASCII)
_NO_LIMIT = frozenset({"unlimited", "infinite", "-1"})


def read_minutes(text: str, *, bare_hours: bool = False) -> int | None:
    """What a time limit says, in minutes; None: none.

    Zero comes back as zero: Slurm means no limit by it, HAL its default.

    Args:
        text: in one of `FORMS`.
        bare_hours: a number alone counts hours, as HAL's commands have it.

    Raises:
        ClusterRequestError: the text is no time.
    """
    written = text.strip().strip("\"'").strip().lower()
    if written in _NO_LIMIT:
        return None
    seconds = _seconds(written, bare_hours=bare_hours)
    if seconds is None:
        raise ClusterRequestError(f"{text!r} is no time limit.", next_step=f"Expected {FORMS}.")
    minutes = -(-seconds // 60)
    if minutes > _MINUTES_MAX:
        raise ClusterRequestError(
            f"the time limit {text!r} is longer than a thousand years.",
            next_step="Give a shorter one, or UNLIMITED.",
        )
    return minutes


def _seconds(written: str, *, bare_hours: bool) -> int | None:
    if len(written) > 40:  # whatever it is: int() takes a while over a million digits
        return None
    if match := _DAYS.fullmatch(written):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    elif match := _CLOCK.fullmatch(written):
        first, second, third = match.groups()
        days = 0
        if third is not None:
            hours, minutes, seconds = int(first), int(second), int(third)
        elif second is not None:
            hours, minutes, seconds = 0, int(first), int(second)
        elif bare_hours:
            hours, minutes, seconds = int(first), 0, 0
        else:
            hours, minutes, seconds = 0, int(first), 0
    elif written and (match := _TIME_WORDS.fullmatch(written)):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    else:
        return None
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def slurm_time(minutes: int | None) -> str:
    """As Slurm writes it: "04:00:00", "2-12:00:00", "UNLIMITED"."""
    if minutes is None:
        return "UNLIMITED"
    days, rest = divmod(minutes, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def time_text(minutes: int | None) -> str:
    """As people say it: "90 min", "4 h", "2 d 12 h", "no limit"."""
    if minutes is None:
        return "no limit"
    if minutes < 120 and minutes % 60:
        return f"{minutes} min"
    days, rest = divmod(minutes, 24 * 60)
    hours, left = divmod(rest, 60)
    if days and not left and days * 24 + hours <= 72:
        days, hours = 0, days * 24 + hours
    parts = [
        f"{days} d" if days else "",
        f"{hours} h" if hours else "",
        f"{left} min" if left else "",
    ]
    return " ".join(part for part in parts if part) or "0 min"


# -- requests ------------------------------------------------------------------------------------------


class Kind(Enum):
    """What the value of an option is."""

    TEXT = "TEXT"
    TEXTS = "NAME"
    """May be given more than once."""
    COUNT = "N"
    GPUS = "[TYPE:]N"
    MEMORY = "SIZE"
    FLAG = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """One thing that can be asked for.

    Attributes:
        field: of `Request`.
        flags: on our command line, the long one first.
        kind: of its value.
        help: one sentence.
        slurm: the long option of `sbatch` that says the same; "" if none does.
        variable: of the environment, by which `sbatch` takes it; "" if none.
        hal: the letter of HAL's `swrun`; "" if it has none.
        words: other names in a script's directives, which `sbatch` itself refuses.
        metavar: for help, where the kind's own says too little.
    """

    field: str
    flags: tuple[str, ...]
    kind: Kind
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


ASKS: Final = (
    Ask("gpus", ("--gpus", "-g"), Kind.GPUS, "GPUs in all; nodes, tasks, CPUs and memory follow from it.",
        "gpus", "SBATCH_GPUS"),
    Ask("gpu_type", ("--gpu-type",), Kind.TEXT, "Only GPUs of this type.", metavar="TYPE"),
    Ask("nodes", ("--nodes", "-N"), Kind.COUNT, "Nodes. Default: as few as can hold the GPUs.", "nodes"),
    Ask("tasks_per_node", ("--tasks-per-node",), Kind.COUNT,
        "Tasks that srun starts on each node. Default: one a GPU.", "ntasks-per-node"),
    Ask("cpus_per_gpu", ("--cpus-per-gpu", "-c"), Kind.COUNT,
        "CPUs per GPU. Default: the GPU's share of its node.",
        "cpus-per-gpu", "SBATCH_CPUS_PER_GPU", "c", ("cpu_per_gpu", "cpu-per-gpu")),
    Ask("cpus", ("--cpus",), Kind.COUNT, "CPUs per task of a job without GPUs.", "cpus-per-task"),
    Ask("memory_per_gpu", ("--memory-per-gpu",), Kind.MEMORY,
        "Memory per GPU. Default: the GPU's share of its node.",
        "mem-per-gpu", "SBATCH_MEM_PER_GPU"),
    Ask("memory", ("--memory",), Kind.MEMORY, "Memory per node; 0: all of it.", "mem", "SBATCH_MEM_PER_NODE"),
    Ask("partition", ("--partition", "-p"), Kind.TEXT,
        "Partition, or HAL's short words: gpuxN (N GPUs), cpunN (N nodes), cpu_mini.",
        "partition", "SBATCH_PARTITION", "p", metavar="NAME"),
    Ask("time", ("--time", "-t"), Kind.TEXT, "Time limit: 90m, 4h, 2-12:00:00, any form of Slurm's.",
        "time", "SBATCH_TIMELIMIT", "t", metavar="TIME"),
    Ask("container", ("--container", "-s"), Kind.TEXT,
        "Container image: a file, a name in the registry, or docker://, oras://, library://.",
        hal="s", words=("singularity",), metavar="IMAGE"),
    Ask("modules", ("--module", "-m"), Kind.TEXTS, "Load this environment module; may be repeated."),
    Ask("conda", ("--conda",), Kind.TEXT, "Activate this conda environment: name or folder.", metavar="ENV"),
    Ask("venv", ("--venv",), Kind.TEXT, "Activate this Python environment.", metavar="DIR"),
    Ask("reservation", ("--reservation", "-r"), Kind.TEXT, "Use this reservation.",
        "reservation", "SBATCH_RESERVATION", "r", metavar="NAME"),
    Ask("node_type", ("--node-type", "-n"), Kind.TEXT,
        "Only nodes of this kind: x86, arm, ppc64le, or a site's word.",
        hal="n", words=("node_type", "node-type"), metavar="TYPE"),
    Ask("account", ("--account", "-A"), Kind.TEXT, "Charge this account.", "account", "SBATCH_ACCOUNT",
        metavar="NAME"),
    Ask("qos", ("--qos", "-q"), Kind.TEXT, "Quality of service.", "qos", "SBATCH_QOS", metavar="NAME"),
    Ask("constraint", ("--constraint", "-C"), Kind.TEXT, "Features that nodes must have, as Slurm writes them.",
        "constraint", "SBATCH_CONSTRAINT", metavar="FEATURES"),
    Ask("nodelist", ("--nodelist", "-w"), Kind.TEXT, "On these nodes.", "nodelist", metavar="NODES"),
    Ask("exclude", ("--exclude", "-x"), Kind.TEXT, "Not on these nodes.", "exclude", metavar="NODES"),
    Ask("exclusive", ("--exclusive",), Kind.FLAG, "Whole nodes: nobody else's jobs beside.", "exclusive"),
    Ask("array", ("--array", "-a"), Kind.TEXT, "Many jobs of one script: 0-15, 1,3,5, 0-99%4.",
        "array", "SBATCH_ARRAY_INX", metavar="INDICES"),
    Ask("dependency", ("--dependency", "-d"), Kind.TEXT, "Wait for other jobs: afterok:17, singleton.",
        "dependency", metavar="JOBS"),
    Ask("name", ("--job-name", "-J"), Kind.TEXT, "Name of the job.", "job-name", "SBATCH_JOB_NAME",
        words=("job_name",), metavar="NAME"),
    Ask("output", ("--output", "-o"), Kind.TEXT, "Where standard output goes (%j: job, %x: name, %a: index).",
        "output", "SBATCH_OUTPUT", words=("output_file",), metavar="FILE"),
    Ask("error", ("--error", "-e"), Kind.TEXT, "Where standard error goes. Default: with the output.",
        "error", "SBATCH_ERROR", words=("error_file",), metavar="FILE"),
    Ask("directory", ("--chdir", "-D"), Kind.TEXT, "The job's working directory.", "chdir", metavar="DIR"),
    Ask("requeue", ("--requeue",), Kind.FLAG, "Start again when a node fails or the job is preempted.",
        "requeue", "SBATCH_REQUEUE"),
    Ask("signal", ("--signal",), Kind.TEXT, "Send a signal before the time is over: B:USR1@120.",
        "signal", "SBATCH_SIGNAL", metavar="SIGNAL"),
    Ask("slurm", ("--slurm",), Kind.TEXTS, "An option of sbatch as it is, such as --slurm=--mail-type=END.",
        metavar="OPTION"),
)  # fmt: skip
"""In the order of help and documentation."""

_BY_FIELD: Final = {ask.field: ask for ask in ASKS}
_BY_WORD: Final = {word: ask for ask in ASKS for word in (ask.slurm, *ask.words) if word}
_BY_FLAG: Final = {ask.flag[2:]: ask for ask in ASKS}

WORDS_OF_OURS: Final = frozenset(word for ask in ASKS for word in ask.words)
"""What may stand in `#SBATCH` lines as HAL has them, though `sbatch` refuses it."""

_MEMORY = re.compile(r"(\d+)([kmgt]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_GPUS = re.compile(r"(?:([\w.\-]+):)?(\d+)", re.ASCII)
_MIB: Final = {"k": 1 / 1024, "": 1, "m": 1, "g": 1024, "t": 1024 * 1024}
_COUNT_MAX: Final = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for; None and "" where nothing is said. `ASKS` documents each field.

    Memory is in MiB. `time` stays as it was written: what a number alone means depends on the command.
    """

    gpus: int | None = None
    gpu_type: str = ""
    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_gpu: int | None = None
    cpus: int | None = None
    memory_per_gpu: int | None = None
    memory: int | None = None
    partition: str = ""
    time: str = ""
    container: str = ""
    modules: tuple[str, ...] = ()
    conda: str = ""
    venv: str = ""
    reservation: str = ""
    node_type: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    exclusive: bool = False
    array: str = ""
    dependency: str = ""
    name: str = ""
    output: str = ""
    error: str = ""
    directory: str = ""
    requeue: bool = False
    signal: str = ""
    slurm: tuple[str, ...] = ()

    def over(self, other: Request) -> Request:
        """What this one says, and where it says nothing, the other."""
        return dataclasses.replace(other, **{name: getattr(self, name) for name in self.said()})

    def said(self) -> frozenset[str]:
        """The names of the fields that say something."""
        return frozenset(
            f.name for f in dataclasses.fields(self) if _is_said(getattr(self, f.name))
        )


def _is_said(value: object) -> bool:
    """Zero is: `--memory 0` means all of it."""
    return value is not None and value is not False and value not in ("", (), [])


def read_request(values: Mapping[str, Any], where: str) -> Request:
    """A request from texts.

    Args:
        values: by field; None, "" and () are not said.
        where: they come from, for messages: "the command line".

    Raises:
        ClusterRequestError: a value makes no sense.
    """
    read: dict[str, Any] = {}
    for field, value in values.items():
        if not _is_said(value):
            continue
        ask = _BY_FIELD[field]
        read[field] = _READERS[ask.kind](ask, value, where)
    if isinstance(gpus := read.get("gpus"), tuple):
        read["gpus"] = gpus[1]
        if gpus[0]:
            read.setdefault("gpu_type", gpus[0])
            if read["gpu_type"] != gpus[0]:
                raise ClusterRequestError(
                    f"{where}: --gpus asks for {gpus[0]}, --gpu-type for {read['gpu_type']}."
                )
    return Request(**read)


def request_of_words(
    words: Iterable[Word], where: str, *, ours: bool = False
) -> tuple[Request, list[Word]]:
    """What the options of a script say, and those that only Slurm understands. The last one wins.

    Args:
        words: of one or more directives.
        where: they stand, for messages.
        ours: from `#HEADRACE` lines, in which our own options stand and nothing else may.

    Raises:
        ClusterRequestError: a value makes no sense; an option is none of ours.
    """
    known = _BY_FLAG if ours else _BY_WORD
    values: dict[str, Any] = {}
    others: list[Word] = []
    for word in words:
        ask = known.get(word.name)
        if ask is None and ours:
            raise _unknown(word, where)
        if ask is None or not (ours or word.name in ask.words or _is_ours(ask, word, where)):
            others.append(word)
        elif ask.kind is Kind.FLAG:
            values[ask.field] = True
        elif ask.kind is Kind.TEXTS:
            values[ask.field] = (*values.get(ask.field, ()), word.value or "")
        else:
            values[ask.field] = word.value or ""
    return read_request(values, where), others


def _is_ours(ask: Ask, word: Word, where: str) -> bool:
    """Whether we read the value as Slurm does; it takes more: `--nodes=2-4`, `--gpus=a100:2,h100:2`."""
    if ask.kind is Kind.FLAG:
        return word.value is None
    try:
        _READERS[ask.kind](ask, word.value or "", where)
    except ClusterRequestError:
        return False
    return True


def _unknown(word: Word, where: str) -> ClusterRequestError:
    import difflib

    close = difflib.get_close_matches(word.name, _BY_FLAG, 1)
    meant = f"did you mean --{close[0]}?" if close else "see `headrace cluster batch --help`"
    return ClusterRequestError(f"{where}: --{word.name} is no option of ours; {meant}")


def memory_mib(text: str) -> int:
    """A size as Slurm takes it, such as 32G, in MiB, rounded up.

    Raises:
        ValueError: the text is no size.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None or len(text) > 20:
        raise ValueError(f"{text!r} is no size, expected MiB, or as 512M, 64G, 1T")
    return -int(-int(match[1]) * _MIB[match[2].lower()] // 1)


def _wrong(ask: Ask, value: object, where: str, expected: str) -> ClusterRequestError:
    return ClusterRequestError(f"{where}: {ask.flag} is {value!r}, expected {expected}.")


def _text(ask: Ask, value: Any, where: str) -> str:
    text = str(value).strip()
    # A line end would begin a line of the script.
    if not text.isprintable():
        raise _wrong(ask, value, where, "one line of printable text")
    return text


def _texts(ask: Ask, value: Any, where: str) -> tuple[str, ...]:
    return tuple(_text(ask, v, where) for v in ([value] if isinstance(value, str) else value))


def _count(ask: Ask, value: Any, where: str) -> int:
    text = str(value).strip()
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= _COUNT_MAX):
        raise _wrong(ask, value, where, f"a number from 1 to {_COUNT_MAX:,}")
    return int(text)


def _gpus(ask: Ask, value: Any, where: str) -> tuple[str, int]:
    text = str(value).strip()
    if "," in text:
        raise ClusterRequestError(
            f"{where}: {ask.flag} is {text!r}: more than one type of GPU in one job.",
            next_step="Ask for one type, or size the job in Slurm's own words (--gres).",
        )
    match = _GPUS.fullmatch(text)
    if match is None or len(match[2]) > 7 or not 1 <= int(match[2]) <= _COUNT_MAX:
        raise _wrong(ask, value, where, f"a number from 1 to {_COUNT_MAX:,}, or TYPE:NUMBER")
    return match[1] or "", int(match[2])


def _memory(ask: Ask, value: Any, where: str) -> int:
    try:
        return memory_mib(str(value))
    except ValueError:
        raise _wrong(ask, value, where, "MiB, or a size as 512M, 64G") from None


def _flag(_ask: Ask, value: Any, _where: str) -> bool:
    return bool(value)


_READERS: Final[dict[Kind, Callable[[Ask, Any, str], Any]]] = {
    Kind.TEXT: _text,
    Kind.TEXTS: _texts,
    Kind.COUNT: _count,
    Kind.GPUS: _gpus,
    Kind.MEMORY: _memory,
    Kind.FLAG: _flag,
}

# -- HAL's short words for sizes -----------------------------------------------------------------------

_SHORT = re.compile(r"(gpux|cpun|cpux)(\d{1,6})", re.ASCII)

MINI: Final = "cpu_mini"


@dataclass(frozen=True, slots=True)
class Shorthand:
    """What a short word asks for.

    Attributes:
        text: as it was written.
        gpus: in all.
        nodes: whole ones without GPUs; 0 where GPUs are asked.
        mini: only a few CPUs of it.
    """

    text: str
    gpus: int = 0
    nodes: int = 0
    mini: bool = False


def read_shorthand(text: str, partitions: Collection[str]) -> Shorthand | None:
    """The size a partition's name stands for; None if it is a partition, or no such word.

    Raises:
        ClusterRequestError: it asks for none.
    """
    if text in partitions:
        return None
    if text == MINI:
        return Shorthand(text, nodes=1, mini=True)
    match = _SHORT.fullmatch(text)
    if match is None:
        return None
    count = int(match[2])
    if count == 0:
        raise ClusterRequestError(
            f"partition {text!r} asks for none.", next_step=f"{match[1]}1 is the least."
        )
    return Shorthand(text, gpus=count) if match[1] == "gpux" else Shorthand(text, nodes=count)


def apply_shorthand(request: Request, short: Shorthand) -> tuple[Request, list[str]]:
    """The request without the short word, and remarks: as with HAL, words for CPUs ignore what is said of GPUs.

    Raises:
        ClusterRequestError: the request says otherwise than the word.
    """
    if request.gpus is not None and request.gpus != short.gpus:
        raise ClusterRequestError(
            f"partition {short.text} stands for {short.gpus} GPUs, --gpus asks for {request.gpus}.",
            next_step="Give one of them.",
        )
    plain = dataclasses.replace(request, partition="")
    if short.gpus:
        return dataclasses.replace(plain, gpus=short.gpus), []
    if request.nodes is not None and request.nodes != short.nodes:
        raise ClusterRequestError(
            f"partition {short.text} stands for {short.nodes} nodes, --nodes asks for {request.nodes}.",
            next_step="Give one of them.",
        )
    remarks = []
    if request.cpus_per_gpu is not None:
        remarks.append(
            f"{short.text} has no GPUs: {request.cpus_per_gpu} CPUs per GPU are ignored."
        )
    return dataclasses.replace(plain, nodes=short.nodes, cpus_per_gpu=None), remarks

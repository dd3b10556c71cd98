"""How Slurm writes lists of hosts, indices, times, sizes, GPUs, states and the ids of tasks.

Read as all versions from 20.11 to 25.x write them. What is asked again and again for many jobs is cached.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.cluster.executor import JobState
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_NOTHING = frozenset({
    "", "(null)", "N/A", "n/s", "Unknown", "None", "NONE", "None assigned", "Partition_Limit",
})  # fmt: skip
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "NOT_SET"})

# -- hosts and indices ---------------------------------------------------------------------------------

NAMES_MAX = 1 << 18
"""What one list may stand for: more nodes than any cluster has."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?\Z")
_BRACKETED = re.compile(r"(?:[^\[\]]|\[[^\[\]]*\])*")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)\Z", re.DOTALL)


@functools.lru_cache(maxsize=4096)
def expand_hosts(text: str) -> tuple[str, ...]:
    """The names that "node[0-3,7],gpu-[001-128]" stands for, in its order.

    Raises:
        ValueError: it is no list of hosts, or stands for more than `NAMES_MAX`.
    """
    if text in _NOTHING:
        return ()
    names: list[str] = []
    for part in _split(text):
        names += _expand(part)
        if len(names) > NAMES_MAX:
            raise ValueError(f"{text[:80]!r} stands for more than {NAMES_MAX:,} hosts")
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def expand_indices(text: str) -> tuple[int, ...]:
    """The numbers that "0-3,7" stands for; none for "N/A" and the like."""
    if text in _NOTHING:
        return ()
    return tuple(int(number) for part in text.split(",") for number in _numbers(part))


def compress_hosts(names: Iterable[str]) -> str:
    """The short form; the names are sorted by number, and each is said once."""
    matches = {name: _NUMBERED.match(name) for name in names}
    plain = [name for name, match in matches.items() if match is None]
    parts = [(match[1], match[2], match[3]) for match in matches.values() if match is not None]
    # Numbers with leading zeros have a width of their own: node01 is not node1, and is beside node10.
    padded = {(a, c, len(b)) for a, b, c in parts if len(b) > 1 and b.startswith("0")}
    groups: dict[tuple[str, str, int], list[int]] = {}
    for head, digits, tail in parts:
        width = len(digits) if (head, tail, len(digits)) in padded else 0
        groups.setdefault((head, tail, width), []).append(int(digits))
    for (head, tail, width), numbers in groups.items():
        spans = _ranges(sorted(numbers))
        ranges = ["-".join(f"{n:0{width}d}" for n in sorted({a, b})) for a, b in spans]
        inner = ranges[0] if len(numbers) == 1 else f"[{','.join(ranges)}]"
        plain.append(f"{head}{inner}{tail}")
    return ",".join(plain)


def _split(text: str) -> list[str]:
    """Parts between commas that are in no brackets."""
    if _BRACKETED.fullmatch(text) is None:
        raise ValueError(f"{text[:80]!r} is no list of hosts: its brackets do not match")
    return re.split(r",(?![^\[]*\])", text)


def _expand(part: str) -> list[str]:
    pieces = re.split(r"\[(.*?)\]", part)
    if any(letter in piece for piece in pieces[::2] for letter in "[]") or not part:
        raise ValueError(f"{part[:80]!r} is no list of hosts")
    choices = [
        [piece] if i % 2 == 0 else [n for span in piece.split(",") for n in _numbers(span)]
        for i, piece in enumerate(pieces)
    ]
    if math.prod(map(len, choices)) > NAMES_MAX:
        raise ValueError(f"{part[:80]!r} stands for more than {NAMES_MAX:,} hosts")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _numbers(span: str) -> list[str]:
    if (match := _RANGE.match(span)) is None:
        raise ValueError(f"{span[:80]!r} is no number or range of numbers")
    first, last, step = match[1], match[2] or match[1], int(match[3] or 1)
    count = int(last) - int(first) + 1
    if count < 1 or count > NAMES_MAX or step < 1:
        raise ValueError(f"{span[:80]!r} is no range of numbers, or too large a one")
    return [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1, step)]


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Of those that follow each other the first and the last; numbers are sorted, each once."""
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        following = [number for _, number in run]
        yield following[0], following[-1]


# -- times ---------------------------------------------------------------------------------------------

FORMS: Final = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, "
    "days-hours:minutes:seconds, 90m, 36h, 2d12h or UNLIMITED"
)
"""Of a time limit, for help and errors."""

_MINUTES_MAX: Final = 1_000 * 366 * 24 * 60
"""A thousand years: beyond it a digit was typed twice. Slurm's own counter is of 32 bits."""

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_CLOCK = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+)", re.ASCII)
_TIME_WORDS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?", re.ASCII)


def _seconds(text: str, bare_s: int = 60) -> int | None:
    """Of Slurm's forms of a time, a number alone counting so many seconds; None: it is none of them."""
    if len(text) > 40:  # whatever it is: int() takes a while over a million digits
        return None
    if match := _DAYS.fullmatch(text) or (_CLOCK.fullmatch(text) if ":" in text else None):
        return _added(match)
    return int(text) * bare_s if _CLOCK.fullmatch(text) else None


def _added(match: re.Match[str]) -> int:
    """Seconds of days, hours, minutes and seconds, or of the last three."""
    days, hours, minutes, seconds = (0, *(int(part or 0) for part in match.groups()))[-4:]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def seconds(text: str, bare_s: int = 60) -> int | None:
    """Of "30" (minutes), "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS"; None: no limit, or none said."""
    if text in _NOTHING or text.upper() in _UNLIMITED:
        return None
    if (duration := _seconds(text, bare_s)) is None:
        raise ValueError(f"{text!r} is no time")
    return duration


@functools.lru_cache(maxsize=4096)
def minutes(text: str) -> int | None:
    """`seconds`, in minutes, rounded up."""
    return None if (duration := seconds(text)) is None else -(-duration // 60)


def read_minutes(text: str, *, bare_hours: bool = False) -> int | None:
    """What a time limit that a user wrote says, in minutes; None: none.

    Zero comes back as zero: Slurm means no limit by it, HAL its default. With `bare_hours` a number alone
    counts hours, as HAL's commands have it.

    Raises:
        ClusterRequestError: the text is no time.
    """
    written = text.strip().strip("\"'").strip().lower()
    if written in {"unlimited", "infinite", "-1"}:
        return None
    duration = _seconds(written, 3600 if bare_hours else 60)
    if duration is None and 0 < len(written) <= 40 and (match := _TIME_WORDS.fullmatch(written)):
        duration = _added(match)
    if duration is None:
        raise ClusterRequestError(f"{text!r} is no time limit.", next_step=f"Expected {FORMS}.")
    if duration > _MINUTES_MAX * 60:
        raise ClusterRequestError(
            f"the time limit {text!r} is longer than a thousand years.",
            next_step="Give a shorter one, or UNLIMITED.",
        )
    return -(-duration // 60)


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
    parts = [f"{n} {unit}" for n, unit in ((days, "d"), (hours, "h"), (left, "min")) if n]
    return " ".join(parts) or "0 min"


@functools.lru_cache(maxsize=65536)
def unix_seconds(text: str) -> float | None:
    """Of "1795332994", or of "2026-11-22T07:36:33" in this machine's zone; None where none is said."""
    if text.isdigit():
        return float(text) if text != "0" else None
    if text in _NOTHING:
        return None
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


# -- sizes ---------------------------------------------------------------------------------------------

_UNITS = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_SIZE = re.compile(r"([\d.]+)([KMGTP]?)[nc]?i?B?\Z")
_MEMORY = re.compile(r"(\d+)([KMGT]?)(?:i?b)?", re.ASCII | re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def mib(text: str) -> int:
    """Of "16000", "16000M", "62.50G", "2Tn"; 0 where none is said."""
    if text in _NOTHING or text in _UNLIMITED:
        return 0
    if (match := _SIZE.match(text)) is None:
        raise ValueError(f"{text!r} is no size of memory")
    return int(float(match[1]) * _UNITS[match[2]])


def memory_mib(text: str) -> int:
    """A size that a user asks for, such as 32G, in MiB, rounded up."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None or len(text) > 20:
        raise ValueError(f"{text!r} is no size, expected MiB, or as 512M, 64G, 1T")
    return math.ceil(int(match[1]) * _UNITS[match[2].upper()])


# -- GPUs ----------------------------------------------------------------------------------------------


class Gres(NamedTuple):
    """GPUs of one type; `indices` is empty where Slurm does not say which."""

    type: str
    number: int
    indices: tuple[int, ...]


@functools.lru_cache(maxsize=16384)
def parse_gres(text: str) -> tuple[Gres, ...]:
    """The GPUs in "gpu:h100:2(IDX:0-1),shard:4", "gpu:8(S:0-1)", "gres/gpu:h100=4", "gpu(IDX:0)"."""
    gpus = []
    for part in re.split(r",(?![^(]*\))", text) if text not in _NOTHING else ():
        name, bracket, rest = part.partition("(")
        name = name.removeprefix("gres:").removeprefix("gres/")
        words = [word for word in re.split("[:=]", name) if word]
        if not words or words[0] != "gpu":
            continue
        counted = words[-1][:1].isdigit() and len(words) > 1
        indices: tuple[int, ...] = ()
        if bracket and (match := re.search(r"IDX:([\d,-]+)", rest)):
            indices = expand_indices(match[1])
        factor = {"K": 1000, "M": 1000**2}.get(words[-1][-1].upper(), 1)
        number = int(words[-1][:-1] if factor > 1 else words[-1]) * factor if counted else 0
        kind = words[1] if len(words) > 1 + counted else ""
        gpus.append(Gres(kind, number if counted else len(indices) or 1, indices))
    return tuple(gpus)


def gpu_count(tres: str) -> int:
    """GPUs in "cpu=4,mem=8G,gres/gpu=2,gres/gpu:h100=2" (counted once) or in "gpu:h100:2,gpu:a100:1"."""
    gpus = parse_gres(tres)
    total = [gpu.number for gpu in gpus if not gpu.type]
    # AllocTRES says the sum and, where a site asks for it, each type.
    return total[0] if total and "=" in tres else sum(gpu.number for gpu in gpus)


# -- jobs ----------------------------------------------------------------------------------------------

_OTHER_STATES = {
    JobState.PENDING: ("SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING"),
    JobState.CONFIGURING: ("POWER_UP_NODE",),
    JobState.RUNNING: ("SIGNALING", "RESIZING", "UPDATE_DB"),
    JobState.SUSPENDED: ("STOPPED",),
    JobState.COMPLETING: ("STAGE_OUT",),
    JobState.REQUEUED: ("REQUEUE_HOLD", "REQUEUE_FED"),
    JobState.FAILED: ("LAUNCH_FAILED", "RECONFIG_FAIL"),
    JobState.CANCELLED: ("REVOKED",),
}
_STATES = {state.value: state for state in JobState} | {
    word: state for state, words in _OTHER_STATES.items() for word in words
}


@functools.lru_cache(maxsize=1024)
def job_state(text: str) -> JobState:
    """Of "RUNNING", "CANCELLED by 1000", "CANCELLED+"."""
    word = text.split(maxsplit=1)[0].rstrip("+").upper() if text.strip() else ""
    return _STATES.get(word, JobState.UNKNOWN)


def task_id(job_id: str, array_id: str | None, task: str | None) -> str:
    """As users know it: "17", "17_3", "17_[4-9]"."""
    if not array_id or task is None:
        return job_id
    task = task.partition("%")[0]
    return f"{array_id}_{task}" if task.isdigit() else f"{array_id}_[{task}]"

"""Hostlist: Slurm's short form of many names, "node[0-3,7],gpu-[001-128]", and back."""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


NAMES_MAX = 1 << 18
"""What one list may stand for: more nodes than any cluster has."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?\Z")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)\Z", re.DOTALL)


@functools.lru_cache(maxsize=4096)
def expand_hosts(text: str) -> tuple[str, ...]:
    """The names that a list stands for, in its order.

    Raises:
        ValueError: it is no list of hosts, or stands for more than `NAMES_MAX`.
    """
    if text in {"", "(null)", "None", "N/A", "None assigned"}:
        return ()
    names: list[str] = []
    for part in _split(text):
        names += _expand(part)
        if len(names) > NAMES_MAX:
            raise ValueError(f"{text[:80]!r} stands for more than {NAMES_MAX:,} hosts")
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def expand_indices(text: str) -> tuple[int, ...]:
    """The numbers that "0-3,7" stands for; none for "N/A" and the like.

    Raises:
        ValueError: it is neither.
    """
    if text in {"", "N/A", "(null)", "None"}:
        return ()
    return tuple(int(number) for part in text.split(",") for number in _numbers(part))


def compress_hosts(names: Iterable[str]) -> str:
    """The short form; the names are sorted by number, and each is said once."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    plain: list[str] = []
    parts: list[tuple[str, str, str]] = []
    for name in dict.fromkeys(names):
        if (match := _NUMBERED.match(name)) is None:
            plain.append(name)
        else:
            head, digits, tail = match.groups()
            parts.append((head, digits, tail))
    # Numbers with leading zeros have a width of their own: node01 is not node1, and is beside node10.
    padded = {(a, c, len(b)) for a, b, c in parts if len(b) > 1 and b.startswith("0")}
    for head, digits, tail in parts:
        width = len(digits) if (head, tail, len(digits)) in padded else 0
        groups.setdefault((head, tail, width), []).append(int(digits))
    groups_text = list(plain)
    for (head, tail, width), numbers in groups.items():
        ranges = list(_ranges(sorted(numbers)))
        texts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in ranges]
        single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        groups_text.append(
            f"{head}{texts[0]}{tail}" if single else f"{head}[{','.join(texts)}]{tail}"
        )
    return ",".join(groups_text)


def _split(text: str) -> Iterator[str]:
    """Parts between commas that are in no brackets."""
    depth = begin = 0
    for i, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[begin:i]
            begin = i + 1
        if not 0 <= depth <= 1:
            break
    if depth:
        raise ValueError(f"{text[:80]!r} is no list of hosts: its brackets do not match")
    yield text[begin:]


def _expand(part: str) -> list[str]:
    pieces = re.split(r"\[(.*?)\]", part)
    if any(letter in piece for piece in pieces[::2] for letter in "[]") or not part:
        raise ValueError(f"{part[:80]!r} is no list of hosts")
    choices = [
        [piece] if i % 2 == 0 else [n for span in piece.split(",") for n in _numbers(span)]
        for i, piece in enumerate(pieces)
    ]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > NAMES_MAX:
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
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last

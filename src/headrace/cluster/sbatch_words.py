"""How `sbatch` reads options: which take a value, which letters stand for which, what a quote does.

Facts of Slurm's grammar (20.11 to 25.x). What is not known here is passed on: a newer Slurm may know it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

__all__ = ["LETTERS", "PARTS", "Word", "quoted", "read_words", "split"]

LETTERS: Final = {
    "A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "h": "help", "H": "hold",
    "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "m": "distribution", "M": "clusters",
    "n": "ntasks", "N": "nodes", "o": "output", "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet",
    "s": "oversubscribe", "S": "core-spec", "t": "time", "v": "verbose", "V": "version", "w": "nodelist",
    "W": "wait", "x": "exclude",
}  # fmt: skip
"""Short options by their long names."""

_FLAGS: Final = frozenset({
    "consolidate-segments", "contiguous", "help", "hold", "ignore-pbs", "no-requeue",
    "overcommit", "oversubscribe", "parsable", "quiet", "reboot", "requeue", "spread-job",
    "spread-segments", "stepmgr", "test-only", "usage", "use-min-nodes", "verbose", "version",
    "wait",
})  # fmt: skip
"""Take no value."""

_OPTIONAL: Final = frozenset({"exclusive", "get-user-env", "nice", "no-kill", "propagate"})
"""Take one only after an equals sign."""

_LONG_ONLY: Final = frozenset({
    "acctg-freq", "batch", "bb", "bbf", "cluster-constraint", "comment", "container",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "export",
    "export-file", "extra", "gid", "gpu-bind", "gpu-freq", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "hint", "kill-on-invalid-dep", "mail-type",
    "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus",
    "network", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket",
    "open-mode", "power", "prefer", "priority", "profile", "reservation", "segment", "signal",
    "sockets-per-node", "switches", "thread-spec", "threads-per-core", "time-min", "tmp",
    "tres-bind", "tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap",
})  # fmt: skip
"""Take a value, and have no letter."""

_VALUED: Final = _LONG_ONLY | (frozenset(LETTERS.values()) - _FLAGS - _OPTIONAL)

PARTS: Final = frozenset({"hetjob", "packjob"})
"""Stand alone in a line, between the parts of a job that have directives of their own."""

_PLAIN = re.compile(r"[\w@%+=:,./\[\]{}*?!&|~^<>();$-]+")
"""Needs no quotes in a directive: Slurm knows no variables and no globs there."""


@dataclass(frozen=True, slots=True)
class Word:
    """One option as it was meant: `name` is long and whole, `value` None where there is none."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


def split(text: str) -> list[str]:  # noqa: C901 - one automaton, in one piece
    """The words of a directive. Quotes and backslashes work, and `#` outside quotes begins a comment.

    Raises:
        ValueError: a quote is never closed.
    """
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    letters = iter(text)
    for letter in letters:
        if quote:
            if letter == quote:
                quote = ""
                continue
        elif letter == "#":
            break
        elif letter in " \t\r\n\v\f":
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        if not quote and letter in "\"'":
            quote = letter
        elif letter == "\\" and quote != "'":
            word.append(next(letters, ""))
        else:
            word.append(letter)
    if quote:
        raise ValueError(f"the quote {quote} is never closed")
    if word is not None:
        words.append("".join(word))
    return words


def read_words(words: Sequence[str], also: Collection[str] = ()) -> list[Word]:
    """Options as `getopt_long` reads them: `-pgpu`, `-p gpu`, `--part gpu`, `--partition=gpu` are one.

    Args:
        words: as `split` made them.
        also: long options with values beside Slurm's own.
    """
    found: list[Word] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        if word.startswith("--"):
            found.append(_long(word[2:], rest, also))
        elif word.startswith("-") and len(word) > 1:
            found.extend(_short(word[1:], rest))
        elif word in PARTS:
            found.append(Word(word))
        # What else stands there, sbatch does not look at either.
    return found


def _long(text: str, rest: Iterator[str], also: Collection[str]) -> Word:
    written, equals, value = text.partition("=")
    name = _whole(written, also)
    if equals:
        return Word(name, value)
    if name in _VALUED or name in also:
        return Word(name, next(rest, None))
    return Word(name)


def _whole(written: str, also: Collection[str]) -> str:
    """A long option may be cut short where no other of Slurm's begins like it."""
    known = _VALUED | _FLAGS | _OPTIONAL
    if written in known or written in also:
        return written
    meant = [name for name in known if name.startswith(written)]
    return meant[0] if len(meant) == 1 else written


def _short(letters: str, rest: Iterator[str]) -> list[Word]:
    found: list[Word] = []
    while letters:
        letter, letters = letters[0], letters[1:]
        name = LETTERS.get(letter, letter)
        if name in _FLAGS:
            found.append(Word(name))
        elif name in _OPTIONAL:
            found.append(Word(name, letters or None))
            break
        else:
            # getopt takes "-p=gpu" as the value "=gpu"; Slurm leaves the sign out.
            found.append(Word(name, letters.removeprefix("=") if letters else next(rest, None)))
            break
    return found


def quoted(word: Word) -> str:
    """As it is written in a directive, so that `split` gives the same value back."""
    if word.value is None:
        return f"--{word.name}"
    if _PLAIN.fullmatch(word.value):
        return f"--{word.name}={word.value}"
    inner = word.value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{word.name}="{inner}"'

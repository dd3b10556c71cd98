"""Scripts: a user's text reaches the executor byte for byte; our directives stand after its own.

Options are read as `sbatch` reads them (20.11 to 25.x); what is not known here is passed on: a newer Slurm
may know it. Two things are changed, and said: a directive that `sbatch` would refuse or that contradicts what
is asked gets one `#` more (its other options are said again in ours), and a script whose every line ends as
Windows ends lines gets ends that a shell and Slurm can read.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence


# -- options as sbatch reads them ----------------------------------------------------------------------

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

SBATCH_OPTIONS: Final = _VALUED | _FLAGS | _OPTIONAL
"""All long ones."""

PARTS: Final = frozenset({"hetjob", "packjob"})
"""Stand alone in a line, between the parts of a job that have directives of their own."""

_PLAIN = re.compile(r"[\w@%+=:,./\[\]{}*?!&|~^<>();$-]+")
"""Needs no quotes in a directive: Slurm knows no variables and no globs there."""


class Word(NamedTuple):
    """One option as it was meant: `name` is long and whole, `value` None where there is none."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


_BLANKS = " \t\r\n\v\f"
_WORD = re.compile(rf"""(?:[^{_BLANKS}#'"\\]|\\.?|'[^']*'|"(?:[^"\\]|\\.)*")+""", re.DOTALL)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.?)""", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def split(text: str) -> list[str]:
    """The words of a directive. Quotes and backslashes work, and `#` outside quotes begins a comment."""
    words: list[str] = []
    at = 0
    while at < len(text) and text[at] != "#":
        if text[at] in _BLANKS:
            at += 1
            continue
        if (word := _WORD.match(text, at)) is None:
            raise ValueError(f"the quote {text[at]} is never closed")
        at = word.end()
        plain = lambda part: (part[1] or "") + _ESCAPED.sub(r"\1", part[2] or "") + (part[3] or "")  # noqa: E731
        words.append(_QUOTED.sub(plain, word[0]))
    return words


def read_words(words: Sequence[str], also: Collection[str] = ()) -> list[Word]:
    """Options as `getopt_long` reads them: `-pgpu`, `-p gpu`, `--part gpu`, `--partition=gpu` are one.

    `also` names long options with values beside Slurm's own.
    """
    options: list[Word] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        if word.startswith("--"):
            value: str | None
            name, equals, value = word[2:].partition("=")
            if name not in SBATCH_OPTIONS and name not in also:
                # It may be cut short where no other of Slurm's begins like it.
                meant = [each for each in SBATCH_OPTIONS if each.startswith(name)]
                name = meant[0] if len(meant) == 1 else name
            if not equals:
                value = next(rest, None) if name in _VALUED or name in also else None
            options.append(Word(name, value))
        elif word.startswith("-") and len(word) > 1:
            options += _short(word[1:], rest)
        elif word in PARTS:
            options.append(Word(word))
        # What else stands there, sbatch does not look at either.
    return options


def _short(letters: str, rest: Iterator[str]) -> Iterator[Word]:
    while letters:
        letter, letters = letters[0], letters[1:]
        name = LETTERS.get(letter, letter)
        if name in _FLAGS:
            yield Word(name)
            continue
        if name in _OPTIONAL:
            yield Word(name, letters or None)
        else:
            # getopt takes "-p=gpu" as the value "=gpu"; Slurm leaves the sign out.
            yield Word(name, letters.removeprefix("=") if letters else next(rest, None))
        break


def quoted(word: Word) -> str:
    """As it is written in a directive, so that `split` gives the same value back."""
    if word.value is None or _PLAIN.fullmatch(word.value):
        return str(word)
    inner = word.value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{word.name}="{inner}"'


# -- scripts -------------------------------------------------------------------------------------------

_SLURM: Final = b"#SBATCH"
_OURS: Final = b"#HEADRACE"
_BYTES_MAX: Final = 4 << 20
"""Slurm's own limit (max_script_size) is 4 MiB where nobody changed it."""

_SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ksh"})


class Directive(NamedTuple):
    """One line of options."""

    line: int
    words: tuple[Word, ...]
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """A script as it was read.

    Attributes:
        lines: with their ends.
        directives: those that `sbatch` would read, and ours.
    """

    name: str
    lines: tuple[bytes, ...]
    directives: tuple[Directive, ...]
    insert_at: int
    remarks: tuple[str, ...] = ()

    @property
    def interpreter(self) -> list[str]:
        """The words after `#!`."""
        return self.lines[0][2:].decode(errors="replace").split()

    @property
    def is_shell(self) -> bool:
        """Whether lines of POSIX shell may stand in it."""
        words = [word.rpartition("/")[2] for word in self.interpreter]
        if words[:1] == ["env"]:
            words = [word for word in words[1:] if not word.startswith("-")]
        return bool(words) and words[0] in _SHELLS

    @property
    def data(self) -> bytes:
        """The text as it is."""
        return b"".join(self.lines)

    def with_lines(
        self,
        directives: Sequence[Word],
        preamble: Sequence[str] = (),
        *,
        disabled: Collection[int] = (),
    ) -> bytes:
        """The text with our directives behind its own, then shell lines; without those that are disabled."""
        own = enumerate(self.lines[: self.insert_at], 1)
        before = [b"#" + line if number in disabled else line for number, line in own]
        if before and not before[-1].endswith(b"\n"):
            before[-1] += b"\n"
        ours = [f"#SBATCH {quoted(word)}" for word in directives] + list(preamble)
        added = b"".join(line.encode(errors="surrogateescape") + b"\n" for line in ours)
        return b"".join([*before, added, *self.lines[self.insert_at :]])


def read_script(data: bytes, name: str, also: Collection[str] = ()) -> Script:
    """What a script says.

    Raises:
        ClusterRequestError: no executor could run it: it is empty, too large, has no `#!`, holds a zero byte,
            has line ends of two kinds, or a directive whose quote is never closed.
    """
    _refuse(data, name)
    remarks: tuple[str, ...] = ()
    # Only LF ends a line: a lone CR (a progress bar in a heredoc) does not.
    lines = tuple(re.findall(rb"[^\n]*\n|[^\n]+", data))
    if b"\r\n" in data:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n") and not line.endswith(b"\r\n"):
                raise ClusterRequestError(
                    f"{name}: some lines end with CR LF, line {number} with LF; Slurm takes LF only, and "
                    "which of them are meant cannot be told.",
                    path=name, next_step=f"Convert it: sed -i 's/\\r$//' {name}",
                )  # fmt: skip
        lines = tuple(line.removesuffix(b"\r\n") + b"\n" * line.endswith(b"\n") for line in lines)
        remarks = (f"{name}: lines end as on Windows (CR LF), which Slurm refuses; sent with LF.",)
    directives: list[Directive] = []
    insert_at = 1
    for number, line in enumerate(lines, 1):
        if (directive := _directive(line, number, name, also)) is not None:
            directives.append(directive)
            insert_at = number
        elif line.strip() and not line.lstrip().startswith(b"#"):
            break
    return Script(name, lines, tuple(directives), insert_at, remarks)


def _refuse(data: bytes, name: str) -> None:
    why, next_step = "", None
    if not data.strip():
        why = "the script is empty"
    elif len(data) > _BYTES_MAX:
        why = f"the script has {len(data):,} bytes, Slurm takes {_BYTES_MAX:,}"
        next_step = "Keep data in files of their own."
    elif b"\0" in data:
        why = f"byte {data.index(0):,} is zero; Slurm takes text only"
        next_step = "Submit a script that starts this program."
    elif not data.startswith(b"#!"):
        first = data.split(b"\n", 1)[0][:40].decode(errors="replace")
        mark = "It begins with a byte order mark. " if data.startswith(b"\xef\xbb\xbf") else ""
        why = f"line 1 is {first!r}, expected #! and an interpreter"
        next_step = f"{mark}Begin it with #!/bin/bash."
    if why:
        raise ClusterRequestError(f"{name}: {why}.", path=name, next_step=next_step)


def _directive(line: bytes, number: int, name: str, also: Collection[str]) -> Directive | None:
    if (marker := next((m for m in (_SLURM, _OURS) if line.startswith(m)), None)) is None:
        return None
    try:
        words = split(line[len(marker) :].decode(errors="surrogateescape"))
        read = _own_words(words) if marker == _OURS else read_words(words, also)
    except ValueError as e:
        raise ClusterRequestError(
            f"{name}, line {number}: {e}: {line.decode(errors='replace').strip()}", path=name
        ) from None
    return Directive(number, tuple(read), ours=marker == _OURS)


def _own_words(words: Sequence[str]) -> list[Word]:
    """Long options only: a letter means another thing to `sbatch` than to us."""
    options: list[Word] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options.append(Word(name, value if equals else None))
        elif options and options[-1].value is None and not word.startswith("-"):
            options[-1] = Word(options[-1].name, word)
        else:
            raise ValueError(f"{word!r} is no long option")
    return options


def node_daemon_lines(program: str, arguments: list[str]) -> str:
    """Lines for a batch script, one daemon per node, or for a task prolog and epilog."""
    start = shlex.join([program, "node", "start", "--foreground", *arguments])
    background = shlex.join([program, "node", "start", *arguments])
    quoted = shlex.quote(program)
    return f"""\
# In a batch script: a job step with one daemon on each node. It ends with the job.
export HEADRACE_RUNTIME_DIR="${{SLURM_TMPDIR:-/tmp}}/headrace-$SLURM_JOB_ID"
srun --overlap --ntasks-per-node=1 --ntasks="$SLURM_NNODES" {start} &

# Or in the site's Prolog and Epilog, which run as root once per node and job:
#   runuser -u "$SLURM_JOB_USER" -- {background}
#   runuser -u "$SLURM_JOB_USER" -- {quoted} node stop --force
"""

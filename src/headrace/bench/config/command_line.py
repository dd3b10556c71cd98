"""The command line: hydra's, as DLIO is called with it.

    workload=unet3d_h100 ++workload.reader.batch_size=8 --config-dir=DIR ++hydra.run.dir=DIR

`++x=v` sets a key, `+x=v` adds one, `x=v` changes one that is there, `~x` takes one away. What hydra can do
beyond running one job (sweeps, launchers, its logging) is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CommandLine", "Override", "parse_command_line"]

_ASSIGNMENT: Final = re.compile(
    r"(?P<sign>\+\+|\+|~|)(?P<key>[A-Za-z_][\w./@-]*)(?:=(?P<value>.*))?", re.DOTALL
)
_DIRECTORY: Final = {"--config-dir", "-cd"}
_REFUSED: Final = {
    "--multirun": "run the command once for each value",
    "-m": "run the command once for each value",
    "--config-path": "give --config-dir, which is looked at first",
    "-cp": "give --config-dir, which is looked at first",
    "--config-name": "the workload is named by workload=NAME",
    "-cn": "the workload is named by workload=NAME",
    "--experimental-rerun": "give the overrides again",
    "--shell-completion": "the shell completes `headrace` itself",
    "-sc": "the shell completes `headrace` itself",
}


@dataclass(frozen=True, slots=True)
class Override:
    """One word of the command line about a key of the workload."""

    sign: str
    """++, +, ~ or nothing."""
    key: str
    value: str | None
    """As written; None without `=`."""
    written: str
    """The whole word."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line says, before any file is read."""

    workload: str = "default"
    config_dir: str | None = None
    run_dir: str | None = None
    """`hydra.run.dir`."""
    output_subdir: str = ".hydra"
    """`hydra.output_subdir`: where the configuration is written, below the output folder."""
    overrides: tuple[Override, ...] = ()
    task_overrides: tuple[str, ...] = ()
    """All that hydra lists in overrides.yaml: what is not about hydra itself."""
    hydra_overrides: tuple[str, ...] = ()


def parse_command_line(words: Sequence[str]) -> CommandLine:
    """Read the words after the program's name.

    Raises:
        WorkloadError: a word makes no sense, or asks for what is not done here; names all of them.
    """
    reading = _Reading()
    rest = list(words)
    while rest:
        reading.word(rest.pop(0), rest)
    if reading.problems:
        raise WorkloadError("\n".join(reading.problems))
    return CommandLine(
        workload=reading.workload,
        config_dir=reading.config_dir,
        run_dir=reading.hydra.get("hydra.run.dir"),
        output_subdir=reading.hydra.get("hydra.output_subdir", ".hydra"),
        overrides=tuple(reading.overrides),
        task_overrides=tuple(reading.task),
        hydra_overrides=tuple(reading.of_hydra),
    )


class _Reading:
    """One pass over the words; goes on after a problem, so that all are told at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.workload = "default"
        self.config_dir: str | None = None
        self.hydra: dict[str, str] = {}
        self.overrides: list[Override] = []
        self.task: list[str] = []
        self.of_hydra: list[str] = []

    def word(self, word: str, rest: list[str]) -> None:
        if word.startswith("-"):
            self._option(word, rest)
            return
        match = _ASSIGNMENT.fullmatch(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            self.problems.append(
                f"{word!r} makes no sense, expected KEY=VALUE such as workload=NAME"
            )
            return
        sign, key, value = match["sign"], match["key"], match["value"]
        if key.split(".")[0] == "hydra":
            self._about_hydra(word, key, value)
        elif key == "workload" and sign == "~":
            self.problems.append(f"{word!r}: a run needs a workload")
        elif key == "workload":
            self.workload = _unquoted(value)
            self.task.append(word)
        elif key.startswith("workload."):
            name = key.removeprefix("workload.")
            self.overrides.append(Override(sign, name, value, word))
            self.task.append(word)
        else:
            self.problems.append(
                f"{word!r}: {key} is no key, did you mean {sign or '++'}workload.{key}?"
            )

    def _option(self, word: str, rest: list[str]) -> None:
        name, equals, value = word.partition("=")
        if name in _DIRECTORY:
            if not equals:
                value = rest.pop(0) if rest else ""
            if not value:
                self.problems.append(f"{name} needs a folder that holds workload/NAME.yaml")
            self.config_dir = value
        elif name in _REFUSED:
            self.problems.append(f"{name} is not done here: {_REFUSED[name]}")
        else:
            self.problems.append(f"{name} is not known; it is no option of DLIO's command line")

    def _about_hydra(self, word: str, key: str, value: str | None) -> None:
        if key in ("hydra.run.dir", "hydra.output_subdir") and value:
            self.hydra[key] = _unquoted(value)
            self.of_hydra.append(word)
        elif key == "hydra.job.chdir" and (value or "").lower() == "false":
            self.of_hydra.append(word)  # it is what is done
        else:
            self.problems.append(
                f"{word!r}: of hydra only hydra.run.dir and hydra.output_subdir have a meaning here"
            )


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value

"""`swrun`, `swbatch`, `swqueue`: HAL's three commands, with its options and its short words for sizes.

Each option of HAL's table means there what it means here; the long options of `headrace cluster` are taken too.
A bare number as a time is hours where the size is one of HAL's short words (`gpux4`, `cpun2`, `cpu_mini`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.cli.printing import Output, report
from headrace.cluster.request import JOB_OPTIONS, NOT_IN_THE_FOREGROUND, OptionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


_REFRESH_S: Final = 60.0
"""HAL's: by default, and at least."""

_SIZES: Final = (
    "gpuxN: N GPUs; cpunN: N whole nodes; cpu_mini: a few CPUs. Any N. Or a partition by its name."
)


def _entry(command: Callable[[Sequence[str]], int]) -> Callable[[], None]:
    """A program: the command with the words of the command line, ended with its exit code."""

    def run() -> None:
        words = sys.argv[1:]
        try:
            code = command(words)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001 - every end has its exit code
            code = report(e, as_json="--json" in words, verbose=False)
        sys.exit(code)

    return run


class _Version(argparse.Action):
    """Prints our version and Slurm's, as HAL's `-v` does."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="versions of headrace and Slurm")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import headrace

        print(f"{parser.prog} of headrace {headrace.__version__}, {_slurm_version()}")
        parser.exit()


def _slurm_version() -> str:
    try:
        ended = subprocess.run(
            ["sinfo", "--version"],  # noqa: S607 - where the user's PATH has it
            check=False, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "no Slurm"
    return ended.stdout.strip() or "no Slurm"


def _parser(name: str, what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(name, description=what, allow_abbrev=False)
    parser.add_argument("-v", "--version", action=_Version)
    return parser


def _add_asks(
    parser: argparse.ArgumentParser, *, letters: bool, without: Collection[str] = ()
) -> None:
    for option in JOB_OPTIONS:
        if option.field in without:
            continue
        names = [f"-{option.hal}"] if letters and option.hal else []
        names += [option.flag, *(f"--{word}" for word in option.words)]
        help_text = _SIZES if option.field == "partition" else option.help.replace("%", "%%")
        form: dict[str, Any] = {"action": "store_true"}
        if option.kind is not OptionKind.FLAG:
            action = "append" if option.kind is OptionKind.TEXTS else "store"
            help_text += " [may be repeated]" if action == "append" else ""
            form = {"action": action, "metavar": option.metavar or option.kind.value}
        parser.add_argument(*names, dest=option.field, help=help_text, **form)
    parser.add_argument("--executor", metavar="NAME", help="slurm, ray, kubernetes or local")
    parser.add_argument("--site", type=Path, metavar="FILE", help="the site's file")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="a saved snapshot")
    parser.add_argument("-d", "--dry-run", action="store_true", help="print it, submit nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _asked(given: argparse.Namespace) -> Any:
    from headrace.cli.cluster_submit import Asked

    values = {option.field: getattr(given, option.field, None) for option in JOB_OPTIONS}
    return Asked(values, given.executor, given.site, given.source, given.dry_run)


@_entry
def swrun(words: Sequence[str]) -> int:
    """An interactive shell, or a command."""
    from headrace.cli.cluster_submit import run_command

    parser = _parser("swrun", "An interactive shell, or a command, on the GPUs that are asked for.")
    _add_asks(parser, letters=True, without=NOT_IN_THE_FOREGROUND)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="[--] [COMMAND ...]", help="default: a shell"
    )
    given = parser.parse_args(words)
    if given.partition is None and given.gpus is None and given.nodes is None:
        parser.error(f"-p is missing. {_SIZES}")
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    return run_command(_asked(given), command, Output(as_json=given.json))


@_entry
def swbatch(words: Sequence[str]) -> int:
    """A script."""
    from headrace.cli.cluster_submit import submit_script

    parser = _parser("swbatch", "Submits a script; sizes stand in it: #SBATCH --partition=gpux4.")
    _add_asks(parser, letters=False)
    parser.add_argument("script", metavar="RUN_SCRIPT", help="a batch script; - for standard input")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="[ARGUMENTS ...]", help="for the script"
    )
    given = parser.parse_args(words)
    return submit_script(_asked(given), given.script, given.arguments, Output(as_json=given.json))


@_entry
def swqueue(words: Sequence[str]) -> int:
    """Nodes and jobs."""
    from headrace.cli.cluster_queue import ROWS, show_queue
    from headrace.cluster.plan import cluster_snapshot

    parser = _parser("swqueue", "Nodes, real GPU numbers, who has what, who waits for what.")
    add = parser.add_argument
    add("-s", "--show", action="store_true", help="show it once (as without any option)")
    add("-m", "--monitor", action="store_true", help="show it again and again, until Ctrl-C")
    add("-t", "--timestep", type=float, default=_REFRESH_S, metavar="SECONDS",
        help="between looks, 60 or more (60)")  # fmt: skip
    several: dict[str, Any] = {"nargs": "+", "default": []}
    add("-u", "--users", **several, metavar="USER", help="only these users")
    add("--fpuser", **several, metavar="USER", help="all that these users have, each line")
    add("-n", "--nodev", **several, metavar="NODE", help="only these nodes, each line")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="a saved snapshot")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(words)
    if given.timestep < _REFRESH_S:
        parser.error(f"-t is {given.timestep:g}, expected 60 seconds or more")
    return show_queue(
        Output(as_json=given.json), lambda: cluster_snapshot(None, given.source, jobs=True),
        users=[*given.users, *given.fpuser], nodes=given.nodev,
        rows=None if given.fpuser or given.nodev else ROWS,
        watch=given.timestep if given.monitor else None,
    )  # fmt: skip

"""The `headrace` command: which commands there are, and how each of them ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from headrace.cli import exit_codes
from headrace.cli.commands import NAMES, SECTIONS, add_commands

__all__ = ["app_for"]

_HELP = """Feeds deep-learning training: every sample, in exact random order, at the storage's speed.

Exit codes: 0 done, 1 a finding (bad samples, samples left out), 2 usage, 3 a store, source or disk
error, 4 a bug in headrace, 130 interrupted.
"""

_SHORT = 112
"""Characters of a command's line of help: all that ours have, in a terminal that is wide enough."""


class _Commands(TyperGroup):
    """Turns what a command returns or raises into an exit code and, with `--json`, into JSON."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Runs the command line `args` and exits; other arguments are passed on."""
        from headrace.cli.failure import report

        given = list(sys.argv[1:] if args is None else args)
        # What follows `run`, `record` and `launch`, and what follows `--`, are the words of another program.
        ours = given[: given.index("--")] if "--" in given else given
        as_json = "--json" in ours and ours[:1] not in (["run"], ["launch"], ["record"])
        extra["standalone_mode"] = False
        try:
            code = super().main(given, *rest, **extra)
            if code == exit_codes.INTERRUPTED:
                report(_interrupted(given), as_json=as_json, verbose=False)
        except typer.TyperException as e:
            if as_json or not hasattr(e, "show"):
                code = report(ValueError(e.format_message()), as_json=as_json, verbose=False)
            else:
                e.show()
                code = exit_codes.USAGE
        except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001 - every end has its exit code
            code = report(e, as_json=as_json, verbose=_verbose(ours))
        sys.exit(code or exit_codes.OK)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands by what they are for."""
        width = max(map(len, self.list_commands(ctx)))
        for title, names in SECTIONS.items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(_SHORT))
                for name in names
                if name in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Runs the chosen command. A reader of our output that goes away (`| head`) is no error."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # So that the interpreter's last flush succeeds.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return exit_codes.OK
        return code


def _interrupted(given: list[str]) -> KeyboardInterrupt:
    interrupt = KeyboardInterrupt("interrupted")
    if given[0] in ("pack", "append"):
        interrupt.add_note("What is packed is kept: the same command goes on from there.")
    return interrupt


def _verbose(given: list[str]) -> bool:
    return any(
        argument == "--verbose"
        or (argument[:1] == "-" and argument[1:2] != "-" and "v" in argument)
        for argument in given
    )


def app_for(words: Sequence[str] = ()) -> typer.Typer:
    """The command line for these words: with the one command that they name, or with all."""
    app = typer.Typer(
        name="headrace",
        cls=_Commands,
        help=_HELP,
        no_args_is_help=True,
        # Plain help and errors: rich's panels would cost as much time as all the rest.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 132},
    )
    # A single command would be taken for the program itself, without its name.
    app.callback()(_nothing)
    add_commands(app, words[:1] if words and words[0] in NAMES else NAMES)
    return app


def _nothing() -> None:
    """Nothing is done before the command."""


def __getattr__(name: str) -> typer.Typer:
    """`app`: with all commands, for tests and tools."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app: typer.Typer = app_for()
    globals()["app"] = app
    return app

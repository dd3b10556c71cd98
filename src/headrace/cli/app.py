"""App: the `headrace` command: which commands there are, where each lives, and how it ends.

A command's module is imported only when that command runs: dozens of others, with all their options, take
typer three times as long as the interpreter needs to start. `headrace --help` prints this module's table.
"""

from __future__ import annotations

import copy
import math
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

import typer
from typer import Option
from typer.core import TyperGroup

from headrace.cli import exit_codes
from headrace.cli.options import Command, expanded, limits_of

_HELP = """Feeds deep-learning training: every sample, in exact random order, at the storage's speed.

Begin with `headrace doctor YOUR_DATA`; with torch, `headrace demo`.
"""

_EXIT_CODES = """Exit codes: 0 done, 1 a finding (bad samples, samples left out), 2 usage, 3 a store,
source or disk error, 4 a bug in headrace, 130 interrupted."""

SECTIONS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "Data": {
        "pack": ("pack", "Copy a data set into a store: folders, tar, Parquet, ..."),
        "index": ("pack", "Index files where they lie, without a copy."),
        "tokenize": ("pack", "Encode texts as documents of tokens, for language models."),
        "append": ("pack", "Add samples to a store, as a new segment."),
        "info": ("store", "Show samples, sizes, classes, checksums, residency."),
        "read": ("store", "Read an epoch as training would, and say how fast."),
        "verify": ("pack", "Read and check everything; exit with 1 if anything is bad."),
        "repair": ("pack", "Verify, then mend what the source still has."),
        "ls": ("store", "List samples: index, bytes, class and name."),
        "cat": ("store", "Write the bytes of a sample to stdout."),
        "cache": ("store", "List and remove caches on the local disk."),
    },
    "Train": {
        "demo": ("install", "Train on real images, interrupt, resume, compare. Needs torch."),
        "init": ("install", "Make a project that runs: script, batch job, checkpoints."),
        "run": ("programs", "Run a program as it is; its files come from memory."),
        "launch": ("launch", "Run a training script on all nodes of this job."),
        "mount": ("programs", "Show a store as a read-only folder."),
        "unmount": ("programs", "Take a mounted store away."),
    },
    "Measure": {
        "doctor": ("experiments", "Say how fast your data can be loaded, and what to do first."),
        "report": ("reports", "Show where a run's time went, and what to do."),
        "top": ("top", "Show live who waits for data, and why."),
        "bench": ("bench", "Measure storage the way training uses it: DLIO's workloads."),
        "record": ("programs", "Write a program's reads as a workload."),
        "ab": ("experiments", "Run a command with and without headrace in turn, and compare."),
        "scaling": ("launch", "Run a project on 1, 2, 4, 8 ranks, and compare."),
        "whatif": ("experiments", "Predict a job's steps on other storage."),
        "verify-epoch": ("reports", "Prove that every sample was delivered exactly once."),
        "compare-runs": ("reports", "Tell what differs between two runs."),
    },
    "Clusters": {
        "cluster": ("cluster", "Run training on a Slurm cluster, or here in the same words."),
        "agent": ("daemons", "Start, stop and watch the agent, which tells who waits here."),
        "web": ("web", "Serve live pages: who waits for data and why."),
        "starving": ("reports", "Rank jobs by GPU-hours lost to waiting for data."),
        "usage": ("reports", "Print hours and efficiency by user and account."),
        "job-report": ("reports", "Print what a job had, used, and waited for."),
        "grafana": ("install", "Print the Grafana dashboard, and alerts for Prometheus."),
    },
    "Serve": {
        "node": ("daemons", "One cache for all jobs of this node (`plane='node'`)."),
        "stage": ("serve", "Copy a data set to the nodes' disks, and serve it."),
        "export": ("serve", "Export files, devices or stores over NVMe/TCP."),
        "control": ("control", "Start, stop and watch the controller of many planes."),
        "policy": ("control", "Say which jobs, users and file systems may have how much."),
        "job": ("serve", "Show how a job's staging is doing."),
        "image": ("serve", "Write a store as one image for any NVMe target."),
    },
    "This installation": {
        "config": ("install", "Flags and folders of the C API."),
        "version": ("install", "Version, native build, Python, platform."),
    },
}  # fmt: skip
"""Each command by what it is for: the module where it lives, and its line of `headrace --help`."""

SELDOM: Final = frozenset({
    "repair", "ls", "cat", "cache", "unmount", "whatif", "verify-epoch", "compare-runs", "grafana",
    "job", "image", "config", "version",
})  # fmt: skip
"""Commands that `headrace --help` leaves to `headrace --all`: the rest is one screen."""

NAMES: Final = tuple(name for section in SECTIONS.values() for name in section)
"""All first words."""

_GROUPS: Final = frozenset(
    ("bench", "cache", "node", "control", "policy", "agent", "grafana", "cluster")
)
"""Commands that have commands of their own."""

_ALL = "headrace.cli.app.all"

_FOR_HELP: Final = ("--help", "-h", "--all", "--version")
"""First words that need no command's module; without any word there is help."""

_LAUNCHERS: Final = ("run", "record", "launch", "ab")
"""What follows the own options of these is another program's."""


class _Coercion:
    """Turns a parameter's words into its value, by typer only where they are more than text.

    typer loads pydantic for that, which costs a command that was given texts and flags half of its start.

    Args:
        parameter: typer's; where a version of it has no such hook, nothing of this is used.
    """

    def __init__(self, parameter: Any) -> None:
        annotation = parameter.type_descriptor.annotation
        parser = parameter.type_descriptor.parameter_info.parser
        self._text = annotation in (str, list[str]) and parser is None
        self._plain = annotation if annotation in (bool, int, float) and parser is None else None

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value of what was given; None: nothing was."""
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if type(value) is self._plain:  # a default
            return value
        words = value if many and isinstance(value, list | tuple) else [value]
        if self._text and all(isinstance(word, str) for word in words):
            return list(words) if many else value
        if self._plain in (int, float) and isinstance(value, str):
            return self._number(value, param)
        param._runtime_param = None  # noqa: SLF001 - typer makes its own when it is asked next
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)

    def _number(self, word: str, param: Any) -> float:
        """As typer reads it, with what was found and what is expected, and without pydantic."""
        kind = "a whole number" if self._plain is int else "a number"
        limits = limits_of(param)
        try:
            number = int(word) if self._plain is int else float(word)
        except ValueError:
            raise typer.BadParameter(f"{word!r}, expected {kind}", param=param) from None
        least, most = (getattr(param, name, None) for name in ("min", "max"))
        fits = (least is None or number >= least) and (most is None or number <= most)
        if not fits or not math.isfinite(number):
            expected = ", ".join(filter(None, (kind, limits)))
            raise typer.BadParameter(f"{word}, expected {expected}", param=param)
        return number


def _coerce_plainly(command: Any) -> None:
    """Let a command and those below it load nothing for texts."""
    usual = command.get_params

    def get_params(ctx: Any) -> list[Any]:
        parameters: list[Any] = usual(ctx)
        for parameter in parameters:
            if getattr(parameter, "_runtime_param", parameter) is None:
                parameter._runtime_param = _Coercion(parameter)  # noqa: SLF001 - `_Coercion` says why
        return parameters

    command.get_params = get_params
    for each in getattr(command, "commands", {}).values():
        _coerce_plainly(each)


def _name_all_words(error: Any) -> None:
    """Say which words a command takes, where there are too few of `SOURCE... TARGET`, or too many."""
    missing: Any = getattr(error, "param", None)
    context: Any = getattr(error, "ctx", None)
    parameters = context.command.params if context is not None else ()
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    if missing in arguments and missing.nargs == -1:
        # The last word given is the target: both are missing, not the source.
        error.param_hint = error.param_hint or f"'{' '.join(each.metavar for each in arguments)}'"
    elif arguments and error.message.startswith("Got unexpected extra argument"):
        taken = ", ".join(f"{each.metavar} ({(each.help or '').rstrip('.')})" for each in arguments)
        error.message += f": {context.command_path} takes {taken}."


_NO_EXPLAIN = (
    "No such command 'explain'. `headrace top` says what programs wait for now, `headrace report` what a run "
    "waited for; `hr.explain(loader)` is Python's."
)


class _Interrupted(Exception):
    """Ctrl-C in a command, its cause: typer would end the program itself, and lose what the cause says."""


class _Commands(TyperGroup):
    """Turns what a command returns or raises into an exit code and, with `--json`, into JSON."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Runs the command line `args` and exits; other arguments are passed on."""
        from headrace.cli.printing import report

        given = list(sys.argv[1:] if args is None else args)
        # What follows `run`, `record` and `launch`, and what follows `--`, are the words of another program.
        ours = given[: given.index("--")] if "--" in given else given
        as_json = "--json" in ours and ours[:1] not in (["run"], ["launch"], ["record"])
        extra["standalone_mode"] = False
        _coerce_plainly(self)
        try:
            code = super().main(given, *rest, **extra)
        except typer.TyperException as e:
            _name_all_words(e)
            if as_json or not hasattr(e, "show"):
                code = report(ValueError(e.format_message()), as_json=as_json, verbose=False)
            else:
                e.show()
                code = exit_codes.USAGE
        except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001 - every end has its exit code
            cause = e.__cause__ if isinstance(e, _Interrupted) else None
            verbose = any(re.match(r"--verbose$|-[^-]*v", word) for word in ours)
            code = report(cause or e, as_json=as_json, verbose=verbose)
        sys.exit(code or exit_codes.OK)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command; who looks for Python's `explain` is told where it is."""
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as e:
            if args[0] == "explain":
                e.message = _NO_EXPLAIN
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes commands by what they are for, whichever were imported; with `--all` each of them."""
        every = ctx.meta.get(_ALL, False)
        width = max(map(len, NAMES))
        formatter.write_paragraph()
        for title, commands in SECTIONS.items():
            shown = {n: line for n, (_, line) in commands.items() if every or n not in SELDOM}
            if shown:
                formatter.write(f"{title}:\n")
                with formatter.indentation():
                    formatter.write_dl([(n.ljust(width), line) for n, line in shown.items()])
        more = "" if every else f"`headrace --all` shows {len(SELDOM)} more commands. "
        formatter.write_paragraph()
        formatter.write_text(f"{more}`headrace COMMAND --help` has examples. {_EXIT_CODES}")

    def invoke(self, ctx: Any) -> Any:
        """Runs the chosen command. A reader of our output that goes away (`| head`) is no error."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # So that the interpreter's last flush succeeds.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return exit_codes.OK
        except KeyboardInterrupt as e:
            raise _Interrupted from e
        return code


def app_for(words: Sequence[str] | None = None) -> typer.Typer:
    """The command line for these words: with the command that they name, none for help, or all."""
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
    app.callback()(_before_any_command)
    homes = {name: home for commands in SECTIONS.values() for name, (home, _) in commands.items()}
    asks_for_words = "_HEADRACE_COMPLETE" in os.environ  # a shell
    if words and words[0] in homes:
        homes = {words[0]: homes[words[0]]}
    elif words is not None and (words or _FOR_HELP)[0] in _FOR_HELP and not asks_for_words:
        homes = {}
    for name, home in homes.items():
        module = import_module(f"headrace.cli.{home}")
        if name in _GROUPS:
            group = copy.copy(getattr(module, f"{name}_app"))
            # Of the others nobody asks anything: each has dozens of options to be made.
            second = [c for c in group.registered_commands if c.name in (words or ())[1:2]]
            group.registered_commands = second or group.registered_commands
            for each in group.registered_commands:
                each.epilog = _epilog(f"{name} {each.name or each.callback.__name__}")
            app.add_typer(group, name=name)
            continue
        settings = {"allow_interspersed_args": False} if name in _LAUNCHERS else None
        command = getattr(module, name.replace("-", "_"))
        app.command(name, cls=Command, context_settings=settings, epilog=_epilog(name))(
            expanded(command)
        )
    return app


def examples(words: str) -> list[str]:
    """What the help of this command ends with: lines of `examples.txt` that begin with it."""
    lines = Path(__file__).with_name("examples.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if f"{line} ".startswith(f"headrace {words} ")]


def _epilog(words: str) -> str:
    # The mark keeps lines as they are.
    return "\n".join(["Examples:\n\n\b", *(f"  {example}" for example in examples(words))])


def _show_version(value: bool) -> None:
    if value:
        from headrace import __version__

        typer.echo(f"headrace {__version__}")
        raise typer.Exit


def _show_all(context: typer.Context, value: bool) -> None:
    if value:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _before_any_command(
    version: bool = Option(
        False, "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
    ),
    every: bool = Option(
        False, "--all", is_eager=True, callback=_show_all, help="Show all commands and exit."
    ),
) -> None:
    """Options of `headrace` itself."""


def __getattr__(name: str) -> typer.Typer:
    """`app`: with all commands, for tests and tools."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app: typer.Typer = app_for()
    globals()["app"] = app
    return app

"""App: the `headrace` command: which commands there are, where each lives, and how it ends.

A command's module is imported only when that command runs: dozens of others, with all their options, take
typer three times as long as the interpreter needs to start. `headrace --help` prints this module's table.
"""

# ruff: noqa: E501 - a command's line of help is a line of the table

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from headrace.cli import exit_codes
from headrace.cli.options import expanded

_HELP = """Feeds deep-learning training: every sample, in exact random order, at the storage's speed.

Exit codes: 0 done, 1 a finding (bad samples, samples left out), 2 usage, 3 a store, source or disk
error, 4 a bug in headrace, 130 interrupted.
"""

SECTIONS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "First steps": {
        "doctor": ("experiments", "Say how fast your data can be loaded here, what holds it back, and what to do first."),
        "demo": ("install", "Pack real images, train on them, interrupt, resume, and compare with PyTorch's DataLoader."),
        "init": ("install", "Make a training project that runs as it is: script, batch job, data, checkpoints, resume."),
    },
    "Data sets": {
        "pack": ("pack", "Copy a folder, tar, TFRecord, npy, HDF5, Parquet, Arrow, MDS or ArrayRecord into a new store."),
        "index": ("pack", "Index a folder, uncompressed tar, TFRecord, npy, HDF5, Parquet, Arrow or MDS in place: no copy."),
        "tokenize": ("pack", "Encode texts into a store whose samples are documents of tokens, for language models."),
        "append": ("pack", "Add the samples of a source to a store, as a new segment."),
        "info": ("store", "Show samples, sizes, classes, segments, volumes, checksums and page-cache residency."),
        "ls": ("store", "List samples: index, bytes, class and name."),
        "cat": ("store", "Write the bytes of a sample to stdout."),
        "read": ("store", "Read an epoch as training would: throughput, CPU, stall, tiers, and what was tuned and why."),
        "verify": ("pack", "Read and check everything; exit with 1 if anything is bad."),
        "repair": ("pack", "Verify, then mend what the source still has; exit with 1 if something is left."),
        "cache": ("store", "List and remove caches on the local disk (`cache_dir=`)."),
    },
    "Programs": {
        "run": ("programs", "Run a program as it is; files that it opens come from memory where they can."),
        "launch": ("launch", "Run a training script on all nodes of this job (Slurm's, or this machine), and leave nothing behind."),
        "scaling": ("launch", "Run a project on 1, 2, 4, 8 ranks, one job after the other, and put them beside each other."),
        "mount": ("programs", "Show a store as a read-only folder, until it is unmounted."),
        "unmount": ("programs", "Take a mounted store away, also one whose process was killed."),
    },
    "Why training waits": {
        "report": ("reports", "Show where a run's time went: what its steps waited for, on which rank, when, and what to do."),
        "top": ("top", "Show live who starves and why, and where bytes come from."),
        "record": ("programs", "Run a program as it is, and write its reads as a workload: files, sizes, order, step times."),
        "whatif": ("experiments", "Predict how long a job's steps take, and how much of that is waiting for data, elsewhere."),
        "ab": ("experiments", "Run a command with and without headrace in turn; say how much faster it is, and how sure that is."),
        "verify-epoch": ("reports", "Prove from a run's traces that every sample came exactly once over all ranks, in each epoch."),
        "compare-runs": ("reports", "Tell what differs between two runs: versions, seeds, order, data, hardware, settings."),
        "bench": ("bench", "Measure storage the way training uses it: DLIO's workloads, unchanged."),
    },
    "Other nodes' data": {
        "export": ("serve", "Export files, block devices or stores, read-only, until SIGTERM or Ctrl-C."),
        "image": ("serve", "Write a packed store as one image, which any NVMe target can export as a namespace."),
        "stage": ("serve", "Copy a data set to the nodes' local disks, each sample once, and serve it until the job ends."),
        "job": ("serve", "Show how a job's staging is doing: its nodes, what is there, and who is gone."),
    },
    "Nodes": {
        "node": ("daemons", "Start, stop and watch the node daemon: one cache for all jobs (`plane='node'`)."),
        "control": ("control", "Start, stop and watch the controller, which hands policies to planes."),
        "policy": ("control", "Say which jobs, users and file systems may have how much."),
        "agent": ("daemons", "Start, stop and watch the agent, which tells who starves on this node."),
    },
    "Clusters": {
        "cluster": ("cluster", "Run training on a Slurm cluster, or here in the same words."),
        "web": ("web", "Serve live pages: who waits for data and why, what weighs on file systems, policies, samples."),
        "starving": ("reports", "Rank jobs by GPU-hours lost to waiting for data; then users, file systems and causes."),
        "usage": ("reports", "Print hours and efficiency by user and account."),
        "job-report": ("reports", "Print what a job had, used, and waited for, from the agents' history."),
        "grafana": ("install", "The Grafana dashboard that goes with `headrace node start --metrics`."),
    },
    "This installation": {
        "config": ("install", "Flags and folders of the C API, on one line; all of them, named, without options."),
        "version": ("install", "Version, native build, checksum implementation, Python, platform."),
    },
}  # fmt: skip
"""Each command by what it is for: the module where it lives, and its line of `headrace --help`."""

NAMES: Final = tuple(name for section in SECTIONS.values() for name in section)
"""All first words."""

_GROUPS: Final = frozenset(
    ("bench", "cache", "node", "control", "policy", "agent", "grafana", "cluster")
)
"""Commands that have commands of their own."""

_LAUNCHERS: Final = ("run", "record", "launch", "ab")
"""What follows the own options of these is another program's."""


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
        """Writes all commands by what they are for, whichever were imported."""
        del ctx
        width = max(map(len, NAMES))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(n.ljust(width), line) for n, (_, line) in commands.items()])

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
    app.callback()(_nothing)
    names = NAMES
    if words and words[0] in NAMES:
        names = (words[0],)
    elif words and words[0] in ("-h", "--help"):
        names = ()
    for commands in SECTIONS.values():
        for name, (chapter, _) in commands.items():
            if name not in names:
                continue
            module = import_module(f"headrace.cli.{chapter}")
            if name in _GROUPS:
                app.add_typer(getattr(module, f"{name}_app"), name=name)
                continue
            settings = {"allow_interspersed_args": False} if name in _LAUNCHERS else None
            command = getattr(module, name.replace("-", "_"))
            app.command(name, context_settings=settings)(expanded(command))
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

"""What `headrace cluster run|batch`, `swrun` and `swbatch` do with what was asked."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.files import explained
from headrace.base.text import counted
from headrace.cli import exit_codes
from headrace.cli.printing import Output
from headrace.cluster.executor import Submission, executor, executor_name
from headrace.cluster.notation import read_minutes, time_text
from headrace.cluster.plan import Cluster, plan_batch, plan_run
from headrace.cluster.request import JOB_OPTIONS, read_request
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from headrace.cluster.executor import Executor
    from headrace.cluster.layout import JobLayout
    from headrace.cluster.plan import RunPlan


_COMMAND_LINE = "the command line"


@dataclass(frozen=True, slots=True)
class Asked:
    """What stood on the command line.

    Attributes:
        values: by field of a request.
        site: the site's file; None: where it is looked for.
    """

    values: dict[str, Any]
    executor: str | None = None
    site: Path | None = None
    source: Path | None = None
    dry_run: bool = False

    def cluster(self, output: Output) -> Cluster:
        """What the request is laid out on."""
        cluster = Cluster.of(self.executor, self.site, self.source)
        for remark in cluster.remarks:
            output.remark(f"note: {remark}")
        return cluster


def submit_script(asked: Asked, name: str, arguments: Sequence[str], output: Output) -> int:
    """Plan, submit, say what became of it."""
    arguments = _own_arguments(name, arguments)
    data = _script(name)
    request = read_request(asked.values, _COMMAND_LINE)
    plan = plan_batch(
        data, "stdin" if name == "-" else name, request, asked.cluster(output), arguments
    )
    for remark in plan.remarks:
        output.remark(f"note: {remark}")
    described = {
        "command": plan.command, "script": plan.submission.script.decode(errors="surrogateescape"),
        "layout": _layout_document(plan.layout), "remarks": plan.remarks,
    }  # fmt: skip
    if asked.dry_run:
        if output.as_json:
            output.document({"job": None, **described})
        else:
            words = shlex.join([*plan.submission.options, *plan.submission.arguments])
            is_local = executor_name(asked.executor) == "local"
            where = "This machine" if is_local else "The Ray cluster"
            alone = f"{where} runs the script by itself{words and f', with {words}'}."
            text = executor(asked.executor).preview(plan.submission)
            if text == plan.submission.script:
                output.remark(f"command: {shlex.join(plan.command)}" if plan.command else alone)
            sys.stdout.flush()
            sys.stdout.buffer.write(text)
        return exit_codes.OK
    job = executor(asked.executor).submit(plan.submission)
    if output.as_json:
        output.document({"job": job, **described})
    else:
        if plan.layout is not None:
            output.remark(size_text(plan.layout))
        output.line(f"Submitted batch job {job}")  # sbatch's words: scripts look for them
    return exit_codes.OK


_OURS = frozenset(flag for option in JOB_OPTIONS for flag in option.flags) | {
    "--dry-run", "--executor", "--site", "--from", "--json", "--quiet",
}  # fmt: skip


def _own_arguments(name: str, words: Sequence[str]) -> Sequence[str]:
    """What the script gets. An option of ours behind its name may be misplaced: that is asked about.

    Raises:
        ClusterRequestError: nobody can be asked, or the answer is no.
    """
    if words[:1] == ["--"]:
        return words[1:]
    if not (ours := [word for word in words if word.partition("=")[0] in _OURS]):
        return words
    if name != "-" and sys.stdin.isatty() and sys.stderr.isatty():
        print(
            f"{ours[0]} stands after {name}. Is it for the script? [y/N] ", end="", file=sys.stderr
        )
        if sys.stdin.readline().strip().lower() in {"y", "yes"}:
            return words
    raise ClusterRequestError(
        f"{ours[0]} stands after {name}: the script would get it, and it would change nothing of the job.",
        next_step=f"Put it before {name}; or, if it is the script's own, a -- between them: "
        f"{name} -- {shlex.join(words)}",
    )


def _script(name: str) -> bytes:
    next_step = "Give the path of a script, or - for standard input."
    with explained(ClusterError, name, "the script cannot be read", next_step):
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()


def run_command(asked: Asked, command: Sequence[str], output: Output) -> int:
    """Plan, and become the command."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    request = read_request(asked.values, _COMMAND_LINE)
    plan = plan_run(request, command, asked.cluster(output), terminal=terminal or not command)
    for remark in plan.remarks:
        output.remark(f"note: {remark}")
    if asked.dry_run:
        if output.as_json:
            layout = _layout_document(plan.layout)
            output.document({"command": plan.command, "layout": layout, "remarks": plan.remarks})
        else:
            output.line(shlex.join(plan.command))
        return exit_codes.OK
    output.remark(size_text(plan.layout))
    sys.stdout.flush()
    sys.stderr.flush()
    name = request.name or (Path(command[0]).name if command else "interactive")
    runs_on = executor_name(asked.executor)
    if runs_on == "ray" and not command:
        raise ClusterRequestError(
            "Ray has no terminals: no shell can run on its nodes.", next_step="Name a command."
        )
    if runs_on == "ray":
        return _follow(executor(runs_on), plan, name, request.directory)
    if runs_on == "local":
        from headrace.cluster.local.executor import foreground_environment

        os.environ |= foreground_environment(plan.layout, name)
        if request.directory:
            os.chdir(request.directory)
    try:
        # Its signals, its terminal and its exit code are the user's.
        return os.execvp(plan.command[0], plan.command)  # noqa: S606
    except OSError as e:
        what = f"{plan.command[0]} cannot be run: {e.strerror}."
        raise ClusterError(what, next_step="Give its path, or look at PATH.") from e


def _follow(runs_on: Executor, plan: RunPlan, name: str, directory: str) -> int:
    """Run a command as a job, and hand on what it prints; it ends with this process."""
    options = (*map(str, plan.layout.words()), f"--job-name={name}")
    script = f"#!/bin/sh\nexec {shlex.join(plan.command)}\n".encode()
    job = runs_on.submit(Submission(script, options, directory=Path(directory)))
    try:
        for piece in runs_on.logs(job, follow=True):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    except BaseException:
        runs_on.cancel([job])
        raise
    status = runs_on.one(job)
    if status.exit_code is None:
        why = status.why or status.reason
        raise ClusterError(": ".join(filter(None, (f"job {job} is {status.state}", why))) + ".")
    return status.exit_code


def size_text(layout: JobLayout) -> str:
    """What is asked of the cluster, in a line."""
    nodes = f"{counted(layout.nodes, 'node')} of {layout.partition}"
    parts = [f"{counted(layout.gpus, 'GPU')} on {nodes}" if layout.gpus else nodes]
    if layout.cpus_per_task:
        parts.append(f"{layout.cpus_per_task} CPUs a task")
    if layout.time:
        parts.append(time_text(read_minutes(layout.time)))
    return ", ".join(parts)


def _layout_document(layout: JobLayout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    return {name: getattr(layout, name) for name in layout.__slots__ if name != "remarks"}

"""Jobs: projects as users make them, submitted as they are."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from headrace.cluster.executor import JobState, Submission
from headrace.cluster.recipes import make_project, recipe_named

from .ranks import environment, epochs_of
from .resuming import arguments

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.cluster.executor import Executor

__all__ = ["run_job", "tools"]


def tools(folder: Path) -> Path:
    """A folder with `python` and `headrace`, as an environment that has both."""
    folder.mkdir()
    python = shlex.quote(sys.executable)
    (folder / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    program = "from headrace.cli import main; main()"
    (folder / "headrace").write_text(f'#!/bin/sh\nexec {python} -c "{program}" "$@"\n')
    for tool in folder.iterdir():
        tool.chmod(0o755)
    return folder


def run_job(
    executor: Executor,
    recipe: str,
    data: Path,
    folder: Path,
    checkpoints: Path,
    *,
    shape: tuple[str, ...] = ("--ntasks-per-node=2",),
) -> list[dict[str, Any]]:
    """Make a project, submit its batch script with two tasks, and wait; the epochs it tells."""
    project = make_project(recipe_named(recipe), folder / "project")
    (project / "data").symlink_to(data)  # so that prepare.py finds its work done
    log = folder / "job.log"
    own = environment()
    given = {name: own[name] for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")}
    job = executor.submit(
        Submission(
            (project / "job.sh").read_bytes(),
            (f"--output={log}", *shape),
            tuple(arguments(data, checkpoints)),
            project,
            {
                **given,
                "HEADRACE_HISTORY": str(folder / "history"),
                "PATH": f"{tools(folder / 'tools')}:{own['PATH']}",
            },
        )
    )
    (status,) = executor.wait([job], 200.0)[job]
    assert status.state is JobState.COMPLETED, log.read_text()
    return epochs_of(log)

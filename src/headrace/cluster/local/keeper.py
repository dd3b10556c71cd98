"""Keeper: one process for each task that runs: starts the script, holds its limits, ends all that it started.

It is the parent of whatever the script leaves behind (a subreaper), so that nothing can run away from it: not
by a session of its own, nor by a second fork. The script dies if the keeper is killed; what is below the script
is then found by the key in its environment, by the next one who looks (`schedule`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from headrace.cluster.executor import JobState
from headrace.cluster.hostlist import compress_hosts
from headrace.cluster.local.folder import KEY_VARIABLE, JobsFolder, LocalJob, Task
from headrace.cluster.local.schedule import schedule
from headrace.cluster.local.tree import (
    adopt_orphans,
    descendants,
    die_with_parent,
    send,
    started_at,
)
from headrace.cluster.output_pattern import fill_pattern, pattern_facts

__all__ = ["Keeper", "main", "node_names"]

KILL_WAIT_VARIABLE = "HEADRACE_KILL_WAIT_S"
KILL_WAIT_S = 10.0
"""Between SIGTERM and SIGKILL, if the variable says nothing else; Slurm's default is 30 s."""

LEFT_BEHIND_S = 2.0
"""The same, for what a script leaves behind when it ends by itself."""

REQUEUE_EXIT = 75
"""EX_TEMPFAIL: by it a script that may be requeued asks to be."""

_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_LOOK_S = 1.0


def main() -> None:
    """Keep a task: arguments are the job's folder, the task's name, and the descriptor of its lock."""
    folder, name, lock = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.set_inheritable(lock, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    with contextlib.suppress(PermissionError):
        os.setsid()
    adopt_orphans()
    job = LocalJob.load(folder)
    task = next(task for task in job.tasks if task.folder.name == name)
    try:
        Keeper(job, task).run()
    finally:
        os.close(lock)
        schedule(JobsFolder(folder.parent))


def node_names(nodes: int) -> tuple[str, ...]:
    """This machine's name, or those of nodes that are simulated."""
    return (socket.gethostname(),) if nodes == 1 else tuple(f"local{i}" for i in range(nodes))


class Keeper:
    """Of one task, from its start to its end."""

    def __init__(self, job: LocalJob, task: Task) -> None:
        self.job = job
        self.task = task
        self.state = task.read()
        self._script = 0
        self._status: int | None = None
        self._ending = ""
        said = os.environ.get(KILL_WAIT_VARIABLE, "")
        self._kill_wait_s = float(said) if said.replace(".", "", 1).isdigit() else KILL_WAIT_S
        self._kill_at = float("inf")
        self._warned = False
        limit = job.request.time_s
        self._began = time.monotonic()
        self._end_at = float("inf") if limit is None else self._began + limit
        self._warn_at = float("inf")
        if job.request.warn_signal and limit is not None:
            self._warn_at = self._end_at - job.request.warn_s

    def run(self) -> None:
        """Return when nothing of it is left, and the state says how it ended."""
        state = self.state
        state.keeper, state.keeper_started = os.getpid(), started_at(os.getpid()) or 0
        state.output = str(self._path(self.job.request.output or self._default()))
        self.task.write(state)
        try:
            self._start()
        except OSError as e:
            where = e.filename or self.job.script
            self._finish(JobState.FAILED, reason=f"{where}: {e.strerror}", exit_code=127)
            return
        self._watch()
        self._finish(*self._outcome())

    # -- starting ----------------------------------------------------------------------------------

    def _default(self) -> str:
        return "slurm-%j.out" if self.task.number is None else "slurm-%A_%a.out"

    def _path(self, pattern: str) -> Path:
        job, task = self.job, self.task
        facts = pattern_facts(
            str(job.number), job.name, job.user, array_id=str(job.number), task=task.number,
            node=node_names(job.request.nodes)[0],
        )  # fmt: skip
        return Path(job.directory, fill_pattern(pattern, facts))

    def _start(self) -> None:
        request, flags = self.job.request, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        flags |= os.O_APPEND if request.append else os.O_TRUNC | os.O_APPEND
        with contextlib.ExitStack() as opened:

            def keep(path: Path | str, flags: int) -> int:
                fd = os.open(path, flags, 0o666)
                opened.callback(os.close, fd)
                return fd

            given = keep(self._path(request.input) if request.input else os.devnull, os.O_RDONLY)
            out = keep(self.state.output, flags)
            err = keep(self._path(request.error), flags) if request.error else out
            # The script, not the keeper, may be signalled, and dies with the keeper.
            process = subprocess.Popen(  # noqa: S603 - the user's script
                [str(self.job.script), *self.job.arguments],
                stdin=given, stdout=out, stderr=err, cwd=self.job.directory, env=self._environment(),
                start_new_session=True, preexec_fn=_in_the_child,  # noqa: PLW1509 - one thread
            )  # fmt: skip
        self._script = self.state.script = process.pid
        self.task.write(self.state)
        process.returncode = 0  # it is waited for here, with all that it leaves behind

    def _environment(self) -> dict[str, str]:
        job, task, request = self.job, self.task, self.job.request
        nodes = node_names(request.nodes)
        limit = request.time_s
        given = {k: v for k, v in job.environment.items() if not k.startswith("HEADRACE_JOB_")}
        given |= {
            KEY_VARIABLE: job.task_key(task),
            "HEADRACE_JOB_ID": job.task_id(task),
            "HEADRACE_JOB_NAME": job.name,
            "HEADRACE_JOB_NODES": compress_hosts(nodes),
            "HEADRACE_JOB_NODE_INDEX": "0",
            "HEADRACE_JOB_GPUS_PER_NODE": str(request.gpus_per_node),
            "HEADRACE_JOB_TASKS_PER_NODE": str(request.tasks_per_node),
            "HEADRACE_JOB_CPUS_PER_TASK": str(request.cpus_per_task),
            "HEADRACE_JOB_CPUS_PER_NODE": str(request.cpus_per_task * request.tasks_per_node),
            "HEADRACE_JOB_RESTARTS": str(self.state.restarts),
            "HEADRACE_JOB_REQUEUE": str(int(request.requeue)),
            "HEADRACE_JOB_DIRECTORY": job.directory,
        }
        if limit is not None:
            given["HEADRACE_JOB_END_S"] = f"{time.time() + limit:.3f}"
        if self.state.gpus:
            given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.state.gpus))
        if task.number is not None:
            numbers = request.tasks or ()
            for name, value in (
                ("JOB_ID", job.number), ("TASK_ID", task.number), ("TASK_COUNT", len(numbers)),
                ("TASK_MIN", min(numbers)), ("TASK_MAX", max(numbers)),
            ):  # fmt: skip
                given[f"HEADRACE_JOB_ARRAY_{name}"] = str(value)
                # Scripts are written for these; nothing takes them alone for a sign of Slurm.
                given[f"SLURM_ARRAY_{name}"] = str(value)
        return given

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            self._reap()
            now = time.monotonic()
            if self._status is not None and not self._ending:
                self._end("over", LEFT_BEHIND_S)
            left = descendants(os.getpid())
            if self._status is not None and not left:
                return
            if self._ending:
                if now >= self._kill_at:
                    for pid in left:
                        send(pid, signal.SIGKILL)
            elif why := self._must_end(now):
                self._end(why, self._kill_wait_s)
            elif now >= self._warn_at:
                self._warn(left)
            self._sleep()

    def _must_end(self, now: float) -> str:
        asked = next((what for what in ("cancel", "requeue") if self.task.asked(what)), "")
        return asked or ("timeout" if now >= self._end_at else "")

    def _sleep(self) -> None:
        now = time.monotonic()
        until = min(
            now + (0.02 if self._ending else _LOOK_S), self._end_at, self._warn_at, self._kill_at
        )
        signal.sigtimedwait(_WATCHED, max(0.005, until - now))

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._script:
                    self._status = found[1]

    def _end(self, why: str, wait_s: float) -> None:
        self._ending = why
        self._kill_at = time.monotonic() + wait_s
        self._end_at = self._warn_at = float("inf")
        for pid in descendants(os.getpid()):
            send(pid, signal.SIGCONT)
            send(pid, signal.SIGTERM)

    def _warn(self, left: list[int]) -> None:
        """As Slurm: the script alone, or all but the script."""
        self._warn_at = float("inf")
        for pid in left:
            if (pid == self._script) == self.job.request.warn_script:
                send(pid, self.job.request.warn_signal)

    # -- the end -----------------------------------------------------------------------------------

    def _outcome(self) -> tuple[JobState, str, int | None, int | None]:
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        exit_code, number = (code, None) if code >= 0 else (None, -code)
        if self._ending == "cancel":
            return JobState.CANCELLED, "", exit_code, number
        if self._ending == "timeout":
            return JobState.TIMEOUT, "TimeLimit", exit_code, number
        asks = exit_code == REQUEUE_EXIT and self.job.request.requeue
        if self._ending == "requeue" or asks:
            return JobState.PENDING, "requeued", None, None
        if code == 0:
            return JobState.COMPLETED, "", 0, None
        return (
            JobState.FAILED,
            "NonZeroExitCode" if number is None else "RaisedSignal",
            exit_code,
            number,
        )

    def _finish(
        self,
        state: JobState,
        reason: str = "",
        exit_code: int | None = None,
        number: int | None = None,
    ) -> None:
        said = self.state
        said.state, said.reason, said.exit_code, said.signal = state, reason, exit_code, number
        if state == JobState.PENDING:
            said.restarts += 1
            said.started_s = None
        else:
            said.ended_s = time.time()
        self.task.write(said)


def _in_the_child() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

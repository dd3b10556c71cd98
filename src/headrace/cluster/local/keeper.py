"""Keeper: one process for each task that runs: starts the script, holds its limits, ends all that it started.

It is the parent of whatever the script leaves behind (a subreaper), so that nothing can run away from it: not
by a session of its own, nor by a second fork. The script dies if the keeper is killed; what is below the script
is then found by the key in its environment, by the next one who looks (`schedule`).

`schedule` starts what can start, and buries what died. It is run by whoever changed something, one at a time.
Jobs start in their order: one that waits for CPUs or GPUs holds up those behind it, one that waits for another
job does not. A job that asks for more than this machine has runs alone.
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
from typing import TYPE_CHECKING

from headrace.cluster.executor import JobState, fill_pattern, pattern_facts
from headrace.cluster.hostlist import compress_hosts
from headrace.cluster.launch.plan import machine_gpus
from headrace.cluster.local.jobs import KEY_VARIABLE, JobsFolder, LocalJob, LocalTask
from headrace.cluster.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_marked,
    reap,
    send,
    start_time,
)

if TYPE_CHECKING:
    from headrace.cluster.local.jobs import Dependency, LocalTask, TaskState


# -- the schedule --------------------------------------------------------------------------------------

GPUS_VARIABLE = "HEADRACE_LOCAL_GPUS"

KEEPER_MARK = "headrace.cluster.local.keeper"
"""In the command line of each keeper: a job that submits another is not the parent of that one's processes."""

_KEEP = f"from {KEEPER_MARK} import main; main()"
# Put into the background by a shell that ends at once: no zombie is left to the caller.
_BEHIND = '"$@" </dev/null >>"$0" 2>&1 &'


def schedule(jobs: JobsFolder) -> None:
    """Start what can start."""
    with jobs.locked():
        jobs.clean()
        _Pass(jobs).run()


class _Pass:
    def __init__(self, jobs: JobsFolder) -> None:
        self._folder = jobs
        self._jobs = jobs.jobs()
        self._states = {
            (job.number, task.number): task.read() for job in self._jobs for task in job.tasks
        }
        self._cpus = len(os.sched_getaffinity(0))
        gpus = os.environ.get(GPUS_VARIABLE, "")
        self._gpus = int(gpus) if gpus.isdigit() else machine_gpus()

    def run(self) -> None:
        for job in self._jobs:
            for task in job.tasks:
                state = self._state(job, task)
                if state.state != JobState.PENDING and not state.is_over:
                    self._bury(job, task)
        while self._start_some():
            pass
        for job in self._jobs:
            if all(self._state(job, task).is_over for task in job.tasks):
                job.over.touch()

    def _state(self, job: LocalJob, task: LocalTask) -> TaskState:
        return self._states[job.number, task.number]

    # -- the dead ----------------------------------------------------------------------------------

    def _bury(self, job: LocalJob, task: LocalTask) -> None:
        """If its keeper is gone without saying how it ended."""
        if (lock := task.take()) is None:
            return
        try:
            fresh = task.read()  # it may have ended since
            self._states[job.number, task.number] = fresh
            if fresh.state == JobState.PENDING or fresh.is_over:
                return
            end_marked(f"{KEY_VARIABLE}={job.task_key(task)}", 0.0)
            if job.request.requeue and not task.asked("cancel"):
                fresh.state, fresh.restarts = JobState.PENDING, fresh.restarts + 1
            else:
                fresh.state, fresh.ended_s = JobState.NODE_FAIL, time.time()
            fresh.reason = "the keeper was killed"
            task.write(fresh)
        finally:
            os.close(lock)

    # -- the waiting -------------------------------------------------------------------------------

    def _start_some(self) -> bool:
        """One pass over what waits; whether something was cancelled that others may depend on."""
        free_cpus, free_gpus = self._cpus, set(range(self._gpus))
        for job in self._jobs:
            running = [s for s in (self._state(job, t) for t in job.tasks) if self._runs(s)]
            free_cpus -= len(running) * min(job.request.cpus, self._cpus)
            free_gpus -= {gpu for state in running for gpu in state.gpus}
        cancelled = blocked = False
        for job in self._jobs:
            for task in job.tasks:
                state = self._state(job, task)
                if state.state != JobState.PENDING:
                    continue
                verdict = self._dependencies(job, task)
                if verdict is None and job.request.kill_on_invalid_dependency:
                    state.state, state.ended_s = JobState.CANCELLED, time.time()
                    cancelled = True
                reason = "DependencyNeverSatisfied" if verdict is None else "Dependency"
                if verdict:
                    reason = self._limit(job)
                    cpus, gpus = (
                        min(job.request.cpus, self._cpus),
                        min(job.request.gpus, self._gpus),
                    )
                    if not reason and (blocked or cpus > free_cpus or gpus > len(free_gpus)):
                        blocked, reason = True, "Resources"
                if verdict and not reason:
                    state.gpus = tuple(sorted(free_gpus)[:gpus])
                    free_gpus -= set(state.gpus)
                    free_cpus -= cpus
                    self._start(job, task, state)
                elif reason != state.reason or state.is_over:
                    state.reason = reason
                    task.write(state)
        return cancelled

    @staticmethod
    def _runs(state: TaskState) -> bool:
        return state.state != JobState.PENDING and not state.is_over

    def _limit(self, job: LocalJob) -> str:
        running = sum(self._runs(self._state(job, task)) for task in job.tasks)
        together = job.request.together
        return "JobArrayTaskLimit" if together and running >= together else ""

    def _dependencies(self, job: LocalJob, task: LocalTask) -> bool | None:
        """Whether they hold; None: they never will."""
        asked = job.request.dependencies
        verdicts = [self._holds(job, task, dependency) for dependency in asked]
        if job.request.all_of or not verdicts:
            return None if None in verdicts else all(verdicts)
        return True if True in verdicts else None if set(verdicts) == {None} else False

    def _holds(self, job: LocalJob, task: LocalTask, dependency: Dependency) -> bool | None:  # noqa: PLR0911 - a table
        if dependency.kind == "singleton":
            same = (j for j in self._jobs if j.name == job.name and j.number < job.number)
            return not any(not self._state(j, t).is_over for j in same for t in j.tasks)
        states = self._states_of(dependency, task)
        if states is None:
            return None
        over = all(state.is_over for state in states)
        well = [state.state == JobState.COMPLETED for state in states]
        if dependency.kind == "after":
            return all(state.state != JobState.PENDING for state in states)
        if dependency.kind == "afterany":
            return over
        if dependency.kind == "afternotok":
            return (not all(well) or None) if over else False
        if any(state.is_over and not fine for state, fine in zip(states, well, strict=True)):
            return None
        return all(well)

    def _states_of(self, dependency: Dependency, task: LocalTask) -> list[TaskState] | None:
        number, _, wanted = dependency.job_id.partition("_")
        if dependency.kind == "aftercorr" and task.number is not None:
            wanted = wanted or str(task.number)
        try:
            other = self._folder.load(number)
        except FileNotFoundError:
            return None
        tasks = [t for t in other.tasks if not wanted or str(t.number) == wanted]
        known = [self._states.get((other.number, t.number)) or t.read() for t in tasks]
        return known or None

    # -- starting ----------------------------------------------------------------------------------

    def _start(self, job: LocalJob, task: LocalTask, state: TaskState) -> None:
        lock = task.take()
        if lock is None:  # the keeper of its last run is about to leave, and will look again
            return
        try:
            task.forget("requeue")
            state.state, state.reason, state.started_s = JobState.RUNNING, "", time.time()
            state.exit_code = state.signal = state.ended_s = None
            state.keeper = state.keeper_started = 0
            task.write(state)
            # What the keeper's processes are known by must not be in its own environment: this may be a job.
            environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_JOB_")}
            subprocess.run(  # noqa: S603 - our own program
                ["/bin/sh", "-c", _BEHIND, str(task.folder / "keeper.log"),
                 sys.executable, "-c", _KEEP, str(job.folder), task.folder.name, str(lock)],
                check=True, pass_fds=(lock,), env=environment, cwd="/", stdin=subprocess.DEVNULL,
                start_new_session=True,  # before whoever submitted can be killed with its group
            )  # fmt: skip
        finally:
            os.close(lock)


# -- the keeper ----------------------------------------------------------------------------------------

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

    def __init__(self, job: LocalJob, task: LocalTask) -> None:
        self.job = job
        self.task = task
        self.state = task.read()
        self._script = 0
        self._status: int | None = None
        self._ending = ""
        kill_wait = os.environ.get(KILL_WAIT_VARIABLE, "")
        self._kill_wait_s = (
            float(kill_wait) if kill_wait.replace(".", "", 1).isdigit() else KILL_WAIT_S
        )
        self._kill_at = float("inf")
        limit = job.request.time_s
        self._end_at = float("inf") if limit is None else time.monotonic() + limit
        self._warn_at = float("inf")
        if job.request.warn_signal and limit is not None:
            self._warn_at = self._end_at - job.request.warn_s

    def run(self) -> None:
        """Return when nothing of it is left, and the state says how it ended."""
        state = self.state
        state.keeper, state.keeper_started = os.getpid(), start_time(os.getpid()) or 0
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
            left = self._processes()
            if self._status is not None and not left:
                return
            if self._ending:
                if now >= self._kill_at:
                    for pid, began in left.items():
                        send(pid, began, signal.SIGKILL)
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
        if (status := reap().get(self._script)) is not None:
            self._status = status

    def _end(self, why: str, wait_s: float) -> None:
        self._ending = why
        self._kill_at = time.monotonic() + wait_s
        self._end_at = self._warn_at = float("inf")
        for pid, began in self._processes().items():
            send(pid, began, signal.SIGCONT)
            send(pid, began, signal.SIGTERM)

    @staticmethod
    def _processes() -> dict[int, int]:
        """All that the script started and left, without other jobs' keepers and what is below those."""
        return descendants(except_for=_is_keeper)

    def _warn(self, left: dict[int, int]) -> None:
        """As Slurm: the script alone, or all but the script."""
        self._warn_at = float("inf")
        for pid, began in left.items():
            if (pid == self._script) == self.job.request.warn_script:
                send(pid, began, self.job.request.warn_signal)

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
        record = self.state
        record.state, record.reason, record.exit_code, record.signal = (
            state,
            reason,
            exit_code,
            number,
        )
        if state == JobState.PENDING:
            record.restarts += 1
            record.started_s = None
        else:
            record.ended_s = time.time()
        self.task.write(record)


def _in_the_child() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def _is_keeper(pid: int) -> bool:
    try:
        return KEEPER_MARK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

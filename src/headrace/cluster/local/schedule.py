"""Schedule: starts what can start, and buries what died. Run by whoever changed something, one at a time.

Jobs start in their order: one that waits for CPUs or GPUs holds up those behind it, one that waits for another
job does not. A job that asks for more than this machine has runs alone. What dies without a word (a keeper that
was killed) is seen by the next one who looks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.executor import JobState
from headrace.cluster.local.folder import KEY_VARIABLE
from headrace.cluster.local.tree import send, with_key

if TYPE_CHECKING:
    from headrace.cluster.local.folder import JobsFolder, LocalJob, Task, TaskState
    from headrace.cluster.local.request import Dependency

__all__ = ["machine_cpus", "machine_gpus", "schedule"]

GPUS_VARIABLE = "HEADRACE_LOCAL_GPUS"
_KILL_S = 5.0

_KEEP = "from headrace.cluster.local.keeper import main; main()"
# Put into the background by a shell that ends at once: no zombie is left to the caller.
_BEHIND = '"$@" </dev/null >>"$0" 2>&1 &'


def machine_cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def machine_gpus() -> int:
    """That NVIDIA's driver lists, or HEADRACE_LOCAL_GPUS."""
    said = os.environ.get(GPUS_VARIABLE, "")
    if said.isdigit():
        return int(said)
    try:
        return sum(1 for _ in Path("/proc/driver/nvidia/gpus").iterdir())
    except OSError:
        return 0


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
        self._cpus, self._gpus = machine_cpus(), machine_gpus()

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

    def _state(self, job: LocalJob, task: Task) -> TaskState:
        return self._states[job.number, task.number]

    # -- the dead ----------------------------------------------------------------------------------

    def _bury(self, job: LocalJob, task: Task) -> None:
        """If its keeper is gone without saying how it ended."""
        if (lock := task.take()) is None:
            return
        try:
            fresh = task.read()  # it may have ended since
            self._states[job.number, task.number] = fresh
            if fresh.state == JobState.PENDING or fresh.is_over:
                return
            _kill_all(job.task_key(task))
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

    def _dependencies(self, job: LocalJob, task: Task) -> bool | None:
        """Whether they hold; None: they never will."""
        asked = job.request.dependencies
        verdicts = [self._holds(job, task, dependency) for dependency in asked]
        if job.request.all_of or not verdicts:
            return None if None in verdicts else all(verdicts)
        return True if True in verdicts else None if set(verdicts) == {None} else False

    def _holds(self, job: LocalJob, task: Task, dependency: Dependency) -> bool | None:  # noqa: PLR0911 - a table
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

    def _states_of(self, dependency: Dependency, task: Task) -> list[TaskState] | None:
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

    def _start(self, job: LocalJob, task: Task, state: TaskState) -> None:
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


def _kill_all(key: str) -> None:
    deadline = time.monotonic() + _KILL_S
    while left := [pid for pid in with_key(KEY_VARIABLE, key) if pid != os.getpid()]:
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)

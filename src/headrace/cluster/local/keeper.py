"""Keeper: one process for each task that runs: starts the script, holds its limits, ends all that it started.

It is the parent of whatever the script leaves behind (a subreaper), so that nothing can run away from it: not
by a session of its own, nor by a second fork. The script dies if the keeper is killed; what is below the script
is then found by the mark in its environment, by the next one who looks (`schedule`).

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

from headrace.cluster.executor import JobState, fill_pattern, pattern_facts
from headrace.cluster.launch.place import REQUEUE_EXIT, machine_gpus
from headrace.cluster.local.jobs import KEY_VARIABLE, JobsFolder, LocalJob, TaskState
from headrace.cluster.notation import compress_hosts
from headrace.cluster.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_marked,
    reap,
    send,
    start_time,
)
from headrace.errors import ClusterError

# -- the schedule --------------------------------------------------------------------------------------

GPUS_VARIABLE = "HEADRACE_LOCAL_GPUS"

KEEPER_MARK = "headrace.cluster.local.keeper"
"""In the command line of each keeper: a job that submits another is not the parent of that one's processes."""

_KEEP = f"from {KEEPER_MARK} import main; main()"
# Put into the background by a shell that ends at once: no zombie is left to the caller.
_BEHIND = '"$@" </dev/null >>"$0" 2>&1 & echo $!'


def schedule(folder: JobsFolder) -> None:
    """Start what can start, and bury what died."""
    with folder.locked():
        folder.clean()
        jobs = folder.jobs()
        changed = {job.number for job in jobs if _bury(job)}
        while _start_some(folder, jobs, changed):
            pass
        for job in jobs:
            if job.number in changed:
                job.save()
            if all(state.is_over for state in job.tasks.values()):
                (job.folder / "over").touch()


def keeper_lives(state: TaskState) -> bool:
    """Whether the keeper of a task is there, and no other process of that number."""
    return bool(state.keeper) and start_time(state.keeper) == state.keeper_started


def _bury(job: LocalJob) -> bool:
    """End what is left of tasks whose keeper is gone without saying how they ended; whether there are any."""
    dead = [(t, s) for t, s in job.tasks.items() if s.runs and not keeper_lives(s)]
    for task, state in dead:
        end_marked(f"{KEY_VARIABLE}={job.task_key(task)}", 0.0)
        if job.request.requeue and state.asked != "cancel":
            state.state, state.restarts = JobState.PENDING, state.restarts + 1
        else:
            state.state, state.ended_s = JobState.NODE_FAIL, time.time()
        state.reason = "the keeper was killed"
    return bool(dead)


def _start_some(folder: JobsFolder, jobs: list[LocalJob], changed: set[int]) -> bool:
    """One pass over what waits; whether something was cancelled that others may depend on."""
    cpus_here = len(os.sched_getaffinity(0))
    gpus_named = os.environ.get(GPUS_VARIABLE, "")
    gpus_here = int(gpus_named) if gpus_named.isdigit() else machine_gpus()
    free_cpus, free_gpus = cpus_here, set(range(gpus_here))
    for job in jobs:
        running = [state for state in job.tasks.values() if state.runs]
        free_cpus -= len(running) * min(job.request.cpus, cpus_here)
        free_gpus -= {gpu for state in running for gpu in state.gpus}
    cancelled = blocked = False
    for job in jobs:
        cpus, gpus = min(job.request.cpus, cpus_here), min(job.request.gpus, gpus_here)
        for task, state in job.tasks.items():
            if state.state != JobState.PENDING:
                continue
            reason = _waits_for(folder, jobs, job, task)
            if not reason and (blocked or cpus > free_cpus or gpus > len(free_gpus)):
                blocked, reason = True, "Resources"
            if reason == "DependencyNeverSatisfied" and job.request.kill_on_invalid_dependency:
                state.state, state.ended_s = JobState.CANCELLED, time.time()
                cancelled = True
            if not reason:
                state.gpus = tuple(sorted(free_gpus)[:gpus])
                free_gpus -= set(state.gpus)
                free_cpus -= cpus
                _start(job, task, state)
            if reason != state.reason or state.state != JobState.PENDING:
                state.reason = reason
                changed.add(job.number)
    return cancelled


def _waits_for(folder: JobsFolder, jobs: list[LocalJob], job: LocalJob, task: int | None) -> str:
    """Slurm's word for what a task waits for beside CPUs and GPUs; "" if for nothing."""
    verdicts = [
        _holds(folder, jobs, job, task, kind, job_id) for kind, job_id in job.request.dependencies
    ]
    hold, never = (all, any) if job.request.all_of else (any, all)
    if verdicts and never(verdict is None for verdict in verdicts):
        return "DependencyNeverSatisfied"
    if verdicts and not hold(verdicts):
        return "Dependency"
    at_once = job.request.tasks_at_once
    if at_once and sum(state.runs for state in job.tasks.values()) >= at_once:
        return "JobArrayTaskLimit"
    return ""


def _holds(  # noqa: PLR0911, PLR0917 - a table of sbatch's words
    folder: JobsFolder,
    jobs: list[LocalJob],
    job: LocalJob,
    task: int | None,
    kind: str,
    job_id: str,
) -> bool | None:
    if kind == "singleton":
        same = [j for j in jobs if j.name == job.name and j.number < job.number]
        return all(state.is_over for j in same for state in j.tasks.values())
    number, _, wanted = job_id.partition("_")
    if kind == "aftercorr" and task is not None:
        wanted = wanted or str(task)
    other = next((j for j in jobs if j.number == int(number)), None)
    try:
        other = other or LocalJob.load(folder.path / number)
    except FileNotFoundError:
        return None
    states = [state for t, state in other.tasks.items() if not wanted or str(t) == wanted]
    if not states:
        return None
    over = all(state.is_over for state in states)
    well = all(state.state == JobState.COMPLETED for state in states)
    if kind == "after":
        return all(state.state != JobState.PENDING for state in states)
    if kind == "afterany":
        return over
    if kind == "afternotok":
        return (not well or None) if over else False
    if any(state.is_over and state.state != JobState.COMPLETED for state in states):
        return None
    return well


def _start(job: LocalJob, task: int | None, state: TaskState) -> None:
    """Start its keeper, which waits until the state that names it is written, and the lock is free."""
    # What the keeper's processes are known by must not be in its own environment: this may be a job.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_JOB_")}
    name = "_" if task is None else str(task)
    shell = subprocess.run(  # noqa: S603 - our own program
        ["/bin/sh", "-c", _BEHIND, str(job.folder / "keeper.log"),
         sys.executable, "-c", _KEEP, str(job.folder), name],
        check=True, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        start_new_session=True,  # before whoever submitted can be killed with its group
    )  # fmt: skip
    state.state, state.started_s = JobState.RUNNING, time.time()
    state.asked = state.output = ""
    state.exit_code = state.signal = state.ended_s = None
    state.keeper = int(shell.stdout)
    state.keeper_started = start_time(state.keeper) or 0


# -- the keeper ----------------------------------------------------------------------------------------

KILL_WAIT_VARIABLE = "HEADRACE_KILL_WAIT_S"
KILL_WAIT_S = 10.0
"""Between SIGTERM and SIGKILL, if the variable says nothing else; Slurm's default is 30 s."""

LEFT_BEHIND_S = 2.0
"""The same, for what a script leaves behind when it ends by itself."""

_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_LOOK_S = 1.0


def main() -> None:
    """Keep a task: arguments are the job's folder and the task's name."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    with contextlib.suppress(PermissionError):
        os.setsid()
    adopt_orphans()
    folder, task = JobsFolder(path.parent), None if name == "_" else int(name)
    with folder.locked():
        job = LocalJob.load(path)
    if job.tasks[task].keeper != os.getpid():
        return  # whoever started this process was killed before that was written
    try:
        Keeper(folder, job, task).run()
    finally:
        schedule(folder)


def node_names(nodes: int) -> tuple[str, ...]:
    """This machine's name, or those of nodes that are simulated."""
    return (socket.gethostname(),) if nodes == 1 else tuple(f"local{i}" for i in range(nodes))


class Keeper:
    """Of one task, from its start to its end."""

    def __init__(self, folder: JobsFolder, job: LocalJob, task: int | None) -> None:
        self.folder = folder
        self.job = job
        self.task = task
        self.state = job.tasks[task]
        self._script = 0
        self._status: int | None = None
        self._ending = ""
        kill_wait = os.environ.get(KILL_WAIT_VARIABLE, "")
        is_number = kill_wait.replace(".", "", 1).isdigit()
        self._kill_wait_s = float(kill_wait) if is_number else KILL_WAIT_S
        self._kill_at = float("inf")
        limit = job.request.time_s
        self._end_at = float("inf") if limit is None else time.monotonic() + limit
        self._warn_at = float("inf")
        if job.request.warn_signal and limit is not None:
            self._warn_at = self._end_at - job.request.warn_s

    def run(self) -> None:
        """Return when nothing of it is left, and the state says how it ended."""
        default = "slurm-%j.out" if self.task is None else "slurm-%A_%a.out"
        output = self._path(self.job.request.output or default)
        self._update(output=str(output))
        try:
            self._start(output)
        except OSError as e:
            where = e.filename or self.job.script
            self._finish(JobState.FAILED, f"{where}: {e.strerror}", 127)
            return
        self._watch()
        self._finish(*self._outcome())

    def _update(self, **fields: object) -> None:
        """Write how far the task is; others may have changed its neighbours, and asked something of it."""
        with self.folder.locked():
            job = LocalJob.load(self.job.folder)
            self.state = job.tasks[self.task]
            for name, value in fields.items():
                setattr(self.state, name, value)
            if self.state.state == JobState.PENDING and self.state.asked == "cancel":
                self.state.state, self.state.ended_s = JobState.CANCELLED, time.time()
            job.save()

    # -- starting ----------------------------------------------------------------------------------

    def _path(self, pattern: str) -> Path:
        job = self.job
        facts = pattern_facts(
            str(job.number), job.name, job.user, array_id=str(job.number), task=self.task,
            node=node_names(job.request.nodes)[0],
        )  # fmt: skip
        return Path(job.directory, fill_pattern(pattern, facts))

    def _start(self, output: Path) -> None:
        request, flags = self.job.request, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        flags |= os.O_APPEND if request.append else os.O_TRUNC | os.O_APPEND
        with contextlib.ExitStack() as opened:

            def keep(path: Path | str, flags: int) -> int:
                fd = os.open(path, flags, 0o666)
                opened.callback(os.close, fd)
                return fd

            given = keep(self._path(request.input) if request.input else os.devnull, os.O_RDONLY)
            out = keep(output, flags)
            err = keep(self._path(request.error), flags) if request.error else out
            # The script, not the keeper, may be signalled, and dies with the keeper.
            process = subprocess.Popen(  # noqa: S603 - the user's script
                [str(self.job.script), *self.job.arguments],
                stdin=given, stdout=out, stderr=err, cwd=self.job.directory, env=self._environment(),
                start_new_session=True, preexec_fn=_in_the_child,  # noqa: PLW1509 - one thread
            )  # fmt: skip
        self._script = process.pid
        self._update(script=process.pid)
        process.returncode = 0  # it is waited for here, with all that it leaves behind

    def _environment(self) -> dict[str, str]:
        job, task, request = self.job, self.task, self.job.request
        given = {k: v for k, v in job.environment.items() if not k.startswith("HEADRACE_JOB_")}
        given |= {KEY_VARIABLE: job.task_key(task)} | job_variables(
            job.task_id(task), job.name, compress_hosts(node_names(request.nodes)),
            gpus_per_node=request.gpus_per_node, tasks_per_node=request.tasks_per_node,
            cpus_per_task=request.cpus_per_task, directory=job.directory,
            restarts=self.state.restarts, requeue=request.requeue,
        )  # fmt: skip
        if request.time_s is not None:
            given["HEADRACE_JOB_END_S"] = f"{time.time() + request.time_s:.3f}"
        if self.state.gpus:
            given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.state.gpus))
        if task is not None:
            numbers = request.tasks or ()
            array = {
                "JOB_ID": job.number, "TASK_ID": task, "TASK_COUNT": len(numbers),
                "TASK_MIN": min(numbers), "TASK_MAX": max(numbers),
            }  # fmt: skip
            # Scripts are written for Slurm's; nothing takes them alone for a sign of it.
            for name, value in array.items():
                given[f"HEADRACE_JOB_ARRAY_{name}"] = given[f"SLURM_ARRAY_{name}"] = str(value)
        return given

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            if (status := reap().get(self._script)) is not None:
                self._status = status
            now = time.monotonic()
            if self._status is not None and not self._ending:
                self._end("over", LEFT_BEHIND_S)
            left = _processes()
            if self._status is not None and not left:
                return
            if self._ending:
                if now >= self._kill_at:
                    for pid, began in left.items():
                        send(pid, began, signal.SIGKILL)
            elif why := self._asked() or ("timeout" if now >= self._end_at else ""):
                self._end(why, self._kill_wait_s)
            elif now >= self._warn_at:
                self._warn(left)
            now = time.monotonic()
            pause = now + (0.02 if self._ending else _LOOK_S)
            until = min(pause, self._end_at, self._warn_at, self._kill_at)
            signal.sigtimedwait(_WATCHED, max(0.005, until - now))

    def _asked(self) -> str:
        with contextlib.suppress(OSError, ClusterError):
            return LocalJob.load(self.job.folder).tasks[self.task].asked
        return ""

    def _end(self, why: str, wait_s: float) -> None:
        self._ending = why
        self._kill_at = time.monotonic() + wait_s
        self._end_at = self._warn_at = float("inf")
        for pid, began in _processes().items():
            send(pid, began, signal.SIGCONT)
            send(pid, began, signal.SIGTERM)

    def _warn(self, left: dict[int, int]) -> None:
        """As Slurm: the script alone, or all but the script."""
        self._warn_at = float("inf")
        for pid, began in left.items():
            if (pid == self._script) == self.job.request.warn_script:
                send(pid, began, self.job.request.warn_signal)

    # -- the end -----------------------------------------------------------------------------------

    def _outcome(self) -> tuple[JobState, str, int | None, int | None]:
        """State, reason, exit code and signal."""
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
        reason = "NonZeroExitCode" if number is None else "RaisedSignal"
        return JobState.FAILED, reason, exit_code, number

    def _finish(
        self, state: JobState, reason: str, exit_code: int | None, number: int | None = None
    ) -> None:
        ended: dict[str, object] = {"ended_s": time.time()}
        if state == JobState.PENDING:
            ended = {"restarts": self.state.restarts + 1, "started_s": None}
        self._update(state=state, reason=reason, exit_code=exit_code, signal=number, **ended)


def job_variables(
    job_id: str,
    name: str,
    nodes: str,
    *,
    gpus_per_node: int,
    tasks_per_node: int,
    cpus_per_task: int,
    directory: str,
    restarts: int = 0,
    requeue: bool = False,
) -> dict[str, str]:
    """By which a process is told of its job on this machine."""
    return {
        "HEADRACE_JOB_ID": job_id,
        "HEADRACE_JOB_NAME": name,
        "HEADRACE_JOB_NODES": nodes,
        "HEADRACE_JOB_NODE_INDEX": "0",
        "HEADRACE_JOB_GPUS_PER_NODE": str(gpus_per_node),
        "HEADRACE_JOB_TASKS_PER_NODE": str(tasks_per_node),
        "HEADRACE_JOB_CPUS_PER_TASK": str(cpus_per_task),
        "HEADRACE_JOB_CPUS_PER_NODE": str(cpus_per_task * tasks_per_node),
        "HEADRACE_JOB_RESTARTS": str(restarts),
        "HEADRACE_JOB_REQUEUE": str(int(requeue)),
        "HEADRACE_JOB_DIRECTORY": directory,
    }


def _in_the_child() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def _processes() -> dict[int, int]:
    """All that the script started and left, without other jobs' keepers and what is below those."""
    return descendants(except_for=_is_keeper)


def _is_keeper(pid: int) -> bool:
    try:
        return KEEPER_MARK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

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
from typing import TYPE_CHECKING

from headrace.cluster.executor import JobState, fill_pattern
from headrace.cluster.launch.place import REQUEUE_EXIT, machine_gpus
from headrace.cluster.local.jobs import KEY_VARIABLE, JobsFolder, LocalJob, TaskState
from headrace.cluster.notation import compress_hosts
from headrace.cluster.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_descendants,
    end_marked,
    reap,
    send,
)
from headrace.errors import ClusterError
from headrace.machine.host import start_time

if TYPE_CHECKING:
    from collections.abc import Callable

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
        jobs = folder.jobs(clear=True)
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
        if job.request.requeue and not state.is_cancelled:
            state.state, state.restarts = JobState.PENDING, state.restarts + 1
        else:
            state.state, state.ended_s = JobState.NODE_FAIL, time.time()
        state.reason = "the keeper was killed"
    return bool(dead)


def _start_some(folder: JobsFolder, jobs: list[LocalJob], changed: set[int]) -> bool:
    """One pass over what waits; whether something was cancelled that others may depend on."""
    cpus_here = len(os.sched_getaffinity(0))
    free_cpus, free_gpus = cpus_here, set(range(gpus_here()))
    for job in jobs:
        running = [state for state in job.tasks.values() if state.runs]
        free_cpus -= len(running) * min(job.request.cpus, cpus_here)
        free_gpus -= {gpu for state in running for gpu in state.gpus}
    cancelled = blocked = False
    for job in jobs:
        cpus, gpus = min(job.request.cpus, cpus_here), min(job.request.gpus, gpus_here())
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


def gpus_here() -> int:
    """How many GPUs jobs may have."""
    named = os.environ.get(GPUS_VARIABLE, "")
    return int(named) if named.isdigit() else machine_gpus()


def _waits_for(folder: JobsFolder, jobs: list[LocalJob], job: LocalJob, task: int | None) -> str:
    """Slurm's word for what a task waits for beside CPUs and GPUs; "" if for nothing."""
    verdicts = [_holds(folder, jobs, job, task, *each) for each in job.request.dependencies]
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
    """Whether a dependency holds now; None: it never will."""
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
    states = [s.state for t, s in other.tasks.items() if not wanted or str(t) == wanted]
    if not states:
        return None
    over = all(state.is_over for state in states)
    well = all(state is JobState.COMPLETED for state in states)
    if kind == "after":
        return JobState.PENDING not in states
    if kind == "afterany":
        return over
    if kind == "afternotok":
        return (not well or None) if over else False
    failed = any(state.is_over and state is not JobState.COMPLETED for state in states)
    return None if failed else well


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
    state.is_cancelled, state.output = False, ""
    state.exit_code = state.signal = state.ended_s = None
    state.keeper, state.script = int(shell.stdout), 0
    state.keeper_started = start_time(state.keeper) or 0


# -- the keeper ----------------------------------------------------------------------------------------

KILL_WAIT_VARIABLE = "HEADRACE_KILL_WAIT_S"
KILL_WAIT_S = 30.0
"""Between SIGTERM and SIGKILL, if the variable says nothing else; Slurm's default. `headrace launch` gives
ranks 25 s of it to save."""

LEFT_BEHIND_S = 2.0
"""The same, for what a script leaves behind when it ends by itself."""

_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_LOOK_S = 1.0
_NEVER = float("inf")


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
        _keep(folder, job, task)
    finally:
        schedule(folder)


def _keep(folder: JobsFolder, job: LocalJob, task: int | None) -> None:
    """Return when nothing of the task is left, and its state says how it ended."""

    def update(**fields: object) -> None:
        """Write how far the task is; others may have changed its neighbours, and asked something of it."""
        with folder.locked():
            latest = LocalJob.load(job.folder)
            state = latest.tasks[task]
            for name, value in fields.items():
                setattr(state, name, value)
            if state.state == JobState.PENDING and state.is_cancelled:
                state.state, state.ended_s = JobState.CANCELLED, time.time()
            latest.save()

    def where(pattern: str) -> Path:
        node = node_names(job.request.nodes)[0]
        name = fill_pattern(pattern, job.task_id(task), job.name, job.user, node)
        return Path(job.submission.directory or "", name)

    output = where(job.request.output_pattern)
    update(output=str(output))
    try:
        script = _start_script(job, task, where, output)
    except OSError as e:
        reason = f"{e.filename or job.folder / 'script'}: {e.strerror}"
        update(state=JobState.FAILED, reason=reason, exit_code=127, ended_s=time.time())
        return
    update(script=script)
    state, status = _watch(job, task, script)
    code = os.waitstatus_to_exitcode(status)
    exit_code, number = (code, None) if code >= 0 else (None, -code)
    reason = "TimeLimit" if state is JobState.TIMEOUT else ""
    if state is JobState.COMPLETED and exit_code == REQUEUE_EXIT and job.request.requeue:
        restarts = job.tasks[task].restarts + 1
        update(state=JobState.PENDING, reason="requeued", restarts=restarts, started_s=None)
        return
    if state is JobState.COMPLETED and code:
        state, reason = JobState.FAILED, "NonZeroExitCode" if code > 0 else "RaisedSignal"
    update(state=state, reason=reason, exit_code=exit_code, signal=number, ended_s=time.time())


def _start_script(
    job: LocalJob, task: int | None, where: Callable[[str], Path], output: Path
) -> int:
    request = job.request
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if request.append else os.O_TRUNC)
    with contextlib.ExitStack() as opened:

        def keep(path: Path | str, flags: int) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
            opened.callback(os.close, fd)
            return fd

        given = keep(where(request.input) if request.input else os.devnull, os.O_RDONLY)
        out = keep(output, flags)
        err = keep(where(request.error), flags) if request.error else out
        # The script, not the keeper, may be signalled, and dies with the keeper.
        process = subprocess.Popen(  # noqa: S603 - the user's script
            [job.folder / "script", *job.submission.arguments], stdin=given, stdout=out, stderr=err,
            cwd=job.submission.directory, env=_environment(job, task),
            start_new_session=True, preexec_fn=_in_the_child,  # noqa: PLW1509 - one thread
        )  # fmt: skip
    process.returncode = 0  # it is waited for here, with all that it leaves behind
    return process.pid


def _environment(job: LocalJob, task: int | None) -> dict[str, str]:
    request, state = job.request, job.tasks[task]
    inherited = job.submission.environment
    given = {k: v for k, v in inherited.items() if not k.startswith("HEADRACE_JOB_")}
    given |= {KEY_VARIABLE: job.task_key(task)} | job_variables(
        job.task_id(task), job.name, compress_hosts(node_names(request.nodes)),
        gpus_per_node=request.gpus_per_node, tasks_per_node=request.tasks_per_node,
        cpus_per_task=request.cpus_per_task, restarts=state.restarts, requeue=request.requeue,
    )  # fmt: skip
    if request.time_s is not None:
        given["HEADRACE_JOB_END_S"] = f"{time.time() + request.time_s:.3f}"
    given |= {} if state.gpus else NO_GPUS
    if state.gpus:
        given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, state.gpus))
    if task is not None:
        numbers = request.tasks or ()
        array = {
            "JOB_ID": job.number, "TASK_ID": task, "TASK_COUNT": len(numbers),
            "TASK_MIN": min(numbers), "TASK_MAX": max(numbers),
        }  # fmt: skip
        # Scripts are written for Slurm's; nothing takes them alone for a sign of it.
        given |= {f"SLURM_ARRAY_{name}": str(value) for name, value in array.items()}
    return given | dict(job.variables)


def _watch(job: LocalJob, task: int | None, script: int) -> tuple[JobState, int]:
    """Wait until the script and all that it started have ended: how that came, and the script's status."""
    request, kill_wait = job.request, os.environ.get(KILL_WAIT_VARIABLE, "")
    is_number = kill_wait.replace(".", "", 1).isdigit()
    end_at = time.monotonic() + (_NEVER if request.time_s is None else request.time_s)
    warn_at = end_at - request.warn_s if request.warn_signal else _NEVER
    statuses = reap()
    while not (end := _end(job, task, over=script in statuses, end_at=end_at)):
        if time.monotonic() >= warn_at:  # as Slurm: the script alone, or all but the script
            warn_at = _NEVER
            for pid, began in descendants(except_for=_is_keeper).items():
                if (pid == script) == request.warn_script:
                    send(pid, began, request.warn_signal)
        pause_s = min(_LOOK_S, min(end_at, warn_at) - time.monotonic())
        signal.sigtimedwait(_WATCHED, max(0.005, pause_s))
        statuses |= reap()
    grace_s = float(kill_wait) if is_number else KILL_WAIT_S
    if end is JobState.COMPLETED:
        grace_s = LEFT_BEHIND_S
    while end_descendants(grace_s, _is_keeper, statuses.update)[1] or script not in statuses:
        grace_s = 0.0  # they are stuck in the kernel: the task is not over before
        signal.sigtimedwait(_WATCHED, _LOOK_S)
    return end, statuses[script]


def _end(job: LocalJob, task: int | None, *, over: bool, end_at: float) -> JobState | None:
    """How the task ends now: its script is over, or is to be ended; None while neither."""
    if over:
        return JobState.COMPLETED
    with contextlib.suppress(OSError, ClusterError):
        if LocalJob.load(job.folder).tasks[task].is_cancelled:
            return JobState.CANCELLED
    return JobState.TIMEOUT if time.monotonic() >= end_at else None


def _in_the_child() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def _is_keeper(pid: int) -> bool:
    """Another job's, whose processes are not this one's."""
    try:
        return KEEPER_MARK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# -- what a process is told of its job -----------------------------------------------------------------


def node_names(nodes: int) -> tuple[str, ...]:
    """This machine's name; of several nodes that are all this machine, with their numbers."""
    host = socket.gethostname()
    return (host,) if nodes == 1 else tuple(f"{host}-{i}" for i in range(nodes))


NO_GPUS = {} if Path("/dev/kfd").exists() else {"HEADRACE_JOB_GPUS": ""}
"""For agents, where GPUs that were asked for are processes: nobody has one. AMD's are not counted."""


def job_variables(
    job_id: str, name: str, nodes: str, *, gpus_per_node: int, tasks_per_node: int, cpus_per_task: int,
    restarts: int = 0, requeue: bool = False,
) -> dict[str, str]:  # fmt: skip
    """By which a process is told of its job on this machine."""
    values = {
        "HEADRACE_JOB_ID": job_id, "HEADRACE_JOB_NAME": name, "HEADRACE_JOB_NODES": nodes,
        "HEADRACE_JOB_NODE_INDEX": 0, "HEADRACE_JOB_GPUS_PER_NODE": gpus_per_node,
        "HEADRACE_JOB_TASKS_PER_NODE": tasks_per_node, "HEADRACE_JOB_CPUS_PER_TASK": cpus_per_task,
        "HEADRACE_JOB_CPUS_PER_NODE": cpus_per_task * tasks_per_node,
        "HEADRACE_JOB_RESTARTS": restarts, "HEADRACE_JOB_REQUEUE": int(requeue),
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}

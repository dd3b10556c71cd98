"""Functions: a Python function as a job, of a cluster or of this machine, and what it returned.

    job = hr.cluster.submit(train, "photos/", gpus=2, time="4h")
    accuracy = job.result()

What is called reaches the job by pickle, and what it returns or raises comes back by pickle, through a folder
that both sides see; each file is whole or not there, and has a checksum:

    headrace-jobs/train-1f0c22d7/    0700
      call                 how to import the caller's script, and the pickled call, of an array each task's
      result-TASK-RANK     of which job, how many ranks there are, whether it returned or raised, and what
      log-JOB.txt          what it printed, in all of its lives

A function that is asked to stop (`should_stop`; SIGUSR1 two minutes before its time is over) and leaves by
SystemExit has not returned: its job starts again, and `resume` goes on where it was. Under `headrace launch`
(`launch=`), which asks all ranks at one step, it is the launch that starts the job again.

A job that starts again under its number keeps a result that it has; one that was resubmitted has a number of
its own, calls the function once more, and replaces the result.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.base.checksum import crc32c
from headrace.base.files import explained, replace_file
from headrace.base.job import Rank, which_rank
from headrace.base.text import nearest
from headrace.cluster.executor import JobState, executor_name
from headrace.cluster.executor import executor as executor_named
from headrace.cluster.launch.place import REQUEUE_EXIT, JobPlace, job_number
from headrace.cluster.notation import read_minutes
from headrace.cluster.plan import Cluster, plan_batch
from headrace.cluster.request import JOB_OPTIONS, read_request
from headrace.cluster.stopping import asked_by
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.cluster.executor import Executor, JobStatus

FOLDER = "headrace-jobs"
_WARN_S = 120
"""As `headrace launch`: so long before its end a job is asked to save; half of a time that is short."""

_SETTLE_S = 10.0
"""So long may a shared file system show nothing of a result that the job has written."""

_OPTIONS = {
    word: option.field
    for option in JOB_OPTIONS
    for word in (option.flag[2:].replace("-", "_"), option.field)
    if option.field != "array"  # `map_array` makes one
}
_MISSING = object()
_is_job = False
"""Whether this process imports the caller's script, to run a function of it."""


# -- submitting ----------------------------------------------------------------------------------------


def submit(
    function: Callable[..., Any],
    *args: Any,
    folder: str | os.PathLike[str] = FOLDER,
    executor: str | None = None,
    launch: Sequence[str] | None = None,
    **options: Any,
) -> FunctionJob:
    """Run `function(*args)` as a job: once, on the job's first node.

    Args:
        function: of the top level of a module, or of a script that submits below `if __name__ == "__main__":`;
            `functools.partial` holds arguments by name.
        args: what can be pickled.
        folder: that the job sees too; calls, results and logs go there.
        executor: slurm, ray or local; by default slurm where it is installed.
        launch: run it in each rank of `headrace launch` with these options (may be none): `result` is then the
            list of what the ranks returned.
        options: of `headrace cluster batch`, by its words with underscores: `gpus=2`, `time="4h"`.

    Raises:
        ClusterRequestError: it cannot be pickled, or no node can meet what is asked for.
        ClusterError: the scheduler does not take it.
    """
    return _submit(function, [args], None, folder, executor, launch, options)[0]


def map_array(
    function: Callable[..., Any],
    *iterables: Iterable[Any],
    at_once: int | None = None,
    folder: str | os.PathLike[str] = FOLDER,
    executor: str | None = None,
    launch: Sequence[str] | None = None,
    **options: Any,
) -> list[FunctionJob]:
    """Run `function(*each)` for each of the iterables' elements, which are equally many, as one array of jobs.

    `at_once`: so many tasks may run at one time. All else is as for `submit`, of each task.

    Raises:
        ClusterRequestError: the iterables are not equally long, or as for `submit`; nothing is submitted.
        ClusterError: the scheduler does not take it.
    """
    calls: list[tuple[Any, ...]] = []
    for each in itertools.zip_longest(*iterables, fillvalue=_MISSING):
        if any(value is _MISSING for value in each):
            lengths = [
                f"{len(of):,}" if isinstance(of, Sized)
                else f"{len(calls):,}" if value is _MISSING else f"more than {len(calls):,}"
                for of, value in zip(iterables, each, strict=True)
            ]  # fmt: skip
            raise ClusterRequestError(
                f"map_array({_name_of(function)}): the iterables have {', '.join(lengths[:-1])} and "
                f"{lengths[-1]} elements, expected equally many: one of each for a call."
            )
        calls.append(each)
    if not calls:
        return []
    array = f"0-{len(calls) - 1}" + (f"%{at_once}" if at_once else "")
    return _submit(function, calls, array, folder, executor, launch, options)


def _submit(  # noqa: PLR0917 - what both of the above are given
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    array: str | None,
    folder: str | os.PathLike[str],
    executor: str | None,
    launch: Sequence[str] | None,
    options: dict[str, Any],
) -> list[FunctionJob]:
    if _is_job:
        raise ClusterRequestError(
            "the script submits when a job of its own imports it: jobs would submit jobs for ever.",
            next_step='Put what the script does below `if __name__ == "__main__":`.',
        )
    function_name = _name_of(function)
    where = f"submit({function_name})"
    given: dict[str, Any] = {}
    for option, value in options.items():
        if option not in _OPTIONS:
            close = nearest(option, _OPTIONS)
            meant = f"did you mean {close}?" if close else f"expected one of {', '.join(_OPTIONS)}"
            raise ClusterRequestError(
                f"{where}: there is no option {option!r}; {meant}",
                next_step="Arguments of the function itself by name: functools.partial(function, name=value).",
            )
        if (field := _OPTIONS[option]) in given:
            raise ClusterRequestError(f"{where}: {option!r} is said twice; {field!r} is the same.")
        given[field] = value
    options = given
    if str(limit := options.get("time") or "").isdigit():
        raise ClusterRequestError(
            f"{where}: time is {limit!r}: minutes to Slurm, hours to some sites.",
            next_step=f'Say which: time="{limit}m" or time="{limit}h".',
        )
    call = _pickled(function, calls, where)
    name = options.get("name") or re.sub(r"\W+", "-", function_name).strip("-") or "function"
    into = Path(folder).absolute() / f"{Path(name).name}-{secrets.token_hex(4)}"
    pattern = str(into).replace("%", "%%") + ("/log-%A_%a.txt" if array else "/log-%j.txt")
    options = {"name": name, "output": pattern, "requeue": True, "array": array, **options}
    if launch is None and not options.get("signal"):
        minutes = read_minutes(str(limit)) if limit else None
        options["signal"] = f"B:USR1@{min(_WARN_S, 30 * minutes) if minutes else _WARN_S}"
    cluster, request = Cluster.of(executor), read_request(options, where)
    plan = plan_batch(_script(into, launch, is_array=bool(array)), where, request, cluster)
    for remark in (*cluster.remarks, *plan.remarks):
        logging.getLogger("headrace").warning("%s: %s", where, remark)
    into.mkdir(mode=0o700, parents=True)
    _write(into / "call", call)
    runs_on = executor_name(executor)
    try:
        job_id = executor_named(runs_on).submit(plan.submission)
    except ClusterRequestError:  # refused: of any other error nobody knows whether there is a job
        shutil.rmtree(into, ignore_errors=True)
        raise
    ids = [f"{job_id}_{task}" for task in range(len(calls))] if array else [job_id]
    return [FunctionJob(each, into, runs_on, i, launch is not None) for i, each in enumerate(ids)]


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(getattr(function, "func", function), "__name__", "function")


def _pickled(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], where: str) -> bytes:
    """All that a job needs to make the calls."""
    # As the standard library's processes import the script in which a function is defined.
    inherited = spawn.get_preparation_data("headrace")
    names = ("sys_path", "sys_argv", "orig_dir", "init_main_from_name", "init_main_from_path")
    main = {name: inherited[name] for name in names if inherited.get(name) is not None}
    if not Path(main.get("init_main_from_path", os.devnull)).exists():
        del main["init_main_from_path"]  # "<stdin>"
    next_step = (
        "Define the function at the top level of a module or of a script, and give it plain values."
    )
    try:
        pickled = [pickle.dumps((function, args)) for args in calls]
    except Exception as e:  # whatever an argument's own __reduce__ raises
        raise ClusterRequestError(
            f"{where}: the call cannot be pickled: {e}.", next_step=next_step
        ) from e
    if not any(name.startswith("init_main") for name in main) and b"__main__" in pickled[0]:
        raise ClusterRequestError(
            f"{where}: it is defined in an interactive session, which no job can import.",
            next_step=next_step,
        )
    return pickle.dumps((main, pickled))


def _script(folder: Path, launch: Sequence[str] | None, *, is_array: bool) -> bytes:
    """The batch script."""
    command = [sys.executable, "-c", _MAIN, str(folder)]
    # Until Python listens, the signal that warns is nobody's death.
    trap, ranks = "trap '' USR1\n", ""
    if launch is not None:
        headrace = (sys.executable, "-c", "from headrace.cli import main; main()")
        command = [*headrace, "launch", *launch, "--", *command]
        trap, ranks = "", " ranks"
    task = '"$SLURM_ARRAY_TASK_ID"' if is_array else "0"
    lines = f"{trap}exec {shlex.join(command)} {task}{ranks}\n"
    return f"#!/bin/sh\n#SBATCH --open-mode=append\n{lines}".encode()


# -- jobs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionJob:
    """A function that was submitted, by the words of `concurrent.futures`. Made by `submit`; may be pickled.

    Attributes:
        job_id: as the executor prints it; of a task of an array "17_3".
        folder: where its call, results and logs are.
        runs_on: its executor: slurm, ray or local.
        task: which call of `map_array` it is.
        is_launched: whether each rank of a launch has a result.
    """

    job_id: str
    folder: Path
    runs_on: str
    task: int = 0
    is_launched: bool = False

    @cached_property
    def _executor(self) -> Executor:
        return executor_named(self.runs_on)

    @property
    def state(self) -> JobState:
        """Of the job, by its result where that is there first; UNKNOWN if neither is known any more."""
        known = self._executor.status([self.job_id])[self.job_id]
        state = known[0].state if known else JobState.UNKNOWN
        if not state.is_over and self._has_result():
            path = _result_path(self.folder, self.task, 0)
            with contextlib.suppress(ClusterError):  # which `result` raises
                job, _, has_returned, _ = _unpickled(path, _read(path))
                if job == self.job_id:
                    return JobState.COMPLETED if has_returned else JobState.FAILED
        return state

    def done(self) -> bool:
        """Whether `result` returns at once, or raises."""
        state = None if self._has_result() else self.state
        return state is None or state.is_over or state is JobState.UNKNOWN

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done; ClusterTimeout after so long."""
        if not self._has_result():
            self._executor.wait([self.job_id], timeout_s, self._has_result)

    def result(self, timeout_s: float | None = None) -> Any:
        """What the function returned; with `launch`, the list of what it returned in each rank.

        Where the job was resubmitted, it is the newest result that is whole.

        Raises:
            Exception: what the function raised, with its traceback as a note.
            ClusterTimeout: it is not done after so long.
            ClusterError: the job ended without a result, or it cannot be read: the message says where.
        """
        outcomes = self._outcomes(timeout_s)
        for has_returned, value in outcomes:
            if not has_returned:
                raise value
        return [value for _, value in outcomes] if self.is_launched else outcomes[0][1]

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """What the function raised, or why there is no result; None if it returned."""
        try:
            outcomes = self._outcomes(timeout_s)
        except TimeoutError:
            raise
        except ClusterError as e:
            return e
        return next((value for has_returned, value in outcomes if not has_returned), None)

    def cancel(self) -> None:
        """End the job; one that is over already is left alone."""
        self._executor.cancel([self.job_id])

    def logs(self) -> str:
        """What it has printed."""
        return b"".join(self._executor.logs(self.job_id)).decode(errors="replace")

    def _has_result(self) -> bool:
        # Of several ranks only the executor knows whether all have ended.
        return not self.is_launched and _result_path(self.folder, self.task, 0).exists()

    def _outcomes(self, timeout_s: float | None) -> list[tuple[bool, Any]]:
        """Of each rank, whether it returned, and what it returned or raised."""
        self.wait(timeout_s)
        until_s = time.monotonic() + _SETTLE_S
        outcomes: list[tuple[bool, Any]] = []
        ranks, first = 1, ""
        while len(outcomes) < ranks:
            path = _result_path(self.folder, self.task, len(outcomes))
            if path.exists():
                job, ranks, has_returned, pickled = _unpickled(path, _read(path))
                if outcomes and job != first:
                    raise ClusterError(
                        f"{path}: is of job {job}, and rank 0's result of job {first}: one of them has not "
                        "ended, or left no result in some ranks.", path=str(path),
                        next_step=f"See how they are: headrace cluster status {first} {job}.",
                    )  # fmt: skip
                first = job
                outcomes.append((has_returned, _unpickled(path, pickled)))
                if not has_returned:
                    break
                continue
            known = self._executor.status([self.job_id])[self.job_id]
            status = known[0] if known else self._executor.lost(self.job_id)
            if status.state is not JobState.COMPLETED or time.monotonic() > until_s:
                raise self._lost(status, path)
            time.sleep(0.1)
            os.listdir(self.folder)  # noqa: PTH208 - makes a network file system look again
        return outcomes

    def _lost(self, status: JobStatus, path: Path) -> ClusterError:
        how, number = status.why, status.signal or 0
        if 0 < number < signal.NSIG:
            how = f"ended by signal {number}, {signal.strsignal(number)}"
        # Slurm's words for what the number says.
        reason = "" if status.reason in {how, "NonZeroExitCode", "RaisedSignal"} else status.reason
        how = "".join(f": {text}" for text in (how, reason) if text)
        error = ClusterError(
            f"job {self.job_id} is {status.state}{how}, and left no result ({path}).", path=str(path),
            next_step=f"See what it printed: headrace cluster logs {self.job_id}.",
        )  # fmt: skip
        with contextlib.suppress(ClusterError):
            last = b"".join(self._executor.logs(self.job_id, lines=20)).decode(errors="replace")
            error.add_note(f"The end of its log:\n{last}")
        return error


# -- files ---------------------------------------------------------------------------------------------

_HEAD = b"headrace pickle 1 "


def _result_path(folder: Path, task: int, rank: int) -> Path:
    return folder / f"result-{task}-{rank}"


def _write(path: Path, data: bytes) -> None:
    replace_file(path, b"%s%08x\n%s" % (_HEAD, crc32c(data), data), mode=0o600)


def _read(path: Path) -> bytes:
    with explained(ClusterError, path, "cannot be read"):
        head, newline, data = path.read_bytes().partition(b"\n")
    if not newline or head != b"%s%08x" % (_HEAD, crc32c(data)):
        raise ClusterError(
            f"{path}: is not what was written there: its checksum does not match.", path=str(path),
            next_step="Submit it again.",
        )  # fmt: skip
    return data


def _unpickled(path: Path, data: bytes) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301 - our own user's, in a folder of theirs alone
    except Exception as e:
        raise ClusterError(
            f"{path}: cannot be unpickled here: {type(e).__name__}: {e}.", path=str(path),
            next_step="Import what it is made of, in the same versions.",
        ) from e  # fmt: skip


# -- the job's process ---------------------------------------------------------------------------------

_MAIN = f"from {__name__} import main; main()"


def main() -> None:
    """Be one rank of the job: arguments are its folder, the task, and `ranks` where there may be several."""
    global _is_job  # noqa: PLW0603 - a process is one or the other
    folder, task, *ranks = sys.argv[1:]
    rank = which_rank() if ranks else Rank(0, 1)
    path = _result_path(Path(folder), int(task), rank.rank)
    job = job_number(os.environ)
    with contextlib.suppress(ClusterError):  # none, or none that can be read
        if _unpickled(path, _read(path))[0] == job:
            return  # it has returned, and its job was started again all the same
    if not ranks:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    value: Any
    has_returned = False
    try:
        call = Path(folder, "call")
        own, calls = _unpickled(call, _read(call))
        _is_job = True
        spawn.prepare(own)
        function, args = _unpickled(call, calls[int(task)])
        _is_job = False
        value = function(*args)
        has_returned = True
    except BaseException as e:  # noqa: BLE001 - whatever it is, it is the caller's
        if isinstance(e, SystemExit) and not e.code and (asked := asked_by()) is not None:
            _leave(asked)
        traceback.print_exc()
        value = e if isinstance(e, Exception) else ClusterError(f"the function ended by {e!r}.")
        value.add_note(f"In the job:\n{traceback.format_exc()}")
    try:
        data = pickle.dumps(value)
        if not has_returned:
            pickle.loads(data)  # noqa: S301 - many an exception can be pickled, and not be unpickled
    except Exception as e:  # noqa: BLE001 - whatever its own __reduce__ raises
        what = "what it returned" if has_returned else f"{type(value).__name__}: {value}"
        error = ClusterError(f"{what} cannot be pickled: {type(e).__name__}: {e}.")
        for note in getattr(value, "__notes__", ()):
            error.add_note(note)
        sys.stderr.write(f"error: {error}\n")
        has_returned, data = False, pickle.dumps(error)
    _write(path, pickle.dumps((job, rank.world_size, has_returned, data)))
    sys.exit(0 if has_returned else 1)


def _leave(asked: int) -> NoReturn:
    """End without a result. The job starts again if it was asked to make room, and not if it was to end."""
    if asked == signal.SIGUSR1:
        place = JobPlace.here()
        if place.is_requeued_when_asked():
            sys.stdout.flush()
            place.requeue()
        sys.exit(REQUEUE_EXIT)
    sys.exit(128 + asked if asked else 0)

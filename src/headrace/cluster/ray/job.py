"""A job on a Ray cluster, from within.

    driver         of Ray's jobs API, on the head node: asks for nodes, starts the job again without a lost one
      actor        on each node of a placement group; holds the job's CPUs and GPUs there
        script     on the first node, under the local executor, which holds its time limit and ends all of it
        launcher   of each node, for `headrace launch` in the script (`step` is to Ray what srun is to Slurm)

What the driver knows of the job it prints, one JSON document a line, after `MARK`: Ray's API hands these lines
on to `RayExecutor`. A job that ends with status 75, or whose first node is lost, starts again in a new
placement group if it was submitted with `--requeue`; a launch ends so when it loses another node.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.extras import import_extra
from headrace.cluster.executor import JobState, Submission, split_id
from headrace.cluster.launch.nodes import SPEC_VARIABLE, NodeSpec
from headrace.cluster.launch.place import GPU_VARIABLES, REQUEUE_EXIT
from headrace.cluster.launch.plan import node_command
from headrace.cluster.local.executor import LocalExecutor
from headrace.cluster.local.jobs import SubmittedJob
from headrace.cluster.notation import compress_hosts, expand_hosts
from headrace.cluster.processes import die_with_parent
from headrace.errors import ClusterError, HeadraceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.local.jobs import LocalRequest

MARK: Final = "headrace job "
JOB_VARIABLE: Final = "HEADRACE_RAY_JOB"
_NAMESPACE: Final = "headrace"
_PAUSES_S: Final = (0.02, 0.3)
_END_S: Final = 30.0
"""How long a script that is ended may take: the local executor kills it after 10 s."""


_OWN: Final = ("job_id", "user", "submitted_s", "restarts")


@dataclass(frozen=True, slots=True)
class RayJob(SubmittedJob):
    """What is submitted: a job, or one task of an array, as Ray's API carries it.

    Attributes:
        submission: its environment is the job's, whole; empty where the job is listed.
    """

    job_id: str
    user: str
    submission: Submission
    submitted_s: float
    restarts: int = 0

    def encode(self) -> str:
        """As text that is fit for a variable of the environment."""
        fields = {
            "script": base64.b64encode(self.submission.script).decode(), **self.submission.document(),
            **{name: getattr(self, name) for name in _OWN},
        }  # fmt: skip
        return base64.b64encode(zlib.compress(json.dumps(fields).encode())).decode()

    @classmethod
    def decode(cls, text: str) -> RayJob:
        """What `encode` gave; ClusterError if it is something else."""
        try:
            packed = base64.b64decode(text, validate=True)
            fields = json.loads(zlib.decompressobj().decompress(packed, 64 << 20))
            script = base64.b64decode(fields["script"], validate=True)
            own = {name: fields[name] for name in _OWN}
            job = cls(submission=Submission.of(fields, script), **own)
            split_id(job.job_id)
        except (ValueError, TypeError, KeyError, zlib.error) as e:
            raise ClusterError(f"what stands for a job of ours cannot be read: {e}.") from e
        return job


def node_names(nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """By Ray's node ids, names of our own: the node's name, with a piece of the id where several share it."""
    count = Counter(name for _, name in nodes)
    return {i: name if count[name] == 1 else f"{name}-{i[:8]}" for i, name in nodes}


def shortage(request: LocalRequest, nodes: Mapping[str, Mapping[str, float]]) -> str:
    """Why nodes of these names, with these resources, can never hold a job; "" if they can."""
    cpus, gpus = request.tasks_per_node * request.cpus_per_task, request.gpus_per_node
    excluded = expand_hosts(request.exclude)
    able = sum(
        has.get("CPU", 0) >= cpus and has.get("GPU", 0) >= gpus
        for name, has in nodes.items() if name not in excluded
    )  # fmt: skip
    if able >= request.nodes:
        return ""
    each = f"{cpus} CPUs" + (f" and {gpus} GPUs" if gpus else "")
    return (
        f"{request.nodes} nodes with {each} each are asked for, and {able} of the {len(nodes)} nodes of this "
        "Ray cluster have them"
    )


# -- on each node --------------------------------------------------------------------------------------

PROGRAM: Final = "from headrace.cluster.ray import job; import sys; sys.exit(job.{}())"
"""Calls a function of this module, for `python -c`."""


def _command(function: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(function), *arguments]


class NodePart:
    """A job's part of a node: an actor with the job's CPUs and GPUs there. All it starts ends with it."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: list[str], environment: dict[str, str], directory: str, last: int
    ) -> tuple[int, str]:
        """Start a process that gets the signal `last` when this actor ends: its number, or -1 and why not."""
        own = {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ}
        kept = {name: value for name, value in environment.items() if name not in GPU_VARIABLES}
        try:
            process = subprocess.Popen(  # noqa: S603
                _command("hold", str(last), *command), env=kept | own, cwd=directory,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            return -1, f"{e.filename}: {e.strerror}"
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._processes.append(process)
        return len(self._processes) - 1, ""

    def look(self, number: int) -> tuple[bytes, int | None]:
        """What it has printed since, and its status if it has ended."""
        process = self._processes[number]
        code = process.poll()
        assert process.stdout is not None
        return process.stdout.read(1 << 20) or b"", code

    def send(self, number: int, what: int) -> None:
        """Send it a signal."""
        self._processes[number].send_signal(what)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def hold() -> int:
    """Stand between a worker of Ray's, whose children Ray kills, and a process that has to tidy up."""
    last, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent()
    child = subprocess.Popen(  # noqa: S603
        command,
        preexec_fn=functools.partial(die_with_parent, last),  # noqa: PLW1509 - one thread
    )
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    code = child.wait()
    return code if code >= 0 else 128 - code


def run_script() -> int:
    """Run a job's script on this node, the first one, and print how it is whenever that changes."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    job = RayJob.decode(os.environ.pop(JOB_VARIABLE))
    gpus = {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ}
    number, task = split_id(job.job_id)
    folder = Path(tempfile.mkdtemp(prefix="headrace-ray-"))
    asked = job.submission
    here = LocalExecutor(folder / "jobs", {**asked.environment, **gpus})
    array = () if task is None else (f"--array={task}",)
    options = (*asked.options, "--no-requeue", f"--chdir={asked.directory}", *array)
    before: dict[str, Any] = {}
    try:
        here.submit(replace(asked, options=options, environment={}), int(number))
        while True:
            (status,) = here.status([job.job_id])[job.job_id]
            facts = asdict(status)
            if facts != before:
                _print(json.dumps(facts, default=str))  # paths
            if status.state.is_over:
                return 0
            before = facts
            if signals:
                here.cancel([job.job_id])
                signals.clear()
            time.sleep(0.1)
    except HeadraceError as e:
        _print(json.dumps({"state": JobState.FAILED, "reason": e.message}))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- all of them ---------------------------------------------------------------------------------------


def _part_name(job_id: str, restarts: int | str, index: int) -> str:
    return f"{job_id}/{restarts}/{index}"


def _join() -> tuple[Any, str]:
    """Ray, with this process as one of its drivers, and the address of its dashboard."""
    ray: Any = import_extra("ray", "a job on a Ray cluster")
    address = os.environ.get("RAY_ADDRESS")
    try:
        context = ray.init(
            address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR"
        )
    except Exception as e:
        text = f"this process cannot join the Ray cluster at {address}: {e}."
        raise ClusterError(text) from e
    return ray, f"http://{context.dashboard_url}"


def step_command() -> list[str]:
    """What starts the launcher of `headrace launch` on each node of a job."""
    return _command("step")


def step() -> int:
    """Be that program: hand on what the launchers print; the worst of their statuses."""
    given = dict(os.environ)
    names, spec = expand_hosts(given["HEADRACE_JOB_NODES"]), NodeSpec.parse(given[SPEC_VARIABLE])
    ray, _ = _join()
    asked: list[int] = []
    for ends in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ends, lambda number, _: asked.append(number))
    runs: dict[Any, int] = {}
    for rank, name in enumerate(spec.nodes):
        of_job = given["HEADRACE_JOB_ID"], given["HEADRACE_JOB_RESTARTS"], names.index(name)
        part = ray.get_actor(_part_name(*of_job), namespace=_NAMESPACE)
        own = {**given, "HEADRACE_NODE_RANK": str(rank), "HEADRACE_NODES": str(len(spec.nodes))}
        start = part.start.remote(node_command(), own, str(Path.cwd()), signal.SIGKILL)
        runs[part], why = ray.get(start)
        if why:
            sys.stderr.write(f"headrace launch: node {name}: {why}\n")
            return 1
    worst, pause_s = 0, _PAUSES_S[0]
    while runs:
        pause_s = min(2 * pause_s, _PAUSES_S[1])
        for part, number in list(runs.items()):
            try:
                if asked:
                    ray.get(part.send.remote(number, signal.SIGKILL))
                text, code = ray.get(part.look.remote(number))
            except ray.exceptions.RayError:  # its node is lost, which the first node sees by itself
                text, code = b"", 3
            if text:
                pause_s = _PAUSES_S[0]
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
            elif code is not None:
                worst = max(worst, code)
                del runs[part]
        time.sleep(pause_s)
    return worst


# -- the driver ----------------------------------------------------------------------------------------


def main() -> int:
    """Be the driver of a job."""
    job = RayJob.decode(os.environ.pop(JOB_VARIABLE, ""))
    try:
        return _Driver(job, *_join()).run()
    except HeadraceError as e:
        _say(state=JobState.FAILED, reason=e.message, ended_s=time.time())
        return 1


def _say(**facts: Any) -> None:
    _print(MARK + json.dumps(facts))


class _Driver:
    def __init__(self, job: RayJob, ray: Any, dashboard: str) -> None:
        self._job, self._ray, self._dashboard = job, ray, dashboard
        self._asked: list[int] = []
        self._facts: dict[str, Any] = {"restarts": job.restarts}
        # Ray's own handlers, set when it was joined, would end this process at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._asked.append(number))

    def run(self) -> int:
        request, job = self._job.request, self._job
        names, alive = self._alive()
        has = {names[node_id]: node["Resources"] for node_id, node in alive.items()}
        if not job.restarts and (why := shortage(request, has)):
            raise ClusterError(f"{why}.")
        while True:
            if (group := self._nodes(request)) is None:
                self._say(state=JobState.CANCELLED, ended_s=time.time())
                return 1
            try:
                again = self._run_on(group)
            finally:
                self._ray.util.remove_placement_group(group)
            if not again or self._asked:
                break
            job = self._job = replace(job, restarts=job.restarts + 1)
            self._say(
                state=JobState.PENDING, reason="requeued", restarts=job.restarts, nodes=(),
                started_s=None, ended_s=None, exit_code=None, signal=None,
            )  # fmt: skip
        is_completed = self._facts["state"] == JobState.COMPLETED
        return 0 if is_completed else self._facts.get("exit_code") or 1

    def _say(self, **facts: Any) -> None:
        self._facts |= facts
        _say(**self._facts)

    def _alive(self) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Our names of the nodes that are alive, and what Ray says of them, both by Ray's ids."""
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        return node_names([(i, node["NodeName"]) for i, node in alive.items()]), alive

    def _nodes(self, request: LocalRequest) -> Any:
        """A placement group that has its nodes; None: the job was cancelled before."""
        bundle = {"CPU": request.tasks_per_node * request.cpus_per_task}
        if request.gpus_per_node:
            bundle["GPU"] = request.gpus_per_node
        strategy = "STRICT_SPREAD" if request.nodes > 1 else "PACK"
        self._say(state=JobState.PENDING, reason="Resources")
        excluded = set(expand_hosts(request.exclude))
        away = [node_id for node_id, name in self._alive()[0].items() if name in excluded]
        where = [{"ray.io/node-id": f"!in({','.join(away)})"} if away else {}] * request.nodes
        group = self._ray.util.placement_group(
            [bundle] * request.nodes, strategy, bundle_label_selector=where
        )
        while not group.wait(0.5):
            if self._asked:
                self._ray.util.remove_placement_group(group)
                return None
        return group

    def _run_on(self, group: Any) -> bool:
        """Run the script once; whether it is to run again."""
        ray, job, request = self._ray, self._job, self._job.request
        on = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        parts = [
            ray.remote(NodePart).options(
                name=_part_name(job.job_id, job.restarts, index), num_gpus=request.gpus_per_node,
                num_cpus=request.tasks_per_node * request.cpus_per_task,
                scheduling_strategy=on(group, index),
            ).remote()
            for index in range(request.nodes)
        ]  # fmt: skip
        known, _ = self._alive()
        place = ray.util.placement_group_table(group)["bundles_to_node_id"]
        names = [known.get(place[index]) or place[index] for index in range(request.nodes)]
        given = replace(job.submission, environment=self._variables(names))
        environment = {
            **job.submission.environment, JOB_VARIABLE: replace(job, submission=given).encode(),
        }  # fmt: skip
        self._say(state=JobState.CONFIGURING, reason="", nodes=names)
        try:
            script, directory = _command("run_script"), str(given.directory)
            start = parts[0].start.remote(script, environment, directory, signal.SIGTERM)
            number, why = ray.get(start)
            if why:
                step = "A job's folder must be seen by its nodes."
                raise ClusterError(f"node {names[0]}: {why}", next_step=step)
            self._follow(parts[0], number)
        except ray.exceptions.RayError as e:
            # What fails there before the script begins would fail so again, and on any node.
            is_lost = place[0] not in self._alive()[0] or bool(self._facts.get("started_s"))
            what = "is lost" if is_lost else "cannot start the script"
            why = str(e).strip().partition("\n")[0]
            self._say(
                state=JobState.NODE_FAIL if is_lost else JobState.FAILED, ended_s=time.time(),
                reason=f"node {names[0]} {what}: {why}", exit_code=None,
            )  # fmt: skip
            return is_lost and request.requeue
        finally:
            for part in parts:
                ray.kill(part)
        return request.requeue and self._facts.get("exit_code") == REQUEUE_EXIT

    def _follow(self, part: Any, number: int) -> None:
        """Say what the first node says of the script, until that has ended."""
        rest, code, is_asked, until_s = b"", None, False, float("inf")
        while time.monotonic() < until_s:
            if self._asked and not is_asked:
                is_asked, until_s = True, time.monotonic() + _END_S
                self._ray.get(part.send.remote(number, signal.SIGTERM))
            text, code = self._ray.get(part.look.remote(number))
            *lines, rest = (rest + text).split(b"\n")
            for line in lines:
                try:
                    facts = json.loads(line)
                except ValueError:  # of Python, or of a module that it has loaded
                    _print(line.decode(errors="replace"))
                    continue
                names = ("state", "reason", "started_s", "ended_s", "exit_code", "signal", "output")
                self._say(**{name: facts[name] for name in names if name in facts})
            if code is not None and not text:
                break
            time.sleep(_PAUSES_S[0] if text else _PAUSES_S[1])
        if not JobState(self._facts["state"]).is_over:
            reason = f"what ran the script on the first node ended with status {code}"
            self._say(state=JobState.FAILED, reason=reason, ended_s=time.time())

    def _variables(self, names: Sequence[str]) -> dict[str, str]:
        """By which the job's processes know it, beside those of every job of the local executor."""
        job, request = self._job, self._job.request
        values: dict[str, Any] = {
            "HEADRACE_JOB_SCHEDULER": "ray", "HEADRACE_JOB_NODES": compress_hosts(names),
            "HEADRACE_JOB_RESTARTS": job.restarts, "HEADRACE_JOB_REQUEUE": int(request.requeue),
            "HEADRACE_EXECUTOR": "ray", "RAY_ADDRESS": os.environ["RAY_ADDRESS"],
            "RAY_API_SERVER_ADDRESS": self._dashboard,
        }  # fmt: skip
        if numbers := request.tasks:
            counts = {"COUNT": len(numbers), "MIN": min(numbers), "MAX": max(numbers)}
            values |= {f"SLURM_ARRAY_TASK_{name}": n for name, n in counts.items()}
        return {name: str(value) for name, value in values.items()}

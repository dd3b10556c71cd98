"""RayExecutor: jobs on a Ray cluster, by its jobs API.

Plain HTTP with a deadline for each request, which Ray's own client does not have. Ray knows how its driver is;
how the job is, the driver prints (`job`). Ray has neither dependencies nor signals to scripts: these are
refused. A job's number is the Unix second of its submission, or the next one that is free.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.peers import user_name
from headrace.cluster.executor import (
    Executor,
    JobState,
    JobStatus,
    SchedulerUnavailable,
    fill_pattern,
    ray_address,
    split_id,
)
from headrace.cluster.local.jobs import job_directory, queued_job, read_request
from headrace.cluster.ray.job import JOB_VARIABLE, MARK, PROGRAM, RayJob, node_names, shortage
from headrace.cluster.snapshot import ClusterSnapshot, Node, Partition, occupied
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.cluster.executor import Submission

_DEADLINE_S: Final = 20.0
_ANSWER_BYTES_MAX: Final = 256 << 20
_ENCODED_MAX: Final = 120_000
"""Linux takes 128 KiB for one variable of an environment, which is how a job reaches its driver."""

_CHOOSE_NODES: Final = frozenset({"nodelist", "nodefile", "constraint", "reservation"})
_METADATA: Final = "headrace"
_STOP_S: Final = 40
"""How long Ray leaves the driver of a job that is cancelled to end it."""

_ENDED: Final = {
    "SUCCEEDED": JobState.COMPLETED, "FAILED": JobState.FAILED, "STOPPED": JobState.CANCELLED,
}  # fmt: skip


class RayExecutor(Executor):
    """A Ray cluster, at the address of its dashboard."""

    name = "ray"
    poll_s = (0.2, 2.0, 1.15)
    outage_s = 60.0
    gone = "this Ray cluster does not know it: was it started anew?"
    not_known = ("this Ray cluster has no job {} of headrace's.", None)
    output_hint = (
        "It lies in the job's folder, as the first of its nodes sees that; the driver's own messages: "
        "ray job logs JOB."
    )

    def __init__(self, address: str | None = None) -> None:
        self.address = (address or ray_address() or "").rstrip("/")
        if not re.fullmatch(r"https?://[^/\s]+", self.address):
            raise ClusterRequestError(
                f"the Ray cluster's address is {self.address!r}, expected that of its dashboard.",
                next_step="Set RAY_API_SERVER_ADDRESS to http://HEAD:8265, with the head node's name.",
            )

    # -- the calls of every executor ---------------------------------------------------------------

    def submit(self, submission: Submission) -> str:
        """Queue a job, or each task of an array."""
        request = read_request(submission.script, submission.options)
        if request.dependencies or request.tasks_at_once:
            option = "dependency" if request.dependencies else "array=...%N"
            raise ClusterRequestError(
                f"--{option} is not done by Ray, which starts each job as soon as there is room.",
                next_step="Wait for the other job (headrace cluster wait), then submit this one.",
            )
        if chosen := sorted(request.words & _CHOOSE_NODES):
            raise ClusterRequestError(
                f"--{chosen[0]} is not done by Ray, which chooses nodes by CPUs and GPUs.",
                next_step="Leave it out, or name the other nodes: --exclude.",
            )
        directory = job_directory(submission)
        names, alive = self._nodes()
        if why := shortage(request, {names[n["node_id"]]: n["resources_total"] for n in alive}):
            raise ClusterRequestError(
                f"{why}.", next_step="Ask for less, or start more nodes: ray start."
            )
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("HEADRACE_JOB", "RAY_"))}
        whole = replace(
            submission, directory=directory, environment={**kept, **submission.environment}
        )
        job = RayJob("0", user_name(os.geteuid()), whole, time.time())
        number = int(job.submitted_s)
        tasks = ("",) if request.tasks is None else tuple(f"_{task}" for task in request.tasks)
        # The number alone is Ray's name for a job, and for the first task of an array: no two can have it.
        while not self._start(replace(job, job_id=f"{number}{tasks[0]}"), str(number)):
            number += 1
        try:
            for task in tasks[1:]:
                self._start(replace(job, job_id=f"{number}{task}"), f"{number}{task}")
        except ClusterError:  # nobody would know of those that were started
            self.cancel([str(number)])
            raise
        return str(number)

    def status(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        """By id asked for."""
        numbers = {job_id: split_id(job_id)[0] for job_id in job_ids}
        jobs = defaultdict[str, list[tuple[RayJob, dict[str, Any]]]](list)
        for job in self._jobs():
            jobs[split_id(job[0].job_id)[0]].append(job)
        return {
            job_id: [self._status(*job) for job in jobs[number] if _is_of(job[0], job_id)]
            for job_id, number in numbers.items()
        }

    def cancel(self, job_ids: Sequence[str], signal: int | None = None) -> None:
        """End jobs: all processes get SIGTERM, and SIGKILL 10 s later."""
        if signal is not None:
            raise ClusterRequestError(
                "Ray has no way to send a job's script a signal.",
                next_step="End the job: headrace cluster cancel JOB. `headrace launch` lets its ranks save.",
            )
        for job_id in job_ids:
            split_id(job_id)
        for job, details in self._jobs():
            if details["status"] not in _ENDED and any(_is_of(job, each) for each in job_ids):
                self._call("POST", f"/api/jobs/{details['submission_id']}/stop")

    def own(self) -> list[str]:
        """All of this user's that the cluster still knows."""
        user = user_name(os.geteuid())
        numbers = {int(split_id(job.job_id)[0]) for job, _ in self._jobs() if job.user == user}
        return [str(number) for number in sorted(numbers)]

    def submission(self, job_id: str) -> Submission:
        """As it was, but for its environment, which is that of whoever submits it again."""
        self.known([job_id])
        return next(job.submission for job, _ in self._jobs() if _is_of(job, job_id))

    def snapshot(self, *, jobs: bool = False) -> ClusterSnapshot:
        """Its nodes, all in the partition `ray`, and its jobs: headrace's alone, which say what they hold."""
        version = self._call("GET", "/api/version")
        names, alive = self._nodes()
        nodes = tuple(_node(names[node["node_id"]], node["resources_total"]) for node in alive)
        rows = tuple(
            queued_job(self._status(job, details), job.request, job.user, "ray", None)
            for job, details in (self._jobs() if jobs else ()) if details["status"] not in _ENDED
        )  # fmt: skip
        partition = Partition("ray", tuple(names.values()), is_default=True)
        text = str(version.get("ray_version", ""))
        return ClusterSnapshot("ray", text, time.time(), occupied(nodes, rows), (partition,), rows)

    # -- one job -----------------------------------------------------------------------------------

    def _start(self, job: RayJob, submission_id: str) -> bool:
        """Submit it; False if there is a job of this name."""
        listed = replace(job, submission=replace(job.submission, environment={}))
        encoded, shown = job.encode(), listed.encode()
        if len(encoded) > _ENCODED_MAX:
            raise ClusterRequestError(
                f"the script and its environment have {len(encoded):,} bytes when packed, a job of Ray's takes "
                f"{_ENCODED_MAX:,}.",
                next_step="Keep data in files of their own.",
            )
        python = shlex.quote(sys.executable)
        program = shlex.quote(PROGRAM.format("main"))
        try:
            self._call("POST", "/api/jobs/", {
                "submission_id": submission_id,
                # Where this program's Python is not, the cluster's own must have headrace.
                "entrypoint": f"p={python}; test -x $p || p=python3; exec $p -c {program}",
                "metadata": {_METADATA: shown, "name": job.name, "user": job.user},
                "runtime_env": {"env_vars": {
                    JOB_VARIABLE: encoded, "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S),
                }},
            })  # fmt: skip
        except ClusterError as e:
            if f"{submission_id} already exists" in e.message:
                return False
            raise
        return True

    def _jobs(self) -> list[tuple[RayJob, dict[str, Any]]]:
        """Ours, oldest first, with what Ray says of each."""
        listed: Any = self._call("GET", "/api/jobs/", kind=list)
        jobs = [
            (RayJob.decode(text), details)
            for details in listed if details.get("type") == "SUBMISSION"
            if (text := (details.get("metadata") or {}).get(_METADATA))
        ]  # fmt: skip
        return sorted(jobs, key=lambda pair: tuple(map(int, pair[0].job_id.split("_"))))

    def _status(self, job: RayJob, details: dict[str, Any]) -> JobStatus:
        facts, word = self._last_facts(details["submission_id"]), str(details.get("status"))
        state = JobState(facts.get("state", "PENDING"))
        reason = facts.get("reason") or ""
        if word in _ENDED and not state.is_over:  # the driver was killed, or its log is gone
            state, lines = _ENDED[word], str(details.get("message") or "").strip().splitlines()
            reason = (lines or ["Ray ended its driver"])[-1] if word == "FAILED" else ""
        elif word not in _ENDED and state.is_over:
            state = JobState.COMPLETING
        output, pattern = facts.get("output"), job.request.output_pattern
        if not output and "%N" not in pattern:
            output = fill_pattern(pattern, job.job_id, job.name, job.user)
        ended_ms = details.get("end_time")
        return JobStatus(
            job.job_id, job.name, state, reason, tuple(facts.get("nodes", ())), facts.get("exit_code"),
            facts.get("signal"), facts.get("restarts", job.restarts), job.submitted_s,
            facts.get("started_s"), facts.get("ended_s") or (ended_ms / 1000 if ended_ms else None),
            Path(job.submission.directory or "", output) if output else None, job.submission.directory,
        )  # fmt: skip

    def _last_facts(self, submission_id: str) -> dict[str, Any]:
        """What the driver said last."""
        answer = self._call("GET", f"/api/jobs/{submission_id}/logs")
        for line in reversed(str(answer.get("logs") or "").splitlines()):
            if line.startswith(MARK):
                try:
                    facts: dict[str, Any] = json.loads(line.removeprefix(MARK))
                except ValueError:  # it is being written
                    continue
                return facts
        return {}

    # -- HTTP --------------------------------------------------------------------------------------

    def _nodes(self) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """Our names of the nodes that are alive, by Ray's ids, and what Ray says of them."""
        answer = self._call("GET", "/api/v0/nodes?detail=1&limit=10000")
        try:
            nodes = answer["data"]["result"]["result"]
            alive = [node for node in nodes if node["state"] == "ALIVE"]
            return node_names([(node["node_id"], node["node_name"]) for node in alive]), alive
        except (KeyError, TypeError) as e:
            raise self._stranger(f"what it says of its nodes cannot be read: {e!r}") from e

    def _stranger(self, why: str) -> ClusterError:
        return ClusterError(
            f"{self.address} answers, but not as Ray's jobs API: {why}.",
            next_step="The head node needs its dashboard: pip install 'ray[default]', and ray start --head "
            "--dashboard-host=0.0.0.0.",
        )

    def _call(
        self, method: str, path: str, body: object = None, kind: type = dict
    ) -> dict[str, Any]:
        """What is answered, which is of this kind."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token := os.environ.get("RAY_AUTH_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - http or https, see above
            self.address + path, data=data, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:  # noqa: S310
                text = answer.read(_ANSWER_BYTES_MAX)
        except urllib.error.HTTPError as e:
            raise self._refusal(e) from e
        except (OSError, http.client.HTTPException) as e:
            why = getattr(e, "reason", None) or e
            raise SchedulerUnavailable(
                f"no Ray cluster answers at {self.address}: {why}.",
                next_step="RAY_API_SERVER_ADDRESS is the dashboard of its head node, by default "
                "http://HEAD:8265; it runs where ray[default] is installed.",
            ) from e
        try:
            content: Any = json.loads(text)
        except ValueError as e:
            raise self._stranger(f"{path} is no JSON") from e
        if (actual := type(content).__name__) != kind.__name__:
            raise self._stranger(f"{path} is {actual}, expected a {kind.__name__}")
        return content  # type: ignore[no-any-return]

    def _refusal(self, error: urllib.error.HTTPError) -> ClusterError:
        text = error.read(1 << 20).decode(errors="replace").strip()
        # Ray answers with a traceback; its last lines are what it is about.
        said = " ".join(text.splitlines()[-2:])[-500:]
        if error.code in {401, 403}:
            return ClusterError(
                f"{self.address} does not let this user in: {error.code}.",
                next_step="Set RAY_AUTH_TOKEN to the cluster's token.",
            )
        if error.code in {404, 405} and "does not exist" not in text:
            return self._stranger(f"{error.code} {error.reason}")
        if error.code >= 500 and "try again" in text:
            return SchedulerUnavailable(f"{self.address}: {said}")
        return ClusterError(f"{self.address} refuses: {error.code} {said}")


def _is_of(job: RayJob, job_id: str) -> bool:
    """Whether it is this job, or a task of this array."""
    return job.job_id == job_id or split_id(job.job_id)[0] == job_id


def _node(name: str, has: dict[str, float]) -> Node:
    kinds = [word.partition(":")[2] for word in has if word.startswith("accelerator_type:")]
    return Node(
        name=name, states=("idle",), cpus=int(has.get("CPU", 0)),
        memory_mib=int(has.get("memory", 0)) >> 20, gpus=int(has.get("GPU", 0)),
        gpu_type=kinds[0].lower() if len(kinds) == 1 else "", partitions=("ray",),
    )  # fmt: skip

"""KubernetesExecutor: jobs of one namespace.

What is known of them stands in the API server, until a day after their ends; what they printed, as long as
their first pod is there.

The API server is asked by the user's own client. Whatever lets kubectl in (a token, a certificate, a cloud's
plugin, a pod's service account) lets us in, and no credentials pass through here. Objects go as they are
(`--raw`): one request a call, no discovery. A refusal becomes the most telling error; what was said is always
in the message.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from headrace.base.peers import user_name
from headrace.cluster.executor import (
    Executor,
    JobState,
    JobStatus,
    SchedulerUnavailable,
    Submission,
)
from headrace.cluster.kubernetes.manifests import (
    CANCELLED,
    JOB_LABEL,
    PARTITION,
    USER_LABEL,
    as_yaml,
    kind,
    label,
    manifests,
    pod_file,
)
from headrace.cluster.kubernetes.pod import RESTARTS
from headrace.cluster.manifest import RunWords
from headrace.cluster.snapshot import (
    Allocation,
    ClusterJob,
    ClusterSnapshot,
    Node,
    Partition,
    occupied,
)
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Object = dict[str, Any]
    T = TypeVar("T")


_POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SAID_MAX: Final = 1500


class NotThere(ClusterError):
    """There is no such object."""


class Conflict(ClusterError):
    """The object is there already, or was changed by somebody else meanwhile."""


_REFUSALS: Final[dict[str, tuple[type[ClusterError], str]]] = {
    "no configuration has been provided|localhost:8080|current-context|context .* (does not exist|not found)|"
    "invalid configuration|loading config|kubeconfig": (ClusterError,
        "Get a kubeconfig from whoever runs the cluster (~/.kube/config, KUBECONFIG); then: kubectl get pods."),
    r"\(Unauthorized\)|be logged in|provide credentials|getting credentials|token .*expired": (ClusterError,
        "The token or certificate has expired: log in again as your cluster wants it; then: kubectl get pods."),
    "exceeded quota|(maximum|minimum) .* usage per": (ClusterRequestError,
        "Ask for less, or wait until others end: kubectl describe quota."),
    'namespaces? "[^"]*" not found': (ClusterError,
        "Name one that there is: metadata.namespace in the pod's file, or the namespace of kubectl's context."),
    r"\(Forbidden\)|forbidden:": (ClusterError,
        "Ask for the role `headrace-user`, which `headrace cluster init --kubernetes DIR` writes."),
    r"\((AlreadyExists|Conflict)\)": (Conflict, ""),
    r"\(NotFound\)": (NotThere, ""),
    r"\((Invalid|BadRequest)\)|is invalid:|denied the request": (ClusterRequestError, ""),
    "timeout|timed out|deadline exceeded": (ClusterTimeout,
        "The API server is overloaded, or far away; see with `headrace cluster status` what was done."),
    "refused|no such host|unable to connect|unavailable|TooManyRequests|InternalError|EOF|reset by": (
        SchedulerUnavailable, "The API server is down or unreachable: kubectl cluster-info."),
}  # fmt: skip
"""What kubectl says, the error that it means, and what to do. The first one that fits holds."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """How kubectl is called."""

    deadline_s: float = 30.0

    def namespace(self) -> str:
        """Of the kubeconfig's context."""
        words = ("config", "view", "--minify", "--output", "jsonpath={..namespace}")
        with contextlib.suppress(ClusterError):
            return self._run(*words).decode().strip() or "default"
        # In a pod, with no kubeconfig, kubectl takes that of its service account.
        with contextlib.suppress(OSError):
            return _POD_NAMESPACE.read_text().strip()
        return "default"

    def get(self, path: str) -> dict[str, Any]:
        """An object, or a list of them.

        Raises:
            NotThere: it is not there.
            ClusterError: see the module; here and below.
        """
        return self._object("get", "--raw", path)

    def create(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """Post an object; Conflict if there is one of its name."""
        return self._object("create", "--raw", f"{path}?fieldValidation=Strict", document=document)

    def replace(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """Put an object in place of what it was read from; Conflict if somebody else did so before."""
        return self._object("replace", "--raw", path, document=document)

    def delete(self, path: str) -> None:
        """Delete an object, and what belongs to it."""
        policy = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        self._run("delete", "--raw", path, "-f", "-", stdin=json.dumps(policy).encode())

    def stream(self, path: str) -> Iterator[bytes]:
        """A text, piece by piece, as long as there is more."""
        command = ["kubectl", "get", "--raw", path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # noqa: S603
            try:
                while piece := process.stdout.read1(1 << 16):  # type: ignore[union-attr]
                    yield piece
                message = process.stderr.read(_SAID_MAX).decode(errors="replace")  # type: ignore[union-attr]
                if process.wait() != 0:
                    raise refusal(message)
            finally:
                process.kill()

    def _object(self, *words: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        more = () if document is None else ("-f", "-")
        stdin = b"" if document is None else json.dumps(document).encode()
        answer = self._run(*words, *more, stdin=stdin)
        try:
            value = json.loads(answer)
        except ValueError:
            value = None
        if not isinstance(value, dict) or "metadata" not in value:
            raise ClusterError(
                f"the API server answered {words[2]} with {answer[:80]!r}, expected an object of Kubernetes.",
                next_step="See whether the kubeconfig's server is one: kubectl cluster-info.",
            )
        return value

    def _run(self, *words: str, stdin: bytes = b"") -> bytes:
        command = ["kubectl", f"--request-timeout={self.deadline_s:g}s", *words]
        try:
            # kubectl ends by its own deadline, and says more.
            ended = subprocess.run(  # noqa: S603 - no shell
                command, input=stdin, capture_output=True, check=False, timeout=self.deadline_s + 5,
            )  # fmt: skip
        except FileNotFoundError as e:
            raise ClusterError(
                "kubectl is not installed here, or not on PATH.",
                next_step="Install it as https://kubernetes.io/docs/tasks/tools says.",
            ) from e
        except OSError as e:
            raise ClusterError(f"kubectl cannot be run: {e.strerror}.") from e
        except subprocess.TimeoutExpired as e:
            raise refusal(f"timeout: no answer within {self.deadline_s:g} s") from e
        if ended.returncode != 0:
            raise refusal(ended.stderr.decode(errors="replace"))
        return ended.stdout


def refusal(message: str) -> ClusterError:
    """What a failure means, from what kubectl said."""
    text = " ".join(line.strip() for line in message.splitlines())[:_SAID_MAX] or "it said nothing"
    for pattern, (error, next_step) in _REFUSALS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return error(f"kubectl: {text.rstrip('.')}.", next_step=next_step or None)
    return ClusterError(f"kubectl failed: {text.rstrip('.')}.")


_TRIES: Final = 5
_LOOK_S: Final = 0.5
_NAMED_MAX: Final = 50
"""So many jobs are asked for by their names; for more, all of the namespace's are read."""


class KubernetesExecutor(Executor):
    """Kubernetes, by the kubeconfig's context and the pod's file."""

    name = "kubernetes"
    poll_s = (0.3, 5.0, 1.3)
    outage_s = 600.0
    gone = "Kubernetes does not know it any more: a job is kept a day after its end"
    not_known = (
        "Kubernetes does not know job {}, or not any more.",
        "Look whether it is in another namespace: kubectl get jobs --all-namespaces.",
    )

    def __init__(self, kubectl: Kubectl | None = None) -> None:
        self._kubectl, self._kind = kubectl or Kubectl(), kind()
        self._user = user_name(os.geteuid())
        self._own_namespace = ""

    def _path(self, what: str = "", name: str = "", **query: str) -> str:
        """Of objects of the namespace; by default of jobs, in their form."""
        if not self._own_namespace:
            named = pod_file()[0].get("metadata", {}).get("namespace")
            self._own_namespace = str(named or self._kubectl.namespace())
        jobs = {"Job": "apis/batch/v1", "PyTorchJob": "apis/kubeflow.org/v1"}[self._kind]
        base = f"/{'api/v1' if what else jobs}/namespaces/{quote(self._own_namespace)}"
        path = f"{base}/{what or self._kind.lower() + 's'}"
        return path + (f"/{name}" if name else "") + (f"?{urlencode(query)}" if query else "")

    def _items(self, what: str = "", **query: str) -> list[Object]:
        return self._kubectl.get(self._path(what, **query)).get("items") or []

    def task_of(self, job_id: str) -> str | None:
        """None: there are no arrays."""
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", job_id):
            raise ClusterRequestError(
                f"{job_id!r} is no job id, expected a name such as train-1f3a9c."
            )
        return None

    def preview(self, submission: Submission) -> bytes:
        """The manifests, as `kubectl apply -f -` takes them."""
        return as_yaml(manifests(submission, self._user)).encode()

    # -- submitting ------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> str:
        """Post the job, and then what its pods wait for, which is the job's and goes with it."""

        def create() -> tuple[list[Object], Object]:
            objects = manifests(submission, self._user)
            return objects, self._kubectl.create(self._path(), objects[0])

        (job, *others), created = _unless_conflict(create)  # of somebody who has this very name
        name = str(job["metadata"]["name"])
        owner = {
            "apiVersion": job["apiVersion"], "kind": job["kind"], "name": name,
            "uid": created["metadata"].get("uid", ""), "controller": False, "blockOwnerDeletion": False,
        }  # fmt: skip
        try:
            for each in others:
                owned = {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}}
                self._kubectl.create(self._path(each["kind"].lower() + "s"), owned)
        except BaseException:
            with contextlib.suppress(ClusterError):
                self._kubectl.delete(self._path(name=name))
            raise
        return name

    def submission(self, job_id: str) -> Submission:
        """As it lies in the job's Secret."""
        self.known([job_id])
        data = self._kubectl.get(self._path("secrets", job_id)).get("data", {})
        try:
            script, again = (base64.b64decode(data[k]) for k in ("script", "submission.json"))
            return Submission.of(json.loads(again), script)
        except (KeyError, TypeError, ValueError) as e:
            raise ClusterError(
                f"the Secret of job {job_id} is not as it was submitted: {e!r}."
            ) from e

    # -- what is known ---------------------------------------------------------------------------

    def status(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        """By id asked for, in two requests."""
        for job_id in job_ids:
            self.task_of(job_id)
        if not job_ids:
            return {}
        names = f" in ({','.join(job_ids)})" if len(job_ids) <= _NAMED_MAX else ""
        known = dict(self._jobs(JOB_LABEL + names))
        return {job_id: [known[job_id][0]] if job_id in known else [] for job_id in job_ids}

    def _jobs(self, selector: str) -> Iterator[tuple[str, tuple[JobStatus, Object, list[Object]]]]:
        """Each job's name, its status, it, and its pods."""
        jobs, pods = (self._items(what, labelSelector=selector) for what in ("", "pods"))
        for job in jobs:
            name = str(job["metadata"]["name"])
            own = [p for p in pods if p["metadata"].get("labels", {}).get(JOB_LABEL) == name]
            own.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
            yield name, (self._status(job, own), job, own)

    def _status(self, job: Object, pods: list[Object]) -> JobStatus:
        about, given = job["metadata"], job.get("status", {})
        state, reason = _state(job)
        first = _first(pods)
        ended = (_container_state(first).get("terminated") if first else None) or {}
        code, words = ended.get("exitCode"), _words(ended.get("message"))
        signal = max(0, (code or 0) - 128)
        folder = _main(first).get("workingDir") if first else None
        annotations = first["metadata"].get("annotations", {}) if first else {}
        if state is JobState.FAILED and ended.get("reason") == "OOMKilled":
            state = JobState.OUT_OF_MEMORY
        if state is JobState.PENDING:
            reason = _why_pending(pods) or reason or self._refused(about["name"])
        nodes = {str(n) for pod in pods if (n := pod["spec"].get("nodeName"))}
        over = [c.get("lastTransitionTime") for t, c in _true(job).items() if t in _FINAL]
        return JobStatus(
            job_id=str(about["name"]), name=str(about.get("annotations", {}).get("headrace/name", "")),
            state=state, reason=reason, nodes=tuple(sorted(nodes)),
            exit_code=None if signal else code, signal=signal or None,
            restarts=sum(int(annotations.get(name, 0)) for name in RESTARTS.values()),
            submitted_s=_unix(about.get("creationTimestamp")), started_s=_unix(given.get("startTime")),
            ended_s=_unix(given.get("completionTime") or next(iter(over), None)),
            folder=Path(folder) if folder else None, cause=words.cause, resumed=words.resumed,
        )  # fmt: skip

    def _refused(self, name: str) -> str:
        """Why no pod of a job could be made: a quota, or an admission's word; "" if nothing says so."""
        selector = f"involvedObject.name={name},type=Warning"
        with contextlib.suppress(ClusterError):
            events = self._items("events", fieldSelector=selector)
            return str(events[-1].get("message", "")) if events else ""
        return ""

    def own(self) -> list[str]:
        """Of this user, oldest first."""
        selector = f"{USER_LABEL}={label(self._user)}"
        jobs = self._items(labelSelector=selector)
        jobs.sort(key=lambda job: str(job["metadata"].get("creationTimestamp")))
        return [str(job["metadata"]["name"]) for job in jobs]

    # -- changing them ---------------------------------------------------------------------------

    def cancel(self, job_ids: Sequence[str], signal: int | None = None) -> None:
        """Move their deadlines to now: pods get SIGTERM, and SIGKILL after their grace; the jobs stay known."""
        if signal is not None:
            raise ClusterRequestError(
                "Kubernetes sends no signals to jobs.",
                next_step="Cancel without --signal: ranks of `headrace launch` save first.",
            )
        for job_id in job_ids:
            self.task_of(job_id)
            with contextlib.suppress(NotThere):
                _unless_conflict(functools.partial(self._expire, job_id))

    def _expire(self, job_id: str) -> None:
        """Conflict where its controller writes at the same time."""
        path = self._path(name=job_id)
        job = self._kubectl.get(path)
        if _state(job)[0].is_over:
            return
        if job["spec"].get("suspend"):  # it has no deadline while it waits in a queue
            self._kubectl.delete(path)
            return
        job["metadata"].setdefault("annotations", {})[CANCELLED] = "true"
        limits = job["spec"] if self._kind == "Job" else job["spec"].setdefault("runPolicy", {})
        limits["activeDeadlineSeconds"] = 1
        self._kubectl.replace(path, job)

    def logs(
        self, job_id: str, *, follow: bool = False, lines: int | None = None
    ) -> Iterator[bytes]:
        """What the script printed, from its first pod; with `follow` from the pods in its place, too."""
        shown = ""
        while True:
            self.known([job_id])
            status, _, pods = dict(self._jobs(f"{JOB_LABEL}={job_id}"))[job_id]
            first = _first(pods)
            state = _container_state(first) if first else {}
            begun = "running" in state or "terminated" in state
            if first and begun and first["metadata"]["uid"] != shown:
                shown = first["metadata"]["uid"]
                more = {"follow": "true"} if follow else {}
                more |= {} if lines is None else {"tailLines": str(lines)}
                name = first["metadata"]["name"]
                yield from self._kubectl.stream(
                    self._path("pods", f"{name}/log", container=_main(first)["name"], **more)
                )
            elif status.state.is_over and not shown:
                raise ClusterError(
                    f"the output of job {job_id} is gone with its first pod.",
                    next_step="Have the script write what is to last to a volume: docs/howto/kubernetes.md.",
                )
            if not follow or status.state.is_over:
                return
            time.sleep(_LOOK_S)

    # -- the cluster -----------------------------------------------------------------------------

    def snapshot(self, *, jobs: bool = False) -> ClusterSnapshot:
        """All nodes, one partition, and the namespace's jobs that are headrace's."""
        items = self._kubectl.get("/api/v1/nodes").get("items") or []
        known = dict(self._jobs(JOB_LABEL)).values() if jobs else ()
        rows = tuple(_row(*one) for one in known if not one[0].state.is_over)
        nodes = occupied(map(_node, items), rows)
        partition = Partition(PARTITION, tuple(node.name for node in nodes), is_default=True)
        return ClusterSnapshot(PARTITION, "", time.time(), nodes, (partition,), rows)


def _unless_conflict(do: Callable[[], T]) -> T:
    """What is done, some times over where somebody else changes the same object."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(Conflict):
            return do()
    return do()


# -- what objects say ----------------------------------------------------------------------------------

_FINAL: Final = {"Complete", "Failed", "Succeeded"}


def _true(job: Object) -> dict[str, Object]:
    conditions = job.get("status", {}).get("conditions") or ()
    return {c["type"]: c for c in conditions if c.get("status") == "True"}


def _pod_count(job: Object) -> int:
    """How many pods a job has."""
    spec = job["spec"]
    replicas = spec.get("pytorchReplicaSpecs", {}).values()
    return sum(r.get("replicas", 1) for r in replicas) or spec.get("completions") or 1


def _state(job: Object) -> tuple[JobState, str]:
    """A job's state, and the reason in Kubernetes's words."""
    about, given, true = job["metadata"], job.get("status", {}), _true(job)
    if why := true.get("Failed") or true.get("FailureTarget"):
        state, reason = JobState.FAILED, str(why.get("message") or why.get("reason") or "")
        if why.get("reason") == "DeadlineExceeded":
            cancelled = CANCELLED in about.get("annotations", {})
            state = JobState.CANCELLED if cancelled else JobState.TIMEOUT
        return (state if "Failed" in true else JobState.COMPLETING), reason
    if "Complete" in true or "Succeeded" in true:
        return JobState.COMPLETED, ""
    if "SuccessCriteriaMet" in true or about.get("deletionTimestamp"):
        return JobState.COMPLETING, ""
    if "Suspended" in true:
        return JobState.PENDING, "suspended: it waits in a queue"
    roles = given.get("replicaStatuses", {}).values()
    active = given.get("ready", sum(role.get("active", 0) for role in roles))
    if active >= _pod_count(job):
        return JobState.RUNNING, ""
    return (JobState.CONFIGURING if active else JobState.PENDING), ""


def _main(pod: Object) -> Object:
    """The container in which the script, or what serves it, runs."""
    containers: list[Object] = pod["spec"]["containers"]
    return next((c for c in containers if c["name"] in ("train", "pytorch")), containers[0])


def _first(pods: list[Object]) -> Object | None:
    """The newest pod in which the script runs."""
    for pod in reversed(pods):
        labels = pod["metadata"].get("labels", {})
        index = labels.get("batch.kubernetes.io/job-completion-index")
        if index == "0" or labels.get("training.kubeflow.org/replica-type") == "master":
            return pod
    return None


def _container_state(pod: Object) -> Object:
    statuses, name = pod.get("status", {}).get("containerStatuses") or (), _main(pod)["name"]
    return next((each.get("state", {}) for each in statuses if each["name"] == name), {})


def _words(message: str | None) -> RunWords:
    """What the first pod left of its launch's words; another program's message is none of them."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(message or "[]", type=RunWords)
    return RunWords()


def _why_pending(pods: list[Object]) -> str:
    """What the scheduler or a node says of a pod that does not begin."""
    for pod in pods:
        waiting = _container_state(pod).get("waiting") or {}
        if waiting.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        for each in pod.get("status", {}).get("conditions") or ():
            if (each.get("type"), each.get("status")) == ("PodScheduled", "False"):
                return str(each.get("message") or each.get("reason") or "")
    return ""


def _unix(text: str | None) -> float | None:
    return None if not text else datetime.fromisoformat(text).timestamp()


_UNITS: Final[dict[str, Decimal]] = {
    "": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}  # fmt: skip


def _quantity(text: Any) -> Decimal:
    """Kubernetes's "63500m", "2", "263856Ki"."""
    match = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(text))
    if match is None or match[2] not in _UNITS:
        raise ClusterError(f"the API server says {text!r}, expected an amount such as 500m or 2Gi.")
    return Decimal(match[1]) * _UNITS[match[2]]


def _gpus(amounts: Object) -> int:
    return sum(int(_quantity(n)) for key, n in amounts.items() if key.endswith("/gpu"))


_CPU_SHARE: Final = Decimal("0.95")
"""What daemons that run on every node leave of its CPUs, where nobody says how much they ask for."""


def _node(item: Object) -> Node:
    about, spec, given = item["metadata"], item.get("spec", {}), item.get("status", {})
    can, labels = given.get("allocatable", {}), about.get("labels", {})
    state = "idle" if "Ready" in _true(item) else "down"
    arch = labels.get("kubernetes.io/arch", "")
    cpus = max(1, int(_quantity(can.get("cpu", 1)) * _CPU_SHARE))
    return Node(
        name=about["name"], states=(state, "drain") if spec.get("unschedulable") else (state,), cpus=cpus,
        memory_mib=int(_quantity(can.get("memory", 0))) >> 20, gpus=_gpus(can),
        gpu_type=labels.get("nvidia.com/gpu.product", ""), partitions=(PARTITION,),
        architecture={"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch),
    )  # fmt: skip


def _row(status: JobStatus, job: Object, pods: list[Object]) -> ClusterJob:
    parts = []
    for pod in pods:
        if pod.get("status", {}).get("phase") == "Running":
            amounts = _main(pod)["resources"]["requests"]
            memory = int(_quantity(amounts.get("memory", 0))) >> 20
            cpus = int(_quantity(amounts.get("cpu", 1)))
            parts.append(Allocation(pod["spec"]["nodeName"], cpus, memory, _gpus(amounts)))
    labels, spec = job["metadata"].get("labels", {}), job["spec"]
    limit_s = spec.get("runPolicy", spec).get("activeDeadlineSeconds")
    return ClusterJob(
        status.job_id, status.name, labels.get(USER_LABEL, ""), "", PARTITION, status.state, status.reason,
        nodes=status.nodes, allocations=tuple(parts), node_count=_pod_count(job),
        cpu_count=sum(p.cpus for p in parts), gpu_count=sum(p.gpu_count for p in parts),
        submitted_s=status.submitted_s, started_s=status.started_s,
        limit_minutes=None if limit_s is None else round(limit_s / 60),
    )  # fmt: skip

"""Manifests: a submission as objects of Kubernetes.

A pure function: `--dry-run` prints what `submit` posts. A node of the job is a pod: an Indexed Job of as many,
or Kubeflow's PyTorchJob. The script and the secret by which the pods know each other lie in a Secret; a
headless Service gives the first pod a name. What a site has to say of pods (image, volumes, tolerations)
stands in a file of its own, a Pod into which ours is laid.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from headrace.cluster.kubernetes.pod import RESTARTS, message_of
from headrace.cluster.launch.place import REQUEUE_EXIT
from headrace.cluster.local.jobs import LocalRequest, read_request
from headrace.cluster.local.keeper import job_variables
from headrace.cluster.notation import compress_hosts
from headrace.cluster.site import own_site
from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cluster.executor import Submission

JOB_LABEL, USER_LABEL = "headrace/job", "headrace/user"
CANCELLED: Final = "headrace/cancelled"
"""An annotation: the job's deadline was moved to now, because its user said so."""

POD_VARIABLE, KIND_VARIABLE = "HEADRACE_KUBERNETES_POD", "HEADRACE_KUBERNETES_KIND"
FILES: Final = "/headrace/job"
"""Where a pod sees the script and the secret."""

GRACE_S: Final = 60
"""Between SIGTERM and SIGKILL: `headrace launch` lets its ranks save for 25 s, and ends all that it started."""

_KEPT_S: Final = 86400
_RESTARTS_MAX: Final = 10
_LOCAL: Final = "/headrace/local"
_GPU_TYPE: Final = "nvidia.com/gpu.product"
_KINDS: Final = {"Job": ("batch/v1", "train"), "PyTorchJob": ("kubeflow.org/v1", "pytorch")}
"""Their API, and how they want the container to be named."""

_DONE: Final = frozenset({
    "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gres", "gpus", "gpus-per-node", "gpus-per-task",
    "mem", "time", "job-name", "requeue", "no-requeue", "chdir", "partition",
})  # fmt: skip
_IDLE: Final = frozenset(
    {"output", "error", "open-mode", "account", "qos", "comment", "mail-type", "mail-user"}
)
"""Mean nothing here, and change nothing of what runs."""


def pod_file() -> tuple[dict[str, Any], str]:
    """The site's pod, and the file's name; an empty one where there is no file.

    Raises:
        ClusterRequestError: the file is not there, or is no Pod.
    """
    given, own = os.environ.get(POD_VARIABLE), own_site().with_name("pod.yaml")
    path = Path(given) if given else own
    if not given and not own.exists():
        return {}, str(own)
    try:
        pod = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError) as e:
        raise ClusterRequestError(f"{path}: the pod cannot be read: {e}.", path=str(path)) from e
    is_pod = isinstance(pod, dict) and pod.get("kind", "Pod") == "Pod"
    if not is_pod or not all(isinstance(pod.get(k, {}), dict) for k in ("metadata", "spec")):
        raise ClusterRequestError(
            f"{path}: it is no Pod of Kubernetes.", path=str(path),
            next_step="Begin with the one that `headrace cluster init --kubernetes DIR` writes.",
        )  # fmt: skip
    return pod, str(path)


def kind() -> str:
    """Of the jobs that are made here: Job or PyTorchJob."""
    named = os.environ.get(KIND_VARIABLE) or "Job"
    if named not in _KINDS:
        raise ClusterRequestError(f"{KIND_VARIABLE} is {named!r}, expected {' or '.join(_KINDS)}.")
    return named


def _job_name(wanted: str) -> str:
    """A name that a Job, its Service and its pods' host names may have, and nobody else's has."""
    plain = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:40].rstrip("-") or "job"
    plain = plain if plain[0].isalpha() else f"job-{plain}"
    return f"{plain}-{secrets.token_hex(3)}"


def label(text: str) -> str:
    """As the value of a label may be."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")


def _request_of(submission: Submission) -> LocalRequest:
    """What a script asks for; ClusterRequestError where Kubernetes cannot do it."""
    request = read_request(submission.script, submission.options)
    if not_done := request.words - _DONE - _IDLE:
        raise ClusterRequestError(
            f"--{min(not_done)} is not done on Kubernetes.",
            next_step="Leave it out. Where pods may run stands in the pod's file: docs/howto/kubernetes.md.",
        )
    if request.partition not in {"", PARTITION}:
        raise ClusterRequestError(
            f"partition is {request.partition!r}; Kubernetes has none: all of it is {PARTITION!r}.",
            next_step="A queue of Kueue's is a label in the pod's file: docs/howto/kubernetes.md.",
        )
    return request


PARTITION: Final = "kubernetes"


def manifests(submission: Submission, user: str, name: str = "") -> list[dict[str, Any]]:
    """The objects of a user's job, itself first; by default it has a name that no other job has.

    Raises:
        ClusterRequestError: something is asked for that is not done here, or no image is named.
    """
    request, (site, path), form = _request_of(submission), pod_file(), kind()
    name = name or _job_name(request.name)
    api, container_name = _KINDS[form]
    nodes = _node_names(name, request.nodes, form)
    pod = _pod(name, request, submission, nodes, form, (site, path))
    about = site.get("metadata", {})
    labels = {**about.get("labels", {}), "app.kubernetes.io/managed-by": "headrace", JOB_LABEL: name,
              USER_LABEL: label(user)}  # fmt: skip
    own = {"name": name, "labels": labels}
    if "namespace" in about:
        own["namespace"] = about["namespace"]
    notes = about.get("annotations", {})
    meta = own | {"annotations": {**notes, "headrace/name": request.name or "job"}}
    template = {"metadata": {"labels": labels, "annotations": dict(notes)}, "spec": pod}
    limit = {} if request.time_s is None else {"activeDeadlineSeconds": int(request.time_s)}
    if form == "Job":
        spec = {
            "completionMode": "Indexed", "completions": request.nodes, "parallelism": request.nodes,
            # The script runs in the first pod; the others serve it.
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            **_restarts(container_name, again=request.requeue), **limit,
            "ttlSecondsAfterFinished": _KEPT_S, "template": template,
        }  # fmt: skip
    else:
        again = {"restartPolicy": "OnFailure" if request.requeue else "Never", "template": template}
        counts = {"Master": 1, "Worker": request.nodes - 1}
        spec = {
            "runPolicy": {
                "cleanPodPolicy": "Running", "backoffLimit": _RESTARTS_MAX if request.requeue else 0, **limit,
                "ttlSecondsAfterFinished": _KEPT_S,
            },
            "pytorchReplicaSpecs": {role: {"replicas": n, **again} for role, n in counts.items() if n},
        }  # fmt: skip
    objects = [
        {"apiVersion": api, "kind": form, "metadata": meta, "spec": spec},
        {"apiVersion": "v1", "kind": "Secret", "metadata": own, **_secret(submission)},
    ]
    if form == "Job":  # Kubeflow makes one for each pod
        names = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name},
        }
        objects.append({"apiVersion": "v1", "kind": "Service", "metadata": own, "spec": names})
    return objects


def _node_names(name: str, nodes: int, form: str) -> list[str]:
    """The pods' host names, by index."""
    if form == "Job":
        return [f"{name}-{index}" for index in range(nodes)]
    return [f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(nodes - 1))]


def _restarts(container: str, *, again: bool) -> dict[str, Any]:
    if not again:
        return {"backoffLimit": 0}
    # A lost node or a preemption is nobody's fault; 75 asks for a new start; 137 and 143 are signals. All else
    # is the script's own failure, which another try would repeat.
    fails = {"containerName": container, "operator": "NotIn", "values": [REQUEUE_EXIT, 137, 143]}
    return {
        "backoffLimitPerIndex": _RESTARTS_MAX, "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": fails},
        ]},
    }  # fmt: skip


def _pod(  # noqa: PLR0917 - what is asked, and for what it is made
    name: str, request: LocalRequest, submission: Submission, nodes: list[str], form: str,
    site: tuple[dict[str, Any], str],
) -> dict[str, Any]:  # fmt: skip
    """The pod's spec: the site's, with ours laid in. Our variables win, the site's volumes do."""
    spec, container_name = dict(site[0].get("spec", {})), _KINDS[form][1]
    containers = [dict(each) for each in spec.get("containers", ())]
    theirs = next((c for c in containers if c.get("name") in ("train", container_name)), {})
    image = submission.image or theirs.get("image")
    if not image:
        raise ClusterRequestError(
            f"no image is named: --container says none, {site[1]} has no container `train` with one.",
            next_step="Name an image that has headrace and your training's packages: --container IMAGE.",
        )
    first = nodes[0] if form != "Job" else f"{nodes[0]}.{name}"
    of_job = job_variables(
        name, request.name or "job", compress_hosts(nodes), gpus_per_node=request.gpus_per_node,
        tasks_per_node=request.tasks_per_node, cpus_per_task=request.cpus_per_task,
        requeue=request.requeue,
    )  # fmt: skip
    variables = {
        **submission.environment, **of_job, "HEADRACE_JOB_SCHEDULER": "kubernetes",
        "HEADRACE_JOB_FIRST": first, "HEADRACE_JOB_FILES": FILES, "TMPDIR": _LOCAL,
    }  # fmt: skip
    env: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in variables.items()]
    for key, count in RESTARTS.items() if form == "Job" and request.requeue else ():
        field = {"fieldPath": f"metadata.annotations['{count}']"}
        env.append({"name": key, "valueFrom": {"fieldRef": field}})
    mounts = {"headrace-job": FILES, "headrace-local": _LOCAL, "headrace-shm": "/dev/shm"}  # noqa: S108
    directory = submission.directory or request.directory
    container = {
        **theirs, "name": container_name, "image": image,
        "command": ["python3", "-m", "headrace.cluster.kubernetes.pod", *submission.arguments],
        "env": _named(theirs.get("env", ()), env), "resources": _resources(request, theirs),
        "terminationMessagePath": str(message_of(FILES)),
        "volumeMounts": _named([{"name": n, "mountPath": path} for n, path in mounts.items()],
                               theirs.get("volumeMounts", ())),
        **({"workingDir": str(directory)} if directory else {}),
    }  # fmt: skip
    volumes = [
        {"name": "headrace-job", "secret": {"secretName": name, "defaultMode": 0o555}},
        # A disk of the node's own, in the site's file, makes a cache that outlives the job.
        {"name": "headrace-local", "emptyDir": {}},
        # What Kubernetes gives, 64 MB, is too little for workers of a data loader.
        {"name": "headrace-shm", "emptyDir": {"medium": "Memory"}},
    ]
    spec |= {"containers": [container, *(c for c in containers if c.get("name") != theirs.get("name"))],
             "volumes": _named(volumes, spec.get("volumes", ()))}  # fmt: skip
    spec.setdefault("terminationGracePeriodSeconds", GRACE_S)
    if request.gpu_type:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), _GPU_TYPE: request.gpu_type}
    return spec | ({"restartPolicy": "Never", "subdomain": name} if form == "Job" else {})


def _named(first: Any, second: Any) -> list[Any]:
    """Both lists as one; of two entries of a name that of the second."""
    return list({each["name"]: each for each in (*first, *second)}.values())


def _resources(request: LocalRequest, theirs: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(theirs.get("resources", {}).get("limits", {}))
    gpu = next((key for key in given if key.endswith("/gpu")), "nvidia.com/gpu")
    amounts = {**given, "cpu": str(request.tasks_per_node * request.cpus_per_task)}
    amounts.pop(gpu, None)
    if request.gpus_per_node:
        amounts[gpu] = str(request.gpus_per_node)
    if request.memory_mib:
        amounts["memory"] = f"{request.memory_mib}Mi"
    return {"requests": dict(amounts), "limits": amounts}


def _secret(submission: Submission) -> dict[str, Any]:
    """The script, the pods' secret, and what `resubmit` needs besides."""
    again = json.dumps(submission.document())
    texts = {"key": secrets.token_hex(16), "submission.json": again}
    try:
        return {"stringData": {"script": submission.script.decode(), **texts}}
    except UnicodeDecodeError:
        script = base64.b64encode(submission.script).decode()
        return {"data": {"script": script}, "stringData": texts}


class _Dumper(yaml.SafeDumper):
    """Texts of more than one line as they are, and no references."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """As `kubectl apply -f -` takes them."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)

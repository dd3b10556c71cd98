"""KubernetesExecutor: real kubectl against a simulated API server (`cluster.kubernetes`), pods as processes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from cluster.kubernetes import Refused, SimulatedKubernetes, missing
from cluster.launch.launching import MARK, Launch
from cluster.story import check_page, environment_of, tell
from headrace.cluster.executor import JobState, SchedulerUnavailable, Submission, executor
from headrace.cluster.kubernetes import manifests as written
from headrace.cluster.kubernetes.executor import Kubectl, KubernetesExecutor
from headrace.cluster.plan import Cluster, plan_batch, plan_run
from headrace.cluster.request import JobRequest
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout
from tests_shared import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 90.0
PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()"]


@pytest.fixture
def validate():
    return pytest.importorskip("kubernetes_validate").validate


@pytest.fixture(autouse=True)
def _own(tmp_path, monkeypatch):
    for name in [n for n in os.environ if n.startswith(("HEADRACE", "SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)


@pytest.fixture
def cluster(monkeypatch) -> Iterator[SimulatedKubernetes]:
    if why := missing():
        pytest.skip(why)
    # Its pods' disks lie in it, on these their sockets, and a socket's path is short.
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    try:
        from kubernetes_validate import validate
    except ImportError:
        validate = None
    simulated = SimulatedKubernetes(folder, validate)
    monkeypatch.setenv("KUBECONFIG", simulated.kubeconfig())
    yield simulated
    simulated.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ex(cluster):
    del cluster
    return KubernetesExecutor(Kubectl(deadline_s=10.0))


def submission(script: str, *options: str, **kwargs) -> Submission:
    text = f"#!/bin/bash\n{script}\n".encode()
    return Submission(text, options, **{"image": "registry/train:1", **kwargs})


def end(ex, job):
    (status,) = ex.wait([job], WAIT_S)[job]
    return status


# -- manifests -----------------------------------------------------------------------------------------

POD = """
kind: Pod
metadata: {namespace: team, labels: {kueue.x-k8s.io/queue-name: gpus}}
spec:
  tolerations: [{key: gpu, operator: Exists}]
  volumes:
    - {name: data, persistentVolumeClaim: {claimName: data}}
    - {name: headrace-local, hostPath: {path: /nvme}}
  containers:
    - name: train
      image: registry/site:2
      env: [{name: NCCL_DEBUG, value: INFO}, {name: HEADRACE_JOB_ID, value: forged}]
      volumeMounts: [{name: data, mountPath: /data}]
      resources: {limits: {amd.com/gpu: 1, rdma/hca: 1}}
    - {name: beside, image: registry/beside:1}
"""


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
@pytest.mark.parametrize(
    "more", [(), ("--requeue",), ("--nodes=3", "--gres=gpu:H100:8", "--mem=100G", "--time=1:00:00")]
)
@pytest.mark.parametrize("pod", ["", POD])
def test_manifests_are_what_the_published_schemas_say(
    validate, tmp_path, monkeypatch, version, more, pod
):
    if pod:
        (tmp_path / "pod.yaml").write_text(pod)
        monkeypatch.setenv("HEADRACE_KUBERNETES_POD", str(tmp_path / "pod.yaml"))
    objects = written.manifests(submission("true", *more), "ann", "train-1")
    assert [each["kind"] for each in objects] == ["Job", "Secret", "Service"]
    for each in yaml.safe_load_all(written.as_yaml(objects)):
        validate(each, version, strict=True)
    with pytest.raises(Exception, match="completionsX"):  # the schemas refuse what is not theirs
        validate(
            {**objects[0], "spec": {**objects[0]["spec"], "completionsX": 1}}, version, strict=True
        )


def test_a_job_has_what_was_asked_for_and_what_the_site_says(tmp_path, monkeypatch):
    (tmp_path / "pod.yaml").write_text(POD)
    monkeypatch.setenv("HEADRACE_KUBERNETES_POD", str(tmp_path / "pod.yaml"))
    asked = submission(
        "headrace launch x.py", "--nodes=3", "--ntasks-per-node=8", "--cpus-per-task=4",
        "--gres=gpu:NVIDIA-H100:8", "--mem=100G", "--time=90", "--requeue", "--job-name=Res_Net",
        image="", arguments=("a b",), environment={"MINE": "1"},
    )  # fmt: skip
    job, secret, service = written.manifests(asked, "ann", "res-net-1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    main, beside = pod["containers"]
    env = {e["name"]: e.get("value") for e in main["env"]}
    assert (spec["completions"], spec["parallelism"], spec["activeDeadlineSeconds"]) == (3, 3, 5400)
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [75, 137, 143]
    assert main["resources"]["limits"] == {
        "cpu": "32", "memory": "102400Mi", "amd.com/gpu": "8", "rdma/hca": 1,
    }  # fmt: skip
    assert (main["image"], beside["name"]) == ("registry/site:2", "beside")
    assert main["command"][-1] == "a b"
    assert (env["NCCL_DEBUG"], env["MINE"], env["HEADRACE_JOB_ID"]) == ("INFO", "1", "res-net-1")
    assert env["HEADRACE_JOB_NODES"] == "res-net-1-[0-2]"
    assert env["HEADRACE_JOB_FIRST"] == "res-net-1-0.res-net-1"
    assert (
        pod["subdomain"] == service["metadata"]["name"] == secret["metadata"]["name"] == "res-net-1"
    )
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["headrace-local"]["hostPath"] == {"path": "/nvme"}
    assert {"data", "headrace-shm", "headrace-job"} < volumes.keys()
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100"}
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert pod["terminationGracePeriodSeconds"] > 25
    assert secret["stringData"]["script"] == asked.script.decode()


def test_a_script_that_is_no_text_arrives_byte_for_byte():
    script = b"#!/bin/sh\n: \xff\xfe\n"
    secret = written.manifests(Submission(script, image="i"), "ann", "t-1")[1]
    loaded = yaml.safe_load(written.as_yaml([secret]))
    assert base64.b64decode(loaded["data"]["script"]) == script


def test_a_pytorchjob_is_kubeflows(monkeypatch):
    monkeypatch.setenv("HEADRACE_KUBERNETES_KIND", "PyTorchJob")
    job, _ = written.manifests(submission("x", "--nodes=3", "--requeue"), "ann", "t-1")
    known = pytest.importorskip("kubeflow.training.models")
    _check_model(job, known.KubeflowOrgV1PyTorchJob, known)
    with pytest.raises(AssertionError, match="wrong"):
        _check_model({**job, "wrong": 1}, known.KubeflowOrgV1PyTorchJob, known)
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 2}
    main = roles["Worker"]["template"]["spec"]["containers"][0]
    env = {e["name"]: e.get("value") for e in main["env"]}
    assert main["name"] == "pytorch"
    assert env["HEADRACE_JOB_NODES"] == "t-1-master-0,t-1-worker-[0-1]"
    assert env["HEADRACE_JOB_FIRST"] == "t-1-master-0"


def _check_model(value, model, known):
    """Every key is one of the published model's, down to pods, which the Job's schemas have checked."""
    names = {wire: name for name, wire in model.attribute_map.items()}
    for key, inner in value.items():
        assert key in names, key
        kind = model.openapi_types[names[key]]
        if kind.startswith("dict(str, Kubeflow"):
            for each in inner.values():
                _check_model(each, getattr(known, kind[10:-1]), known)
        elif kind.startswith("Kubeflow"):
            _check_model(inner, getattr(known, kind), known)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--array=0-3",), "--array is not done"), (("--dependency=afterok:1",), "--dependency"),
        (("--nodelist=n1",), "--nodelist"), (("--partition=gpu",), "Kubernetes has none"),
        (("--begin=now+1hour",), "--begin"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused(options, what):
    with pytest.raises(ClusterRequestError, match=what) as e:
        written.manifests(submission("true", *options), "ann", "t-1")
    assert e.value.next_step


@pytest.mark.parametrize("text", ["{", "[]", "kind: Job", "kind: Pod\nspec: 3\n"])
def test_a_pods_file_that_is_none_is_refused(tmp_path, monkeypatch, text):
    (tmp_path / "pod.yaml").write_text(text)
    monkeypatch.setenv("HEADRACE_KUBERNETES_POD", str(tmp_path / "pod.yaml"))
    with pytest.raises(ClusterRequestError, match=r"pod\.yaml"):
        written.manifests(submission("true"), "ann", "t-1")


def test_an_image_must_be_named():
    with pytest.raises(ClusterRequestError, match="no image"):
        written.manifests(submission("true", image=""), "ann", "t-1")


# -- the life of a job (simulated) -----------------------------------------------------------------------


def test_a_job_of_two_pods_trains_and_ends(ex, cluster, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "from os import environ as e\nprint('rank', e['RANK'], 'of', e['WORLD_SIZE'], e['HEADRACE_NODE'])\n"
    )
    headrace = f"{sys.executable} -c 'from headrace.cli import main; main()'"
    script = f"echo first; {headrace} launch --no-daemon --no-agent {program}; echo over $?"
    job = ex.submit(submission(script, "--nodes=2", "--job-name=My job", directory=tmp_path))
    status = end(ex, job)
    text = b"".join(ex.logs(job)).decode()
    assert (status.state, status.exit_code, status.name) == (JobState.COMPLETED, 0, "My job"), text
    assert status.nodes == ("node0", "node1")
    assert status.submitted_s <= status.started_s <= status.ended_s
    assert text.count("first") == 1
    assert f"rank 0 of 2 {job}-0" in text
    assert "over 0" in text
    others = [p for p in cluster.processes if p.startswith(f"{job}-1")]
    other = (cluster.folder / others[0] / "log").read_text()
    assert f"rank 1 of 2 {job}-1" in other
    assert ex.own() == [job]
    assert b"".join(ex.logs(job, lines=1)) == b"over 0\n"
    again = ex.resubmit(job)
    assert ex.submission(again) == ex.submission(job)
    assert end(ex, again).state is JobState.COMPLETED


def test_a_scripts_own_failure_ends_the_job_at_once(ex):
    job = ex.submit(submission("exit 7", "--nodes=2", "--requeue"))
    status = end(ex, job)
    assert (status.state, status.exit_code) == (JobState.FAILED, 7)


def test_exit_75_begins_the_script_again(ex, tmp_path):
    mark = tmp_path / "mark"
    job = ex.submit(
        submission(
            f"[ -e {mark} ] || {{ touch {mark}; exit 75; }}; echo $HEADRACE_JOB_RESTARTS",
            "--requeue",
        )
    )
    status = end(ex, job)
    assert (status.state, status.restarts) == (JobState.COMPLETED, 1)
    assert b"".join(ex.logs(job)) == b"1\n"


def test_why_a_launch_failed_is_known_where_its_folder_is_not_seen(ex):
    headrace = f"{sys.executable} -c 'from headrace.cli import main; main()'"
    launch = f"{headrace} launch --framework plain --no-daemon --no-agent sh -c 'exit 9'"
    job = ex.submit(submission(launch))
    status = end(ex, job).with_run()
    assert (status.state, status.folder) == (JobState.FAILED, None)
    assert status.why == f"rank 0 (node {job}-0) ended with status 9"


def test_a_cancelled_job_may_save(ex, cluster, tmp_path):
    cluster.conflicts = 2  # its controller writes at the same time
    script = f"""#!/usr/bin/env python3
import pathlib, signal, sys, time
signal.signal(15, lambda *_: (pathlib.Path('{tmp_path}/saved').touch(), sys.exit(3)))
print('on', flush=True)
time.sleep(600)
"""
    job = ex.submit(Submission(script.encode(), image="i"))
    assert until(
        lambda: "on" in b"".join(ex.logs(job)).decode() if ex.one(job).nodes else "", WAIT_S
    )
    assert ex.one(job).state is JobState.RUNNING
    ex.cancel([job])
    assert end(ex, job).state is JobState.CANCELLED
    assert (tmp_path / "saved").exists()
    ex.cancel([job])  # which is over
    with pytest.raises(ClusterError, match="gone with its first pod"):
        list(ex.logs(job))


def test_a_job_that_is_late_is_ended(ex):
    job = ex.submit(submission("exec sleep 600", "--time=0:02"))
    assert end(ex, job).state is JobState.TIMEOUT


def test_it_is_said_why_a_job_waits(ex, cluster):
    cluster.unschedulable = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    job = ex.submit(submission("true", "--gres=gpu:8"))
    assert until(lambda: "Insufficient" in ex.one(job).why, WAIT_S)
    assert ex.one(job).state is JobState.PENDING
    with pytest.raises(ClusterTimeout, match="Insufficient"):
        ex.wait([job], 0.1)
    ex.cancel([job])
    assert end(ex, job).state is JobState.CANCELLED


def test_the_queue_shows_nodes_and_jobs(ex):
    job = ex.submit(submission("exec sleep 600", "--gres=gpu:3", "--cpus-per-task=2", "--time=90"))
    assert until(lambda: ex.one(job).state is JobState.RUNNING, WAIT_S)
    snapshot = ex.snapshot(jobs=True)
    assert [(n.name, n.gpus, len(n.gpus_allocated), n.cpus) for n in snapshot.nodes] == [
        ("node0", 4, 3, 60), ("node1", 4, 0, 60),
    ]  # fmt: skip
    (row,) = snapshot.jobs
    assert (row.job_id, row.gpu_count, row.nodes, row.limit_minutes) == (job, 3, ("node0",), 90)
    ex.cancel([job])
    assert end(ex, job).state is JobState.CANCELLED


def test_gpus_are_laid_out_on_what_the_cluster_has(ex, monkeypatch):
    monkeypatch.setenv("HEADRACE_EXECUTOR", "kubernetes")
    assert executor().name == "kubernetes"
    where = Cluster.of()
    plan = plan_batch(b"#!/bin/sh\ntrue\n", "t.sh", JobRequest(gpus=8, container="i:1"), where)
    job = yaml.safe_load(ex.preview(plan.submission).decode().split("---")[0])
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (job["spec"]["completions"], limits["nvidia.com/gpu"], limits["cpu"]) == (2, "4", "60")
    with pytest.raises(ClusterRequestError, match="nearest that can be: --gpus 8"):
        plan_batch(b"#!/bin/sh\n", "t.sh", JobRequest(gpus=9), where)
    with pytest.raises(ClusterRequestError, match="foreground"):
        plan_run(JobRequest(), ["x"], where, terminal=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_story_of_a_job_on_kubernetes(cluster, tmp_path, request):
    pytest.importorskip("torch")
    launch = Launch(tmp_path)
    own = environment_of("kubernetes", launch)
    env = [{"name": n, "value": own[n]} for n in ("HEADRACE_HISTORY", "PATH", MARK)]
    main = {"name": "train", "image": "registry/train:1", "workingDir": str(tmp_path), "env": env}
    (tmp_path / "pod.yaml").write_text(
        yaml.safe_dump({"kind": "Pod", "spec": {"containers": [main]}})
    )
    more = {"HEADRACE_KUBERNETES_POD": str(tmp_path / "pod.yaml")}
    log = tell("kubernetes", launch, cluster.kill_node, more=more)
    check_page("kubernetes", log, tmp_path, request.config)


# -- what goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [("garbage", ClusterError, "expected an object"), ("half", SchedulerUnavailable, "EOF"),
     ("slow", ClusterTimeout, "[Tt]imeout|exceeded"), ("error", SchedulerUnavailable, "no leader")],
)  # fmt: skip
def test_a_server_that_does_not_answer_well(cluster, fault, error, text):
    cluster.fault = fault
    with pytest.raises(error, match=text) as e:
        KubernetesExecutor(Kubectl(deadline_s=1.0)).status(["t-1"])
    assert e.value.next_step


def test_no_kubeconfig_an_expired_token_and_a_namespace_that_is_not_there(
    ex, cluster, monkeypatch, tmp_path
):
    monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig("old"))
    with pytest.raises(ClusterError, match=r"log in again|Unauthorized") as e:
        ex.submit(submission("true"))
    assert "log in again" in e.value.next_step
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterError) as e:
        KubernetesExecutor().own()
    assert "kubeconfig" in e.value.next_step
    monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig())
    (tmp_path / "pod.yaml").write_text("kind: Pod\nmetadata: {namespace: nowhere}\n")
    monkeypatch.setenv("HEADRACE_KUBERNETES_POD", str(tmp_path / "pod.yaml"))
    with pytest.raises(ClusterError, match="nowhere") as e:
        KubernetesExecutor().submit(submission("true"))
    assert "metadata.namespace" in e.value.next_step


def test_no_kubectl(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match="kubectl is not installed"):
        KubernetesExecutor().own()


def test_a_quotas_refusal_leaves_nothing(ex, cluster):
    cluster.quota = "gpus, requested: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=4"
    with pytest.raises(ClusterRequestError, match="exceeded quota") as e:
        ex.submit(submission("true"))
    assert "quota" in e.value.next_step
    assert cluster.objects == {}


def test_a_name_that_is_taken_is_not_taken_again(ex, cluster, monkeypatch):
    names = iter(["t-1", "t-1", "t-2"])
    monkeypatch.setattr("headrace.cluster.kubernetes.manifests._job_name", lambda _: next(names))
    assert [ex.submit(submission("true")) for _ in range(2)] == ["t-1", "t-2"]


def test_a_job_whose_secret_is_refused_is_taken_back(ex, cluster, monkeypatch):
    def post(what, namespace, item, own=cluster.post):
        if what == "secrets":
            cluster.fault = ""
            raise Refused(403, "Forbidden", "secrets are forbidden: no")
        return own(what, namespace, item)

    monkeypatch.setattr(cluster, "post", post)
    with pytest.raises(ClusterError, match="forbidden") as e:
        ex.submit(submission("true"))
    assert "headrace-user" in e.value.next_step
    assert ex.own() == []


def test_jobs_that_are_not_known(ex):
    assert ex.status(["t-1"]) == {"t-1": []}
    with pytest.raises(ClusterError, match="does not know job t-1"):
        ex.known(["t-1"])
    with pytest.raises(ClusterError, match="does not know job t-1"):
        ex.submission("t-1")
    with pytest.raises(ClusterRequestError, match="no job id"):
        ex.status(["17_3"])
    with pytest.raises(ClusterRequestError, match="no signals"):
        ex.cancel(["t-1"], signal.SIGUSR1)


# -- the commands, and what is written for a site --------------------------------------------------------


@pytest.fixture
def run(cluster, tmp_path, monkeypatch):
    """`headrace cluster` on the simulated cluster; what it printed."""
    del cluster
    monkeypatch.setenv("HEADRACE_EXECUTOR", "kubernetes")
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        ended = subprocess.run(
            [*PROGRAM, "cluster", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        return ended.stdout

    return run


def test_the_manifests_are_shown_and_nothing_is_submitted(run, cluster, tmp_path):
    (tmp_path / "train.sh").write_text("#!/bin/bash\nheadrace launch train.py\n")
    shown = run(
        "batch",
        "--gpus",
        8,
        "--time",
        "8h",
        "--container",
        "registry/train:1",
        "--dry-run",
        "train.sh",
    )
    job, secret, service = yaml.safe_load_all(shown)
    assert (job["kind"], job["spec"]["completions"], job["spec"]["activeDeadlineSeconds"]) == (
        "Job",
        2,
        28800,
    )
    assert "headrace launch train.py" in secret["stringData"]["script"]
    assert service["spec"]["clusterIP"] == "None"
    assert not any(call.startswith("POST") for call in cluster.calls)


def test_the_life_of_a_job_by_its_commands(run, tmp_path):
    (tmp_path / "train.sh").write_text("#!/bin/bash\necho hello from $HEADRACE_JOB_NAME\n")
    batch = ("batch", "--cpus", 1, "--container", "i:1")
    job = json.loads(run(*batch, "--json", "train.sh"))["job"]
    assert "completed" in run("wait", job)
    assert run("logs", job) == "hello from train.sh\n"
    assert json.loads(run("status", job, "--json"))["jobs"][0]["state"] == "COMPLETED"
    again = run("resubmit", job).split()[-1]
    run("wait", again)
    assert "completed" in run("cancel", again)
    assert "node[0-1]" in run("queue")


def test_what_is_written_for_a_site_can_be_applied(run, validate, tmp_path, monkeypatch):
    run("init", "--kubernetes", "site", "--image", "registry.example.org:5000/team/headrace:0.2.0")
    built = subprocess.run(
        ["kubectl", "kustomize", "site"], capture_output=True, text=True, check=True
    )
    objects = list(yaml.safe_load_all(built.stdout))
    for each in objects:
        for version in ("1.31", "1.37"):
            validate(each, version, strict=True)
    daemons = next(each for each in objects if each["kind"] == "DaemonSet")
    pod = daemons["spec"]["template"]["spec"]
    assert daemons["metadata"]["namespace"] == "headrace"
    images = {c["image"] for c in (*pod["initContainers"], *pod["containers"])}
    assert images == {"registry.example.org:5000/team/headrace:0.2.0"}
    for container in pod["containers"]:
        asked = subprocess.run(
            [*PROGRAM, *container["command"][1:], "--help"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for word in container["command"]:
            assert not word.startswith("--") or word in asked
    monkeypatch.setenv("HEADRACE_KUBERNETES_POD", "site/pod.yaml")
    job, *_ = written.manifests(submission("true", image=""), "ann", "t-1")
    validate(job, "1.37", strict=True)
    run("init", "--kubernetes", "site", "--image", "headrace", code=3)


def test_users_roles_allow_what_is_asked_of_the_server(run, cluster, tmp_path):
    """Each request of a job's life is one that the written roles name."""
    run("init", "--kubernetes", "site")
    roles = yaml.safe_load_all((tmp_path / "site/roles.yaml").read_text())
    allowed = {(what, verb) for role in roles for rule in role["rules"]
               for what in rule["resources"] for verb in rule["verbs"]}  # fmt: skip
    (tmp_path / "train.sh").write_text("#!/bin/bash\n[ -e go ] || sleep 600\n")
    job = run("batch", "--cpus", 1, "--requeue", "--container", "i:1", "train.sh").split()[-1]
    ex = KubernetesExecutor()
    assert until(lambda: ex.one(job).state is JobState.RUNNING, WAIT_S)
    list(ex.logs(job))
    ex.cancel([job])
    end(ex, job)
    ex.submission(job)
    verbs = {"GET": "get", "POST": "create", "PUT": "update", "DELETE": "delete"}
    for call in cluster.calls:
        verb, path = call.split()
        parts = path.split("/")
        what = "nodes" if parts[-1] == "nodes" else "pods/log" if parts[-1] == "log" else None
        if path == "/version":
            continue
        if what is None:
            place = parts.index("namespaces") + 2
            what, named = parts[place], len(parts) > place + 1
            verb = "list" if verb == "GET" and not named else verb
        assert (what, verbs.get(verb, verb)) in allowed, call


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 137", 1),
        ("exit 143", 1),
        ("kill -9 $$", 137),
        ("exit 75", 75),
        ("exit $HEADRACE_JOB_RESTARTS", 3),  # two failures and a lost node
    ],
)
def test_a_pod_whose_script_tells_of_a_signal_is_not_tried_again(tmp_path, script, status):
    path = tmp_path / "script"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    told = {"HEADRACE_JOB_NODES": "localhost", "HEADRACE_JOB_FIRST": "localhost"}
    told |= {"HEADRACE_JOB_RESTARTS": "2", "HEADRACE_JOB_DISRUPTIONS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "headrace.cluster.kubernetes.pod"],
        env=os.environ | told | {"HEADRACE_JOB_FILES": str(tmp_path)}, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == status

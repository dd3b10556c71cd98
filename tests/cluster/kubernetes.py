"""A simulated API server with a Job controller, and nodes whose pods are processes of this machine.

No API server can be installed here (Debian and PyPI have none). This one is strict where a real one is: tokens,
namespaces, published schemas, names that are taken, resourceVersion. Real kubectl speaks to it. What it does
with an Indexed Job is what the API's documentation says: it proves our side, and nothing about Kubernetes.
Names of pods are resolved by a `sitecustomize` in the pods' Python.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import yaml

from cluster.slurm import descendants

if TYPE_CHECKING:
    from pathlib import Path

Object = dict[str, Any]
TOKEN = "t0ken"
JOB, INDEX = "headrace/job", "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
_PATH = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/([^/]+)/(\w+)(?:/([^/]+))?(/log)?")

_DNS = """
import socket
ask = socket.getaddrinfo
def known(host, *more, **named):
    host = "127.0.0.1" if str(host).startswith({prefix!r}) else host
    return ask(host, *more, **named)
socket.getaddrinfo = known
"""


class Refused(Exception):
    """An answer that is a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class SimulatedKubernetes:
    """The server, its objects and its pods.

    Attributes:
        fault: what it does instead of answering: "slow", "garbage", "half", "error".
        conflicts: so many writes lose to somebody else's.
        unschedulable: why pods do not begin; "" if they do.
    """

    def __init__(self, folder: Path, validate: Any) -> None:
        self.folder, self.validate = folder, validate
        self.objects: dict[tuple[str, str], Object] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: dict[str, float] = {}
        self.fault = self.unschedulable = self.quota = ""
        # Each test process has a port of its own.
        self.conflicts, self.port, self._version = 0, 29000 + os.getpid() % 2000, 0
        self.lock = threading.RLock()
        self.calls: list[str] = []
        handler = type("Handler", (_Handler,), {"cluster": self})
        # kubectl hands its token to nobody without a certificate.
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
             "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key",
             "-out", "cert"],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert", folder / "key")
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.over = threading.Event()
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.loop = threading.Thread(target=self._control, daemon=True)
        self.loop.start()

    def kubeconfig(self, token: str = TOKEN) -> str:
        path = self.folder / f"kubeconfig-{token}"
        url = f"https://127.0.0.1:{self.http.server_port}"
        path.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority": "cert"}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        }))  # fmt: skip
        return str(path)

    def kill_node(self, name: str) -> None:
        """What a power cut does: all that its pods run is gone at once."""
        with self.lock:
            for (what, pod), item in self.objects.items():
                if what == "pods" and item["spec"].get("nodeName") == name:
                    first = self.processes[pod].pid
                    for pid in (first, *descendants(first)):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.over.set()
        self.loop.join(30)
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.http.shutdown()
        self.http.server_close()

    # -- objects -----------------------------------------------------------------------------------

    def post(self, what: str, namespace: str, item: Object) -> Object:
        if self.validate is not None:
            try:
                self.validate(item, "1.37", strict=True)
            except Exception as e:  # whatever a schema says
                raise Refused(400, "BadRequest", f"strict decoding error: {e}") from e
        name = item["metadata"]["name"]
        if self.quota and what == "jobs":
            raise Refused(
                403, "Forbidden", f'jobs.batch "{name}" is forbidden: exceeded quota: {self.quota}'
            )
        if item["metadata"].get("namespace", namespace) != namespace:
            raise Refused(
                400, "BadRequest", "the namespace of the object does not match the request"
            )
        if (what, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{what} "{name}" already exists')
        texts = item.pop("stringData", {})
        if texts:
            coded = {k: base64.b64encode(v.encode()).decode() for k, v in texts.items()}
            item["data"] = {**item.get("data", {}), **coded}
        item["metadata"] |= {
            "namespace": namespace,
            "uid": f"uid-{what}-{name}",
            "creationTimestamp": _now(),
        }
        return self.keep(what, item)

    def keep(self, what: str, item: Object) -> Object:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self.objects[what, item["metadata"]["name"]] = item
        return item

    def put(self, what: str, name: str, item: Object) -> Object:
        old = self.item(what, name)
        if self.conflicts:
            self.conflicts -= 1
            self.keep(what, old)
        if item["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", f'{what} "{name}": the object has been modified')
        return self.keep(what, item)

    def item(self, what: str, name: str) -> Object:
        if (what, name) not in self.objects:
            raise Refused(404, "NotFound", f'{what} "{name}" not found')
        return self.objects[what, name]

    def drop(self, what: str, name: str) -> None:
        uid = self.item(what, name)["metadata"]["uid"]
        if what == "pods":
            self._kill(name)
        del self.objects[what, name]
        for (kind, other), item in list(self.objects.items()):
            owners = item["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == uid for owner in owners) and (kind, other) in self.objects:
                self.drop(kind, other)

    def chosen(self, what: str, query: dict[str, str]) -> list[Object]:
        items = [item for (kind, _), item in self.objects.items() if kind == what]
        if about := dict(p.split("=") for p in query.get("fieldSelector", "").split(",") if p):
            items = [
                i for i in items if i["involvedObject"]["name"] == about["involvedObject.name"]
            ]
        if not (selector := query.get("labelSelector", "")):
            return items
        key, values = selector, None
        if match := re.fullmatch(r"(\S+) in \((.*)\)", selector):
            key, values = match[1], match[2].split(",")
        elif "=" in selector:
            key, values = selector.split("=")[0], [selector.split("=")[1]]
        labels = [(i, i["metadata"].get("labels", {}).get(key)) for i in items]
        return [i for i, has in labels if has is not None and (values is None or has in values)]

    # -- the Job controller, and nodes ---------------------------------------------------------------

    def _control(self) -> None:
        while not self.over.wait(0.05):
            with self.lock:
                for (what, _), item in list(self.objects.items()):
                    if what == "jobs":
                        self._look(item)
                for name, until in list(self.killed.items()):
                    process = self.processes[name]
                    if process.poll() is None and time.monotonic() > until:
                        process.kill()

    def _look(self, job: Object) -> None:
        spec, name = job["spec"], job["metadata"]["name"]
        status = job.setdefault("status", {"startTime": _now(), "failed": 0})
        status.setdefault("began", time.monotonic())
        if any(c["type"] in ("Complete", "Failed") for c in status.get("conditions", ())):
            return
        pods = [
            i
            for (w, _), i in self.objects.items()
            if w == "pods" and i["metadata"]["labels"][JOB] == name
        ]
        for target, final in (("SuccessCriteriaMet", "Complete"), ("FailureTarget", "Failed")):
            if any(c["type"] == target for c in status.get("conditions", ())):
                if all(
                    self.processes[p].poll() is not None
                    for p in self.processes
                    if p.startswith(name)
                ):
                    self._end(job, final, status["conditions"][0].get("reason", ""))
                return
        limit = spec.get("activeDeadlineSeconds")
        if limit is not None and time.monotonic() - status["began"] > limit:
            self._end(job, "FailureTarget", "DeadlineExceeded")
            for pod in pods:
                self.drop("pods", pod["metadata"]["name"])
            return
        there = {
            pod["metadata"]["labels"][INDEX]: pod
            for pod in pods
            if pod["status"]["phase"] != "Failed"
        }
        for index in map(str, range(spec["completions"])):
            if index not in there:
                self._make_pod(job, index)
        for pod in pods:
            self._look_at_pod(job, pod)
        phases = [pod["status"]["phase"] for pod in pods]
        status["ready"] = phases.count("Running")

    def _make_pod(self, job: Object, index: str) -> None:
        self._version += 1
        name, template = job["metadata"]["name"], job["spec"]["template"]
        labels = {**template["metadata"]["labels"], INDEX: index}
        failed = [
            pod
            for (what, _), pod in self.objects.items()
            if what == "pods"
            and pod["metadata"]["labels"] == labels
            and pod["status"]["phase"] == "Failed"
        ]
        about = {"name": f"{name}-{index}-{self._version}", "labels": labels, "uid": f"pod-{self._version}",
                 "annotations": {FAILURES: str(len(failed))},
                 "creationTimestamp": f"{_now()[:-1]}.{self._version:06d}Z",
                 "ownerReferences": [{"uid": job["metadata"]["uid"]}]}  # fmt: skip
        self.keep(
            "pods",
            {"metadata": about, "spec": dict(template["spec"]), "status": {"phase": "Pending"}},
        )

    def _look_at_pod(self, job: Object, pod: Object) -> None:
        name, status, spec = pod["metadata"]["name"], pod["status"], job["spec"]
        main = pod["spec"]["containers"][0]
        if status["phase"] == "Pending":
            secret = self.objects.get(("secrets", job["metadata"]["name"]))
            if self.unschedulable:
                why = {"type": "PodScheduled", "status": "False", "message": self.unschedulable}
                status["conditions"] = [why]
            elif secret is not None and ("services", job["metadata"]["name"]) in self.objects:
                self._start(pod, main, secret)
                state = {"name": main["name"], "state": {"running": {}}}
                pod["status"] = {"phase": "Running", "containerStatuses": [state]}
                pod["spec"]["nodeName"] = f"node{pod['metadata']['labels'][INDEX]}"
            return
        if status["phase"] != "Running" or (code := self.processes[name].poll()) is None:
            return
        code = code if code >= 0 else 128 - code
        status["phase"] = "Failed" if code else "Succeeded"
        message = self.folder / name / "message"
        status["containerStatuses"][0]["state"] = {
            "terminated": {
                "exitCode": code,
                **({"message": message.read_text()} if message.exists() else {}),
            }
        }
        if (
            pod["metadata"]["labels"][INDEX]
            == spec["successPolicy"]["rules"][0]["succeededIndexes"]
            and not code
        ):
            self._end(job, "SuccessCriteriaMet", "SuccessPolicy")
        elif code:
            job["status"]["failed"] += 1
            rules = spec.get("podFailurePolicy", {}).get("rules", ())
            fails = [r["onExitCodes"]["values"] for r in rules if r["action"] == "FailJob"]
            most = spec.get("backoffLimitPerIndex", spec.get("backoffLimit"))
            if any(code not in values for values in fails) or job["status"]["failed"] > most:
                self._end(job, "FailureTarget", "PodFailurePolicy")
        if any(c["type"] != "Suspended" for c in job["status"].get("conditions", ())):
            for other in [p for p in self.processes if p.startswith(job["metadata"]["name"])]:
                self._kill(other)

    def _end(self, job: Object, kind: str, reason: str) -> None:
        more = {"type": kind, "status": "True", "reason": reason, "lastTransitionTime": _now()}
        job["status"].setdefault("conditions", []).append(more)
        self.keep("jobs", job)

    def _start(self, pod: Object, main: Object, secret: Object) -> None:
        name, folder = pod["metadata"]["name"], self.folder / pod["metadata"]["name"]
        files = folder / "files"
        files.mkdir(parents=True)
        (folder / "local").mkdir()
        (folder / "sitecustomize.py").write_text(
            _DNS.format(prefix=f"{secret['metadata']['name']}-")
        )
        for key, value in secret["data"].items():
            (files / key).write_bytes(base64.b64decode(value))
            (files / key).chmod(pod["spec"]["volumes"][0]["secret"]["defaultMode"])
        env = {e["name"]: e["value"] for e in main["env"] if "value" in e}
        for each in [e for e in main["env"] if "valueFrom" in e]:
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            env[each["name"]] = pod["metadata"]["annotations"].get(path.split("'")[1], "")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE", "SLURM"))}
        env |= {
            "JOB_COMPLETION_INDEX": pod["metadata"]["labels"][INDEX], "HEADRACE_JOB_FILES": str(files),
            "TMPDIR": str(folder / "local"), "HEADRACE_JOB_PORT": str(self.port),
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        command = [sys.executable if word == "python3" else word for word in main["command"]]
        with (folder / "log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, env={**inherited, **env}, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                cwd=main.get("workingDir", folder), start_new_session=True,
            )  # fmt: skip

    def _kill(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.poll() is None and name not in self.killed:
            process.send_signal(signal.SIGTERM)
            self.killed[name] = time.monotonic() + 60


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class _Handler(BaseHTTPRequestHandler):
    cluster: ClassVar[SimulatedKubernetes]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _answer(self, code: int, data: bytes, half: bool = False) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if half else data)
        self.close_connection = half

    def _do(self) -> None:
        url, cluster = urlsplit(self.path), self.cluster
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = self._body()
        cluster.calls.append(f"{self.command} {url.path}")
        if cluster.fault == "slow":
            cluster.over.wait(30)
        try:
            if url.path == "/version":
                self._answer(200, b'{"major": "1", "minor": "37", "gitVersion": "v1.37.0"}')
                return
            with cluster.lock:
                answer = self._object(url.path, query, body)
        except Refused as e:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                      "message": str(e), "reason": e.reason, "code": e.code}  # fmt: skip
            self._answer(e.code, json.dumps(status).encode())
            return
        if isinstance(answer, bytes):
            self._answer(200, answer)
            return
        data = (
            b"<html>It works</html>" if cluster.fault == "garbage" else json.dumps(answer).encode()
        )
        self._answer(200, data, half=cluster.fault == "half")

    do_GET = do_POST = do_PUT = do_DELETE = _do  # noqa: N815 - as the server looks for them

    def _object(self, path: str, query: dict[str, str], body: bytes) -> Object | bytes:  # noqa: C901
        cluster = self.cluster
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Unauthorized", "Unauthorized")
        if cluster.fault == "error":
            raise Refused(500, "InternalError", "etcdserver: no leader")
        if path == "/api/v1/nodes":
            return {"kind": "NodeList", "metadata": {}, "items": NODES}
        match = _PATH.fullmatch(path)
        if match is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        namespace, what, name, log = match.groups()
        if namespace != "team":
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if log:
            if query.get("follow"):
                cluster.lock.release()  # others go on meanwhile
                try:
                    cluster.processes[name].wait(60)
                finally:
                    cluster.lock.acquire()
            text = (cluster.folder / name / "log").read_bytes()
            lines = int(query.get("tailLines", 0))
            return b"".join(text.splitlines(keepends=True)[-lines:]) if lines else text
        match self.command:
            case "POST":
                return cluster.post(what, namespace, json.loads(body))
            case "PUT":
                return cluster.put(what, str(name), json.loads(body))
            case "DELETE":
                cluster.drop(what, str(name))
                return {"kind": "Status", "metadata": {}, "status": "Success"}
        if name:
            return cluster.item(what, name)
        return {"kind": "List", "metadata": {}, "items": cluster.chosen(what, query)}


NODES = [
    {
        "metadata": {"name": f"node{index}", "labels": {
            "kubernetes.io/arch": "amd64", "nvidia.com/gpu.product": "NVIDIA-H100",
        }},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "63500m", "memory": "527433728Ki", "nvidia.com/gpu": "4"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    for index in range(2)
]  # fmt: skip


def missing() -> str:
    """Why the simulation cannot be used; "" if it can."""
    if shutil.which("kubectl") is None:
        return "kubectl is not installed"
    text = subprocess.run(
        ["kubectl", "version", "--client", "--output=json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    minor = int(re.sub(r"\D", "", json.loads(text)["clientVersion"]["minor"]))
    # That of Debian 12, 1.20, sends what it is to put in another's place to the wrong address.
    return "" if minor > 20 else f"kubectl 1.{minor} cannot `replace --raw`"

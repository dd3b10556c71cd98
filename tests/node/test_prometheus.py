"""Debian's Prometheus scrapes daemon, controller and agent; every query of the dashboard returns data."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import pytest
import yaml

import headrace as hr
from headrace.base.peers import address_of
from headrace.control.client import Client, Endpoint
from headrace.control.prometheus import MetricsServer, asked, renderer, serve_metrics
from headrace.control.service.app import TABLE as CONTROL_TABLE
from headrace.control.service.app import ask_status as ask_control
from headrace.errors import ControlError
from headrace.insight import alerts, dashboard
from headrace.machine.sensors import GPUs
from headrace.node.daemon import TABLE as NODE_TABLE
from headrace.node.daemon import figures_of
from headrace.runtime import agent_folder, control_folder
from headrace.telemetry.agent import Agent, AgentOptions
from headrace.telemetry.messages import Listener
from headrace.telemetry.metrics import TABLE as AGENT_TABLE
from node.conftest import node_loader, serving, until
from telemetry.fake_nvml import FakeNVML

CONFIG = """
global:
  scrape_interval: 500ms
  scrape_timeout: 400ms
scrape_configs:
  - job_name: headrace
    static_configs:
      - targets: [{targets}]
"""


class Prometheus:
    """A server of our own on loopback."""

    def __init__(self, home, targets):
        config = home / "prometheus.yml"
        config.write_text(CONFIG.format(targets=", ".join(f'"{t}"' for t in targets)))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.log = home / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={home / 'data'}",
                 f"--web.listen-address={self.address}", "--log.level=warn"],
                stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    def get(self, path, **query):
        url = f"http://{self.address}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read())

    def ready(self):
        assert self.process.poll() is None, self.log.read_text()
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5),
        ):
            return True
        return False

    def query(self, text):
        return self.get("/api/v1/query", query=text)["data"]["result"]

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def queries():
    """(panel, query) of the whole dashboard."""
    return [
        (panel["title"], target["expr"])
        for panel in json.loads(dashboard())["panels"]
        for target in panel.get("targets", ())
    ]


def resolved(query):
    """As Grafana sends it."""
    for variable in ("instance", "job_name", "dataset"):
        query = query.replace(f"${variable}", ".*")
    query = query.replace("$__rate_interval", "5s").replace("$__range", "10s")
    assert "$" not in query, query
    return query


@pytest.fixture
def prometheus(tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("the Debian package prometheus is not installed")
    started = []

    def start(*targets):
        started.append(Prometheus(tmp_path, targets))
        until(started[-1].ready, 60)
        return started[-1]

    yield start
    for one in started:
        one.end()


POLICY = """
version: 1
file_systems:
  data: {paths: ["/"], capacity: {bytes_per_s: 4G, reads_per_s: 1M, metadata_per_s: 1M}}
jobs:
  alpha: {cap: {bytes_per_s: 1G, reads_per_s: 500k, metadata_per_s: 500k}}
"""


class ControllerProcess:
    """A controller in a process of its own."""

    def __init__(self, home):
        self.folder = control_folder()
        command = ["control", "start", "--foreground", "--metrics", "0", "--db", str(home / "c.db")]
        program = "from headrace.cli import main; main()"
        self.log = home / "control.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, *command], stdout=log, stderr=log
            )
        until(self.serves, 60)

    def serves(self):
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(FileNotFoundError, ControlError):
            self.metrics = ask_control(self.folder)["metrics"]
            return True
        return False

    @property
    def endpoint(self):
        return Endpoint(url=f"unix:{self.folder.socket}")

    def apply(self, text):
        client = Client(self.endpoint)
        client.ask("PUT", "/v1/policy", text.encode())
        client.close()


@pytest.fixture
def controller(folder, tmp_path):
    started = ControllerProcess(tmp_path)
    yield started
    started.process.terminate()
    started.process.wait(20)


@pytest.fixture
def agent(folder, monkeypatch):
    """An agent that hears of this process, which has a GPU; where it serves its metrics."""
    monkeypatch.setenv("HEADRACE_JOB_ID", "alpha")
    monkeypatch.setenv("HEADRACE_JOB_GPUS_PER_NODE", "1")
    place = agent_folder()
    place.path.mkdir(mode=0o700)
    listener = Listener(place.socket)
    busy = FakeNVML({"busy": 40, "memory": 1 << 30, "pids": [os.getpid()]})
    monkeypatch.setattr("headrace.telemetry.agent.IDLE_S", 0.2)
    agent = Agent(AgentOptions(node="n", interval_s=0.2), listener, gpus=GPUs(lambda: busy))
    thread = threading.Thread(target=agent.run)
    thread.start()
    render = renderer(lambda: asked(agent.loop.call_soon, agent.figures))
    served = MetricsServer(address_of("127.0.0.1:0"), render, lambda: True)
    # Only what has the job in its environment from the start is found; this process was there before.
    job = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    busy.gpus[0]["pids"].append(job.pid)
    yield served
    job.kill()
    job.wait()
    served.close()
    agent.loop.stop()
    thread.join(20)
    agent.close()
    listener.close()
    place.path.rmdir()


def variables():
    return {v["name"]: v for v in json.loads(dashboard())["templating"]["list"]}


def test_every_query_of_the_dashboard_returns_data(
    folder, store, prometheus, controller, agent, monkeypatch
):
    from headrace.control import controller as watching
    from headrace.control import publishing
    from headrace.node import notes

    monkeypatch.setattr(notes, "PERIOD_S", 0.1)
    monkeypatch.setattr(publishing, "PERIOD_S", 0.2)
    monkeypatch.setattr(watching._controller, "_publisher", publishing.Publisher())
    monkeypatch.setenv("HEADRACE_JOB", "alpha")
    reader = hr.config.ReaderOptions(simulate="nfs")
    controller.apply(POLICY)
    options = {"ram_bytes": 2 << 20, "reader": reader, "controller": controller.endpoint}
    with serving(folder, **options) as server:
        exporter = serve_metrics("127.0.0.1:0", server.call_soon, server.describe, figures_of)
        scraper = prometheus(exporter.address, controller.metrics, agent.address)
        loader = node_loader(store)
        missing = dict(queries_resolved := [(resolved(q), t) for t, q in queries()])
        deadline = time.monotonic() + 120
        try:
            while missing and time.monotonic() < deadline:
                for _ in loader:  # the job goes on while it is scraped
                    pass
                for query in list(missing):
                    if any(one["value"][1] != "NaN" for one in scraper.query(query)):
                        del missing[query]
            names = scraper.get("/api/v1/label/job_name/values")["data"]
            # A scrape that came too late counts until the next one.
            up = until(lambda: _all_up(scraper.query("up")))
        finally:
            loader.close()
            exporter.close()
    assert len(queries_resolved) > 30
    assert missing == {}
    assert "alpha" in names
    assert [one["value"][1] for one in up] == ["1", "1", "1"]


def _all_up(targets):
    return targets if all(one["value"][1] == "1" for one in targets) else None


def test_variables_ask_for_metrics_that_there_are(folder):
    table = {m.name: m for m in (*NODE_TABLE, *CONTROL_TABLE, *AGENT_TABLE)}
    for name, variable in variables().items():
        if name == "datasource":
            continue
        metric, label = re.fullmatch(
            r"label_values\((\w+)(?:{.*})?, (\w+)\)", variable["query"]["query"]
        ).groups()
        assert label == "instance" or label in table[metric].labels


def test_queries_name_metrics_and_labels_that_there_are():
    """Also of those that no test can bring about."""
    table = {m.name: m for m in (*NODE_TABLE, *CONTROL_TABLE, *AGENT_TABLE)}
    used = set()
    for title, query in queries():
        for name in re.findall(r"\bheadrace_\w+", query):
            metric = table.get(name) or table[re.sub(r"_(bucket|sum|count)$", "", name)]
            used.add(metric.name)
            filters = re.findall(rf"{name}{{(.*?)}}", query)
            for label in re.findall(r"(\w+)=~", ",".join(filters)):
                assert label == "instance" or label in metric.labels, (title, query)
    assert len(used) > 30


def test_panels_do_not_overlap_and_have_titles():
    taken = set()
    ids = set()
    for panel in json.loads(dashboard())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        ids.add(panel["id"])
        assert panel["title"]
    assert len(ids) == len(json.loads(dashboard())["panels"])


# -- alerts --------------------------------------------------------------------------------------------

AGENT, CONTROL = "headrace_agent_", "headrace_control_file_system_"
SERVED = {
    # Waits for data 36 s of each minute on two nodes, works 24; the other one waits 6 s and works 54.
    AGENT + 'job_stall_seconds_total{job_name="17", cause="storage", instance="a"}': "0+36x120",
    AGENT + 'job_stall_seconds_total{job_name="17", cause="decode", instance="b"}': "0+36x120",
    AGENT + 'job_work_seconds_total{job_name="17", instance="a"}': "0+24x120",
    AGENT + 'job_work_seconds_total{job_name="17", instance="b"}': "0+24x120",
    AGENT + 'job_stall_seconds_total{job_name="18", cause="storage", instance="a"}': "0+6x120",
    AGENT + 'job_work_seconds_total{job_name="18", instance="a"}': "0+54x120",
    # Two GPUs that work 1.2 s of each 120 s, and two that work half of the time.
    AGENT + 'job_gpu_watched_seconds_total{job_name="19"}': "0+120x120",
    AGENT + 'job_gpu_busy_seconds_total{job_name="19"}': "0+1.2x120",
    AGENT + 'job_gpu_watched_seconds_total{job_name="17"}': "0+120x120",
    AGENT + 'job_gpu_busy_seconds_total{job_name="17"}': "0+60x120",
    # An agent dies after an hour; another is taken away; what is down besides never was an agent.
    'up{job="headrace", instance="n1:9466"}': "1x60 0x60",
    AGENT + 'build_info{job="headrace", instance="n1:9466", node="n1"}': "1x60 stale",
    'up{job="headrace", instance="n2:9466"}': "1x60 stale",
    AGENT + 'build_info{job="headrace", instance="n2:9466", node="n2"}': "1x60 stale",
    'up{job="other", instance="n1:80"}': "0x120",
    # Of one file system 95% of the bytes are used, and half of the reads; of the other 80%.
    CONTROL + 'used_bytes_per_second{file_system="scratch"}': "1.9e9x120",
    CONTROL + 'capacity_bytes_per_second{file_system="scratch"}': "2e9x120",
    CONTROL + 'used_reads_per_second{file_system="scratch"}': "500x120",
    CONTROL + 'capacity_reads_per_second{file_system="scratch"}': "1000x120",
    CONTROL + 'used_bytes_per_second{file_system="home"}': "1.6e9x120",
    CONTROL + 'capacity_bytes_per_second{file_system="home"}': "2e9x120",
}
FIRED = {
    ("HeadraceJobStarves", "100m"): (
        {"severity": "warning", "job_name": "17"}, "Job 17 waits for data 60% of its time."
    ),
    ("HeadraceGPUsIdle", "100m"): (
        {"severity": "warning", "job_name": "19"}, "The GPUs of job 19 work 1% of its time."
    ),
    ("HeadraceAgentDead", "70m"): (
        {"severity": "critical", "job": "headrace", "instance": "n1:9466"},
        "The agent at n1:9466 does not answer.",
    ),
    ("HeadraceFileSystemNearItsLimit", "100m"): (
        {"severity": "warning", "file_system": "scratch", "measure": "bytes"},
        "File system scratch does 95% of the bytes that it can.",
    ),
}  # fmt: skip


def promtool(*arguments, cwd):
    if shutil.which("promtool") is None:
        pytest.skip("the Debian package prometheus is not installed")
    return subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_alerts_fire_for_what_is_wrong_and_for_nothing_else(tmp_path):
    rules = yaml.safe_load(alerts())["groups"][0]["rules"]
    (tmp_path / "alerts.yaml").write_text(alerts())
    series = [{"series": name, "values": values} for name, values in SERVED.items()]
    described = {rule["alert"]: rule["annotations"]["description"] for rule in rules}
    wanted = []
    for (name, at), (labels, summary) in FIRED.items():
        description = described[name].replace("{{ $labels.job_name }}", labels.get("job_name", ""))
        fired = {
            "exp_labels": labels,
            "exp_annotations": {"summary": summary, "description": description},
        }
        wanted.append({"alertname": name, "eval_time": at, "exp_alerts": [fired]})
        # Not before it has lasted, nor after two minutes of an agent's silence.
        early = "62m" if name == "HeadraceAgentDead" else "9m"
        wanted.append({"alertname": name, "eval_time": early, "exp_alerts": []})
    test = {"interval": "1m", "input_series": series, "alert_rule_test": wanted}
    expected = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(expected, width=1000))
    checked = promtool("check", "rules", "alerts.yaml", cwd=tmp_path)
    assert f"{len(FIRED)} rules found" in checked.stdout, checked
    tested = promtool("test", "rules", "test.yaml", cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert {rule["alert"] for rule in rules} == {name for name, _ in FIRED}


def test_alerts_name_metrics_and_labels_that_there_are():
    table = {m.name: m for m in (*CONTROL_TABLE, *AGENT_TABLE)}
    for rule in yaml.safe_load(alerts())["groups"][0]["rules"]:
        names = re.findall(r"\bheadrace_\w+", rule["expr"])
        assert names
        assert {m: table[m].kind == "counter" for m in names} == {
            m: f"rate({m}[" in rule["expr"] for m in names
        }
        for label in (
            ",".join(re.findall(r"by \((.*?)\)", rule["expr"])).replace(" ", "").split(",")
        ):
            assert all(label in table[m].labels for m in names if label), (rule["alert"], label)

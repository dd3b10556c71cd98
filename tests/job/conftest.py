"""Four nodes that stage a data set: their network, the servers, and training processes on them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from capi.compiling import Line, printed
from headrace.base.checksum import crc32c
from headrace.job.meeting import Meeting
from job.network import Network
from job.trainer import digest_of

HERE = Path(__file__).parent
PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()"]
NODES = 4


class Cluster:
    """Nodes, a source, and a job over them.

    Args:
        network: where the nodes are.
        folder: for the meeting folder and the nodes' local disks.
        source: what is staged.
    """

    def __init__(self, network: Network, folder: Path, source: Path) -> None:
        self.network = network
        self.folder = folder
        self.source = source
        self.meet = folder / "meet"
        self.where = f"headrace://{self.meet}"
        self.servers: dict[int, subprocess.Popen[str]] = {}
        self.trainers: list[Trainer] = []
        self.session = ""
        self.silent: list[int] = []

    def local(self, node: int) -> Path:
        path = self.folder / f"disk-{node}"
        path.mkdir(exist_ok=True)
        return path

    def environment(self, node: int) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE", "SLURM", "OMPI"))
        }
        return kept | {
            "HEADRACE_NODE_RANK": str(node), "HEADRACE_NODES": str(self.network.nodes),
            "HEADRACE_JOB_FOLDER": str(self.meet), "PYTHONWARNINGS": "error",
        }  # fmt: skip

    def start(self, *options: str, nodes: list[int] | None = None) -> None:
        for node in nodes if nodes is not None else range(self.network.nodes):
            self.servers[node] = subprocess.Popen(
                [*self.network.command(node), *PROGRAM, "stage", str(self.source), "--local",
                 str(self.local(node)), "--address", self.network.address(node), "--json", *options],
                env=self.environment(node), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """`headrace job`, from node 0's network."""
        ended = subprocess.run(
            [*self.network.command(0), *PROGRAM, "job", "--json"], env=self.environment(0),
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return json.loads(ended.stdout)

    def wait_staged(self, replicas: int = 1, seconds: float = 90.0) -> dict[str, Any]:
        """Waits until every share of a new session is staged, and copied; returns its status."""
        meeting, before = Meeting(self.meet), self.session
        until = time.monotonic() + seconds
        while True:
            job = meeting.job()
            nodes = meeting.nodes(None if job is None else job.session)
            copies = sum(len(node.replicas) for node in nodes.values())
            whole = job is not None and sum(len(s.places) for s in job.segments)
            if (
                job is not None
                and job.session != before
                and job.state == "staged"
                and copies == (replicas - 1) * len(nodes)
                and whole == replicas * len(job.segments)
            ):
                self.session = job.session
                return self.status()["job"]
            assert time.monotonic() < until, (job, nodes)
            for node, server in self.servers.items():
                if server.poll() is not None:
                    raise AssertionError((node, server.communicate()))
            time.sleep(0.05)

    def train(self, node: int, *options: str) -> Trainer:
        trainer = Trainer(
            [*self.network.command(node), sys.executable, str(HERE / "trainer.py"), self.where, *options],
            self.environment(node),
        )  # fmt: skip
        self.trainers.append(trainer)
        return trainer

    def read_in_c(self, node: int, program: Path, *options: str) -> list[Line]:
        """One epoch by the C example, compiled, on a node."""
        ended = subprocess.run(
            [*self.network.command(node), program, "-v", *options, self.where],
            env={}, check=False, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return printed(ended.stdout)[0]

    def kill(self, node: int) -> None:
        """As if the node's power failed: nobody says goodbye."""
        server = self.servers.pop(node)
        server.kill()
        server.communicate()

    def silence(self, node: int) -> None:
        """As if its cable were pulled: nothing answers, nothing is refused."""
        down = [*self.network.command(node), "ip", "link", "set", "eth0", "down"]
        subprocess.run(down, check=True, timeout=20)
        self.silent.append(node)

    def end(self) -> dict[int, dict[str, Any]]:
        """Ends the job by its command; returns what the servers said last."""
        subprocess.run([*PROGRAM, "stage", "--end"], env=self.environment(0), check=True,
                       capture_output=True, timeout=60)  # fmt: skip
        reports = {}
        for node, server in self.servers.items():
            out, err = server.communicate(timeout=60)
            assert server.returncode == 0, err
            reports[node] = json.loads(out)["node"]
        return reports

    def close(self) -> None:
        for node in self.silent:
            up = [*self.network.command(node), "ip", "link", "set", "eth0", "up"]
            subprocess.run(up, check=True, timeout=20)
        for process in [*self.servers.values(), *(t.process for t in self.trainers)]:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(ValueError):  # its pipes are read already
                process.communicate()


class Trainer:
    """A training process: `trainer.py`."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.delivered = 0

    def ready(self) -> Trainer:
        assert self._line() == "ready", self.process.communicate()
        return self

    def go(self) -> Trainer:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self

    def until(self, samples: int) -> None:
        """Waits until so many samples were delivered."""
        while self.delivered < samples:
            line = self._line()
            assert line.startswith("read "), (line, self.process.communicate())
            self.delivered = int(line.split()[1])

    def result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        lines = self.process.stdout.readlines()
        err = self.process.stderr.read()
        assert self.process.wait(60) == 0, err
        return json.loads(lines[-1])

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class Expected:
    """What the source itself delivers."""

    def __init__(self, source: Path) -> None:
        self._source = source
        with hr.open(source) as store:
            self.samples = len(store)
            self.nbytes = store.nbytes
            self.fingerprint = store.fingerprint
            samples = [bytes(store.read(i)) for i in range(len(store))]
            self.digests = [digest_of(i, data) for i, data in enumerate(samples)]
            self.checksums = [crc32c(data) for data in samples]

    def order(self, rank: int = 0, world: int = 1, batch: int = 16, **options: Any) -> list[int]:
        with hr.open(self._source) as store:
            chosen = {"tail": "drop"} | options
            loader = hr.loader(store, batch, seed=3, rank=rank, world_size=world, **chosen)
            indices = [int(i) for each in loader for i in each.indices]
            loader.close()
            return indices

    def check(self, result: dict[str, Any], rank: int = 0, world: int = 1) -> None:
        """The order is the source's, and so is every byte."""
        assert result["indices"] == self.order(rank, world)
        assert result["digests"] == [self.digests[i] for i in result["indices"]]


@pytest.fixture(scope="session")
def network(pytestconfig: pytest.Config):
    new_network = Network(NODES)
    if new_network.reason:
        reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(
                f"no network namespaces, nodes are loopback addresses: {new_network.reason}"
            )
    yield new_network
    new_network.close()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 960 files of 0 to 20 kB in four classes. Not to be changed."""
    folder = tmp_path_factory.mktemp("job") / "source"
    rng = np.random.default_rng(7)
    for label in range(4):
        (folder / f"class-{label}").mkdir(parents=True)
        for i in range(240):
            data = rng.bytes(int(rng.integers(0, 20_000)))
            (folder / f"class-{label}" / f"{i:04d}.bin").write_bytes(data)
    return folder


@pytest.fixture(scope="session")
def expected(source: Path) -> Expected:
    return Expected(source)


@pytest.fixture
def cluster(network: Network, tmp_path: Path, source: Path):
    new_cluster = Cluster(network, tmp_path, source)
    yield new_cluster
    new_cluster.close()

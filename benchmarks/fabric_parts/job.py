"""A job's global store on four simulated nodes: one read of the source, epoch two, and a loss.

Each node is a network namespace with `headrace stage` and a training process; all share this
machine's cores and its disk. Epoch two of all nodes together is compared with what one node's loader
reads from one other node's target over the same bridge.

    python -m benchmarks.fabric_parts.job read STORE --rank R --world W    # a training process
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import headrace as hr
from benchmarks import cache
from benchmarks.check import Checker, FlatBatch
from benchmarks.fabric_parts.ends import ROOT
from benchmarks.fabric_parts.network import Network, bridged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.datasets import DataSet

NODES = 4
LOST = 2
"""The node that dies."""

_PROGRAM = (sys.executable, "-c", "from headrace.cli import main; main()")
_NQN = "nqn.2026-11.io.headrace:limit"
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Epoch:
    """What all readers did in one epoch."""

    samples: int
    distinct: int
    bytes: int
    seconds: float
    longest_stall_s: float

    @property
    def gb_per_s(self) -> float:
        """Of all readers together."""
        return self.bytes / self.seconds / 1e9


class Reader:
    """A training process; reads an epoch when it is told to."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.line()

    def line(self) -> dict[str, Any]:
        """What it says next."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"a reader ended with exit status {self._process.wait()}")
        return dict(json.loads(text))

    def begin(self, pace_s: float = 0.0) -> None:
        """Starts an epoch, a batch each `pace_s` at most."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{pace_s}\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """What the epoch came to."""
        while "samples" not in (said := self.line()):
            pass
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Job:
    """`headrace stage` on every node, over data of one source."""

    def __init__(self, networks: list[Network], folder: Path, source: Path, replicas: int) -> None:
        self._networks = networks
        self._meet = folder / "meet"
        self.where = f"headrace://{self._meet}"
        self._servers: dict[int, subprocess.Popen[str]] = {}
        for node, network in enumerate(networks):
            local = folder / f"disk-{node}"
            local.mkdir(parents=True)
            command = [
                *network.server, *_PROGRAM, "stage", str(source), "--local", str(local),
                "--address", network.address, "--replicas", str(replicas), "--json",
            ]  # fmt: skip
            self._servers[node] = subprocess.Popen(
                command, env=self.environment(node), stdout=subprocess.PIPE, text=True
            )
        self._replicas = replicas

    def environment(self, node: int) -> dict[str, str]:
        """Of a process on a node."""
        mine = {
            "HEADRACE_NODE_RANK": str(node), "HEADRACE_NODES": str(len(self._networks)),
            "HEADRACE_JOB_FOLDER": str(self._meet),
        }  # fmt: skip
        return dict(os.environ) | mine

    def wait_staged(self) -> dict[str, Any]:
        """Its status when all shares are staged and copied."""
        command = [*self._networks[0].client, *_PROGRAM, "job", "--json"]
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            done = subprocess.run(
                command, env=self.environment(0), capture_output=True, text=True, check=False
            )
            with contextlib.suppress(ValueError):
                job = json.loads(done.stdout).get("job")
                if job and job["state"] == "staged" and self._copied(job):
                    return dict(job)
            time.sleep(0.3)
        raise RuntimeError(f"the job is not staged after {_PATIENCE_S:.0f} s: {done.stdout}")

    def _copied(self, job: dict[str, Any]) -> bool:
        copies = sum(len(node["copies_of"]) for node in job["nodes"])
        return copies == (self._replicas - 1) * len(self._networks)

    def reader(self, node: int, rank: int, world: int, batch: int) -> Reader:
        """A training process on a node."""
        network = self._networks[node]
        command = [*network.client, *_reading(self.where, rank, world, batch)]
        return Reader(command, self.environment(node))

    def kill(self, node: int) -> None:
        """As if its power failed."""
        server = self._servers.pop(node)
        server.kill()
        server.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end = [*self._networks[0].server, *_PROGRAM, "stage", "--end"]
        subprocess.run(end, env=self.environment(0), capture_output=True, check=False, timeout=60)
        for server in self._servers.values():
            try:
                server.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.communicate()


def _reading(where: str, rank: int, world: int, batch: int) -> list[str]:
    return [
        sys.executable, "-m", "benchmarks.fabric_parts.job", "read", where, "--rank", str(rank),
        "--world", str(world), "--batch", str(batch),
    ]  # fmt: skip


def _together(readers: Sequence[Reader], pace_s: float = 0.0) -> Epoch:
    """An epoch of all readers, begun at once."""
    began = time.perf_counter()
    for reader in readers:
        reader.begin(pace_s)
    return _sum([reader.end() for reader in readers], time.perf_counter() - began)


def _sum(said: list[dict[str, Any]], seconds: float) -> Epoch:
    indices = [index for each in said for index in each["indices"]]
    return Epoch(
        samples=len(indices),
        distinct=len(set(indices)),
        bytes=sum(each["bytes"] for each in said),
        seconds=seconds,
        longest_stall_s=max(each["longest_stall_s"] for each in said),
    )


# -- what is measured ------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[Path]:
    folder = root / f"fabric-job-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def limit(networks: list[Network], store: Path, data: DataSet, epochs: int) -> list[Epoch]:
    """One node's loader over a store that another node exports whole."""
    serving = [*networks[1].server, sys.executable, "-m", "benchmarks.fabric_parts.job", "serve"]
    with subprocess.Popen(
        [*serving, networks[1].address, str(store)], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        command = [*networks[0].client, *_reading(url, 0, 1, data.batch_size)]
        with Reader(command, dict(os.environ)) as reader:
            found = [_together([reader]) for _ in range(epochs)]
        assert server.stdin is not None
        server.stdin.close()
    return found


def staged(root: Path, source: Path, store: Path, data: DataSet) -> dict[str, Any]:
    """Source bytes, and epoch two of four nodes over the limit of one."""
    with _folder(root) as folder, bridged(NODES) as networks:
        cache.warm(cache.files_below(store))
        single = limit(networks, store, data, 3)
        with Job(networks, folder, source, 1) as job, contextlib.ExitStack() as stack:
            status = job.wait_staged()
            readers = [
                stack.enter_context(job.reader(node, node, NODES, data.batch_size))
                for node in range(NODES)
            ]
            epochs = [_together(readers) for _ in range(3)]
    return {
        "source_bytes": status["source_bytes"], "data_bytes": data.total_bytes,
        "single_gb_per_s": [epoch.gb_per_s for epoch in single],
        "all_gb_per_s": [epoch.gb_per_s for epoch in epochs],
        "complete": all(e.samples == e.distinct == data.samples for e in epochs),
    }  # fmt: skip


def loss(root: Path, source: Path, data: DataSet) -> dict[str, Any]:
    """A node's server dies in mid-epoch; three training processes read on."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder(root))
        networks = stack.enter_context(bridged(NODES))
        job = stack.enter_context(Job(networks, folder, source, 2))
        job.wait_staged()
        nodes = [node for node in range(NODES) if node != LOST]
        readers = [
            stack.enter_context(job.reader(node, rank, len(nodes), 64))
            for rank, node in enumerate(nodes)
        ]
        pace_s = 6.0 * len(nodes) * 64 / data.samples
        killer = threading.Timer(2.0, job.kill, (LOST,))
        killer.start()
        epoch = _together(readers, pace_s)
        killed = epoch.seconds > 2.0
        killer.join()
    return {
        "samples": data.samples, "delivered": epoch.samples, "distinct": epoch.distinct,
        "longest_stall_s": epoch.longest_stall_s, "seconds": epoch.seconds,
        "killed_in_mid_epoch": killed,
    }  # fmt: skip


# -- processes -------------------------------------------------------------------------------------


def read(given: argparse.Namespace) -> None:
    """An epoch for each line of the input: what was delivered, and the longest wait for a batch."""
    with hr.open(given.where) as store:
        print(json.dumps({"ready": True}), flush=True)
        loader = hr.loader(
            store, given.batch, seed=3, rank=given.rank, world_size=given.world, tail="exact",
            tune=False,
        )  # fmt: skip
        for line in sys.stdin:
            pace_s = float(line)
            indices: list[int] = []
            longest, nbytes = 0.0, 0
            checker = Checker(len(store), every=8)
            before = time.perf_counter()
            for batch in loader:
                longest = max(longest, time.perf_counter() - before)
                ends = batch.offsets + batch.lengths
                checker.add(FlatBatch(batch.data, batch.offsets, ends))
                indices += batch.indices.tolist()
                nbytes += int(batch.lengths.sum())
                if pace_s:
                    time.sleep(pace_s)
                before = time.perf_counter()
            checker.finish(complete=False)
            said = {"indices": indices, "bytes": nbytes, "longest_stall_s": longest}
            print(json.dumps(said | {"samples": len(indices)}), flush=True)
        loader.close()


def serve(given: argparse.Namespace) -> None:
    """Exports a store until the input ends; prints its URL."""
    from headrace.fabric.subsystem import Subsystem
    from headrace.fabric.target import Target

    subsystem = Subsystem(_NQN)
    space = subsystem.add_store(given.store)
    with Target([subsystem], (given.address, 0)) as target:
        host, port = target.address
        print(f"nvme+tcp://{host}:{port}/{_NQN}?ns={space.nsid}", flush=True)
        sys.stdin.read()
    subsystem.close()


def main() -> None:
    """Runs a process of a node."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    reading = commands.add_parser("read")
    reading.add_argument("where")
    reading.add_argument("--rank", type=int, default=0)
    reading.add_argument("--world", type=int, default=1)
    reading.add_argument("--batch", type=int, default=256)
    reading.set_defaults(run=read)
    serving = commands.add_parser("serve")
    serving.add_argument("address")
    serving.add_argument("store", type=Path)
    serving.set_defaults(run=serve)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()

"""Both ends as processes of their own: one exports files, one reads them, on a line of JSON each.

    python -m benchmarks.fabric_parts.ends export ADDRESS FILE...
    python -m benchmarks.fabric_parts.ends read

What a reader is asked to do is a `Case`; it answers with what it did and the CPU time that it took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import HostOptions
from headrace.fabric.identity import HostIdentity
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.fabric_parts.network import Network

NQN = "nqn.2026-11.io.headrace:bench"
ROOT = Path(__file__).resolve().parents[2]
_BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """Random reads, each block at most once while there are others."""

    urls: list[str]
    block_bytes: int
    depth: int
    queues: int
    digests: bool
    seconds: float
    seed: int = 1
    threads: int = 2
    """Callers at once, as a prefetching loader has them: while one batch ends, the next is read."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client did, and the CPU time of both ends."""

    bytes: int
    seconds: float
    reads: int
    client_cpu_s: float
    server_cpu_s: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Of payload."""
        return self.bytes / self.seconds / 1e9

    @property
    def reads_per_s(self) -> float:
        """Each of the case's block size."""
        return self.reads / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """Both ends together."""
        return (self.client_cpu_s + self.server_cpu_s) / (self.bytes / 1e9)


class Child:
    """A process that is asked in lines of JSON, and answers each with one."""

    def __init__(self, prefix: Sequence[str], arguments: Sequence[str]) -> None:
        command = [*prefix, sys.executable, "-m", "benchmarks.fabric_parts.ends", *arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.greeting = self._answer()

    def ask(self, question: object) -> dict[str, Any]:
        """Its answer to a question."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an end ended with exit status {self._process.wait()}")
        return dict(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Fabric:
    """Our target and our initiator over a network, each in a process of its own."""

    def __init__(self, network: Network, files: Sequence[Path]) -> None:
        self._target = Child(network.server, ["export", network.address, *map(str, files)])
        self._reader = Child(network.client, ["read"])
        self.urls: list[str] = self._target.greeting["urls"]

    def run(self, case: Case) -> Seen:
        """One case, with the CPU time of both ends."""
        before = self._target.ask("cpu")["cpu_s"]
        seen = self._reader.ask(asdict(case))
        return Seen(**seen, server_cpu_s=self._target.ask("cpu")["cpu_s"] - before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__()
        self._target.__exit__()


# -- in the processes ------------------------------------------------------------------------------


def export(address: str, files: Sequence[Path]) -> None:
    """Serves `files` until the input ends; answers every line with the CPU time so far."""
    subsystem = Subsystem(NQN)
    spaces = [subsystem.add(path) for path in files]
    with Target([subsystem], (address, 0)) as target:
        host, port = target.address
        urls = [f"nvme+tcp://{host}:{port}/{NQN}?ns={space.nsid}" for space in spaces]
        print(json.dumps({"urls": urls}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    subsystem.close()


def read() -> None:
    """Runs a case for each line of the input."""
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(Case(**json.loads(line)))), flush=True)


def run(case: Case) -> dict[str, Any]:
    """Reads for the seconds of the case; what is read before is not counted."""
    options = EngineOptions(
        host=HostOptions(hdgst=case.digests, ddgst=case.digests),
        queues=case.queues, reads_in_flight=case.depth,
    )  # fmt: skip
    identity = HostIdentity.of_machine()
    with FabricEngine(identity, options) as engine:
        blocks = {}
        for url in case.urls:
            space = engine.open(url)
            blocks[url] = space.blocks * space.block_bytes // case.block_bytes
        callers = [_Caller(engine, case, blocks, number) for number in range(case.threads)]
        for caller in callers:
            caller.start()
        time.sleep(min(0.1, case.seconds / 5))  # connections and their windows open
        before, cpu_s, began = engine.figures(), time.process_time(), time.perf_counter()
        time.sleep(case.seconds)
        after, seconds = engine.figures(), time.perf_counter() - began
        cpu_s = time.process_time() - cpu_s
        for caller in callers:
            caller.stopping = True
        for caller in callers:
            caller.join()
        assert all(caller.failure is None for caller in callers), callers
    return {
        "bytes": after["bytes"] - before["bytes"], "reads": after["reads"] - before["reads"],
        "seconds": seconds, "client_cpu_s": cpu_s,
    }  # fmt: skip


class _Caller(threading.Thread):
    """Reads batch after batch; every caller has blocks of its own."""

    def __init__(
        self, engine: FabricEngine, case: Case, blocks: dict[str, int], number: int
    ) -> None:
        super().__init__()
        self.stopping = False
        self.failure: BaseException | None = None
        self._engine, self._case = engine, case
        random = np.random.default_rng([case.seed, number])
        self._orders = {
            url: random.permutation(np.arange(number, count, case.threads)).astype(np.int64)
            for url, count in blocks.items()
        }
        self._batch = int(np.clip(_BATCH_BYTES // case.block_bytes, 2 * case.depth, 2048))
        self._dest = np.ones(
            self._batch * case.block_bytes, np.uint8
        )  # touched, as recycled memory is

    def run(self) -> None:
        try:
            self._read()
        except BaseException as e:
            self.failure = e
            raise

    def _read(self) -> None:
        size = self._case.block_bytes
        at = 0
        while not self.stopping:
            for url, order in self._orders.items():
                chosen = np.take(order, np.arange(at, at + self._batch), mode="wrap")
                lengths = np.full(self._batch, size, np.int64)
                found = self._engine.read_many(url, chosen * size, lengths, self._dest)
                if (found != size).any():
                    raise RuntimeError(f"{url}: a read brought {found.min()} bytes, not {size}")
            at += self._batch


def main() -> None:
    """Runs the end that the command line names."""
    if sys.argv[1] == "export":
        export(sys.argv[2], [Path(name) for name in sys.argv[3:]])
    else:
        read()


if __name__ == "__main__":
    main()

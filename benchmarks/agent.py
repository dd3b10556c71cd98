"""The agent's benchmark: how much of a core it takes, idle and on a busy node, and what telling it costs.

    python -m benchmarks.agent            # about four minutes
    python -m benchmarks.agent --quick    # short: does it work?
    python -m benchmarks.agent --profile  # where a look's time goes

The agent is a process of its own, with history and metrics, at its default pace; its CPU time is the
kernel's (/proc/PID/stat, user and system), over the whole time, after a first look. Ranks are processes
that tell it every other second what a loader would; the other processes of the node sleep. Raw figures go
to benchmarks/results/agent-DATE.json.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime as dt
import json
import os
import pstats
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

from benchmarks import machine, processes  # noqa: E402 - see above
from headrace.control.publishing import Publisher  # noqa: E402 - see above
from headrace.runtime import agent_folder  # noqa: E402 - see above
from headrace.telemetry.agent import Agent, AgentOptions  # noqa: E402 - see above
from headrace.telemetry.messages import ask_state  # noqa: E402 - see above

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = ROOT / "benchmarks/results"
PROGRAM = "from headrace.cli import main; main()"
SCRAPE_S = 15.0

# As the controller's thread does it: totals of a loader over two file systems, told every other second.
RANK = """
import time
from headrace.control.publishing import Publisher, PERIOD_S
publisher = Publisher()
while True:
    publisher.totals.batches += 20
    for system in ("/scratch", "/home"):
        row = publisher.totals.stall_s.setdefault(system, {})
        for cause in ("storage", "decode", "memory"):
            row[cause] = row.get(cause, 0.0) + 0.1
        tiers = publisher.totals.tier_bytes.setdefault(system, {})
        for tier in ("ram", "source"):
            tiers[tier] = tiers.get(tier, 0.0) + 1e6
    publisher.tell([])
    time.sleep(PERIOD_S)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A node."""

    name: str
    jobs: int
    ranks: int
    """Of each job."""
    others: int
    """Processes of no job."""


CASES = (
    Case("idle node", 0, 0, 0),
    Case("1 job of 8 ranks", 1, 8, 0),
    Case("1 job of 8 ranks, 500 other processes", 1, 8, 500),
    Case("8 jobs of 4 ranks, 500 other processes", 8, 4, 500),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen of the agent."""

    case: str
    seconds: float
    cpu_s: float
    share: float
    """Of one core."""
    look_cpu_s: float
    interval_s: float
    looks: int
    messages: int
    resident_bytes: int
    history_bytes: int
    scrapes: int


def cpu_of(pid: int) -> float:
    """User and system seconds of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def started(case: Case) -> Iterator[subprocess.Popen[bytes]]:
    for job in range(case.jobs):
        environment = os.environ | {
            "HEADRACE_JOB_ID": str(9000 + job), "HEADRACE_JOB_GPUS_PER_NODE": str(case.ranks),
            "LOCAL_WORLD_SIZE": str(case.ranks),
        }  # fmt: skip
        for _ in range(case.ranks):
            yield subprocess.Popen([sys.executable, "-c", RANK], env=environment)
    for _ in range(case.others):
        yield subprocess.Popen(["sleep", "3600"])


def measure(case: Case, folder: Path, seconds: float) -> Measured:
    """Let an agent look at a node for a while."""
    os.environ["HEADRACE_RUNTIME_DIR"] = str(folder / "run")
    history = folder / "history"
    command = ["agent", "start", "--foreground", "--history", str(history), "--metrics", "0"]
    with (folder / "log").open("wb") as log:
        agent = subprocess.Popen([sys.executable, "-c", PROGRAM, *command], stderr=log)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        path = agent_folder().socket
        while not path.exists():
            time.sleep(0.05)
        processes += started(case)
        time.sleep(12)  # two looks: what begins has begun
        before, began = cpu_of(agent.pid), time.monotonic()
        messages, looks, scrapes = ask_state(path)["messages"], ask_state(path)["looks"], 0
        url = f"http://{ask_state(path)['metrics']}/metrics"
        while (now := time.monotonic()) < began + seconds:
            if now >= began + SCRAPE_S * (scrapes + 1):
                scrapes += 1
                urllib.request.urlopen(url, timeout=5).read()
            time.sleep(0.5)
        took = time.monotonic() - began
        cpu_s = cpu_of(agent.pid) - before
        state = ask_state(path)
        resident = int(Path(f"/proc/{agent.pid}/statm").read_text().split()[1])
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        agent.send_signal(signal.SIGTERM)
        agent.wait(20)
    return Measured(
        case=case.name, seconds=took, cpu_s=cpu_s, share=cpu_s / took,
        look_cpu_s=state["look_cpu_s"], interval_s=state["interval_s"],
        looks=state["looks"] - looks, messages=state["messages"] - messages,
        resident_bytes=resident * os.sysconf("SC_PAGE_SIZE"),
        history_bytes=sum(file.stat().st_size for file in history.iterdir()), scrapes=scrapes,
    )  # fmt: skip


def telling_costs(folder: Path, times: int) -> dict[str, float]:
    """Microseconds of a loader's process each time that it tells, with an agent and without."""
    found = {}
    for name, path in (("nobody listens", folder / "nobody/socket"), ("an agent listens", None)):
        publisher = Publisher(None if path is None else [str(path)])
        publisher.totals.batches = 1
        publisher.totals.stall_s = {"/scratch": {"storage": 1.0, "decode": 1.0}}
        publisher.tell([])
        began = time.thread_time()
        for _ in range(times):
            publisher.tell([])
        found[name] = (time.thread_time() - began) / times * 1e6
    return found


def profile() -> None:
    """Print where a look's time goes, on this node as it is."""
    agent = Agent(AgentOptions(node="profile"))
    agent.look()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(100):
        agent.look()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15)
    agent.close()


@processes.leaving_nothing()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short: does it work?")
    parser.add_argument("--profile", action="store_true", help="where a look's time goes")
    parser.add_argument("--seconds", type=float, default=45.0, help="for each case")
    given = parser.parse_args()
    if given.profile:
        profile()
        return
    seconds = 5.0 if given.quick else given.seconds
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="headrace-agent-") as name:
        document: dict[str, Any] = {"machine": machine.describe(Path(name))}
        for number, case in enumerate(CASES[:2] if given.quick else CASES):
            folder = Path(name) / str(number)
            folder.mkdir()
            rows.append(measure(case, folder, seconds))
            row = rows[-1]
            print(
                f"{row.case:40} {row.share:7.3%} of a core, a look {row.look_cpu_s * 1e3:5.1f} ms every "
                f"{row.interval_s:4.1f} s, {row.messages} messages, "
                f"{row.resident_bytes / 1e6:.0f} MB resident",
                flush=True,
            )
        costs = telling_costs(Path(name), 200 if given.quick else 2000)
    print(", ".join(f"telling when {name}: {us:.0f} us" for name, us in costs.items()))
    document |= {"agent": [asdict(row) for row in rows], "telling_us": costs,
                 "load_after": os.getloadavg()[0]}  # fmt: skip
    if not given.quick:
        target = RESULTS / f"agent-{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}.json"
        target.write_text(json.dumps(document, indent=1) + "\n")
        print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()

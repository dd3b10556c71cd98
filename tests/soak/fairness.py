"""What one bad client costs the others (R19): their speed beside it, relative to their speed without.

    python -m soak.fairness --json out.json

Whether they get the right bytes, in bounded time, is asserted; how fast is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from soak import samples
from soak.actors import Daemon, environment_of, wait_for
from soak.bad_client import WAYS
from soak.watching import CALL_S

BATCH = 32


def consumed(path: Path, seconds: float) -> dict[str, Any]:
    """Read epochs over the daemon for a time; counts, and the longest wait.

    Longer where the machine stood still, until the daemon has served a batch, or will not.
    """
    import headrace as hr

    expected = [samples.content(i) for i in range(samples.SAMPLES)]
    loader = hr.loader(path, BATCH, seed=1, plane="node", budget_bytes=1 << 20)
    count, wrong, longest_s, began = 0, 0, 0.0, time.monotonic()

    def goes_on() -> bool:
        took_s = time.monotonic() - began
        served = loader.stages[-1].report().node_batches
        return took_s < seconds or (not served and took_s < seconds + 20.0)

    while not count or goes_on():
        iterator, seen = iter(loader), []
        while True:
            asked = time.monotonic()
            batch = next(iterator, None)
            longest_s = max(longest_s, time.monotonic() - asked)
            if batch is None:
                break
            indices = batch.indices.tolist()
            seen += indices
            wrong += sum(bytes(s) != expected[i] for i, s in zip(indices, batch, strict=True))
            count += len(batch)
        wrong += sorted(seen) != list(range(samples.SAMPLES))
    took_s = time.monotonic() - began
    report = loader.stages[-1].report()
    loader.close()
    return {
        "samples_per_s": round(count / took_s), "wrong": wrong, "longest_s": round(longest_s, 3),
        "node_batches": report.node_batches, "direct_batches": report.direct_batches,
    }  # fmt: skip


def measured(work: Path, ways: tuple[str, ...] = WAYS, seconds: float = 1.0) -> dict[str, Any]:
    """Each way in turn, beside a run without a bad client just before."""
    import os

    import headrace as hr

    (work / "tmp").mkdir(parents=True)
    store = work / "store.hr"
    samples.write_store(store)
    with hr.open(store) as opened:
        fingerprint = opened.fingerprint
    environment = environment_of(work)
    os.environ["HEADRACE_RUNTIME_DIR"] = environment["HEADRACE_RUNTIME_DIR"]
    daemon = Daemon(work, environment, random.Random(3))
    daemon.start()
    assert wait_for(daemon.ready), daemon.tail()
    found: dict[str, Any] = {}
    try:
        for way in ways:
            alone = consumed(store, seconds)
            bad = subprocess.Popen(
                [sys.executable, "-m", "soak.bad_client", way, str(store), fingerprint],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            assert bad.stdout is not None
            began = bad.stdout.readline() == b".\n"
            beside = consumed(store, seconds)
            lives = bad.poll() is None
            bad.kill()
            bad.communicate()
            found[way] = {
                "began": began, "alone": alone, "beside": beside, "lives": lives,
                "relative": round(beside["samples_per_s"] / alone["samples_per_s"], 3),
                "reclaimed_s": reclaimed_s(daemon),
            }  # fmt: skip
    finally:
        daemon.end()
    found["problems"] = daemon.problems
    return found


def reclaimed_s(daemon: Daemon) -> float | None:
    """How long the daemon takes until nothing of the bad client is left; None: not in 20 s."""
    from headrace.node.daemon import ask_status
    from headrace.runtime import RuntimeFolder

    began = time.monotonic()

    def gone() -> bool:
        with contextlib.suppress(Exception):
            state = ask_status(RuntimeFolder(daemon.folder))
            return all(job["name"] != "bad" for job in state["jobs"])
        return False

    return round(time.monotonic() - began, 3) if wait_for(gone, 20.0) else None


def is_well(found: dict[str, Any]) -> bool:
    """Right bytes, in bounded time; all that was held came back."""
    return not found["problems"] and all(
        row["began"]
        and row["alone"]["wrong"] == row["beside"]["wrong"] == 0
        and row["beside"]["longest_s"] <= CALL_S
        and row["reclaimed_s"] is not None
        for way, row in found.items()
        if way != "problems"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak.fairness", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hr-fair-", dir="/var/tmp") as work:
        found = measured(Path(work) / "w", seconds=given.seconds)
    for way, row in found.items():
        if way != "problems":
            print(
                f"{way:<16} {row['relative']:.2f} of the speed alone, longest wait "
                f"{row['beside']['longest_s']} s, reclaimed in {row['reclaimed_s']} s"
            )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_well(found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Memory of daemon and clients over many epochs, with clients that come, go and die (R6)."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.node.wire import Ask, ReplyStatus, Samples
from node.conftest import until
from node.test_hostile import opened
from plane.conftest import SAMPLES
from tests_shared import STEADY_MALLOC, own_bytes

TESTS = Path(__file__).resolve().parents[1]
EPOCHS, SETTLED = 60, 20
SLOPE_MAX = 256 << 10
"""Bytes an epoch: a tenth of what leaking a single epoch's samples would be."""

CLIENT = """
import gc, sys
import headrace as hr
from node.conftest import be_patient
from tests_shared import own_bytes
be_patient()
store = hr.open(sys.argv[1])
lasting = hr.loader(store, 32, seed=1, plane="node")
for epoch in range(int(sys.argv[2])):
    for batch in lasting:
        pass
    with hr.open(sys.argv[1]) as again:
        passing = hr.loader(again, 20, seed=epoch, plane="node")
        kept = [batch for batch in passing][::7]
        passing.close()
    del kept, batch, passing
    gc.collect()
    report = lasting.stages[-1].report()
    print(own_bytes(), report.node_batches, report.direct_batches, flush=True)
    sys.stdin.readline()
"""


def slope(sizes):
    """Bytes an epoch, of the line through what came after the beginning."""
    y = np.array(sizes[SETTLED:], float)
    return float(np.polyfit(np.arange(len(y)), y, 1)[0])


@pytest.mark.parametrize("ram", [64 << 20, 1 << 20], ids=["all is kept", "a part is kept"])
def test_memory_does_not_grow_with_epochs_and_clients(folder, daemon, packed, store, link, ram):
    one = daemon(ram_bytes=ram, yielding=False)
    run = subprocess.Popen(
        [sys.executable, "-c", CLIENT, packed, str(EPOCHS)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS)} | STEADY_MALLOC,
    )  # fmt: skip
    clients, daemons, abandoned = [], [], 0
    for _ in range(EPOCHS):
        size, node_batches, direct_batches = map(int, run.stdout.readline().split())
        clients.append(size)
        goer = link("goer")  # goes with batches in its hands
        number = opened(goer, store)
        for part in np.array_split(np.arange(SAMPLES, dtype=np.int64), 12)[:6]:
            goer.send(Ask(goer.new_ticket(), number, part.tobytes(), []))
        for _ in range(4):
            abandoned += goer.wait(Samples, 10).status is ReplyStatus.OK
        goer.close()
        pid = os.getpid()
        until(lambda pid=pid: pid not in [s["pid"] for s in one.status()["sessions"]])
        daemons.append(own_bytes(one.process.pid))
        run.stdin.write("\n")
        with contextlib.suppress(BrokenPipeError):
            run.stdin.flush()
    run.communicate(timeout=60)
    assert run.returncode == 0
    assert abandoned == 4 * EPOCHS  # they went with something indeed
    assert node_batches > EPOCHS * 10
    assert direct_batches == 0
    print(f"slope in bytes an epoch: client {slope(clients):.0f}, daemon {slope(daemons):.0f}")
    assert slope(clients) < SLOPE_MAX, clients
    assert slope(daemons) < SLOPE_MAX, daemons

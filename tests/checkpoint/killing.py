"""A process that saves checkpoints until it is killed, and the test that nothing whole is ever lost."""

import os
import random
import signal
import time
import traceback
from pathlib import Path

import numpy as np

from headrace.checkpoint import Checkpointer, CheckpointOptions, steps

_SIZES = (3, 0, 40_000, 1 << 20)


def tree_of(step, rank=0):
    rng = np.random.default_rng([step, rank])
    arrays = [rng.integers(0, 256, n, dtype=np.uint8) for n in _SIZES]
    return {"step": step, "rank": rank, "arrays": arrays, "x": rng.random((7, 5), np.float32)}


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)


def _save_for_ever(folder, local, rank, world_size, run, report):
    """Saves the steps behind the newest whole one; tells each that `wait` calls done."""
    options = CheckpointOptions(keep=2, durability=("direct", "fsync", "none")[run % 3])
    place = {"rank": rank, "world_size": world_size, "run": str(run), "local": local}
    with Checkpointer(folder, options=options, **place) as checkpointer:
        newest = max(steps(folder), default=0)
        for step in range(newest + 1, newest + 10_000):
            checkpointer.save(tree_of(step, rank), step)
            checkpointer.wait()
            os.write(report, step.to_bytes(8, "little"))


def kill_and_load(folder, local, run, seed, world_size=1):
    """Starts all ranks, kills them at a random moment, and loads what is newest.

    Returns the newest step, and whether the kill left something half-written.
    """
    rng = random.Random(seed)
    readers, children = [], []
    for rank in range(world_size):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(reader)
                _save_for_ever(folder, local, rank, world_size, run, writer)
            except BaseException:  # noqa: BLE001 - the parent sees that it was not the kill
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writer)
        readers.append(reader)
        children.append(pid)
    time.sleep(rng.uniform(0.0, 0.25))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    killed = [os.WTERMSIG(os.waitpid(pid, 0)[1]) for pid in children]
    assert killed == [signal.SIGKILL] * world_size
    told = [_last(reader) for reader in readers]
    whole = steps(folder)
    # With several ranks, the last of them to finish makes the step whole.
    promised = min(told)
    assert max(whole, default=0) >= promised
    for rank in range(world_size) if whole else ():
        place = {"rank": rank, "world_size": world_size, "local": local}
        with Checkpointer(folder, **place) as checkpointer:
            loaded = checkpointer.load()
        assert loaded.step >= promised
        assert equal(loaded.tree, tree_of(loaded.step, rank))
    names = [name for _, _, files in os.walk(folder) for name in files]
    half = len(list(Path(folder).glob("step-*"))) > len(whole) or any(
        n.endswith((".part", ".new")) for n in names
    )
    return max(whole, default=0), half


def _last(reader):
    data = b""
    while piece := os.read(reader, 1 << 16):
        data += piece
    os.close(reader)
    return int.from_bytes(data[-8:], "little") if data else 0

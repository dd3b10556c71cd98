"""A process that saves checkpoints until it is killed, and the test that nothing whole is ever lost."""

import os
import random
import signal
import struct
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.checkpoint import Checkpointer, CheckpointOptions, steps

_EVENT = struct.Struct("<?Q")
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
    """Saves the steps behind the newest whole one; tells each when it begins, and when `wait` calls it done."""
    options = CheckpointOptions(keep=2, durability=("direct", "fsync", "none")[run % 3])
    place = {"rank": rank, "world_size": world_size, "run": str(run), "local": local}
    with Checkpointer(folder, options=options, **place) as checkpointer:
        newest = max(steps(folder), default=0)
        for step in range(newest + 1, newest + 10_000):
            tree = tree_of(step, rank)
            os.write(report, _EVENT.pack(False, step))
            checkpointer.save(tree, step)
            checkpointer.wait()
            os.write(report, _EVENT.pack(True, step))


@dataclass(frozen=True)
class Killed:
    """What a kill met, and what it left.

    Attributes:
        newest: the newest whole step; 0 for none.
        saving: a rank had begun a save that was not done.
        half: it left something half-written.
    """

    newest: int
    saving: bool
    half: bool


def kill_and_load(folder, local, run, seed, world_size=1):
    """Starts all ranks, kills them at a random moment once all save, and loads what is newest."""
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
    told = [[_EVENT.unpack(os.read(reader, _EVENT.size))] for reader in readers]  # each has begun
    for events, reader in zip(told, readers, strict=True):
        for _ in range(2 * (seed % 3)):  # so many saves are over, however busy the machine is
            events.append(_EVENT.unpack(os.read(reader, _EVENT.size)))
    time.sleep(rng.uniform(0.0, 0.06))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    killed = [os.WTERMSIG(os.waitpid(pid, 0)[1]) for pid in children]
    assert killed == [signal.SIGKILL] * world_size
    for events, reader in zip(told, readers, strict=True):
        events.extend(_events(reader))
    whole = steps(folder)
    # With several ranks, the last of them to finish makes the step whole.
    promised = min(max((step for done, step in events if done), default=0) for events in told)
    assert max(whole, default=0) >= promised
    for rank in range(world_size) if whole else ():
        place = {"rank": rank, "world_size": world_size, "local": local}
        with Checkpointer(folder, **place) as checkpointer:
            loaded = checkpointer.load()
        # The local folder may have a newer one, which is as good.
        assert loaded.step >= max(whole) if local else loaded.step == max(whole)
        assert equal(loaded.tree, tree_of(loaded.step, rank))
    half = any(map(_half_written, filter(None, (folder, local))))
    saving = any(not events[-1][0] for events in told)
    return Killed(max(whole, default=0), saving, half)


def _half_written(folder):
    """Whether a folder has what a save leaves that did not end."""
    names = [name for _, _, files in os.walk(folder) for name in files]
    return len(list(Path(folder).glob("step-*"))) > len(steps(folder)) or any(
        name.endswith((".part", ".new")) for name in names
    )


def _events(reader):
    """(done, step) of all that a rank told since it was last asked."""
    data = b""
    while piece := os.read(reader, 1 << 16):
        data += piece
    os.close(reader)
    return [*_EVENT.iter_unpack(data[: len(data) // _EVENT.size * _EVENT.size])]

"""Runs as loaders would have written them, made without waiting for anything."""

from dataclasses import replace
from itertools import count

import numpy as np

from headrace.order import Shuffled, Slices, order_hash
from headrace.plane.batch_trace import PHASES, STEP
from headrace.plane.stage import TIERS
from headrace.trace.format import RUN, TraceFile, write_once

_NUMBERS = count()
FINGERPRINT = "f" * 16


def about(order, slices, described=None, **more):
    """What a loader's trace says of it; `described`: another description of its order."""
    return {
        "rank": slices.rank, "world_size": slices.world_size, "source": "/data/train.hr",
        "framework": "", "fingerprint": FINGERPRINT, "samples": order.samples,
        "order": order.describe() if described is None else described,
        "order_digest": order.digest(), "length": order.length,
        "batch_size": slices.batch_size, "tail": slices.tail, **more,
    }  # fmt: skip


def steps_of(order, slices, epoch, begin=0, stop=None, asked_s=100.0, waited_s=0.01, work_s=0.02):
    """The steps of a rank's pass: (steps,), dtype STEP. `waited_s` may be a function of the step."""
    count = slices.steps(begin) if stop is None else stop
    rows = np.zeros(count, STEP)
    for step in range(count):
        first, last = slices.span(step, begin)
        waited = waited_s(step) if callable(waited_s) else waited_s
        row = rows[step]
        row["epoch"], row["step"], row["position"], row["samples"] = (
            epoch,
            step,
            first,
            last - first,
        )
        row["order_hash"] = order_hash(first, order.wrapped(epoch, first, last))
        row["asked_s"], row["delivered_s"] = asked_s, asked_s + waited
        row["waited_s"][PHASES.index("read")] = waited * 0.75
        row["waited_s"][PHASES.index("decode")] = waited * 0.25
        row["bytes"][TIERS.index("source")] = 1000 * (last - first)
        asked_s += waited + work_s
    return rows


class Loaders:
    """The loaders of a job's ranks, which write a run.

    Args:
        folder: the run's.
        samples: in the data.
        batch: per rank.
        world: ranks.
        tail: as `Slices` has it.
        order: `Shuffled` unless given.
        began: Unix time of the first rank.
    """

    def __init__(self, folder, samples=1000, batch=16, world=2, tail="exact", order=None, began=1.8e9,
                 most=1 << 30, **more):  # fmt: skip
        self.order = order or Shuffled(samples, seed=7)
        self.slices = [Slices(self.order.length, batch, rank, world, tail) for rank in range(world)]
        told = about(self.order, self.slices[0], **more)
        folder.mkdir(exist_ok=True)
        facts = {
            "headrace": "0.1.0", "command": ["python", "train.py"],
            "began_unix_s": began, **{k: v for k, v in told.items() if k != "rank"},
        }  # fmt: skip
        write_once(folder / "run.json", RUN.encode(facts, indent=1))
        self.files = [
            TraceFile(
                str(folder), s.rank,
                {**about(self.order, s, **more), "began_unix_s": began + s.rank * 0.1,
                 "began_s": 100.0, "host": f"node{s.rank // 4}", "pid": 100 + s.rank,
                 "process": f"{next(_NUMBERS)}-{s.rank}"},
                most,
            )
            for s in self.slices
        ]  # fmt: skip
        self.at_s = 100.0

    def epoch(self, number, begin=0, stop=None, change=None, **more):
        """All ranks go through an epoch; `change(rank, rows)` may give other rows."""
        ends = [self.at_s]
        for slices, file in zip(self.slices, self.files, strict=True):
            rows = steps_of(self.order, slices, number, begin, stop, asked_s=self.at_s, **more)
            changed = change(slices.rank, rows) if change is not None else None
            rows = rows if changed is None else changed
            ends.append(float(rows["delivered_s"][-1]) + 0.02 if len(rows) else self.at_s)
            file.steps(rows)
        self.at_s = max(ends)
        return self

    def event(self, rank, kind, **fields):
        """A rank writes an event."""
        self.files[rank].event({"kind": kind, "at_s": self.at_s, **fields})
        return self

    def close(self, why="exit"):
        """They end; "" ends them as a kill would."""
        for file in self.files:
            file.close(why) if why else file.forget()
        return self


def made_run(folder, epochs=2, **more):
    """A run that went well."""
    loaders = Loaders(folder, **more)
    for epoch in range(epochs):
        loaders.epoch(epoch)
    return loaders.close()


def resized(loaders, world):
    """The slices of the same job on another number of ranks."""
    return [replace(s, world_size=world) for s in loaders.slices[:world]]

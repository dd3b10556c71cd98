"""A training script that resumes exactly: counts each sample it has seen, and needs nothing but numpy.

    trainer.py CHECKPOINTS [--data FOLDER] [--epochs 2] [--pace 0.0] [--save-every N] [--log FOLDER]
        [--fail-at STEP] [--ignore-stop] [--batch 2] [--no-counts]

The counts are part of what is saved, so they say what the model has learned from: after the run every sample of
every epoch has been seen once, however often it was stopped. They are each rank's own, so another number of
ranks cannot load them: `--no-counts` leaves them out. `--log` writes a line per step as it happens.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr


class Seen:
    """How often each sample was seen, by this rank."""

    def __init__(self, samples: int, epochs: int) -> None:
        self.counts = np.zeros((epochs, samples), np.int64)

    def state_dict(self) -> dict[str, np.ndarray]:
        """As arrays."""
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Goes on from there."""
        self.counts = np.array(state["counts"])


class Deaf:
    """A script that never asks whether to stop."""

    steps = 0

    def step(self) -> bool:
        """Only counts."""
        self.steps += 1
        return False

    def save(self) -> None:
        """Does not."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--ignore-stop", action="store_true")
    parser.add_argument("--no-counts", action="store_true")
    given = parser.parse_args()

    rank = int(os.environ.get("RANK", "0"))
    log = None
    if given.log:
        given.log.mkdir(parents=True, exist_ok=True)
        log = (given.log / f"rank-{rank}.{hr.cluster.restarts()}.{os.getpid()}").open("w")
    with hr.open(os.environ.get("HEADRACE_STORE") or given.data) as store:
        loader = hr.loader(store, given.batch, seed=7, tail="exact", tune=False)
        seen = Seen(len(store), given.epochs)
        run: Any = Deaf()
        if not given.ignore_stop:
            parts = {"loader": loader} | ({} if given.no_counts else {"seen": seen})
            run = hr.cluster.resume(given.checkpoints, save_every=given.save_every, **parts)
        print(f"rank {rank} begins at step {run.steps}", flush=True)
        while loader.epoch < given.epochs:
            epoch = loader.epoch
            for batch in loader:
                np.add.at(seen.counts[epoch], batch.indices, 1)
                time.sleep(given.pace)
                if log:
                    log.write(json.dumps([epoch, run.steps + 1, batch.indices.tolist()]) + "\n")
                    log.flush()
                if given.fail_at == run.steps + 1 and rank == 0:
                    raise SystemExit(9)
                if run.step():
                    print(f"rank {rank} leaves at step {run.steps}", flush=True)
                    return
        run.save()
        hr.checkpoint.wait()
        print(f"rank {rank} ends at step {run.steps}", flush=True)


if __name__ == "__main__":
    main()

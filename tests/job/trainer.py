"""A training process of a node: reads epochs of the job's store and writes what it saw, as JSON.

    python trainer.py WHERE --rank R --world W [--batch 32] [--seed 3] [--torch]
        [--pace 0.01] [--budget BYTES] [--hold SAMPLES]

Prints `ready` when the store is open, and waits for a line before it reads, and for another when it has read
SAMPLES. Then one line:
{"indices", "digest", "labels", "seen": figures, "fetched", "local", "longest_s"}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time

import numpy as np

import headrace as hr


def digest_of(index: int, data: bytes) -> str:
    return hashlib.blake2b(index.to_bytes(8, "little") + data, digest_size=8).hexdigest()


def read(store, given, report):
    """One epoch by the Python API, and what it delivered."""
    indices, digests, longest = [], [], 0.0
    loader = hr.loader(
        store, given.batch, seed=given.seed, order=given.order, rank=given.rank,
        world_size=given.world, tail="drop", budget_bytes=given.budget, tune=False,
    )  # fmt: skip
    before = time.monotonic()
    for batch in loader:
        longest = max(longest, time.monotonic() - before)
        indices += batch.indices.tolist()
        digests += [
            digest_of(int(i), bytes(batch[k])) for k, i in enumerate(batch.indices.tolist())
        ]
        report(len(indices))
        time.sleep(given.pace)
        before = time.monotonic()
    loader.close()
    randomness = loader.order.randomness()
    return {
        "indices": indices, "digests": digests, "longest_s": longest, "level": randomness.level,
        "entropy_share": randomness.entropy_share,
    }  # fmt: skip


def read_torch(store, given):
    """The same order by the torch loader."""
    import headrace.torch as hrt

    loader = hrt.StoreLoader(
        store, given.batch, seed=given.seed, order=given.order, rank=given.rank,
        world_size=given.world, tail="drop",
    )  # fmt: skip
    indices: list[int] = []
    for batch in loader:
        indices += np.asarray(batch.indices).tolist()
    return {"torch_indices": indices}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--order", default="shuffled")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--budget", type=int, default=64 << 20)
    parser.add_argument("--hold", type=int, default=-1)
    parser.add_argument("--torch", action="store_true")
    given = parser.parse_args()

    def report(samples: int) -> None:
        print(f"read {samples}", flush=True)
        if samples == given.hold:
            sys.stdin.readline()

    with hr.open(given.where) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        out = read(store, given, report)
        if given.torch:
            out |= read_torch(store, given)
        out |= {
            "figures": dict(store.objects.figures()), "fetched": store.directories.fetched,
            "local": sum(s.entry.samples for s in store.segments if s.volumes.local),
            "state": store.document.state,
            "checked": [s.directory.has_crc for s in store.segments],
        }  # fmt: skip
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()

"""Combinations of what a loader can be told: all deliver what the plain loader does, to the last byte.

Each seed draws a kind of sample, an order, ranks, tiers, an engine and what happens in the middle of an epoch.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
from itertools import islice

import numpy as np
import pytest

import headrace as hr
from node.conftest import serving
from tests_shared import descriptors, png, python_threads, until

SAMPLES = 97
DAMAGED = (3, 20, 50, 88)
TIERS = {
    "cache_dir": [True], "cache_bytes": [0, 20_000], "ram_bytes": [1, 30_000, 1 << 22], "plane": ["node"],
    "engine": ["uring", "threads", "mmap"], "direct": ["always", "never"], "budget_bytes": [1 << 20],
    "reads_in_flight": [1], "reads_per_s": [1e5], "tune": [False],
}  # fmt: skip


def content(kind, i):
    if kind == "pictures":
        return png(i, side=4 + i % 13)
    if kind == "tokens":
        return np.arange(i, i + 20 + 7 * (i % 11), dtype=np.uint16).tobytes()
    return b"%08d" % i + random.Random(i).randbytes(i * 37 % 2000) if i % 30 else b""


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """One of each kind in two segments, a folder of files, and a store with damaged samples."""
    folder = tmp_path_factory.mktemp("stores")
    for kind in ("bytes", "pictures", "tokens"):
        samples = [(f"{i:03d}", content(kind, i), i % 5) for i in range(SAMPLES)]
        hr.pack(samples[:60], folder / kind)
        hr.append(samples[60:], folder / kind)
    for i in range(SAMPLES):
        path = folder / "files" / f"c{i % 5}" / f"{i:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content("bytes", i))
    hr.pack([(f"{i:03d}", content("bytes", i), i % 5) for i in range(SAMPLES)], folder / "damaged")
    (volume,) = (folder / "damaged").glob("*.hrv")
    data = bytearray(volume.read_bytes())
    for i in DAMAGED:
        data[data.index(content("bytes", i)) + 9] ^= 1
    volume.write_bytes(data)
    return folder


def drawn_options(chance, cache):
    names = [name for name in TIERS if chance.random() < 0.4]
    options = {name: chance.choice(TIERS[name]) for name in names}
    if options.pop("cache_dir", False):
        return options | {"cache_dir": cache}
    return {name: value for name, value in options.items() if name != "cache_bytes"}


def combined(seed, cache):
    """The store, what loaders are told, how three of them deliver, what happens meanwhile, and where."""
    chance = random.Random(seed)
    kind = chance.choice(["bytes", "files", "damaged", "mixture", "pictures", "tokens"])
    world = chance.choice([1, 2, 3])
    arguments = {"batch_size": chance.choice([1, 7, 16, 120]), "world_size": world}
    arguments["tail"] = chance.choice(["exact", "pad", "drop"])
    if kind == "tokens":
        arguments |= {"length": 16, "stored": "uint16", "pack": chance.choice(["cut", "best-fit"])}
    else:
        orders = ["shuffled", "sequential", "blocked", *["balanced"] * (kind != "mixture")]
        arguments |= {"order": chance.choice(orders), "on_error": "skip"}
    if kind == "pictures":
        kept = chance.choice([{}, {"keep": "decoded"}, {"keep": "decoded", "keep_bytes": 5_000}])
        arguments["decode"] = hr.Images(size=8, flip=True, **kept)
    action = chance.choice(["resume", "pickle", "leave", "fork"])
    options = [{"tune": False}, *(drawn_options(chance, cache) for _ in range(2))]
    return kind, arguments, options, action, chance.randrange(4)


def seen(batch):
    place = (batch.epoch, batch.position, batch.indices.tolist())
    if isinstance(batch, hr.TokenBatch):
        return *place, batch.tokens.tolist(), batch.documents.tolist()
    pixels = batch.pixels.tolist() if isinstance(batch, hr.ImageBatch) else None
    return *place, batch.labels.tolist(), pixels or [bytes(sample) for sample in batch]


def fork_delivers(loader, expected):
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = [seen(batch) for batch in loader] == expected
        finally:
            os._exit(not same)
    return os.waitpid(child, 0)[1] == 0


def check(plain, one, other, action, at):
    """Of two loaders, the second one from where the first has come to; returns an epoch's samples."""
    expected = [[seen(batch) for batch in plain] for _ in range(2)]
    batches = iter(one)
    assert [seen(batch) for batch in islice(batches, at)] == expected[0][:at]
    if action == "leave":
        assert [seen(batch) for batch in one] == expected[at > 0]
    else:
        if action == "pickle":
            other = pickle.loads(pickle.dumps(one))
        else:
            other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        if action == "fork":
            assert fork_delivers(other, expected[0][at:] or expected[1])
        else:
            assert [seen(batch) for batch in other] == (expected[0][at:] or expected[1])
        assert [seen(batch) for batch in batches] == expected[0][at:]
        assert [seen(batch) for batch in one] == expected[1]
    for loader in (plain, one, other):
        loader.close()
    return [index for batch in expected[0] for index in batch[2]]


@pytest.mark.parametrize("seeds", [range(40), range(40, 80)], ids=str)
def test_what_is_delivered_depends_on_no_combination(folder, stores, tmp_path, seeds):
    before = python_threads(), descriptors(tmp_path, stores)
    with serving(folder, ram_bytes=8 << 20):
        for seed in seeds:
            kind, arguments, options, action, at = drawn = combined(seed, tmp_path / str(seed))
            print("seed", seed, drawn)  # shown where it fails
            sources = {"a": (stores / "bytes", 2), "b": (stores / "files", 1)}
            opened = hr.mix(sources, seed=5) if kind == "mixture" else hr.open(stores / kind)
            make = hr.tokens if kind == "tokens" else hr.loader
            with opened as store:
                given: list[int] = []
                for rank in range(arguments["world_size"]):
                    loaders = [make(store, rank=rank, seed=5, **arguments, **o) for o in options]
                    given += check(*loaders, action, at)
            if arguments["tail"] == "exact" and kind in {"bytes", "files"}:
                assert arguments["order"] == "balanced" or sorted(given) == [*range(SAMPLES)]
    del loaders, store, opened
    gc.collect()
    until(lambda: (python_threads(), descriptors(tmp_path, stores)) == before)

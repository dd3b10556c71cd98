"""DataLoader: one order, whatever decodes; exact resume; errors instead of hangs."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
import warm
from headrace.control.stalls.live import evidence_of
from headrace.errors import CorruptSample, DecodeError, StateMismatch
from headrace.insight.epoch_proof import verify_epochs
from headrace.order import combine_hashes
from headrace.torch import DataLoader, Dataset
from headrace.trace import flush, read_run

from .decoders import (
    SAMPLES,
    content,
    fail_on_77,
    index_of,
    raw_collate,
    slow,
    with_key,
)

WAYS = {
    "inline": {"threads": 0},
    "one thread": {"threads": 1},
    "threads": {"threads": 3, "prefetch_batches": 7},
    "one ahead": {"threads": 2, "prefetch_batches": 1},
    "one worker": {"num_workers": 1},
    "workers": {"num_workers": 2, "prefetch_batches": 6},
    "passing workers": {"num_workers": 2, "persistent_workers": False},
}


def rows(loader):
    """Everything that the decoders saw in the rest of the epoch."""
    return torch.cat([samples for samples, _ in loader]).tolist()


@pytest.fixture(scope="module")
def expected(path):
    """Two epochs of what `with_key` returns, from the order itself."""
    loader = hr.loader(path, 1, seed=5)
    dataset = Dataset(path, with_key, seed=5)
    epochs = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        indices = loader.order.indices(epoch, 0, SAMPLES).tolist()
        epochs.append([sample.tolist() for sample, _ in dataset.__getitems__(indices)])
    return epochs


@pytest.mark.parametrize("way", WAYS)
def test_every_way_delivers_the_same_samples_with_the_same_randomness(path, expected, way):
    with DataLoader(path, 16, shuffle=True, seed=5, decode=with_key, **WAYS[way]) as loader:
        assert rows(loader) == expected[0]
        first_hash = loader.last_order_hash
        assert rows(loader) == expected[1]
        assert loader.stats.samples == 2 * SAMPLES
        assert loader.stats.batches == 2 * len(loader)
        assert loader.stats.bytes == 2 * sum(len(content(i)) for i in range(SAMPLES))
        assert loader.stats.stall_s > 0
    plain = hr.loader(path, 16, seed=5)
    assert sum(len(batch) for batch in plain) == SAMPLES
    assert plain.last_order_hash == first_hash


@pytest.mark.parametrize("order", ["sequential", "blocked", "balanced"])
def test_other_orders_are_delivered_too(path, order):
    loader = DataLoader(path, 20, order=order, decode=index_of, seed=4)
    assert rows(loader) == loader.order.indices(0, 0, loader.order.length).tolist()


def test_without_decode_batches_are_whole(path):
    loader = DataLoader(path, 16, shuffle=True, seed=5)
    indices = [int(i) for batch in loader for i in batch.indices]
    assert indices == loader.order.indices(0, 0, SAMPLES).tolist()
    assert len(loader) == -(-SAMPLES // 16)


@pytest.mark.parametrize(("way", "decoders"), [("inline", 0), ("threads", 3), ("workers", 2)])
def test_the_verdict_knows_how_many_decode(path, way, decoders):
    loader = DataLoader(path, 16, decode=index_of, **WAYS[way])
    assert loader.decode_threads == decoders
    assert evidence_of(loader).decode_threads == decoders
    assert evidence_of(DataLoader(path, 16)).decode_threads == 0


def test_the_users_collate_gets_samples_and_labels(path):
    for way in ({"threads": 2}, {"num_workers": 1}):
        for data, labels in DataLoader(path, 16, collate_fn=raw_collate, **way):
            assert [index_of(one) % 7 for one in data] == labels


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_may_be_started_in_any_way(path, expected, context):
    loader = DataLoader(
        path,
        64,
        shuffle=True,
        seed=5,
        decode=with_key,
        num_workers=1,
        multiprocessing_context=context,
    )
    with loader:
        assert rows(loader) == expected[0]


@given(data=st.data())
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_stopping_and_resuming_with_other_threads_and_worlds_loses_nothing(path, data):
    """Three runs over one epoch, each with its own world size, batch size and look-ahead."""
    seen, state, hashed = [], None, 0
    for run in range(3):
        world, batch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
        loaders = [
            DataLoader(
                path, batch, shuffle=True, seed=9, decode=index_of, rank=r, world_size=world, tail="exact",
                collate_fn=lambda samples: [i for i, _ in samples],
                threads=data.draw(st.integers(0, 3)),
                prefetch_batches=data.draw(st.integers(1, 5)),
            )
            for r in range(world)
        ]  # fmt: skip
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        if loaders[0].epoch == 1:
            break
        base = int(state["order_hash"], 16) if state else 0
        steps = -(-(SAMPLES - loaders[0].position) // (world * batch))
        stop = steps if run == 2 else data.draw(st.integers(0, steps))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(stop):
            for iterator in iterators:
                seen += next(iterator)
        states = [pickle.loads(pickle.dumps(loader.state_dict())) for loader in loaders]
        for iterator in iterators:
            iterator.close()
        hashed = base
        for one in states:
            hashed = combine_hashes(hashed, int(one["order_hash"], 16) - base)
        state = {**states[0], "order_hash": f"{hashed:016x}"}
    whole = hr.loader(path, 10, seed=9)
    assert seen == whole.order.indices(0, 0, SAMPLES).tolist()
    assert sum(len(batch) for batch in whole) == SAMPLES
    assert f"{hashed:016x}" == whole.last_order_hash


@pytest.mark.parametrize("way", ["whole", "inline", "threads", "workers"])
def test_every_batch_is_a_place_to_stop(path, way):
    options = {} if way == "whole" else {"decode": with_key, **WAYS[way]}

    def seen(batches):
        return [
            batch.indices.tolist() if way == "whole" else batch[0].tolist() for batch in batches
        ]

    with DataLoader(path, 24, shuffle=True, seed=5, **options) as loader:
        whole, states = [], [loader.state_dict()]
        for batch in loader:
            whole += seen([batch])
            states.append(pickle.loads(pickle.dumps(loader.state_dict())))
        assert len(whole) == len(loader)
        following = seen(loader)
    with DataLoader(path, 24, shuffle=True, seed=5, **options) as resumed:
        for at, state in enumerate(states):
            resumed.load_state_dict(state)
            assert seen(resumed) == (whole[at:] or following), at


def test_a_run_goes_on_with_workers_where_threads_stopped(path, expected):
    ways = [WAYS["threads"], WAYS["workers"], {"num_workers": 1}, WAYS["inline"]]
    seen, state = [], None
    for way in ways:
        with DataLoader(path, 16, shuffle=True, seed=5, decode=with_key, **way) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for samples, _ in loader:
                seen += samples.tolist()
                state = loader.state_dict()
                if len(seen) % 48 == 0 and way is not ways[-1]:
                    break
    assert seen == expected[0]
    assert loader.epoch == 1


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 5, "shuffle": True, "num_workers": 1},
        {"generator": torch.Generator().manual_seed(3), "shuffle": True, "drop_last": True},
        {"generator": torch.Generator().manual_seed(3)},
        {"seed": 5, "order": "blocked", "ram_bytes": 1 << 20},
    ],
    ids=["workers", "generator", "stored order", "blocked"],
)
def test_a_pickled_loader_goes_on_where_it_stood(path, options):
    """`mp.spawn` and Lightning's `ddp_spawn` send loaders to their ranks."""
    loader = DataLoader(path, 24, decode=with_key, **options)
    unused = pickle.loads(pickle.dumps(loader))
    whole = [batch[0].tolist() for batch in loader]
    assert [batch[0].tolist() for batch in unused] == whole
    batches = iter(loader)
    next(batches)
    sent = pickle.loads(pickle.dumps(loader))
    assert [b[0].tolist() for b in sent] == [b[0].tolist() for b in batches]
    assert (sent.epoch, sent.position) == (loader.epoch, loader.position) == (2, 0)


@pytest.mark.parametrize("way", ["threads", "workers", "inline"])
def test_an_epoch_left_early_is_followed_by_the_next(path, expected, way):
    with DataLoader(path, 16, shuffle=True, seed=5, decode=with_key, **WAYS[way]) as loader:
        iterator = iter(loader)
        next(iterator)
        assert rows(loader) == expected[1]
        with pytest.raises(RuntimeError, match="new one was made"):
            next(iterator)
        loader.set_epoch(0)
        assert rows(loader) == expected[0]


@pytest.mark.parametrize("way", ["threads", "workers", "inline"])
def test_an_error_names_the_sample_and_comes_in_its_turn(path, way):
    with DataLoader(path, 16, shuffle=True, seed=5, decode=fail_on_77, **WAYS[way]) as loader:
        place = loader.order.indices(0, 0, SAMPLES).tolist().index(77)
        delivered = 0
        iterator = iter(loader)
        for _ in range(place // 16):
            delivered += len(next(iterator)[0])
        with pytest.raises(DecodeError, match=r"sample 77 \('00077'\)") as caught:
            next(iterator)
        assert caught.value.index == 77
        assert delivered == loader.position == place // 16 * 16


@pytest.mark.parametrize("way", ["threads", "workers", "inline"])
def test_skipping_leaves_out_one_sample_and_records_it(path, way, tmp_path, caplog, capfd):
    loader = DataLoader(
        path, 16, shuffle=True, seed=5, decode=fail_on_77, on_error="skip", trace=tmp_path / "run", **WAYS[way],
    )  # fmt: skip
    with loader:
        assert sorted(rows(loader)) == [i for i in range(SAMPLES) if i != 77]
        assert [s.index for s in loader.skipped] == [77]
        assert loader.stats.samples == SAMPLES - 1
    flush()
    (epoch,) = verify_epochs(read_run(tmp_path / "run")).loaders[0].epochs
    assert (str(epoch.state), epoch.left_out) == ("skipped", 1)
    assert "decoding sample 77 ('00077') failed" in epoch.findings[0].where
    assert (caplog.text + capfd.readouterr().err).count("has left out 1 sample so far") == 1


@pytest.mark.parametrize("way", ["threads", "workers", "inline"])
def test_a_damaged_sample_is_named_by_every_way(path, tmp_path, way):
    import shutil

    damaged = tmp_path / "damaged.hr"
    shutil.copytree(path, damaged)
    volume = next(damaged.glob("*.hrv"))
    data = bytearray(volume.read_bytes())
    at = bytes(data).index(content(42))
    data[at + 9] ^= 1
    volume.write_bytes(data)
    with (
        DataLoader(damaged, 16, decode=index_of, **WAYS[way]) as loader,
        pytest.raises(CorruptSample, match="00042") as caught,
    ):
        rows(loader)
    assert caught.value.index == 42


KILLED = """
import sys, time
from headrace.torch import DataLoader
from frameworks.decoders import die_on_77
started = time.monotonic()
try:
    for _ in DataLoader(sys.argv[1], 16, decode=die_on_77, num_workers=2):
        pass
except RuntimeError as e:
    print(f"after {time.monotonic() - started:.1f} s: {e}", flush=True)
"""


def test_a_killed_worker_is_an_error_not_a_hang(path):
    """In a process of its own: torch raises from a signal handler, again whenever a child ends."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    result = warm.run(KILLED, path, env=environment)
    assert "DataLoader worker" in result.stdout + result.stderr


def test_leaving_early_stops_the_threads_at_once(path):
    """What waits to be decoded is left: half a second for each of 144 samples would be half a minute."""
    begun = []

    def slowly(data):
        begun.append(index := index_of(data))
        time.sleep(0.5 if index >= 16 else 0.02)
        return index

    loader = DataLoader(path, 16, decode=slowly, threads=2, prefetch_batches=9)
    for _ in loader:
        break
    loader.close()
    del loader
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-decode")]
    assert len(begun) < 100


def test_the_collector_may_drop_an_iterator_while_a_thread_holds_the_lock_of_threading(path):
    """Where the process once stood still: no thread is waited for, as none ends without that lock."""
    loader = DataLoader(path, 16, decode=slow, threads=2, prefetch_batches=8)
    iterator = iter(loader)
    next(iterator)
    assert [t for t in threading.enumerate() if t.name.startswith("headrace-decode")]
    kept = [iterator]
    kept.append(kept)  # only the collector ends it
    del iterator, kept
    with threading._shutdown_locks_lock:
        gc.collect()
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-decode")]


def test_the_look_ahead_is_bounded(path):
    decoded = []
    loader = DataLoader(
        path, 10, decode=lambda data: decoded.append(index_of(data)) or 0, threads=2,
        prefetch_batches=3,
    )  # fmt: skip
    iterator = iter(loader)
    for step in range(1, 6):
        next(iterator)
        time.sleep(0.05)
        assert len(decoded) <= (step + 3) * 10
    iterator.close()


@pytest.mark.parametrize("way", ["threads", "workers"])
def test_an_error_does_not_shorten_the_epoch_of_who_goes_on(path, way):
    refused = [True]

    def refuse_once(samples):
        if samples[0][0] == third and refused:
            raise ValueError("not now")
        return [index for index, _ in samples]

    options = {"shuffle": True, "seed": 5, "decode": index_of, **WAYS[way]}
    whole = list(DataLoader(path, 16, collate_fn=lambda some: [i for i, _ in some], **options))
    third = whole[2][0]
    with DataLoader(path, 16, collate_fn=refuse_once, **options) as loader:
        iterator, delivered = iter(loader), []
        with pytest.raises(ValueError, match="not now"):
            delivered.extend(iterator)
        refused.clear()
        delivered += iterator
        assert delivered == whole
        assert (loader.epoch, loader.position) == (1, 0)
        assert not list(iterator)


def test_two_at_once_do_not_share_an_iterator(path):
    def collate(samples):
        for _ in range(2):  # as another thread would
            with pytest.raises(ValueError, match="already executing"):
                next(iterator)
        return [index for index, _ in samples]

    with DataLoader(path, 16, decode=index_of, collate_fn=collate, threads=0) as loader:
        iterator = iter(loader)
        assert [index for batch in iterator for index in batch] == list(range(SAMPLES))


def test_an_iterator_that_ended_says_so_whenever_it_is_asked(path):
    with DataLoader(path, 16) as loader:
        ended = iter(loader)
        next(ended)
        batches = iter(loader)
        next(batches)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new one was made"):
                next(ended)
        next(batches)


@pytest.mark.parametrize("way", ["threads", "workers", "whole"])
def test_a_loader_used_before_a_fork_works_on_in_parent_and_child(path, way):
    options = {} if way == "whole" else {"decode": index_of, **WAYS[way]}
    loader = DataLoader(path, 16, shuffle=True, seed=5, **options)

    def epoch():
        loader.set_epoch(0)
        if way == "whole":
            return [int(i) for batch in loader for i in batch.indices]
        return rows(loader)

    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(RuntimeError, match="belongs to the process"):
                next(iterator)
            expected = hr.loader(path, 16, seed=5).order.indices(0, 0, SAMPLES).tolist()
            status = 0 if epoch() == expected else 2
            loader.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == len(loader) - 1
    assert sorted(epoch()) == list(range(SAMPLES))
    loader.close()


def test_the_users_random_numbers_are_left_alone(path):
    state = torch.get_rng_state()
    for way in ("threads", "workers"):
        with DataLoader(path, 64, decode=index_of, **WAYS[way]) as loader:
            rows(loader)
    assert torch.equal(torch.get_rng_state(), state)


def test_augmentation_depends_on_seed_epoch_and_index_only(path):
    def draw(data, sample):
        return torch.tensor(
            [sample.rng().random(), torch.rand(1, generator=sample.torch_generator()).item()]
        )

    epochs = []
    for options in ({"threads": 0}, {"threads": 3, "prefetch_batches": 5}):
        loader = DataLoader(path, 16, shuffle=True, seed=5, decode=draw, **options)
        epochs.append([torch.cat([x for x, _ in loader]) for _ in range(2)])
    assert torch.equal(epochs[0][0], epochs[1][0])
    assert torch.equal(epochs[0][1], epochs[1][1])
    assert len(np.unique(epochs[0][0].numpy())) == 2 * SAMPLES


def test_a_dataset_brings_its_decode_and_options(path):
    dataset = Dataset(path, with_key, seed=5, on_error="skip", queue_depth=9)
    loader = DataLoader(dataset, 16, shuffle=True)
    assert loader.order.seed == 5
    assert loader.dataset.decode is with_key
    assert loader.dataset.on_error == "skip"
    other = DataLoader(dataset, 16, shuffle=True, seed=6, decode=index_of)
    assert (other.order.seed, other.dataset.decode) == (6, index_of)


def test_a_state_of_another_seed_is_refused(path):
    state = DataLoader(path, 16, shuffle=True, seed=1).state_dict()
    with pytest.raises(StateMismatch, match="seed"):
        DataLoader(path, 16, shuffle=True, seed=2).load_state_dict(state)


def test_wrong_arguments_are_refused_with_the_value(path):
    for options, message in (
        ({"num_workers": -1}, "num_workers is -1"),
        ({"threads": -2}, "threads is -2"),
        ({"prefetch_batches": 0}, "batches_ahead is 0"),
        ({"order": "fast"}, "'fast'"),
        ({"shufle": True}, "'shufle': did you mean 'shuffle'"),
        ({"budget_byte": 1}, "did you mean 'budget_bytes'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            DataLoader(path, 16, decode=index_of, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_of_an_exact_tail_of_fewer_samples_than_ranks_one_gets_an_empty_batch(path, num_workers):
    """With the shapes and types of the others, so that all ranks do the same steps."""
    world = SAMPLES + 1
    batches = [
        list(
            DataLoader(
                path, 300, rank=rank, world_size=world, tail="exact", num_workers=num_workers,
                decode=with_key, order="sequential",
            )
        )
        for rank in (0, world - 1)
    ]  # fmt: skip
    ((full, _),), ((empty, labels),) = batches
    assert (full.shape, empty.shape, labels.shape) == ((1, 5), (0, 5), (0,))
    assert (empty.dtype, labels.dtype) == (full.dtype, torch.int64)


def several(data):
    return {"index": index_of(data), "name": "a", "pair": (torch.zeros(2), "b")}


def test_an_empty_batch_has_the_structure_of_a_full_one(path):
    (batch,) = DataLoader(
        path, 300, rank=SAMPLES, world_size=SAMPLES + 1, tail="exact", decode=several
    )
    (value, labels) = batch
    assert value["index"].shape == labels.shape == (0,)
    assert value["name"] == []
    assert value["pair"][0].shape == (0, 2)
    assert value["pair"][1] == []


def test_a_batch_whose_samples_were_all_left_out_is_an_error(path):
    with pytest.raises(ValueError, match="all 1 were skipped"):
        list(DataLoader(path, 1, decode=fail_on_77, on_error="skip"))


def test_the_door_offers_exactly_these_names():
    import headrace.torch

    assert sorted(headrace.torch.__all__) == [
        "DataLoader",
        "Dataset",
        "Sample",
        "StoreLoader",
        "TensorBatch",
        "TokenDataLoader",
        "TokenTensors",
        "adopt",
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_on_the_local_disk_changes_nothing(path, expected, tmp_path, num_workers):
    """Decoded here or in workers, which write the cache together."""
    from headrace.plane.disk_cache import CacheDirectory

    options = {"cache_dir": tmp_path, "cache_bytes": 1 << 30, "num_workers": num_workers}
    for _ in range(2):
        loader = DataLoader(path, 16, shuffle=True, seed=5, decode=with_key, **options)
        assert rows(loader) == expected[0]
        assert rows(loader) == expected[1]
        loader.close()
    (info,) = CacheDirectory(tmp_path).caches()
    assert info.samples > 0


@pytest.mark.parametrize("way", [*WAYS, "whole"])
def test_a_mixture_is_loaded_in_every_way_as_one_store_is(path, way):
    mixture = hr.mix({"much": (path, 3), "little": (path, 1)}, seed=5)
    options = {} if way == "whole" else {"decode": with_key, **WAYS[way]}
    plain = hr.loader(mixture, 16)
    delivered = [batch.sources for batch in plain]
    with DataLoader(mixture, 16, shuffle=True, **options) as loader:
        batches = list(loader)
        assert loader.last_order_hash == plain.last_order_hash
        assert [len(batch if way == "whole" else batch[0]) for batch in batches] == [
            *map(len, delivered)
        ]
        if way == "whole":
            assert [batch.sources for batch in batches] == delivered
        first = iter(loader)
        next(first)
        state = loader.state_dict()
        rest = [batch.indices.tolist() if way == "whole" else batch[0].tolist() for batch in first]
        again = DataLoader(mixture, 16, shuffle=True, **options)
        again.load_state_dict(state)
        assert rest == [b.indices.tolist() if way == "whole" else b[0].tolist() for b in again]
        again.close()


def test_a_mixture_under_torchs_own_sampler_is_remarked(path, caplog):
    mixture = hr.mix({"much": (path, 3), "little": (path, 1)}, seed=5)
    loader = torch.utils.data.DataLoader(Dataset(mixture, with_key), 16, shuffle=True)
    assert sum(len(batch[0]) for batch in loader) == 2 * SAMPLES
    (record,) = caplog.records
    assert "knows no proportions" in record.message
    with DataLoader(mixture, 16, shuffle=True, decode=with_key) as ours:
        list(ours)
    assert len(caplog.records) == 1

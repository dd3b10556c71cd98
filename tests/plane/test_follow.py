"""A store that grows while it is read: each epoch is over one snapshot, and the state says which."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

import headrace as hr
from headrace.errors import OrderError, SourceChanged, StateMismatch, StoreError
from headrace.store import Store

BATCH = 16


def content(index: int) -> bytes:
    return f"sample {index} ".encode() * (index % 19 + 1)


def pairs(start: int, stop: int):
    return ((f"{i:05d}", content(i), i % 3) for i in range(start, stop))


@pytest.fixture
def growing(tmp_path):
    hr.pack(pairs(0, 200), tmp_path / "growing.hr")
    return tmp_path / "growing.hr"


def drawn(batches):
    samples = []
    for batch in batches:
        samples.append(batch.indices.tolist())
        for k, index in enumerate(samples[-1]):
            assert bytes(batch[k]) == content(index)
    return samples


def count(batches):
    indices = np.concatenate(batches)
    assert len(set(indices.tolist())) == len(indices)
    return len(indices)


@pytest.mark.parametrize("order", ["shuffled", "sequential", "blocked", "balanced"])
def test_an_epoch_keeps_its_snapshot_and_the_next_takes_up_what_was_appended(growing, order):
    with hr.open(growing) as store:
        loader = hr.loader(store, BATCH, order=order, follow=True, seed=3)
        batches = iter(loader)
        first = drawn(islice(batches, 4))
        hr.append(pairs(200, 330), growing)
        first += drawn(batches)
        assert sum(map(len, first)) == 200
        assert len(loader) == 13
        second = drawn(loader)
        assert sum(map(len, second)) == 330
        assert len(loader) == 21
        if order != "balanced":
            assert count(first) == 200
            assert count(second) == 330
        assert len(loader.source) == 330
        assert len(store) == 200
        loader.close()


def test_without_being_asked_a_loader_stays_with_what_it_opened(growing):
    with hr.open(growing) as store:
        loader = hr.loader(store, BATCH)
        drawn(islice(loader, 3))
        hr.append(pairs(200, 330), growing)
        for _ in range(2):
            assert count(drawn(loader)) == 200


@pytest.mark.parametrize("appended", [0, 1, 2])
def test_a_run_resumed_within_an_epoch_reads_that_epochs_snapshot(growing, appended):
    """What is appended while the run is stopped comes in the next epoch."""
    hr.append(pairs(200, 240), growing)
    with hr.open(growing) as store:
        loader = hr.loader(store, BATCH, follow=True, seed=3)
        drawn(loader)
        states, whole = [], []
        for batch in loader:
            whole += drawn([batch])
            states.append(json.loads(json.dumps(loader.state_dict())))
    for step in range(appended):
        hr.append(pairs(240 + 70 * step, 310 + 70 * step), growing)
    assert states[0]["basis"] == "2"
    for at in (0, 7, len(whole) - 1):
        with hr.open(growing) as store:
            resumed = hr.loader(store, BATCH, follow=True, seed=3)
            resumed.load_state_dict(states[at])
            rest = drawn(resumed)
            if at < len(whole) - 1:
                assert rest == whole[at + 1 :]
                assert resumed.last_order_hash == states[-1]["order_hash"]
                rest = drawn(resumed)
            assert count(rest) == 240 + 70 * appended
            assert resumed.epoch == 3
            resumed.close()


def test_two_runs_that_take_up_the_same_deliver_the_same(tmp_path, growing):
    hashes = []
    for name in ("one", "two"):
        shutil.copytree(growing, tmp_path / name)
        with hr.open(tmp_path / name) as store:
            loader = hr.loader(store, BATCH, follow=True, seed=8)
            for epoch in range(3):
                hr.append(pairs(200 + 50 * epoch, 250 + 50 * epoch), tmp_path / name)
                drawn(loader)
                hashes.append((epoch, loader.last_order_hash))
            loader.close()
    assert hashes[:3] == hashes[3:]


def test_a_store_that_was_made_anew_is_refused(growing):
    with hr.open(growing) as store:
        loader = hr.loader(store, BATCH, follow=True)
        drawn(loader)
        shutil.rmtree(growing)
        hr.pack(pairs(0, 100), growing)
        hr.append(pairs(100, 200), growing)
        with pytest.raises(SourceChanged, match="made anew"):
            iter(loader)


def test_samples_with_other_parts_are_refused(growing):
    with hr.open(growing) as store:
        loader = hr.loader(store, BATCH, follow=True)
        drawn(loader)
        hr.append(((f"{i}", {"jpg": b"1", "txt": b"2"}) for i in range(3)), growing)
        with pytest.raises(StoreError, match=r"appended have the parts"):
            iter(loader)


def test_a_state_that_knows_more_than_is_there_is_refused(growing, tmp_path):
    shutil.copytree(growing, tmp_path / "shorter.hr")
    hr.append(pairs(200, 330), growing)
    with hr.open(growing) as store, hr.open(tmp_path / "shorter.hr") as shorter:
        loader = hr.loader(store, BATCH, follow=True)
        drawn(islice(loader, 2))
        with pytest.raises(StateMismatch, match="state knows 2 segments"):
            hr.loader(shorter, BATCH, follow=True).load_state_dict(loader.state_dict())
        with pytest.raises(StateMismatch, match="follow=True"):
            hr.loader(store, BATCH).load_state_dict(loader.state_dict())
        with pytest.raises(StateMismatch, match="was not followed"):
            loader.load_state_dict(hr.loader(store, BATCH).state_dict())


def test_an_opportunistic_state_says_whether_its_store_was_followed(growing, monkeypatch):
    monkeypatch.setattr(Store, "resident_ranges", lambda *_: ())
    with hr.open(growing) as store:
        followed = hr.loader(store, BATCH, order="opportunistic", follow=True)
        plain = hr.loader(store, BATCH, order="opportunistic")
        with pytest.raises(StateMismatch, match="was not followed"):
            followed.load_state_dict(plain.state_dict())
        with pytest.raises(StateMismatch, match="follow=True"):
            plain.load_state_dict(followed.state_dict())


def test_what_does_not_grow_is_not_followed(growing, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.bin").write_bytes(b"a")
    with pytest.raises(ValueError, match="no store that is appended to"):
        hr.loader(tmp_path / "files", 1, follow=True)
    with pytest.raises(ValueError, match="no store that is appended to"):
        hr.loader(hr.mix({"a": growing, "b": tmp_path / "files"}), 1, follow=True)
    with pytest.raises(ValueError, match="name the order by a word"):
        own = {"a": hr.order_for(hr.open(growing))}
        hr.loader(hr.mix({"a": growing, "b": growing}, orders=own), 1, follow=True)
    with pytest.raises(ValueError, match="name the order by a word"):
        hr.loader(growing, 1, order=hr.order_for(hr.open(growing)), follow=True)
    with pytest.raises(ValueError, match="a trace is written"):
        hr.loader(growing, 1, trace=tmp_path / "trace", follow=True)


@pytest.fixture
def sources(tmp_path):
    for name, samples in {"grows": 60, "stays": 45}.items():
        hr.pack(pairs(0, samples), tmp_path / f"{name}.hr")
    return {name: tmp_path / f"{name}.hr" for name in ("grows", "stays")}


def drawn_of(batches, name):
    return [
        int(index)
        for batch in batches
        for index, source in zip(batch.source_indices, batch.sources, strict=True)
        if source == name
    ]


def test_a_mixture_takes_up_what_was_appended_to_one_of_its_sources(sources):
    """The source begins an epoch of its own, with all its samples; the other goes on where it stood."""
    plain = hr.loader(hr.mix(sources, seed=4, stop=64), BATCH)
    unchanged = drawn_of([batch for _ in range(5) for batch in plain], "stays")
    loader = hr.loader(hr.mix(sources, seed=4, stop=64), BATCH, follow=True)
    batches = iter(loader)
    seen = [next(batches)]
    hr.append(pairs(60, 100), sources["grows"])
    seen += batches
    assert len(drawn_of(seen, "grows")) < 60
    later = [batch for _ in range(4) for batch in loader]
    grown = drawn_of(later, "grows")
    assert sorted(grown[:100]) == list(range(100))
    stayed = drawn_of([*seen, *later], "stays")
    assert stayed == unchanged[: len(stayed)]
    assert loader.source.mixture.sources["grows"].segments[1].base == 60
    assert len(later) == 4 * 4
    for batch in later:
        for k, index in enumerate(batch.source_indices.tolist()):
            assert bytes(batch[k]) == content(index)


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("batches", ["mixed", "one source"])
def test_a_mixture_that_is_followed_goes_on_with_the_snapshots_of_its_epoch(
    sources, batches, appended
):
    def mixed():
        mixture = hr.mix({n: (s, 1) for n, s in sources.items()}, seed=4, batches=batches)
        return hr.loader(mixture, 5, follow=True)

    loader = mixed()
    assert len(list(islice(loader, 2))) == 2
    hr.append(pairs(60, 110), sources["grows"])
    whole, states = [], []
    for batch in loader:
        whole.append((batch.sources, batch.source_indices.tolist()))
        states.append(json.loads(json.dumps(loader.state_dict())))
    if appended:
        for path in sources.values():
            hr.append(pairs(110, 130), path)
    for at in (0, len(whole) // 2):
        resumed = mixed()
        resumed.load_state_dict(states[at])
        rest = [(batch.sources, batch.source_indices.tolist()) for batch in resumed]
        assert rest == whole[at + 1 :]
        assert resumed.last_order_hash == loader.last_order_hash
        assert resumed.epoch == 2
    plain = hr.loader(hr.mix({n: (s, 1) for n, s in sources.items()}, seed=4, batches=batches), 5)
    with pytest.raises(StateMismatch):
        plain.load_state_dict(states[0])
    with pytest.raises(StateMismatch, match=r"was not followed|another data set"):
        mixed().load_state_dict(plain.state_dict())


@pytest.mark.parametrize("appended", [False, True])
def test_new_proportions_of_a_mixture_that_is_followed_miss_and_repeat_nothing(sources, appended):
    def loader(proportion, *, follow=True):
        grows, stays = sources.values()
        mixture = hr.mix({"grows": (grows, proportion), "stays": (stays, 1)}, seed=4)
        return hr.loader(mixture, 5, follow=follow)

    first = loader(1)
    before = list(first)
    hr.append(pairs(60, 110), sources["grows"])
    epoch = list(islice(first, 7))
    state = json.loads(json.dumps(first.state_dict()))
    if appended:
        hr.append(pairs(110, 130), sources["grows"])
    with pytest.raises(StateMismatch, match=r"loader\.continue_from\(state\)"):
        loader(3).load_state_dict(state)
    with pytest.raises(StateMismatch, match="with follow=True"):
        loader(3, follow=False).continue_from(state)
    runs, states = [], []
    for _ in range(2):
        changed = loader(3)
        changed.continue_from(state)
        runs.append([])
        for batch in islice(changed, 8):
            runs[-1].append(batch)
            states.append(changed.state_dict())
    after = runs[0]
    orders = dict(zip(sources, changed.order.orders, strict=True))
    assert changed.epoch == 2
    assert [b.indices.tolist() for b in after] == [b.indices.tolist() for b in runs[1]]
    assert sum(batch.sources.count("grows") for batch in after) == 30
    stays = drawn_of([*before, *epoch, *after], "stays")
    once = orders["stays"].length
    again = orders["stays"].indices(1, 0, len(stays) - once).tolist()
    assert stays == [*orders["stays"].indices(0, 0, once).tolist(), *again]
    grown = drawn_of(after if appended else [*epoch, *after], "grows")
    assert grown == orders["grows"].indices(2 if appended else 1, 0, len(grown)).tolist()
    resumed = loader(3)
    resumed.load_state_dict(states[3])
    assert [b.indices.tolist() for b in islice(resumed, 4)] == [
        b.indices.tolist() for b in after[4:]
    ]
    with pytest.raises(StateMismatch, match="no mixture"):
        hr.loader(sources["stays"], 5, follow=True).continue_from(state)


def test_a_mixture_is_followed_from_the_state_of_one_that_was_not(sources):
    even = hr.mix({name: (path, 1) for name, path in sources.items()}, seed=4)
    plain = hr.loader(even, 5)
    before = list(islice(plain, 6))
    followed = hr.loader(even, 5, follow=True)
    followed.continue_from(plain.state_dict())
    after = list(islice(followed, 5))
    for k, name in enumerate(sources):
        own = drawn_of([*before, *after], name)
        assert own == followed.order.orders[k].indices(0, 0, len(own)).tolist()


@pytest.mark.parametrize("mixed", [False, True])
def test_windows_of_tokens_are_planned_anew_with_what_was_appended(tmp_path, mixed):
    path, length = tmp_path / "tokens.hr", 16

    def tokens(start, stop):
        return (
            (str(i), np.arange(i, i + 40, dtype=np.uint16).tobytes()) for i in range(start, stop)
        )

    def loader():
        data = hr.mix({"a": path}, seed=2) if mixed else path
        return hr.tokens(data, length, 4, stored="uint16", seed=2, follow=True)

    hr.pack(tokens(0, 20), path)
    first = loader()
    batches = iter(first)
    rows = [next(batches).tokens]
    hr.append(tokens(20, 30), path)
    rows += [batch.tokens for batch in batches]
    assert len(np.concatenate(rows)) == (20 * 40 - 1) // length
    whole, states = [], []
    for batch in first:
        whole.append(batch.tokens)
        states.append(first.state_dict())
    row = np.concatenate([np.arange(i, i + 40) for i in range(30)])
    expected = [row[at : at + length + 1].tolist() for at in range(0, len(row) - length, length)]
    assert sorted(np.concatenate(whole).tolist()) == sorted(expected)
    hr.append(tokens(30, 35), path)
    resumed = loader()
    resumed.load_state_dict(states[6])
    assert np.array_equal(np.concatenate([b.tokens for b in resumed]), np.concatenate(whole[7:]))


def test_torch_follows_too_in_threads(growing):
    torch_loader = pytest.importorskip("headrace.torch").DataLoader
    with hr.open(growing) as store:
        options = {"decode": lambda data, sample: (sample.index, bytes(data)), "collate_fn": list}
        with torch_loader(store, 32, threads=2, follow=True, **options) as loader:
            for samples in (200, 260):
                pairs_seen = [sample for batch in loader for sample, _ in batch]
                assert all(data == content(index) for index, data in pairs_seen)
                assert len(pairs_seen) == samples
                if samples == 200:
                    hr.append(pairs(200, 260), growing)
        with pytest.raises(ValueError, match="decode in threads"):
            torch_loader(store, 32, num_workers=2, follow=True, **options)


def test_ranks_that_nobody_joined_are_not_followed(growing):
    with hr.open(growing) as store:
        loader = hr.loader(store, 4, rank=0, world_size=2, follow=True)
        with pytest.raises(OrderError, match="must take up the same segments"):
            iter(loader)


_RANK = """
import json, sys
import torch.distributed as dist
import headrace as hr
path, meet, rank, extra = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
loader = hr.loader(hr.open(path), 10, follow=True, tail="drop")
epochs = [[i for batch in loader for i in batch.indices.tolist()]]
dist.barrier()
if rank == extra:  # one rank appends, and sees at once what the other may not see yet
    pairs = [(f"{i:05d}", b"x") for i in range(200, 300)]
    hr.append(iter(pairs), path)
epochs.append([i for batch in loader for i in batch.indices.tolist()])
dist.barrier()
epochs.append([i for batch in loader for i in batch.indices.tolist()])
print(json.dumps(epochs))
"""


def test_ranks_take_up_what_all_of_them_see(growing, tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-c", _RANK, str(growing), str(tmp_path / "meet")]
    ranks = [
        subprocess.Popen([*command, str(r), "1"], stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    both = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    sizes = []
    for epoch in zip(*both, strict=True):
        assert len({len(each) for each in epoch}) == 1
        indices = [index for each in epoch for index in each]
        assert len(set(indices)) == len(indices)
        sizes.append(len(indices))
    assert sizes[0] == 200
    assert sizes[1] in {200, 300}  # whichever the slower rank saw
    assert sizes[2] == 300

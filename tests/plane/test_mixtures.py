"""Mixtures as loaders deliver them: whose each sample is, stopping anywhere, any number of ranks."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from io import BytesIO
from itertools import chain, islice

import numpy as np
import pytest
from tests.plane.test_images import encoded, picture

import headrace as hr
from headrace.errors import CorruptSample, OrderError, StateMismatch
from headrace.order import Subset, Weighted, combine_hashes

SIZES = {"web": 500, "code": 173, "books": 61}
SHARES = {"web": 0.6, "code": 0.3, "books": 0.1}
BATCH = 16


def content(name: str, index: int) -> bytes:
    return f"{name} {index} ".encode() * (index % 23 + 1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The same kind of samples packed, in a folder of files, and in a tar."""
    folder = tmp_path_factory.mktemp("mixture")
    hr.pack(((f"{i:05d}", content("web", i), i % 5) for i in range(300)), folder / "web.hr")
    hr.append(((f"{i:05d}", content("web", i), i % 5) for i in range(300, 500)), folder / "web.hr")
    (folder / "code").mkdir()
    for i in range(SIZES["code"]):
        (folder / "code" / f"{i:05d}.txt").write_bytes(content("code", i))
    with tarfile.open(folder / "books.tar", "w") as tar:
        for i in range(SIZES["books"]):
            member = tarfile.TarInfo(f"{i:05d}")
            member.size = len(content("books", i))
            tar.addfile(member, BytesIO(content("books", i)))
    return {"web": folder / "web.hr", "code": folder / "code", "books": folder / "books.tar"}


@pytest.fixture
def mixture(paths):
    with hr.mix({name: (paths[name], SHARES[name]) for name in paths}, seed=5) as opened:
        yield opened


def drawn(batches):
    """(source, index there) of each sample of each batch, whose bytes are looked at."""
    delivered = []
    for batch in batches:
        whose = list(zip(batch.sources, batch.source_indices.tolist(), strict=True))
        for k, (name, index) in enumerate(whose):
            assert bytes(batch[k]) == content(name, index)
        delivered.append(whose)
    return delivered


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ram_bytes": 1 << 20},
        {"cache_dir": "cache"},
        {"order": "sequential"},
        {"order": "blocked"},
    ],
    ids=["plain", "memory", "cache", "sequential", "blocked"],
)
def test_samples_are_their_sources_in_the_proportions_asked_for(mixture, tmp_path, options):
    if "cache_dir" in options:
        options = {"cache_dir": tmp_path / "cache"}
    loader = hr.loader(mixture, BATCH, **options)
    for _ in range(3):
        samples = [sample for batch in drawn(loader) for sample in batch]
        assert len(samples) == loader.order.length
        counts = Counter()
        for position, (name, _) in enumerate(samples, 1):
            counts[name] += 1
            assert all(abs(counts[n] - position * share) < 1 for n, share in SHARES.items())
    loader.close()


@pytest.mark.parametrize("batches", ["mixed", "one source"])
def test_every_batch_of_a_mixture_is_a_place_to_stop(paths, batches):
    with hr.mix(
        {name: (paths[name], SHARES[name]) for name in paths}, seed=5, batches=batches
    ) as mixture:
        whole, states, loader = [], [], hr.loader(mixture, BATCH)
        for _ in range(2):
            for batch in loader:
                whole += drawn([batch])
                states.append(json.loads(json.dumps(loader.state_dict())))
        if batches == "one source":
            assert all(len({name for name, _ in batch}) == 1 for batch in whole)
        steps = len(loader)
        for at in range(0, 2 * steps, 5):
            resumed = hr.loader(mixture, BATCH)
            resumed.load_state_dict(states[at])
            last = steps if at + 1 < steps else 2 * steps
            assert drawn(resumed) == whole[at + 1 : last], at


def test_the_sequence_is_the_same_for_any_number_of_ranks(mixture):
    """Hashes of the ranks add up to the hash of one; resumed by another number of ranks, too."""
    hashes = []
    for ranks in (1, 2, 4):
        loaders = [
            hr.loader(mixture, BATCH // ranks, rank=r, world_size=ranks, tail="drop")
            for r in range(ranks)
        ]
        for loader in loaders:
            drawn(loader)
        hashes.append(combine_hashes(*(int(one.last_order_hash, 16) for one in loaders)))
    assert len(set(hashes)) == 1
    first = [hr.loader(mixture, 8, rank=r, world_size=2, tail="drop") for r in range(2)]
    before = [drawn(islice(loader, 10)) for loader in first]
    then = [hr.loader(mixture, 4, rank=r, world_size=4, tail="drop") for r in range(4)]
    for loader in then:
        loader.load_state_dict(first[0].state_dict())
    after = [drawn(loader) for loader in then]
    alone = drawn(hr.loader(mixture, BATCH, tail="drop"))
    steps = [*zip(*before, strict=True), *zip(*after, strict=True)]
    assert [list(chain(*step)) for step in steps] == alone


_RUN = """
import json, sys
import headrace as hr
web, code, books, state, log, kill_at = sys.argv[1:]
mixture = hr.mix({"web": (web, 0.6), "code": (code, 0.3), "books": (books, 0.1)}, seed=5, stop=4000)
loader = hr.loader(mixture, 16)
if state:
    loader.load_state_dict(json.loads(state))
with open(log, "a") as lines:
    for step, batch in enumerate(loader):
        lines.write(json.dumps([loader.state_dict(), batch.sources, batch.source_indices.tolist()]) + "\\n")
        lines.flush()
        if step == int(kill_at):
            print("there", flush=True)
            sys.stdin.read()
"""


def test_a_killed_run_goes_on_with_the_sample_that_comes_next(paths, tmp_path):
    def run(state: str, log: str, kill_at: int) -> list[list]:
        command = [sys.executable, "-c", _RUN, *map(str, paths.values()), state]
        with subprocess.Popen(
            [*command, str(tmp_path / log), str(kill_at)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            if kill_at >= 0:
                assert process.stdout.readline() == "there\n"
                os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        return [json.loads(line) for line in (tmp_path / log).read_text().splitlines()]

    whole = run("", "whole", -1)
    first = run("", "killed", 77)
    rest = run(json.dumps(first[-1][0]), "resumed", -1)
    assert len(first) == 78
    assert first + rest == whole  # states and their order hashes included


def test_new_proportions_begin_where_the_old_ones_stopped(paths, mixture):
    loader = hr.loader(mixture, BATCH)
    before = [sample for batch in drawn(islice(loader, 20)) for sample in batch]
    state = loader.state_dict()
    with hr.mix({name: (paths[name], 1) for name in paths}, seed=5) as even:
        changed = hr.loader(even, BATCH)
        with pytest.raises(StateMismatch, match="continue_from"):
            changed.load_state_dict(state)
        runs = []
        for _ in range(2):
            changed.continue_from(state)
            runs.append([sample for batch in drawn(islice(changed, 5)) for sample in batch])
        assert runs[0] == runs[1]
        assert Counter(name for name, _ in runs[0]).most_common()[-1][1] == 26
        for name in paths:  # no sample is missed or comes twice where they change
            own = [index for which, index in before + runs[0] if which == name]
            order = changed.order.orders[list(paths).index(name)]
            assert own[: order.length] == order.indices(0, 0, order.length)[: len(own)].tolist()
        saved = changed.state_dict()
        again = hr.loader(even, BATCH)
        again.load_state_dict(saved)
        assert drawn(islice(again, 3)) == drawn(islice(changed_from(even, saved), 3))


def changed_from(mixture, state):
    loader = hr.loader(mixture, BATCH)
    loader.load_state_dict(state)
    return loader


def test_a_curriculum_counts_steps_of_all_ranks(paths):
    schedule = [(0, {"web": 1}), (5, {"web": 1, "code": 1}), (9, {"books": 1})]
    with hr.mix(paths, schedule=schedule, global_batch=32, stop=32 * 12) as mixture:
        for ranks in (1, 4):
            batches = zip(
                *(
                    drawn(hr.loader(mixture, 32 // ranks, rank=r, world_size=ranks))
                    for r in range(ranks)
                ),
                strict=True,
            )
            steps = [Counter(name for each in step for name, _ in each) for step in batches]
            assert steps[:5] == [{"web": 32}] * 5
            assert steps[5:9] == [{"web": 16, "code": 16}] * 4
            assert steps[9:] == [{"books": 32}] * 3


def test_of_a_source_whose_order_has_chosen_samples_these_are_its_size(paths):
    with hr.mix(paths, orders={"web": Subset(range(40), SIZES["web"])}) as mixture:
        samples = {sample for batch in drawn(hr.loader(mixture, 8)) for sample in batch}
    seen = Counter(name for name, _ in samples)
    for name, size in {**SIZES, "web": 40}.items():
        assert size - 5 <= seen[name] <= size, name


def test_sizes_temperature_and_counts_are_proportions_too(paths):
    sizes = np.array([len(store) for store in hr.mix(paths).sources.values()])
    assert sizes.tolist() == list(SIZES.values())
    for temperature in (1.0, 4.0):
        wanted = sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum()
        parts = np.array(hr.mix(paths, temperature=temperature).proportions.phases[0][1])
        assert np.abs(parts / parts.sum() - wanted).max() < 1e-8
    mixture = hr.mix({"web": (paths["web"], 70), "code": (paths["code"], 50)}, stop="counts")
    samples = [sample for batch in drawn(hr.loader(mixture, 7)) for sample in batch]
    assert Counter(name for name, _ in samples) == {"web": 70, "code": 50}


def test_the_last_source_ends_an_epoch_after_its_repeats(paths):
    mixture = hr.mix(paths, temperature=1e9, stop="last", repeats={"books": 20})
    samples = Counter(sample for batch in drawn(hr.loader(mixture, 64)) for sample in batch)
    assert {samples["books", i] for i in range(SIZES["books"])} == {20}
    assert {name for name, _ in samples} == set(paths)


def test_a_source_may_have_an_order_of_its_own(paths):
    weights = np.zeros(SIZES["web"])
    weights[:7] = 1
    with hr.mix(
        paths, stop=900, orders={"web": Weighted(weights), "code": "sequential"}
    ) as mixture:
        samples = [sample for batch in drawn(hr.loader(mixture, 64)) for sample in batch]
    assert {index for name, index in samples if name == "web"} == set(range(7))
    code = [index for name, index in samples if name == "code"]
    assert code == [i % SIZES["code"] for i in range(len(code))]


def test_a_mixture_is_a_store(paths, mixture):
    assert len(mixture) == sum(SIZES.values())
    assert mixture.locate(499) == ("web", 499)
    assert mixture.locate(500) == ("code", 0)
    assert mixture.locate(-1) == ("books", SIZES["books"] - 1)
    assert bytes(mixture.read(673)) == content("books", 0)
    assert mixture.names[500] == "00000.txt"
    assert mixture.labels[:6].tolist() == [0, 1, 2, 3, 4, 0]
    assert mixture.labels[500] == -1
    assert repr(mixture) == "Mixture(web 0.6, code 0.3, books 0.1; 734 samples)"
    again = pickle.loads(pickle.dumps(mixture))
    assert again.fingerprint == mixture.fingerprint
    assert drawn(hr.loader(again, 32)) == drawn(hr.loader(mixture, 32))
    with hr.open(paths["web"]) as plain, pytest.raises(ValueError, match="of one store"):
        _ = next(iter(hr.loader(plain, 4))).sources


def test_a_source_that_was_given_open_stays_open(paths):
    with hr.open(paths["web"]) as web:
        with hr.mix({"web": web, "code": paths["code"]}) as mixture:
            drawn(islice(hr.loader(mixture, 32), 2))
            code = mixture.sources["code"]
        assert code.closed
        assert not web.closed
        assert bytes(web.read(3)) == content("web", 3)
        mixture = hr.mix({"web": web})
    with pytest.raises(ValueError, match=r"source 'web' of the mixture, .* is closed"):
        next(iter(hr.loader(mixture, 32)))


def test_the_state_of_a_mixture_is_small_and_refuses_other_data(paths, mixture):
    state = hr.loader(mixture, 32).state_dict()
    assert len(json.dumps(state)) < 300
    named = {"net": paths["web"], "code": paths["code"], "books": paths["books"]}
    for other in (
        hr.mix({name: (paths[name], SHARES[name]) for name in ("web", "code")}, seed=5),
        hr.mix({name: (path, 1) for name, path in named.items()}, seed=5),
        hr.open(paths["web"]),
    ):
        with pytest.raises(StateMismatch, match="state belongs to data"):
            hr.loader(other, 32).load_state_dict(state)
    with pytest.raises(StateMismatch, match="seed 5, this order has seed 6"):
        other = hr.mix({name: (paths[name], SHARES[name]) for name in paths}, seed=6)
        hr.loader(other, 32).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sources": {}}, OrderError, "a mixture has 0 sources"),
        (
            {"sources": [("web.hr", 1)]},
            TypeError,
            r"of type list, expected a dict .*: mix\(\{'web': ",
        ),
        (
            {"sources": {"web": ("web.hr",)}},
            TypeError,
            r"'web' is \('web.hr',\), expected .* a pair",
        ),
        (
            {"sources": {"web": (0.7, "web.hr")}},
            TypeError,
            "expected a store, or a pair of one and its",
        ),
        ({"repeats": {"wbe": 2}}, ValueError, "repeats names the source 'wbe'"),
        ({"schedule": [(0, {"web": 1})]}, OrderError, "global_batch is None"),
        ({"schedule": [(0, {"wbe": 1})], "global_batch": 8}, ValueError, "schedule names .* 'wbe'"),
        ({"temperature": 0}, OrderError, "temperature is 0"),
        ({"batches": "one"}, ValueError, "batches is 'one'"),
        ({"stop": "counts"}, OrderError, "stop is 'counts' and the proportions are None"),
        ({"temperature": 2, "schedule": [], "global_batch": 8}, ValueError, "given twice"),
    ],
)
def test_impossible_mixtures_are_refused_by_name(paths, arguments, error, message):
    with pytest.raises(error, match=message):
        hr.mix(**{"sources": paths, **arguments})


def test_a_seed_or_weights_beside_the_mixtures_own_are_refused(mixture):
    with pytest.raises(ValueError, match="seed is 7, the mixture has 5"):
        hr.loader(mixture, 8, seed=7)
    with pytest.raises(ValueError, match="weigh the samples of its sources"):
        hr.loader(mixture, 8, order="weighted", weights=np.ones(len(mixture)))


def test_weights_belong_to_the_weighted_order(paths):
    with hr.open(paths["code"]) as store:
        weights = np.zeros(len(store))
        weights[[3, 9]] = 1, 3
        loader = hr.loader(store, 50, order="weighted", weights=weights)
        seen = np.concatenate([batch.indices for batch in loader])
        assert set(seen.tolist()) == {3, 9}
        with pytest.raises(ValueError, match="one needs the other"):
            hr.loader(store, 50, order="weighted")
        with pytest.raises(ValueError, match="one needs the other"):
            hr.loader(store, 50, weights=weights)
        with pytest.raises(ValueError, match="12 weights are given for 173 samples"):
            hr.loader(store, 50, order="weighted", weights=np.ones(12))


def test_a_damaged_sample_is_named_or_left_out(paths, tmp_path):
    shutil.copytree(paths["web"], tmp_path / "damaged.hr")
    with hr.open(tmp_path / "damaged.hr") as store:
        (extent,) = store.segments[0].extents(7)
    volume = min((tmp_path / "damaged.hr").glob("*.hrv"))
    data = bytearray(volume.read_bytes())
    data[extent.offset] ^= 1
    volume.write_bytes(data)
    sources = {"code": paths["code"], "web": tmp_path / "damaged.hr"}
    with hr.mix(sources, stop="last") as mixture:
        with pytest.raises(CorruptSample, match="00007"):
            list(hr.loader(mixture, 32))
        loader = hr.loader(mixture, 32, on_error="skip")
        samples = {sample for batch in drawn(loader) for sample in batch}
        assert ("web", 7) not in samples
        assert len(samples) == 672
        assert {mixture.locate(one.index) for one in loader.skipped} == {("web", 7)}


def test_pictures_of_several_sources_are_decoded_together(tmp_path):
    pictures = {
        name: [encoded(picture(40 + i, 30, i), "JPEG") for i in range(20)] for name in ("a", "b")
    }
    for name, each in pictures.items():
        hr.pack(((f"{i}", data) for i, data in enumerate(each)), tmp_path / name)
    pairs = ((f"{i}", {"jpg": data, "txt": b"a"}) for i, data in enumerate(pictures["a"]))
    hr.pack(pairs, tmp_path / "parts")
    images = hr.Images(size=16, flip=True)
    with hr.mix({name: tmp_path / name for name in pictures}, seed=2, stop=40) as mixture:
        for batch in hr.loader(mixture, 10, decode=images):
            assert batch.pixels.shape == (10, 3, 16, 16)
            assert sorted(batch.sources) == ["a"] * 5 + ["b"] * 5
    mixed = hr.mix({"a": tmp_path / "a", "parts": tmp_path / "parts"})
    with pytest.raises(ValueError, match="source 'a' have"):
        hr.loader(mixed, 10, decode=images)

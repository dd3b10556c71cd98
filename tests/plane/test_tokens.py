"""Windows of tokens equal a plain reference, resume anywhere, and refuse what they cannot deliver rightly."""

import copy
import json
import pickle
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace import _native
from headrace.errors import CorruptSample, OrderError, StateMismatch, StoreError
from headrace.order import combine_hashes
from headrace.order.token_windows import plan_windows
from headrace.plane import cache_writer

LENGTH = 32


def documents_of(seed, count, dtype=np.uint16, top=200):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, top, count)
    return [rng.integers(0, 60_000, size).astype(dtype) for size in sizes]


def packed(path, documents):
    hr.pack([document.tobytes() for document in documents], path)
    return hr.open(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    documents = documents_of(1, 300)
    with packed(tmp_path_factory.mktemp("tokens") / "a.hr", documents) as store:
        yield documents, store


def loader(store, **options):
    options = {"length": LENGTH, "batch_size": 4, "stored": "uint16", "seed": 5} | options
    return hr.tokens(store, **options)


def reference_windows(documents, pack, length):
    """Each window as a list of (document, start, tokens): slow and plain."""
    if pack == "cut":
        row = list(chain.from_iterable(((d, i) for i in range(n)) for d, n in enumerate(documents)))
        windows = []
        for begin in range(0, len(row) - length, length):
            pieces = []
            for document, at in row[begin : begin + length + 1]:
                if pieces and pieces[-1][0] == document:
                    pieces[-1][2] += 1
                else:
                    pieces.append([document, at, 1])
            windows.append([tuple(piece) for piece in pieces])
        return windows
    pieces = []
    for document, size in enumerate(documents):
        start = 0
        while start < size and (start == 0 or start < size - 1):
            pieces.append((document, start, min(length + 1, size - start)))
            start += length
    pieces.sort(key=lambda piece: -piece[2])
    windows, room, changed = [], [], []
    for stamp, piece in enumerate(pieces):
        fitting = [w for w in range(len(windows)) if room[w] >= piece[2]]
        if fitting:
            window = min(fitting, key=lambda w: (room[w], -changed[w]))
        else:
            window = len(windows)
            windows.append([])
            room.append(length + 1)
            changed.append(0)
        windows[window].append(piece)
        room[window] -= piece[2]
        changed[window] = stamp
    return windows


def listed(plan, windows):
    pieces = plan.pieces(np.array(windows, np.int64))
    result = [[] for _ in windows]
    for row, place, document, start, count in zip(*(c.tolist() for c in pieces), strict=True):
        assert place == sum(piece[2] for piece in result[row])
        result[row].append((document, start, count))
    return result


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, 90)), max_size=120),
    st.integers(1, 40),
    st.sampled_from(["cut", "best-fit"]),
    st.randoms(use_true_random=False),
)
def test_every_window_is_what_the_plain_reference_says(sizes, length, pack, random):
    counts = np.array(sizes, np.int64)
    plan = plan_windows(pack, len(sizes), lambda d: counts[d], length)
    expected = reference_windows(sizes, pack, length)
    assert plan.windows == len(expected)
    assert plan.tokens == sum(sizes)
    some = [random.randrange(len(expected)) for _ in expected]
    assert listed(plan, some) == [expected[w] for w in some]


@pytest.mark.parametrize("pack", ["cut", "best-fit"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_an_epoch_delivers_every_window_once_with_its_tokens_and_what_belongs_to_them(
    data, pack, dtype
):
    documents, store = data
    expected = reference_windows([len(d) for d in documents], pack, LENGTH)
    delivered = []
    with loader(store, pack=pack, dtype=dtype, pad=7) as batches:
        for batch in batches:
            assert batch.tokens.dtype == dtype
            assert batch.inputs.base is batch.targets.base
            delivered += batch.indices.tolist()
            sequences = []
            for k, window in enumerate(batch.indices.tolist()):
                pieces = expected[window]
                tokens = np.concatenate([documents[d][s : s + n] for d, s, n in pieces])
                padding = LENGTH + 1 - len(tokens)
                row = np.concatenate([tokens, np.full(padding, 7)])
                assert (batch.tokens[k] == row).all()
                owner = [d for d, _, n in pieces for _ in range(n)] + [-1] * padding
                assert batch.documents[k].tolist() == owner[:-1]
                pairs = pairwise(owner)
                assert batch.loss_mask[k].tolist() == [a == b >= 0 for a, b in pairs]
                lengths = [n for _, _, n in pieces] + [padding]
                positions = list(chain.from_iterable(range(n) for n in lengths))
                assert batch.positions[k].tolist() == positions[:-1]
                lengths[-1 if padding else -2] -= 1  # the last place is a target alone
                sequences += [n for n in lengths if n]
            assert np.diff(batch.cu_seqlens).tolist() == sequences
            assert batch.max_seqlen == max(sequences)
    assert sorted(delivered) == list(range(len(expected)))
    assert delivered != sorted(delivered)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_that_stops_at_any_step_goes_on_with_any_world_size(data, world_size):
    _, store = data
    with loader(store) as whole:
        sequence = [window for batch in whole for window in batch.indices.tolist()]
        wanted = whole.last_order_hash
    steps = -(-len(sequence) // (4 * world_size))
    for stop in range(0, steps, 3):
        seen, states = {}, []
        for rank in range(world_size):
            with loader(store, rank=rank, world_size=world_size, tail="exact") as part:
                for step, batch in zip(range(stop), part, strict=False):
                    seen[step, rank] = batch.indices.tolist()
                states.append(part.state_dict())
        assert len(json.dumps(states[0])) < 300
        state = states[0] | {
            "order_hash": f"{combine_hashes(*(int(s['order_hash'], 16) for s in states)):016x}"
        }
        before = [window for key in sorted(seen) for window in seen[key]]
        with loader(store, batch_size=7) as rest:
            rest.load_state_dict(state)
            after = [window for batch in rest for window in batch.indices.tolist()]
            assert rest.last_order_hash == wanted
        assert before + after == sequence


def test_a_state_of_other_windows_is_refused(data, tmp_path):
    _, store = data
    with loader(store) as saved:
        next(iter(saved))
        state = saved.state_dict()
    other = packed(tmp_path / "b.hr", documents_of(2, 300))
    for options in ({"length": 31}, {"pack": "best-fit"}, {"seed": 6}, {"shuffle": False}):
        with loader(store, **options) as refusing, pytest.raises(StateMismatch) as refused:
            refusing.load_state_dict(state)
        if "pack" in options or "shuffle" in options:
            was = "pack='cut'" if "pack" in options else "shuffle=True"
            assert str(refused.value).endswith(f"Resume with {was}.")
        if "length" in options:
            message = str(refused.value)
            assert f"(windows of {LENGTH} tokens), this order is " in message
            assert "(windows of 31 tokens)" in message
            assert "'windows': " in message
            assert "samples" not in message
            assert message.endswith(f"Resume with length={LENGTH}.")
    with loader(other) as refusing, pytest.raises(StateMismatch, match=r" windows, another number"):
        refusing.load_state_dict(state)
    del state["window_tokens"]  # as states of before have none
    with loader(store) as rest:
        rest.load_state_dict(state)
        assert rest.position == 4


def test_long_documents_are_read_by_range_and_short_ones_are_checked(tmp_path):
    documents = [*documents_of(3, 40, top=400), np.arange(100_000) % 50_000]
    documents = [d.astype(np.uint16) for d in documents]
    store = packed(tmp_path / "a.hr", documents)
    tokens = np.concatenate(documents)
    with loader(store, length=512) as batches:
        for batch in batches:
            for window, row in zip(batch.indices.tolist(), batch.tokens, strict=True):
                assert (row == tokens[window * 512 : window * 512 + 513]).all()
        assert batches.stats.bytes >= batches.order.samples * 512 * 2
    volume = next((tmp_path / "a.hr").glob("*.hrv"))
    extent = store.segments[0].extents(7)[0]
    store.close()
    with volume.open("r+b") as f:
        f.seek(extent.offset)
        f.write(b"\xff" * 3)
    with loader(tmp_path / "a.hr", length=512) as batches, pytest.raises(CorruptSample, match="7"):
        list(batches)


def test_batches_of_one_store_have_no_sources(data):
    _, store = data
    for batches in (loader(store), hr.loader(store, 2)):
        batch, *_ = batches
        with pytest.raises(ValueError, match="of one store, not of a mixture"):
            _ = batch.sources
        batches.close()


def test_memory_of_batches_that_are_kept_is_not_used_again(data):
    documents, store = data
    tokens = np.concatenate(documents)
    with loader(store, batch_size=2) as batches:
        kept = [batch for _ in range(3) for batch in batches][::5]
    for batch in kept:
        for window, row in zip(batch.indices.tolist(), batch.tokens, strict=True):
            assert (row == tokens[window * LENGTH : (window + 1) * LENGTH + 1]).all()


def test_what_tokens_are_is_never_guessed(data, tmp_path):
    _, store = data
    with pytest.raises(ValueError, match="what are the tokens of"):
        hr.tokens(store, LENGTH, 4)
    for name, what in {"a.jsonl": "JSON Lines", "a.txt": "text", "a.jpg": "pictures"}.items():
        folder = tmp_path / what
        folder.mkdir()
        (folder / name).write_bytes(b'{"text": "a"}\n')
        hr.pack(folder, tmp_path / f"{what}.hr")
        for source in (folder, tmp_path / f"{what}.hr"):
            with pytest.raises(
                ValueError, match=f"holds {what}, expected tokens. .*headrace tokenize"
            ):
                hr.tokens(source, LENGTH, 4)
    with pytest.raises(ValueError, match="stored is 'float32'"):
        loader(store, stored="float32")
    with pytest.raises(ValueError, match="dtype is 'int16'"):
        loader(store, dtype="int16")
    with pytest.raises(OrderError, match="pack is 'tight'"):
        loader(store, pack="tight")
    with pytest.raises(StoreError, match="do not fill one window"):
        loader(store, length=1 << 30)
    odd = packed(tmp_path / "odd.hr", [np.zeros(3, np.uint8)])
    with pytest.raises(StoreError, match="document 0 has 3 bytes, expected a multiple of 2"):
        loader(odd)


def test_of_texts_and_tokens_in_one_table_it_is_said_which_are_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    ids = pa.array([list(range(i, i + 40)) for i in range(8)], pa.list_(pa.int32()))
    table, path = pa.table({"text": ["word" * 40] * 8, "input_ids": ids}), tmp_path / "t.arrow"
    with pa.OSFile(str(path), "wb") as f, pa.ipc.new_file(f, table.schema) as writer:
        writer.write_table(table)
    hr.pack(path, tmp_path / "texts.hr")
    with pytest.raises(ValueError, match=r"the column 'text' .*hr\.open\(.*column='input_ids'\)"):
        hr.tokens(path, LENGTH, 4)
    with pytest.raises(
        ValueError, match=r"the column 'text' .*pack it again with --column input_ids"
    ):
        hr.tokens(tmp_path / "texts.hr", LENGTH, 4)
    with hr.open(path, column="input_ids") as store:
        assert next(iter(hr.tokens(store, 39, 1, shuffle=False))).tokens.tolist() == [[*range(40)]]
    with hr.open(path, column=["text", "input_ids"]) as store:
        assert next(iter(hr.tokens(store, 39, 1, shuffle=False))).tokens.tolist() == [[*range(40)]]
        with pytest.raises(ValueError, match="the column 'text', expected tokens"):
            hr.tokens(store, 39, 1, part="text")  # its bytes, too, are a multiple of 4
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"text": "word", "input_ids": [1, 2]}\n')
    with pytest.raises(ValueError, match=r"JSON Lines \(with 'input_ids': pack them as arrays"):
        hr.tokens(lines, LENGTH, 4)


@pytest.mark.parametrize("stored", ["uint8", "int8", "int16", "uint32", "int32", "int64"])
def test_tokens_of_every_width_are_delivered_or_refused(tmp_path, stored):
    top = min(np.iinfo(stored).max, 2**31 - 1)
    document = np.linspace(0, top, 101).astype(stored)
    store = packed(tmp_path / "a.hr", [document])
    with loader(store, stored=stored, length=100, batch_size=1) as batches:
        assert (next(iter(batches)).tokens[0] == document).all()
    if np.iinfo(stored).max > top:
        large = packed(tmp_path / "b.hr", [np.full(101, 2**31, stored)])
        with (
            loader(large, stored=stored, length=100, batch_size=1) as batches,
            pytest.raises(StoreError, match="does not fit into int32"),
        ):
            list(batches)
        with loader(large, stored=stored, length=100, batch_size=1, dtype="int64") as batches:
            assert (next(iter(batches)).tokens == 2**31).all()


def test_pieces_that_leave_their_buffers_are_refused():
    rows, data = np.zeros(10, np.int32), np.zeros(20, np.uint8)
    for offset, dest, count in (
        (0, 0, 11),
        (1, 0, 10),
        (-1, 0, 1),
        (0, 10, 1),
        (0, -1, 1),
        (0, 0, -1),
    ):
        arrays = (np.array([value]) for value in (offset, dest, count))
        with pytest.raises(ValueError, match="piece 0 leaves its buffers"):
            _native.place_tokens(data, "uint16", *arrays, rows)


# -- mixtures ----------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path):
    made = {}
    for seed, (name, count) in enumerate({"web": 90, "code": 40, "books": 60}.items()):
        documents = documents_of(seed, count)
        made[name] = documents, packed(tmp_path / f"{name}.hr", documents)
    yield made
    for _, store in made.values():
        store.close()


def mixed_windows(sources, pack):
    """Every window of each source by its number through all of them: what must be in it, slow and plain."""
    windows = []
    for name, (documents, _) in sources.items():
        for pieces in reference_windows([len(d) for d in documents], pack, LENGTH):
            tokens = np.concatenate([documents[d][start : start + n] for d, start, n in pieces])
            windows.append((name, tokens))
    return windows


@pytest.mark.parametrize("pack", ["cut", "best-fit"])
def test_windows_of_a_mixture_are_its_sources_in_the_proportions_asked_for(sources, pack):
    expected = mixed_windows(sources, pack)
    stores = {
        "web": (sources["web"][1], 5),
        "code": (sources["code"][1], 3),
        "books": (sources["books"][1], 2),
    }
    mixture = hr.mix(stores, seed=3, stop="last")
    delivered = []
    with hr.tokens(mixture, LENGTH, 10, pack=pack, stored="uint16") as batches:
        for batch in batches:
            if len(batch) == 10:
                assert [batch.sources.count(name) for name in sources] == [5, 3, 2]
            for number, row, name in zip(
                batch.indices.tolist(), batch.tokens, batch.sources, strict=True
            ):
                tokens = expected[number][1]
                assert name == expected[number][0]
                assert (row[: len(tokens)] == tokens).all()
                assert not row[len(tokens) :].any()
                delivered.append(number)
    assert set(delivered) == set(range(len(expected)))
    bounds = batch.documents[batch.documents >= 0]
    assert bounds.max() < sum(len(documents) for documents, _ in sources.values())


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_mixture_of_tokens_goes_on_with_any_world_size(sources, world_size):
    mixture = hr.mix({name: store for name, (_, store) in sources.items()}, seed=3, stop=240)
    options = {"length": LENGTH, "stored": "uint16"}
    whole = hr.tokens(mixture, batch_size=6, **options)
    rows = np.concatenate([batch.tokens for batch in whole])
    first = hr.tokens(mixture, batch_size=6, **options)
    batches = iter(first)
    for _ in range(10):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    parts = []
    for rank in range(world_size):
        again = hr.tokens(
            mixture, batch_size=6, rank=rank, world_size=world_size, tail="exact", **options
        )
        again.load_state_dict(state)
        parts.append([batch.tokens for batch in again])
    rest = np.concatenate([row for step in zip(*parts, strict=True) for row in step])
    assert (rest == rows[60:]).all()


def test_sizes_of_a_mixture_of_tokens_are_windows_and_not_documents(sources, tmp_path):
    """One long document has as many windows as hundreds of short ones."""
    long = packed(tmp_path / "long.hr", [np.arange(100 * LENGTH + 1, dtype=np.uint16)])
    short = packed(tmp_path / "short.hr", [np.arange(LENGTH, dtype=np.uint16)] * 301)
    mixture = hr.mix({"long": long, "short": short}, seed=1)
    with hr.tokens(mixture, LENGTH, 40, stored="uint16") as batches:
        assert next(iter(batches)).sources.count("long") == 10


def test_a_rank_of_a_mixture_that_the_last_step_leaves_nothing_has_an_empty_batch(sources):
    mixture = hr.mix({name: store for name, (_, store) in sources.items()}, seed=3, stop=2)
    options = {"world_size": 3, "tail": "exact", "stored": "uint16"}
    parts = [list(hr.tokens(mixture, LENGTH, 1, rank=rank, **options)) for rank in range(3)]
    assert [[len(batch) for batch in part] for part in parts] == [[1], [1], [0]]
    assert not parts[2][0].sources
    assert parts[2][0].documents.shape == (0, LENGTH)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))]
)
def test_a_copied_or_pickled_loader_goes_on_where_it_stood(sources, again):
    mixture = hr.mix({name: store for name, (_, store) in sources.items()}, seed=3)
    web = sources["web"][1]
    for own in (
        loader(web, pack="best-fit"),
        loader(mixture, seed=3),
        hr.loader(web, 4, ram_bytes=0),
    ):
        unused = again(own)
        batches = iter(own)
        assert (next(batches).indices == next(iter(unused)).indices).all()
        sent = again(own)
        rest = [batch.indices.tolist() for batch in sent]
        assert rest == [batch.indices.tolist() for batch in batches]


def test_what_a_mixture_of_tokens_cannot_be_is_refused(sources):
    stores = {name: store for name, (_, store) in sources.items()}
    with pytest.raises(ValueError, match="the order of source 'web' is 'balanced'"):
        loader(hr.mix(stores, orders={"web": "balanced"}), seed=0)
    with pytest.raises(ValueError, match="the mixture has 3"):
        loader(hr.mix(stores, seed=3))
    with pytest.raises(TypeError, match="seed is None, expected a whole number"):
        hr.mix(stores, seed=None)
    with pytest.raises(StoreError, match=r"^web: the documents have [0-9,]+ tokens"):
        hr.tokens(hr.mix(stores), 1 << 20, 1, stored="uint16")
    with loader(stores["web"]) as batches, pytest.raises(ValueError, match="is of one store"):
        _ = next(iter(batches)).sources


# -- caches and limits -------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", ["cut", "best-fit"])
@pytest.mark.parametrize(
    "options", [{"cache_dir": True}, {"ram_bytes": 1 << 24}, {"bytes_per_s": 1e9}], ids=str
)
def test_windows_are_the_same_through_caches_and_limits(data, tmp_path, monkeypatch, pack, options):
    _, store = data
    # Also of a source that is fast, all is cached.
    monkeypatch.setattr(cache_writer, "writer_share", lambda _rate, _waiting: 1.0)
    if "cache_dir" in options:
        options = {"cache_dir": str(tmp_path)}
    with loader(store, pack=pack) as plain:
        expected = [(batch.tokens, batch.documents) for batch in plain]
    for _ in range(2):
        with loader(store, pack=pack, **options) as tiered:
            for _ in range(2):
                for batch, (tokens, documents) in zip(tiered, expected, strict=True):
                    assert (batch.tokens == tokens).all()
                    assert (batch.documents == documents).all()
                tiered.set_epoch(0)
            served = tiered.bytes_by_tier
    assert (served["disk"] > 0) == ("cache_dir" in options)
    assert (served["ram"] > 0) == ("ram_bytes" in options)


def test_caches_and_limits_take_no_document_that_is_long(tmp_path, monkeypatch):
    store = packed(tmp_path / "a.hr", [np.zeros(9, np.uint16), np.zeros(1 << 20, np.uint16)])
    with pytest.raises(StoreError, match="document 1 has 2,097,152 bytes, expected at most 1,048"):
        loader(store, ram_bytes=1 << 20)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(StoreError, match="caches and limits take whole documents"):
        loader(store)


def test_the_line_about_an_epoch_counts_windows(tmp_path, monkeypatch, capsys):
    documents = [np.arange(100, dtype=np.uint16).tobytes()] * 4
    hr.pack(documents, tmp_path / "t.hr")
    monkeypatch.setenv("HEADRACE_VERDICT", "1")
    windows = len(list(hr.tokens(tmp_path / "t.hr", 10, 1, stored="uint16")))
    assert f"| {windows} windows |" in capsys.readouterr().err

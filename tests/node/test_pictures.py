"""Pictures over the node plane: the same pixels as without it, decoded once where they are kept decoded."""

import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import headrace as hr
from headrace.errors import DecodeError, VolumeError
from headrace.node.reads import NodeReads
from headrace.node.wire import Open, Opened, Pictures, ReplyStatus
from node.conftest import report_of, serving, until
from plane.test_images import BAD, KINDS, encoded, picture, png

IMAGES = hr.Images(size=32, flip=True)
KEPT = hr.Images(size=32, flip=True, keep="decoded", keep_short=48)
SIZES = [(200, 150), (64, 48), (31, 90)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Every kind of picture that is decoded here, three sizes of each, and two that Pillow decodes."""
    made = [
        (name, make(picture(*size, seed=i)))
        for i, size in enumerate(SIZES)
        for name, make in KINDS.items()
    ]
    made += [("bmp", encoded(picture(90, 60), "BMP")), ("tiff", encoded(picture(90, 60), "TIFF"))]
    path = tmp_path_factory.mktemp("photos") / "photos.hr"
    hr.pack(((f"{i:03d}", data, i % 5) for i, (_, data) in enumerate(made)), path)
    return path


def pixels_of(loader, epochs=3):
    """What a consumer sees of each epoch."""
    return [
        [(b.position, b.indices.tolist(), b.labels.tolist(), b.pixels.copy()) for b in loader]
        for _ in range(epochs)
    ]


def same(a, b):
    assert len(a) == len(b)
    for mine, others in zip(a, b, strict=True):
        assert len(mine) == len(others)
        for one, other in zip(mine, others, strict=True):
            assert one[:3] == other[:3]
            np.testing.assert_array_equal(one[3], other[3])


@pytest.mark.parametrize("order", ["shuffled", "blocked"])
@pytest.mark.parametrize("images", [IMAGES, KEPT], ids=["anew", "kept"])
def test_pixels_are_those_of_the_process_plane(folder, photos, images, order):
    alone = hr.loader(photos, 8, seed=3, order=order, decode=images)
    expected = pixels_of(alone)
    alone.close()
    with serving(folder):
        loader = hr.loader(photos, 8, seed=3, order=order, decode=images, plane="node")
        same(pixels_of(loader), expected)
        report = report_of(loader)
        assert report.direct_batches == 0
        assert report.gathered_batches > 0  # later epochs came from the daemon's memory
        assert loader.decoding.kept == (0, 0)
        # Batches are given back, though threads that decode were the last to look at them.
        link = loader._reader._stages.stages[-1]._link
        gc.collect()
        until(lambda: not link.ledger.live)
        loader.close()


def test_pictures_are_decoded_once_for_all_who_may_share_them(folder, photos):
    """Two sizes and two seeds; another short side is another data set."""
    with serving(folder) as server, hr.open(photos) as store:
        size = len(store)
        for images in (KEPT, hr.Images(size=(20, 40), keep="decoded", keep_short=48)):
            loader = hr.loader(store, 8, seed=images.planes[1], decode=images, plane="node")
            alone = hr.loader(store, 8, seed=images.planes[1], decode=images)
            same(pixels_of(loader, 2), pixels_of(alone, 2))
            loader.close()
            alone.close()
        (data,) = server.describe()["datasets"]
        assert data["decoded"]["pictures"] == size
        assert data["held_samples"] == size
        assert data["name"].endswith("-decoded")
        other = hr.loader(store, 8, decode=hr.Images(size=32, keep="decoded"), plane="node")
        bytes_alone = hr.loader(store, 8, plane="node")
        assert sum(len(batch) for batch in other) == sum(len(batch) for batch in bytes_alone)
        decoded = [each["decoded"] for each in server.describe()["datasets"]]
        assert [each and each["pictures"] for each in decoded] == [size, size, None]
        other.close()
        bytes_alone.close()


def test_two_jobs_at_a_time_in_two_orders_have_each_picture_decoded_once(
    folder, tmp_path, monkeypatch
):
    """To the last one: a memory that is nearly full holds all of them all the same."""
    monkeypatch.setattr("headrace.node.served._SLAB_SLACK", 1 << 20)
    many = ((f"{i}", encoded(picture(267, 200, i), "JPEG")) for i in range(600))
    hr.pack(many, tmp_path / "many.hr")
    images = hr.Images(size=16, keep="decoded", keep_short=200)
    with serving(folder, ram_bytes=256 << 20) as server:
        loaders = [
            hr.loader(tmp_path / "many.hr", 20, seed=seed, decode=images, plane="node")
            for seed in range(2)
        ]
        with ThreadPoolExecutor() as threads:
            assert list(threads.map(lambda each: sum(map(len, each)), loaders)) == [600, 600]
        (data,) = server.describe()["datasets"]
        assert data["postponed_batches"] > 0  # they met
        assert data["decoded"]["pictures"] == data["held_samples"] == 600
        assert data["held_bytes"] > data["quota_bytes"] * 7 // 8
        (served,) = server._datasets._data.values()
        assert served._keeps()  # what is read now is held, and so waited for
        for loader in loaders:
            loader.close()


def test_bad_pictures_are_named_as_without_the_daemon(folder, tmp_path):
    samples = dict(BAD) | {f"good{i}": encoded(picture(80, 60, i), "JPEG") for i in range(9)}
    hr.pack(samples.items(), tmp_path / "bad.hr")
    alone = hr.loader(tmp_path / "bad.hr", 4, seed=1, decode=KEPT, on_error="skip")
    expected = pixels_of(alone, 2)
    assert len({skipped.index for skipped in alone.skipped}) == len(BAD)
    with serving(folder):
        loader = hr.loader(
            tmp_path / "bad.hr", 4, seed=1, decode=KEPT, on_error="skip", plane="node"
        )
        same(pixels_of(loader, 2), expected)
        assert loader.skipped == alone.skipped
        assert report_of(loader).direct_batches == 0
        loader.close()
        strict = hr.loader(tmp_path / "bad.hr", len(samples), decode=KEPT, plane="node")
        with pytest.raises(DecodeError, match="is no picture that can be decoded"):
            next(iter(strict))
        strict.close()
    alone.close()


def test_without_a_daemon_the_process_keeps_them(folder, photos):
    loader = hr.loader(photos, 8, seed=3, decode=KEPT, plane="node")
    alone = hr.loader(photos, 8, seed=3, decode=KEPT)
    same(pixels_of(loader, 2), pixels_of(alone, 2))
    assert loader.decoding.kept == alone.decoding.kept
    assert loader.decoding.kept[0] > 50
    loader.close()
    alone.close()


def test_who_keeps_pixels_keeps_no_batch_of_the_daemon(folder, photos):
    with serving(folder):
        loader = hr.loader(photos, 4, seed=3, decode=IMAGES, plane="node")
        pixels = [batch.pixels for batch in loader]
        assert report_of(loader).node_batches == len(pixels)
        link = loader._reader._stages.stages[-1]._link
        gc.collect()
        until(lambda: not link.ledger.live)
        assert all(each.any() for each in pixels)
        loader.close()


def test_a_header_alone_takes_no_memory():
    """PNGs of 60 bytes that claim 4,096 x 256 pixels are passed on as they are."""
    from headrace import _native

    claim = png(4096, 256, 8, 2, b"")
    samples = 64
    lengths = np.full(samples, len(claim), np.int64)
    batch = _native.Batch.lent(
        data=np.frombuffer(claim * samples, np.uint8), indices=np.arange(samples),
        offsets=np.cumsum(lengths) - lengths, lengths=lengths, labels=np.zeros(samples, np.int64),
        parts=1, way=b"",
    )  # fmt: skip
    pool = _native.DecodePool(2, 1 << 20, shared=True)
    job = pool.reduce(KEPT.recipe(), batch, 0)
    assert job.wait(20.0)
    assert bytes(job.reduced.data) == claim * samples
    assert pool.mapped_bytes <= 1 << 20


@pytest.mark.parametrize("cache", [False, True])
def test_a_data_set_that_is_closed_rings_nobody(folder, photos, tmp_path, cache):
    """Its descriptor may be somebody else's by then."""
    from headrace.config import TierOptions

    tiers = TierOptions(cache_dir=str(tmp_path / "cache")) if cache else TierOptions()
    with serving(folder, tiers=tiers) as server:
        loader = hr.loader(photos, 8, seed=3, decode=KEPT, plane="node")
        alone = hr.loader(photos, 8, seed=3, decode=KEPT)
        same(pixels_of(loader, 2), pixels_of(alone, 2))
        assert report_of(loader).direct_batches == 0
        (data,) = server._datasets._data.values()
        (stage,) = [each for each in data.chain.stages if each.name == "decode"]
        assert stage.pool is not None
        loader.close()
        alone.close()
    assert stage.pool is None
    with pytest.raises(VolumeError, match="closed"):
        stage.reduce(SimpleNamespace(take=lambda: None))


def test_other_parts_are_as_they_were(folder, tmp_path):
    pairs = [
        (f"{i}", {"jpg": encoded(picture(99, 70, i), "JPEG"), "json": b"%d" % i}) for i in range(9)
    ]
    hr.pack(pairs, tmp_path / "pairs.hr")
    with serving(folder):
        loader = hr.loader(tmp_path / "pairs.hr", 3, decode=KEPT, plane="node")
        for _ in range(2):
            for batch in loader:
                read = [bytes(batch[i, "json"]) for i in range(len(batch))]
                assert read == [b"%d" % i for i in batch.indices]
                with pytest.raises(ValueError, match="picture is kept decoded"):
                    batch[0, "jpg"]
        loader.close()


def test_an_epoch_goes_on_when_the_daemon_is_killed(daemon, photos, monkeypatch):
    # Few are asked for ahead: some are missing still when it is killed, however fast it is.
    monkeypatch.setattr(NodeReads, "ahead_bytes", 1)
    alone = hr.loader(photos, 4, seed=3, decode=KEPT)
    expected = pixels_of(alone, 1)
    alone.close()
    server = daemon()
    loader = hr.loader(photos, 4, seed=3, decode=KEPT, plane="node")
    got = []
    for number, batch in enumerate(loader):
        if number == 3:
            assert report_of(loader).attached
            server.end(signal.SIGKILL)
        got.append(
            (batch.position, batch.indices.tolist(), batch.labels.tolist(), batch.pixels.copy())
        )
    same([got], expected)
    assert report_of(loader).direct_batches > 0
    loader.close()


def test_what_is_no_recipe_is_refused(folder, photos, link):
    with serving(folder), hr.open(photos) as store:
        one = link()
        for pictures, why in (
            (Pictures("", 48, "sharp", False, False, None, 1 << 20), "filter"),
            (Pictures("jpg", 48, "box", False, False, None, 1 << 20), "part is 'jpg'"),
        ):
            one.send(
                Open(
                    one.new_ticket(), os.fsencode(store.path), 1, store.fingerprint, [""], None,
                    pictures,
                )
            )  # fmt: skip
            opened = one.wait(Opened, 20.0)
            assert opened.status is ReplyStatus.NOT_FOUND
            assert why in opened.message


@pytest.mark.parametrize("shift", [1, -1, 1 << 62])
def test_a_batch_outside_its_memory_is_refused(shift):
    from headrace import _native

    columns = {
        name: np.array(values, np.int64)
        for name, values in {"indices": [4, 9], "offsets": [0, 10], "lengths": [10, 20]}.items()
    }
    data = np.arange(30, dtype=np.uint8)
    rest = {"data": data, "labels": np.zeros(2, np.int64), "parts": 1, "way": b""}
    batch = _native.Batch.lent(**columns, **rest)
    assert batch.data.tolist() == list(range(30))
    columns["lengths"][1] += shift
    if shift == -1:
        columns["lengths"][1] = shift
    with pytest.raises(ValueError, match="outside"):
        _native.Batch.lent(**columns, **rest)
    with pytest.raises(ValueError, match="other samples"):
        _native.Batch.lent(**{**columns, "lengths": np.zeros(3, np.int64)}, **rest)

"""A local store from C: the same order and bytes as Python's loader, whoever asks and however."""

import ctypes
import os
import re
import subprocess

import numpy as np
import pytest
from tests.plane.test_images import KINDS, SIZES, picture

import headrace as hr
from capi.library import Batch, Failed, images
from headrace import capi
from headrace.base.checksum import crc32c


def python_epoch(store, batch, seed, *, rank=0, world=1, epoch=0, tail=None):
    """(index, label, bytes) in the order of Python's loader."""
    loader = hr.loader(store, batch, seed=seed, rank=rank, world_size=world, tail=tail, tune=False)
    out = []
    for _ in range(epoch + 1):
        out = [
            (int(b.indices[i]), int(b.labels[i]), bytes(b[i]))
            for b in loader
            for i in range(len(b))
        ]
    loader.close()
    return out


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """More samples than a permutation keeps in a table, so that the network is used."""
    folder = tmp_path_factory.mktemp("numbers")
    target = folder / "numbers.hr"
    random = np.random.default_rng(5)
    samples = [(f"n/{i:05}", random.bytes(int(random.integers(0, 40))), i % 7) for i in range(5003)]
    hr.pack(({"name": n, "data": d, "label": label} for n, d, label in samples), target)
    return target


@pytest.mark.parametrize("options", [(), ("-b", "7", "-s", "9"), ("-b", "100", "-e", "3")])
def test_the_example_reads_what_python_reads(read_epoch, packed_photos, options):
    lines, last = read_epoch(packed_photos, *options)
    chosen = dict(zip(options[::2], map(int, options[1::2]), strict=True))
    with hr.open(packed_photos) as store:
        expected = []
        for epoch in range(chosen.get("-e", 1)):
            found = python_epoch(store, chosen.get("-b", 64), chosen.get("-s", 0), epoch=epoch)
            expected += [
                (epoch, at, index, label, len(data), crc32c(data))
                for at, (index, label, data) in enumerate(found)
            ]
    assert [tuple(line) for line in lines] == expected
    total = sum(line.crc for line in lines)
    assert re.fullmatch(
        rf"{len(lines)} samples, {sum(x.nbytes for x in lines)} bytes, sum of checksums {total:016x}",
        last,
    )


def test_no_python_is_in_the_programs_process(read_epoch):
    found = subprocess.run(
        ["ldd", read_epoch.program], check=True, capture_output=True, text=True
    ).stdout
    assert "libheadrace.so" in found
    assert "python" not in found.split("libheadrace.so")[0].lower()
    assert not re.search(r"libpython", found)


def test_nothing_but_the_headers_functions_is_visible():
    library = capi.library_dir() / "libheadrace.so"
    found = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    ).stdout
    exported = {line.split()[2].partition("@")[0] for line in found.splitlines()} - {"HEADRACE_1"}
    text = (capi.include_dir() / "headrace.h").read_text()
    assert exported == set(re.findall(r"HR_API [\w ]+[ *](hr_\w+)\(", text))


@pytest.mark.parametrize("how", [("cc", "-xc", "-std=c99"), ("c++", "-xc++", "-std=c++11")])
def test_the_header_is_clean(how, tmp_path):
    source = tmp_path / "one.c"
    source.write_text(
        "#include <headrace.h>\n"
        "int main(void) { hr_batch b = HR_BATCH_INIT; hr_mount_options o = HR_MOUNT_OPTIONS_INIT;\n"
        "hr_store_info i = HR_STORE_INFO_INIT; hr_images p = HR_IMAGES_INIT;\n"
        "hr_order q = HR_ORDER_INIT;\n"
        "return (int)(q.kind + b.samples + o.no_digests + i.samples + p.width); }\n"
    )
    subprocess.run(
        [
            *how,
            "-pedantic",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            *capi.compile_flags(),
            source,
        ],
        check=True,
    )


@pytest.mark.parametrize("tail", ["exact", "pad", "drop"])
@pytest.mark.parametrize(("world", "batch"), [(1, 64), (3, 100), (4, 1251), (7, 2000)])
def test_every_rank_has_pythons_order(library, numbers, tail, world, batch):
    mount = library.mount(numbers)
    with hr.open(numbers) as store:
        for rank in {0, world - 1, world // 2}:
            sequence = library.sequence(mount, 2**64 - 1, rank, world)
            library.set(sequence, "HR_SET_TAIL", library.codes[f"HR_TAIL_{tail.upper()}"])
            library.set(sequence, "HR_SET_EPOCH", 1)
            found = [(i, label, data) for i, label, [data] in library.epoch(sequence, batch)]
            expected = python_epoch(
                store, batch, 2**64 - 1, rank=rank, world=world, epoch=1, tail=tail
            )
            assert found == expected
            library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_a_sequence_goes_on_where_another_stopped(library, numbers):
    mount = library.mount(numbers)
    sequence = library.sequence(mount, 4)
    whole = library.epoch(sequence, 50)
    assert library.get(sequence, "HR_SET_EPOCH") == 1
    again = library.sequence(mount, 4)
    first = library.batch(again, 333)
    assert first.content() == whole[:333]
    library.release(first)
    library.set(again, "HR_SET_EPOCH", 0)
    library.set(again, "HR_SET_POSITION", 1000)
    assert library.epoch(again, 64) == whole[1000:]
    for each in (sequence, again):
        library.call("hr_sequence_close", each)
    library.call("hr_unmount", mount)


def test_batches_may_change_their_size(library, numbers):
    mount = library.mount(numbers)
    sequence = library.sequence(mount, 4)
    whole = library.epoch(sequence, 50)
    library.set(sequence, "HR_SET_EPOCH", 0)
    found = []
    for n in (1, 700, 3, 3, 3, 50):
        batch = library.batch(sequence, n)
        assert (batch.epoch, batch.position, batch.samples) == (0, len(found), n)
        found += batch.content()
        library.release(batch)
    assert found == whole[: len(found)]
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


PICTURES = {
    f"{i:02d}": list(KINDS.values())[i % len(KINDS)](picture(*SIZES[i % 4], seed=i))
    for i in range(43)
}


@pytest.mark.parametrize(
    ("ours", "pythons"),
    [
        ({"flip": 0.5}, {"flip": True}),
        (
            {"height": 48, "width": 64, "crop": 1, "short_side": 70, "filter": 3, "channels_last": 1,
             "dtype": 3, "mean": (0.5, 0.25, 0.125), "std": (0.5, 0.25, 0.125)},
            {"size": (48, 64), "crop": "center", "short": 70, "filter": "bicubic", "layout": "nhwc",
             "dtype": "float32", "mean": (0.5, 0.25, 0.125), "std": (0.5, 0.25, 0.125)},
        ),
        (
            {"height": 50, "width": 50, "crop": 2, "exact": 1, "orient": 1, "background": 0x20F0A0,
             "dtype": 2, "threads": 3},
            {"size": 50, "crop": "stretch", "exact": True, "orient": True, "dtype": "bfloat16",
             "background": (0x20, 0xF0, 0xA0)},
        ),
        ({"height": 90, "width": 90, "crop": 1}, {"size": 90, "crop": "center"}),
    ],
)  # fmt: skip
def test_pictures_are_pythons_pixels(library, tmp_path, ours, pythons):
    hr.pack(PICTURES.items(), tmp_path / "pictures.hr")
    mount = library.mount(tmp_path / "pictures.hr")
    sequence = library.sequence(mount, 9, 1, 2)
    given = images(**ours)
    library.call("hr_sequence_images", sequence, ctypes.byref(given))
    loader = hr.loader(
        tmp_path / "pictures.hr", 6, seed=9, rank=1, world_size=2, decode=hr.Images(**pythons)
    )
    for _ in range(2):
        for expected in loader:
            batch = library.batch(sequence, 6)
            assert batch.indices[: batch.samples] == expected.indices.tolist()
            assert batch.pixel_bytes == expected.pixels[0].nbytes
            pixels = ctypes.string_at(batch.pixels, batch.samples * batch.pixel_bytes)
            assert pixels == expected.pixels.tobytes()
            assert [parts for _, _, [parts] in batch.content()] == list(map(bytes, expected))
            library.release(batch)
        assert library.batch(sequence, 6) is None
    assert loader.decoding.fallbacks == 0
    loader.close()
    library.call("hr_sequence_images", sequence, None)
    batch = library.batch(sequence, 6)
    assert not batch.pixels
    library.release(batch)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_what_is_no_picture_fails_its_batch_or_is_marked(library, tmp_path):
    samples = {
        f"{i}": b"no picture" if i == 5 else data for i, data in enumerate(PICTURES.values())
    }
    hr.pack(samples.items(), tmp_path / "pictures.hr")
    mount = library.mount(tmp_path / "pictures.hr")
    sequence = library.sequence(mount, 3)
    given = images(height=32, width=32)
    library.call("hr_sequence_images", sequence, ctypes.byref(given))
    seen = []
    for _ in range(2):  # it stays where it is
        with pytest.raises(Failed, match=r"HR_ERR_PICTURE: sample 5 \('5'\)") as caught:
            while (batch := library.batch(sequence, 4)) is not None:
                seen += batch.indices[: batch.samples]
                library.release(batch)
    assert "none of the formats" in caught.value.message
    assert 5 not in seen
    assert len(seen) == len(set(seen)) == library.get(sequence, "HR_SET_POSITION")
    library.set(sequence, "HR_SET_ON_ERROR", library.codes["HR_ON_ERROR_MARK"])
    library.set(sequence, "HR_SET_EPOCH", 0)
    marked = 0
    while (batch := library.batch(sequence, 4)) is not None:
        bad = [i for i in range(batch.samples) if batch.lengths[i] < 0]
        assert [batch.indices[i] for i in bad] == [5] * batch.failed
        for i in bad:
            pixels = ctypes.string_at(batch.pixels + i * batch.pixel_bytes, batch.pixel_bytes)
            assert pixels == bytes(batch.pixel_bytes)
        marked += batch.failed
        library.release(batch)
    assert marked == 1
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"width": 0}, "side of the output"), ({"height": 1 << 20}, "height is 1048576"),
        ({"crop": 3}, "crop is 3"), ({"filter": 5}, "filter is 5"), ({"dtype": 4}, "dtype is 4"),
        ({"channels_last": 2}, "channels_last is 2"), ({"flip": 1.5}, "flip"),
        ({"scale": (0.0, 1.0)}, "areas"), ({"background": 1 << 24}, "background is 16777216"),
        ({"part": 1}, "part is 1"), ({"threads": 4000}, "threads is 4000"), ({"size": 8}, "size is 8"),
        ({"std": (0, 1, 1)}, "deviation"), ({"max_pixels": 0}, "max_pixels"),
    ],
)  # fmt: skip
def test_images_that_make_no_sense_are_refused(library, packed_photos, changed, words):
    mount = library.mount(packed_photos)
    sequence = library.sequence(mount, 3)
    given = images(**changed)
    with pytest.raises(Failed, match=words) as caught:
        library.call("hr_sequence_images", sequence, ctypes.byref(given))
    assert caught.value.name == "HR_ERR_ARGUMENT"
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_a_program_with_an_older_header_reads_batches_without_pixels(library, packed_photos):
    mount = library.mount(packed_photos)
    sequence = library.sequence(mount, 3)
    batch = Batch(size=Batch.pixels.offset, pixels=77)
    library.call("hr_batch_read", sequence, ctypes.c_uint64(4), ctypes.byref(batch))
    assert (batch.samples, batch.pixels, batch.size) == (4, 77, Batch.pixels.offset)
    library.release(batch)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_single_samples(library, own_store):
    mount = library.mount(own_store)
    with hr.open(own_store) as store:
        assert library.info(mount).samples == len(store)
        assert library.info(mount).fingerprint.decode() == store.fingerprint
        for index in (0, 17, len(store) - 1):
            name = store.names[index]
            sample = library.open(mount, os.fsencode(name))
            data = bytes(store.read(index))
            label = ctypes.c_int64()
            library.call("hr_sample_label", sample, ctypes.byref(label))
            assert library.call("hr_sample_index", sample) == index
            assert library.call("hr_sample_bytes", sample) == len(data)
            assert label.value == store.labels[index]
            assert library.read(sample, 0, len(data) + 9) == data
            assert library.read(sample, 5, 7) == data[5:12]
            assert library.read(sample, len(data), 1) == library.read(sample, 2**63, 1) == b""
            library.call("hr_close", sample)
    library.call("hr_unmount", mount)


def test_what_was_opened_outlives_its_mount(library, packed_photos):
    mount = library.mount(packed_photos)
    sequence = library.sequence(mount, 1)
    library.call("hr_unmount", mount)
    batch = library.batch(sequence, 10)
    library.call("hr_sequence_close", sequence)
    assert len(batch.content()) == 10
    library.release(batch)


def test_indexes_and_several_segments(library, photos, tmp_path):
    index = tmp_path / "photos.index"
    hr.index(photos, index)
    mount = library.mount(index)
    sequence = library.sequence(mount, 3)
    with hr.open(index) as store:
        found = [(i, label, data) for i, label, [data] in library.epoch(sequence, 8)]
        assert found == python_epoch(store, 8, 3)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)

"""A local store from C: the same order and bytes as Python's loader, whoever asks and however."""

import ctypes
import os
import re
import subprocess

import numpy as np
import pytest

import headrace as hr
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
        "hr_store_info i = HR_STORE_INFO_INIT; return (int)(b.samples + o.no_digests + i.samples); }\n"
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

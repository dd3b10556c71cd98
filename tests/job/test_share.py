"""Shares: who stages what, how it lies, and that a range of it can be made from the source."""

import contextlib
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace import _native
from headrace.base.files import lock_path, write_all
from headrace.job.engine import SharePart, SourceReads, _samples_of
from headrace.job.local_files import Directories
from headrace.job.share import cut_shares, plan_share, write_share_directory
from headrace.store.segment import read_extent
from headrace.store.summary import sample_sizes
from tests_shared import forked, until


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Samples of several parts, empty ones among them, in two segments."""
    rng = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("odd") / "odd.hr"

    def samples(first, count):
        for i in range(first, first + count):
            parts = {"a": rng.bytes(int(rng.integers(0, 3000)))}
            if i % 3:
                parts["b"] = rng.bytes(int(rng.integers(0, 50)))
            yield {"name": f"s{i:04d}", "label": i % 5, "data": parts}

    hr.pack(samples(0, 70), folder)
    hr.append(samples(70, 30), folder)
    return folder


def test_shares_are_ranges_of_about_equal_bytes(odd):
    with hr.open(odd) as store:
        sizes = np.concatenate([sizes for _, sizes in sample_sizes(store)])
        assert sizes.sum() == store.nbytes
        for nodes in (1, 2, 3, 7):
            cuts = cut_shares(store, nodes)
            assert len(cuts) == nodes
            assert [b for _, b in cuts][:-1] == [a for a, _ in cuts][1:]
            assert (cuts[0][0], cuts[-1][1]) == (0, len(store))
            shares = [int(sizes[a:b].sum()) for a, b in cuts]
            assert max(shares) - min(shares) <= 2 * int(sizes.max()) + len(store)


def test_more_nodes_than_samples_leave_some_without(odd):
    with hr.open(odd) as store:
        cuts = cut_shares(store, 150)
        assert sum(b - a for a, b in cuts) == len(store)
        assert any(a == b for a, b in cuts)


def test_a_planned_directory_says_what_the_source_says(odd, tmp_path):
    with hr.open(odd) as store:
        begin, end = 20, 90  # of both segments
        share = plan_share(store, begin, end)
        fd = os.open(tmp_path / "directory", os.O_RDWR | os.O_CREAT, 0o600)
        entry, _ = write_share_directory(share, fd)
        directory = _native.Directory.from_fd(fd, "planned")
        os.close(fd)
        assert entry.samples == end - begin == directory.samples
        wanted = np.arange(end - begin, dtype=np.int64)
        assert [os.fsdecode(n) for n in directory.names(wanted)] == store.names[begin:end]
        assert directory.labels.tolist() == store.labels[begin:end].tolist()
        extents = directory.extents_of(wanted)
        assert directory.has_crc  # the source has them
        assert int(extents["offset"].max() + extents["length"][-1]) <= share.volume_bytes
        for i in (0, 49, 50, 69):
            parts = store.parts_of(begin + i)
            mine = extents["sample"] == i
            named = [os.fsdecode(directory.part_names[p]) for p in extents["part"][mine]]
            assert dict(zip(named, extents["length"][mine].tolist(), strict=True)) == parts


class Requests:
    """Stands for the native batch: one range."""

    def __init__(self, path, offset, length):
        self.count, self._path = 1, path
        self.offsets, self.lengths = np.array([offset]), np.array([length])
        self.data = bytearray(b"\xff" * length)
        self.done = None

    def path(self, _):
        return self._path

    def dest(self, _):
        return memoryview(self.data)

    def open(self, _):
        return self.done is None

    def finish(self, _, nbytes, errno=0):
        self.done = (nbytes, errno)


@pytest.fixture(scope="module")
def volume(odd):
    """The bytes of a share's volume, made by hand, and what reads it from the source."""
    with hr.open(odd) as store:
        share = plan_share(store, 11, 97)
        fd = os.memfd_create("directory")
        write_share_directory(share, fd)
        directory = _native.Directory.from_fd(fd, "planned")
        os.close(fd)
        data = bytearray(share.volume_bytes)
        extents = directory.extents_of(np.arange(share.samples, dtype=np.int64))
        at = [e for i in range(11, 97) for e in store.segment_of(i).extents(i)]
        for k, extent in enumerate(at):
            offset = int(extents["offset"][k])
            data[offset : offset + extent.length] = read_extent(
                store.segment_of(extent.index), extent
            )
    reads = SourceReads(lambda: hr.open(odd), {"v": SharePart(directory, 11)})
    yield bytes(data), reads, directory
    reads.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_of_a_share_can_be_made_from_the_source(volume, data):
    whole, reads, directory = volume
    begin = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.integers(1, min(9000, len(whole) - begin)))
    first, last = _samples_of(directory, begin, begin + length)
    assert 0 <= first <= last <= directory.samples
    requests = Requests(b"v", begin, length)
    reads.read(requests)
    assert until(lambda: requests.done is not None, 20)
    assert requests.done == (length, 0)
    assert bytes(requests.data) == whole[begin : begin + length]


def test_a_process_forked_while_a_directory_is_fetched_does_not_hold_up_others(odd, tmp_path):
    """Torch's workers are forked at any time; others on the node wait for the lock without an end."""
    with (
        hr.open(odd) as store,
        Directories(tmp_path, "s") as directories,
        contextlib.ExitStack() as stack,
    ):
        entry = store.segments[0].entry

        def fetch(fd):
            write_all(fd, (odd / entry.directory).read_bytes(), 0)
            stack.enter_context(forked())

        assert directories.open(entry, fetch).samples == 70
        lock = lock_path(directories.folder / f"{entry.uuid}.lock")
        assert lock is not None
        os.close(lock)

"""The loader under faults: one clear error, or correct work. Each test sees that its fault happened."""

import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import CorruptSample, CorruptStore, SourceChanged, VolumeError, VolumeTimeout
from headrace.insight.epoch_proof import verify_epochs
from headrace.order import Shuffled, Weighted
from headrace.order.hash import position_hashes
from headrace.trace import flush, read_run

from .conftest import SAMPLES, content


@pytest.fixture
def copy(packed, tmp_path):
    return Path(shutil.copytree(packed, tmp_path / "copy.hr"))


def volume_of(store: Path) -> Path:
    (volume,) = store.glob("*.hrv")
    return volume


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 0x10]))
    assert path.read_bytes()[offset] != old[0]


def check_all(batches) -> None:
    for batch in batches:
        for i, index in enumerate(batch.indices):
            assert bytes(batch[i]) == content(int(index))


def extent_of(store_path: Path, index: int) -> tuple[int, int]:
    with hr.open(store_path) as store:
        rows = store.segments[0].directory.extents_of(np.array([index]))
    return int(rows["offset"][0]), int(rows["length"][0])


@pytest.mark.parametrize(
    "options", [{}, {"direct": "always"}, {"engine": "threads"}, {"engine": "mmap"}]
)
@pytest.mark.parametrize("order", ["shuffled", "blocked"])
def test_a_flipped_bit_is_never_delivered(copy, order, options):
    offset, length = extent_of(copy, 123)
    flip_byte(volume_of(copy), offset + length // 2)
    with hr.open(copy) as store:
        with pytest.raises(
            CorruptSample, match=r"sample 123 .*checksum \w{8}, expected \w{8}"
        ) as e:
            list(hr.loader(store, 32, order=order, seed=1, **options))
        assert e.value.index == 123
        assert e.value.path == str(volume_of(copy))
        assert e.value.offset_bytes == offset
        loader = hr.loader(store, 32, order=order, seed=1, on_error="skip", **options)
        seen = []
        for batch in loader:
            seen += batch.indices.tolist()
            for i, index in enumerate(batch.indices):
                assert bytes(batch[i]) == content(int(index))
        assert sorted(seen) == [i for i in range(SAMPLES) if i != 123]
        assert [(s.index, s.name) for s in loader.skipped] == [(123, "00123")]
        assert loader.stats.batches == len(loader)


def test_an_epoch_that_lost_a_sample_is_not_proved(copy, tmp_path):
    offset, length = extent_of(copy, 123)
    order = Shuffled(SAMPLES, seed=1)
    whole = position_hashes(0, order.indices(0, 0, SAMPLES))
    flip_byte(volume_of(copy), offset + length // 2)
    with hr.open(copy) as store:
        loader = hr.loader(store, 32, seed=1, on_error="skip", trace=tmp_path / "run")
        assert sum(map(len, loader)) == SAMPLES - 1
        flush()
    proof = verify_epochs(read_run(tmp_path / "run"))
    (epoch,) = proof.loaders[0].epochs
    (finding,) = epoch.findings
    at = int(np.flatnonzero(order.indices(0, 0, SAMPLES) == 123)[0])
    assert (finding.kind, finding.positions, epoch.left_out) == ("left out", (at, at + 1), 1)
    assert "sample 123" in finding.where
    assert "checksum" in finding.where
    assert epoch.order_hash == int(np.delete(whole, at).sum(dtype=np.uint64))
    assert not proof.holds


def test_without_verification_the_flipped_bit_arrives(copy):
    """That the campaign above can fail: the check is what finds the damage."""
    offset, _ = extent_of(copy, 123)
    flip_byte(volume_of(copy), offset + 9)
    with hr.open(copy) as store:
        wrong = 0
        for batch in hr.loader(store, 32, verify=False):
            wrong += sum(bytes(batch[i]) != content(int(k)) for i, k in enumerate(batch.indices))
    assert wrong == 1


def test_random_damage_is_always_found(copy):
    """1 to 64 flipped bits at random places of samples: injected = detected, no false alarm."""
    random = np.random.default_rng(5)
    volume = volume_of(copy)
    clean = volume.read_bytes()
    with hr.open(copy) as store:
        rows = store.segments[0].directory.extents_of(np.arange(SAMPLES))
    detected = 0
    for _ in range(60):
        damaged = bytearray(clean)
        hit = set()
        for _ in range(int(random.integers(1, 65))):
            at = int(random.integers(4096, int((rows["offset"] + rows["length"]).max())))
            damaged[at] ^= 1 << int(random.integers(8))
        changed = np.flatnonzero(np.frombuffer(damaged, np.uint8) != np.frombuffer(clean, np.uint8))
        for at in changed:
            hit |= set(
                np.flatnonzero((rows["offset"] <= at) & (at < rows["offset"] + rows["length"]))
            )
        volume.write_bytes(damaged)
        with hr.open(copy) as store:
            loader = hr.loader(store, 64, on_error="skip")
            for _ in loader:
                pass
            assert {s.index for s in loader.skipped} == hit
            detected += len(hit)
    assert detected > 500


def test_a_truncated_volume_is_refused_at_open(copy):
    volume = volume_of(copy)
    os.truncate(volume, volume.stat().st_size - 4096)
    with pytest.raises(CorruptStore, match="bytes"):
        hr.open(copy)


@pytest.mark.parametrize("engine", ["auto", "mmap", "threads"])
def test_a_volume_truncated_while_it_is_read_is_an_error_not_a_crash(copy, engine):
    volume = volume_of(copy)
    with hr.open(copy) as store:
        loader = hr.loader(store, 16, engine=engine)
        iterator = iter(loader)
        next(iterator)
        os.truncate(volume, 8192)
        # What was read ahead may still come; the epoch cannot end well.
        with pytest.raises((CorruptSample, SourceChanged, VolumeError), match="sample"):
            check_all([*iterator, *loader])


def test_a_vanished_and_a_changed_file_are_named(photos, tmp_path):
    folder = Path(shutil.copytree(photos[0], tmp_path / "copy"))
    with hr.open(folder) as store:
        gone, grown = store.names[11], store.names[200]
        (folder / gone).unlink()
        with (folder / grown).open("ab") as file:
            file.write(b"more")
        loader = hr.loader(store, 32, on_error="skip")
        for batch in loader:
            for i, index in enumerate(batch.indices):
                assert bytes(batch[i]) == photos[1][store.names[int(index)]]
        assert sorted(s.name for s in loader.skipped) == sorted([gone, grown])
        with pytest.raises(SourceChanged, match="index"):
            list(hr.loader(store, 32))


def test_a_file_replaced_by_a_fifo_does_not_hang(photos, tmp_path):
    folder = Path(shutil.copytree(photos[0], tmp_path / "copy"))
    with hr.open(folder) as store:
        name = store.names[5]
        (folder / name).unlink()
        os.mkfifo(folder / name)
        loader = hr.loader(store, 32, on_error="skip")
        for _ in loader:
            pass
        assert [s.name for s in loader.skipped] == [name]


def run_python(code: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip


READ_ALL = """
    import sys, headrace as hr
    with hr.open(sys.argv[1]) as store:
        loader = hr.loader(store, 32, direct="always")
        print(sum(len(b) for b in loader), *loader._reader.engine, sep="|")
"""


def test_sixty_four_descriptors_are_enough(photos, packed):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    for path in (photos[0], packed):
        result = run_python(READ_ALL, path, preexec_fn=limit)
        assert result.stdout.startswith(f"{SAMPLES}|"), result.stderr


def test_many_volumes_and_few_descriptors(tmp_path):
    """More tar shards than descriptors: each read opens its shard and closes it again."""
    import io
    import tarfile

    for shard in range(80):
        with tarfile.open(tmp_path / f"{shard:03d}.tar", "w") as tar:
            for i in range(3):
                info = tarfile.TarInfo(f"{shard:03d}-{i}.bin")
                info.size = 1000 + i
                tar.addfile(info, io.BytesIO(bytes([shard]) * info.size))
    hr.index(str(tmp_path / "*.tar"), tmp_path / "shards.hr")
    code = """
        import sys, resource, headrace as hr
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with hr.open(sys.argv[1]) as store:
            seen = 0
            for batch in hr.loader(store, 16):
                for i, index in enumerate(batch.indices):
                    shard = int(store.names[int(index)].split("-")[0])
                    assert bytes(batch[i]) == bytes([shard]) * len(batch[i])
                    seen += 1
            print(seen, store.catalog.open_per_read)
    """
    result = run_python(code, tmp_path / "shards.hr")
    assert result.stdout.split() == ["240", "True"], result.stderr


@pytest.mark.parametrize("errno_name", ["EPERM", "ENOSYS"])
def test_io_uring_forbidden_by_seccomp_falls_back_and_says_why(packed, errno_name):
    code = """
        import ctypes, errno, struct, sys
        # A BPF filter that answers io_uring_setup (425) with an errno and allows the rest.
        number = getattr(errno, sys.argv[2])
        program = b"".join([
            struct.pack("HBBI", 0x20, 0, 0, 0),            # load the system call's number
            struct.pack("HBBI", 0x15, 0, 1, 425),          # is it io_uring_setup?
            struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | number),
            struct.pack("HBBI", 0x06, 0, 0, 0x7fff0000),
        ])
        buffer = ctypes.create_string_buffer(program)
        class Filter(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        chain = Filter(4, ctypes.addressof(buffer))
        assert libc.prctl(22, 2, ctypes.byref(chain)) == 0
        assert libc.syscall(425, 4, 0) == -1 and ctypes.get_errno() == number
    """
    result = run_python(textwrap.dedent(code) + textwrap.dedent(READ_ALL), packed, errno_name)
    count, engine, reason = result.stdout.strip().split("|")
    assert (count, engine) == (str(SAMPLES), "threads"), result.stderr
    assert "io_uring" in reason


def test_a_batch_that_misses_its_deadline_says_what_it_waits_for(photos):
    """Opening 50,000 files on one thread takes hundreds of times the millisecond it is given."""
    draws = 50_000
    with hr.open(photos[0]) as store:
        order = Weighted(np.ones(SAMPLES), epoch_length=draws)
        options = {"deadline_s": 0.001, "engine": "threads", "threads": 1, "workers": 1}
        loader = hr.loader(store, draws, order=order, **options)
        with pytest.raises(
            VolumeTimeout, match=r"50000 samples .*0.001 s: it waits for \w"
        ) as caught:
            next(iter(loader))
        assert caught.value.next_step
        loader.close()

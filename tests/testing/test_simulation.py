"""Simulated storage: what is delivered stays right, delays are the model's, and labels say so.

Delays are compared in the model's own account, never by the clock.
"""

import io
import math
import os
import pickle

import pytest

import headrace as hr
from headrace.config import reader_options
from headrace.errors import VolumeError
from headrace.io import simulation_of
from headrace.testing import PRESETS, Simulation, SlowVolume, simulated_files

QUICK = Simulation(name="quick", latency_s=1e-4, open_s=1e-4, bandwidth_bytes_per_s=1e9)


@pytest.fixture
def folder(tmp_path):
    for i in range(60):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{i:03}.bin").write_bytes(bytes([i]) * 5000)
    return tmp_path / "files"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_the_median_and_p99_they_name(name):
    preset = PRESETS[name]
    model = preset.model()
    apart_ns = 10**12  # each request finds the storage idle
    took = sorted(model.admit(i * apart_ns, 0)[0] - i * apart_ns for i in range(20_000))
    assert took[10_000] / 1e9 == pytest.approx(preset.latency_s, rel=0.05)
    assert took[19_800] / 1e9 == pytest.approx(preset.latency_p99_s, rel=0.15)
    assert model.label == f"simulated {name}"


def test_a_seed_repeats_its_latencies_and_another_does_not():
    def delays(given):
        model = simulation_of(given).model()
        return [model.admit(10**12 * i, 100)[0] for i in range(50)]

    assert delays("lustre@7") == delays("lustre@7") != delays("lustre@8")
    for wrong in ("tape", "lustre@x", ""):
        with pytest.raises(ValueError, match="expected one of"):
            simulation_of(wrong)
    with pytest.raises(ValueError, match="error_rate"):
        Simulation(error_rate=2)


def test_a_loader_reads_a_simulated_store_and_says_so(folder, tmp_path):
    hr.pack(folder, tmp_path / "packed")
    slow = SlowVolume(QUICK)
    loader = hr.loader(tmp_path / "packed", batch_size=7, seed=1, simulate=slow)
    seen = {int(i): bytes(s) for b in loader for i, s in zip(b.indices, b, strict=True)}
    assert len(seen) == 60
    assert loader.stats.cached_reads == 0
    assert loader.reader.engine[0].startswith("simulated quick over ")
    assert slow.label == "simulated quick"
    stats = loader.reader.native_stats()
    assert slow.stats()["requests"] == stats["reads"] > 0
    # Nothing comes before the model says so: 100 us lie in bucket 13 (90.5 to 128 us).
    assert sum(stats["latency_us"][:13]) == 0
    loader.close()


def test_the_environment_can_ask_for_a_simulation(folder):
    options, origins = reader_options({}, {"HEADRACE_SIMULATE": "nfs"})
    assert (options.simulate, origins["simulate"]) == ("nfs", "environment")
    loader = hr.loader(hr.open(folder), batch_size=60, simulate="nfs")
    assert len(next(iter(loader))) == 60
    assert loader.reader.engine[0].startswith("simulated nfs over ")
    loader.close()
    with pytest.raises(ValueError, match="simulate is 'tape'"):
        next(iter(hr.loader(hr.open(folder), batch_size=2, simulate="tape")))


def test_simulated_errors_are_reported_with_their_sample(folder, tmp_path):
    hr.pack(folder, tmp_path / "packed")
    slow = SlowVolume(Simulation(error_rate=1))
    loader = hr.loader(tmp_path / "packed", batch_size=5, simulate=slow)
    with pytest.raises(VolumeError, match="Input/output error"):
        next(iter(loader))
    assert slow.stats()["errors"] > 1  # tried again
    loader.close()


def test_plain_python_feels_the_storage_below_the_roots_only(folder, tmp_path):
    (tmp_path / "outside").write_bytes(b"fast")
    before = (open, io.open, os.open, os.read)
    with simulated_files(QUICK, folder) as slow:
        assert (tmp_path / "outside").read_bytes() == b"fast"
        assert slow.stats()["requests"] == 0
        assert (folder / "003.bin").read_bytes() == bytes([3]) * 5000
        assert slow.stats()["bytes"] == 5000
        assert slow.stats()["requests"] >= 2  # open and read
        assert (folder / "065.bin").exists() is False
        with (folder / "new").open("w") as file:  # writing is not simulated
            file.write("zeile\nline\n")
        with (folder / "new").open(encoding="utf-8") as file:
            assert file.mode == "r"
            assert list(file) == ["zeile\n", "line\n"]
        fd = os.open(folder / "004.bin", os.O_RDONLY)
        asked = slow.stats()["requests"]
        assert os.read(fd, 100) == bytes([4]) * 100
        assert slow.stats()["requests"] == asked + 1
        os.close(fd)
        with pytest.raises(FileNotFoundError):
            (folder / "missing").read_bytes()
    assert (open, io.open, os.open, os.read) == before
    asked = slow.stats()["requests"]
    (folder / "003.bin").read_bytes()
    assert slow.stats()["requests"] == asked
    with pytest.raises(ValueError, match="roots is empty"), simulated_files(QUICK):
        pass


def test_a_large_file_is_paid_for_in_requests(tmp_path):
    data = os.urandom((5 << 20) // 2)
    (tmp_path / "large").write_bytes(data)
    with simulated_files(QUICK, tmp_path) as slow:
        assert (tmp_path / "large").read_bytes() == data
        assert slow.stats()["requests"] >= 1 + 3
        assert slow.stats()["bytes"] == len(data)
        assert slow.stats()["delay_s"] >= 0.999 * (4 * 1e-4 + len(data) / 1e9)


def test_errors_of_the_storage_reach_plain_readers(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 10)
    with (
        simulated_files(Simulation(error_rate=1), tmp_path) as slow,
        pytest.raises(OSError, match="simulated slow"),
    ):
        (tmp_path / "file").read_bytes()
    assert slow.stats()["errors"] == 1


def test_forked_children_queue_for_the_same_storage_and_see_its_steps(tmp_path):
    slow = SlowVolume(Simulation(latency_s=0.001, parallelism=1))
    child = os.fork()
    if child == 0:
        slow.model.admit(0, 0)
        slow.scale_latency(5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert slow.stats()["requests"] == 1
    assert slow.model.admit(0, 0)[0] == pytest.approx(1e6 + 5e6)  # after the child's, and slower
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(slow)


def test_steps_change_latencies_when_they_say(tmp_path):
    model = Simulation(latency_s=0.01, steps=((10.0, 4.0),)).model()
    now = model.now_ns()
    assert model.latency_factor(now) == 1
    assert math.isclose(model.latency_factor(now + 11 * 10**9), 4)

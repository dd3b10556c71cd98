"""`headrace bench storage`: every figure is there, nothing is left behind, and advice follows from figures."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from headrace.bench.storage import Cell, StorageOptions, advice_of, characterise
from headrace.cli.app import app
from headrace.errors import BenchError, VolumeError
from headrace.machine.host import CpuTimes

SMALL = StorageOptions(size_bytes=8 << 20, seconds=0.002, files=70)


@pytest.fixture
def others(monkeypatch):
    """Sets how many processors other programs seem to have."""

    def have(cpus):
        times = CpuTimes(0.0, 0.0, 0.0)
        readings = iter((times, times._replace(at_s=1.0, busy_s=cpus)))
        monkeypatch.setattr("headrace.bench.storage.cpu_times", lambda: next(readings))

    return have


def test_beside_other_programs_there_is_no_advice(tmp_path, others):
    others(0.3 * os.cpu_count())
    assert characterise(str(tmp_path), SMALL)["advice"] == []


def test_cached_metadata_is_asked_for_once_before_it_is_measured(tmp_path, monkeypatch):
    """Whichever came first after `create` seemed slower: `stat`, than `open` and `close`."""
    asked, stat = [], os.stat

    def noted(path, **more):
        asked.append(str(path))
        return stat(path, **more)

    monkeypatch.setattr("headrace.bench.storage.os.stat", noted)
    characterise(str(tmp_path), SMALL)
    of_files = [path for path in asked if path.endswith("metadata/000000")]
    assert len(of_files) == 2


def test_a_mount_is_characterised_and_left_as_it_was(tmp_path, others):
    others(0.0)
    (tmp_path / "mine").write_bytes(b"x")
    document = characterise(str(tmp_path), SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    sequential = document["sequential"]
    assert set(sequential["write_bytes_per_s"]) == {"1", "4"}
    # With as many reads in flight as at random: with fewer, random reads were the faster ones.
    assert set(sequential["read_bytes_per_s"]) == {"1", "4", "16", "64"}
    assert all(rate > 0 for rates in sequential.values() for rate in rates.values())
    assert {(c["block_bytes"], c["depth"]) for c in document["random"]} == {
        (block, depth) for block in (4096, 65536, 1 << 20) for depth in (1, 4, 16, 64)
    }
    assert all(cell["per_s"] > 0 for cell in document["random"])
    for name in ("packed", "files"):
        assert document["batches"][name]["per_s"] > 0
        assert {"p50", "p99", "max"} <= set(document["batches"][name]["batch_s"])
    assert set(document["metadata_per_s"]) == {"create", "rename", "unlink"}
    assert set(document["cached_metadata_per_s"]) == {"stat", "open", "list"}
    for times in (document["latency_s"], document["sync_s"]):
        assert 0 < times["p50"] <= times["p99"] <= times["p99.9"] <= times["max"]
    assert [each["about"] for each in document["advice"]] == ["packing", "depth", "block size"]
    assert document["provenance"]["mount"]["type"]
    json.dumps(document)


def test_the_command_prints_figures_or_json(tmp_path, others):
    given = [
        "bench",
        "storage",
        str(tmp_path),
        "--size",
        "8M",
        "--seconds",
        "0.002",
        "--files",
        "70",
    ]
    others(0.0)
    ended = CliRunner().invoke(app, given)
    assert ended.exit_code == 0, ended.output
    for message in (
        "one run: each line was measured once, for about 0.002 s; the next run, or a greater --seconds, ",
        "sequential write",
        "sequential 1 MiB",
        "random 64 KiB",
        "samples, packed",
        "16 reads in flight; 2 batches of 64: ",  # its 70 files
        "of this client's memory, not of the storage",
        "advice: depth",
        f"of {os.cpu_count()} processors meanwhile",
    ):
        assert message in ended.output
    others(0.0)
    ended = CliRunner().invoke(app, [*given, "--json"])
    assert json.loads(ended.stdout)["path"] == str(tmp_path)


def test_a_measurement_that_is_ended_leaves_nothing(tmp_path):
    program = (
        "from headrace.bench.storage import *; "
        f"characterise({str(tmp_path)!r}, StorageOptions(size_bytes=8 << 20, seconds=30))"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        until = time.monotonic() + 30
        while not list(tmp_path.glob(".headrace-storage-*/large")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_measured_is_named(tmp_path, monkeypatch):
    with pytest.raises(BenchError, match="nowhere is no folder"):
        characterise(str(tmp_path / "nowhere"), SMALL)
    monkeypatch.setattr("headrace.store.publish.free_bytes", lambda _: 100)
    with pytest.raises(VolumeError, match="100 bytes are free"):
        characterise(str(tmp_path), SMALL)
    assert not list(tmp_path.iterdir())
    for wrong in ({"size_bytes": 1}, {"seconds": 0}, {"files": 0}):
        with pytest.raises(ValueError, match="expected"):
            StorageOptions(**wrong)


def cells(*rows):
    return [Cell(*row) for row in rows]


def test_advice_is_the_least_that_is_enough():
    figures = cells(
        (4096, 1, 10e6), (4096, 16, 95e6), (4096, 64, 100e6),
        (65536, 1, 50e6), (65536, 16, 960e6), (65536, 64, 955e6),
        (1 << 20, 1, 1000e6), (1 << 20, 16, 900e6), (1 << 20, 64, 900e6),
    )  # fmt: skip
    packing, depth, block = advice_of(
        figures, sample_bytes=1000, packed_per_s=300.0, files_per_s=100.0
    )
    assert packing.value is True
    assert "3.0 x" in packing.why
    assert depth.value == 16
    assert "1 for 1 MiB" in depth.why
    assert block.value == 65536
    for packed_per_s, pays, said in (
        (60.0, False, "slower"), (100.0, False, "changes little"), (127.0, True, "1.3 x"),
    ):  # fmt: skip
        packing, *_ = advice_of(
            figures, sample_bytes=1000, packed_per_s=packed_per_s, files_per_s=100.0
        )
        assert packing.value is pays
        assert said in packing.why


def test_a_depth_that_was_not_passed_is_told():
    _, depth, _ = advice_of(
        cells((4096, 1, 1e6), (4096, 64, 9e6)), sample_bytes=1, packed_per_s=1.0, files_per_s=1.0
    )
    assert depth.value == 64
    assert "more were not tried" in depth.why
    assert "reads_in_flight=64 of hr.loader sets it by hand" in depth.why

"""`benchmarks.bench`: what it runs works, and its verdicts follow from what was seen. No time is asserted."""

import numpy as np
import pytest
from benchmarks.bench_parts import generation, own, peer

from benchmarks import bench


def test_headraces_side_generates_reads_and_emulates(tmp_path):
    folder = tmp_path / "data"
    made = own.call("generate", folder, "npz", 120, 100_000, 1)
    files = sorted((folder / "train").iterdir())
    assert made["bytes"] == sum(f.stat().st_size for f in files)
    assert np.load(files[7])["x"].shape == (316, 316, 1)
    read = own.call("read", folder, "npz", 120, 50, 1, 3)
    assert read["steps"] == [2, 2, 2]
    assert len(read["epochs_s"]) == 3
    assert read["bytes"] == 3 * 100 * files[0].stat().st_size
    null = own.call("null", "resnet50_h100", 0.1)
    assert 0 < null["au_percent"] <= 100
    assert null["late_max_s"] >= null["late_p99_s"] >= 0
    assert null["steps"] == 10


def test_fio_and_headrace_write_as_many_bytes(tmp_path):
    if generation.shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    case = generation.Case("jpeg", "jpeg", 30, 300_000)
    seen = generation.one_round(tmp_path / "round", case, None, have_fio=True)
    assert set(seen) == {"headrace", *generation.FIO_MODES}
    for row in seen.values():
        assert row["seconds"] > 0
        assert 0.9 * case.total < row["bytes"] <= case.total
    assert not (tmp_path / "round").exists()


def test_ratios_are_formed_against_the_best_of_each_round():
    rounds = {
        "headrace": [{"x": 10.0}, {"x": 12.0}],
        "one": [{"x": 5.0}, {"x": 2.0}],
        "other": [{"x": 1.0}, {"x": 3.0}],
    }
    assert bench.ratios(rounds, ["one", "other", "absent"], "x") == [2.0, 4.0]
    assert bench.ratios(rounds, ["absent"], "x") == []


def test_verdicts():
    assert bench.at_least("a", [0.7, 0.9, 0.8], 0.8).verdict == "met"
    assert bench.at_least("a", [0.7, 0.9, 0.79], 0.8).verdict == "NOT MET"
    assert bench.at_least("a", [], 0.8).verdict == "open"
    run = {"au_percent": 99.5, "late_p99_s": 0.0004, "late_max_s": 0.01}
    slow = run | {"au_percent": 98.0, "late_p99_s": 0.002}
    met = bench.judge_harness({"unet3d_h100": [run, run, slow]})
    assert [target.verdict for target in met] == ["met", "met"]
    missed = bench.judge_harness({"unet3d_h100": [run, slow, slow]})
    assert [target.verdict for target in missed] == ["NOT MET", "NOT MET"]


def test_one_storage_whose_au_is_wrong_is_enough():
    rows = [{"off_percent": off} for off in (0.2, -0.9, 0.0)]
    assert bench.judge_truth(rows).verdict == "met"
    worse = bench.judge_truth([*rows, {"off_percent": -1.2}])
    assert (worse.verdict, worse.measured) == ("NOT MET", "3 of 4")


def test_only_the_real_dlio_counts():
    speeds = {"headrace": 50.0, "DLIO": 4.0, "DLIO without its debug line": 25.0}
    rounds = {name: [{"samples_per_s": speed}] for name, speed in speeds.items()}
    counted, shown = bench.judge_reading("npz", rounds)
    assert (counted.verdict, counted.measured) == ("met", "12.50 x")
    assert (shown.verdict, shown.measured) == ("open", "2.00 x")
    alone = bench.judge_reading("npz", {"headrace": rounds["headrace"]})
    assert [target.verdict for target in alone] == ["open"]


def test_jpeg_is_judged_beside_dlio_alone():
    rates = {"headrace": 1.0, "fio direct": 2.0, "DLIO": 0.1}
    rounds = {who: [{"gb_per_s": rate}] for who, rate in rates.items()}
    names = [t.name for t in bench.judge_generation({"npz, 1": rounds, "jpeg, 1": rounds})]
    assert names == [
        "generate npz, 1: over fio", "generate npz, 1: over DLIO's", "generate jpeg, 1: over DLIO's",
    ]  # fmt: skip


def test_a_peer_that_cannot_be_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(peer.sys, "executable", "/nowhere/python")
    with pytest.raises(peer.PeerError, match="/nowhere/python"):
        peer.ensure(tmp_path / "venv", tmp_path)

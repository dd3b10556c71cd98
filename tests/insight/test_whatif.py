"""`headrace whatif`: the model's limits are those of arithmetic, and it is told what it may believe."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import RecordError
from headrace.insight.doctor import diagnose
from headrace.insight.whatif import (
    STORAGES,
    JobFigures,
    Scenario,
    Storage,
    check_of,
    figures_of,
    predict,
    recorded_storage,
    storage_of,
)
from headrace.io.simulation import Simulation
from headrace.trace.recorded import Recorded

from .doctor.findings_shared import findings, point

LATENCY_S = 0.004


def _storage(shared="none", **figures):
    return Storage(name="test", figures=Simulation(**figures), shared=shared)


def _job(**changed):
    figures = {
        "sample_bytes": np.full(64, 100_000), "opens": False, "batch": 8, "workers": 2,
        "processors": 4, "compute_s": np.array([0.010]),
    }  # fmt: skip
    return JobFigures(**(figures | changed))


def _on(storage, job=None, **changed):
    job = job or _job()
    values = {
        "storage": storage, "nodes": 1, "batch": job.batch, "workers": job.workers, "gpu_speed": 1.0,
        "processors": job.processors,
    }  # fmt: skip
    return predict(job, Scenario(**(values | changed)))


def test_a_fast_storage_leaves_computing_alone():
    found = _on(_storage(latency_s=1e-6))
    assert found.step_s == pytest.approx(0.010, rel=1e-3)
    assert found.stall == pytest.approx(0, abs=1e-3)
    assert found.bound == "compute"


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_share_the_latency(workers):
    """Each reads one sample after the other: a batch takes its samples' latencies."""
    found = _on(_storage(latency_s=LATENCY_S), workers=workers)
    assert found.step_s == pytest.approx(max(0.010, 8 * LATENCY_S / workers), rel=0.03)
    assert found.stall == pytest.approx(max(0.0, 1 - 0.010 / found.step_s), abs=0.02)


def test_without_workers_nothing_overlaps():
    found = _on(_storage(latency_s=LATENCY_S), workers=0)
    assert found.step_s == pytest.approx(0.010 + 8 * LATENCY_S, rel=0.01)


def test_workers_that_decode_most_of_their_time_are_not_told_that_reads_are_slow():
    job = _job(decode_s=np.array([0.013]))
    assert _on(_storage(latency_s=LATENCY_S), job, processors=4).bound == "workers"
    assert _on(_storage(latency_s=LATENCY_S), job, processors=2, workers=8).bound == "processors"
    assert _on(_storage(latency_s=10 * LATENCY_S), job, processors=4).bound == "latency"


def test_opens_cost_their_own():
    found = _on(_storage(latency_s=LATENCY_S, open_s=0.002), _job(opens=True), workers=1)
    assert found.step_s == pytest.approx(8 * (LATENCY_S + 0.002), rel=0.01)


def test_the_link_is_the_limit_where_it_is_full():
    found = _on(_storage(bandwidth_bytes_per_s=20e6), workers=8)
    assert found.step_s == pytest.approx(8 * 100_000 / 20e6, rel=0.02)
    assert found.bound == "link"


def test_requests_that_are_served_one_by_one():
    found = _on(_storage(latency_s=LATENCY_S, parallelism=1), workers=8)
    assert found.step_s == pytest.approx(8 * LATENCY_S, rel=0.02)
    assert found.bound == "servers"


def test_large_samples_are_read_in_requests_that_others_come_between():
    """64 MiB in 64 requests of a latency each: two at a time are no slower than one."""
    job = _job(sample_bytes=np.full(8, 64 << 20), batch=1, compute_s=np.array([1e-4]))
    one = _on(_storage(latency_s=0.001, parallelism=4), job, workers=1)
    assert one.step_s == pytest.approx(0.064, rel=0.02)
    two = _on(_storage(latency_s=0.001, parallelism=4), job, workers=2)
    assert two.step_s == pytest.approx(0.032, rel=0.1)


def test_decoding_needs_processors():
    job = _job(decode_s=np.array([0.005]))
    found = _on(_storage(latency_s=1e-6), job, workers=8, processors=2)
    assert found.step_s == pytest.approx(8 * 0.005 / 2, rel=0.03)
    assert found.bound == "processors"
    assert _on(_storage(latency_s=1e-6), job, workers=8, processors=8).stall < 0.01


@pytest.mark.parametrize(("shared", "factor"), [("none", 1), ("all", 4)])
def test_nodes_share_what_is_shared(shared, factor):
    one = _on(_storage(shared, bandwidth_bytes_per_s=20e6))
    four = _on(_storage(shared, bandwidth_bytes_per_s=20e6), nodes=4)
    assert four.step_s == pytest.approx(factor * one.step_s, rel=0.05)


def test_a_thousand_nodes_share_a_link():
    many = _on(_storage("all", bandwidth_bytes_per_s=1e9, latency_s=0.001), nodes=1000)
    assert many.step_s == pytest.approx(1000 * 8 * 100_000 / 1e9, rel=0.02)
    assert many.samples_per_s == pytest.approx(1e9 / 100_000, rel=0.02)
    assert many.bound == "link"


def test_memory_does_not_grow_with_nodes(monkeypatch):
    """What two million processes would draw does not fit into a machine; neither need it."""
    few = _on(_storage(latency_s=LATENCY_S), nodes=1000)
    monkeypatch.setattr("headrace.insight.whatif._CELLS_MOST", 1 << 16)  # as if memory were scarce
    assert _on(_storage(latency_s=LATENCY_S), nodes=1000).step_s == pytest.approx(
        few.step_s, rel=0.05
    )
    tracemalloc.start()
    many = _on(_storage(latency_s=LATENCY_S), nodes=1_000_000)
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()
    assert many.step_s == pytest.approx(few.step_s, rel=0.1)


def test_a_faster_accelerator_computes_less_and_waits_more():
    slow, fast = (_on(_storage(latency_s=LATENCY_S), gpu_speed=speed) for speed in (0.25, 2.0))
    assert slow.step_s == pytest.approx(0.040, rel=0.01)
    assert fast.step_s == pytest.approx(0.016, rel=0.03)
    assert fast.stall > slow.stall


def test_a_batch_of_twice_the_samples_computes_twice_as_long():
    found = _on(_storage(latency_s=1e-6), batch=16)
    assert found.step_s == pytest.approx(0.020, rel=0.01)
    assert "grow with the batch" in found.notes[-1]


def test_headraces_reader_hides_latency():
    slow = _on(_storage(latency_s=LATENCY_S))
    quick = _on(_storage(latency_s=LATENCY_S), loader="headrace", reads_in_flight=16)
    assert slow.stall > 0.3
    assert quick.stall < 0.01


def test_headraces_batch_waits_for_the_last_of_its_reads():
    """All eight are in flight at once: a batch takes as long as the longest of them."""
    tail = _storage(latency_s=0.002, latency_p99_s=0.05)
    job = _job(compute_s=np.array([1e-6]))
    ahead = {"loader": "headrace", "reads_in_flight": 64, "ahead": 1}
    longest = np.exp(np.log(25) / 2.326 * np.random.default_rng(0).standard_normal((9999, 8)))
    expected = 0.002 * longest.max(axis=1).mean()
    assert _on(tail, job, **ahead).step_s == pytest.approx(expected, rel=0.1)


def test_a_tail_hurts_more_with_more_processes():
    """All begin a step together: it takes as long as the slowest."""
    storage = _storage(latency_s=0.002, latency_p99_s=0.05)
    assert _on(storage, nodes=8).step_s > 1.1 * _on(storage).step_s


def test_the_same_seed_gives_the_same():
    job = _job(decode_s=np.array([0.001, 0.002]), compute_s=np.array([0.01, 0.03]))
    scenario = Scenario(
        storage=STORAGES["lustre"], nodes=2, batch=8, workers=2, gpu_speed=1, processors=2
    )
    one, two = (predict(job, scenario, 5) for _ in range(2))
    assert one == two
    assert one.step_s != predict(job, scenario, 6).step_s
    assert one.step_s >= 0.02


# Measured (benchmarks/results/whatif-2026-11-22.json): files of 90 kB, 97 ms of computing, on storages eight
# times as slow as their presets. (what was asked, ms a step, share waited)
MEASURED = {
    "lustre": ({}, 138.7, 0.307),
    "lustre, batch 24": ({"batch": 24}, 402.8, 0.285),
    "nfs, accelerator 4x": ({"gpu_speed": 4.0}, 80.8, 0.701),
    "lustre, 1 worker": ({"workers": 1}, 252.5, 0.619),
    "lustre, 4 workers, accelerator 3x": ({"workers": 4, "gpu_speed": 3.0}, 71.0, 0.548),
    "lustre, no workers": ({"workers": 0}, 348.7, 0.724),
    "lustre, 3 nodes": ({"nodes": 3}, 150.2, 0.137),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_the_formula_is_within_ten_percent_of_runs(name):
    asked, milliseconds, stall = MEASURED[name]
    sizes = np.exp(np.random.default_rng(1).normal(np.log(90_000), 0.5, 640)).astype(np.int64)
    job = _job(
        sample_bytes=sizes, opens=True, processors=2, compute_s=np.array([0.0971]), collate_s=0.0003,
        hand_s=0.0008,
    )  # fmt: skip
    step = _on(STORAGES[name.partition(",")[0]].slower(8), job, **asked)
    assert step.step_s == pytest.approx(milliseconds / 1e3, rel=0.1)
    assert step.stall == pytest.approx(stall, abs=0.1)


def _recorded(read_s=0.003, wait_s=0.002):
    count = 40
    return Recorded(
        names=[f"{i:03}" for i in range(count)], file_bytes=np.full(count, 5000),
        file_split=np.zeros(count, np.uint8), sample_file=np.arange(count),
        sample_offset=np.zeros(count, np.int64), sample_bytes=np.full(count, 5000),
        order=np.arange(count), epoch_starts=np.array([0, count]), valid_order=np.zeros(0, np.int64),
        valid_starts=np.array([0]), open_s=np.full(count, 0.001, np.float32),
        read_s=np.full(count, read_s, np.float32), compute_s=np.full(4, 0.018, np.float32),
        wait_s=np.full(4, wait_s, np.float32), decode_s=np.zeros(0, np.float32), batch=10, workers=2,
        processors=2,
    )  # fmt: skip


def test_the_model_is_held_against_the_record():
    recorded = _recorded()
    job = figures_of(recorded)
    check = check_of(job, recorded_storage(recorded))
    assert check is not None
    # Ten samples of 4 ms by two workers: 20 ms a step, as was recorded.
    assert check.predicted_s == pytest.approx(0.020, rel=0.02)
    assert abs(check.error) < 0.02
    assert abs(check.stall_points) < 2
    assert check_of(replace(job, wait_s=np.zeros(0)), recorded_storage(recorded)) is None


def test_reads_that_are_longer_than_any_recorded_take_longer():
    recorded = _recorded()
    storage = recorded_storage(recorded)
    job = _job(sample_bytes=np.full(8, 50_000), compute_s=np.array([1e-4]))
    assert _on(storage, job, workers=1).step_s == pytest.approx(8 * 0.030, rel=0.05)


# -- storages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    from headrace.bench.storage import StorageOptions, characterise

    folder = tmp_path_factory.mktemp("storage")
    options = StorageOptions(size_bytes=8 << 20, seconds=0.01, files=20)
    return characterise(str(folder), options)


def test_a_measured_storage_is_taken(measured, tmp_path):
    path = tmp_path / "scratch.json"
    path.write_text(json.dumps(measured))
    storage = storage_of(str(path))
    assert storage.name == "scratch"
    assert storage.figures.latency_s == measured["latency_s"]["p50"]
    assert 1 <= storage.figures.parallelism <= 4096
    assert _on(storage).step_s >= 0.010 - 1e-9


@pytest.mark.parametrize(
    "change",
    [
        {"latency_s": {}}, {"latency_s": {"p50": "x", "p99": 1}}, {"random": []}, {"random": None},
        {"latency_s": {"p50": float("nan"), "p99": 1}}, {"sequential": 3},
        {"latency_s": {"p50": float("inf"), "p99": 1}}, {"sequential": {"read_bytes_per_s": [1]}},
        {"provenance": [1]},
        {"batches": {"reads_in_flight": 16, "sample_bytes": 1, "files": {"per_s": 0}, "packed": {"per_s": 0}}},
    ],
)  # fmt: skip
def test_documents_that_are_no_measured_storage_are_refused(measured, tmp_path, change):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(measured | change))
    with pytest.raises(RecordError, match="is no measured storage"):
        storage_of(str(path))


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '"x"', "[" * 100_000])
def test_files_that_are_no_documents_are_refused(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(RecordError, match="is no measured storage"):
        storage_of(str(tmp_path / "bad.json"))


def _examined(tmp_path, **changes):
    """A file as `headrace doctor --json` prints it, of 310 whole samples a second one at a time."""
    document = dataclasses.asdict(diagnose(findings(**changes), workers=2))
    path = tmp_path / "there.json"
    path.write_text(json.dumps(document))
    return path


def test_a_storage_that_the_doctor_measured_is_taken(tmp_path):
    storage = storage_of(str(_examined(tmp_path)))
    figures = storage.figures
    assert (storage.name, storage.shared) == ("there", "all")
    assert figures.open_s == pytest.approx(1 / 3000)
    assert figures.parallelism == round(9800 / 310)
    assert figures.bandwidth_bytes_per_s == pytest.approx(11_000 * 110e3)
    # One worker that reads such samples, and nothing else: what the doctor measured comes out.
    job = _job(sample_bytes=np.full(8, 110_000), opens=True, compute_s=np.array([1e-4]))
    assert _on(storage, job, workers=1).samples_per_s == pytest.approx(310, rel=0.1)
    assert _on(storage, job, workers=8).samples_per_s == pytest.approx(8 * 310, rel=0.15)


def test_of_a_store_or_objects_the_doctor_has_no_opens(tmp_path):
    storage = storage_of(str(_examined(tmp_path, opens=None, data={"kind": "object"})))
    assert storage.shared == "servers"
    assert storage.figures.open_s < 1e-4


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"storage": None}, "measured no storage"),
        ({"storage": {"points": ()}}, "measured no storage"),
        ({"storage": {"cold": False}}, "read from memory only"),
        ({"storage": {"points": (replace(point(1, 9.0), per_s=0.0),)}}, "is not above 0"),
    ],
)
def test_a_doctors_word_that_says_nothing_of_a_storage_is_refused(tmp_path, changes, wrong):
    there = findings(**changes)
    path = tmp_path / "there.json"
    path.write_text(json.dumps({"findings": dataclasses.asdict(there)}))
    with pytest.raises(RecordError, match=wrong) as error:
        storage_of(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("document", [{"findings": 3}, {"findings": {}}, {"samples": 7}])
def test_a_foreign_document_is_refused_with_what_makes_a_right_one(tmp_path, document):
    (tmp_path / "other.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match=r"other\.json is no measured storage") as error:
        storage_of(str(tmp_path / "other.json"))
    assert "headrace doctor DATA --json > FILE.json" in error.value.next_step


def test_unknown_storages_are_named():
    with pytest.raises(ValueError, match="expected one of hdd, lustre"):
        storage_of("floppy")
    with pytest.raises(RecordError, match="cannot be read"):
        storage_of("none.json")


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 0},
        {"batch": 0},
        {"workers": -1},
        {"gpu_speed": 0.0},
        {"processors": 0},
        {"loader": "x"},
    ],
)
def test_scenarios_that_make_no_sense(change):
    with pytest.raises(ValueError, match="expected"):
        _on(STORAGES["ssd"], **change)


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def invoke(monkeypatch):
    from typer.testing import CliRunner

    from headrace.cli.app import app

    monkeypatch.setenv("COLUMNS", "80")
    return lambda *words: CliRunner().invoke(app, ["whatif", *map(str, words)])


def test_a_shipped_workload_needs_no_record(invoke):
    done = invoke("unet3d_h100", "--storage", "lustre", "--storage", "ssd", "--nodes", 2)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["lustre", "ssd"]
    assert "no recorded step times" in done.stdout


def _written(folder, recorded):
    recorded.write(folder / "job.requests.npz")
    (folder / "job.yaml").write_text(
        "framework: pytorch\n"
        "dataset: {num_files_train: 40, record_length_bytes: 5000, requests: job.requests.npz}\n"
        "reader: {batch_size: 10, read_threads: 2}\n"
        "train: {computation_time: 0.018}\n"
    )
    return folder / "job.yaml"


def test_a_record_is_told_first_as_it_was(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _written(tmp_path, _recorded())
    done = invoke("job.yaml", "--gpu-speed", "2x")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[3].startswith("as it was")
    assert lines[4].startswith("as recorded")
    assert "2x" in lines[4]
    assert "the model on the record itself" in done.stdout
    assert all(len(line) <= 80 for line in lines)
    document = json.loads(invoke("job.yaml", "--storage", "nfs", "--workers", 8, "--json").stdout)
    assert [p["name"] for p in document["predictions"]] == ["as it was", "nfs"]
    assert document["predictions"][1]["workers"] == 8
    assert abs(document["check"]["error"]) < 0.02


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("unet3d_h100", "--storage", "recorded"), "needs a job"),
        (("unet3d_h100", "--gpu-speed", "fast"), "expected a factor"),
        (("no_such_workload",), "no workload"),
        (("llama_8b_zero3",), "computation_time"),
        (("unet3d_h100", "--loader", "dali"), "expected torch or headrace"),
    ],
)
def test_what_cannot_be_asked(invoke, words, said):
    done = invoke(*words)
    assert done.exit_code == 2
    assert said in done.stderr

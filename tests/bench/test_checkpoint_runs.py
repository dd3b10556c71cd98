"""Checkpoints in runs: alone, in the middle of epochs, by every writer; all workloads that have some."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.base.job import Rank
from headrace.bench.checkpoints import RunCheckpointer
from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.model import ModelSpec
from headrace.bench.ranks import join
from headrace.bench.run import SessionOptions
from headrace.bench.session import run_session
from headrace.errors import BenchError, CheckpointError, VolumeError, WorkloadError

from .test_mlpstorage import TINY

LLAMAS = (
    "llama_7b", "llama_7b_zero3", "llama_8b_zero3", "llama_70b", "llama_70b_zero3", "llama_405b",
    "llama_1t", "llama3_8b", "llama3_70b", "llama3_405b", "llama3_1t",
)  # fmt: skip


@pytest.fixture
def words(tmp_path):
    def make(workload, *overrides):
        return [
            f"workload={workload}", *TINY, f"++hydra.run.dir={tmp_path / 'out'}",
            f"++workload.checkpoint.checkpoint_folder={tmp_path / 'ckpt'}",
            "++workload.checkpoint.time_between_checkpoints=0",
            "++workload.checkpoint.num_checkpoints_write=2",
            "++workload.checkpoint.num_checkpoints_read=2", *overrides,
        ]  # fmt: skip

    return make


def run(given, accelerators=1, **options):
    return run_session(given, SessionOptions(accelerators=accelerators, **options)).summary


def small(workload):
    """Parallelism that 4 accelerators have, of the shape that the workload asks for."""
    model = load_workload(parse_command_line([f"workload={workload}"])).workload.model
    tensor, pipeline = min(2, model.parallelism_tensor), min(2, model.parallelism_pipeline)
    given = [f"tensor={tensor}", f"pipeline={pipeline}"]
    if model.parallelism_data > 0:
        given.append(f"data={4 // (tensor * pipeline)}")
    return [f"++workload.model.parallelism.{each}" for each in given]


@pytest.mark.parametrize("workload", LLAMAS)
def test_llama_workloads_run_scaled_down(words, tmp_path, workload):
    summary = run(words(workload, *small(workload)), 4)
    files = [p for p in (tmp_path / "ckpt").rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files)
    assert {p.parent.name for p in files} == {"global_epoch1_step1", "global_epoch1_step2"}
    metric = summary["metric"]
    assert metric["checkpoint_size_GB"] == size / 2 / 2**30
    for kind in ("save", "load"):
        assert metric[f"{kind}_checkpoint_io_mean_GB_per_second"] > 0
        assert metric[f"{kind}_checkpoint_duration_stdev_seconds"] >= 0
    assert summary["headrace"]["checkpoint"]["writer"] == "fsync"
    stats = json.loads((tmp_path / "out/0_per_epoch_stats.json").read_text())
    assert set(stats["1"]) == {
        "start", "end", "duration", "save_ckpt1", "save_ckpt2", "load_ckpt1", "load_ckpt2"
    }  # fmt: skip


@pytest.mark.parametrize("writer", ["fsync", "direct", "headrace"])
def test_writers_save_what_is_read_back(words, tmp_path, writer):
    given = words("llama_7b_zero3", f"++workload.checkpoint.writer={writer}")
    own = run(given, 2)["headrace"]["checkpoint"]
    assert own["writer"] == writer
    assert own["load_s"]["mean"] > 0
    assert own["blocking_s"]["mean"] <= own["save_s"]["mean"]
    if writer == "headrace":  # writes nothing over
        with pytest.raises(CheckpointError):
            run(given, 2)
        with pytest.raises(BenchError, match="writes none over"):
            run(given, 2, repeats=2)


def test_fsync_reaches_the_disk_and_its_absence_does_not(words, monkeypatch):
    """DLIO has the key, and does not sync."""
    from headrace.store import output_file

    synced = []
    real = output_file.os.fsync
    monkeypatch.setattr(output_file.os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    monkeypatch.setattr(
        output_file.os, "fdatasync", lambda fd: (synced.append(fd), real(fd)), raising=False
    )
    run(words("llama_7b", "++workload.checkpoint.fsync=False"))
    assert not synced
    run(words("llama_7b"))
    assert len(synced) >= 4  # two files of two checkpoints


def test_ones_are_ones(words, tmp_path):
    run(words("llama_7b", "++workload.checkpoint.randomize_tensor=False"))
    file = next((tmp_path / "ckpt").rglob("*model_states.pt"))
    assert set(file.read_bytes()) == {1}


def test_a_subset_writes_its_part_alone(words, tmp_path):
    whole = ["++workload.model.parallelism.data=8"]
    with pytest.raises(WorkloadError, match=r"= 8 accelerators, there are 2.*mode=subset"):
        run(words("llama3_8b", *whole), 2)
    subset = ["++workload.checkpoint.mode=subset"]
    with pytest.raises(WorkloadError, match=r"needs model\.parallelism\.data"):
        run(words("llama_7b", *subset), 2)
    run(words("llama3_8b", *whole, *subset), 2)
    names = {p.name for p in (tmp_path / "ckpt/global_epoch1_step1").iterdir()}
    assert names == {
        f"zero_pp_rank_{rank}_mp_rank_0_{kind}_states.pt"
        for rank in (0, 1) for kind in ("model", "optim")
    }  # fmt: skip


def test_after_the_shift_each_host_reads_what_the_next_one_wrote(words, tmp_path, monkeypatch):
    """Two processes on two hosts, of two accelerators each."""
    loaded = load_workload(parse_command_line(
        words("llama_7b_zero3", "++workload.checkpoint.recovery_rank_shift=True")
    ))  # fmt: skip
    hosts = {}
    monkeypatch.setattr(
        "headrace.bench.checkpoints.this_host",
        lambda: f"host{hosts[threading.current_thread().name]}",
    )
    read, errors = {}, []

    def rank(number):
        hosts[threading.current_thread().name] = number
        try:
            group = join(Rank(number, 2), tmp_path / "meet", 10.0)
            checkpointer = RunCheckpointer(loaded, group, 2)
            checkpointer.save(1, 1)
            group.barrier()
            readers = checkpointer.shifted()
            read[number] = [reader._files for reader in readers]
            assert checkpointer.load(1, 1, 1, readers).nbytes > 0
            group.barrier()
            checkpointer.close()
            group.close()
        except BaseException as e:
            errors.append(e)
            raise

    threads = [threading.Thread(target=rank, args=(n,), name=f"r{n}") for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert [[f[0][0].split("_")[3] for f in read[n]] for n in (0, 1)] == [["2", "3"], ["0", "1"]]


TRAINED = [
    "++workload.dataset.num_files_train=4", "++workload.dataset.num_samples_per_file=20",
    "++workload.dataset.record_length_bytes=512", "++workload.reader.batch_size=4",
    "++workload.train.epochs=1", "++workload.train.computation_time=0.001",
    "++workload.workflow.generate_data=True",
]  # fmt: skip


@pytest.mark.parametrize(
    ("workload", "overrides", "accelerators"),
    [
        ("bert_v100", ["++workload.train.total_training_steps=10", "++workload.model.model_size=9000"],
         1),
        ("megatron_deepspeed_LLNL", ["++workload.model.parallelism.pipeline=2",
         "++workload.model.parallelism.tensor=1", "++workload.model.num_layers=2",
         "++workload.model.layer_parameters=[5258,2097]",
         "++workload.model.optimization_groups=[1009,865,79]"], 2),
    ],
)  # fmt: skip
def test_checkpoints_in_the_middle_of_an_epoch_part_it_into_blocks(
    tmp_path, workload, overrides, accelerators
):
    folder = tmp_path / "ckpt"
    summary = run([
        f"workload={workload}", *TRAINED, f"++workload.dataset.data_folder={tmp_path / 'data'}",
        f"++hydra.run.dir={tmp_path / 'out'}", f"++workload.checkpoint.checkpoint_folder={folder}",
        "++workload.checkpoint.steps_between_checkpoints=4", *overrides,
    ], accelerators)  # fmt: skip
    assert {p.name for p in folder.iterdir()} == {"global_epoch1_step4", "global_epoch1_step8"}
    assert summary["metric"]["save_checkpoint_duration_mean_seconds"] > 0
    output = json.loads((tmp_path / "out/0_output.json").read_text())
    sizes = {name: len(steps) for name, steps in output["1"]["load"].items()}
    assert sizes == {"block1": 4, "block2": 4, "block3": 2}
    stats = json.loads((tmp_path / "out/0_per_epoch_stats.json").read_text())["1"]
    assert stats["block1"]["end"] <= stats["save_ckpt1"]["start"] <= stats["block2"]["start"]
    assert "save_ckpt3" not in stats
    assert len(summary["metric"]["train_au_percentage"]) == 1


def test_cold_reads_come_from_the_disk(words):
    try:
        own = run(words("llama_7b"), cold=True)["headrace"]["checkpoint"]
    except BenchError as e:
        if "page cache" not in str(e):
            raise
        pytest.skip("this file system keeps its pages")
    assert own["page_cache_share_before_loads"] <= 0.02
    warm = run(words("llama_7b"))["headrace"]["checkpoint"]
    assert warm["page_cache_share_before_loads"] > 0.5


def test_a_folder_that_cannot_be_made_is_named(words, tmp_path):
    (tmp_path / "ckpt").write_text("a file")
    with pytest.raises(VolumeError, match="ckpt"):
        run(words("llama_7b"))


def test_the_ceiling_writes_no_checkpoints(tmp_path):
    """It runs the same steps once more, on nothing."""
    folder = tmp_path / "ckpt"
    given = [
        "workload=bert_v100", *TRAINED, f"++workload.dataset.data_folder={tmp_path / 'data'}",
        f"++hydra.run.dir={tmp_path / 'out'}", f"++workload.checkpoint.checkpoint_folder={folder}",
        "++workload.checkpoint.steps_between_checkpoints=9", "++workload.model.model_size=9000",
        "++workload.train.total_training_steps=18", "++workload.checkpoint.writer=headrace",
    ]  # fmt: skip
    own = run(given, ceiling=True)["headrace"]
    assert own["ceiling_au_percent"] > 0
    assert own["checkpoint"]["writer"] == "headrace"
    assert 0 < own["checkpoint"]["blocking_s"]["max"] < own["checkpoint"]["save_s"]["max"]


@pytest.mark.parametrize("writer", ["fsync", "headrace"])
def test_two_processes_write_one_checkpoint(words, tmp_path, writer):
    given = words("llama_7b_zero3", f"++workload.checkpoint.writer={writer}")
    program = "from headrace.cli.dlio import main; main()"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *given], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    whole = sum(
        ModelSpec(load_workload(parse_command_line(given)).workload.model).share(r, 2).nbytes
        for r in range(2)
    )
    assert summary["metric"]["checkpoint_size_GB"] == whole / 2**30
    assert len(list((tmp_path / "out").glob("*_per_epoch_stats.json"))) == 2


def test_a_checkpoint_that_is_cut_short_is_no_result(words, tmp_path):
    run(words("llama_7b", "++workload.checkpoint.num_checkpoints_read=0"))
    (tmp_path / "out/summary.json").unlink()
    cut = next((tmp_path / "ckpt/global_epoch1_step2").iterdir())
    Path(cut).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has 5 bytes") as caught:
        run(words("llama_7b", "++workload.checkpoint.num_checkpoints_write=0"))
    assert cut.name in str(caught.value)
    assert not (tmp_path / "out/summary.json").exists()

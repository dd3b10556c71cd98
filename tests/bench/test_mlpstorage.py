"""`dlio_benchmark` under the command lines that mlpstorage makes, on shrunken data."""

import json
import os
import subprocess
import sys

import pytest
import yaml

# A workload as MLPerf Storage ships it, with the key that DLIO ignores.
UNET = """\
model:
  name: unet3d
  type: cnn
  model_size: 300000
framework: pytorch
workflow:
  generate_data: False
  train: True
  checkpoint: True
dataset:
  data_folder: data/unet3d/
  format: npz
  num_files_train: 28
  num_samples_per_file: 1
  record_length_bytes: 40000
  record_length_bytes_stdev: 8000
  record_length_bytes_resize: 2097152
reader:
  data_loader: pytorch
  batch_size: 7
  read_threads: 4
  file_shuffle: seed
  sample_shuffle: seed
train:
  epochs: 5
  computation_time: 0.01
checkpoint:
  checkpoint_folder: checkpoints/unet3d
  checkpoint_after_epoch: 5
  epochs_between_checkpoints: 2
metric:
  au: 0.90
"""
RUN, GENERATE = (
    f"generate_data: {generate}\n  train: {run}\n  checkpoint: {run}"
    for generate, run in (("False", "True"), ("True", "False"))
)
DATAGEN = UNET.partition("reader:")[0].replace(RUN, GENERATE)


@pytest.fixture
def configs(tmp_path):
    folder = tmp_path / "configs" / "dlio" / "workload"
    folder.mkdir(parents=True)
    (folder / "unet3d_h100.yaml").write_text(UNET)
    (folder / "unet3d_datagen.yaml").write_text(DATAGEN)
    return folder.parent


def dlio_benchmark(*words, cwd, **environ):
    program = [sys.executable, "-c", "from headrace.cli.dlio import main; main()"]
    return subprocess.run(
        [*program, *words], cwd=cwd, check=False, capture_output=True, text=True, timeout=60,
        env=os.environ | environ,
    )  # fmt: skip


def test_datagen_then_run_then_what_is_read_back(configs, tmp_path):
    results = tmp_path / "results/training/unet3d"
    data, checkpoints = tmp_path / "data/unet3d", tmp_path / "checkpoints"
    datagen = dlio_benchmark(
        "workload=unet3d_datagen", f"++hydra.run.dir={results}/datagen/20261122_050000",
        "++hydra.output_subdir=dlio_config", "++workload.dataset.num_files_train=14",
        f"++workload.dataset.data_folder={data}", f"--config-dir={configs}", cwd=tmp_path,
    )  # fmt: skip
    assert datagen.returncode == 0, datagen.stderr
    assert len(list((data / "train").glob("*.npz"))) == 14
    folder = results / "run/20261122_050100"
    run = dlio_benchmark(
        "workload=unet3d_h100", f"++hydra.run.dir={folder}", "++hydra.output_subdir=dlio_config",
        "++workload.dataset.num_files_train=14", f"++workload.dataset.data_folder={data}",
        f"++workload.checkpoint.checkpoint_folder={checkpoints}",
        "++workload.reader.read_threads=2", f"--config-dir={configs}", cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "[METRIC] train_au_meet_expectation: " in run.stdout
    assert "model_size is taken as model.model_size_bytes" in run.stderr
    assert [p.stat().st_size for p in checkpoints.rglob("*.pt")] == [300000]

    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["num_accelerators"], summary["num_hosts"]) == (1, 1)
    assert isinstance(summary["start"], str)
    assert isinstance(summary["host_memory_GB"], list)
    assert isinstance(summary["host_cpu_count"], list)
    assert len(summary["metric"]["train_throughput_samples_per_second"]) == 5
    composed = yaml.safe_load((folder / "dlio_config/config.yaml").read_text())["workload"]
    assert composed["dataset"]["num_files_train"] == 14
    assert composed["reader"]["batch_size"] == 7
    overrides = yaml.safe_load((folder / "dlio_config/overrides.yaml").read_text())
    assert f"++workload.dataset.data_folder={data}" in overrides
    assert all(word.partition("=")[1] for word in overrides)


# A llama model that fits into a test.
TINY = [
    f"++workload.model.{key}"
    for key in (
        "num_layers=2", "transformer.vocab_size=100", "transformer.hidden_size=64",
        "transformer.ffn_hidden_size=128", "transformer.num_attention_heads=4",
        "transformer.num_kv_heads=2",
    )
]  # fmt: skip


def test_checkpointing_writes_then_reads_in_two_runs(tmp_path):
    """As `mlpstorage checkpointing run` calls it, the page cache being dropped between."""

    def run(name, *counts):
        return dlio_benchmark(
            "workload=llama3_8b", f"++hydra.run.dir={tmp_path}/{name}",
            "++hydra.output_subdir=dlio_config", "++workload.checkpoint.mode=subset",
            "++workload.model.parallelism.data=8", f"++workload.checkpoint.checkpoint_folder={tmp_path}/c",
            "++workload.checkpoint.time_between_checkpoints=0", *TINY,
            *(f"++workload.checkpoint.num_checkpoints_{count}" for count in counts), cwd=tmp_path,
        )  # fmt: skip

    wrote = run("write", "write=3", "read=0")
    assert wrote.returncode == 0, wrote.stderr
    assert "[METRIC] Checkpoint save duration (seconds): " in wrote.stdout
    metric = json.loads((tmp_path / "write/summary.json").read_text())["metric"]
    assert not [key for key in metric if key.startswith("load_")]
    read = run("read", "write=0", "read=3")
    assert read.returncode == 0, read.stderr
    metric = json.loads((tmp_path / "read/summary.json").read_text())["metric"]
    assert metric["load_checkpoint_io_mean_GB_per_second"] > 0
    stats = json.loads((tmp_path / "read/0_per_epoch_stats.json").read_text())
    assert set(stats["1"]) == {"start", "end", "duration", *(f"load_ckpt{n}" for n in (1, 2, 3))}
    missing = run("missing", "write=0", "read=4")
    assert missing.returncode != 0
    assert "global_epoch1_step4: there is no such checkpoint" in missing.stderr
    assert not (tmp_path / "missing/summary.json").exists()


def test_mistakes_end_with_what_is_wrong_and_no_result(configs, tmp_path):
    (configs / "workload/unet3d_h100.yaml").write_text(UNET.replace("batch_size", "batchsize"))
    ended = dlio_benchmark("workload=unet3d_h100", f"--config-dir={configs}", cwd=tmp_path)
    assert ended.returncode == 2
    assert (
        "unet3d_h100.yaml:20: reader.batchsize is not known; did you mean reader.batch_size?"
        in ended.stderr
    )
    assert not list(tmp_path.glob("hydra_log"))
    ended = dlio_benchmark(cwd=tmp_path, HEADRACE_BENCH_FORMULA="mine")
    assert ended.returncode == 2
    assert "expected mlcommons or upstream" in ended.stderr
    assert dlio_benchmark("--help", cwd=tmp_path).returncode == 0

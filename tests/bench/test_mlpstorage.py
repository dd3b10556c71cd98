"""`dlio_benchmark` under the command lines that mlpstorage makes, on shrunken data."""

import datetime as dt
import json
import os
import re
import subprocess
import sys
from pathlib import Path

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


def dlio_benchmark(*words, cwd, program="dlio_benchmark", **environ):
    program = [Path(sys.executable).with_name(program)]
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
    assert "workload=unet3d_h100" in overrides  # where it finds the accelerator
    assert all(word.count("=") == 1 for word in overrides)


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


SUMMARY = {
    "start": str, "end": str, "num_accelerators": int, "num_hosts": int, "hostname": str, "epochs": int,
    "metric": dict, "num_files_train": int, "num_files_eval": int, "num_samples_per_file": int,
    "host_cpu_count": list, "host_processor_name": str, "potential_caching": list,
    "host_cpuinfo": dict, "host_meminfo": dict, "host_memory_GB": list,
    "data_size_per_host_GB": float,
}  # fmt: skip
PHASE = {
    "au_percentage": list, "au_mean_percentage": float, "au_stdev_percentage": float,
    "au_meet_expectation": str, "throughput_samples_per_second": list,
    "throughput_mean_samples_per_second": float, "throughput_stdev_samples_per_second": float,
    "io_mean_MB_per_second": float, "io_stdev_MB_per_second": float,
}  # fmt: skip
CHECKPOINT = {
    "io_mean_GB_per_second", "io_stdev_GB_per_second", "duration_mean_seconds",
    "duration_stdev_seconds",
}  # fmt: skip
OUTPUT = {"load", "proc", "throughput", "au", "compute", "host_meminfo", "end"}
TIMED = {"start", "end", "duration"}


def local_time(text):
    """DLIO's form of a time: local, without a zone."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}", text)
    return dt.datetime.fromisoformat(text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that trains, evaluates and saves, under the default folder, and what it printed."""
    tmp_path = tmp_path_factory.mktemp("trained")
    given = [
        "workload=default", "++workload.workflow.generate_data=True",
        "++workload.workflow.checkpoint=True", "++workload.dataset.num_files_train=16",
        "++workload.dataset.num_files_eval=4", "++workload.train.epochs=2",
        "++workload.train.computation_time=0.001", "++workload.evaluation.eval_time=0.001",
        "++workload.reader.read_threads=0", "++workload.model.name=mine",
        "++workload.checkpoint.steps_between_checkpoints=2",
        "++workload.reader.sample_shuffle=off",  # a word here, and false in YAML
    ]  # fmt: skip
    ended = dlio_benchmark(*given, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (folder,) = (tmp_path / "hydra_log/mine").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d", folder.name)
    return folder, ended.stdout, given


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_a_run_leaves_every_file_that_dlio_documents(trained):
    folder, printed, given = trained
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "dlio.log", "summary.json", "0_output.json", "0_per_epoch_stats.json",
        ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml",
    }  # fmt: skip
    assert yaml.safe_load((folder / ".hydra/overrides.yaml").read_text()) == given
    assert set(yaml.safe_load((folder / ".hydra/config.yaml").read_text())) == {"workload"}
    log = (folder / "dlio.log").read_text()
    assert printed
    assert all(line in log for line in printed.splitlines())


def test_summary_json_has_every_key_that_dlio_documents(trained):
    summary = read(trained[0], "summary.json")
    assert set(summary) == {*SUMMARY, "headrace"}
    assert {name: type(value) for name, value in summary.items() if name in SUMMARY} == SUMMARY
    assert local_time(summary["start"]) < local_time(summary["end"])
    for name, kind in (
        ("host_cpu_count", int),
        ("host_memory_GB", float),
        ("potential_caching", int),
    ):
        assert [type(each) for each in summary[name]] == [kind]
    metric = summary["metric"]
    assert set(metric) == {
        *(f"{kind}_{name}" for kind in ("train", "eval") for name in PHASE),
        *(f"save_checkpoint_{name}" for name in CHECKPOINT), "checkpoint_size_GB",
    }  # fmt: skip
    for kind in ("train", "eval"):
        assert {name: type(metric[f"{kind}_{name}"]) for name in PHASE} == PHASE
        assert metric[f"{kind}_au_meet_expectation"] in ("success", "fail")
        assert len(metric[f"{kind}_au_percentage"]) == 2


def test_rank_files_have_every_key_that_dlio_documents(trained):
    output, stats = (read(trained[0], f"0_{name}.json") for name in ("output", "per_epoch_stats"))
    host = {"memory_GB", "cpu_count", "processor_name", "cpuinfo", "meminfo"}
    assert set(output) == {
        "1",
        "2",
        "hostname",
        "potential_caching",
        *(f"host_{name}" for name in host),
    }
    assert set(stats) == {"1", "2"}
    blocks = {"block1": 2, "block2": 2, "eval": 4}
    for epoch in ("1", "2"):
        assert set(output[epoch]) == OUTPUT
        for name in ("load", "proc", "compute"):
            steps = {block: len(times) for block, times in output[epoch][name].items()}
            assert steps == blocks
            assert all(seconds >= 0 for times in output[epoch][name].values() for seconds in times)
        for name in ("throughput", "au"):
            assert {block: type(value) for block, value in output[epoch][name].items()} == (
                dict.fromkeys(blocks, float)
            )
        local_time(output[epoch]["end"])
        of_epoch = stats[epoch]
        assert set(of_epoch) == {*TIMED, *blocks, "save_ckpt1", "save_ckpt2"}
        assert re.fullmatch(r"\d+\.\d\d", of_epoch["duration"])
        for block in blocks:
            assert set(of_epoch[block]) == TIMED
            assert re.fullmatch(r"\d+\.\d\d", of_epoch[block]["duration"])
        assert set(of_epoch["save_ckpt1"]) == {*TIMED, "throughput"}
        assert type(of_epoch["save_ckpt1"]["duration"]) is float
        times = [local_time(of_epoch[name][end]) for name in blocks for end in ("start", "end")]
        assert times == sorted(times)


def test_the_metric_lines_are_dlios(trained):
    lines = [line for line in trained[1].splitlines() if line.startswith("[METRIC]")]
    number = r"-?\d+\.\d{4}"
    expected = [
        r"=+", r"Number of Simulated Accelerators: 1 ",
        rf"Training Accelerator Utilization \[AU\] \(%\): {number} \({number}\)",
        rf"Training Throughput \(samples/second\): {number} \({number}\)",
        rf"Training I/O Throughput \(MB/second\): {number} \({number}\)",
        r"train_au_meet_expectation: (success|fail)",
        rf"Eval Accelerator Utilization \[AU\] \(%\): {number} \({number}\)",
        rf"Eval Throughput \(samples/second\): {number} \({number}\)",
        rf"Eval Throughput \(MB/second\): {number} \({number}\)",
        r"eval_au_meet_expectation: (success|fail)",
        rf"Checkpoint save duration \(seconds\): {number} \({number}\)",
        rf"Checkpoint save I/O Throughput \(GB/second\): {number} \({number}\)", r"=+",
    ]  # fmt: skip
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(r"\[METRIC\] " + pattern, line)


def test_a_run_that_only_generates_leaves_its_log_and_its_configuration(tmp_path):
    ended = dlio_benchmark(
        "workload=default", "++workload.workflow.generate_data=True",
        "++workload.workflow.train=False", "++workload.workflow.evaluation=False",
        "++workload.dataset.num_files_train=4", f"++hydra.run.dir={tmp_path / 'out'}", cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = {
        str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()
    }
    assert result == {"dlio.log", *(f".hydra/{n}.yaml" for n in ("config", "hydra", "overrides"))}
    names = sorted(p.name for p in (tmp_path / "data/default/train").rglob("*.npz"))
    assert names == [f"img_{n}_of_4.npz" for n in range(4)]


def test_a_query_prints_one_value(tmp_path):
    def ask(*words):
        return dlio_benchmark(*words, cwd=tmp_path, program="dlio_benchmark_query")

    query = "++workload.workflow.query=dataset.num_files_train"
    assert ask("workload=unet3d_h100", query).stdout == "168\n"
    assert (
        ask("workload=unet3d_h100", query, "++workload.dataset.num_files_train=9").stdout == "9\n"
    )
    wrong = ask("workload=unet3d_h100", "++workload.workflow.query=dataset.files")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "dataset.files is not known" in wrong.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_dlio_takes_from_the_environment_is_told_to_have_no_effect(tmp_path):
    ended = dlio_benchmark(
        "workload=llama_7b", *TINY, "++workload.checkpoint.num_checkpoints_write=1",
        "++workload.checkpoint.num_checkpoints_read=0", f"++hydra.run.dir={tmp_path}", cwd=tmp_path,
        DLIO_OUTPUT_FOLDER="x", DLIO_PROFILER_ENABLE="1", DFTRACER_ENABLE="1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "note: DLIO_OUTPUT_FOLDER has no effect: give ++hydra.run.dir=DIR" in ended.stderr
    assert "note: DLIO_PROFILER_ENABLE has no effect: DFTRACER_ENABLE=1 writes" in ended.stderr
    assert '"cat":"ai_root"' in (tmp_path / "trace-0-of-1.pfw").read_text()


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


CHECKOUT = os.environ.get("MLPSTORAGE_CHECKOUT", "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not CHECKOUT, reason="MLPSTORAGE_CHECKOUT names no checkout of mlcommons/storage"
)
def test_mlpstorage_itself_trains_checkpoints_and_reports(tmp_path):
    """Version 2.0, unchanged: what it starts, under the MPI that is there, and what it makes of the results."""
    environ = {
        "PYTHONPATH": CHECKOUT, "HOME": str(tmp_path), "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip

    def mlpstorage(*words, params=()):
        more = [word for param in params for word in ("--params", param)]
        ended = subprocess.run(
            [sys.executable, "-m", "mlpstorage.main", *words, "--results-dir", "results", *more],
            cwd=tmp_path, env=os.environ | environ, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    drop_in = ("--dlio-bin-path", str(Path(sys.executable).parent))
    data = ("dataset.num_files_train=16", "dataset.num_samples_per_file=1")
    data += ("dataset.record_length_bytes=4000", "dataset.record_length_bytes_stdev=0")
    train = ("reader.batch_size=2", "train.computation_time=0.001", "train.epochs=2")
    for model in ("unet3d", "cosmoflow", "resnet50"):
        words = ("--model", model, "--data-dir", str(tmp_path / "data"), *drop_in)
        mlpstorage("training", "datagen", *words, "--num-processes", "2", params=data)
        host = ("--num-client-hosts", "1", "--client-host-memory-in-gb", "1")
        run = ("--accelerator-type", "h100", "--num-accelerators", "2", *host)
        printed = mlpstorage("training", "run", *words, *run, params=data + train)
        assert printed.count("[METRIC] Number of Simulated Accelerators: 2") == 1
    tiny = [word.removeprefix("++workload.") for word in TINY]
    for model, ranks in (("llama3-8b", "8"), ("llama3-70b", "2")):  # the whole, and a part
        mlpstorage(
            "checkpointing", "run", "--model", model, "--num-processes", ranks, *drop_in,
            "--client-host-memory-in-gb", "1", "--checkpoint-folder", str(tmp_path / "checkpoints"),
            params=[*tiny, "checkpoint.time_between_checkpoints=0"],
        )  # fmt: skip
    report = mlpstorage("reports", "reportgen")

    document = json.loads((tmp_path / "results/results.json").read_text())
    results = {each["model"]: each for each in document}
    assert set(results) == {"unet3d", "cosmoflow", "resnet50", "llama3-8b", "llama3-70b"}
    for model, ranks in (("llama3-8b", 8), ("llama3-70b", 2)):
        llama = results.pop(model)
        assert (llama["benchmark_type"], llama["num_processes"]) == ("checkpointing", ranks)
        for kind in ("save", "load"):
            assert llama["metrics"][f"{kind}_checkpoint_io_mean_GB_per_second"] > 0
        assert f"Checkpointing - {model}" in report
    for model, result in results.items():
        assert (result["benchmark_type"], result["command"]) == ("training", "run_benchmark")
        assert (result["num_processes"], result["accelerator"]) == (2, "h100")
        assert len(result["metrics"]["train_au_percentage"]) == 2
        assert f"Training - {model}, Accelerator: h100" in report
    assert "failed with error" not in report

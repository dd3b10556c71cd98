"""Whole runs: shrunken workloads, every engine, DLIO's files, and what must not become a result."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from headrace.base.job import Rank
from headrace.bench import session
from headrace.bench.compare import MEASURES, measure_named, measured, value_of
from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.iostat import IostatSampler
from headrace.bench.postprocess import write_postprocessed
from headrace.bench.ranks import join
from headrace.bench.results import load_runs
from headrace.bench.run import SessionOptions
from headrace.bench.session import notes_of, run_session
from headrace.bench.staging import stage_files
from headrace.errors import BenchError, HeadraceError, MissingPackage, SourceError, WorkloadError
from headrace.io.simulation import Simulation
from headrace.testing import SlowVolume

SHRUNKEN = [
    "++workload.dataset.num_files_train=8", "++workload.dataset.num_samples_per_file=4",
    "++workload.dataset.record_length_bytes=4096", "++workload.dataset.record_length_bytes_stdev=0",
    "++workload.reader.batch_size=4", "++workload.reader.read_threads=2",
    "++workload.train.epochs=2", "++workload.train.computation_time=0.002",
    "++workload.workflow.checkpoint=False",
]  # fmt: skip


@pytest.fixture
def words(tmp_path):
    """The command line of a shrunken run."""

    def make(workload, *overrides):
        return [
            f"workload={workload}", *SHRUNKEN,
            f"++workload.dataset.data_folder={tmp_path / 'data'}",
            f"++hydra.run.dir={tmp_path / 'out'}", "++hydra.output_subdir=dlio_config", *overrides,
        ]  # fmt: skip

    return make


GENERATE = "++workload.workflow.generate_data=True"


@pytest.mark.parametrize(
    ("format_name", "engine"),
    [(name, "headrace")
     for name in ("npz", "npy", "hdf5", "tfrecord", "csv", "indexed_binary", "parquet")]
    + [("npz", "torch"), ("tfrecord", "torch"), ("npz", "null")],
)  # fmt: skip
def test_engines_run_formats(words, format_name, engine):
    if engine == "torch":
        pytest.importorskip("torch")
    report = run_session(words(
        "unet3d_h100", GENERATE, f"++workload.dataset.format={format_name}",
        f"++workload.reader.engine={engine}", "++workload.train.epochs=1",
        "++workload.reader.read_threads=0",
    ))  # fmt: skip
    own = report.summary["headrace"]
    assert own["engine"] == engine
    assert len(report.summary["metric"]["train_au_percentage"]) == 1
    if engine == "headrace":  # 8 steps of 4 samples: every sample at least once
        assert own["bytes"] >= 8 * 4 * 4096


@pytest.mark.parametrize(
    "workload",
    ["unet3d_h100", "unet3d_h100_s3", "resnet50_h100", "cosmoflow_h100", "retinanet_b200", "default",
     "dlrm", "dlrm_mi355"],
)  # fmt: skip
def test_shipped_workloads_run_shrunken(words, workload):
    one = ["++workload.dataset.num_samples_per_file=1"]
    one += ["++workload.dataset.num_files_eval=2"] if workload == "default" else []
    one += ["++workload.evaluation.eval_time=0.001", "++workload.storage.storage_type=local_fs"]
    report = run_session(words(workload, GENERATE, "++workload.train.epochs=1", *one))
    assert 0 <= report.summary["metric"]["train_au_mean_percentage"] <= 100
    assert ("eval_au_mean_percentage" in report.summary["metric"]) == (workload == "default")


SUMMARY_KEYS = {
    "start", "end", "num_accelerators", "num_hosts", "hostname", "epochs", "metric",
    "num_files_train", "num_files_eval", "num_samples_per_file", "host_cpu_count",
    "host_processor_name", "potential_caching", "host_cpuinfo", "host_meminfo", "host_memory_GB",
    "data_size_per_host_GB",
}  # fmt: skip
METRIC_KEYS = {
    f"{kind}_{name}"
    for kind in ("train", "eval")
    for name in (
        "au_percentage", "au_mean_percentage", "au_stdev_percentage", "au_meet_expectation",
        "throughput_samples_per_second", "throughput_mean_samples_per_second",
        "throughput_stdev_samples_per_second", "io_mean_MB_per_second", "io_stdev_MB_per_second",
    )
}  # fmt: skip


def test_dlios_files_are_written_with_dlios_keys(words, tmp_path):
    given = words(
        "default", GENERATE, "++workload.dataset.num_files_eval=2",
        "++workload.evaluation.eval_time=0.001", "++workload.model.name=tiny",
    )  # fmt: skip
    report = run_session(given, SessionOptions(accelerators=2))
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    assert set(summary["metric"]) == METRIC_KEYS
    assert (summary["num_accelerators"], summary["num_hosts"]) == (2, 1)
    assert len(summary["metric"]["train_au_percentage"]) == 2
    assert isinstance(summary["host_memory_GB"][0], float)
    for rank in (0, 1):
        output = json.loads((out / f"{rank}_output.json").read_text())
        assert set(output["1"]) >= {
            "load",
            "proc",
            "throughput",
            "au",
            "compute",
            "host_meminfo",
            "end",
        }
        assert [len(output["2"]["load"][k]) for k in ("block1", "eval")] == [4, 4]
        stats = json.loads((out / f"{rank}_per_epoch_stats.json").read_text())
        assert set(stats["2"]) == {"start", "end", "duration", "block1", "eval"}
        assert float(stats["1"]["duration"]) >= float(stats["1"]["block1"]["duration"])
    composed = yaml.safe_load((out / "dlio_config/config.yaml").read_text())
    assert composed["workload"]["reader"]["batch_size"] == 4
    assert composed["workload"]["model"]["name"] == "tiny"
    overrides = yaml.safe_load((out / "dlio_config/overrides.yaml").read_text())
    assert "++workload.model.name=tiny" in overrides
    assert not [word for word in overrides if "hydra" in word]
    hydra = yaml.safe_load((out / "dlio_config/hydra.yaml").read_text())
    assert hydra["hydra"]["run"]["dir"] == str(out)
    log = (out / "dlio.log").read_text()
    assert "[METRIC] Training Accelerator Utilization [AU] (%): " in log
    assert "[METRIC] train_au_meet_expectation: " in log
    assert set(report.lines) <= {line.split(" ", 2)[2] for line in log.splitlines()}


def test_checkpoints_between_epochs_have_the_models_size(words, tmp_path):
    folder = tmp_path / "ckpt"
    report = run_session(words(
        "unet3d_h100", GENERATE, "++workload.workflow.checkpoint=True",
        "++workload.model.model_size=3000001", "++workload.checkpoint.fsync=True",
        "++workload.checkpoint.checkpoint_after_epoch=1", "++workload.train.epochs=3",
        f"++workload.checkpoint.checkpoint_folder={folder}",
    ))  # fmt: skip
    written = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*.pt")}
    assert written == {f"global_epoch{e}_step8/model_states-0.pt": 3000001 for e in (1, 3)}
    metric = report.summary["metric"]
    assert metric["checkpoint_size_GB"] == 3000001 / 2**30
    assert metric["save_checkpoint_io_mean_GB_per_second"] > 0
    stats = json.loads((tmp_path / "out/0_per_epoch_stats.json").read_text())
    assert ["save_ckpt1" in stats[epoch] for epoch in "123"] == [True, False, True]
    assert stats["3"]["save_ckpt1"]["duration"] > 0


def test_sharded_checkpoints_are_spread_over_accelerators(words, tmp_path):
    folder = tmp_path / "ckpt"
    run_session(words(
        "unet3d_h100", GENERATE, "++workload.workflow.checkpoint=True", "++workload.train.epochs=1",
        "++workload.model.type=transformer", "++workload.model.num_layers=2",
        "++workload.model.transformer.hidden_size=64", "++workload.model.transformer.vocab_size=100",
        "++workload.model.transformer.ffn_hidden_size=128",
        "++workload.model.transformer.num_attention_heads=4",
        "++workload.model.transformer.num_kv_heads=4", "++workload.model.parallelism.zero_stage=3",
        "++workload.checkpoint.checkpoint_after_epoch=1",
        f"++workload.checkpoint.checkpoint_folder={folder}",
    ), SessionOptions(accelerators=2))  # fmt: skip
    names = {p.name for p in folder.rglob("*.pt")}
    assert names == {
        f"zero_pp_rank_{rank}_mp_rank_0_{kind}_states.pt"
        for rank in (0, 1) for kind in ("model", "optim")
    }  # fmt: skip


def test_a_slow_storage_lowers_au_and_is_named(words):
    """250 kB/s of 16 kB a step: 65 ms, of which 2 ms are computing."""
    simulate = Simulation(name="thin", bandwidth_bytes_per_s=250e3)
    given = words("unet3d_h100", GENERATE, "++workload.dataset.num_samples_per_file=1",
                  "++workload.dataset.num_files_train=24", "++workload.train.epochs=1",
                  "++workload.reader.prefetch_size=1", "++workload.reader.read_threads=1")  # fmt: skip
    report = run_session(given, SessionOptions(simulate=simulate, ceiling=True))
    own = report.summary["headrace"]
    assert report.summary["metric"]["train_au_mean_percentage"] < 15
    assert report.summary["metric"]["train_au_meet_expectation"] == "fail"
    assert own["ceiling_au_percent"] > own["au_percent"]["mean"]
    assert own["time"]["wait_s"] > own["time"]["compute_s"]


def test_cold_means_that_the_page_cache_was_seen_to_be_empty(words):
    run_session(words("unet3d_h100", GENERATE, "++workload.workflow.train=False"))
    try:
        report = run_session(words("unet3d_h100"), SessionOptions(cold=True))
    except BenchError as e:
        if "page cache" not in str(e):
            raise
        pytest.skip("this file system keeps its pages")
    assert report.summary["headrace"]["residency_before"]["cold"] is True
    assert report.summary["headrace"]["residency_before"]["share"] <= 0.02


class CountingEngine:
    """A custom engine."""

    def __init__(self, context):
        self.context = context

    def open(self, split, epoch, accelerator):
        plan = self.context.plans[split]
        for step in range(plan.steps):
            paths = self.context.paths(split, plan.indices(epoch, accelerator, step))
            assert all(Path(os.fsdecode(path)).exists() for path in paths)
            yield b"".join(Path(os.fsdecode(path)).read_bytes() for path in paths)


class ShortEngine(CountingEngine):
    def open(self, *_):
        return iter([b""])


class BrokenEngine(CountingEngine):
    def open(self, *_):
        raise KeyError("oh")


@pytest.mark.parametrize(
    ("name", "message"),
    [("Counting", None), ("Short", "ended before the epoch"), ("Broken", "failed: KeyError: 'oh'"),
     ("Missing", "cannot be imported")],
)  # fmt: skip
def test_custom_engines(words, name, message):
    given = words(
        "unet3d_h100", GENERATE, f"++workload.reader.engine=custom:{__name__}:{name}Engine"
    )
    if message is None:
        assert run_session(given).summary["headrace"]["engine"].endswith("CountingEngine")
    else:
        with pytest.raises(BenchError, match=message):
            run_session(given)


STEPS_BETWEEN = ("++workload.workflow.checkpoint=True", "++workload.model.model_size_bytes=4096")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["++workload.train.total_training_steps=900"], None),
        ([*STEPS_BETWEEN, "++workload.checkpoint.num_checkpoints_write=2"], "checkpoints alone"),
        (["++workload.workflow.evaluate=False"], "it reads workflow.evaluation"),
        (["++workload.workflow.evaluation=True", "++workload.dataset.num_files_eval=0"],
         "evaluations have no steps"),
        (["++workload.reader.dont_use_mmap=True"], "DALI"),
        (["++workload.checkpoint.ksm.await_time=3"], "no memory to merge"),
        (["++workload.workflow.profiling=True", "++workload.profiling.profiler=darshan"], "not started"),
        ([*STEPS_BETWEEN, "++workload.checkpoint.steps_between_checkpoints=1"], "AU leaves out 1 steps"),
        ([*STEPS_BETWEEN, "++workload.checkpoint.steps_between_checkpoints=0"], "no checkpoint is written"),
        (["++workload.dataset.format=png", "++workload.dataset.num_samples_per_file=1",
          "++workload.dataset.record_element_type=float32"], "a png has uint8"),
    ],
)  # fmt: skip
def test_what_dlio_runs_is_run_with_a_note(words, tmp_path, overrides, message):
    folder = f"++workload.checkpoint.checkpoint_folder={tmp_path / 'saved'}"
    report = run_session(words("unet3d_h100", GENERATE, folder, *overrides))
    assert message is None or sum(message in note for note in report.notes) == 1
    steps = json.loads((tmp_path / "out/0_output.json").read_text())["2"]["load"]
    assert sum(map(len, steps.values())) == (2 if "png" in str(overrides) else 8)


def test_keys_of_shipped_workloads_that_have_no_effect_are_not_the_users():
    key = "dataset.record_length_bytes_resize"
    for overrides, notes in (((), 0), ((f"++workload.{key}=9",), 1)):
        loaded = load_workload(parse_command_line(["workload=unet3d_a100", *overrides]))
        assert key in loaded.origins
        assert len(notes_of(loaded)) == notes


def test_checkpoints_of_tensorflow_have_its_files(words, tmp_path):
    saved = tmp_path / "saved"
    run_session(words(
        "unet3d_h100", GENERATE, "++workload.framework=tensorflow", *STEPS_BETWEEN,
        f"++workload.checkpoint.checkpoint_folder={saved}", "++workload.train.epochs=1",
        "++workload.checkpoint.checkpoint_after_epoch=1",
    ))  # fmt: skip
    [folder] = saved.iterdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    state = "model_states-0.pb-1"
    assert set(sizes) == {"checkpoint", f"{state}.index", f"{state}.data-00000-of-00001"}
    assert sizes[f"{state}.data-00000-of-00001"] == 4096


def test_each_accelerator_leaves_a_trace_of_every_step(words, tmp_path):
    options = SessionOptions(accelerators=2, trace=True)
    run_session(words("unet3d_h100", GENERATE, *STEPS_BETWEEN,
                      f"++workload.checkpoint.checkpoint_folder={tmp_path / 'saved'}",
                      "++workload.checkpoint.checkpoint_after_epoch=1",
                      "++workload.checkpoint.epochs_between_checkpoints=1"), options)  # fmt: skip
    for rank in range(2):
        first, *lines, last = (tmp_path / f"out/trace-{rank}-of-2.pfw").read_text().splitlines()
        assert (first, last) == ("[", "]")
        assert not any("[" in line or "]" in line for line in lines)
        events = [json.loads(line) for line in lines]
        names = Counter(f"{event['cat']} {event['name']}" for event in events)
        del names["comm barrier"]
        assert names == {
            "ai_root ai_root": 1, "pipeline epoch.block": 2, "pipeline train": 2,
            "dataloader fetch.iter": 8, "data item": 8, "data preprocess": 8, "compute compute": 8,
        } | ({"checkpoint capture": 2} if rank == 0 else {})  # fmt: skip
        root = next(event for event in events if event["cat"] == "ai_root")
        assert all(
            root["ts"] - 1e4 <= event["ts"] <= root["ts"] + root["dur"] + 1e4 for event in events
        )


def test_iostat_is_sampled_and_the_postprocessor_shows_it(words, tmp_path):
    run_session(words("unet3d_h100", GENERATE, "++workload.workflow.profiling=True"))
    [host] = json.loads((tmp_path / "out/iostat.json").read_text())["sysstat"]["hosts"]
    assert {"timestamp", "avg-cpu", "disk"} == set(host["statistics"][0])
    assert sum(host["statistics"][0]["avg-cpu"].values()) == pytest.approx(100, abs=1)
    text = write_postprocessed(str(tmp_path / "out"), "mine").read_text()
    assert "Run name: mine" in text
    assert all(name in text for name in ("Epoch 2, block1", "IO Wait (%)", "Samples/s"))


def test_processing_times_of_a_report_are_dlios_own_where_it_measured_more(words, tmp_path):
    """DLIO's `proc` has what it does between a wait and computing; ours has nothing there."""
    run_session(words("unet3d_h100", GENERATE))
    file = tmp_path / "out/0_output.json"
    output = json.loads(file.read_text())
    output["2"]["proc"]["block1"] = [2.5] * len(output["2"]["load"]["block1"])
    file.write_text(json.dumps(output))
    report = write_postprocessed(str(tmp_path / "out")).read_text().partition("Epoch 2, block1")[2]
    expected = sum(output["2"]["proc"]["block1"])
    assert f"Avg processing time / rank (s): {expected:.2f}" in report


@pytest.mark.parametrize("devices", [(), ("/dev/cciss/c0d0",), ("cciss/c0d0",)])
def test_disks_of_iostat_are_whole_ones_whatever_they_are_called(tmp_path, devices):
    """/sys has `!` where a device's name has `/`."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/block/cciss!c0d0").mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("cpu  100 0 100 1000 50 0 0 0 0 0\n")
    numbers = " ".join(map(str, range(1, 12)))
    (tmp_path / "proc/diskstats").write_text(
        f" 104 0 cciss/c0d0 {numbers}\n 104 1 cciss/c0d0p1 {numbers}\n 104 2 damaged {numbers} x\n"
    )
    [host] = IostatSampler(devices, tmp_path).document()["sysstat"]["hosts"]
    [disk] = host["statistics"][0]["disk"]
    assert (disk["disk_device"], disk["r/s"], disk["f/s"]) == ("cciss/c0d0", 0, 0)


class Terminating:
    """An engine whose process is terminated in its second epoch."""

    signal = signal.SIGTERM

    def __init__(self, context):
        self.context = context

    def open(self, split, epoch, _):
        for step in range(self.context.plans[split].steps):
            if (epoch, step) == (2, 3):
                os.kill(os.getpid(), self.signal)
            yield b"."


class Interrupting(Terminating):
    """One at whose process somebody presses Ctrl-C."""

    signal = signal.SIGINT


@pytest.mark.parametrize("engine", [Terminating, Interrupting])
def test_a_terminated_run_leaves_its_log_and_what_was_done(words, tmp_path, engine):
    given = words(
        "unet3d_h100", GENERATE, f"++workload.reader.engine=custom:{__name__}:{engine.__name__}"
    )
    program = "import sys; sys.path[:0] = ['tests']; from headrace.cli.dlio import main; main()"
    ended = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True,
                           timeout=120, check=False)  # fmt: skip
    assert ended.returncode == 128 + engine.signal, ended.stderr
    how = "terminated" if engine is Terminating else "interrupted"
    assert f"after 1 of 2 epochs: {how}" in (tmp_path / "out/dlio.log").read_text()
    if engine is Interrupting:
        kept = f"interrupted: after 1 of 2 epochs; their times are in {tmp_path / 'out'}"
        assert ended.stderr.splitlines()[-1] == kept
    output = json.loads((tmp_path / "out/0_output.json").read_text())
    assert "1" in output
    assert "2" not in output
    assert not (tmp_path / "out/summary.json").exists()


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["++workload.reader.batch_size=100"], WorkloadError, "are 0 steps of 1 accelerators x 100"),
        (["++workload.workflow.checkpoint=True", "++workload.checkpoint.fsync=True",
          "++workload.checkpoint.writer=plain"], WorkloadError, "does not sync"),
        (["++workload.workflow.checkpoint=True", "++workload.model.parallelism.tensor=2"],
         WorkloadError, "no multiple of tensor x pipeline"),
        (["++workload.storage.storage_type=direct_fs"], WorkloadError, "direct_fs is not read"),
        (["++workload.workflow.train=False"], WorkloadError, "nothing to run"),
        (["++workload.reader.engine=dali"], WorkloadError,
         "expected one of headrace, torch, tensorflow, null"),
        (["++workload.reader.engine=tensorflow", "++workload.reader.odirect=True"], WorkloadError,
         "odirect is not done by the engine tensorflow"),
        (["++workload.dataset.num_files_train=9"], SourceError, "expected num_files_train = 9"),
        (["++workload.dataset.data_folder=/nowhere"], SourceError, "/nowhere"),
        (["++workload.dataset.format=npy"], SourceError, "npy"),
    ],
)  # fmt: skip
def test_bad_input_is_no_result(words, tmp_path, overrides, error, message):
    run_session(words("unet3d_h100", GENERATE, "++workload.workflow.train=False"))
    with pytest.raises(error, match=message):
        run_session(words("unet3d_h100", *overrides))
    assert not (tmp_path / "out/summary.json").exists()


def test_an_engine_whose_framework_is_missing_says_so(words, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(MissingPackage, match="engine tensorflow needs the package tensorflow"):
        run_session(words("unet3d_h100", GENERATE, "++workload.reader.engine=tensorflow"))


def test_a_file_that_vanishes_while_it_runs_is_named(words, tmp_path):
    run_session(words("cosmoflow_h100", GENERATE, "++workload.workflow.train=False",
                      "++workload.dataset.num_samples_per_file=1"))  # fmt: skip
    gone = sorted((tmp_path / "data/train").glob("*.tfrecord"))[3]
    gone.unlink()
    gone.symlink_to("nothing")  # it is still listed
    with pytest.raises(HeadraceError, match="No such file") as caught:
        run_session(words("cosmoflow_h100", "++workload.dataset.num_samples_per_file=1"))
    assert gone.name in str(caught.value)


def test_two_ranks_are_one_run(words, tmp_path):
    program = "from headrace.cli.dlio import main; main()"
    given = words("unet3d_h100", GENERATE)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *given], text=True,
            env=os.environ | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    assert "Number of Simulated Accelerators: 2" in ended[0][0]
    assert "[METRIC]" not in ended[1][0]
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["num_accelerators"] == 2
    assert {p.name for p in (tmp_path / "out").glob("*_output.json")} == {
        "0_output.json", "1_output.json"
    }  # fmt: skip


def test_ranks_without_a_common_folder_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BenchError, match=r"hydra\.run\.dir"):
        run_session(["workload=default"])


def test_repeats_keep_their_own_results_and_make_one_of_all(words, tmp_path):
    report = run_session(words("unet3d_h100", GENERATE), SessionOptions(repeats=3, accelerators=2))
    out = tmp_path / "out"
    kept = [json.loads((out / f"repeats/{n}/summary.json").read_text()) for n in (1, 2, 3)]
    whole = json.loads((out / "summary.json").read_text())
    assert whole == json.loads(json.dumps(report.summary))
    aus = [each["metric"]["train_au_mean_percentage"] for each in kept]
    assert whole["metric"]["train_au_percentage"] == [
        au for each in kept for au in each["metric"]["train_au_percentage"]
    ]
    assert whole["metric"]["train_au_mean_percentage"] == pytest.approx(sum(aus) / 3)
    own = whole["headrace"]
    assert (own["repeats"], own["au_percent"]["runs"]) == (3, 3)
    assert own["au_percent"]["mean"] == pytest.approx(sum(aus) / 3)
    assert own["au_percent"]["confidence_95"] is not None
    runs = load_runs(out)
    means = {each.name: measured(runs, each) for each in MEASURES}
    values = {each.name: value_of(whole, each) for each in MEASURES}
    for name, value in values.items():
        mean = means[name] and means[name].mean
        assert value == pytest.approx(mean, abs=1.0 if "bytes" in name else None), name
    for n, each in enumerate(kept, 1):
        assert each["headrace"]["repeats"] == 1
        assert {p.name for p in (out / f"repeats/{n}").iterdir()} == {
            "summary.json", "0_output.json", "1_output.json", "0_per_epoch_stats.json",
            "1_per_epoch_stats.json",
        }  # fmt: skip
    assert kept[0]["start"] < kept[1]["start"] < kept[2]["start"]
    assert len(load_runs(out)) == 3
    rate = measured(load_runs(out), measure_named("throughput"))
    assert rate.runs == 3
    assert rate.half_width is not None
    assert load_runs(out)[0].workload["reader"]["batch_size"] == 4


def test_results_of_two_runs_in_one_folder_are_not_mixed(words, tmp_path):
    folder = tmp_path / "out"
    options = SessionOptions(accelerators=3, repeats=2, ceiling=False)
    run_session(words("unet3d_h100", GENERATE), options)
    second = run_session(words("unet3d_h100", "++workload.train.epochs=1"))
    (note,) = [note for note in second.notes if "earlier run" in note]
    assert note.endswith(f"{folder}/earlier/1 now")
    for at, accelerators, epochs in ((folder, 1, 1), (folder / "earlier/1", 3, 2)):
        assert len(list(at.glob("*_output.json"))) == accelerators
        assert len(list(at.glob("*_per_epoch_stats.json"))) == accelerators
        (run, *_) = load_runs(at)
        assert (run.summary["num_accelerators"], run.summary["epochs"]) == (accelerators, epochs)
        assert run.workload["train"]["epochs"] == epochs
        assert (at / "dlio.log").read_text().count("train_au_meet_expectation") == 1
    assert not (folder / "repeats").exists()

    next((tmp_path / "data/train").iterdir()).unlink()
    with pytest.raises(SourceError):
        run_session(words("unet3d_h100"))
    with pytest.raises(BenchError, match=r"no summary.json"):
        load_runs(folder)  # a failed run has no results, least of all another one's
    assert load_runs(folder / "earlier/2")


def test_one_run_keeps_no_repeats(words, tmp_path):
    report = run_session(words("unet3d_h100", GENERATE))
    assert not (tmp_path / "out/repeats").exists()
    assert report.summary["headrace"]["repeats"] == 1


def test_the_time_to_solution_is_split(words, tmp_path):
    report = run_session(words(
        "default", GENERATE, "++workload.dataset.num_files_eval=4",
        "++workload.evaluation.eval_time=0.001", "++workload.workflow.checkpoint=True",
        "++workload.model.model_size=100000", f"++workload.checkpoint.checkpoint_folder={tmp_path / 'c'}",
    ), SessionOptions(stage=str(tmp_path / "local")))  # fmt: skip
    split = report.summary["headrace"]["time_to_solution"]
    phases = ("staging", "training", "evaluation", "checkpointing", "other")
    assert set(split) == {"total_s", *(f"{phase}_s" for phase in phases)}
    assert split["total_s"] == pytest.approx(sum(split[f"{phase}_s"] for phase in phases))
    assert all(split[f"{phase}_s"] > 0 for phase in phases)
    assert split["training_s"] >= 2 * 8 * 0.002
    stats = json.loads((tmp_path / "out/0_per_epoch_stats.json").read_text())
    saved = sum(v["duration"] for e in stats.values() for k, v in e.items() if "ckpt" in k)
    assert split["checkpointing_s"] >= saved


@pytest.mark.parametrize("format_name", ["npz", "indexed_binary"])
def test_a_staged_data_set_is_read_there_and_removed(words, tmp_path, format_name, monkeypatch):
    given = words("unet3d_h100", f"++workload.dataset.format={format_name}")
    run_session([*given, GENERATE, "++workload.workflow.train=False"])
    data = sorted(p for p in (tmp_path / "data").rglob("*") if p.is_file())
    seen = {}
    real = session.run_epochs

    def look(loaded, options, group, files, **more):
        seen["files"] = [Path(path) for path in files["train"]]
        seen["same"] = [p.read_bytes() for p in seen["files"]] == [
            (tmp_path / "data/train" / p.name).read_bytes() for p in seen["files"]
        ]
        seen["count"] = sum(p.is_file() for p in (tmp_path / "local").rglob("*"))
        return real(loaded, options, group, files, **more)

    monkeypatch.setattr(session, "run_epochs", look)
    report = run_session(given, SessionOptions(stage=str(tmp_path / "local")))
    assert seen["same"]
    assert seen["count"] == len(data)  # with what formats keep beside their files
    assert all(tmp_path / "local" in path.parents for path in seen["files"])
    assert list((tmp_path / "local").iterdir()) == []
    assert sorted(p for p in (tmp_path / "data").rglob("*") if p.is_file()) == data
    assert report.summary["headrace"]["time_to_solution"]["staging_s"] > 0
    assert report.summary["headrace"]["provenance"]["staged"] == str(tmp_path / "local")


def test_staging_goes_on_with_what_a_killed_run_left(words, tmp_path):
    given = words("unet3d_h100")
    run_session([*given, GENERATE, "++workload.workflow.train=False"])
    files = {"train": sorted(str(p) for p in (tmp_path / "data/train").iterdir())}
    group = join(Rank(0, 1), tmp_path)
    first = stage_files(files, str(tmp_path / "data"), str(tmp_path / "local"), group)
    assert first.nbytes > 0
    changed = Path(first.files["train"][0])
    changed.write_bytes(b"torn")
    again = stage_files(files, str(tmp_path / "data"), str(tmp_path / "local"), group)
    assert again.nbytes == Path(files["train"][0]).stat().st_size
    assert changed.read_bytes() == Path(files["train"][0]).read_bytes()
    again.remove()
    assert not Path(again.folder).exists()


@pytest.mark.parametrize("where", ["data/below", "data", "."])
def test_a_data_set_is_not_staged_into_itself(words, tmp_path, where):
    given = words("unet3d_h100")
    run_session([*given, GENERATE, "++workload.workflow.train=False"])
    with pytest.raises(BenchError, match="cannot be staged to"):
        run_session(given, SessionOptions(stage=str(tmp_path / where)))


def test_staging_and_simulating_are_refused(words):
    with pytest.raises(BenchError, match="one of --stage and --simulate"):
        run_session(words("unet3d_h100"), SessionOptions(stage="x", simulate="lustre"))


def test_a_slow_volume_can_be_given_and_is_named(words):
    volume = SlowVolume(Simulation(name="attic", bandwidth_bytes_per_s=1e9))
    given = words("unet3d_h100", GENERATE, "++workload.dataset.num_samples_per_file=1",
                  "++workload.dataset.num_files_train=24")  # fmt: skip
    report = run_session(given, SessionOptions(simulate=volume))
    assert report.summary["headrace"]["provenance"]["simulated"] == "attic"
    # Files that were written a moment ago may be read twice.
    assert volume.stats()["bytes"] >= report.summary["headrace"]["bytes"] > 24 * 4096


def test_another_data_set_is_overwritten_only_when_asked_for(words, tmp_path):
    only = (GENERATE, "++workload.workflow.train=False")
    run_session(words("unet3d_h100", *only))
    fewer = (*only, "++workload.dataset.num_files_train=5")
    with pytest.raises(SourceError, match="--overwrite"):
        run_session(words("unet3d_h100", *fewer))
    run_session(words("unet3d_h100", *fewer), SessionOptions(overwrite=True))
    assert len(list((tmp_path / "data/train").glob("*.npz"))) == 5

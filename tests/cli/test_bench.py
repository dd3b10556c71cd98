"""`headrace bench`: words of hydra beside our own options, JSON, errors."""

import json

import pytest


@pytest.fixture
def bench(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: run("bench", *words)


SMALL = ["workload=default", "++workload.dataset.num_files_train=8",
         "++workload.train.computation_time=0.002", "++workload.train.epochs=1",
         "~workload.workflow.evaluation"]  # fmt: skip


def test_generate_and_run(bench, tmp_path):
    ended = bench("generate", *SMALL, "++hydra.run.dir=out", "--json")
    assert ended.code == 0, ended.err
    assert ended.document["generated_bytes"] > 8 * 4096
    ended = bench(
        "run",
        *SMALL,
        "++workload.reader.batch_size=1",
        "++hydra.run.dir=out",
        "-n",
        "2",
        "--ceiling",
        "--repeats=2",
        "--quiet",
    )
    assert ended.code == 0, ended.err
    for said in ("[METRIC] Number of Simulated Accelerators: 2", "bound by ", "AU of 2 runs: ",
                 "time to solution: ", "AU without storage: ", "read by all steps: ",
                 "This is not an MLPerf result."):  # fmt: skip
        assert said in ended.out
    metric = json.loads((tmp_path / "out/summary.json").read_text())["metric"]
    mib_per_s = metric["train_io_mean_MB_per_second"]
    assert (
        f"Training I/O Throughput (MB/second): {mib_per_s:.4f}" in ended.out
    )  # DLIO's line, of 2^20 bytes
    assert f"throughput: {mib_per_s * 1.048576:.1f} MB/s of the steps" in ended.out
    ended = bench("run", "--json", "--engine=null", *SMALL, "++hydra.run.dir=out")
    found = ended.document
    assert found["summary"]["headrace"]["engine"] == "null"
    assert found["folder"] == "out"
    assert (tmp_path / "out/summary.json").exists()


def test_progress_says_of_each_phase_what_it_counts(bench, monkeypatch):
    monkeypatch.setattr("headrace.base.progress.LINE_EVERY_S", 0.0)  # a line for each report
    ended = bench("run", *SMALL, "++hydra.run.dir=out", "--generate")
    assert "generating: 16 of 16 samples" in ended.err
    assert "running: 2 of 2 steps" in ended.err
    small = ("num_checkpoints_write=1", "num_checkpoints_read=0", "time_between_checkpoints=0")
    shape = (
        "num_layers=1",
        "transformer.hidden_size=8",
        "transformer.ffn_hidden_size=8",
        "transformer.vocab_size=8",
    )
    words = [
        *(f"++workload.checkpoint.{key}" for key in small),
        *(f"++workload.model.{key}" for key in shape),
    ]
    ended = bench("run", "workload=llama_7b", *words, "++hydra.run.dir=saved")
    assert "checkpointing: 1 of 1 checkpoints" in ended.err


def test_a_run_of_one_step_says_that_nothing_is_known(bench, two_runs):
    ended = bench("run", *SMALL, "++workload.reader.batch_size=1", "++hydra.run.dir=few", "-n", "8")
    assert ended.code == 0, ended.err
    assert "bound by unknown: no step counted" in ended.out
    assert "s were steps that do not count, as in DLIO the first of each epoch; they" in ended.out
    reported = bench("report", "few").out
    assert "AU " not in reported.partition("bound by unknown: no step counted")[0]
    ended = bench("compare", "two", "few", "--json")
    assert not {"au", "throughput", "io"} & {row["measure"] for row in ended.document["rows"]}
    ended = bench("compare", "two", "few", "--fail-if", "au < 0.5")
    assert ended.code == 3
    assert "'au < 0.5' cannot be told" in ended.err


def test_another_data_set_is_replaced_by_as_many_threads_as_asked_for(bench, tmp_path):
    assert bench("generate", *SMALL, "++hydra.run.dir=out").code == 0
    fewer = ("++workload.dataset.num_files_train=4", "++hydra.run.dir=out", "--threads=1")
    ended = bench("run", *SMALL, "++workload.workflow.generate_data=True", *fewer[:2])
    assert "headrace bench generate WORDS --overwrite" in ended.err
    assert ended.code != 0
    ended = bench("run", *SMALL, *fewer[:2], "--overwrite")
    assert "headrace bench generate has it" in ended.err
    assert bench("generate", *SMALL, *fewer, "--overwrite").code == 0
    assert sum(p.is_file() for p in (tmp_path / "data/default/train").rglob("*.npz")) == 4


def test_a_run_may_stage_its_data(bench, tmp_path):
    assert bench("generate", *SMALL, "++hydra.run.dir=out").code == 0
    ended = bench("run", *SMALL, "++hydra.run.dir=out", "--stage", "local", "--json")
    own = ended.document["summary"]["headrace"]
    assert own["time_to_solution"]["staging_s"] > 0
    assert own["provenance"]["staged"] == "local"
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["workload=unet3d_h10"], "Did you mean unet3d_h100?", 2),
        (["workload=default", "reader.batch_size=3"], "++workload.reader.batch_size", 2),
        (["workload=default", "--multirun"], "run the command once for each value", 2),
        (["workload=default", "--simulate=floppy"], "expected one of", 2),
        (["workload=default", "++workload.train.epochs=none"], "expected a whole number", 2),
        (["workload=default"], "headrace bench generate", 3),
    ],
)
def test_mistakes_are_told_with_the_next_step(bench, words, said, code):
    ended = bench("run", *words)
    assert said in ended.err
    assert ended.code == code
    ended = bench("run", *words, "--json")
    assert said.split("?")[0] in json.dumps(ended.document["error"])


def test_the_shipped_workloads_are_listed(bench):
    assert "unet3d_h100 " in bench("workloads").out
    rows = bench("workloads", "--json").document["workloads"]
    assert {"name": "dlrm", "batch_size": 1}.items() <= next(
        r for r in rows if r["name"] == "dlrm"
    ).items()


@pytest.fixture
def two_runs(bench):
    """Runs of 2 and of 1 accelerators in `two` and `one`, without reading."""
    common = ["--engine=null", *SMALL, "++workload.reader.batch_size=1", "--quiet"]
    assert bench("generate", *SMALL, "++hydra.run.dir=out").code == 0
    for name, number in (("two", 2), ("one", 1)):
        ended = bench("run", *common, f"++hydra.run.dir={name}", "-n", number)
        assert ended.code == 0, ended.err


def test_report_compare_and_trace(bench, two_runs, tmp_path):
    ended = bench("report", "two")
    assert "AU " in ended.out
    assert "This is not an MLPerf result." in ended.out
    for folder, host in (("two", "harness"), ("one", "processors")):
        path = tmp_path / folder / "summary.json"
        summary = json.loads(path.read_text())
        summary["headrace"] |= {"bound": host, "bound_reason": "busy"}
        path.write_text(json.dumps(summary))  # as if this host had been busy
    assert "bound by harness: busy" in bench("report", "two").out
    ended = bench("compare", "two", "one", "--fail-if", "au > 0.001")
    assert ended.code == 1
    assert "%); B was bound by processors: that says nothing about the storage" in ended.out
    found = bench("compare", "two", "one", "--fail-if", "au > 0.001", "--json").document
    assert found["conditions"][0]["doubt"].startswith("B was bound by processors: ")
    assert [found["bounds"][name][0]["bound"] for name in "ab"] == ["harness", "processors"]
    ended = bench("report", "two", "--html", "page.html", "--json")
    assert ended.document["bounds"][0]["reason"] == "busy"
    assert ended.document["html"] == "page.html"
    assert ended.document["measures"]["accelerators"]["mean"] == 2
    assert "This is not an MLPerf result." in (tmp_path / "page.html").read_text()
    (tmp_path / "link.html").symlink_to("same.html")
    assert bench("report", "two", "--html", "link.html").code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "same.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    ended = bench("compare", "two", "one", "--fail-if", "accelerators < -10%")
    assert ended.code == 1
    assert "accelerators < -10%: holds (accelerators -50.00%)" in ended.out
    assert "note: num_accelerators differs: 2, 1" in ended.err
    assert bench("compare", "two", "one", "--html", "both.html").code == 0
    page = (tmp_path / "both.html").read_text()
    for shown in (
        "A: two",
        "B: one",
        "-50.00%",
        "num_accelerators",
        "This is not an MLPerf result.",
    ):
        assert shown in page
    ended = bench("compare", "two", "one", "--fail-if", "accelerators < -60%", "--json")
    assert (ended.code, ended.document["failed"]) == (0, False)
    assert bench("trace", "two", "-o", "trace.json", "--steps=3").code == 0
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) >= 2 * (
        1 + 2 + 3 * 2
    )
    assert not list(tmp_path.glob("**/*.partial"))


def test_sweep(bench, tmp_path):
    words = ["default", *SMALL, "++workload.workflow.generate_data=True", "++hydra.run.dir=out",
             "++workload.reader.batch_size=1"]  # fmt: skip
    ended = bench("sweep", *words, "--engine=null", "--accelerators=1..2", "--until=au<0.001",
                  "--no-ceiling")  # fmt: skip
    assert ended.code == 0, ended.err
    assert "until au<0.001: this storage feeds at least 2 accelerators" in ended.out
    assert "fed: no where au<0.001 holds; bound by: what took" in ended.out
    ended = bench("sweep", *words, "--engine=null", "--accelerators=1..2", "--until=au<=100%",
                  "--no-ceiling", "--json")  # fmt: skip
    assert (ended.code, ended.document["most"]) == (1, None)
    assert [probe["accelerators"] for probe in ended.document["probes"]] == [1]


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["report", "nowhere"], "no summary.json", 3),
        (["compare", "a", "b", "--fail-if", "auu < 1"], "did you mean au?", 2),
        (["trace", "nowhere", "-o", "x"], "cannot be read: No such file", 3),
        (["sweep", "default", "--accelerators=4..1"], "expected LEAST..MOST", 2),
        (["sweep", "default", "--until=au"], "is no condition", 2),
        (["sweep", "defult"], "Did you mean default?", 2),
    ],
)
def test_mistakes_about_results(bench, words, said, code):
    ended = bench(*words)
    assert said in ended.err
    assert ended.code == code

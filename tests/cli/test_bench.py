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
        "run", *SMALL, "++hydra.run.dir=out", "-n", "2", "--ceiling", "--repeats=2", "--quiet"
    )
    assert ended.code == 0, ended.err
    for said in ("[METRIC] Number of Simulated Accelerators: 2", "bound by: ", "AU of 2 runs: ",
                 "This is not an MLPerf result."):  # fmt: skip
        assert said in ended.out
    ended = bench("run", "--json", "--engine=null", *SMALL, "++hydra.run.dir=out")
    found = ended.document
    assert found["summary"]["headrace"]["engine"] == "null"
    assert found["folder"] == "out"
    assert (tmp_path / "out/summary.json").exists()


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["workload=unet3d_h10"], "Did you mean unet3d_h100?", 2),
        (["workload=default", "reader.batch_size=3"], "++workload.reader.batch_size", 2),
        (["workload=default", "--multirun"], "run the command once for each value", 2),
        (["workload=default", "--barrier=never"], "expected step or epoch", 2),
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

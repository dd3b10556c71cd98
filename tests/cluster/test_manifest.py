"""Run manifests, and what `headrace compare-runs` tells of two."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.launch.launching import HEADRACE
from headrace.cluster.executor import JobState, JobStatus
from headrace.cluster.local.jobs import LocalRequest, queued_job
from headrace.cluster.manifest import (
    compare,
    hardware,
    interruptions,
    read_manifest,
    relevant_environment,
    script_facts,
    told_by_run,
    versions,
    write_manifest,
)
from headrace.errors import LaunchError

RUN = {
    "run": {"job": "1", "nodes": ["a"]},
    "versions": {"torch": "2.13.0", "numpy": "2.4"},
    "order": {"seed": 7, "hash": "00ff"},
    "environment": {"OMP_NUM_THREADS": "4"},
    "result": {"wall_s": 1.0},
}


def compare_runs(*words):
    ended = subprocess.run([*HEADRACE, "compare-runs", *map(str, words)], check=False, capture_output=True,
                           text=True)  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_two_runs_of_the_same_differ_in_time_and_place_only(tmp_path):
    write_manifest(tmp_path / "a.json", RUN)
    write_manifest(tmp_path / "b.json", RUN | {"run": {"job": "2", "nodes": ["b"]}, "result": {}})
    code, out, err = compare_runs(tmp_path / "a.json", tmp_path / "b.json")
    assert (code, out) == (0, "nothing differs that may change results\n")
    assert "--all shows them" in err
    code, out, _ = compare_runs("--all", tmp_path / "a.json", tmp_path / "b.json")
    assert code == 0
    assert 'run.job: "1" -> "2"\n' in out


def test_two_lives_of_one_job_differ_in_how_far_they_came():
    far = {"order": {"seed": 7, "hash": "0100", "position": 64, "epoch": 1, "steps": 9}}
    life = {"run": {"job": "1", "restarts": 1}}
    assert all(each.incidental for each in compare(RUN, RUN | far | life))
    told = [each.key for each in compare(RUN, RUN | far | {"run": {"job": "2"}})]
    assert "order.position" in told[:4]
    assert not compare(RUN, RUN | {"order": {"seed": 8}} | life)[0].incidental
    other = {"order": far["order"] | {"hash": "0200"}}  # at the same place: another order
    assert not compare(RUN | far, RUN | other | life)[0].incidental


def test_what_may_change_results_is_told(tmp_path):
    other = json.loads(json.dumps(RUN)) | {"run": {"job": "2"}}
    other["versions"]["torch"] = "2.12.0"
    other["order"]["hash"] = "0100"
    del other["environment"]["OMP_NUM_THREADS"]
    write_manifest(tmp_path / "a.json", RUN)
    write_manifest(tmp_path / "b.json", other)
    code, out, _ = compare_runs(tmp_path / "a.json", tmp_path / "b.json")
    assert code == 1
    assert out.splitlines() == [
        'environment.OMP_NUM_THREADS: "4" -> (none)',
        'order.hash: "00ff" -> "0100"',
        'versions.torch: "2.13.0" -> "2.12.0"',
    ]
    code, out, _ = compare_runs("--json", tmp_path / "a.json", tmp_path / "b.json")
    document = json.loads(out)
    assert code == 1
    assert document["same"] is False
    assert document["differences"][1] == {
        "key": "order.hash", "a": "00ff", "b": "0100", "incidental": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "words"),
    [(None, "cannot be read"), ("{", "of a run's manifest is no JSON"), ("[]", "is a list, expected an object"),
     ('{"version": 9}', "version of a run's manifest is 9"),
     ('{"version": 2}', "the checksum of a run's manifest is missing")],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(tmp_path, data, words):
    path = tmp_path / "x.json"
    if data is not None:
        path.write_text(data)
    with pytest.raises(LaunchError, match=words):
        read_manifest(path)
    assert compare_runs(path, path)[0] == 3


def test_secrets_and_what_every_run_has_anew_stay_out_of_it():
    found = relevant_environment(
        {
            "NCCL_DEBUG": "INFO", "HEADRACE_DHCHAP_SECRET": "x", "HEADRACE_TOKEN": "x", "HOME": "/root",
            "HEADRACE_LAUNCH": "x", "HEADRACE_JOB_ID": "4", "CUDA_API_KEY": "x", "HEADRACE_TUNE": "0",
        }
    )  # fmt: skip
    assert found == {"NCCL_DEBUG": "INFO", "HEADRACE_TUNE": "0"}


def test_a_script_is_known_by_its_hash_and_commit(tmp_path):
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git/refs/heads/main").write_text("abc123\n")
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    facts = script_facts([str(script), "--lr", "1"])
    assert facts["commit"] == "abc123"
    assert len(facts["script_sha256"]) == 64
    (tmp_path / ".git/refs/heads/main").unlink()
    (tmp_path / ".git/packed-refs").write_text("# pack\ndef456 refs/heads/main\n")
    assert script_facts([str(script)])["commit"] == "def456"


def test_versions_and_hardware_are_those_of_this_machine(tmp_path):
    assert versions()["headrace"]
    assert hardware()["cpus"] >= 1
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:17:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H100\nIRQ: 1\n")
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Fast One\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\n")
    found = hardware(tmp_path)
    assert (found["gpus"], found["cpu"], found["memory_bytes"]) == (
        ["NVIDIA H100"], "Fast One", 1024000,
    )  # fmt: skip


def test_an_equal_pair_has_no_difference():
    assert compare(RUN, RUN) == []


@pytest.mark.parametrize(
    ("outcome", "resumed", "told"),
    [
        ("running", "", "goes on with 1 of 2 nodes"),
        ("failed", "", "went on with 1 of 2 nodes"),
        ("completed", "resumed at step 9", "went on with 1 of 2 nodes, resumed at step 9"),
    ],
)
def test_a_launch_on_fewer_nodes_than_the_first_is_told(tmp_path, outcome, resumed, told):
    def wrote(name, began_s, nodes, **result):
        names = [f"n{i}" for i in range(nodes)]
        document = {"run": {"began_s": began_s, "nodes": names}, "layout": {"nodes": nodes}}
        lost = {"outcome": "continued", "why": "node n1 is lost.", "wall_s": 1.5}
        result = {**lost, "resumed": ""} | result
        write_manifest(tmp_path / f"headrace-runs/7-0{name}.json", document | {"result": result})

    wrote("", 1000.0, 4)  # of another job of that number
    wrote("-2", 9000.0, 3, outcome="completed")  # the script launched another thing first
    wrote("-3", 9000.0, 2)
    write_manifest(  # of the life before
        tmp_path / "headrace-runs/7-1.json",
        {"run": {"began_s": 9000.0}, "layout": {"nodes": 2},
         "result": {"outcome": "requeued", "why": "node n1 is lost.", "wall_s": 1.5, "resumed": ""}},
    )  # fmt: skip
    assert told_by_run(tmp_path, "7", 0, 8990.0, 9100.0) == ("node n1 is lost.", "", False, ())
    wrote("-4", 9050.0, 1, outcome=outcome, resumed=resumed, why="")
    assert told_by_run(tmp_path, "7", 0, 8990.0, 9100.0) == ("", told, outcome == "failed", ("n0",))
    status = JobStatus(
        "7", "train", JobState.FAILED, nodes=("n0", "n1"), submitted_s=8990.0, ended_s=9100.0,
        folder=tmp_path,
    )  # fmt: skip
    assert status.with_run().nodes == ("n0",)
    ended = [(9001.5, "node n1 is lost.")] * 2
    assert interruptions(tmp_path, "7", 1, 8990.0, 9100.0) == ended
    row = queued_job(status, LocalRequest(nodes=2, cpus_per_task=4), "ann", "gpu", None)
    assert row.nodes == ("n0",)
    assert [(part.node, part.cpus) for part in row.allocations] == [("n0", 4)]


def test_a_folder_that_cannot_be_looked_into_tells_nothing(tmp_path, monkeypatch):
    def stale(_: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "exists", stale)
    assert told_by_run(tmp_path, "7", 0, 0.0) == ("", "", False, ())


def test_a_fifo_in_the_place_of_a_manifest_is_not_waited_for(tmp_path):
    (tmp_path / "headrace-runs").mkdir()
    os.mkfifo(tmp_path / "headrace-runs/7-0.json")
    look = (
        "import sys; from pathlib import Path; from headrace.cluster.manifest import told_by_run; "
        "assert told_by_run(Path(sys.argv[1]), '7', 0, 0.0) == ('', '', False, ())"
    )
    subprocess.run([sys.executable, "-c", look, str(tmp_path)], check=True, timeout=30)

"""How far a recorded job and its emulation are alike: known differences have known figures."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import numpy as np
import pytest

from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.dataset import plan_of
from headrace.bench.engines import EngineContext
from headrace.bench.engines.replay import ReplayEngine
from headrace.errors import BenchError
from headrace.insight.record.similarity import (
    FIGURES,
    behaviour_of,
    lines_of,
    of_amounts,
    of_distributions,
    similarity_of,
    similarity_page,
)
from headrace.trace.recorded import Recorded, read_recorded
from insight.recorded_runs import HEADRACE, record, torch_command
from tests_shared import write_real_images


def _recorded(**given):
    """Two files of 1,000 and 3,000 bytes, read twice, a second apart; three steps in each epoch."""
    none = np.zeros(0, np.float32)
    known = {
        "names": ["a", "b"], "file_bytes": np.array([1000, 3000]), "file_split": np.zeros(2, np.uint8),
        "sample_file": np.arange(2), "sample_offset": np.zeros(2, np.int64),
        "sample_bytes": np.array([1000, 3000]), "order": np.array([0, 1, 1, 0]),
        "epoch_starts": np.array([0, 2, 4]), "valid_order": np.zeros(0, np.int64),
        "valid_starts": np.zeros(1, np.int64), "open_s": np.full(4, 0.1, np.float32),
        "read_s": np.full(4, 0.1, np.float32), "compute_s": np.full(3, 0.5, np.float32),
        "wait_s": np.zeros(3, np.float32), "decode_s": none, "begin_s": np.arange(4.0), "batch": 1,
    }  # fmt: skip
    return Recorded(**known | given)


def _figures(**given):
    return similarity_of(behaviour_of(_recorded()), behaviour_of(_recorded(**given))).figures


def test_the_same_job_is_wholly_similar():
    assert set(_figures().values()) == {1.0}


def test_each_difference_has_its_figure_and_no_other():
    def unlike(**given):
        figures = _figures(**given)
        return {name: pytest.approx(value) for name, value in figures.items() if value != 1.0}

    # Steps take 0.5 and 0.8 s; the 0.3 s that one side waits count as much as computing.
    assert unlike(wait_s=np.full(3, 0.3, np.float32)) == {"steps": 0.5 / 0.8}
    # The same reads in twice the time.
    assert unlike(begin_s=2.0 * np.arange(4)) == {"rates": 0.5}
    # 1, 2, 3 and 4 requests in calls where the other side has one.
    assert unlike(read_s=np.full(4, 9, np.float32)) == {"concurrency": 4 / 10}
    # Each request has half of the bytes.
    half = np.array([500, 1500])
    assert unlike(sample_bytes=half, file_bytes=half) == {"volume": 0.5, "sizes": 0.5}


def test_a_pause_in_the_middle_is_seen_in_the_rates():
    late = np.array([0.0, 1.0, 12.0, 13.0])
    # Half of the bytes come ten seconds later: a byte comes after 6.5 s in the mean, without it after 1.5 s.
    assert _figures(begin_s=late)["rates"] == pytest.approx(1.5 / 6.5)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 1.0], [2.0], 0.5),
        ([0.0, 2.0], [1.0, 1.0], 1 / 3),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], 1.0),
        ([0.0], [0.0], 1.0),
        ([0.0], [5.0], 0.0),
    ],
)
def test_distributions_are_alike_by_the_area_below_both(a, b, expected):
    assert of_distributions(np.array(a), np.array(b)) == pytest.approx(expected)
    assert of_distributions(np.array(b), np.array(a)) == pytest.approx(expected)


def test_amounts_are_alike_by_their_ratio():
    assert (of_amounts(3, 4), of_amounts(4, 3), of_amounts(0, 0), of_amounts(0, 1)) == (
        0.75,
        0.75,
        1,
        0,
    )


@pytest.mark.parametrize(
    ("missing", "figures"),
    [("begin_s", {"volume", "sizes", "steps"}), ("compute_s", {*FIGURES} - {"steps"})],
)
def test_what_a_record_does_not_have_is_not_compared(missing, figures):
    given = {missing: np.zeros(0, np.float32)}
    if missing == "compute_s":
        given["wait_s"] = np.zeros(0, np.float32)
    similarity = similarity_of(behaviour_of(_recorded()), behaviour_of(_recorded(**given)))
    assert set(similarity.figures) == figures
    assert "similarity" not in similarity.values
    lines = "\n".join(lines_of(similarity))
    assert lines.count("not known") >= 2 * (len(FIGURES) - len(figures))
    assert "these (mean)" in lines
    assert similarity_page(similarity, ("a", "b")).count("<figure>") == len(figures) - 1
    facts = similarity.document()
    assert {name for name, value in facts["figures"].items() if value is None} == {
        *FIGURES
    } - figures


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of two workers over real images, and its emulation; both recorded, by one command each."""
    folder = tmp_path_factory.mktemp("job")
    images = write_real_images(folder / "photos", 16)
    (folder / "emulated").mkdir()
    job = record(folder, *torch_command(folder / "train.py", images, workers=2, batch=6))
    assert job.code == 0, job.err
    bench = [*HEADRACE, "bench", "run", "--workload", job.output, "--data-folder", images]
    emulated = record(
        folder / "emulated", *bench, f"++hydra.run.dir={folder}/results",
        options=("--root", images),
    )  # fmt: skip
    assert emulated.code == 0, emulated.err
    return job, emulated, folder


def _compare(*words):
    done = subprocess.run(
        [*HEADRACE, "bench", "compare", *map(str, words)], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def _shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_an_emulation_reads_what_its_job_read(job):
    real, emulated, folder = job
    page, picture = folder / "page.html", folder / "picture.svg"
    code, out, err = _compare(
        real.output, emulated.output, "--json", "--html", page, "--svg", picture
    )
    assert code == 0, err
    document = json.loads(out)
    figures = document["figures"]
    assert (figures["volume"], figures["sizes"]) == (1.0, 1.0)
    assert document["similarity"] == pytest.approx(np.mean(list(figures.values())))
    assert document["job"]["requests"] == document["emulation"]["requests"] == 96
    assert document["job"]["steps"] == document["emulation"]["steps"]
    assert emulated.job["batch_by"] == "trace"
    assert "Steps up to a time" in page.read_text()
    assert picture.read_text().startswith("<svg xmlns=")


def test_a_gate_has_the_same_conditions_as_that_of_runs(job, tmp_path):
    real, emulated, _ = job
    gate = "--fail-if"
    assert _compare(real.output, emulated.output, gate, "volume < 1", gate, "steps > 1")[0] == 0
    code, out, _ = _compare(real.output, emulated.output, gate, "similarity <= 1", "--json")
    held = json.loads(out)["conditions"]
    assert (code, held[0]["condition"], held[0]["holds"]) == (1, "similarity <= 1", True)
    code, _, err = _compare(real.output, emulated.output, gate, "speed < 1")
    assert code == 2
    assert "similarity" in err
    # Without the times of steps the mean is none: a gate upon it must not be open.
    recorded = read_recorded(real.output.with_name("job.requests.npz"))
    none = np.zeros(0, np.float32)
    untimed = dataclasses.replace(recorded, compute_s=none, wait_s=none)
    untimed.write(tmp_path / "job.requests.npz")
    (tmp_path / "job.yaml").write_bytes(real.output.read_bytes())
    assert _compare(tmp_path / "job.yaml", emulated.output, gate, "volume < 1")[0] == 0
    code, _, err = _compare(tmp_path / "job.yaml", emulated.output, gate, "similarity < 0.9")
    assert code not in (0, 1)
    assert "cannot be told" in err


def test_what_is_not_two_recorded_jobs_is_refused(job):
    real, _, folder = job
    assert _compare(real.output, folder)[0] == 2
    code, _, err = _compare(real.output, "unet3d_h100.yaml")
    assert code != 0
    assert "unet3d_h100" in err


def test_a_run_goes_on_without_the_trace_that_cannot_be_written(job, tmp_path):
    real, _, folder = job
    (tmp_path / "taken").touch()
    done = subprocess.run(
        [
            *HEADRACE, "bench", "run", "--workload", str(real.output), "--data-folder",
            str(folder / "photos"), f"++hydra.run.dir={tmp_path}/results", "--json",
        ],
        capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"HEADRACE_TRACE": str(tmp_path / "taken")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["summary"]["headrace"]["bytes"] == 2 * real.job["bytes"]
    assert "no trace of the steps" in done.stderr


def test_recorded_times_are_replayed_unless_others_are_given(job):
    real, _, _ = job
    recorded = read_recorded(real.output.with_name("job.requests.npz"))

    def order(*overrides):
        words = [f"workload={real.output}", *overrides]
        return plan_of(load_workload(parse_command_line(words)), "train", 1, 0).recorded

    exact = order()
    steps = -(-np.diff(recorded.epoch_starts) // recorded.batch)
    assert len(exact.compute_s) == steps.sum()
    seen = np.delete(exact.compute_s, np.cumsum(steps) - 1)
    assert np.array_equal(seen, recorded.compute_s.astype(float))
    assert len(exact.work_s) == len(recorded.order)
    assert not len(order("++workload.train.computation_time=0.5").compute_s)
    assert not len(order("++workload.reader.preprocess_time=0.5").work_s)
    assert len(order("++workload.reader.preprocess_time=0.5").compute_s)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("damage", "why"), [(lambda path: path.unlink(), "No such file"), (_shorten, "expected")]
)
def test_an_emulation_names_the_file_that_changed_under_it(job, tmp_path, workers, damage, why):
    real, _, _ = job
    line = [f"workload={real.output}", f"++workload.reader.read_threads={workers}"]
    loaded = load_workload(parse_command_line(line))
    plan = plan_of(loaded, "train", 1, 0)
    recorded = read_recorded(real.output.with_name("job.requests.npz"))
    files = recorded.files_of("train").tolist()
    paths = [tmp_path / f"{at}.png" for at in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(b"x" * int(recorded.file_bytes[file]))
    changed = paths[plan.indices(1, 0, 0)[3]]
    damage(changed)
    context = EngineContext(loaded.workload, {"train": plan}, {"train": [str(p) for p in paths]}, 1)
    source = ReplayEngine(context).open("train", 1, 0)
    with pytest.raises(BenchError, match=f"{changed.name}.*{why}"):
        source.next()
    source.close()

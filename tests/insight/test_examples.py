"""What explains a run, on the repository's own examples and real images, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests_shared import ROOT, write_real_images

IMAGES = 72
TORCH, DDP = (str(ROOT / "examples" / name) for name in ("train_torch.py", "train_ddp.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the user works: with images in `photos`."""
    folder = tmp_path_factory.mktemp("examples")
    write_real_images(folder / "photos", per_class=IMAGES // 3)
    return folder


def headrace(folder, *words, code=0, **environment):
    """What a command printed."""
    program = "import sys; sys.argv[0] = 'headrace'; from headrace.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "100", **environment}, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_doctor_examines_the_images(folder):
    text = headrace(folder, "doctor", "photos", "--seconds", "3", "--batch", "8", "--step-ms", "50")
    assert f"{IMAGES} png files in 3 classes" in text
    for word in ("storage", "cpu", "machine", "expected", "verdict"):
        assert f"\n{word}" in text


def test_an_example_is_compared_with_and_without(folder):
    """It reads with headrace on both sides: that its files are not all opened is no difference of work."""
    text = headrace(
        folder, "ab", "-n", "1", "--warm", "--compare", "loss", "--", sys.executable, TORCH, "photos",
        "--epochs", "1",
    )  # fmt: skip
    assert "same result? yes" in text
    assert "cannot be compared" not in text
    assert "the command uses headrace by itself" in text


def test_an_example_is_recorded_replayed_and_predicted(folder):
    headrace(
        folder, "record", "-o", "job.yaml", "--report", "record.json", "--", sys.executable, TORCH,
        "photos", "--epochs", "2",
    )  # fmt: skip
    found = json.loads((folder / "record.json").read_text())["job"]
    names = ("files", "epochs", "batch", "batch_by", "workers", "ranks")
    assert {name: found[name] for name in names} == {
        "files": IMAGES, "epochs": 2, "batch": 8, "batch_by": "trace", "workers": 2, "ranks": 1,
    }  # fmt: skip
    text = headrace(folder, "bench", "run", "--workload", "job.yaml", "--data-folder", "photos")
    assert "Training Accelerator Utilization [AU] (%): 0.0000" not in text
    assert "in the page cache before the run" in text
    text = headrace(folder, "whatif", "job.yaml", "--storage", "s3", "--gpu-speed", "2x", "--json")
    predicted = json.loads(text)["predictions"]
    assert [row["storage"] for row in predicted] == ["as recorded", "s3"]
    # So slow that no read which a busy machine held up makes up for it.
    assert predicted[1]["stall"] > predicted[0]["stall"]


def test_an_examples_ranks_are_proved_and_reported(folder):
    headrace(
        folder, "launch", "--ranks-per-node", "2", DDP, "--data", "photos", "--epochs", "1",
        HEADRACE_TRACE="run",
    )  # fmt: skip
    text = headrace(folder, "verify-epoch", "run")
    assert f"run: {IMAGES} samples" in text.replace(str(folder / "photos"), "run")
    assert (
        "Proved: every sample came exactly once over all ranks in 1 whole epoch, but for those that fill"
        in text
    )
    assert "What the awaited batches were doing" in headrace(folder, "report", "run")
    headrace(folder, "report", "run", "--html", "report.html")
    assert "<html" in (folder / "report.html").read_text()

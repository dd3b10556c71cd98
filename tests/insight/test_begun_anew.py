"""A loader that begins at the beginning without a state is no resume: its passes stand beside those before."""

import os
import subprocess
import sys

import pytest

from headrace.insight.deliveries import histories
from headrace.insight.epoch_proof import proof_lines, verify_epochs
from headrace.insight.report.figures import run_figures
from headrace.trace import read_run
from traces.runs import Loaders

TRAIN = """
import json, os, sys
from pathlib import Path
import headrace as hr

train = hr.loader("train", batch_size=4, seed=7)
held = hr.loader("held", batch_size=4, order="sequential")
saved = Path("state.json")
if saved.exists() and "scratch" not in sys.argv:
    train.load_state_dict(json.loads(saved.read_text()))
for epoch in range(train.epoch, 2):
    for step, _ in enumerate(train):
        if step % 3 == 0:
            saved.write_text(json.dumps(train.state_dict()))
        if epoch == 1 and step == 5 and "killed" in sys.argv:
            train.state_dict()  # what was delivered is written
            os._exit(9)
    for _ in held:
        pass
"""


@pytest.fixture
def run(tmp_path):
    """Trains on 48 samples and validates on 16, is killed in the second epoch and started again as told."""
    for name, many in (("train", 48), ("held", 16)):
        folder = tmp_path / name
        folder.mkdir()
        for i in range(many):
            (folder / f"{i:02}.bin").write_bytes(bytes([i]) * 64)
    (tmp_path / "train.py").write_text(TRAIN)
    environment = os.environ | {"HEADRACE_TRACE": str(tmp_path / "run")}

    def start(word):
        subprocess.run(
            [sys.executable, "train.py", word],
            cwd=tmp_path,
            env=environment,
            check=False,
            timeout=100,
        )

    start("killed")
    return tmp_path / "run", start


def test_passes_of_a_loader_that_no_checkpoint_knows_are_no_resume(run):
    folder, start = run
    start("resumed")
    proof = verify_epochs(read_run(str(folder)))
    train, held = sorted(proof.loaders, key=lambda one: -one.history.about.samples)
    lines = "\n".join(proof_lines(proof))
    assert proof.holds, lines
    assert [(e.epoch, e.beginning, str(e.state)) for e in held.epochs] == [
        (0, 0, "whole"), (0, 1, "whole"),
    ]  # fmt: skip
    assert held.history.again == 0
    assert [(e.epoch, e.beginning) for e in train.epochs] == [(0, 0), (1, 0)]
    assert train.history.again == 2
    assert run_figures(str(folder)).again == 2
    assert "begun anew 1 time" in lines


def test_training_from_scratch_is_not_proved(run):
    folder, start = run
    start("scratch")
    proof = verify_epochs(read_run(str(folder)))
    lines = "\n".join(proof_lines(proof))
    assert not proof.holds
    assert "attempt 2 is no resume" in lines
    assert "Not proved" in lines
    assert [loader.history.again for loader in proof.loaders] == [0, 0]


def test_a_pass_that_was_cut_off_before_a_loader_began_anew_was_left(tmp_path):
    made = Loaders(tmp_path / "run", origin="beginning")
    made.epoch(0).epoch(1, change=lambda rank, rows: rows[: 10 + rank]).close("")
    Loaders(tmp_path / "run", began=1.8e9 + 60, origin="beginning").epoch(0).close()
    (loader,) = verify_epochs(read_run(str(tmp_path / "run"))).loaders
    assert [str(epoch.state) for epoch in loader.epochs] == ["whole", "left early", "whole"]


@pytest.mark.parametrize("origin", ["state", ""], ids=["with a state", "of an older headrace"])
def test_who_may_have_gone_on_at_the_beginning_is_a_resume(tmp_path, origin):
    Loaders(tmp_path / "run", origin="beginning").epoch(0, stop=10).close("")
    Loaders(tmp_path / "run", began=1.8e9 + 60, origin=origin).epoch(0).close()
    (history,) = histories(read_run(str(tmp_path / "run")).ranks)
    assert (history.again, history.earlier) == (20, [])

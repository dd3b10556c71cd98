"""The tail: what samples that do not fill the last step of all ranks become, under a real launcher."""

from __future__ import annotations

import shutil

import pytest

from launchers.judge import SAMPLES, outcome
from launchers.matrix import Run, torchrun

RANKS, BATCH = 4, 8  # 600 = 18 * 32 + 24: the last step lacks 8 samples
STEPS = SAMPLES // (RANKS * BATCH)
SAID = "600 samples do not fill 19 steps of 4 ranks with 8 samples each: 8 samples come twice"

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")


def delivered(numbered, folder, *words):
    run = Run(numbered, folder, "plain.py", ("--batch-size", str(BATCH), *words))
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS), run.python]
    ended = run.run([*command, *run.program])
    return outcome("mpirun -n 4", "loader", ended, run.out)


def test_padding_repeats_samples_and_says_so_with_the_way_out(numbered, tmp_path):
    padded = delivered(numbered, tmp_path)
    assert padded.exit == 0, str(padded)
    assert (padded.delivered, padded.unique) == (608, SAMPLES)
    assert [len(share) for share in padded.shares] == [152] * RANKS
    assert padded.text.count(SAID) == 1, str(padded)
    assert "tail='exact' gives each once" in padded.text
    assert "tail='drop' leaves 24 out" in padded.text


def test_padding_that_is_meant_is_not_remarked(numbered, tmp_path):
    padded = delivered(numbered, tmp_path, "--tail", "pad")
    assert (padded.exit, padded.delivered, padded.unique) == (0, 608, SAMPLES), str(padded)
    assert "come twice" not in padded.text


def test_dropping_leaves_samples_out_and_repeats_none(numbered, tmp_path):
    dropped = delivered(numbered, tmp_path, "--tail", "drop")
    assert dropped.exit == 0, str(dropped)
    assert (dropped.delivered, dropped.unique) == (576, 576)
    assert {len(share) for share in dropped.shares} == {STEPS * BATCH}
    assert "come twice" not in dropped.text


def test_exactly_once_is_one_argument_away(numbered, tmp_path):
    exact = delivered(numbered, tmp_path, "--tail", "exact")
    assert exact.is_exactly_once, str(exact)
    assert [len(share) for share in exact.shares] == [150] * RANKS
    assert "come twice" not in exact.text


@pytest.mark.slow
@pytest.mark.parametrize(("tail", "samples"), [("exact", 600), ("drop", 588), ("pad", 602)])
def test_whatever_the_tail_ranks_that_meet_at_each_step_come_to_the_end(
    numbered, tmp_path, tail, samples
):
    words = ("--batch-size", "7", "--tail", tail, "--loaders", "store")
    run = Run(numbered, tmp_path, "ddp.py", words)
    ended = run.run(torchrun(run, "--standalone", "--nproc-per-node=2"))
    together = outcome("torchrun", "store", ended, run.out)
    assert together.exit == 0, str(together)
    assert together.delivered == samples
    assert together.unique == min(samples, SAMPLES)
    assert len({len(share) for share in together.shares}) == 1

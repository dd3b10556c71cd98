"""Each launcher with each loader: every sample exactly once over all processes, as counted by a judge.

`PYTHONPATH=tests python -m launchers` prints the same as a table.
"""

from __future__ import annotations

import pytest

from launchers.judge import verdicts
from launchers.matrix import LAUNCHERS

RIGHT = {"once", "as torch", "the reference"}


def delivers(launcher, loaders, request, folder):
    """Start it, and assert that each loader delivered what it must."""
    if (lacks := launcher.missing()) is not None:
        pytest.skip(lacks)
    slurm = request.getfixturevalue("slurm") if launcher.slurm else None
    data = request.getfixturevalue("numbered")
    outcomes = launcher.outcomes(data, folder, slurm, loaders)
    for outcome, verdict in verdicts(outcomes):
        if launcher.refuses:
            assert verdict == "refused", f"{verdict}: {outcome}"
        else:
            assert verdict in RIGHT, f"{verdict}: {outcome}"
            assert len(outcome.shares) == launcher.processes, str(outcome)


@pytest.mark.parametrize(
    "launcher", [each for each in LAUNCHERS if each.light], ids=lambda each: each.name
)
def test_every_sample_is_delivered_once(launcher, request, tmp_path):
    delivers(launcher, launcher.light, request, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.name)
def test_every_loader_delivers_as_it_must(launcher, request, tmp_path):
    delivers(launcher, None, request, tmp_path)

"""The GPT's recipe: it learns, and killed and started again, on two ranks, its loss curve is the same."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

import headrace as hr
from headrace.cluster.recipes import recipes_folder

from .ranks import by_hand

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)

STEPS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory, root):
    """A store of real text: the licence and the pages of this repository."""
    folder = tmp_path_factory.mktemp("gpt")
    command = [
        sys.executable,
        "-W",
        "error",
        recipes_folder() / "gpt" / "prepare.py",
        folder / "data",
    ]
    for _ in range(2):  # the second time it finds its work done
        subprocess.run(
            [*command, "--texts", root / "docs"], check=True, capture_output=True, timeout=60
        )
    return folder / "data" / "train.hr"


def arguments(data, checkpoints):
    return [
        "--data", str(data), "--checkpoints", str(checkpoints), "--steps", str(STEPS), "--length", "64",
        "--batch-size", "4", "--width", "32", "--blocks", "2", "--save-every", "5", "--show-every", "1",
    ]  # fmt: skip


def curve(log):
    """Loss by step."""
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    return {line["step"]: line["loss"] for line in lines}


def test_killed_and_resumed_on_two_ranks_its_loss_curve_is_the_same(data, tmp_path):
    with by_hand("gpt", 2, tmp_path / "whole.log", arguments(data, tmp_path / "whole")) as ranks:
        assert set(ranks.codes()) == {0}, ranks.text()
    whole = curve(tmp_path / "whole.log")
    assert sorted(whole) == list(range(1, STEPS + 1))
    assert whole[STEPS] < whole[1]
    given = arguments(data, tmp_path / "parts")
    for _ in range(4):  # on a busy machine the kill may come when all is done
        (tmp_path / "killed.log").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "parts", ignore_errors=True)
        with by_hand("gpt", 2, tmp_path / "killed.log", given) as ranks:
            until_s = time.monotonic() + 150.0
            while hr.checkpoint.latest(tmp_path / "parts") is None:
                assert time.monotonic() < until_s, ranks.text()
                time.sleep(0.002)
            ranks.signal(signal.SIGKILL)
            ranks.codes()
        killed = curve(tmp_path / "killed.log")
        if max(killed, default=0) < STEPS:
            break
    with by_hand("gpt", 2, tmp_path / "rest.log", given) as ranks:
        assert set(ranks.codes()) == {0}, ranks.text()
    rest = curve(tmp_path / "rest.log")
    assert max(killed, default=0) < STEPS
    assert min(rest) > 1
    assert killed | rest == whole

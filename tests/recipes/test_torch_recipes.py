"""PyTorch's recipes: run as they are, on two ranks, and go on as if they had never been stopped."""

import shutil
import signal

import pytest

import headrace as hr

from .ranks import Ranks, epochs_of
from .resuming import arguments, go_on, same, stop_in_the_first_epoch, whole

SAVED_AT = {signal.SIGTERM: 10, signal.SIGKILL: 5}
"""Asked to stop, the ranks leave together where they ask; killed, they have what was saved before."""


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def undisturbed(request, data, tmp_path_factory):
    """(recipe, its folder, its epochs) of a run that is never stopped."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, whole(request.param, data, folder)


def test_it_learns_and_each_epoch_has_all_samples(undisturbed, data):
    _, _, lines = undisturbed
    assert lines[-1]["loss"] < lines[0]["loss"]
    with hr.open(data / "train.hr") as store:
        padded = -(-len(store) // 8) * 8
    assert {line["samples"] for line in lines} == {padded}
    assert all(line["bytes"] > 0 for line in lines)


def test_stopped_it_goes_on_with_the_very_next_batch(undisturbed, data, tmp_path):
    recipe, folder, expected = undisturbed
    number = signal.SIGKILL if recipe == "fsdp" else signal.SIGTERM
    step = stop_in_the_first_epoch(recipe, data, tmp_path, number)
    assert step % SAVED_AT[number] == 0
    shutil.copytree(tmp_path, folder / "stopped")  # for the test below
    assert same(go_on(recipe, data, tmp_path), expected)


def test_ddp_goes_on_with_another_number_of_ranks_in_the_middle_of_an_epoch(undisturbed, data):
    recipe, folder, _ = undisturbed
    if recipe != "ddp":
        pytest.skip("each of FSDP's ranks has a part of its own")
    folder /= "stopped"
    state = hr.checkpoint.load(folder / "parts", rank=0, world_size=1).tree["loader"]
    with hr.open(data / "train.hr") as store:
        left = len(store) - state["position"]
    assert state["position"] > 0
    before = len(epochs_of(folder / "stopped.log"))
    line = go_on(recipe, data, folder, size=1)[before]
    assert line["epoch"] == state["epoch"]
    assert line["samples"] == left  # one rank pads nothing: each sample that was left, once


def test_fsdp_refuses_another_number_of_ranks_and_says_why(undisturbed, data):
    recipe, folder, _ = undisturbed
    if recipe != "fsdp":
        pytest.skip("all of DDP's ranks save the same")
    log = folder / "other.log"
    more = arguments(data, folder / "whole", "--epochs", "4")
    with Ranks(recipe, 1, log, more) as ranks:
        assert ranks.processes[0].wait(100) != 0
    assert "was saved by 2 ranks, and is loaded by 1" in log.read_text()

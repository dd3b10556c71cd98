"""PyTorch's recipes: run as they are, on two ranks, and go on as if they had never been stopped."""

import importlib.util
import shutil

import pytest

import headrace as hr
from headrace.cluster.executor import executor

from .jobs import run_job
from .ranks import by_hand, epochs_of
from .resuming import EPOCHS, arguments, go_on, kill, same, stop

pytestmark = pytest.mark.timeout(600)  # each is some starts of torch on two ranks


@pytest.fixture(scope="module", params=["ddp", "fsdp", "mpi"])
def undisturbed(request, data, tmp_path_factory):
    """(recipe, its folder, its epochs) of a job of this machine that is never stopped."""
    from headrace.cluster.local.executor import LocalExecutor

    if request.param == "mpi" and not (
        shutil.which("mpirun") and importlib.util.find_spec("mpi4py")
    ):
        pytest.skip("mpirun or mpi4py is missing")
    folder = tmp_path_factory.mktemp(request.param)
    here = LocalExecutor(folder / "jobs")
    return request.param, folder, run_job(here, request.param, data, folder, folder / "whole")


def test_it_learns_and_each_epoch_has_all_samples(undisturbed, data):
    _, _, lines = undisturbed
    assert [line["epoch"] for line in lines] == list(range(EPOCHS))
    assert lines[-1]["loss"] < lines[0]["loss"]
    with hr.open(data / "train.hr") as store:
        padded = -(-len(store) // 8) * 8
    assert {line["samples"] for line in lines} == {padded}
    assert all(line["bytes"] > 0 for line in lines)


def test_asked_to_stop_it_goes_on_with_the_very_next_batch(undisturbed, data, tmp_path, request):
    """The rest as a job of Slurm's; over MPI on two nodes, where mpirun starts its daemons by srun."""
    recipe, _, expected = undisturbed
    stop(recipe, data, tmp_path)
    request.getfixturevalue("slurm")
    begun = epochs_of(tmp_path / "stopped.log")
    words = ("--nodes=2", "--ntasks-per-node=1") if recipe == "mpi" else ("--ntasks-per-node=2",)
    rest = run_job(executor("slurm"), recipe, data, tmp_path, tmp_path / "parts", shape=words)
    assert same(begun + rest, expected)
    log = (tmp_path / "job.log").read_text()
    assert f"completed, {2 if recipe == 'mpi' else 1} node" in log
    assert f"({recipe}) of" in log  # its report, and no other job's of the same number


@pytest.mark.parametrize("undisturbed", ["ddp"], indirect=True)
def test_killed_it_goes_on_from_what_was_saved_with_any_number_of_ranks(
    undisturbed, data, tmp_path
):
    recipe, _, expected = undisturbed
    (tmp_path / "two").mkdir()
    kill(recipe, data, tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    assert same(go_on(recipe, data, tmp_path / "two"), expected)

    saved = hr.checkpoint.load(tmp_path / "one" / "parts", rank=0, world_size=1).tree["loader"]
    with hr.open(data / "train.hr") as store:
        left = len(store) - saved["position"]
    before = len(epochs_of(tmp_path / "one" / "stopped.log"))
    line = go_on(recipe, data, tmp_path / "one", size=1)[before]
    assert line["epoch"] == saved["epoch"]
    assert line["samples"] == left  # one rank pads nothing: each sample that was left, once


@pytest.mark.parametrize("undisturbed", ["fsdp"], indirect=True)
def test_fsdp_refuses_another_number_of_ranks_and_says_why(undisturbed, data):
    recipe, folder, _ = undisturbed
    log = folder / "other.log"
    more = arguments(data, folder / "whole", "--epochs", "4")
    with by_hand(recipe, 1, log, more) as ranks:
        assert ranks.codes() != [0]
    assert "and is loaded by 1. Load it with 2 ranks" in log.read_text()


@pytest.mark.parametrize("recipe", ["ddp", "fsdp"])
def test_fewer_held_out_images_than_ranks_are_counted_each_once(recipe, data, tmp_path):
    """Of an exact tail of three samples four ranks get 1, 1, 1 and 0; all ranks do the same steps."""
    with hr.open(data / "held-out.hr") as store:
        three = [(store.names[i], bytes(store.read(i)), int(store.labels[i])) for i in range(3)]
    hr.pack(three, tmp_path / "held-out.hr")
    words = ["--epochs", "1", "--batch-size", "32", "--held-out", str(tmp_path / "held-out.hr")]
    more = [*arguments(data, tmp_path / "parts"), *words]
    with by_hand(recipe, 4, tmp_path / "log", more) as ranks:
        assert ranks.codes() == [0] * 4, ranks.text()
    (line,) = epochs_of(tmp_path / "log")
    assert round(line["accuracy"] * 3, 3) in (0, 1, 2, 3)

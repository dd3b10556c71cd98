"""The recipe for JAX: on two ranks, stopped, and gone on as if it had never been stopped."""

import pytest

from headrace.cluster.executor import executor
from recipes.conftest import here, real_slurm, slurm
from recipes.jobs import run_job
from recipes.packing import pack_data
from recipes.ranks import epochs_of
from recipes.resuming import same, stop

__all__ = ["here", "real_slurm", "slurm"]


@pytest.mark.timeout(600)  # three starts of the framework, on two ranks
def test_a_job_that_is_stopped_goes_on_with_the_very_next_batch(tmp_path, here, slurm):
    """Undisturbed as a job of this machine; stopped, and gone on as a job of Slurm's."""
    data = pack_data(tmp_path)
    (tmp_path / "whole").mkdir()
    expected = run_job(here, "jax", data, tmp_path / "whole", tmp_path / "whole" / "checkpoints")
    assert expected[-1]["loss"] < expected[0]["loss"]
    stop("jax", data, tmp_path)
    begun = epochs_of(tmp_path / "stopped.log")
    rest = run_job(executor("slurm"), "jax", data, tmp_path, tmp_path / "parts")
    assert same(begun + rest, expected)

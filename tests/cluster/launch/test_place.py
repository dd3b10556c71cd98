"""What a job has, as its environment says: Slurm's, the local executor's, or none."""

from __future__ import annotations

import pytest

from headrace.cluster.launch.place import JobPlace
from headrace.errors import LaunchError

SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu[08-10],login", "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "64",
    "SLURM_NTASKS_PER_NODE": "4", "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NAME": "resnet",
}  # fmt: skip


def test_slurm_says_what_a_job_has():
    place = JobPlace.here(SLURM)
    assert place == JobPlace(
        scheduler="slurm", job_id="17", name="resnet", nodes=("gpu08", "gpu09", "gpu10", "login"),
        gpus_per_node=8, cpus_per_node=64, tasks_per_node=4, restarts=2,
    )  # fmt: skip


def test_every_node_has_the_cpus_that_the_smallest_has():
    uneven = {"SLURM_JOB_CPUS_PER_NODE": "64(x2),32,64"}
    assert JobPlace.here(SLURM | uneven).cpus_per_node == 32


def test_a_task_of_an_array_is_named_as_slurm_prints_it():
    array = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3"}
    assert JobPlace.here(SLURM | array).job_id == "15_3"


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_JOB_GPUS": "0,2-3"}, 3),
        ({"SLURM_STEP_GPUS": "1", "SLURM_JOB_GPUS": "0,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({}, 0),
    ],
)
def test_gpus_are_counted_where_slurm_does_not_count_them(variables, gpus):
    plain = {k: v for k, v in SLURM.items() if k != "SLURM_GPUS_ON_NODE"}
    assert JobPlace.here(plain | variables).gpus_per_node == gpus


def test_the_local_executor_says_it_under_its_own_names():
    place = JobPlace.here(
        {
            "HEADRACE_JOB_NODES": "here0,here1", "HEADRACE_JOB_ID": "4", "HEADRACE_JOB_RESTARTS": "1",
            "HEADRACE_JOB_GPUS_PER_NODE": "2", "HEADRACE_JOB_CPUS_PER_NODE": "3",
            "HEADRACE_JOB_REQUEUE": "1", **SLURM,
        }
    )  # fmt: skip
    assert (place.scheduler, place.nodes, place.job_id) == ("local", ("here0", "here1"), "4")
    assert (place.gpus_per_node, place.cpus_per_node, place.restarts) == (2, 3, 1)
    assert place.can_requeue is True
    on_ray = {"HEADRACE_JOB_NODES": "10.0.0.1-0a1b2c3d,10.0.0.2", "HEADRACE_JOB_SCHEDULER": "ray"}
    place = JobPlace.here(on_ray)
    assert (place.scheduler, place.nodes) == ("ray", ("10.0.0.1-0a1b2c3d", "10.0.0.2"))


def test_without_a_scheduler_the_job_is_this_machine():
    place = JobPlace.here({})
    assert (place.scheduler, place.job_id, len(place.nodes), place.index) == ("none", "", 1, 0)
    assert place.cpus_per_node >= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_JOB_NUM_NODES": "3"}, "names 4 nodes, SLURM_JOB_NUM_NODES says 3"),
        ({"SLURM_JOB_NODELIST": ""}, "names no nodes"),
        ({"SLURM_NODEID": "4"}, "index is 4, expected 0 to 3"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID is 'x', expected a number"),
        ({"HEADRACE_JOB_NODES": "a", "HEADRACE_JOB_END_S": "soon"}, "expected Unix seconds"),
    ],
)
def test_what_contradicts_itself_is_refused(change, words):
    with pytest.raises(LaunchError, match="(?s)" + words):
        JobPlace.here(SLURM | change)


@pytest.mark.parametrize("text", ["n[1", "n[a-b]", "n[3-1]"])
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(LaunchError, match="list of nodes"):
        JobPlace.here(SLURM | {"SLURM_JOB_NODELIST": text})

"""Which rank, node and job a process is: whose word counts, and when nobody's does."""

import json
import os
import pickle
import subprocess
import sys
import types

import pytest

from headrace.base.job import (
    NodePlace,
    Rank,
    RankDecision,
    is_first_on_node,
    job_id,
    local_rank,
    local_ranks_of,
    which_node,
    which_rank,
)
from headrace.errors import RankError

# As a real Slurm 24.11 sets them: `sbatch -N2 -n4`, the script itself; a task of a step of it.
BATCH = {
    "SLURM_JOB_ID": "3", "SLURM_JOB_NAME": "b.sh", "SLURM_LOCALID": "0", "SLURM_NNODES": "2",
    "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "3,1",
}  # fmt: skip
STEP = {
    **BATCH, "SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1",
}  # fmt: skip
TORCHRUN = {
    "RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
LIGHTNING = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    """No launcher's word about the tests themselves."""
    for name in [
        n for n in os.environ if n.startswith(("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_"))
    ]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "rank 0 of 1"),
        (BATCH, "rank 0 of 1"),
        # The shell of `salloc -n4`; a step of one task in it, as swrun makes it.
        ({"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "4"}, "rank 0 of 1"),
        ({**STEP, "SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
         "rank 0 of 1 by srun"),
        ({**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_STEP_NUM_TASKS": "4"}, "rank 0 of 1"),
        (STEP, "rank 3 of 4 by srun"),
        ({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"}, "rank 3 of 4 by MPICH"),
        (TORCHRUN, "rank 7 of 8 by torchrun"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1 of 2 by RANK and WORLD_SIZE"),
        # One torchrun in each of two tasks; it starts four ranks.
        (TORCHRUN | STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"},
         "rank 7 of 8 by torchrun"),
        ({**STEP, "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, "rank 3 of 4 by srun"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "rank 1 of 2 by Open MPI"),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "rank 1 of 2 by MVAPICH"),
        ({"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "6"}, "rank 5 of 6 by LSF"),
        ({"RANK": "0"}, "rank 0 of 1"),
    ],
)  # fmt: skip
def test_a_launcher_is_believed_where_it_speaks_of_this_process(environment, says):
    assert str(which_rank(environment=environment)) == says


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK='8' and WORLD_SIZE='8'"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "PMI_RANK='-1'"),
        # Exported once for a trial in the shell, and still there when srun starts four tasks.
        ({**STEP, "RANK": "0", "WORLD_SIZE": "1"}, "rank 0 of 1 by RANK and WORLD_SIZE, but 3 of 4 by srun"),
        # srun of two tasks within rank 3 of 4: task 0.
        ({**STEP, "RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
          "SLURM_NTASKS": "2"}, "rank 3 of 4 by RANK and WORLD_SIZE, but 0 of 2 by srun"),
        (LIGHTNING, "WORLD_SIZE='2' says that there are other processes"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK='1' says that there are other processes"),
        ({"RANK": "2"}, "RANK='2' says"),
        # Lightning's own launcher in the shell of swrun.
        ({**LIGHTNING, **STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "WORLD_SIZE='2'"),
        # Four children on each of four nodes, that have their node's task in common.
        ({**STEP, "LOCAL_RANK": "2"}, "LOCAL_RANK='2' says"),
        # `srun -n 4 --pty bash`, where what Slurm started cannot be seen.
        ({**STEP, "SLURM_JOB_NAME": "bash"}, "SLURM_JOB_NAME='bash': this may be a task"),
        # A batch script that was submitted within a step.
        ({**STEP, "SLURM_NTASKS": "2"}, "SLURM_NTASKS='2': this may be a task"),
    ],
)  # fmt: skip
def test_who_is_contradicted_or_says_half_is_refused_and_told_what_to_do(environment, says):
    with pytest.raises(RankError, match=says) as refusal:
        which_rank(environment=environment)
    assert "ass rank= and world_size=" in refusal.value.next_step
    assert which_rank(0, 1, environment) == Rank(0, 1)


@pytest.mark.parametrize(
    ("kind", "index", "rank"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_tf_config_is_believed_where_tensorflow_is_imported(monkeypatch, kind, index, rank):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
    config = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}
    assert str(which_rank(environment=config)) == "rank 0 of 1"
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    assert str(which_rank(environment=config)) == f"rank {rank} of 3 by TF_CONFIG"
    assert which_rank(1, 2, config) == Rank(1, 2)


@pytest.mark.parametrize("text", ["{", "{}", '{"cluster": {}, "task": {"type": "ps", "index": 0}}'])
def test_a_tf_config_that_names_no_worker_is_refused(monkeypatch, text):
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    with pytest.raises(RankError, match="TF_CONFIG=") as refusal:
        which_rank(environment={"TF_CONFIG": text})
    assert "Pass rank=" in refusal.value.next_step


def framework(monkeypatch, rank, world_size):
    """A torch.distributed that has joined its processes."""
    joined = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank,
        get_world_size=lambda: world_size,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.distributed", joined)


@pytest.mark.parametrize(
    ("environment", "rank", "world_size", "refusal"),
    [
        ({}, 1, 2, ""),
        (TORCHRUN, 7, 8, ""),
        (LIGHTNING, 1, 2, ""),
        # Slurm numbers tasks, torch.distributed as it likes; together they are as many.
        (STEP, 1, 4, ""),
        (STEP, 1, 16, ""),
        # The variables count nodes, each of which has spawned four ranks.
        ({"RANK": "1", "WORLD_SIZE": "2"}, 5, 8, ""),
        ({"RANK": "0", "WORLD_SIZE": "4"}, 1, 2,
         "rank 1 of 2 by torch.distributed, but 0 of 4 by RANK and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, 1, 4, "0 of 4 by RANK"),
        # A group of one in each of four tasks: each would have all samples.
        (STEP, 0, 1, "rank 0 of 1 by torch.distributed, but 3 of 4 by srun"),
    ],
)  # fmt: skip
def test_processes_that_are_joined_know_best(monkeypatch, environment, rank, world_size, refusal):
    framework(monkeypatch, rank, world_size)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if refusal:
        with pytest.raises(RankError, match=refusal):
            which_rank()
    else:
        assert which_rank() == Rank(rank, world_size, "torch.distributed")


def test_a_worker_of_ray_train_is_its_rank_and_another_process_of_ray_is_not(monkeypatch):
    def nobody():
        raise RuntimeError("`get_context` cannot be used outside of a training function")

    train = types.SimpleNamespace(get_context=nobody)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    assert which_rank() == Rank(0, 1, "none")
    train.get_context = lambda: types.SimpleNamespace(
        get_world_rank=lambda: 2, get_world_size=lambda: 3
    )
    assert which_rank() == Rank(2, 3, "Ray Train")
    framework(monkeypatch, 2, 3)
    assert which_rank() == Rank(2, 3, "torch.distributed")
    framework(monkeypatch, 0, 1)  # a group of one in each worker: each would have all samples
    with pytest.raises(
        RankError, match=r"rank 0 of 1 by torch.distributed, but 2 of 3 by Ray Train"
    ):
        which_rank()


def test_nothing_is_imported_to_be_asked():
    program = (
        "import sys; from headrace.base import job; job.which_rank();"
        "print(sorted({'torch', 'jax', 'tensorflow', 'numpy', 'headrace.api'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"


def test_a_loader_decides_once_and_refuses_to_become_another_rank(monkeypatch):
    decision = RankDecision()
    assert decision.now() == Rank(0, 1, "none")
    assert repr(decision) == "rank 0 of 1 so far"
    framework(monkeypatch, 1, 2)
    assert decision.decide() == Rank(1, 2, "torch.distributed")
    assert repr(decision) == "rank 1 of 2 by torch.distributed"
    framework(monkeypatch, 1, 4)
    with pytest.raises(RankError, match=r"began as rank 1 of 2 .* now this process is rank 1 of 4"):
        decision.decide()
    # Who was taken down does not contradict.
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    assert decision.decide().rank == 1


def test_whoever_unpickles_the_answer_works_for_the_same_rank(monkeypatch):
    framework(monkeypatch, 1, 2)
    travelled = pickle.loads(pickle.dumps(RankDecision()))
    framework(monkeypatch, 3, 4)
    assert travelled.decide() == Rank(1, 2, "torch.distributed")
    assert RankDecision(0, 1).decide() == Rank(0, 1)  # what is given is asked of nobody


SHOW = "from headrace.base.job import which_rank; print(which_rank())"


def run(environment, *command):
    ended = subprocess.run(
        command, check=False, env=os.environ | environment, capture_output=True, text=True
    )
    return ended.stdout.strip() or ended.stderr.strip().splitlines()[-1]


def test_a_launcher_within_another_is_told_by_what_its_parent_began_with():
    """torchrun may number the nodes in another order than Slurm, so numbers alone do not show it."""
    task = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    start = (
        "import os, subprocess, sys; os.environ |= {'RANK': '7', 'WORLD_SIZE': '8'};"
        f"sys.exit(subprocess.call([sys.executable, '-c', {SHOW!r}]))"
    )
    assert run(task, sys.executable, "-c", start) == "rank 7 of 8 by RANK and WORLD_SIZE"
    # The same variables, but of a task that was started within a rank.
    outer = {"RANK": "7", "WORLD_SIZE": "8"}
    assert "but 0 of 2 by srun" in run(outer | task, sys.executable, "-c", SHOW)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        # What Slurm starts as a task: a program, a shell that runs one, a shell that waits for somebody.
        (f'exec {sys.executable} -c "{SHOW}"', "rank 3 of 4 by srun"),
        (f'exec bash -c "{sys.executable} -c \'{SHOW}\'; true"', "rank 3 of 4 by srun"),
        (f'echo "{sys.executable} -c \'{SHOW}\'" | exec bash', "rank 0 of 1"),
        (f'echo "{sys.executable} -c \'{SHOW}\'" | exec bash -l', "rank 0 of 1"),
        # A batch script that was submitted within a step has the step's variables.
        (f"echo \"{sys.executable} -c '{SHOW}'; true\" > slurm_script; exec bash $PWD/slurm_script",
         "rank 0 of 1"),
    ],
)  # fmt: skip
def test_a_program_in_the_shell_of_a_step_is_no_task_of_it(tmp_path, monkeypatch, task, says):
    monkeypatch.chdir(tmp_path)
    step = {**STEP, "SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "1"}
    script = f"export SLURM_TASK_PID=$$; {task}"
    if "|" in task:  # the pid of the last command of a pipe is its own
        left, _, right = task.partition("| exec ")
        script = f"{left} | sh -c 'export SLURM_TASK_PID=$$; exec {right}'"
    assert run(step, "bash", "-c", script) == says


def test_tasks_per_node_are_those_of_this_node():
    step = {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert [local_ranks_of(step | {"SLURM_NODEID": str(node)}) for node in range(4)] == [2, 2, 1, 0]
    assert local_ranks_of({"LOCAL_SIZE": "4"}) == 4
    assert (
        local_ranks_of({"SLURM_NTASKS_PER_NODE": "4"}) == 0
    )  # asked for; a batch script has it too


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"HEADRACE_NODE_RANK": "2", "HEADRACE_NODES": "3"}, NodePlace(2, 3)),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "4", "RANK": "9"}, NodePlace(1, 4)),
        (STEP | {"SLURM_NNODES": "8"}, NodePlace(1, 2)),
        # A batch script is one process on the first node, and speaks for no other.
        (BATCH, None),
        ({**BATCH, "SLURM_NNODES": "1"}, NodePlace(0, 1)),
        # torchrun under Slurm knows better.
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "SLURM_NODEID": "1", "SLURM_NNODES": "2"},
         NodePlace(0, 2)),
        # One process a node, and two.
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, NodePlace(3, 4)),
        ({"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
         NodePlace(2, 3)),
    ],
)  # fmt: skip
def test_a_node_learns_its_place_from_its_launcher(environment, place):
    assert which_node(environment=environment) == place


@pytest.mark.parametrize(
    ("given", "environment", "says"),
    [
        ((1, None), {}, "--nodes"),
        ((None, 2), {}, "--node-rank"),
        ((3, 3), {}, "expected 0 to 2"),
        ((None, 3), STEP, "the launcher says 2"),
        ((None, None), {"GROUP_RANK": "4", "GROUP_WORLD_SIZE": "4"}, "--node-rank"),
        ((None, None), {"GROUP_RANK": "a", "GROUP_WORLD_SIZE": "4"}, "GROUP_RANK='a'"),
        # Ranks dealt out node by node: rank 1 is the first of the second node.
        ((None, None), {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
                        "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
         "do not fill node after node"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_is_refused(given, environment, says):
    with pytest.raises(ValueError, match=says):
        which_node(*given, environment)


def test_what_is_given_wins_over_the_launcher():
    assert which_node(1, 2, {"SLURM_NODEID": "0", "SLURM_NNODES": "8"}) == NodePlace(1, 2)
    assert which_node(None, 1, {}) == NodePlace(0, 1)


def test_one_process_of_a_node_stages():
    assert is_first_on_node({})
    assert is_first_on_node({"LOCAL_RANK": "0"})
    virtual = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4",
               "GROUP_WORLD_SIZE": "2"}  # fmt: skip
    assert local_rank(virtual) == 1  # torchrun --virtual-local-rank
    assert not is_first_on_node({"SLURM_LOCALID": "1"})
    assert job_id({"SLURM_JOB_ID": "77"}) == "77"
    assert job_id({"TORCHELASTIC_RUN_ID": "none"}) is None

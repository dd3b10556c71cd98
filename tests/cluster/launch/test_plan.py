"""What is asked, laid out on what a job has; and each framework's commands and variables for it."""

from __future__ import annotations

import json
import sys

import pytest

from headrace.cluster.launch import nodes
from headrace.cluster.launch.nodes import NodeSpec, start_nodes
from headrace.cluster.launch.place import JobPlace
from headrace.cluster.launch.plan import (
    Launch,
    LaunchOptions,
    LaunchPlan,
    NodeCommands,
    NodeFacts,
    commands_for,
    lay_out,
    program_of,
    settings_for,
)
from headrace.errors import LaunchError


def place(nodes: int = 2, gpus: int = 4, **more) -> JobPlace:
    names = tuple(f"n{i}" for i in range(nodes))
    given = {"cpus_per_node": 16, **more}
    return JobPlace(scheduler="slurm", job_id="1", nodes=names, gpus_per_node=gpus, **given)


@pytest.mark.parametrize(
    ("job", "options", "nodes", "ranks", "gpus"),
    [
        (place(), {}, 2, 4, 4),
        (place(), {"gpus": 4}, 1, 4, 4),
        (place(), {"gpus": 8}, 2, 4, 4),
        (place(), {"gpus": 6}, 2, 3, 3),
        (place(1, 8), {"gpus": 5}, 1, 5, 5),  # H4: any count
        (place(gpus=0), {}, 2, 1, 0),
        (place(gpus=0, tasks_per_node=3), {}, 2, 3, 0),
        (place(gpus=0), {"ranks_per_node": 2}, 2, 2, 0),
        (place(), {"framework": "tensorflow"}, 2, 1, 4),
        (place(), {"framework": "jax"}, 2, 1, 4),
        (place(), {"framework": "mpi"}, 2, 4, 4),
    ],
)
def test_any_number_of_gpus_is_laid_out(job, options, nodes, ranks, gpus):
    plan = lay_out(job, LaunchOptions(**options))
    assert (len(plan.nodes), plan.ranks_per_node, plan.gpus_per_node) == (nodes, ranks, gpus)


@pytest.mark.parametrize(
    ("job", "gpus", "words"),
    [
        (place(), 9, r"9 GPUs are asked for, the job has 8"),
        (place(), 7, r"cannot be spread evenly over 2 nodes with 4 each. Ask for 6 or 8"),
        (place(gpus=0), 1, r"the job has 0"),
    ],
)
def test_what_a_job_has_not_is_refused_with_the_nearest_it_has(job, gpus, words):
    with pytest.raises(LaunchError, match=words):
        lay_out(job, LaunchOptions(gpus=gpus))


def test_a_launch_by_srun_is_refused():
    with pytest.raises(LaunchError, match="node 1 of 2, expected the first one"):
        lay_out(place(index=1), LaunchOptions())


@pytest.mark.parametrize(
    "wrong",
    [{"framework": "caffe"}, {"gpus": 0}, {"replicas": 3}, {"grace_s": -1}, {"gpus": 2, "ranks_per_node": 2}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected|one rank for each GPU"):
        LaunchOptions(**wrong)


PLAN = LaunchPlan(("a", "b"), 2, 2, 8)
FACTS = [
    NodeFacts("10.0.0.1", (15000, 15001, 15002)),
    NodeFacts("10.0.0.2", (16000, 16001, 16002)),
]


def commands(framework: str, node: int, *common: str) -> NodeCommands:
    options = LaunchOptions(framework=framework)
    launch = Launch(place(), options, PLAN, ("train.py", "--lr", "0.1"))
    return commands_for(launch, node, FACTS, common)


def test_torchrun_starts_a_nodes_ranks():
    (command,) = commands("torch", 1).commands
    words = " ".join(command)
    assert words.startswith(
        f"{sys.executable} -m headrace.cluster.launch.rank_start --torchrun --nnodes=2 --node-rank=1 "
        "--nproc-per-node=2 --rdzv-backend=static --master-addr=10.0.0.1 "
        "--master-port=15000 --max-restarts=0 --no-python"
    )
    assert words.endswith(f"rank_start.py {sys.executable} train.py --lr 0.1")


def test_plain_ranks_find_each_other_under_torchruns_names():
    node = commands("plain", 1)
    assert [e["RANK"] for e in node.environments] == ["2", "3"]
    assert [e["LOCAL_RANK"] for e in node.environments] == ["0", "1"]
    assert node.environments[0]["MASTER_ADDR"] == "10.0.0.1"
    assert node.environments[0]["WORLD_SIZE"] == "4"


def test_tensorflow_gets_a_worker_for_each_rank():
    node = commands("tensorflow", 1)
    config = json.loads(node.environments[1]["TF_CONFIG"])
    assert config == {
        "cluster": {
            "worker": ["10.0.0.1:15001", "10.0.0.1:15002", "10.0.0.2:16001", "10.0.0.2:16002"]
        },
        "task": {"type": "worker", "index": 3},
    }


def test_jax_gets_its_coordinator_and_each_rank_its_devices():
    node = commands("jax", 1)
    assert node.environments[1]["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:15000"
    assert node.environments[1]["JAX_NUM_PROCESSES"] == "4"
    assert node.environments[1]["JAX_PROCESS_ID"] == "3"
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in node.environments] == ["0", "1"]


@pytest.mark.parametrize("kind", ["openmpi", "hydra"])
def test_mpirun_starts_all_ranks_from_the_first_node(tmp_path, monkeypatch, kind):
    (tmp_path / "mpirun").touch(mode=0o755)
    if kind == "hydra":
        (tmp_path / "mpiexec.hydra").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    first = commands("mpi", 0, "OMP_NUM_THREADS")
    words = " ".join(first.commands[0])
    if kind == "openmpi":
        placed = "--host a:2,b:2 --map-by ppr:2:node:OVERSUBSCRIBE --bind-to none"
        assert f"mpirun -np 4 {placed} -x OMP_NUM_THREADS" in words
    else:
        assert "mpirun -n 4 -ppn 2 -hosts a,b -genvlist OMP_NUM_THREADS" in words
    assert words.endswith(f"{sys.executable} train.py --lr 0.1")
    assert commands("mpi", 1).commands == ()


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["train.py"], (sys.executable, "train.py")),
        (["-m", "pkg.train", "-x"], (sys.executable, "-m", "pkg.train", "-x")),
        (["./run.sh", "a"], ("./run.sh", "a")),
    ],
)
def test_a_script_a_module_or_a_program_is_launched(words, program):
    assert program_of(words) == program


def test_settings_have_reasons_and_never_override_the_users():
    found = {s.name: s for s in settings_for(PLAN, "torch", "ib0", {"OMP_NUM_THREADS": "3"})}
    assert found["OMP_NUM_THREADS"].value == "3"
    assert found["OMP_NUM_THREADS"].kept
    assert found["GLOO_SOCKET_IFNAME"].value == "ib0"
    assert found["NCCL_SOCKET_IFNAME"].value == "=ib0"
    assert all(s.reason for s in found.values())
    without = {s.name for s in settings_for(LaunchPlan(("a",), 1, 0, 4), "torch", None, {})}
    assert not any(name.startswith(("NCCL", "GLOO")) for name in without)


def spec_of(*nodes):
    place = JobPlace(scheduler="slurm", job_id="1", nodes=nodes, name="train")
    launch = Launch.of(place, LaunchOptions(stop_before_s=60.5), ["train.py"])
    return NodeSpec(addresses=("a",), port=1, token="t", launch=launch, variables={"A": "b"})


def test_what_nodes_are_told_of_ten_thousand_of_them_fits_into_a_variable():
    spec = spec_of(*(f"r{i % 97:02d}-gpu{i * 7919 % 100_000:05d}.cluster" for i in range(10_000)))
    assert len(spec.encode()) < 128 << 10
    assert NodeSpec.parse(spec.encode()) == spec


@pytest.mark.parametrize("text", ["", "{}", "words", spec_of("a", "b").encode()[:-9]])
def test_what_is_no_word_of_the_first_node_is_refused(text):
    with pytest.raises(LaunchError, match="HEADRACE_LAUNCH_SPEC cannot be understood"):
        NodeSpec.parse(text)


def test_in_a_step_the_jobs_name_is_told_beside_the_steps(monkeypatch):
    started = []
    monkeypatch.setattr(
        nodes.subprocess, "Popen", lambda *given, env, **_: started.append((*given, env))
    )
    monkeypatch.setattr(nodes.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    spec = spec_of("a", "b")
    assert NodeSpec.parse(spec.encode()) == spec
    start_nodes(spec)
    [(command, environment)] = started
    assert "--job-name=headrace-launch" in command
    assert environment["HEADRACE_JOB_NAME"] == "train"

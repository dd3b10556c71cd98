"""Clusters that tests are asked about: HAL as it was, a mixed one, and thousands of nodes."""

from __future__ import annotations

import random

from headrace.cluster.executor import JobState
from headrace.cluster.snapshot import Allocation, ClusterJob, ClusterSnapshot, Node, Partition

NOW_S = 1_790_000_000.0


def node(name, gpus=0, gpu_type="", cpus=64, memory_mib=256_000, **more):
    more = {
        "states": ("idle",),
        "threads_per_core": 2,
        "architecture": "x86_64",
    } | more
    return Node(
        name=name,
        cpus=cpus,
        memory_mib=memory_mib,
        gpus=gpus,
        gpu_type=gpu_type,
        **more,
    )


def cluster(nodes, partitions, jobs=(), name="test"):
    return ClusterSnapshot(name, "23.11.4", NOW_S, tuple(nodes), tuple(partitions), tuple(jobs))


def hal():
    """16 POWER9 nodes with 4 V100 each, 160 CPUs; the whole as `gpu`, two nodes as `debug`, all as `cpu`."""
    power = {"architecture": "ppc64le", "threads_per_core": 4}
    nodes = [node(f"hal{i:02d}", 4, "v100", 160, 256_000, **power) for i in range(1, 17)]
    names = tuple(n.name for n in nodes)
    return cluster(
        nodes,
        [
            Partition("gpu", names, is_default=True, max_minutes=24 * 60),
            Partition("debug", names[:2], max_minutes=4 * 60),
            Partition("cpu", names, max_minutes=24 * 60),
        ],
        name="hal",
    )  # fmt: skip


def mixed():
    """Nodes of 8 H100, ARM ones of 2 A100, an old V100 one, plain ones; a partition each, and `all`."""
    h100 = [node(f"h{i}", 8, "h100", 128, 1_000_000, features=("ib", "nvme")) for i in range(4)]
    arm = [
        node(f"a{i}", 2, "a100", 80, 500_000, threads_per_core=1, architecture="aarch64")
        for i in range(2)
    ]
    old = [node("v0", 4, "v100", 40, 128_000, features=("ib",))]
    plain = [node(f"c{i}", cpus=64) for i in range(6)]
    names = [tuple(n.name for n in some) for some in (h100, arm, old, plain)]
    return cluster(
        [*h100, *arm, *old, *plain],
        [
            Partition("main", names[0], is_default=True, max_minutes=3 * 24 * 60),
            Partition("arm", names[1], max_minutes=24 * 60),
            Partition("old", names[2]),
            Partition("cpu", names[3]),
            Partition("all", sum(names, ()), max_minutes=60, max_nodes=8),
        ],
        name="mixed",
    )  # fmt: skip


def busy():
    """Four nodes with jobs on them, some that wait, one node drained."""
    states = [("mixed",), ("allocated",), ("idle",), ("down", "drain")]
    used = [(0, 2), (0, 1, 2, 3), (), ()]
    nodes = [
        node(
            f"gpu{i}", 4, "h100", 32, 128_000, states=states[i], gpus_allocated=used[i],
            cpus_allocated=(16, 32, 0, 0)[i], memory_allocated_mib=(60_000, 128_000, 0, 0)[i],
            cpu_load=(14.2, 31.0, 0.1, None)[i],
            reason="disk fails" if i == 3 else "",
        )
        for i in range(4)
    ]  # fmt: skip
    running = {
        "account": "ml",
        "partition": "main",
        "state": JobState.RUNNING,
        "submitted_s": NOW_S - 9000,
    }
    waiting = {
        "account": "ml",
        "partition": "main",
        "state": JobState.PENDING,
        "submitted_s": NOW_S - 600,
    }
    jobs = [
        ClusterJob(
            "101", "resnet", "ann", nodes=("gpu0",), node_count=1, cpu_count=8, gpu_count=1, memory_mib=30_000,
            allocations=(Allocation("gpu0", 8, 30_000, 1, (2,)),), started_s=NOW_S - 3600,
            limit_minutes=240, **running,
        ),
        ClusterJob(
            "102", "llm-pretrain", "bob", nodes=("gpu0", "gpu1"), node_count=2, cpu_count=40, gpu_count=5,
            memory_mib=158_000,
            allocations=(
                Allocation("gpu0", 8, 30_000, 1, (0,)), Allocation("gpu1", 32, 128_000, 4, (0, 1, 2, 3))
            ),
            started_s=NOW_S - 7200, limit_minutes=None, **running,
        ),
        ClusterJob("103_1", "sweep", "ann", reason="Resources", gpu_count=4, node_count=1, cpu_count=32,
            started_s=NOW_S + 5400, limit_minutes=60, priority=900, **waiting),
        ClusterJob("103_[2-9]", "sweep", "ann", reason="Priority", gpu_count=4, node_count=1, cpu_count=32,
            limit_minutes=60, priority=800, **waiting),
        ClusterJob("104", "eval", "eve", reason="Dependency", gpu_count=1, node_count=1, cpu_count=4,
            limit_minutes=30, priority=100, **waiting),
    ]  # fmt: skip
    partition = Partition("main", tuple(n.name for n in nodes), is_default=True, max_minutes=1440)
    return cluster(nodes, [partition], jobs, name="four")


def huge(nodes=5000, jobs=50_000, seed=7):
    """A cluster of many nodes and jobs: each node of 8 GPUs, a tenth away, most of the jobs waiting."""
    chance = random.Random(seed)
    made = []
    running: list[ClusterJob] = []
    users = [f"user{i:03d}" for i in range(400)]
    for i in range(nodes):
        name = f"node{i:04d}"
        free = list(range(8))
        here: list[int] = []
        away = chance.random() < 0.1
        while (
            not away and len(free) > 1 and len(running) < jobs * 2 // 5 and chance.random() < 0.85
        ):
            got = tuple(free.pop(0) for _ in range(min(len(free), chance.choice((1, 1, 2, 4)))))
            here += got
            job = str(100_000 + len(running))
            running.append(
                ClusterJob(
                    job, f"train-{job}", chance.choice(users), "ml", "main", JobState.RUNNING, nodes=(name,),
                    allocations=(Allocation(name, 16 * len(got), 100_000, len(got), got),),
                    cpu_count=16 * len(got),
                    gpu_count=len(got), started_s=NOW_S - chance.randrange(90_000), limit_minutes=1440,
                )
            )  # fmt: skip
        state = (
            ("down",) if away else ("allocated",) if not free else ("mixed",) if here else ("idle",)
        )
        made.append(
            node(
                name,
                8,
                "h100",
                128,
                1_000_000,
                states=state,
                gpus_allocated=tuple(here),
                cpus_allocated=16 * len(here),
            )
        )
    waiting = [
        ClusterJob(
            str(500_000 + i), f"wait-{i}", chance.choice(users), "ml", "main", JobState.PENDING,
            reason=chance.choice(("Priority", "Priority", "Resources", "QOSMaxJobsPerUserLimit")), gpu_count=8,
            node_count=1, cpu_count=64, submitted_s=NOW_S - i, limit_minutes=600, priority=jobs - i,
        )
        for i in range(jobs - len(running))
    ]  # fmt: skip
    partition = Partition("main", tuple(n.name for n in made), is_default=True, max_minutes=2880)
    return cluster(made, [partition], [*running, *waiting], name="huge")

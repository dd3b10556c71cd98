"""Requests become nodes, tasks, CPUs and memory; the impossible is refused with the nearest that can be."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.clusters import cluster, hal, mixed, node
from headrace.cluster.layout import lay_out
from headrace.cluster.request import read_request
from headrace.cluster.site import NodeType, PartitionSite, Site
from headrace.cluster.snapshot import Partition
from headrace.errors import ClusterRequestError


def laid_out(where, site=None, **values):
    return lay_out(read_request(values, "test"), where, site or Site())


def text(layout):
    return " ".join(map(str, layout.words()))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, "--nodes=1 --ntasks-per-node=1 --gres=gpu:1 --cpus-per-task=16 --mem=118750M"),
        (5, "--nodes=1 --ntasks-per-node=5 --gres=gpu:5 --cpus-per-task=16 --mem=593750M"),
        (8, "--nodes=1 --ntasks-per-node=8 --gres=gpu:8 --cpus-per-task=16 --mem=950000M"),
        (9, "--nodes=2 --ntasks=9 --gpus-per-task=1 --cpus-per-task=16 --mem-per-gpu=118750M"),
        (12, "--nodes=2 --ntasks-per-node=6 --gres=gpu:6 --cpus-per-task=16 --mem=712500M"),
        (32, "--nodes=4 --ntasks-per-node=8 --gres=gpu:8 --cpus-per-task=16 --mem=950000M"),
    ],
)
def test_gpus_on_nodes_of_eight(gpus, expected):
    assert text(laid_out(mixed(), gpus=str(gpus))) == f"--partition=main {expected}"


def test_a_node_type_without_a_feature_leaves_the_others_out():
    layout = laid_out(mixed(), gpus="2", partition="all", node_type="arm")
    assert (layout.nodes, layout.gpus_per_node, layout.gpu_type) == (1, 2, "a100")
    assert set(layout.exclude) == {n.name for n in mixed().nodes} - {"a0", "a1"}


def test_a_node_type_chooses_its_partition():
    assert laid_out(mixed(), gpus="4", node_type="arm").partition == "arm"
    site = Site(node_types={"fat": NodeType(constraint="nvme"), "old": NodeType(partition="old")})
    assert laid_out(mixed(), site, gpus="4", node_type="fat").constraint == "nvme"
    assert laid_out(mixed(), site, gpus="4", node_type="old").partition == "old"


def test_where_there_are_several_types_one_is_said():
    layout = laid_out(mixed(), gpus="4", partition="all")
    assert layout.gpu_type in ("h100", "v100")
    assert "gres=gpu:h100:4" in text(laid_out(mixed(), gpus="h100:4", partition="all"))
    assert "gres=gpu:v100:4" in text(laid_out(mixed(), gpus="4", gpu_type="V100", partition="all"))


def test_without_a_partition_one_that_can_is_found():
    assert laid_out(mixed(), gpus="a100:4").partition == "arm"
    assert laid_out(mixed(), gpus="v100:1").partition == "old"
    assert laid_out(mixed(), nodes="2").partition == "cpu"
    assert laid_out(mixed(), nodes="6", time="7-0").partition == "cpu"


def test_the_short_partition_is_for_short_jobs():
    site = Site(gpu_partition="gpu", short_partition="debug", short_time=240)
    assert laid_out(hal(), site, gpus="4", time="4h").partition == "debug"
    assert laid_out(hal(), site, gpus="4", time="5h").partition == "gpu"
    assert laid_out(hal(), site, gpus="16", time="1h").partition == "gpu"  # two nodes are too few
    assert laid_out(hal(), site, gpus="4").partition == "gpu"


@pytest.mark.parametrize(
    ("values", "says", "nearest"),
    [
        ({"gpus": "33"}, "4 nodes with GPUs, up to 8 each", "--gpus 32"),
        ({"gpus": "v100:6"}, "1 nodes with GPUs, up to 4 each", "--gpus 4"),
        ({"gpus": "12", "nodes": "1"}, "12 GPUs on 1 node are", "--gpus 8, or --gpus 12 on --nodes 2"),
        ({"gpus": "2", "nodes": "3"}, "2 GPUs cannot lie on 3 nodes", "--nodes 2"),
        ({"gpus": "8", "cpus_per_gpu": "20"}, "8 GPUs on a node leave 16", "--cpus-per-gpu 16"),
        ({"gpus": "8", "memory_per_gpu": "200G"}, "204,800 MiB per GPU", "--memory-per-gpu 125000M"),
        ({"gpus": "1", "memory": "2T"}, "2,097,152 MiB per node", "--memory 1000000M"),
        ({"nodes": "9", "partition": "cpu"}, "9 nodes are asked for, a job can have 6", "--nodes 6"),
        ({"nodes": "9", "partition": "all"}, "a job can have 8", "--nodes 8"),
        ({"nodes": "1", "cpus": "80", "partition": "cpu"}, "80 CPUs a node", "--cpus 64"),
        ({"gpus": "4", "partition": "cpu"}, "its nodes have no GPUs", "another partition"),
        ({"gpus": "9", "tasks_per_node": "1"}, "not the same number on each", "--gpus 8"),
        ({"gpus": "b200:1", "partition": "main"}, "no node has GPUs of type b200; found: h100", ""),
        ({"gpus": "1", "constraint": "nvm", "partition": "main"}, "the features nvm; found: ib, nvme", ""),
        ({"gpus": "1", "partition": "mian"}, "no partition 'mian'", "Did you mean main?"),
    ],
)  # fmt: skip
def test_the_impossible_is_refused_with_the_nearest(values, says, nearest):
    with pytest.raises(ClusterRequestError) as e:
        laid_out(mixed(), **values)
    assert says in e.value.message
    assert nearest in (e.value.next_step or "")


@pytest.mark.parametrize(
    "values", [{"gpus": "33"}, {"gpus": "12", "nodes": "1"}, {"gpus": "100", "partition": "all"}]
)
def test_the_nearest_request_can_be(values):
    with pytest.raises(ClusterRequestError) as e:
        laid_out(mixed(), **values)
    nearest = re.search(r"--gpus (\d+)", e.value.next_step)[1]
    assert laid_out(mixed(), **{**values, "gpus": nearest}).gpus == int(nearest)


def test_time_is_cut_with_a_warning():
    layout = laid_out(mixed(), gpus="1", partition="main", time="9-0")
    assert layout.time == "3-00:00:00"
    assert layout.remarks == ("time 9 d is cut to 72 h, the most in partition main.",)
    assert laid_out(mixed(), gpus="1", partition="main", time="UNLIMITED").time == "3-00:00:00"
    assert laid_out(mixed(), gpus="1", partition="old", time="UNLIMITED").time == "UNLIMITED"
    assert laid_out(mixed(), gpus="1", partition="main").time == ""


def test_a_partition_that_need_not_cut_is_preferred():
    assert laid_out(mixed(), gpus="h100:1", time="2h").partition == "main"
    layout = laid_out(mixed(), gpus="v100:1", time="9-0")
    assert (layout.partition, layout.time) == ("old", "9-00:00:00")


def test_a_bare_number_as_time_means_what_the_words_beside_it_mean_and_is_said():
    short = laid_out(hal(), partition="gpux1", time="4")
    slurms = laid_out(hal(), partition="gpu", gpus="1", time="4")
    assert (short.time, slurms.time) == ("04:00:00", "00:04:00")
    hours = "hours, as HAL counts beside its short words; sbatch counts minutes"
    assert short.remarks == (f"time 4 is 4 h: {hours}.",)
    assert slurms.remarks == ("time 4 is 4 min: minutes, as sbatch counts.",)
    assert laid_out(hal(), partition="gpux1", time="4m").remarks == ()
    zero = laid_out(hal(), partition="gpux1", time="0")
    assert (zero.time, zero.remarks) == ("", ("time 0: the default is taken.",))


def test_a_site_says_otherwise():
    site = Site(
        everywhere=PartitionSite(cpus_per_gpu=12, time=240), gpus_max=16,
        partitions={"main": PartitionSite(cpus_per_gpu_max=14, memory_per_gpu=100_000, time_max=1440)},
    )  # fmt: skip
    layout = laid_out(mixed(), site, gpus="2")
    assert "--cpus-per-task=12 --mem=200000M --time=04:00:00" in text(layout)
    assert laid_out(mixed(), site, gpus="2", partition="main", time="3-0").time == "1-00:00:00"
    with pytest.raises(ClusterRequestError, match="its site allows 14"):
        laid_out(mixed(), site, gpus="2", partition="main", cpus_per_gpu="15")
    with pytest.raises(ClusterRequestError, match="17 GPUs are more than"):
        laid_out(mixed(), site, gpus="17")


def test_more_cpus_than_a_share_are_given_with_a_warning():
    layout = laid_out(hal(), gpus="1", cpus_per_gpu="100")
    assert layout.cpus_per_task == 100
    assert "more than a GPU's share, 40" in layout.remarks[0]


def test_tasks_per_node_share_the_cpus():
    layout = laid_out(mixed(), gpus="16", tasks_per_node="1")
    assert (layout.tasks, layout.cpus_per_task, layout.gpus_per_node) == (2, 128, 8)


def test_nodes_that_are_away_make_a_job_wait():
    nodes = [node(f"n{i}", 4, states=("down",) if i else ("idle",)) for i in range(3)]
    where = cluster(nodes, [Partition("p", ("n0", "n1", "n2"), is_default=True)])
    assert laid_out(where, gpus="4").remarks == ()
    assert "1 of the 3 nodes" in laid_out(where, gpus="8").remarks[0]


def test_memory_that_nobody_configured_is_not_asked_for():
    where = cluster([node("n0", 2, memory_mib=1)], [Partition("p", ("n0",), is_default=True)])
    assert "mem" not in text(laid_out(where, gpus="2"))


def test_memory_stays_below_a_partitions_limit():
    partition = Partition("p", ("n0",), is_default=True, max_memory_per_cpu_mib=1000)
    where = cluster([node("n0", 2, cpus=64, memory_mib=256_000)], [partition])
    assert "--mem=64000M" in text(laid_out(where, gpus="2"))


@pytest.mark.parametrize("state", ["drain", "inactive"])
def test_a_closed_partition_takes_no_jobs(state):
    where = cluster([node("n0", 2)], [Partition("p", ("n0",), state=state)])
    with pytest.raises(ClusterRequestError, match=f"p is {state}"):
        laid_out(where, gpus="1", partition="p")
    with pytest.raises(ClusterRequestError, match="no partition of test is up"):
        laid_out(where, gpus="1")


def test_a_cluster_of_nothing():
    with pytest.raises(ClusterRequestError, match="has no partitions"):
        laid_out(cluster([], []), gpus="1")


SHAPES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 4), st.sampled_from(["", "a", "b"])),
    min_size=1,
    max_size=5,
)


@given(SHAPES, st.integers(1, 60), st.none() | st.integers(1, 12))
def test_what_is_laid_out_fits_and_what_is_refused_does_not(shapes, gpus, count):
    """Any cluster: as few nodes as can be, all of one type; a refusal only where there is none."""
    nodes = [
        node(f"s{i}n{j}", size, kind if size else "", cpus=64)
        for i, (size, many, kind) in enumerate(shapes)
        for j in range(many)
    ]
    where = cluster(nodes, [Partition("p", tuple(n.name for n in nodes), is_default=True)])
    kinds = {n.gpu_type for n in nodes if n.gpus}

    def can(k):
        per_node = -(-gpus // k)
        return k <= gpus and any(
            sum(n.gpus >= per_node for n in nodes if n.gpu_type == kind) >= k for kind in kinds
        )

    wanted = [count] if count else list(range(1, gpus + 1))
    first = next((k for k in wanted if can(k)), None)
    values = {"gpus": str(gpus)} | ({"nodes": str(count)} if count else {})
    if first is None:
        with pytest.raises(ClusterRequestError):
            laid_out(where, **values)
        return
    layout = laid_out(where, **values)
    assert layout.nodes == first
    assert layout.gpus == gpus
    assert layout.cpus_per_task * -(-gpus // first) <= 64
    if gpus % first == 0:
        assert layout.gpus_per_node * layout.nodes == layout.tasks == gpus
    else:
        assert layout.gpus_per_node is None
        assert layout.tasks == gpus
    assert not layout.gpu_type or layout.gpu_type in kinds

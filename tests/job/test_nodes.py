"""The story of four nodes: one order everywhere, one read of the source, and what a loss costs."""

import pytest

from capi.compiling import EXAMPLE, compile_c
from job.conftest import NODES


def test_four_nodes_read_the_source_once_and_in_its_order(cluster, expected):
    """Two processes on each node, a rank each; one of them goes on with the torch loader."""
    cluster.start()
    staged = cluster.wait_staged()
    assert staged["samples"] == expected.samples
    assert expected.nbytes <= staged["source_bytes"] <= 1.02 * expected.nbytes
    world = 2 * NODES
    trainers = []
    for node in range(NODES):
        for process in range(2):
            rank = 2 * node + process
            torch = ["--torch"] if process == 0 else []
            trainers.append(
                cluster.train(node, "--rank", str(rank), "--world", str(world), *torch).go()
            )
    results = [trainer.ready().result() for trainer in trainers]
    delivered = []
    for rank, result in enumerate(results):
        expected.check(result, rank, world)
        assert result.get("torch_indices", result["indices"]) == result["indices"]
        assert result["local"] > 0
        assert all(result["checked"])
        assert result["figures"]["reads"] > 0
        assert result["figures"]["reads_last"] == result["figures"]["failed"] == 0
        delivered += result["indices"]
    assert len(set(delivered)) == len(delivered) == expected.samples // (world * 16) * world * 16
    for node in range(NODES):
        # Its own directory is one of the four.
        assert results[2 * node]["fetched"] + results[2 * node + 1]["fetched"] == NODES
    assert cluster.status()["job"]["source_bytes"] == staged["source_bytes"]
    reports = cluster.end()
    assert sum(node["source_bytes"] for node in reports.values()) == staged["source_bytes"]
    assert not cluster.meet.exists()
    assert [list(cluster.local(node).iterdir()) for node in range(NODES)] == [[]] * NODES


def test_the_c_example_reads_every_nodes_part_of_the_order(cluster, expected, tmp_path):
    cluster.start()
    cluster.wait_staged()
    program = compile_c(EXAMPLE, tmp_path)
    for node in range(NODES):
        where = ("-b", "16", "-s", "3", "-r", str(node), "-w", str(NODES))
        lines = cluster.read_in_c(node, program, *where)
        assert [line.index for line in lines] == expected.order(node, NODES, tail=None)
        assert [line.crc for line in lines] == [expected.checksums[line.index] for line in lines]
    cluster.end()


def test_training_starts_before_staging_ends(cluster, expected):
    cluster.start("--limit", "200K")  # for twelve seconds: a trainer may begin late
    trainer = cluster.train(1).ready().go()
    result = trainer.result()
    expected.check(result)
    assert result["state"] == "staging"
    assert result["figures"]["unwritten"] > 0
    assert result["figures"]["reads_last"] > 0
    assert result["figures"]["failed"] == 0
    cluster.end()


@pytest.mark.parametrize(("loss", "replicas"), [("kill", 1), ("kill", 2), ("silence", 2)])
def test_a_node_that_dies_in_mid_epoch_costs_no_sample(cluster, expected, loss, replicas):
    if loss == "silence" and cluster.network.reason:
        pytest.skip(f"loopback cannot fall silent: {cluster.network.reason}")
    cluster.start("--replicas", str(replicas))
    staged = cluster.wait_staged(replicas)
    assert sum(len(node["copies_of"]) for node in staged["nodes"]) == (replicas - 1) * NODES
    # Little memory for batches that are read ahead, and a halt: most of the epoch comes after the loss.
    options = ("--pace", "0.02", "--budget", str(1 << 20), "--hold", "160")
    trainers = [cluster.train(node, *options).ready() for node in (0, 3)]
    for trainer in trainers:
        trainer.go()
    for trainer in trainers:
        trainer.until(160)
    cluster.kill(2) if loss == "kill" else cluster.silence(2)
    for trainer in trainers:
        trainer.go()
    for trainer in trainers:
        result = trainer.result()
        expected.check(result)
        figures = result["figures"]
        served, unused = ("reads_elsewhere", "reads_last")[:: 1 if replicas == 2 else -1]
        assert figures[served] > 0
        assert figures[unused] == figures["failed"] == 0
    states = {node["node"]: node["state"] for node in cluster.status()["job"]["nodes"]}
    assert states == {0: "staged", 1: "staged", 2: "gone", 3: "staged"}
    # Who comes later finds the share's directory elsewhere, or makes it anew.
    later = cluster.train(3).go().ready().result()
    expected.check(later)
    assert later["figures"]["failed"] == 0
    cluster.end()
    assert not cluster.meet.exists()
    # A killed server leaves a folder of directories, and no share.
    left = [path.name for path in cluster.local(2).iterdir()]
    assert len(left) == (loss == "kill")
    assert all(name.startswith("headrace-job-") for name in left)


def test_the_next_job_takes_over_what_a_killed_one_left(cluster, expected):
    cluster.start()
    cluster.wait_staged()
    for node in range(NODES):
        cluster.kill(node)
    assert cluster.meet.exists()
    assert any(any(cluster.local(node).iterdir()) for node in range(NODES))
    cluster.start()
    cluster.wait_staged()
    expected.check(cluster.train(0).go().ready().result())
    cluster.end()
    assert not cluster.meet.exists()
    assert [list(cluster.local(node).iterdir()) for node in range(NODES)] == [[]] * NODES


def test_blocked_orders_work_across_nodes_and_say_how_random_they_are(cluster, expected):
    cluster.start()
    cluster.wait_staged()
    trainers = [cluster.train(node, "--order", "blocked").ready().go() for node in (0, 3)]
    first, second = (trainer.result() for trainer in trainers)
    assert first["indices"] == second["indices"]
    assert first["digests"] == [expected.digests[i] for i in first["indices"]]
    assert 0 < first["level"] <= 1
    assert 0 < first["entropy_share"] <= 1
    cluster.end()

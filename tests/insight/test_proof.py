"""`verify-epoch`: what is missing, doubled, swapped or in another order is found; what is right is proved."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.insight.deliveries import sums_at
from headrace.insight.epoch_proof import proof_lines, same_order, verify_epochs
from headrace.order import (
    Blocked,
    Sequential,
    Shuffled,
    Subset,
    Weighted,
    combine_hashes,
    order_hash,
)
from headrace.order.hash import position_hashes
from headrace.trace import read_run
from traces.runs import Loaders, made_run, steps_of


def proof_of(folder):
    return verify_epochs(read_run(folder))


def findings(folder):
    (loader,) = proof_of(folder).loaders
    return [(f.kind, f.epoch, f.positions) for e in loader.epochs for f in e.findings]


@pytest.mark.parametrize("tail", ["exact", "pad", "drop"])
@pytest.mark.parametrize(
    "order", [Shuffled(1000, seed=7), Sequential(1000), Blocked(1000, 16, 4, seed=2)], ids=str
)
def test_a_whole_run_is_proved(tmp_path, tail, order):
    made_run(tmp_path / "run", epochs=3, world=3, tail=tail, order=order)
    proof = proof_of(tmp_path / "run")
    assert proof.holds
    (loader,) = proof.loaders
    assert not loader.unchecked
    for epoch in loader.epochs:
        assert str(epoch.state) == "whole"
        assert epoch.padded == (8 if tail == "pad" else 0)
        assert epoch.dropped == (40 if tail == "drop" else 0)
    if tail == "exact":
        whole = order_hash(0, order.indices(1, 0, 1000))
        assert loader.epochs[1].order_hash == whole


def without(step, rank=1):
    return lambda r, rows: np.delete(rows, step) if r == rank else None


def twice(step, rank=1):
    return lambda r, rows: np.insert(rows, step, rows[step]) if r == rank else None


def other_sample(step, rank=1):
    def change(r, rows):
        if r == rank:
            rows["order_hash"][step] += 1

    return change


def swapped(a, b, rank=1):
    def change(r, rows):
        if r == rank:
            rows["order_hash"][[a, b]] = rows["order_hash"][[b, a]]

    return change


def skipped(step, rank=1, samples=3):
    def change(r, rows):
        if r == rank:
            rows["samples"][step] -= samples

    return change


def left_out(step, *slots, rank=1, order=Shuffled(1000, seed=7)):  # noqa: B008 - nothing changes it
    """Samples of a step could not be delivered, and the step says so."""

    def change(r, rows):
        if r == rank:
            row = rows[step]
            places = [int(row["position"]) + slot for slot in slots]
            gone = [order_hash(at, order.indices(int(row["epoch"]), at, at + 1)) for at in places]
            row["left_out"] = len(slots)
            row["left_out_hash"] = combine_hashes(*gone)

    return change


@pytest.mark.parametrize(
    ("change", "found"), [
        (without(4), [("missing", (144, 160))]),
        (without(-1, rank=0), [("missing", (992, 996))]),
        (without(0, rank=0), [("missing", (0, 16))]),
        (twice(4), [("doubled", (144, 160))]),
        (other_sample(4), [("other samples", (144, 160))]),
        (swapped(4, 6), [("other samples", (144, 160)), ("other samples", (208, 224))]),
        (skipped(4), [("other samples", (144, 157)), ("missing", (157, 160))]),
        (left_out(4, 2, 5), [("left out", (144, 160))]),
    ], ids=["missing", "last missing", "first missing", "doubled", "changed", "swapped", "skipped", "left out"],
)  # fmt: skip
def test_what_is_wrong_is_found_with_its_place(tmp_path, change, found):
    Loaders(tmp_path / "run").epoch(0).epoch(1, change=change).epoch(2).close()
    assert findings(tmp_path / "run") == [(kind, 1, at) for kind, at in found]
    assert not proof_of(tmp_path / "run").holds


def test_samples_that_were_left_out_are_named_and_not_in_the_hash(tmp_path):
    loaders = Loaders(tmp_path / "run").epoch(0, change=left_out(4, 2, 5)).epoch(1)
    loaders.event(1, "left out", epoch=0, step=4, position=149, index=3, reason="sample 3 is bad.")
    loaders.event(1, "left out", epoch=1, step=4, position=146, index=4, reason="another epoch's")
    loaders.close()
    epoch, whole = proof_of(tmp_path / "run").loaders[0].epochs
    assert (epoch.left_out, str(epoch.state), str(whole.state)) == (2, "skipped", "whole")
    assert [(f.positions, f.where) for f in epoch.findings] == [
        ((149, 150), "rank 1, step 4: sample 3 is bad."), ((144, 160), "rank 1, step 4: 1 sample"),
    ]  # fmt: skip
    done = command(tmp_path / "run")
    assert done.exit_code == 1  # that some were skipped is a finding, and nothing wrong
    assert "WRONG" not in done.output
    assert "2 samples skipped, as on_error='skip' says" in done.output
    assert "in 2 whole epochs, but for 2 samples skipped" in done.output
    hashes = position_hashes(0, loaders.order.indices(0, 0, 1000))
    assert epoch.order_hash == int(np.delete(hashes, [146, 149]).sum(dtype=np.uint64))


def test_what_is_wrong_beside_skipped_samples_is_wrong(tmp_path):
    def both(rank, rows):
        left_out(4, 2)(rank, rows)
        return without(6)(rank, rows)

    Loaders(tmp_path / "run").epoch(0, change=both).close()
    (epoch,) = proof_of(tmp_path / "run").loaders[0].epochs
    assert (epoch.left_out, str(epoch.state)) == (1, "wrong")
    assert "Not proved" in command(tmp_path / "run").output


def test_a_run_in_which_all_is_wrong_is_told_in_a_few_lines(tmp_path):
    def wrong(_, rows):
        rows["order_hash"] += 1

    Loaders(tmp_path / "run", samples=20_000, batch=2).epoch(0, change=wrong).close()
    (epoch,) = proof_of(tmp_path / "run").loaders[0].epochs
    assert len(epoch.findings) == 20
    assert epoch.more_findings == 10_000 - 20


def test_the_step_of_a_finding_is_told(tmp_path):
    Loaders(tmp_path / "run").epoch(0, change=other_sample(4)).close()
    (finding,) = proof_of(tmp_path / "run").loaders[0].epochs[0].findings
    assert finding.where == "rank 1, step 4"


def test_ranks_that_had_each_others_samples_are_found(tmp_path):
    loaders = Loaders(tmp_path / "run")
    rows = [steps_of(loaders.order, s, 0) for s in loaders.slices]
    rows[0]["order_hash"][3], rows[1]["order_hash"][3] = (
        rows[1]["order_hash"][3], rows[0]["order_hash"][3],
    )  # fmt: skip
    loaders.epoch(0, change=lambda rank, _: rows[rank]).close()
    assert findings(tmp_path / "run") == [
        ("other samples", 0, (96, 112)), ("other samples", 0, (112, 128)),
    ]  # fmt: skip


def test_a_rank_without_a_trace_is_missed(tmp_path):
    made_run(tmp_path / "run", world=3)
    (tmp_path / "run" / "rank-00001.trace").unlink()
    (loader,) = proof_of(tmp_path / "run").loaders
    assert "no trace of rank 1" in loader.gaps[0]
    assert not loader.holds


def test_lost_steps_leave_nothing_proved(tmp_path):
    Loaders(tmp_path / "run").epoch(0).event(1, "lost", steps=3).close()
    assert "3 steps faster" in proof_of(tmp_path / "run").loaders[0].gaps[0]


def test_an_epoch_that_was_left_is_told(tmp_path):
    Loaders(tmp_path / "run").epoch(0, stop=10).epoch(1).close()
    proof = proof_of(tmp_path / "run")
    assert [str(e.state) for e in proof.loaders[0].epochs] == ["left early", "whole"]
    assert proof.loaders[0].epochs[0].positions == 320
    assert not proof.holds


def test_a_run_that_was_killed_is_proved_as_far_as_all_ranks_came(tmp_path):
    def some_ahead(rank, rows):
        return rows[: 10 + rank]

    Loaders(tmp_path / "run", world=3).epoch(0).epoch(1, change=some_ahead).close("")
    proof = proof_of(tmp_path / "run")
    assert proof.holds
    assert str(proof.loaders[0].epochs[1].state) == "running"
    assert proof.loaders[0].epochs[1].positions == 10 * 3 * 16


def test_a_run_that_ended_properly_with_ranks_apart_is_not_proved(tmp_path):
    Loaders(tmp_path / "run", world=3).epoch(0, change=lambda r, rows: rows[: 10 + r]).close()
    assert not proof_of(tmp_path / "run").holds


@given(
    world=st.integers(1, 4), other=st.integers(1, 4), batch=st.integers(1, 9), stop=st.integers(0, 12),
    went=st.integers(0, 5),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_resumed_run_is_proved_on_any_number_of_ranks(
    tmp_path_factory, world, other, batch, stop, went
):
    folder = tmp_path_factory.mktemp("resumed")
    first = Loaders(folder / "run", samples=100, world=world, batch=batch)
    stop = min(stop, first.slices[0].steps())
    saved = first.slices[0].position_after(stop)
    first.epoch(0)
    first.epoch(1, stop=min(stop + went, first.slices[0].steps())).close("")
    again = Loaders(folder / "run", samples=100, world=other, batch=batch, began=1.8e9 + 60)
    if saved < 100:
        again.epoch(1, begin=saved)
    again.epoch(2).close()
    proof = proof_of(folder / "run")
    assert proof.holds, proof.document()
    assert len(proof.loaders) == 1
    assert [str(e.state) for e in proof.loaders[0].epochs] == ["whole"] * 3


def test_a_resume_at_the_wrong_position_is_found(tmp_path):
    Loaders(tmp_path / "run").epoch(0, stop=10).close()
    Loaders(tmp_path / "run", world=1, began=1.8e9 + 60).epoch(0, begin=352).close()
    assert findings(tmp_path / "run") == [("missing", 0, (320, 352))]


def test_what_only_the_trace_of_a_killed_process_would_have_is_not_known(tmp_path):
    """Its last steps were not written yet: that is no sample lost, and no proof either."""
    Loaders(tmp_path / "run").epoch(0, stop=10).close("")
    Loaders(tmp_path / "run", world=1, began=1.8e9 + 60).epoch(0, begin=352).close()
    proof = proof_of(tmp_path / "run")
    assert not proof.holds
    assert findings(tmp_path / "run") == []
    assert str(proof.loaders[0].epochs[0].state) == "not known"
    lines = "\n".join(proof_lines(proof))
    assert "positions 320 to 351 are not known: a process was killed" in lines
    assert "WRONG" not in lines
    assert "Not proved" in lines


def test_two_loaders_of_a_job_are_proved_apart(tmp_path):
    made_run(tmp_path / "run", samples=100)
    made_run(tmp_path / "run", samples=60, epochs=1)
    proof = proof_of(tmp_path / "run")
    assert proof.holds
    assert [loader.history.about.samples for loader in proof.loaders] == [100, 60]


def test_processes_without_ranks_that_run_side_by_side_are_no_resume_of_each_other(tmp_path):
    """The usual mistake: a job of two processes that was started without its launcher."""
    for _ in range(2):
        made_run(tmp_path / "run", world=1)
    proof = proof_of(tmp_path / "run")
    assert proof.without_ranks == 2
    assert [loader.history.again for loader in proof.loaders] == [0, 0]
    lines = "\n".join(proof_lines(proof))
    assert "exactly once in 4 whole epochs of 2 processes, each for itself." in lines
    assert "nothing was shared out" in lines


def test_steps_are_those_of_all_ranks_where_there_are_several(tmp_path):
    Loaders(tmp_path / "run").epoch(0, stop=10).close("")
    Loaders(tmp_path / "run", began=1.8e9 + 60).epoch(0, begin=7 * 32).close()
    lines = "\n".join(proof_lines(proof_of(tmp_path / "run")))
    assert "(64 steps of all ranks; hash" in lines
    assert "6 steps of all ranks came again after a resume" in lines


def test_one_process_and_its_resume_are_one(tmp_path):
    Loaders(tmp_path / "run", world=1).epoch(0, stop=10).close()
    Loaders(tmp_path / "run", world=1, began=1.8e9 + 60).epoch(0, begin=160).epoch(
        1, stop=5
    ).close()
    proof = proof_of(tmp_path / "run")
    assert proof.without_ranks == 0
    *_, last = proof_lines(proof)
    assert last == (
        "Proved: every sample came exactly once in 1 whole epoch and, as far as it went, in 1 more"
        " of one process."
    )


def test_of_an_order_that_is_not_ours_it_is_said_what_came(tmp_path):
    other = {"described": {}, "order_digest": "", "framework": "torch DataLoader"}
    made_run(tmp_path / "run", **other)
    lines = "\n".join(proof_lines(proof_of(tmp_path / "run")))
    assert "2,000 samples of 2 epochs came in 128 steps of all ranks;" in lines
    assert "the order is that of torch DataLoader" in lines


def test_an_order_that_cannot_be_made_again_is_proved_by_positions(tmp_path):
    made_run(tmp_path / "run", order=Weighted(np.ones(100), seed=1))
    (loader,) = proof_of(tmp_path / "run").loaders
    assert loader.holds
    assert "weighted" in loader.unchecked
    lines = list(proof_lines(proof_of(tmp_path / "run")))
    limit = "that it was the right sample was not checked"
    claims = [line for line in lines if "exactly once" in line]
    assert len(claims) == 3
    assert all("every position" in line and limit in line for line in claims)
    assert not any("every sample" in line for line in lines)


def test_of_a_subset_it_is_said_how_many_samples_it_has(tmp_path):
    made_run(tmp_path / "run", order=Subset(np.arange(60), 100, seed=1))
    lines = "\n".join(proof_lines(proof_of(tmp_path / "run")))
    assert ": 60 of 100 samples, subset, seed 1" in lines


@given(st.lists(st.integers(0, 130), max_size=8), st.integers(0, 5))
def test_sums_are_those_of_order_hashes(positions, epoch):
    order = Shuffled(100, seed=5)
    sums = sums_at(order, epoch, np.array(positions, np.uint64))
    for position, found in zip(positions, sums, strict=True):
        assert int(found) == order_hash(0, order.wrapped(epoch, 0, position))


def test_hashes_of_positions_add_up_to_the_order_hash():
    indices = Shuffled(1000, seed=1).indices(0, 100, 164)
    assert int(position_hashes(100, indices).sum(dtype=np.uint64)) == order_hash(100, indices)


# -- two runs ------------------------------------------------------------------------------------------


def same(a, b):
    return same_order(read_run(a), read_run(b))


def test_the_same_order_on_other_ranks_and_batches_is_the_same(tmp_path):
    made_run(tmp_path / "a", world=2, batch=16)
    made_run(tmp_path / "b", world=4, batch=8)
    made_run(tmp_path / "c", world=3, batch=7)
    assert same(tmp_path / "a", tmp_path / "b").holds
    assert same(tmp_path / "a", tmp_path / "c").positions == 2000


def test_the_first_step_that_differs_is_told(tmp_path):
    made_run(tmp_path / "a")
    Loaders(tmp_path / "b").epoch(0).epoch(1, change=other_sample(7)).close()
    found = same(tmp_path / "a", tmp_path / "b")
    assert not found.holds
    assert found.first.epoch == 1
    assert found.first.positions == (240, 256)
    assert found.first.a == found.first.b == "rank 1, step 7"


def test_another_seed_or_other_data_is_another_order(tmp_path):
    made_run(tmp_path / "a")
    made_run(tmp_path / "b", order=Shuffled(1000, seed=8))
    assert same(tmp_path / "a", tmp_path / "b").first.positions == (0, 16)
    made_run(tmp_path / "c", samples=500)
    made_run(tmp_path / "d", samples=500, fingerprint="e" * 16)
    assert "other data" in same(tmp_path / "c", tmp_path / "d").first.what


def test_a_run_that_lacks_samples_is_another(tmp_path):
    made_run(tmp_path / "a", epochs=1)
    for name in "bc":
        Loaders(tmp_path / name).epoch(0, change=left_out(4, 2)).close()
    assert same(tmp_path / "a", tmp_path / "b").first.positions == (144, 160)
    assert same(tmp_path / "b", tmp_path / "c").holds


def test_a_shorter_run_is_compared_as_far_as_it_went(tmp_path):
    made_run(tmp_path / "a")
    Loaders(tmp_path / "b").epoch(0, stop=5).close("")
    found = same(tmp_path / "a", tmp_path / "b")
    assert found.holds
    assert found.positions == 160


def test_orders_that_are_not_ours_are_compared_rank_by_rank(tmp_path):
    other = {"described": {}, "order_digest": "", "framework": "torch DataLoader"}
    made_run(tmp_path / "a", **other)
    made_run(tmp_path / "b", **other)
    assert same(tmp_path / "a", tmp_path / "b").holds
    Loaders(tmp_path / "c", **other).epoch(0, change=other_sample(7)).close()
    assert same(tmp_path / "a", tmp_path / "c").first.a == "rank 1, step 7"


# -- the command ---------------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(app, ["verify-epoch", *map(str, words)])


def test_the_command_says_what_is_proved_and_ends_with_0(tmp_path):
    made_run(tmp_path / "run")
    made_run(tmp_path / "other", world=4)
    done = command(tmp_path / "run", tmp_path / "other")
    assert done.exit_code == 0, done.output
    assert "Proved: every sample came exactly once over all ranks in 2 whole epochs." in done.output
    assert "Same order" in done.output
    assert "2,000 positions of 2 epochs" in done.output


def test_the_command_ends_with_1_where_something_is_wrong(tmp_path):
    Loaders(tmp_path / "run").epoch(0, change=without(4)).close()
    done = command(tmp_path / "run")
    assert done.exit_code == 1
    assert "missing: positions 144 to 159: before rank 0, step 5" in done.output
    document = json.loads(command(tmp_path / "run", "--json").output)
    assert document["proved"] is False
    assert document["runs"][0]["loaders"][0]["epochs"][0]["findings"] == [
        {"kind": "missing", "epoch": 0, "from": 144, "to": 160, "where": "before rank 0, step 5"}
    ]


def test_the_command_refuses_what_is_no_run(tmp_path):
    done = command(tmp_path)
    assert done.exit_code == 3
    assert "no run's folder" in done.output
    assert "next:" in done.output


def test_hostile_names_cannot_move_the_cursor(tmp_path):
    made_run(tmp_path / "run", source="/data/\x1b[2J\ud800\n<b>")
    done = command(tmp_path / "run")
    assert done.exit_code == 0
    assert "\x1b" not in done.output

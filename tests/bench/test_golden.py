"""One timeline of two accelerators and two epochs, and all that its files say of it, worked out by hand.

Steps compute 1 s, batches are of 7 samples of 2 MiB. The first step of each epoch does not count.

    epoch 1, 0 to 6 s     accelerator 0 waits 1.0 0.1 0.2 0.3     accelerator 1 waits 1.5 0 0 0
    epoch 2, 10 to 15 s   accelerator 0 waits 0.5 0   0   0       accelerator 1 waits 0.5 0.5 0 0

What remains of the time is the barrier. AU of DLIO: of epoch 1 3 / (6 - 2) and 3 / (6 - 2.5), of epoch 2
3 / (5 - 1.5) twice.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.metrics import Block, CheckpointTimes, StepWindow, bounds_of
from headrace.bench.results import write_rank_files
from headrace.bench.summary import (
    BenchRecord,
    gather_run,
    metric_lines,
    summary_document,
    timestamp,
    together,
)
from headrace.machine.host import CpuUse

BATCH = 7
WAITS = {
    (1, 0): [1.0, 0.1, 0.2, 0.3],
    (1, 1): [1.5, 0, 0, 0],
    (2, 0): [0.5, 0, 0, 0],
    (2, 1): [0.5, 0.5, 0, 0],
}
TIMES = {1: (0.0, 6.0), 2: (10.0, 15.0)}
AU = [100 * (3 / 4 + 3 / 3.5) / 2, 100 * 3 / 3.5]


def blocks(late_s=0.0, waits=WAITS):
    return [
        Block(
            epoch=epoch, accelerator=accelerator, start_s=TIMES[epoch][0], end_s=TIMES[epoch][1],
            load_s=np.array(loads, float), compute_s=np.ones(4), harness_s=np.zeros(4),
            late_s=np.full(4, late_s),
        )
        for (epoch, accelerator), loads in waits.items()
    ]  # fmt: skip


def figures(**more):
    given = {"formula": "mlcommons", "blocks": blocks(), "nbytes": 10**9, "device_bytes": 4 * 10**8,
             "cpu_s": 2.0}  # fmt: skip
    return BenchRecord(engine="headrace", start_s=0.0, end_s=20.0, accelerators=2, **(given | more))


def summary(target=0.83, **more):
    workload = load_workload(parse_command_line([
        "workload=unet3d_h100", f"++workload.metric.au={target}", "++workload.train.epochs=2",
        "++workload.train.computation_time=1.0", f"++workload.reader.batch_size={BATCH}",
        f"++workload.dataset.record_length_bytes={2 << 20}",
        "++workload.dataset.record_length_bytes_stdev=0",
    ])).workload  # fmt: skip
    return summary_document(workload, figures(**more))


def test_au_of_dlio():
    metric = summary()["metric"]
    assert metric["train_au_percentage"] == pytest.approx(AU)
    assert metric["train_au_mean_percentage"] == pytest.approx(83.0357142857)
    assert metric["train_au_stdev_percentage"] == pytest.approx((AU[1] - AU[0]) / 2)


@pytest.mark.parametrize(
    ("target", "by_dlio", "by_mlperf"),
    [(0.83, "success", "success"), (0.84, "fail", "success"), (0.85, "fail", "fail")],
)
def test_pass_marks_of_both_utilisations(target, by_dlio, by_mlperf):
    """By MLPerf's rules: 8 s of compute in 6 + 5 s, without the 1.5 s of the first wait: 84.2 %."""
    result = summary(target)
    assert result["metric"]["train_au_meet_expectation"] == by_dlio
    assert result["headrace"]["au_mlperf_percent"] == pytest.approx(100 * 8 / 9.5)
    assert result["headrace"]["au_mlperf_meet_expectation"] == by_mlperf


def test_the_mark_itself_is_passed():
    alone = {(1, 0): WAITS[1, 0]}
    assert (
        summary(0.75, blocks=blocks(waits=alone))["metric"]["train_au_meet_expectation"]
        == "success"
    )


@pytest.mark.parametrize(
    ("formula", "per_epoch"),
    [
        # The magic 2: of four steps two count, whatever the window is.
        ("upstream", [(2 / 4 + 2 / 3.5) * BATCH, 2 * 2 / 3.5 * BATCH]),
        # MLPerf v3's: the window's three.
        ("mlcommons", [(3 / 4 + 3 / 3.5) * BATCH, 2 * 3 / 3.5 * BATCH]),
    ],
)
def test_both_throughputs(formula, per_epoch):
    result = summary(formula=formula)
    metric = result["metric"]
    assert metric["train_throughput_samples_per_second"] == pytest.approx(per_epoch)
    mean = sum(per_epoch) / 2
    assert metric["train_throughput_mean_samples_per_second"] == pytest.approx(mean)
    assert metric["train_throughput_stdev_samples_per_second"] == pytest.approx(np.std(per_epoch))
    assert metric["train_io_mean_MB_per_second"] == pytest.approx(mean * 2)  # MiB, of nominal size
    assert metric["train_io_stdev_MB_per_second"] == pytest.approx(np.std(per_epoch) * 2)
    both = result["headrace"]["throughput_by_formula_samples_per_s"]
    assert both == pytest.approx({"upstream": 7.75, "mlcommons": 11.625})
    message = f"[METRIC] Training Throughput (samples/second): {mean:.4f} ({np.std(per_epoch):.4f})"
    assert message in metric_lines(result)


def test_our_own_figures():
    own = summary()["headrace"]
    time = own["time"]
    # Epochs without their first steps: 4 and 3.5, twice 3.5 s; 12 s of them compute.
    assert time["total_s"] == pytest.approx(4 + 3.5 + 3.5 + 3.5)
    assert time["compute_s"] == 12
    assert time["wait_s"] == pytest.approx(0.6 + 0 + 0 + 0.5)
    assert time["barrier_s"] == pytest.approx(14.5 - 12 - 1.1)
    assert own["wait_s"]["max"] == 0.5
    assert own["cpu_s_per_gb"] == 2.0
    assert own["page_cache_bytes"] == 6 * 10**8
    # Steps in the order of time: (1.1 1.2 1.3 1 1 1) and (1 1 1 1.5 1 1): 6.6 and 6.5 s.
    assert own["au_percent"] == {
        "mean": pytest.approx(83.0357142857),
        "confidence_95": None,
        "runs": 1,
    }


def test_repeats_are_one_run_of_all_their_epochs():
    """Three runs, the last of which has no waits in its second epoch; AU of both formulas are means of runs."""
    quick = {key: [0.5, 0, 0, 0] if key[0] == 2 else loads for key, loads in WAITS.items()}
    runs = [figures(phases_s={"training": 10.0, "other": at}) for at in (1.0, 2.0)]
    runs.append(figures(blocks=blocks(waits=quick), phases_s={"training": 7.0, "other": 0.0}))
    whole = together(runs)
    result = summary_document(load_workload(parse_command_line([
        "workload=unet3d_h100", "++workload.train.computation_time=1.0",
        f"++workload.reader.batch_size={BATCH}",
    ])).workload, whole)  # fmt: skip
    assert [block.epoch for block in whole.blocks] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert result["metric"]["train_au_percentage"] == pytest.approx(AU * 3)
    own = result["headrace"]
    assert own["repeats"] == own["au_percent"]["runs"] == 3
    assert own["au_percent"]["confidence_95"] == pytest.approx(0, abs=1e-9)
    assert own["au_mlperf_percent"] == pytest.approx(100 * 8 / 9.5)  # each without its first wait
    assert (own["bytes"], own["cpu_s"]) == (10**9, 2.0)
    assert own["wait_s"]["max"] == pytest.approx((0.5 + 0.5 + 0.3) / 3)
    assert own["time_to_solution"] == {"total_s": 10.0, "training_s": 9.0, "other_s": 1.0}


def test_shares_of_repeats_are_means_of_shares_and_each_ones_bound_is_told():
    """The second run took five times as long, and waited for none of it; the last had its processors taken."""
    none = {key: [0.0] * 4 for key in WAITS}
    slow = [
        replace(block, compute_s=5 * block.compute_s, end_s=block.start_s + 20)
        for block in blocks(waits=none)
    ]
    runs = [figures(), figures(blocks=slow), figures(cpu_use=CpuUse(1.0, 1.0))]
    runs = [replace(run, hosts=[{"cpu_count": 2, "memory_gb": 1.0}]) for run in runs]
    workload = load_workload(parse_command_line(["workload=unet3d_h100"])).workload
    result = summary_document(workload, together(runs))
    own = result["headrace"]
    each = [summary_document(workload, run)["headrace"] for run in runs]
    for part in ("compute_s", "wait_s", "barrier_s", "harness_s"):
        mean = sum(one["time"][part] / one["time"]["total_s"] for one in each) / 3
        assert own["time"][part] / own["time"]["total_s"] == pytest.approx(mean)
    assert bounds_of([own]) == bounds_of(each)
    lines = [line for line in metric_lines(result) if line.startswith("bound by ")]
    assert [line.partition(":")[0] for line in lines] == [
        f"bound by {one['bound']} (1 of 3 runs)" for one in each
    ]


def test_what_later_repeats_find_in_the_page_cache_is_told_of_all_together():
    runs = [figures(device_bytes=device, residency={"share": 0.0}) for device in (10**9, 0, 0)]
    workload = load_workload(parse_command_line(["workload=unet3d_h100"])).workload
    own = summary_document(workload, together(runs))["headrace"]
    assert own["page_cache_share"] == pytest.approx(2 / 3)


def ceiling(au):
    """A null store's blocks, of that AU in percent."""
    took_s = 1 + 3 / (au / 100)
    return [Block(epoch=1, accelerator=0, start_s=0.0, end_s=took_s, load_s=np.zeros(4),
                  compute_s=np.ones(4), harness_s=np.zeros(4), late_s=np.zeros(4))]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "bound", "message"),
    [
        ({}, "storage", "waiting for data"),
        ({"ceiling": ceiling(99.9)}, "storage", "without storage AU is 99.90 %"),
        # 10 of the 17 percent that are lost are lost without any storage.
        ({"ceiling": ceiling(90)}, "harness", "the figure says nothing about the storage"),
        # A third is no bound, but told.
        ({"ceiling": ceiling(94)}, "storage", "without storage AU is 94.00 %, 35% of what was lost"),
        ({"ceiling": ceiling(99.9), "blocks": blocks(late_s=0.15)}, "harness", "late with emulating acc"),
        ({"blocks": blocks(late_s=0.06)}, "storage", "which explains at most "),
    ],
)  # fmt: skip
def test_a_result_is_not_called_the_storages_when_the_harness_is_the_limit(more, bound, message):
    own = summary(**more)["headrace"]
    assert own["bound"] == bound
    assert message in own["bound_reason"]


def test_the_files_of_an_accelerator(tmp_path):
    mine = [block for block in blocks() if block.accelerator == 0]
    evaluation = Block(
        epoch=2, accelerator=0, kind="eval", start_s=15.0, end_s=17.5, load_s=np.array([1.0, 0]),
        compute_s=np.full(2, 0.5), harness_s=np.zeros(2), late_s=np.zeros(2),
    )  # fmt: skip
    saved = CheckpointTimes(
        epoch=2, number=1, start_s=1018.0, duration_s=4.0, nbytes=2 << 30, blocking_s=4.0
    )
    write_rank_files(
        tmp_path, 0, [*mine, evaluation], offset_s=1000.0, batches=(BATCH, 3), window=StepWindow(1, 0),
        formula="upstream", host={"hostname": "node"}, saved=[saved],
    )  # fmt: skip
    output = json.loads((tmp_path / "0_output.json").read_text())
    assert output["hostname"] == "node"
    assert output["1"]["load"] == {"block1": WAITS[1, 0]}
    assert output["1"]["proc"]["block1"] == pytest.approx([2.0, 1.1, 1.2, 1.3])
    assert output["1"]["compute"] == {"block1": [1.0] * 4}
    assert output["1"]["au"]["block1"] == pytest.approx(75)
    assert output["1"]["throughput"]["block1"] == pytest.approx(2 / 4 * BATCH)
    # Evaluation counts all its steps in all its time, but its AU is of the window.
    assert output["2"]["throughput"]["eval"] == pytest.approx(2 / 2.5 * 3)
    assert output["2"]["au"]["eval"] == pytest.approx(100 * 0.5 / (2.5 - 1.5))
    assert output["2"]["end"] == timestamp(1017.5)
    stats = json.loads((tmp_path / "0_per_epoch_stats.json").read_text())
    assert stats["1"] == {
        "start": timestamp(1000), "end": timestamp(1006), "duration": "6.00",
        "block1": {"start": timestamp(1000), "end": timestamp(1006), "duration": "6.00"},
    }  # fmt: skip
    assert stats["2"] == {
        "start": timestamp(1010), "end": timestamp(1022), "duration": "12.00",
        "block1": {"start": timestamp(1010), "end": timestamp(1015), "duration": "5.00"},
        "eval": {"start": timestamp(1015), "end": timestamp(1017.5), "duration": "2.50"},
        "save_ckpt1": {"start": timestamp(1018), "end": timestamp(1022), "duration": 4.0,
                       "throughput": 0.5},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("others", "said"), [(2.0, ["2.0 of 4 processors"]), (0.9, []), (math.nan, [])]
)
def test_a_run_beside_other_programs_says_so(others, said):
    document = summary(hosts=[{"cpu_count": 4, "memory_gb": 1.0}], cpu_use=CpuUse(0.5, others))
    assert document["headrace"]["bound"] == "storage"
    lines = [line for line in metric_lines(document) if line.startswith("other programs")]
    assert [text for text in said if text in "".join(lines)] == said
    assert len(lines) == len(said)
    json.dumps(document, allow_nan=False)


def test_a_run_that_found_every_processor_busy_says_nothing_of_the_storage():
    document = summary(hosts=[{"cpu_count": 4, "memory_gb": 1.0}], cpu_use=CpuUse(0.5, 3.4))
    assert document["headrace"]["bound"] == "processors"
    assert not [line for line in metric_lines(document) if line.startswith("other programs")]


def test_ranks_of_a_host_are_none_of_its_other_programs():
    """Two ranks, each busy on one processor: the host's third busy one is another program's."""

    class Ranks:
        def gather(self, part, _deadline_s):
            return [part, part]

    record = figures(cpu_use=CpuUse(1.0, 2.0))
    assert gather_run(Ranks(), record)
    assert record.cpu_use == (2.0, 1.0)
    assert together([record, record]).cpu_use == (2.0, 1.0)

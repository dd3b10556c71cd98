"""The formulas against timelines that were worked out by hand."""

import math

import numpy as np
import pytest

from headrace.bench.metrics import (
    Block,
    StepWindow,
    TimeShares,
    block_au,
    block_throughput,
    cached_share,
    confidence,
    mlperf_au,
    percentiles,
    phase_figures,
    shares_of,
    uncounted_of,
    verdict_of,
)
from headrace.machine.host import CpuUse

DEFAULT = StepWindow(1, 0)


def block(
    load, compute, *, start=0.0, end=None, epoch=1, accelerator=0, kind="train", harness=None
):
    load, compute = np.array(load, float), np.array(compute, float)
    harness = np.zeros(len(load)) if harness is None else np.array(harness, float)
    end = start + (load + compute + harness).sum() if end is None else end
    return Block(
        epoch=epoch, accelerator=accelerator, kind=kind, start_s=start, end_s=end, load_s=load,
        compute_s=compute, harness_s=harness, late_s=np.zeros(len(load)),
    )  # fmt: skip


def test_au_is_the_windows_compute_by_the_remaining_time():
    # 4.6 s of loads and compute, and barriers up to 5.8 s. Step 0 took 2.0 s and does not count.
    late = block([1.0, 0.1, 0.2, 0.3], [1.0] * 4, end=5.8)
    assert block_au(late, DEFAULT) == pytest.approx(100 * 3.0 / (5.8 - 2.0))
    # Without the last one, too: 2 steps; proc of step 3 (1.3 s) comes off.
    assert block_au(late, StepWindow(1, 1)) == pytest.approx(100 * 2.0 / (5.8 - 2.0 - 1.3))
    assert block_au(late, StepWindow(0, 0)) == pytest.approx(100 * 4.0 / 5.8)


def test_both_throughput_formulas():
    late = block([1.0, 0.1, 0.2, 0.3], [1.0] * 4, end=5.8)
    assert block_throughput(late, 7, DEFAULT, "upstream") == pytest.approx((4 - 2) / 3.8 * 7)
    assert block_throughput(late, 7, DEFAULT, "mlcommons") == pytest.approx(3 / 3.8 * 7)


def test_upstreams_two_steps_are_none_and_one_is_negative_as_it_reports():
    two = block([0.0, 0.0], [1.0, 1.0])
    assert block_throughput(two, 7, DEFAULT, "upstream") == 0
    assert block_throughput(two, 7, DEFAULT, "mlcommons") == pytest.approx(7)
    three = block([0.0] * 3, [1.0] * 3)
    assert block_throughput(three, 7, DEFAULT, "upstream") == pytest.approx(3.5)


def test_no_steps_and_no_compute_are_zero_and_no_division():
    assert block_au(block([], []), DEFAULT) == 0
    assert block_au(block([1, 1], [0, 0]), DEFAULT) == 0
    assert block_throughput(block([], []), 4, DEFAULT, "upstream") == 0
    assert mlperf_au([], 1.0) == 0
    assert phase_figures([], 4, DEFAULT, "upstream").au_mean_percent == 0


def test_evaluation_counts_all_steps_in_all_time():
    evaluation = block([1.0, 0.0], [0.5, 0.5], end=2.5, kind="eval")
    assert block_throughput(evaluation, 3, DEFAULT, "upstream") == pytest.approx(2 / 2.5 * 3)
    assert block_au(evaluation, DEFAULT) == pytest.approx(100 * 0.5 / 1.0)


def test_epochs_are_means_of_ranks_and_sums_of_throughput():
    blocks = [
        block([1, 0, 0], [1, 1, 1], accelerator=0),  # AU 100, 2 steps in 2 s
        block([1, 1, 1], [1, 1, 1], accelerator=1),  # AU 50, 2 steps in 4 s
        block([1, 0, 0], [1, 1, 1], accelerator=0, epoch=2, start=10),
        block([1, 0, 0], [1, 1, 1], accelerator=1, epoch=2, start=10),
    ]
    figures = phase_figures(blocks, 4, DEFAULT, "mlcommons")
    assert figures.au_percent == pytest.approx((75, 100))
    assert figures.throughput == pytest.approx((4 + 2, 8))
    assert figures.au_mean_percent == pytest.approx(87.5)
    assert figures.au_stdev_percent == pytest.approx(12.5)  # of the population
    assert (figures.throughput_mean, figures.throughput_stdev) == pytest.approx((7, 1))


def test_blocks_of_an_epoch_are_weighted_by_their_steps():
    blocks = [
        block([0] * 9, [1] * 9),  # AU 100
        block([0, 1, 1], [1, 1, 1], start=9),  # AU 50
    ]
    assert phase_figures(blocks, 1, DEFAULT, "mlcommons").au_percent == pytest.approx(
        ((100 * 9 + 50 * 3) / 12,)
    )


def test_mlperf_counts_what_was_asked_for_by_the_running_time():
    # Two accelerators, 2 epochs of 3 steps of 1 s; the first wait of the run (2 s) does not count.
    blocks = [
        block([2, 0.5, 0.5], [1] * 3, accelerator=0, end=6),
        block([2, 0.5, 0.5], [1] * 3, accelerator=1, end=6.5),
        block([1, 0, 0], [1] * 3, accelerator=0, epoch=2, start=7, end=11),
        block([1, 0, 0], [1] * 3, accelerator=1, epoch=2, start=7, end=11),
    ]
    assert mlperf_au(blocks, 1.0) == pytest.approx(100 * 6 / (6.5 + 4 - 2))
    assert mlperf_au([blocks[0]], 1.0) == pytest.approx(100 * 3 / 4)


def test_shares_add_up_and_what_no_accelerator_explains_is_the_harness():
    late = block([1.0, 0.1, 0.2], [1.0] * 3, end=5.0, harness=[0, 0.05, 0.05])
    shares = shares_of([late], DEFAULT)
    assert shares.total_s == pytest.approx(3.0)
    assert (shares.compute_s, shares.wait_s) == pytest.approx((2.0, 0.3))
    assert (shares.harness_s, shares.barrier_s) == pytest.approx(
        (0.7, 0)
    )  # alone it waits for nobody
    assert shares.of("wait") == pytest.approx(0.1)
    slower = block([1.0, 0.1, 0.6], [1.0] * 3, end=5.0, accelerator=1)
    both = shares_of([late, slower], DEFAULT)
    # The first has 4.4 s of its own, the slowest of each step 4.75: 0.35 is the barrier. The other has 4.7 s.
    assert both.barrier_s == pytest.approx(0.35 + 0.05)
    assert both.harness_s == pytest.approx(0.1 + 0.25 + 0.25)
    assert sum(both) == pytest.approx(2 * both.total_s)


def test_without_a_step_that_counts_nothing_is_known():
    """One step an epoch, at whose end accelerators met: no time of it is the barrier's."""
    blocks = [block([0.1], [1.0], end=2.0), block([0.9], [1.0], end=2.0, accelerator=1)]
    shares = shares_of(blocks, DEFAULT)
    assert shares == (0, 0, 0, 0, 0)
    result = verdict_of(0, 0, shares, {}, 1.0, accelerators=2)
    assert result.bound == "unknown"
    assert "more files, fewer accelerators or a smaller batch" in result.reason


def test_the_time_that_does_not_count_is_known():
    blocks = [block([3.0, 0.5], [1.0] * 2), block([1.0, 0.5], [1.0] * 2, end=5.5, accelerator=1)]
    assert uncounted_of(blocks, DEFAULT) == pytest.approx((5.5, 3.0, 2.0))
    assert uncounted_of(blocks, StepWindow(0, 0)) == pytest.approx((5.5, 0, 0))
    assert uncounted_of([], DEFAULT) == (0, 0, 0)


def test_percentiles_of_known_numbers():
    result = percentiles(np.arange(1, 1001))
    assert result["p50"] == pytest.approx(500.5)
    assert result["p99"] == pytest.approx(990.01)
    assert (result["max"], result["mean"]) == (1000, 500.5)
    assert percentiles([]) == {}


def test_the_confidence_interval_is_students():
    result = confidence([90.0, 92.0, 94.0])
    # s = 2, sqrt(3) = 1.732, t(2) = 4.303
    assert (result.mean, result.half_width) == pytest.approx((92, 4.303 * 2 / 3**0.5))
    assert confidence([5.0]).half_width is None
    assert confidence([1.0] * 40).half_width == 0
    with pytest.raises(ValueError, match="empty"):
        confidence([])


def verdict(au, ceiling, *, wait=0.3, harness=0.0, late=0.0, step=0.1):
    one = block([wait] * 3, [1.0] * 3, harness=[harness] * 3)
    late_s = {"p99": late, "mean": late}
    return verdict_of(au, ceiling, shares_of([one], DEFAULT), late_s, step).bound


@pytest.mark.parametrize(
    ("nbytes", "device", "resident", "epochs", "share"),
    [
        (100, 0, 1.0, 1, 1.0),
        (100, 30, 0.7, 1, 0.7),
        (100, 20, 0.0, 5, 0.8),  # from the second epoch on
        (100, 120, 0.0, 1, 0.0),  # read ahead
        (100, 0, 0.0, 1, None),  # a file system that counts nothing
        (100, 0, 0.0, 5, None),
        (100, 0, None, 1, None),
        (0, 0, 1.0, 1, None),  # nothing was read
    ],
)
def test_what_came_from_the_page_cache_is_known_where_the_kernel_counts(
    nbytes, device, resident, epochs, share
):
    assert cached_share(nbytes, device, resident, epochs) == share


@pytest.mark.parametrize(("au", "bound", "message"), [
    (99.5, "compute", "AU is 99.50 %: the page cache keeps up: 90% of the bytes came from there"),
    (70, "page cache", "0.0% went to the harness: 90% of the bytes came from there"),
])  # fmt: skip
def test_what_came_from_the_page_cache_is_not_called_the_storages(au, bound, message):
    shares = shares_of([block([0.3] * 3, [1.0] * 3)], DEFAULT)
    result = verdict_of(au, None, shares, {}, 0.1, cached=0.9)
    assert result.bound == bound
    assert message in result.reason
    assert "says nothing about the storage" in result.reason
    assert "storage keeps up" in verdict_of(99.5, None, shares, {}, 0.1, cached=0.4).reason


@pytest.mark.parametrize(("own", "others", "bound"), [
    (0.2, 1.8, "processors"), (1.9, 0.0, "processors"), (0.2, 1.0, "storage"), (0.2, math.nan, "storage"),
])  # fmt: skip
def test_a_wait_beside_busy_processors_is_not_called_the_storages(own, others, bound):
    shares = shares_of([block([0.3] * 3, [1.0] * 3)], DEFAULT)
    result = verdict_of(70, None, shares, {}, 0.1, cpu_use=CpuUse(own, others), cpus=2)
    assert result.bound == bound
    assert (f"other programs {others:.1f};" in result.reason) == (bound == "processors")
    cached = verdict_of(70, None, shares, {}, 0.1, cached=0.99, cpu_use=CpuUse(own, others), cpus=2)
    assert "99% of the bytes came from" in cached.reason


def test_a_result_is_called_storage_bound_only_when_the_harness_is_not():
    assert verdict(99.5, None) == "compute"
    assert verdict(70, None) == "storage"
    assert verdict(70, 99.9) == "storage"
    assert verdict(70, 80) == "harness"  # the null run loses 20 of the 30 lost
    assert verdict(20, 98) == "storage"  # 2 of 80
    assert verdict(70, 90) == "storage"  # 10 of 30: most is lost with storage alone
    assert (
        verdict(70, 99.9, wait=0.1, harness=0.3)
        == verdict(70, None, wait=0.1, harness=0.3)
        == "harness"
    )
    assert verdict(70, 99.9, late=0.02) == "harness"


def test_one_late_step_is_a_doubt_beside_a_long_wait_and_not_the_bound():
    """Of 8 steps the 99th percentile is the latest one."""
    shares = TimeShares(100, 25.9, 70.7, 3.4, 0)
    late_s = percentiles([0.0176] + [0.0002] * 7)
    result = verdict_of(25.9, 100.0, shares, late_s, 0.323)
    assert result.bound == "storage"
    assert "70.7% of the time was waiting for data, 3.4% went to the harness" in result.reason
    doubt = "up to 16.38 ms late (p99; steps take 323.00 ms), which explains at most 0.3% of what was lost"
    assert doubt in result.reason
    busy = verdict_of(25.9, None, shares, late_s, 0.323, cpu_use=CpuUse(1.9, 0), cpus=2)
    assert busy.bound == "processors"


@pytest.mark.parametrize(
    ("wait", "barrier", "percent", "message"),
    [(0.1, 1.9, 1.0, ", 19.0% to waiting at the barrier for others that did"),
     (1.5, 0.5, 15.0, ", 5.0% to waiting at the barrier for others")],
)  # fmt: skip
def test_who_waits_at_the_barrier_waits_for_the_storage_too(wait, barrier, percent, message):
    """An accelerator whose own data were there, as most are when one's come late."""
    shares = TimeShares(10, 8, wait, 0, barrier)
    result = verdict_of(80, 99.9, shares, {}, 0.1, accelerators=20)
    assert result.bound == "storage"
    waited = f"{percent:.1f}% of the time was waiting for data, 0.0% went to the harness"
    assert result.reason == f"{waited}{message}; without storage AU is 99.90 %"


def test_who_waits_for_others_that_compute_longer_blames_nobody():
    """Two accelerators of which one waits 1 % cannot cost the other 19 %."""
    result = verdict_of(80, None, TimeShares(10, 8, 0.1, 0, 1.9), {}, 0.1, accelerators=2)
    longer = "19.0% of the time was waiting at the barrier for accelerators that computed longer"
    assert result == ("compute", longer)

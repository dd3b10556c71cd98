"""The step loops: what is recorded of them, and the AU that follows from a storage of known bandwidth.

Most run on a virtual clock: what they say does not depend on how busy the machine is.
"""

import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest

from headrace.bench.engines import Delivered, batches_ahead
from headrace.bench.loop import RealClock, StepLoop
from headrace.bench.metrics import StepWindow, phase_figures
from headrace.errors import BenchError
from headrace.io.simulation import Simulation

from .virtual_clock import ModelSource, VirtualClock

BATCH = Delivered(1, 10)


class After:
    """Each batch is there some time after it was asked for."""

    def __init__(self, wait_s=0.0):
        self.wait_s = wait_s

    def ready(self, asked_s):
        return asked_s + self.wait_s, BATCH


class Real:
    """The same on the machine's clock; may fail."""

    def __init__(self, wait_s=0.0, fails_at=None):
        self.wait_s, self.fails_at, self.given = wait_s, fails_at, 0
        self.closed = False

    def next(self):
        if self.given == self.fails_at:
            raise BenchError("file 7 cannot be read")
        self.given += 1
        time.sleep(self.wait_s)
        return BATCH

    def close(self):
        self.closed = True


def run(sources, compute_s, **options):
    loop = StepLoop(**options)
    return loop, loop.run([lambda s=s: s for s in sources], np.array(compute_s), 1)


def virtually(sources, compute_s, **options):
    return run(sources, compute_s, clock=VirtualClock(), **options)[1]


def test_steps_follow_one_another_without_drift():
    """Whatever the lateness of each end: steps and waits add up to the block, exactly."""
    _, [block] = run([Real()], np.full((1, 20), 0.005))
    waited_s = block.load_s.sum() + block.harness_s.sum()
    assert block.duration_s - waited_s == pytest.approx(0.1, abs=1e-9)
    assert (block.late_s > 0).all()
    assert (block.compute_s == 0.005).all()


def test_a_batch_is_waited_for_while_the_step_before_computes():
    [block] = virtually([After(0.02)], np.full((1, 5), 0.01))
    assert block.load_s == pytest.approx([0.02, 0.01, 0.01, 0.01, 0.01])
    [block] = virtually([After(0.005)], np.full((1, 5), 0.01))
    assert block.load_s == pytest.approx([0.005, 0, 0, 0, 0])


def test_loaders_that_prefetch_themselves_are_asked_after_the_step():
    [block] = virtually([After(0.02)], np.full((1, 4), 0.01), ahead=False)
    assert block.load_s == pytest.approx([0.02] * 4)
    assert block.duration_s == pytest.approx(0.12)


def test_the_barrier_makes_all_wait_for_the_slowest():
    times = np.array([[0.01] * 5, [0.03] * 5])
    quick, slow = virtually([After(), After()], times)
    assert (quick.duration_s, slow.duration_s) == pytest.approx((0.15, 0.15))


class Asked(After):
    """Notes when it is asked for batches ahead."""

    def __init__(self, number, ahead, asked):
        super().__init__()
        self.number, self.left, self.asked = number, ahead, asked

    def ask(self):
        if not self.left:
            return False
        self.left -= 1
        self.asked.append(self.number)
        return True


def test_batches_ahead_are_asked_for_in_turns():
    """The first step does not wait until the first accelerator's fourth batch is read."""
    asked = []
    virtually([Asked(0, 3, asked), After(), Asked(2, 2, asked)], np.full((3, 2), 0.01))
    assert asked == [0, 2, 0, 2, 0]


class Early(Real):
    """Batches that were there long before anybody was woken."""

    def next(self):
        asked_s = time.perf_counter()
        super().next()
        return Delivered(1, 10, asked_s - 5.0)


def test_a_batch_counts_from_when_it_was_there_not_from_when_it_was_noticed():
    loop, [block] = run([Early(0.01)], np.full((1, 5), 0.001))
    assert (block.load_s == 0).all()
    assert (loop.batch_waits_s[0] == 0).all()


class Polled(Real):
    """Every second batch is there already; notes which threads took them."""

    def __init__(self, fails=False):
        super().__init__(0.001)
        self.fails, self.polled, self.waited = fails, [], []

    def poll(self):
        if self.fails:
            raise BenchError("file 9 cannot be read")
        if self.given % 2:
            return None
        self.polled.append(threading.current_thread())
        self.given += 1
        return BATCH

    def next(self):
        self.waited.append(threading.current_thread())
        return super().next()


def test_what_is_there_is_taken_without_another_thread():
    source = Polled()
    _, [block] = run([source], np.full((1, 6), 0.002))
    assert block.steps == source.given == 6
    assert source.polled == [threading.current_thread()] * 3
    assert len(source.waited) == 3
    assert threading.current_thread() not in source.waited
    with pytest.raises(BenchError, match="file 9"):
        run([Polled(fails=True)], np.full((1, 2), 0.002))
    asked_late = Polled()  # as PyTorch's loader is, when the accelerator is idle
    run([asked_late], np.full((1, 4), 0.002), ahead=False)
    assert asked_late.polled == []


def test_others_are_looked_after_while_nothing_comes():
    def gone():
        raise BenchError("rank 3 is gone")

    with pytest.raises(BenchError, match="rank 3"):
        run([Real(20.0)], np.full((1, 2), 0.001), check=gone)


def test_steps_of_no_time_at_all_are_loops_of_waits():
    [block] = virtually([After(0.001)], np.zeros((1, 50)))
    assert block.duration_s == pytest.approx(0.05)


def test_a_batch_that_fails_ends_the_run_at_once():
    sources = [Real(), Real(fails_at=2)]
    with pytest.raises(BenchError, match="file 7"):
        run(sources, np.full((2, 50), 0.002))
    assert sources[0].closed
    assert sources[0].given < 10


def test_waits_that_are_over_at_once_end():
    """Thousands of waits of a microsecond, each behind a batch that was taken without waiting."""
    inbox, clock, taken = SimpleQueue(), RealClock(), []

    def take():
        clock.take(inbox, 0.001)
        for number in range(20_000):
            inbox.put(number)
            taken.append(clock.take(inbox, 1e-6))
            assert clock.take(inbox, 1e-6) is None

    waiting = threading.Thread(target=take, daemon=True)
    waiting.start()
    waiting.join(60)
    assert taken == [*range(20_000)]


def test_an_engine_that_hangs_is_given_up():
    """At one of its batches: one that is there when this thread runs again is taken, however late that is."""
    with pytest.raises(BenchError, match=r"no batch came for 0\.1 s"):
        run([Real(0.7)], np.full((1, 9), 0.001), deadline_s=0.1)


class StoppedClock(VirtualClock):
    """A clock whose process does not run for 4 s from some moment on: what it waits for comes so late."""

    def __init__(self, at_s):
        super().__init__()
        self.at_s = at_s

    def take(self, inbox, wait_s):
        before_s = self._now_s
        arrival = super().take(inbox, wait_s)
        if before_s <= self.at_s < self._now_s:
            self._now_s += 4.0
            if arrival is not None:
                arrival = arrival._replace(at_s=self._now_s)
            self._coming = [
                (at_s + 4.0, number, one._replace(at_s=at_s + 4.0))
                for at_s, number, one in self._coming
            ]
        return arrival


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("wait_s", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("share", np.linspace(0.05, 0.95, 7))
def test_a_process_that_was_stopped_says_harness_and_never_wait(ahead, wait_s, share):
    """Wherever in a step it is stopped: computing, or waiting for data."""
    times = np.full((2, 12), 0.1)
    [steady, _] = virtually([After(wait_s), After()], times, ahead=ahead)
    at_s = steady.duration_s * (5 + share) / 12
    blocks = run([After(wait_s), After()], times, ahead=ahead, clock=StoppedClock(at_s))[1]
    for block in blocks:
        assert block.harness_s.sum() == pytest.approx(4.0, abs=0.3)
        parts = block.load_s.sum() + block.compute_s.sum() + block.harness_s.sum()
        assert parts <= block.duration_s + 1e-9
    waited = [block.load_s.sum() for block in blocks]
    assert waited[0] <= steady.load_s.sum() + 0.06
    assert waited[1] <= 0.06


class OtherRank:
    """The barrier with a rank that the harness holds up for 4 s in one step."""

    def __init__(self, at_step):
        self.at_step, self.step = at_step, -1

    def meet(self, end_s, undelayed_s):
        self.step += 1
        if self.step == self.at_step:
            return end_s + 4.0, undelayed_s
        return end_s, undelayed_s


def test_waiting_for_a_rank_that_was_stopped_is_the_harness_too():
    other = OtherRank(5)
    clock = VirtualClock()
    [block] = run([After()], np.full((1, 10), 0.1), clock=clock, meet=other.meet)[1]
    assert block.harness_s.sum() == pytest.approx(4.0)
    assert block.load_s.sum() == 0
    assert block.duration_s == pytest.approx(5.0)


def test_waiting_at_the_barrier_for_another_ranks_data_is_no_harness():
    clock = VirtualClock()

    def meet(end_s, undelayed_s):
        clock._now_s = end_s + 4.0  # its data came so late: the barrier is where this one waits
        return end_s + 4.0, undelayed_s + 4.0

    [block] = run([After(), After()], np.full((2, 3), 0.1), clock=clock, meet=meet)[1][:1]
    assert block.harness_s.sum() == 0
    assert block.load_s.sum() == 0
    assert block.duration_s == pytest.approx(3 * 4.1 + 4.0, abs=4.1)


def test_bytes_and_waits_are_counted():
    loop, _ = run([Real(), Real()], np.full((2, 5), 0.001))
    assert loop.nbytes == 100
    assert [len(waits) for waits in loop.batch_waits_s] == [5, 5]


@pytest.mark.parametrize(
    ("threads", "prefetch", "batches"), [(4, 2, 4), (1, 2, 2), (0, 2, 2), (2, 5, 6), (4, 0, 8)]
)
def test_batches_ahead_are_pytorchs(threads, prefetch, batches):
    assert batches_ahead(threads, prefetch) == batches


# accelerators, batch, step s, bandwidth as a share of what the steps need
TABLE = [
    (accelerators, batch, step_s, share)
    for accelerators, batch in ((1, 4), (1, 12), (2, 3), (8, 7), (64, 2))
    for step_s, share in ((0.323, 0.35), (0.03, 0.6), (0.0005, 0.85), (0.224, 2.0))
]


@pytest.mark.parametrize(("accelerators", "batch", "step_s", "share"), TABLE)
def test_au_is_what_the_bandwidth_allows(accelerators, batch, step_s, share):
    """A step needs accelerators x batch x size bytes; AU is bandwidth x step / bytes, at most 1.

    The first batch of the k-th accelerator is there k-th of the way through those of all: it waits for the
    last one at the first barrier, which DLIO's formula counts. In real time: test_truth.py.
    """
    size, steps, ahead = 100_000, 200, 4
    bandwidth = share * accelerators * batch * size / step_s
    model = Simulation(name="table", bandwidth_bytes_per_s=bandwidth).model()
    clock = VirtualClock()

    def source():
        return ModelSource(model, clock, batches=steps, ahead=ahead, files=batch, file_bytes=size,
                           delivered=Delivered(batch, batch * size))  # fmt: skip

    blocks = StepLoop(clock=clock).run(
        [source] * accelerators, np.full((accelerators, steps), step_s), 1
    )
    figures = phase_figures(blocks, batch, StepWindow(), "mlcommons")
    assert figures.au_mean_percent == pytest.approx(100 * min(1, share), rel=0.01)
    transfer_s, rest = step_s / share, steps - 1
    by_hand = [
        rest * step_s / (rest * max(step_s, transfer_s) + transfer_s * (1 - k / accelerators))
        for k in range(1, accelerators + 1)
    ]
    assert figures.au_mean_percent == pytest.approx(100 * np.mean(by_hand), rel=1e-4)
    throughput = accelerators * batch / step_s * min(1, share)
    assert figures.throughput_mean == pytest.approx(throughput, rel=0.01)

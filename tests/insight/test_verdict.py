"""The verdict: causes add up to the stall, whatever the figures; each known cause is found."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.insight.steps import Run

from headrace.base.causes import Cause
from headrace.control.stalls import Evidence, verdict_line, verdict_of
from headrace.control.stalls.verdict import causes_by_step
from headrace.plane.batch_trace import PHASES, STEP

QUIET = {"quiet_reads": 2, "quiet_s": 2 * 0.005}


def run_of(phases, evidence=None, steps=20, **more):
    run = Run()
    for _ in range(steps):
        run.add(phases, **more)
    return verdict_of(run.steps(), evidence)


def test_every_cause_has_a_plain_sentence():
    assert all(cause.sentence.endswith(".") for cause in Cause)
    assert not [cause for cause in Cause if cause.remedy.endswith(".")]  # it ends lines of ours
    assert [cause.value for cause in Cause] == [
        "start", "prefetch", "policy", "window", "direct", "node", "metadata", "storage", "latency",
        "bandwidth", "network", "peer", "memory", "decode", "python", "collate", "transfer",
        "slow_rank", "other",
    ]  # fmt: skip


BUSY_LOCK = Evidence(interpreter_looks=100, interpreter_contended=95)
SET_LOW = Evidence(reads_allowed=1, reads_set=True, reads_possible=256)
SLOW = {**QUIET, "read_s": 8 * 0.006}
FULL = {**QUIET, "read_s": 8 * 0.06}


@pytest.mark.parametrize(
    ("cause", "phases", "evidence", "more"),
    [
        (Cause.METADATA, {"open": 0.08, "read": 0.01}, None, SLOW),
        (Cause.LATENCY, {"read": 0.09}, None, SLOW),
        # Who opens and reads files by himself: nobody knows which of the two was slow.
        (Cause.STORAGE, {"read": 0.09}, None, {"reads": 0, "read_s": 0.09}),
        (Cause.BANDWIDTH, {"read": 0.09}, None, FULL),
        (Cause.BANDWIDTH, {"read": 0.09}, Evidence(more_reads_in_vain=True), SLOW),
        (Cause.BANDWIDTH, {"read": 0.09}, Evidence(peak_bytes_per_s=10.5e6), SLOW),
        (Cause.NETWORK, {"read": 0.09}, Evidence(source="network"), SLOW),
        (Cause.PEER, {"read": 0.09}, Evidence(source="peer"), SLOW),
        (Cause.PEER, {"read": 0.09}, None, {**SLOW, "nbytes": {"peer": 90, "source": 10}}),
        (Cause.DECODE, {"queue": 0.05, "decode": 0.04}, None, {"work_s": 0.3, "cpu_s": 0.3}),
        (Cause.PYTHON, {"queue": 0.05, "decode": 0.04}, BUSY_LOCK, {"work_s": 0.2, "cpu_s": 0.002}),
        (Cause.PYTHON, {"hand": 0.09}, BUSY_LOCK, {}),
        (Cause.COLLATE, {"collate": 0.09}, None, {}),
        (Cause.TRANSFER, {"transfer": 0.09}, None, {}),
        (Cause.PREFETCH, {"read": 0.09}, SET_LOW, {**SLOW, "read_s": 0.09}),
        (Cause.PREFETCH, {"read": 0.09}, None, {**SLOW, "room_s": 0.4}),
        (Cause.PREFETCH, {"hold": 0.09}, None, {**SLOW, "room_s": 0.09}),
        (Cause.POLICY, {"hold": 0.09}, None, {**SLOW, "held_s": 0.09}),
        (Cause.POLICY, {"read": 0.09}, None, {**SLOW, "held_s": 0.4}),
    ],
)  # fmt: skip
def test_a_known_cause_is_found(cause, phases, evidence, more):
    found = run_of(phases, evidence, **more)
    assert found.main is cause, str(found)
    assert found.share(cause) > 0.8
    assert math.isclose(sum(found.causes.values()), found.stall_s)
    assert found.action
    assert 0.0 < found.gain_s <= found.stall_s
    assert found.gain_from
    assert found.evidence
    assert cause.value in str(found)


@pytest.mark.parametrize(
    ("cause", "phases", "figures"),
    [
        (Cause.METADATA, {"open": 0.08, "read": 0.01}, SLOW),
        (Cause.LATENCY, {"read": 0.09}, SLOW),
        (Cause.STORAGE, {"read": 0.09}, {"reads": 0}),
        (Cause.BANDWIDTH, {"read": 0.09}, FULL),
        (Cause.NETWORK, {"read": 0.09}, SLOW),
    ],
)
def test_who_has_staged_is_not_told_to(cause, phases, figures):
    source = "network" if cause is Cause.NETWORK else ""
    seen = Evidence(file_system="headrace://job", source=source)
    found = run_of(phases, seen, **figures)
    assert found.main is cause
    assert "staged already" in found.action
    assert "--stage" not in found.action


def test_each_step_has_its_causes_and_they_add_up_to_the_verdict():
    run = Run()
    for at in range(40):
        run.add({"read": 0.03} if at % 2 else {"collate": 0.01}, **SLOW)
    steps = run.steps()
    steps["delivered_s"][3] = np.nan
    found, verdict = causes_by_step(steps), verdict_of(steps)
    assert found.shape == (40, len(Cause))
    at = list(Cause).index(Cause.COLLATE)
    assert np.all(found[::2, at] > 0.009)
    assert np.all(found[1::2, at] < 1e-9)
    assert not found[3].any()
    sums = dict(zip(Cause, found.sum(axis=0), strict=True))
    assert {cause: seconds for cause, seconds in sums.items() if seconds} == pytest.approx(
        dict(verdict.causes)
    )


def test_a_few_looks_in_a_short_time_blame_nobody():
    few = Evidence(interpreter_looks=5, interpreter_contended=4)
    short = run_of({"hand": 0.09}, few, steps=4)
    assert list(short.causes) == [Cause.OTHER]
    assert (short.main, short.action) == (None, "")  # too few to say what it was
    enough = Evidence(interpreter_looks=50, interpreter_contended=40)
    assert list(run_of({"hand": 0.09}, enough, steps=4).causes) == [Cause.PYTHON]
    # In seconds, looks are few because the lock was not to be had.
    assert run_of({"hand": 0.09}, few, steps=40).main is Cause.PYTHON


def test_what_is_not_explained_promises_nothing():
    found = run_of({"hand": 0.09}, Evidence(interpreter_looks=100, interpreter_contended=0))
    assert found.main is Cause.OTHER
    assert found.action
    assert found.gain_s == 0.0


@pytest.mark.parametrize(
    ("others_s", "cpu_s", "share"),
    [(0.0, 0.09, 0.0), (0.09, 0.0, 1.0), (0.06, 0.03, 2 / 3), (0.0, 0.0, 1.0)],
    ids=["decoding", "others", "both", "nobody was seen"],
)
def test_a_batch_that_cannot_be_handed_over_waits_for_whoever_has_the_lock(others_s, cpu_s, share):
    lock = {"looks": 5, "contended": 5, "others_s": others_s}
    found = run_of({"hand": 0.09}, work_s=0.18, cpu_s=cpu_s, **lock)
    assert found.share(Cause.PYTHON) == pytest.approx(share, abs=0.01)
    assert found.share(Cause.DECODE) == pytest.approx(1.0 - share, abs=0.01)


@pytest.mark.parametrize(
    ("more", "processes"),
    [
        ({"cpu_s": 0.09}, True),
        ({"cpu_s": 0.17}, False),  # native code: both threads compute
        ({"cpu_s": 0.09, "contended": 0}, False),  # whatever they wait for, it is not the lock
        ({"cpu_s": 0.09, "serial": True}, False),
    ],
)
def test_threads_that_take_turns_are_told_to_be_processes(more, processes):
    seen = Evidence(decode_threads=2, cpus=8, cpu_share=0.25)
    row = {"looks": 5, "contended": 5, "work_s": 0.18, **more}
    found = run_of({"decode": 0.09}, seen, **row)
    assert found.main is Cause.DECODE
    assert ("decode in 7 worker processes (num_workers=7)" in found.action) is processes
    assert ("one another's Python code 50% of that time" in str(found)) is processes
    if processes:  # seven at a time instead of one
        assert found.gain_s == pytest.approx(found.stall_s * 6 / 7, rel=0.01)


@pytest.mark.parametrize(
    ("native", "cpu_s", "advice", "gain"),
    [
        (False, 0.18, "decode=headrace.Images(...)", 0.5),
        (True, 0.18, 'keep="decoded" of headrace.Images', 0.5),  # it does what the other is told
        (False, 0.018, "10% of its time (unless it sleeps", 0.9),
        (True, 0.018, "decoding had one for 10%", 0.9),
    ],
)
def test_decoding_is_told_what_it_does_not_do_already(native, cpu_s, advice, gain):
    seen = Evidence(decode_threads=2, cpus=2, cpu_share=1.0, native_decode=native)
    verdict = run_of({"decode": 0.09}, seen, work_s=0.18, cpu_s=cpu_s)
    assert verdict.main is Cause.DECODE
    assert advice in verdict.action
    assert ("unless" in verdict.action) is (not native and gain > 0.5)
    cheaper = "decode less" if native else "make decoding and transforms cheaper"
    # The first thing to do is the one whose gain is told: what other programs take comes first.
    assert verdict.action.startswith(cheaper if gain == 0.5 else "stop what else runs here")
    assert cheaper in verdict.action
    assert verdict.evidence[0].endswith(f"({1e3 * cpu_s / 8:.3g} ms a sample)")
    assert verdict.evidence[0].startswith("decoding" if native else "your data set's __getitem__")
    assert verdict.gain_s == pytest.approx(gain * verdict.stall_s, rel=0.01)


@pytest.mark.parametrize(
    ("workers", "cpus", "busy", "advice", "gain"),
    [
        (1, 2, 0.53, "decode in 2 threads or workers (num_workers=2) instead of 1", 0.48),
        (1, 2, 0.95, "make decoding and transforms cheaper", 0.5),  # another one would find no room
        (2, 8, 0.3, "(num_workers=7)", 5 / 7),
    ],
)
def test_a_worker_more_is_advised_where_it_finds_room(workers, cpus, busy, advice, gain):
    seen = Evidence(decode_threads=workers, cpus=cpus, cpu_share=busy)
    verdict = run_of({"decode": 0.09}, seen, work_s=0.18, cpu_s=0.18)
    assert advice in verdict.action
    assert verdict.gain_s == pytest.approx(gain * verdict.stall_s, rel=0.02)


@pytest.mark.parametrize(
    ("workers", "action", "gain"), [
        (1, "let 12 workers wait at a time instead of 1 (num_workers=12", 11 / 12),
        (4, "let 16 workers wait at a time instead of 4 (num_workers=16", 3 / 4),
        (16, "If it is the storage, pack it", 1.0),
    ],
)  # fmt: skip
def test_what_a_data_set_waits_for_itself_more_workers_wait_for_together(workers, action, gain):
    verdict = run_of({"read": 0.09}, Evidence(decode_threads=workers), reads=0, read_s=0.09)
    assert verdict.main is Cause.STORAGE
    assert verdict.action.startswith("profile dataset[i]")
    assert action in verdict.action
    assert verdict.gain_s == pytest.approx(gain * verdict.stall_s, rel=0.01)
    assert "Storage was waited for, or a sleep, a lock, a network call" in str(verdict)
    assert "what for was not measured" in verdict.evidence[0]


@pytest.mark.parametrize(("cpus", "warns"), [(0, False), (2, True), (12, False)])
def test_what_waits_for_no_storage_is_the_data_sets_own_code(cpus, warns):
    seen = Evidence(decode_threads=1, cpus=cpus, without_storage="samples opened and read no files")
    verdict = run_of({"read": 0.09}, seen, reads=0, read_s=0.09)
    assert verdict.main is Cause.DECODE
    assert verdict.share(Cause.DECODE) == pytest.approx(1.0)
    assert "it slept, locked or waited for something" in verdict.evidence[0]
    assert verdict.action.startswith("profile dataset[i]")
    assert "let 12 workers wait" in verdict.action
    assert ("torch warns above the number of cores" in verdict.action) is warns
    assert "storage" not in verdict.action
    assert "pack" not in verdict.action


def test_nothing_is_said_to_be_gained_from_what_nobody_measured():
    text = str(run_of({"hand": 0.09}, Evidence(interpreter_looks=100)))
    assert "gain      not known: " in text


@pytest.mark.parametrize(
    ("busy", "advice"), [(0.97, "stop what else runs here"), (0.4, "use larger batches")]
)
def test_of_batches_that_were_ready_it_is_said_that_they_were(busy, advice):
    found = run_of({"hand": 0.09}, Evidence(interpreter_looks=100, cpu_share=busy))
    assert found.main is Cause.OTHER
    assert advice in found.action
    assert "batches were ready, and were handed over" in found.evidence[0]
    assert "no phase that is measured" not in found.evidence[0]


@pytest.mark.parametrize("busy", [0.97, 0.4])
@pytest.mark.parametrize("more", [{}, {"reads_allowed": 2, "reads_possible": 64}])
def test_where_processors_are_busy_a_slow_answer_may_have_waited_for_one(busy, more):
    found = run_of({"read": 0.09}, Evidence(cpu_share=busy, **more), **SLOW)
    assert found.main is Cause.LATENCY
    assert ("go on training" in found.action) is bool(more)
    assert ("waits for a processor, too" in found.action) is (busy > 0.9)
    assert ("processors were 97% busy" in found.evidence[0]) is (busy > 0.9)


@pytest.mark.parametrize("busy", [0.97, 0.4])
def test_where_processors_are_busy_samples_that_stood_still_may_have_waited_for_one(busy):
    found = run_of({"read": 0.09}, Evidence(cpu_share=busy), reads=0, read_s=0.09)
    assert found.main is Cause.STORAGE
    assert ("processors were 97% busy" in found.evidence[0]) is (busy > 0.9)


@pytest.mark.parametrize(
    ("near", "busy", "cause"),
    [
        (1.0, 0.4, Cause.MEMORY),
        (0.97, 0.97, Cause.MEMORY),
        (0.97, 0.4, Cause.LATENCY),
        (0.5, 0.97, Cause.LATENCY),
    ],
)
def test_bytes_of_the_page_cache_that_come_late_wait_for_processors_and_no_storage(
    near, busy, cause
):
    nbytes = {"page_cache": int(1e6 * near), "source": int(1e6 * (1.0 - near))}
    found = run_of({"read": 0.09}, Evidence(cpu_share=busy), **SLOW, nbytes=nbytes)
    assert found.main is cause, str(found)
    if cause is Cause.MEMORY:
        assert f"processors were {busy:.0%} busy" in found.evidence[0]
        assert ("waits for a processor" in found.action) is (busy > 0.9)


def test_steps_that_read_nothing_wait_for_no_storage_though_others_do():
    run = Run()
    for at in range(40):
        run.add({"read": 0.03}, **SLOW, nbytes={"page_cache" if at % 2 else "source": 1000})
    found = verdict_of(run.steps())
    assert found.share(Cause.MEMORY) == found.share(Cause.LATENCY) == pytest.approx(0.5)


@pytest.mark.parametrize("phase", ["read", "decode"])
@pytest.mark.parametrize(("others_s", "cause"), [(0.09, Cause.PYTHON), (0.0, None)])
def test_who_makes_batches_in_the_training_process_waits_for_its_lock(phase, others_s, cause):
    row = {"looks": 5, "contended": 5, "others_s": others_s, "cpu_s": 0.002, "work_s": 0.09}
    row |= {"reads": 0, "read_s": 0.09 * (phase == "read"), "serial": True}
    seen = Evidence(in_process=True, decode_threads=1)
    otherwise = Cause.STORAGE if phase == "read" else Cause.DECODE
    found = run_of({phase: 0.09}, seen, **row)
    assert found.main is (cause or otherwise), str(found)
    assert found.share(found.main) > 0.8
    assert "one another's" not in str(found)
    # A worker process has a lock of its own.
    assert run_of({phase: 0.09}, replace(seen, in_process=False), **row).main is otherwise


def test_processes_that_decode_do_not_have_this_ones_lock():
    lock = {"looks": 5, "contended": 5, "others_s": 0.01}
    found = run_of({"hand": 0.09}, serial=True, work_s=0.18, cpu_s=0.18, **lock)
    assert found.share(Cause.PYTHON) == pytest.approx(1.0, abs=0.01)


def test_a_mixture_is_divided():
    run = Run()
    for at in range(40):
        run.add({"read": 0.03} if at % 2 else {"collate": 0.01}, **SLOW)
    found = verdict_of(run.steps())
    assert found.main is Cause.LATENCY
    assert found.share(Cause.COLLATE) == pytest.approx(0.25, abs=0.01)


def test_a_storage_that_became_slower_is_not_full():
    """Nothing met it idle since: but it has given more, and so could be asked for more."""
    run = Run()
    for at in range(60):
        run.add(
            {"read": 0.004 if at < 30 else 0.1},
            read_s=8 * (0.001 if at < 30 else 0.05),
            depth=8 * 16,
            quiet_reads=4 if at < 30 else 0,
            quiet_s=4 * 0.001 if at < 30 else 0.0,
        )
    found = verdict_of(run.steps())
    assert found.share(Cause.LATENCY) > 0.8


def test_a_full_storage_whose_batches_come_in_bursts_is_full():
    """What comes late holds up what is there already: it is not by the deliveries that it is judged."""
    run = Run()
    for at in range(40):
        run.add(
            {"read": 0.3 if at % 10 == 9 else 0.0002},
            read_s=8 * (0.005 if at == 0 else 0.05),
            depth=8 * (2 if at == 0 else 20),
            quiet_reads=8 if at == 0 else 0,
            quiet_s=8 * 0.005 if at == 0 else 0.0,
        )
    found = verdict_of(run.steps())
    assert found.main is Cause.BANDWIDTH
    assert found.share(Cause.BANDWIDTH) > 0.8


def test_making_that_hides_behind_late_bytes_is_no_cause():
    """With endlessly fast threads the bytes would still come no sooner."""
    late = run_of({"read": 0.05, "decode": 0.02, "collate": 0.01}, **SLOW)
    assert late.share(Cause.LATENCY) == pytest.approx(1.0)
    alone = run_of({"read": 0.05, "decode": 0.02, "collate": 0.01}, serial=True, **SLOW)
    assert alone.share(Cause.DECODE) == pytest.approx(0.25)


def test_one_thread_after_the_other_is_no_interpreter_trouble():
    """Decoding in Python holds the lock itself: nobody else is to blame."""
    found = run_of({"queue": 0.05, "decode": 0.04}, BUSY_LOCK, work_s=0.2, cpu_s=0.1)
    assert found.main is Cause.DECODE
    assert found.share(Cause.DECODE) > 0.9


def test_a_rank_that_had_its_data_waited_for_the_slow_one():
    fast, slow = Run(), Run()
    for _ in range(20):
        fast.add({"hand": 0.001}, worked_s=0.01 + 0.04)  # the barrier is in its step
        slow.add({"read": 0.041}, worked_s=0.01)
    found = verdict_of(fast.steps(), None, [slow.steps()])
    assert found.main is Cause.SLOW_RANK
    assert found.causes[Cause.SLOW_RANK] == pytest.approx(19 * 0.04, rel=0.01)
    assert found.stall_s == pytest.approx(20 * 0.001 + 19 * 0.04, rel=0.01)
    assert verdict_of(slow.steps(), None, [fast.steps()]).main is Cause.LATENCY
    assert "look at the verdict of rank 0 of those given" in found.action
    named = verdict_of(fast.steps(), None, {7: fast.steps(), 5: slow.steps()})
    assert "look at the verdict of rank 5:" in named.action
    assert any("(rank 5)" in each for each in named.evidence)


def test_ranks_that_do_not_wait_for_each_other_are_not_blamed():
    fast, slow = Run(), Run()
    for _ in range(20):
        fast.add({"hand": 0.001}, worked_s=0.01)
        slow.add({"read": 0.041}, worked_s=0.01)
    found = verdict_of(fast.steps(), None, [slow.steps()])
    assert Cause.SLOW_RANK not in found.causes


def test_no_steps_and_no_stall_need_nothing():
    nothing = verdict_of(np.empty(0, STEP))
    assert (nothing.main, nothing.stall_s, nothing.action) == (None, 0.0, "")
    assert str(nothing).endswith("waited for: 0 steps, at least 5 are needed")
    quick = run_of({"hand": 1e-6})
    assert quick.action == ""
    assert "nothing" in str(quick)
    assert verdict_line(quick) == "stall 0.0 %"


@pytest.mark.parametrize(("waited_s", "own"), [(0.001, True), (0.0001, True), (0.01, False)])
def test_where_little_is_waited_the_own_step_comes_first(waited_s, own):
    found = run_of({"read": waited_s}, **SLOW)
    assert ("your own step took" in str(found).splitlines()[1]) is own
    assert found.action.startswith("most of the time is your own step's. ") is (waited_s == 0.001)
    beside = run_of({"read": waited_s}, evidence=Evidence(cpu_share=0.97, decode_threads=2), **SLOW)
    assert ("OMP_NUM_THREADS=1" in beside.action) is (waited_s == 0.001)


def test_collating_has_a_figure():
    assert run_of({"collate": 0.09}).evidence == ("collating took 90 ms of each batch's wait",)


def test_a_line_names_the_causes():
    run = Run()
    for at in range(40):
        run.add({"read": 0.03} if at % 2 else {"collate": 0.01}, **SLOW)
    line = verdict_line(verdict_of(run.steps()))
    assert line == "stall 67.2 % (slow answers of the storage 75%, collating 25%)"


def test_what_is_not_real_is_said():
    found = run_of({"read": 0.09}, Evidence(simulation="simulated lustre"), **SLOW)
    assert "[simulated lustre]" in str(found)
    assert found.as_dict()["simulation"] == "simulated lustre"


def test_few_steps_and_missing_figures_are_less_sure():
    many = run_of({"read": 0.09}, **{**SLOW, "quiet_reads": 8, "quiet_s": 8 * 0.005})
    assert run_of({"read": 0.09}, steps=3, **SLOW).confidence < many.confidence
    unknown = run_of({"read": 0.09}, reads=0, read_s=0.0)
    assert unknown.confidence <= 0.5 < many.confidence


# -- bad figures -----------------------------------------------------------------------------------


def test_counters_that_go_backwards_or_are_missing_invent_nothing():
    run = Run()
    run.add({"read": 0.09}, **SLOW)
    steps = run.steps()
    good = steps.copy()
    steps["delivered_s"] -= 5.0  # a clock that jumped
    assert verdict_of(steps).stall_s == 0.0
    assert verdict_of(steps).dropped == 1
    bad = np.concatenate([good, steps])
    assert verdict_of(bad).stall_s == pytest.approx(0.09)
    lean = np.empty(1, [("asked_s", "<f8"), ("delivered_s", "<f8")])
    lean["asked_s"], lean["delivered_s"] = 1.0, 2.0
    assert verdict_of(lean).causes == {Cause.OTHER: 1.0}
    assert verdict_of(lean).confidence == 0.0


def test_evidence_that_cannot_be_counts_as_not_known():
    wild = Evidence(
        source="moon",
        reads_allowed=-3,
        idle_latency_s=math.nan,
        peak_bytes_per_s=math.inf,
        interpreter_looks=3,
        interpreter_contended=90,
        cpu_share=-1.0,
        io_pressure=math.inf,
    )
    sane = wild.sane()
    assert (sane.source, sane.reads_allowed, sane.contended) == ("local", 0, 0.0)
    assert sane.peak_bytes_per_s == sane.idle_latency_s == 0.0
    assert math.isnan(sane.cpu_share)
    assert math.isnan(sane.io_pressure)
    assert run_of({"read": 0.09}, wild, **SLOW).main is Cause.LATENCY


def test_evidence_of_a_file_may_have_any_types():
    wild = Evidence(
        source=3, file_system="x" * 999, reads_allowed="7", reads_set=1, interpreter_looks=None,
        interpreter_contended=True, simulation=[], buffer_bytes=10**400,
    )  # fmt: skip
    assert wild.sane() == replace(Evidence(), file_system="x" * 400, cpu_share=ANY, io_pressure=ANY)


amounts = st.one_of(
    st.floats(0.0, 100.0), st.sampled_from([-1.0, math.nan, math.inf, -math.inf, 1e300])
)
evidences = st.builds(
    Evidence,
    source=st.sampled_from(["local", "network", "peer"]),
    reads_allowed=st.integers(-5, 1000),
    reads_set=st.booleans(),
    idle_latency_s=amounts,
    peak_bytes_per_s=amounts,
    limit_bytes_per_s=amounts,
    more_reads_in_vain=st.booleans(),
    interpreter_looks=st.integers(-5, 100),
    interpreter_contended=st.integers(-5, 100),
    decode_threads=st.integers(0, 64),
    cpus=st.integers(0, 64),
    cpu_share=amounts,
    io_pressure=amounts,
)


MAD = np.array([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300, 2.0**63])


def mad_steps(seed):
    """Steps of random bytes, of mad numbers, or of both."""
    rng = np.random.default_rng(seed)
    steps = np.frombuffer(rng.bytes(int(rng.integers(0, 7)) * STEP.itemsize), STEP).copy()
    for name in STEP.names:
        if STEP[name].base.kind == "f" and rng.random() < 0.7:
            with np.errstate(over="ignore"):
                steps[name] = rng.choice(MAD, steps[name].shape)
    return steps


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), evidence=evidences)
def test_any_bytes_give_causes_that_add_up(seed, evidence):
    """Wrapped, missing and mad figures: no negative and no invented second."""
    steps = mad_steps(seed)
    found = verdict_of(steps, evidence, [steps])
    assert math.isfinite(found.stall_s)
    assert all(seconds > 0.0 for seconds in found.causes.values())
    assert math.isclose(sum(found.causes.values()), found.stall_s, abs_tol=1e-9)
    assert 0.0 <= found.confidence <= 1.0
    assert 0.0 <= found.gain_s <= found.stall_s
    with np.errstate(all="ignore"):
        waited = steps["delivered_s"] - steps["asked_s"]
    most = float(waited[(waited >= 0.0) & (waited < 1e6)].sum()) if len(steps) else 0.0
    others = found.causes.get(Cause.SLOW_RANK, 0.0)
    assert found.stall_s - others <= most * (1 + 1e-6) + 1e-6
    str(found)


@settings(max_examples=60, deadline=None)
@given(
    phases=st.lists(
        st.dictionaries(st.sampled_from(PHASES), st.floats(0.0, 2.0), max_size=8), max_size=12
    ),
    serial=st.booleans(),
)
def test_the_whole_wait_is_accounted_for(phases, serial):
    run = Run()
    for each in phases:
        run.add(each, serial=serial, **SLOW)
    total = sum(sum(each.values()) for each in phases)
    found = verdict_of(run.steps())
    assert found.stall_s == pytest.approx(total, rel=1e-5, abs=1e-6)


def paused(long, steps=40, worked_s=0.02, wait_s=0.01):
    run = Run(worked_s=worked_s)
    for at in range(steps):
        run.add({"decode": wait_s}, worked_s=long.get(at), work_s=wait_s, cpu_s=wait_s)
    return verdict_of(run.steps())


def test_a_loop_that_stands_by_itself_is_told_so_and_not_to_decode_faster():
    found = paused({9: 3.02, 19: 5.02})
    line = "your own loop took 8 s longer than usual in 2 steps, the longest 5.0 s after step 19 of epoch 0"
    assert found.pauses.startswith(line)
    assert str(found).splitlines()[1].strip() == found.pauses
    assert found.action.startswith("look at what your own loop does after step 19 of epoch 0")
    assert (found.gain_s, found.gain_from.split(",")[0]) == (0.0, "up to 8 s")
    once = paused({9: 3.02})
    assert once.pauses.startswith(
        "your own loop took 3 s longer than usual after step 9 of epoch 0"
    )


def test_workers_that_start_anew_in_each_epoch_are_to_be_kept():
    run = Run(worked_s=0.02)
    for at in range(40):
        run.add({"decode": 0.01} if at % 20 else {"start": 2.0 + at})
    found = verdict_of(run.steps())
    assert found.main is Cause.START
    assert "persistent_workers=True" in found.action
    assert found.gain_s == pytest.approx(22.0)  # the first start remains
    assert not found.pauses


def test_pauses_smaller_than_the_stall_are_told_and_what_to_do_is_about_the_data():
    found = paused({9: 0.82}, wait_s=0.1)
    assert found.pauses
    assert found.action.startswith("make decoding")


@pytest.mark.parametrize(
    "long", [{}, {at: 0.021 + at / 1e4 for at in range(40)}, {5: 0.15}, {39: 60.0}],
    ids=["even", "nearly even", "short", "after the last"],
)  # fmt: skip
def test_steps_as_they_come_are_no_pauses(long):
    assert not paused(long).pauses


def test_few_steps_and_slow_models_are_no_pauses():
    assert not paused({3: 9.0}, steps=8).pauses
    assert not paused(dict.fromkeys(range(0, 40, 2), 6.0), worked_s=5.0).pauses
    assert not paused(
        dict.fromkeys(range(0, 40, 4), 1.0)
    ).pauses  # each fourth batch steps the optimiser
    assert not paused({9: 1e300}).pauses  # a clock that jumped

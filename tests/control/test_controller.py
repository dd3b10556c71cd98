"""The controller on real loaders: it turns knobs, tells the story, survives forks, and ends."""

import gc
import logging
import os
import threading
import time

import pytest

import headrace as hr
from control.plant import PRESETS, Consumer, Plant
from headrace.control import controller
from headrace.control.controller import Plane
from headrace.control.explain import _stage, _stage_lines, _verdict_line, verdict
from headrace.control.history import Knobs, PlaneHistory, PlaneInterval, PlaneWindow
from headrace.control.knob_limits import Bounds, Limits
from headrace.plane.stage import ConsumerStats, StageStats, latency_bucket, latency_percentile_s
from tests_shared import until


class PlantStage:
    """A plant as a stage and its consumer; simulated time passes when it is told to."""

    name = "prefetch"

    def __init__(self, plant):
        self.plant = plant
        self.sum = {"waited_s": 0.0, "worked_s": 0.0, "batches": 0, "samples": 0, "bytes": 0}
        self.reads, self.counts, self.last = 0, [0] * 64, None

    def advance(self, seconds):
        self.last = each = self.plant.advance(seconds)
        for name in self.sum:
            self.sum[name] += getattr(each, name)
        self.reads += each.reads
        self.counts = [a + b for a, b in zip(self.counts, each.latency_us, strict=True)]

    def stats(self):
        last = self.last or PlaneInterval(seconds=0.1)
        return StageStats(
            name=self.name, reads=self.reads, latency_us=tuple(self.counts), in_flight=last.in_flight,
            buffered_bytes=last.buffered_bytes, ready_bytes=last.ready_bytes,
            bytes_by_tier={"source": self.sum["bytes"]}, simulation="simulated nfs",
        )  # fmt: skip

    def consumer(self):
        return ConsumerStats(**self.sum)

    def knobs(self):
        knobs = self.plant.knobs
        return {"reads_in_flight": knobs.reads_in_flight, "buffer_bytes": knobs.buffer_bytes}

    def turn(self, knobs):
        self.plant.turn(self.plant.knobs.turned(knobs))


@pytest.fixture
def stage():
    return PlantStage(Plant(PRESETS["nfs"], Consumer(samples_per_s=1000), Knobs(64, 64 << 20)))


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    simulated = Clock()
    monkeypatch.setattr("headrace.control.controller.time", simulated)
    return simulated


def watched(stage, limits, **options):
    return Plane("plant", [stage], stage.consumer, lambda _: limits, (), **options)


def run(plane, stage, clock, seconds):
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        stage.advance(0.1)
        plane.step()


def test_a_plane_is_tuned_and_tells_its_story(stage, clock, caplog):
    plane = watched(stage, Limits())
    with caplog.at_level(logging.INFO, "headrace.control"):
        run(plane, stage, clock, 5)
    assert stage.plant.knobs.reads_in_flight < 16
    changes = [each for each in plane.changes if each.action == "lower"]
    assert changes
    assert all(each.reason and each.evidence for each in changes)
    assert len(caplog.records) == len(plane.changes)


def test_a_plane_that_is_only_watched_is_left_alone(stage, clock):
    plane = watched(stage, Limits(), enabled=False)
    run(plane, stage, clock, 3)
    assert stage.plant.knobs == Knobs(64, 64 << 20)
    assert not plane.changes
    assert plane.window().rate > 900


def test_limits_that_shrink_are_obeyed_at_the_next_look(stage, clock):
    limits = [Limits()]
    plane = Plane("plant", [stage], stage.consumer, lambda _: limits[0], ())
    run(plane, stage, clock, 0.2)
    limits[0] = Limits(buffer_bytes=Bounds(1 << 20, 4 << 20))
    plane.refresh_limits(1)
    run(plane, stage, clock, 0.1)
    assert stage.plant.knobs.buffer_bytes <= 4 << 20


def test_a_plane_at_which_nothing_moves_is_idle_until_something_does(stage, clock):
    plane = watched(stage, Limits())
    run(plane, stage, clock, 3)
    assert not plane.idle
    for _ in range(30):  # the consumer validates: it works, and asks for nothing
        clock.now += 0.1
        stage.sum["worked_s"] += 0.1
        plane.step()
    assert plane.idle
    run(plane, stage, clock, 0.2)
    assert not plane.idle


def test_a_plane_whose_stage_is_gone_is_gone(clock):
    stage = PlantStage(Plant(PRESETS["nfs"], Consumer(samples_per_s=1000), Knobs(64, 64 << 20)))
    plane = watched(stage, Limits())
    assert not plane.gone
    del stage
    gc.collect()
    assert plane.gone


@pytest.fixture
def store(tmp_path):
    hr.pack(((f"{i:04d}", bytes([i % 256]) * 3000, 0) for i in range(600)), tmp_path / "s.hr")
    with hr.open(tmp_path / "s.hr") as opened:
        yield opened


def alive():
    return [each for each in threading.enumerate() if each.name == "headrace-control"]


def told():
    return hr.explain().as_dict()["planes"]


def test_one_thread_watches_all_loaders_and_ends_with_them(store):
    loaders = [hr.loader(store, 32) for _ in range(3)]
    assert all(len(list(loader)) == 19 for loader in loaders)
    # One of a test before, which has nothing left to do, may just be ending.
    until(lambda: len(alive()) == 1)
    text = str(hr.explain())
    assert text.count("loader of") >= 3
    # Of a plane that is gone the last look tells: until it has seen all.
    until(lambda: [p["consumer"]["samples"] for p in told()[-3:]] == [600] * 3)
    del loaders
    gc.collect()
    until(lambda: not alive())
    plane = told()[-1]
    assert plane["ended"] is True
    assert plane["consumer"]["samples"] == 600


def test_explain_tells_knobs_limits_and_tiers(store):
    loader = hr.loader(store, 32, reads_in_flight=7, memory_bytes=32 << 20)
    for _ in loader:
        time.sleep(0.01)
    plane = next(p for p in hr.explain().as_dict()["planes"] if not p["ended"])
    reads, size = plane["knobs"]["reads_in_flight"], plane["knobs"]["buffer_bytes"]
    assert (reads["value"], reads["frozen"], reads["limit_from"]) == (7, True, "set explicitly")
    assert size["limit_from"].startswith("memory_bytes=")
    assert size["high"] <= 32 << 20
    assert "set explicitly: left alone" in str(hr.explain())
    tiers = loader.stats.stages["prefetch"].bytes_by_tier
    assert sum(tiers.values()) >= 600 * 3000
    loader.close()


def test_what_the_node_daemon_does_is_not_told_as_nothing():
    stages = [
        StageStats(name="prefetch"),
        StageStats(name="node", bytes=5000, wait_input_s=2.0),
    ]
    (line,) = _stage_lines([_stage(stage) for stage in stages])
    assert line.startswith("node: the node daemon read 5 kB; waited for it 2.0 s")


@pytest.mark.parametrize("off", ["argument", "environment"])
def test_tuning_can_be_turned_off(store, monkeypatch, off):
    if off == "environment":
        monkeypatch.setenv("HEADRACE_TUNE", "0")
    loader = hr.loader(store, 32, **({"tune": False} if off == "argument" else {}))
    assert len(list(loader)) == 19
    plane = hr.explain().as_dict()["planes"][-1]
    assert plane["tuning"] is False
    assert not plane["changes"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_controller_of_its_own(store):
    loader = hr.loader(store, 32)
    next(iter(loader))
    assert alive()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert hr.explain().as_dict() == {"planes": []}
            assert len(list(loader)) == 19
            code = 0 if len(hr.explain().as_dict()["planes"]) == 1 and alive() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(loader)) == 19


def test_a_stage_that_fails_ends_its_tuning_and_nothing_else(stage, caplog):
    def broken():
        raise OSError("no such thing")

    handle = Plane("broken", [stage], stage.consumer, lambda _: Limits())
    stage.stats = broken
    handle.wake()
    until(lambda: "tuning ends" in caplog.text)
    until(lambda: handle not in controller.planes()[0])


def test_verdicts():
    def over(**given):
        return PlaneWindow.over(
            [PlaneInterval(**({"seconds": 1.0, "batches": 9, "reads": 50} | given))]
        )

    stages = [StageStats(name="prefetch")]
    assert verdict(over(worked_s=1.0), stages) == "consumer-bound"
    assert verdict(over(waited_s=0.5, worked_s=0.5), stages) == "storage-bound"
    assert verdict(over(waited_s=0.5, worked_s=0.5, reads=0), stages) == "memory-bound"
    busy = over(waited_s=0.5, worked_s=0.5, decode_busy_s=2.0, decode_wait_s=0.1)
    assert verdict(busy, stages) == "decode-bound"
    assert verdict(PlaneWindow.over(PlaneHistory().intervals), stages) == "idle"


@pytest.mark.parametrize(
    ("given", "stall", "line"),
    [
        ("storage-bound", 0.1, "; 10.0% of its time it waits for the storage"),
        ("storage-bound", 0.9, "storage-bound: 90.0% of its time the consumer waits for the storage"),
        ("idle", 0.0, "idle: nothing was delivered lately"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_verdict_follows_the_share_that_was_waited(given, stall, line):
    assert _verdict_line(given, stall).endswith(line)


def test_the_latency_histogram_gives_percentiles():
    counts = [0] * 64
    for _ in range(99):
        counts[latency_bucket(0.001)] += 1
    counts[latency_bucket(0.1)] += 1
    assert 0.0007 < latency_percentile_s(counts, 0.5) < 0.0015
    assert 0.07 < latency_percentile_s(counts, 1.0) < 0.15
    assert latency_bucket(0.0) == 0
    assert latency_bucket(1e30) == 63
    assert latency_percentile_s([0] * 64, 0.5) == 0.0

"""`headrace top` on what a daemon said three times, two seconds apart, while three jobs read from it."""

import copy
import json
from pathlib import Path

import pytest
from rich.console import Console

from headrace.cli.top import sparkline, view
from headrace.insight.top import DaemonWatch

HERE = Path(__file__).parent


@pytest.fixture
def recorded():
    return [(at_s, state) for at_s, state in json.loads((HERE / "recorded.json").read_text())]


def watched(recorded):
    watch = DaemonWatch()
    return [watch.look(state, at_s) for at_s, state in recorded][-1]


def shown(board, width):
    console = Console(width=width, force_terminal=False, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(view(board, width))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


@pytest.mark.parametrize("width", [80, 140])
def test_the_screen_is_the_kept_one(recorded, width):
    assert shown(watched(recorded), width) == (HERE / f"top-{width}.txt").read_text()


@pytest.mark.parametrize("width", [40, 80, 109, 110, 200])
def test_it_fits_every_width(recorded, width):
    lines = shown(watched(recorded), width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("headrace top")


def test_rates_shares_and_causes(recorded):
    board = watched(recorded)
    first, last = recorded[0][1], recorded[-1][1]
    job = next(job for job in board["jobs"] if job["name"] == "1201")
    then, now = (next(j for j in s["jobs"] if j["name"] == "1201")["totals"] for s in (first, last))
    assert board["seconds"] == 4.0
    assert job["samples_per_s"] == (now["consumed_samples"] - then["consumed_samples"]) / 4.0
    waited = sum(now["stall_s"].values()) - sum(then["stall_s"].values())
    assert job["stall"] == pytest.approx(waited / (waited + now["worked_s"] - then["worked_s"]))
    assert job["cause"] == "storage"
    assert [j["stall"] for j in board["jobs"]] == sorted(
        (j["stall"] for j in board["jobs"]), reverse=True
    )
    assert "resnet-night-run" in board["answer"]
    assert sum(board["tiers"].values()) > 0


def test_the_first_look_has_no_rates_yet(recorded):
    board = DaemonWatch().look(recorded[0][1], 0.0)
    assert (board["seconds"], board["answer"]) == (0.0, "looking")
    assert all(job["samples_per_s"] == 0.0 for job in board["jobs"])
    shown(board, 80)


def test_another_daemon_is_another_beginning(recorded):
    watch = DaemonWatch()
    watch.look(recorded[0][1], 0.0)
    restarted = {**recorded[1][1], "pid": 1}
    assert watch.look(restarted, 2.0)["seconds"] == 0.0


def test_a_job_that_came_meanwhile_counts_from_its_beginning(recorded):
    before = copy.deepcopy(recorded[0][1])
    before["jobs"] = []
    before["labels"] = {}
    watch = DaemonWatch()
    watch.look(before, 0.0)
    board = watch.look(recorded[-1][1], 4.0)
    now = next(j for j in recorded[-1][1]["jobs"] if j["name"] == "vit")["totals"]
    job = next(job for job in board["jobs"] if job["name"] == "vit")
    assert job["samples_per_s"] == now["consumed_samples"] / 4.0


def test_a_data_set_that_was_opened_again_has_no_negative_figures(recorded):
    after = copy.deepcopy(recorded[-1][1])
    for key in ("delivered_bytes",):
        after["datasets"][0][key] = 1
    after["datasets"][0]["reads"]["latency_us"] = [0] * 10 + [5] + [0] * 53
    after["datasets"][0]["bytes_by_tier"] = {"ram": 0, "source": 1, "page_cache": 0}
    watch = DaemonWatch()
    watch.look(recorded[0][1], 0.0)
    (data,) = watch.look(after, 4.0)["datasets"]
    assert data["bytes_per_s"] == 0.0
    assert set(data["tiers"].values()) == {0.0}
    assert data["latency_s_p50"] > 0


def test_history_is_bounded(recorded):
    watch = DaemonWatch()
    for at in range(500):
        board = watch.look(recorded[at % 2][1], float(at))
    assert max(len(job["rates"]) for job in board["jobs"]) == 60
    assert len(watch._seen) < 10


def test_names_cannot_move_the_cursor(recorded):
    state = copy.deepcopy(recorded[-1][1])
    state["jobs"][0]["name"] = "a\x1b[2Jb\nc"
    assert "\x1b" not in shown(DaemonWatch().look(state, 0.0), 80)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""), ([0.0, 0.0], ""), ([1.0, 0.0, 8.0], "▁ █"), (range(20), "▅▅▅▆▆▇▇██"),
    ],
)  # fmt: skip
def test_sparklines(values, line):
    assert sparkline(tuple(values), 9) == line

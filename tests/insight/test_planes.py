"""What `headrace top --controller` shows of a controller's state."""

from pathlib import Path

import pytest
from rich.console import Console

from headrace.cli.top import FLOWS_SHOWN, view_planes
from headrace.insight.top import PlanesWatch

HERE = Path(__file__).parent


def flow(job, system="scratch", used=1e6, granted=None):
    return {
        "job": job, "file_system": system,
        "used": {"bytes_per_s": used, "reads_per_s": 10.0, "metadata_per_s": 0.0},
        "granted": {"bytes_per_s": granted, "reads_per_s": None, "metadata_per_s": None},
    }  # fmt: skip


def plane(name, stall_s, flows, silent_s=0.1):
    return {
        "name": name, "user": "ada", "pid": 1, "sessions": {"a": 4}, "silent_s": silent_s,
        "lease_left_s": 9.7, "held_bytes": 5e9, "ram_bytes": 8e9, "stall_s": stall_s, "flows": flows,
    }  # fmt: skip


def state(*planes):
    return {
        "epoch": 3, "policy_version": 2, "degraded": "", "report_s": 0.25, "decide_s": 0.0012,
        "planes": list(planes),
    }  # fmt: skip


def two_looks():
    watch = PlanesWatch()
    watch.look(
        state(
            plane("node1", {"storage": 10.0, "policy": 5.0}, []),
            plane("node2", {"storage": 1.0}, []),
        ),
        100.0,
    )
    return watch.look(
        state(
            plane("node1", {"storage": 10.5, "policy": 5.0}, [flow("vit", granted=None)]),
            plane(
                "node2", {"storage": 1.0, "policy": 8.0},
                [flow("vit", granted=5e6), flow("resnet-night-run", used=6e7, granted=6e7)],
                silent_s=2.0,
            ),
            plane("node3", {}, []),
        ),
        104.0,
    )  # fmt: skip


def test_who_stalls_on_which_node():
    board = two_looks()
    rows = {p["name"]: (p["stalled"], p["cause"], p["silent"]) for p in board["planes"]}
    # node2's first figures of `limit` came between the looks: no rate is known yet.
    assert rows == {
        "node1": (0.125, "storage", False), "node2": (0.0, "", True), "node3": (0.0, "", False),
    }  # fmt: skip
    assert board["planes"][0]["name"] == "node1"


def test_flows_of_all_planes_are_added_up():
    first, second = two_looks()["flows"]
    assert (first["job"], first["planes"], first["limited"]) == ("resnet-night-run", 1, True)
    assert (second["planes"], second["bytes_per_s"], second["granted_bytes_per_s"]) == (
        2,
        2e6,
        None,
    )
    assert not second["limited"]


@pytest.mark.parametrize("width", [80, 130])
def test_the_screen_is_the_kept_one(width):
    assert shown(two_looks(), width) == (HERE / f"planes-{width}.txt").read_text()


def test_many_flows_do_not_fill_the_screen():
    board = PlanesWatch().look(state(plane("n", {}, [flow(f"j{i}") for i in range(1000)])), 0.0)
    lines = shown(board, 80).splitlines()
    assert len(lines) < FLOWS_SHOWN + 12
    assert f"and {1000 - FLOWS_SHOWN} more" in lines[-1]


def shown(board, width):
    console = Console(width=width, force_terminal=False, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(view_planes(board, width))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())

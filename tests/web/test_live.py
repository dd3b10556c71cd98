"""Server-sent events: everything once, then what changes; browsers that do not keep up are hung up on."""

import base64
import dataclasses
import json
import socket
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import TelemetryError
from headrace.web.demo import DemoSource
from headrace.web.live import QUEUE_MAX
from headrace.web.views import IDLE, UNKNOWN, ClusterMoment, JobBox, NodeBox, Wire, levels, plain
from web.serving import small_demo, until


def apply(view, message):
    """As `cluster.js` does it."""
    for slot in message.get("gone", ()):
        del view["jobs"][str(slot)]
    view["jobs"].update({str(slot): row for slot, row in message["jobs"].items()})
    view.update(
        {
            k: message[k]
            for k in ("holders", "stall", "busy", "totals", "taken_s", "nodes")
            if k in message
        }
    )


def test_a_browser_is_told_everything_and_then_what_changes(serve):
    web = serve()
    stream = web.listen("/api/live?grid=1")
    name, full = stream.next()
    assert name == "full"
    assert full["label"] == "recorded demo"
    assert len(full["nodes"]["names"]) == 24
    view, stalls = full, {full["stall"]}
    for _ in range(3):
        name, message = stream.next()
        assert name == "tick"
        apply(view, message)
        stalls.add(view["stall"])
    assert len(stalls) > 1, (
        "the picture moved"
    )  # two looks may fall into one frame of the recording
    holders = np.frombuffer(base64.b64decode(view["holders"]), "<i4")
    assert len(holders) == 24 * 8
    assert {str(h) for h in holders if h != IDLE} == set(view["jobs"])
    stream.close()


def test_who_does_not_want_the_grid_is_told_that_there_is_news(serve):
    stream = serve().listen()
    looks = [stream.next() for _ in range(3)]
    assert {name for name, _ in looks} == {"look"}
    assert [message["look"] for _, message in looks] == sorted(
        {message["look"] for _, message in looks}
    )
    stream.close()


def test_there_are_as_many_browsers_as_may_be(serve):
    web = serve(clients_max=3)
    streams = [web.listen() for _ in range(3)]
    for stream in streams:
        stream.next()
    answer = web.ask("/api/live")
    assert (answer.status, answer.headers["retry-after"]) == (503, "10")
    streams.pop().close()
    until(lambda: len(web.web.live.clients) == 2)
    again = web.listen()
    assert again.status == 200
    for stream in [*streams, again]:
        stream.close()


def test_a_browser_that_is_gone_is_forgotten(serve):
    web = serve()
    stream = web.listen("/api/live?grid=1")
    stream.next()
    assert len(web.web.live.clients) == 1
    stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    stream.close()
    until(lambda: not web.web.live.clients)


class Noise(DemoSource):
    """All 8,000 GPUs change with every look: what is not read fills the socket's buffers soon."""

    def __init__(self):
        super().__init__(nodes=1000, period_s=0.01)
        self.first = super().cluster()
        self.dice = np.random.default_rng(1)

    def cluster(self):
        noise = self.dice.integers(0, 200, (2, len(self.first.stall))).astype(
            self.first.stall.dtype
        )
        return dataclasses.replace(self.first, stall=noise[0], busy=noise[1])


def test_a_browser_that_does_not_read_is_hung_up_on_and_others_go_on(serve):
    web = serve(source=Noise())
    slow = web.listen("/api/live?grid=1")
    quick = web.listen("/api/live?grid=1")
    seen = 0
    for _ in range(2000):
        quick.next()
        seen += 1
        if web.web.live.dropped:
            break
    assert web.web.live.dropped == 1
    assert seen > QUEUE_MAX
    assert len(web.web.live.clients) == 1
    quick.next()
    with pytest.raises((EOFError, ConnectionError, ValueError)):
        while True:
            slow.next()
    slow.close()
    quick.close()


def test_nobody_looks_while_nobody_watches_but_for_once_at_the_beginning(serve):
    web = serve()
    until(lambda: web.web.live.looks)
    time.sleep(0.7)
    assert web.web.live.looks == 1
    stream = web.listen()
    stream.next()
    stream.next()
    stream.close()
    until(lambda: not web.web.live.clients)
    looks = until(lambda: web.web.live.looks)
    time.sleep(0.7)
    assert web.web.live.looks <= looks + 1


class Troubled:
    label, period_s = "", 0.05

    def __init__(self):
        self.good = small_demo()
        self.trouble = "no history in /x<script>\x1b[2J"

    def cluster(self):
        if self.trouble:
            raise TelemetryError(self.trouble)
        return self.good.cluster()


def test_a_mistake_of_ours_is_told_and_looked_past(serve, caplog):
    source = Troubled()
    source.trouble, good = "", source.good.cluster
    source.good.cluster = lambda: 1 / 0
    web = serve(source=source)
    stream = web.listen("/api/live?grid=1")
    assert stream.next() == ("trouble", {"text": "division by zero"})
    source.good.cluster = good
    until(lambda: stream.next()[0] == "tick")
    stream.close()
    assert "a look failed" in caplog.text


def test_what_cannot_be_seen_is_told_and_shown_as_soon_as_it_can(serve):
    source = Troubled()
    web = serve(source=source)
    stream = web.listen("/api/live?grid=1")
    name, message = stream.next()
    assert name == "trouble"
    assert message["text"] == "no history in /x<script>\\x1b[2J"
    source.trouble = ""
    until(lambda: stream.next()[0] == "tick")
    stream.close()


# -- the wire ------------------------------------------------------------------------------------------


def cluster(jobs, gpus=8):
    """A node whose GPUs are held by numbered jobs, or by nobody (None)."""
    names = [n for n in dict.fromkeys(jobs) if n is not None]
    place = {name: at for at, name in enumerate(names)}
    held = np.array([IDLE if n is None else place[n] for n in jobs], np.int32)
    stall = levels(np.linspace(0, 1, len(jobs)))
    return ClusterMoment(
        taken_s=1.0, nodes=[NodeBox("n0", "p", len(jobs))], jobs=[JobBox(job_id=str(n)) for n in names],
        holders=held, stall=stall, busy=stall,
    )  # fmt: skip


holdings = st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(holdings, min_size=1, max_size=8))
def test_ticks_bring_every_browser_to_the_same_picture(steps):
    wire = Wire()
    wire.tick(cluster(steps[0]))
    view = json.loads(json.dumps(wire.full()))
    for step in steps[1:]:
        apply(view, json.loads(json.dumps(wire.tick(cluster(step)))))
        whole = json.loads(json.dumps(wire.full()))
        assert view["jobs"] == whole["jobs"]
        assert view["holders"] == whole["holders"]
        held = np.frombuffer(base64.b64decode(view["holders"]), "<i4")
        names = [None if h == IDLE else view["jobs"][str(h)][0] for h in held]
        assert names == [None if n is None else str(n) for n in step]


def test_totals_count_what_is_known():
    totals = ClusterMoment(
        taken_s=1.0, nodes=[NodeBox("a", "p", 2), NodeBox("b", "p", 2, "down")],
        jobs=[JobBox(job_id="1", cause="decode"), JobBox(job_id="2")],
        holders=np.array([0, 1, IDLE, IDLE], np.int32), stall=levels(np.array([0.5, np.nan, np.nan, np.nan])),
        busy=levels(np.array([0.25, 0.75, np.nan, np.nan])),
    ).totals()  # fmt: skip
    assert (totals["held"], totals["idle"], totals["away"], totals["known"]) == (2, 0, 2, 1)
    assert (totals["lost"], totals["busy"]) == (0.5, 0.5)
    assert totals["causes"] == [["decode", 0.5]]


def test_shares_are_bytes():
    assert levels(np.array([0.0, 0.5, 1.0, 2.0, -1.0, np.nan])).tolist() == [
        0,
        100,
        200,
        200,
        0,
        UNKNOWN,
    ]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"), ("\u202eexe", "\\u202eexe"), ("\udcff", "\\udcff"),
        ("x" * 999, "x" * 200), ("caf\u00e9", "caf\u00e9"),
    ],
)  # fmt: skip
def test_names_are_shown_as_what_they_are(name, shown):
    assert plain(name) == shown

"""Metrics of the node daemon: their names, their figures, their bounds, and nobody who asks can do harm."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import headrace as hr
from headrace.base.peers import Address, address_of
from headrace.control import prometheus
from headrace.control.messages import Grant, Lease
from headrace.control.prometheus import (
    CLIENTS_MAX,
    HEAD_BYTES_MAX,
    OTHER,
    Figures,
    serve_metrics,
)
from headrace.errors import HeadraceError
from headrace.io.objects.faults import RemoteStats
from headrace.node import notes
from headrace.node.daemon import TABLE, figures_of
from headrace.node.jobs import CAUSES, LABELS_MAX, JobTally, JobTotals
from headrace.node.rate_limits import RateLimits
from headrace.node.served import label_of
from headrace.node.wire import Note, Open, WireError, decode_request, encode
from headrace.plane.pipeline import Pipeline
from node.conftest import node_loader, serving, until

PAGE = Path(__file__).parents[2] / "docs/howto/metrics.md"


@contextlib.contextmanager
def exporting(server):
    exporter = serve_metrics("127.0.0.1:0", server.call_soon, server.describe, figures_of)
    try:
        yield exporter
    finally:
        exporter.close()


def get(exporter, path="/metrics", **options):
    request = urllib.request.Request(f"http://{exporter.address}{path}", **options)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()


def raw(exporter, data):
    """What is answered to these bytes."""
    with socket.create_connection((exporter.address.host, exporter.address.port), 10) as sock:
        sock.sendall(data)
        answer = b""
        while chunk := sock.recv(4096):
            answer += chunk
    return answer


def values(text, name):
    """{labels as text: value} of one metric."""
    samples_of_name = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in samples_of_name}


# -- names -----------------------------------------------------------------------------------------


def test_every_metric_is_documented_as_it_is():
    rows = re.findall(
        r"^\| `(headrace_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE
    )
    documented = {
        name: (kind, re.findall(r"`(\w+)`", labels), text) for name, kind, labels, text in rows
    }
    for m in TABLE:
        assert documented[m.name] == (m.kind, list(m.labels), m.help.removesuffix(".")), m.name


def test_names_carry_their_units():
    for m in TABLE:
        assert (m.kind == "counter") == m.name.endswith("_total"), m.name
        assert not re.search(r"_(ms|us|kb|mb|percent)\b", m.name), m.name
        assert "job" not in m.labels, "Prometheus gives this label to what it scrapes"


def test_a_figure_that_is_not_in_the_table_is_refused():
    figures = Figures(TABLE)
    with pytest.raises(KeyError):
        figures.add("headrace_new_total", 1)
    with pytest.raises(KeyError):
        figures.add("headrace_work_seconds_total", 1, path="/data")


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/home/ada/secret/photos.hr", "photos.hr-0123abcd"),
        ("s3://bucket/train/?key=secret", "train-0123abcd"),
        ("s3://bucket/train?key=secret/x", "train-0123abcd"),
        ("/", "data-0123abcd"),
        ("/data/" + "x" * 200, "x" * 40 + "-0123abcd"),
        ('/data/a"b\nc\udcff', "a_b_c_-0123abcd"),
    ],
)
def test_data_sets_are_not_named_by_their_paths(path, label):
    assert label_of(path, "0123abcd" * 4) == label


# -- figures ---------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Clients tell how they fare every few milliseconds."""
    monkeypatch.setattr(notes, "PERIOD_S", 0.02)


def test_a_scrape_says_what_was_delivered_and_who_waited(folder, store, quick, monkeypatch):
    monkeypatch.setenv("HEADRACE_JOB", "alpha")
    with serving(folder) as server, exporting(server) as exporter:
        loader = node_loader(store)
        seen = [sum(len(batch) for batch in loader) for _ in range(2)]
        label = label_of(store.path, store.fingerprint)
        wanted = (  # by the consumer's notes, and by what was delivered or gathered
            f'headrace_job_samples_total{{job_name="alpha"}} {sum(seen):.1f}',
            f'headrace_delivered_samples_total{{dataset="{label}"}} {sum(seen):.1f}',
        )
        until(lambda: all(line in get(exporter)[1] for line in wanted))
        status, text = get(exporter)
        loader.close()
    assert status == 200
    assert values(text, "headrace_work_seconds_total")['job_name="alpha"'] > 0
    assert set(values(text, "headrace_stall_seconds_total")) == {
        f'cause="{cause}",job_name="alpha"' for cause in CAUSES
    }
    (dataset,) = values(text, "headrace_dataset_samples")
    assert dataset == f'dataset="{label_of(store.path, store.fingerprint)}"'
    assert values(text, "headrace_delivered_samples_total") == {dataset: sum(seen)}
    tiers = values(text, "headrace_read_bytes_total")
    assert tiers[f'{dataset},tier="ram"'] == store.nbytes
    assert tiers[f'{dataset},tier="page_cache"'] + tiers[f'{dataset},tier="source"'] >= store.nbytes
    assert values(text, "headrace_job_ram_bytes_total") == {'job_name="alpha"': store.nbytes}
    assert values(text, "process_resident_memory_bytes")[""] > 0


def test_a_scrape_says_what_an_object_store_was_asked(folder, store, monkeypatch):
    did = RemoteStats(requests=40, retries=3, hedges=2, hedges_won=1, reads_in_flight=16)
    monkeypatch.setattr(Pipeline, "_remote", lambda _: did)
    with serving(folder) as server, exporting(server) as exporter:
        loader = node_loader(store)
        next(iter(loader))
        _, text = get(exporter)
        loader.close()
    for name in ("requests", "retries", "hedges", "hedges_won", "failures"):
        (count,) = values(text, f"headrace_remote_{name}_total").values()
        assert count == getattr(did, name)


def test_promtool_finds_no_fault(folder, store):
    if shutil.which("promtool") is None:
        pytest.skip("promtool (Debian's prometheus) is not installed")
    with serving(folder) as server, exporting(server) as exporter:
        loader = node_loader(store)
        next(iter(loader))
        _, text = get(exporter)
        loader.close()
    ended = subprocess.run(
        ["promtool", "check", "metrics"], input=text, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_latencies_add_up(folder):
    counts = [0] * 64
    counts[7], counts[8], counts[63] = 3, 2, 1  # below 16 us; from 16 us on; 34 minutes
    figures = Figures(TABLE)
    for _ in range(2):  # one data set, opened for other parts
        figures.add_latencies("headrace_read_seconds", counts, 0.5, dataset="x")
    (family,) = [f for f in figures.families() if f.name == "headrace_read_seconds"]
    values = {s.labels.get("le", s.name): s.value for s in family.samples}
    assert (values["1.6e-05"], values["3.2e-05"], values["33.554432"], values["+Inf"]) == (
        6,
        10,
        10,
        12,
    )
    assert values["headrace_read_seconds_sum"] == 1.0


# -- what jobs are told apart ----------------------------------------------------------------------


def test_a_thousand_jobs_have_few_labels_and_lose_nothing():
    tally = JobTally(kept_s=10.0)
    total = 0
    before = {}
    for at in range(1000):
        totals = tally.begin(f"job-{at}", now=float(at) / 100)
        totals.served(at, 1, 0)
        total += at
        if at % 3:
            tally.end(f"job-{at}", now=float(at) / 100)
        samples_of = {name: t.samples for name, t in tally.by_label(at / 100).items()}
        assert len(samples_of) <= LABELS_MAX + 1
        assert all(samples_of[name] >= before[name] for name in set(samples_of) & set(before))
        before = samples_of
    assert sum(before.values()) == total
    assert before[OTHER] > 0


def test_a_job_that_comes_back_goes_on_where_it_was():
    tally = JobTally(kept_s=10.0)
    tally.begin("a", 0.0).served(5, 5, 5)
    tally.end("a", 1.0)
    assert tally.begin("a", 5.0).samples == 5
    tally.end("a", 6.0)
    assert tally.by_label(15.0)["a"].samples == 5
    assert tally.by_label(17.0) == {}  # forgotten, and its label free
    tally.begin("a", 20.0).served(5, 5, 5)
    tally.end("a", 21.0)
    assert tally.begin("a", 40.0).samples == 0


def test_the_total_never_goes_down():
    tally = JobTally(labels_max=2, kept_s=1.0)
    for at in range(20):
        totals = tally.begin(f"job-{at % 5}", float(at))
        totals.served(1, 1, 1)
        totals.note(note(waited_s=1.0, worked_s=2.0), "window")
        if at % 2:
            tally.by_label(float(at))
        tally.end(f"job-{at % 5}", float(at))
        total = tally.total()
        assert [total.samples, total.stall_s["window"], total.worked_s / 2] == [at + 1] * 3


def test_nobody_can_be_called_other():
    tally = JobTally()
    tally.begin(OTHER, 0.0).served(1, 1, 1)
    tally.end(OTHER, 0.0)
    assert tally.by_label(1.0)[OTHER].samples == 1


def test_a_client_that_goes_while_its_data_set_is_opened_leaves_no_job(folder, store, link):
    with serving(folder) as server:
        for _ in range(2):
            one = link("hasty")
            path = os.fsencode(store.path)
            one.send(Open(one.new_ticket(), path, 1, store.fingerprint, [""], None))
            one.close()
        until(lambda: server.describe()["datasets"] and not server.describe()["jobs"])
        assert server._tally._working == {}


def test_jobs_without_a_label_are_added_up_in_a_scrape(folder, link):
    with serving(folder) as server:
        server._tally._labels_max = 1
        for name in ("a", "b", "c"):
            link(name).send(Note(1.0, 0.0, 0.0, 2.0, 3, 4, 5, 0))
        until(lambda: sum(job["totals"] is not None for job in server.describe()["jobs"]) == 3)
        figures = figures_of(server.describe())
    (family,) = [f for f in figures.families() if f.name == "headrace_job_samples"]
    assert {s.labels["job_name"]: s.value for s in family.samples} == {"a": 4.0, OTHER: 8.0}


# -- what clients tell -----------------------------------------------------------------------------


def note(**fields):
    zero = dict.fromkeys(("waited_s", "direct_s", "decode_s", "worked_s"), 0.0)
    counts = dict.fromkeys(("batches", "samples", "nbytes", "direct_batches"), 0)
    return Note(**(zero | counts | fields))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e9, "1", None])
def test_impossible_times_break_the_protocol(seconds):
    with pytest.raises(WireError):
        decode_request(encode(note(worked_s=seconds))[4:])


@pytest.mark.parametrize("count", [-1, 1 << 63, 0.5])
def test_impossible_counts_break_the_protocol(count):
    with pytest.raises(WireError):
        decode_request(encode(note(samples=count))[4:])


def test_waiting_gets_the_causes_that_the_daemon_saw():
    totals = JobTotals()
    totals.took("storage", 3.0)
    totals.took("window", 1.0)
    totals.note(note(waited_s=2.0, direct_s=0.25, decode_s=0.5), "decode")
    assert totals.stall_s == {
        "storage": 1.5, "window": 0.5, "memory": 0.0, "policy": 0.0, "direct": 0.25, "decode": 0.5,
        "prefetch": 0.0,
    }  # fmt: skip
    totals.note(note(waited_s=1.0), "window")  # nothing has come since
    assert totals.stall_s["window"] == 1.5


def test_waits_are_told_apart_by_who_reads():
    seen = notes._Seen
    asked = notes.note_of(seen(asked_s=1.0), seen(waited_s=2.0, asked_s=2.5, batches=1))
    assert (asked.waited_s, asked.decode_s, asked.direct_s) == (1.5, 0.5, 0.0)
    direct = notes.note_of(seen(asked_s=0.0), seen(waited_s=2.0, asked_s=0.5, direct=3, batches=3))
    assert (direct.waited_s, direct.direct_s, direct.direct_batches) == (0.5, 1.5, 3)
    workers = notes.note_of(seen(), seen(waited_s=2.0, batches=1))
    assert (workers.waited_s, workers.decode_s) == (2.0, 0.0)
    assert notes.note_of(seen(waited_s=1.0), seen(waited_s=1.0)) is None
    anew = notes.note_of(seen(asked_s=9.0), seen(waited_s=1.0, asked_s=0.5, batches=1))
    assert anew.waited_s == 0.5


def test_slow_storage_is_the_cause(folder, store, quick, monkeypatch, caplog):
    monkeypatch.setenv("HEADRACE_JOB", "slow")
    with serving(folder, reader=hr.config.ReaderOptions(simulate="hdd")) as server:
        loader = node_loader(store)
        count = sum(len(batch) for batch, _ in zip(loader, range(4), strict=False))
        until(lambda: _labels(server)["slow"]["consumed_samples"] >= count)
        stalls = _labels(server)["slow"]["stall_s"]
        loader.close()
    assert stalls["storage"] > 0
    assert max(stalls, key=stalls.get) == "storage"
    # The daemon ended while it read: what it gave up is not told as failed, with tracebacks that keep
    # reader and store open for as long as the log is kept.
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_limit_of_the_controller_is_the_cause(folder, store, quick, monkeypatch):
    monkeypatch.setenv("HEADRACE_JOB", "capped")
    # Past the page cache: what lies there costs the file system nothing, and so is not limited.
    reader = hr.config.ReaderOptions(direct="always")
    with serving(folder, ram_bytes=0, reader=reader) as server:
        loader = node_loader(store)
        count = sum(len(batch) for batch in loader)
        until(lambda: _labels(server)["capped"]["consumed_samples"] == count)
        before = _labels(server)["capped"]["stall_s"]
        rate_limits = RateLimits(wake=lambda: server.call_soon(lambda: None))
        rate_limits.limit("capped", store.path)
        grant = Grant("capped", "other", (2.0 * store.nbytes, None, None))
        lease = Lease("p", "r", 1, 1, 60.0, 1.0, None, [], [grant], {})
        rate_limits.apply(lease, time.monotonic())
        server.rate_limits = rate_limits
        count += sum(len(batch) for batch in loader)
        until(lambda: _labels(server)["capped"]["consumed_samples"] == count)
        after = _labels(server)["capped"]["stall_s"]
        loader.close()
    grown = {cause: after[cause] - before[cause] for cause in after}
    assert grown["policy"] > 0
    assert max(grown, key=grown.get) == "policy"


def test_a_client_of_a_lost_daemon_says_so_to_the_next(daemon, store, quick, monkeypatch):
    monkeypatch.setenv("HEADRACE_JOB", "left")
    first = daemon()
    loader = node_loader(store, 8)
    batches = iter(loader)
    next(batches)
    first.end(signal.SIGKILL)
    left = len(list(batches))
    second = daemon()

    def told_direct():
        next(batches, None)
        return second.status()["labels"].get("left", {"direct_batches": 0})["direct_batches"]

    until(lambda: loader.stages[-1]._attaching._ready is not None)
    batches = iter(loader)
    direct = until(told_direct)
    loader.close()
    assert 0 < direct <= left + 1


def _labels(server):
    answers = []
    server.call_soon(lambda: answers.append(server.describe()["labels"]))
    return until(lambda: answers)[0]


# -- the port --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", Address("127.0.0.1", 9464)),
        ("0.0.0.0:1", Address("0.0.0.0", 1)),
        ("[::1]:9464", Address("::1", 9464)),
        ("node7:0", Address("node7", 0)),
    ],
)
def test_addresses(text, address):
    assert address_of(text) == address
    assert address_of(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", ":9464", "localhost", "x:y", "1:65536", "-1", "1.2.3.4:", "٣"]
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match="expected"):
        address_of(text)


def test_a_taken_port_is_named_with_what_to_do(folder):
    with socket.create_server(("127.0.0.1", 0)) as other, serving(folder) as server:
        port = other.getsockname()[1]
        with pytest.raises(HeadraceError, match="another process listens there") as caught:
            serve_metrics(str(port), server.call_soon, server.describe, figures_of)
        assert f"127.0.0.1:{port}" in caught.value.message
        assert "--metrics" in caught.value.next_step


REFUSED = [
    (b"GET / HTTP/1.1\r\n\r\n", 404),
    (b"GET /metrics/../etc HTTP/1.1\r\n\r\n", 404),
    (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
    (b"HEAD /healthz HTTP/1.0\r\n\r\n", 405),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", 400),
    (b"\n", 400),
    (b"GET /metrics\r\n", 400),
    (b"GET /metrics HTTP/2\r\n", 400),
    (b"x" * (HEAD_BYTES_MAX + 1), 431),
    (b"GET /metrics HTTP/1.1\r\nA: " + b"x" * HEAD_BYTES_MAX, 431),
]


@pytest.mark.parametrize(("request_", "code"), REFUSED)
def test_anything_else_is_refused(folder, request_, code):
    with serving(folder) as server, exporting(server) as exporter:
        assert raw(exporter, request_).startswith(b"HTTP/1.1 %d " % code)
        assert get(exporter, "/healthz") == (200, "ok\n")


def test_random_bytes_harm_nobody(folder):
    import random

    noise = random.Random(5)
    with serving(folder) as server, exporting(server) as exporter:
        for _ in range(50):
            data = noise.randbytes(noise.randrange(1, 300))
            with socket.create_connection((exporter.address.host, exporter.address.port)) as sock:
                sock.sendall(data)
        assert get(exporter)[0] == 200


def test_idle_and_dripping_clients_neither_keep_a_scraper_out_nor_stay(folder, monkeypatch):
    monkeypatch.setattr(prometheus, "REQUEST_S", 3.0)
    with serving(folder) as server, exporting(server) as exporter:
        where = (exporter.address.host, exporter.address.port)
        with contextlib.ExitStack() as stack:
            idle = [
                stack.enter_context(socket.create_connection(where)) for _ in range(3 * CLIENTS_MAX)
            ]
            for sock in idle[::2]:
                with contextlib.suppress(OSError):  # it made room already
                    sock.sendall(b"GET /met")
            assert get(exporter)[0] == 200
            assert len(exporter._clients) <= CLIENTS_MAX
            until(lambda: not exporter._clients)
            for sock in idle:  # each was hung up on, not answered
                sock.settimeout(5)
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(10) == b""


def test_a_client_that_does_not_read_holds_nothing_up(folder, monkeypatch):
    monkeypatch.setattr(prometheus, "REQUEST_S", 3.0)
    big = b"x" * (32 << 20)
    server = prometheus.MetricsServer(Address("127.0.0.1", 0), lambda: big, lambda: True)
    try:
        with socket.create_connection((server.address.host, server.address.port)) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            until(lambda: len(server._clients) == 1)
            assert get(server, "/healthz")[0] == 200
            until(lambda: not server._clients)  # its time is over
    finally:
        server.close()


def test_a_loop_that_is_busy_fails_the_scrape_and_nothing_else(folder, monkeypatch):
    monkeypatch.setattr(prometheus, "ANSWER_S", 0.05)
    stuck = threading.Event()
    with serving(folder) as server, exporting(server) as exporter:
        server.call_soon(lambda: stuck.wait(20))
        assert get(exporter)[0] == 503
        assert get(exporter, "/healthz") == (503, "it does not answer\n")
        stuck.set()
        until(lambda: get(exporter)[0] == 200)


def test_many_scrapes_cost_the_loop_few_reports(folder, monkeypatch):
    with serving(folder) as server, exporting(server) as exporter:
        asked = []
        describe = server.describe
        monkeypatch.setattr(
            server, "describe", lambda: asked.append(time.monotonic()) or describe()
        )
        began = time.monotonic()
        for _ in range(30):
            assert get(exporter)[0] == 200
        took_s = time.monotonic() - began
    assert len(asked) <= 1 + took_s / prometheus.KEPT_S


def test_nothing_is_left_when_it_ends(folder):
    with serving(folder) as server:
        exporter = serve_metrics("127.0.0.1:0", server.call_soon, server.describe, figures_of)
        where = (exporter.address.host, exporter.address.port)
        with socket.create_connection(where):
            until(lambda: exporter._clients)
            exporter.close()
        assert not exporter._thread.is_alive()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where)
        exporter.close()  # twice is once

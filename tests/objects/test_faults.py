"""Every fault once, always, and without an end; each test asserts that its fault happened."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import SourceChanged, VolumeError, VolumeTimeout
from headrace.io.objects.engine import ObjectEngine
from headrace.io.objects.faults import Fault
from headrace.io.objects.listing import remove, write
from headrace.io.objects.reading import Hedging, RemoteObject, out_of_time
from objects.conftest import DATA
from objects.faulty_proxy import EXPIRED, FaultyProxy
from tests_shared import until

Fetch = Callable[..., bytes]

ONCE: list[tuple[str, dict[str, Any]]] = [
    ("503", {"status": 503}),
    ("500", {"status": 500}),
    ("429", {"status": 429}),
    ("408", {"status": 408}),
    ("reset", {}),
    ("truncate", {}),
    ("slow", {}),
    ("wrong_range", {}),
    ("garbage", {}),
    ("huge", {}),
]


@pytest.mark.parametrize(("name", "fields"), ONCE, ids=[name for name, _ in ONCE])
def test_a_fault_that_passes_costs_time_only(
    name: str, fields: dict[str, Any], proxy: FaultyProxy, blob: str, fetch: Fetch
) -> None:
    proxy.inject("status" if name.isdigit() else name, times=2, **fields)
    assert fetch(blob) == DATA[100:5100]
    if name != "slow":
        assert proxy.injected == {name: 2}
    else:
        assert proxy.injected["slow"] == 1


@pytest.mark.parametrize(
    ("fault", "fields", "said"),
    [
        ("status", {"status": 503}, "status 503"),
        ("reset", {}, "connection lost"),
        ("truncate", {}, "truncated"),
        ("wrong_range", {}, "wrong range"),
    ],
)
def test_a_fault_that_stays_is_an_error_that_says_all(
    fault: str, fields: dict[str, Any], said: str, proxy: FaultyProxy, blob: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    proxy.inject(fault, times=None, **fields)
    engine = ObjectEngine(options | {"attempts_max": 3})
    try:
        with pytest.raises(VolumeError) as caught:
            engine.fetch(blob, 100, memoryview(bytearray(5000)))
    finally:
        engine.close()
    assert sum(proxy.injected.values()) == 3
    message = str(caught.value)
    for part in (blob, "bytes 100 to 5,100", said, "3 attempts in"):
        assert part in message
    assert caught.value.attempts == 3  # type: ignore[attr-defined]
    assert engine.stats().failures == 1


def test_a_server_that_was_never_there_is_given_up_soon_and_named(options: dict[str, Any]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}"  # and nobody else's meanwhile
        engine = ObjectEngine(options | {"endpoint": f"http://{place}", "deadline_s": 3600.0})
        try:
            with pytest.raises(
                VolumeError, match=f"connect failed: {place}: Connection refused"
            ) as caught:
                engine.fetch("s3://bucket/blob", 0, memoryview(bytearray(10)))
        finally:
            engine.close()
    assert caught.value.errno == errno.ECONNREFUSED
    assert caught.value.attempts > 1  # type: ignore[attr-defined]
    assert "endpoint" in str(caught.value.next_step)


@pytest.mark.parametrize("fault", ["stall", "endless_head"])
def test_an_answer_that_never_ends_is_a_timeout(
    fault: str, proxy: FaultyProxy, blob: str, options: dict[str, Any]
) -> None:
    proxy.inject(fault, times=None)
    engine = ObjectEngine(options | {"attempts_max": 2, "stall_s": 0.3})
    try:
        expected = VolumeTimeout if fault == "stall" else VolumeError
        with pytest.raises(expected):
            engine.fetch(blob, 0, memoryview(bytearray(10)))
    finally:
        engine.close()
    until(lambda: proxy.injected[fault] >= 1)  # it may come to it only now


def test_the_deadline_ends_a_read_whatever_it_waits_for(proxy: FaultyProxy) -> None:
    engine = ObjectEngine({"deadline_s": 0.5})
    proxy.inject("stall", times=None)

    def asked_in_vain() -> int:
        """How often the proxy was asked: on a busy machine the time may be over before that."""
        with pytest.raises(VolumeTimeout, match=r"no answer within 0\.5 s") as caught:
            engine.fetch(f"{proxy.url}/x", 0, memoryview(bytearray(10)))
        assert caught.value.errno == errno.ETIMEDOUT
        assert caught.value.attempts == 1  # type: ignore[attr-defined]
        return proxy.injected["stall"]

    try:
        until(asked_in_vain)
    finally:
        engine.close()


def test_the_deadlines_error_tells_what_was_met_before_it() -> None:
    fault = out_of_time(2.5, Fault("transient", "wrong range: none", status=206))
    assert fault.reason == "no answer within 2.5 s; the attempt before met: wrong range: none"
    assert fault.status == 206
    assert out_of_time(1, None).reason == "no answer within 1 s"


def test_a_stalled_request_is_sent_anew(
    proxy: FaultyProxy, blob: str, options: dict[str, Any]
) -> None:
    proxy.inject("stall")
    engine = ObjectEngine(options | {"stall_s": 0.5})
    dest = bytearray(1000)
    try:
        engine.fetch(blob, 0, memoryview(dest))
    finally:
        engine.close()
    assert bytes(dest) == DATA[:1000]
    assert proxy.injected == {"stall": 1}
    assert engine.stats().faults["stalled"] >= 1


def test_retry_after_is_obeyed_by_every_read_of_the_bucket(
    proxy: FaultyProxy, blob: str, engine: ObjectEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.io.objects.faults.RETRY_AFTER_MAX_S", 0.2)
    engine.fetch(blob, 0, memoryview(bytearray(10)))
    proxy.inject("status", status=429, headers=("Retry-After: 1",))
    started = time.monotonic()
    engine.fetch(blob, 0, memoryview(bytearray(10)))
    assert time.monotonic() - started >= 0.2  # no load can make it less
    assert proxy.injected == {"429": 1}
    assert engine.stats().retries == 1


def test_a_retry_after_beyond_the_deadline_fails_at_once(
    proxy: FaultyProxy, blob: str, engine: ObjectEngine
) -> None:
    proxy.inject("status", status=503, headers=("Retry-After: 3000",))
    with pytest.raises(VolumeError, match="status 503") as caught:
        engine.fetch(blob, 100, memoryview(bytearray(5000)))
    assert caught.value.attempts == 1  # type: ignore[attr-defined]
    assert engine.stats().requests == 1
    assert proxy.injected == {"503": 1}


def test_expired_credentials_are_fetched_anew_once(
    proxy: FaultyProxy, blob: str, options: dict[str, Any]
) -> None:
    asked: list[int] = []

    def provider() -> dict[str, Any]:
        asked.append(len(asked))
        name = "old" if len(asked) == 1 else "new"
        return {"access_key_id": name, "secret_access_key": "s", "expires_at": None}

    proxy.inject("status", status=400, body=EXPIRED, head="Credential=old", times=None)
    given = {k: v for k, v in options.items() if "access_key" not in k}
    engine = ObjectEngine(given | {"credential_provider": provider})
    try:
        dests = [memoryview(bytearray(1000)) for _ in range(8)]
        found = engine.fetch_many([(blob, i * 1000, d) for i, d in enumerate(dests)])
        assert all(getattr(f, "count", 0) == 1000 for f in found)
        assert b"".join(dests) == DATA[:8000]
        assert engine.stats().refreshes == 1
    finally:
        engine.close()
    assert proxy.injected["400"] >= 1
    assert len(asked) == 2


def test_credentials_that_stay_refused_are_an_error_after_one_more_try(
    proxy: FaultyProxy, blob: str, fetch: Fetch
) -> None:
    proxy.inject("status", status=403, body=b"AccessDenied", times=None)
    with pytest.raises(VolumeError, match="status 403: AccessDenied") as caught:
        fetch(blob)
    assert proxy.injected == {"403": 2}
    assert caught.value.errno == errno.EACCES
    assert "redentials" in str(caught.value.next_step)


def test_an_object_that_was_replaced_is_detected(
    proxy: FaultyProxy, own_blob: str, engine: ObjectEngine, direct: dict[str, Any]
) -> None:
    found = engine.fetch(own_blob, 0, memoryview(bytearray(10)))
    engine.register([RemoteObject(own_blob, found.size, found.etag, found.modified_ns)])
    write(bytes(len(DATA)), own_blob, direct, create=False)
    with pytest.raises(SourceChanged, match="status 412"):
        engine.fetch(own_blob, 0, memoryview(bytearray(10)))


def test_a_server_that_ignores_if_match_is_seen_through(
    proxy: FaultyProxy, blob: str, engine: ObjectEngine
) -> None:
    found = engine.fetch(blob, 0, memoryview(bytearray(10)))
    engine.register([RemoteObject(blob, found.size, found.etag, None)])
    proxy.inject("wrong_etag")
    with pytest.raises(SourceChanged, match='etag is "another"'):
        engine.fetch(blob, 0, memoryview(bytearray(10)))
    assert proxy.injected == {"wrong_etag": 1}


def test_an_object_that_was_deleted_is_an_error(
    own_blob: str, fetch: Fetch, direct: dict[str, Any]
) -> None:
    fetch(own_blob)
    remove([own_blob], direct)
    with pytest.raises(VolumeError, match="status 404") as caught:
        fetch(own_blob)
    assert caught.value.errno == errno.ENOENT


def test_a_shorter_object_is_an_error_and_not_fewer_bytes(blob: str, fetch: Fetch) -> None:
    with pytest.raises(SourceChanged, match="it ends at 102,400"):
        fetch(blob, len(DATA) - 10, 20)


def test_a_server_without_ranges_is_refused(proxy: FaultyProxy, blob: str, fetch: Fetch) -> None:
    proxy.inject("no_range")
    with pytest.raises(VolumeError, match="ranges ignored"):
        fetch(blob)
    assert proxy.injected == {"no_range": 1}


_LEFT_OPEN = """
import sys
from headrace.io.objects.engine import ObjectEngine
url, endpoint = sys.argv[1:]
engine = ObjectEngine({"endpoint": endpoint, "region": "us-east-1", "access_key_id": "key",
                       "secret_access_key": "secret"})
try:
    engine.fetch("s3://no-such-bucket/blob", 0, memoryview(bytearray(10)))
except Exception as e:
    e.engine = engine
    sys.last_value = e  # as an uncaught error is kept until the interpreter ends
"""


def test_an_engine_that_nobody_closed_does_not_hold_the_process_up(
    proxy: FaultyProxy, blob: str
) -> None:
    script = _LEFT_OPEN + (
        "import faulthandler; faulthandler.dump_traceback_later(40, exit=True)\n"
        "sys.modules[ObjectEngine.__module__]._CLOSE_S = 3600.0  # who waits for a thread, waits\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, blob, proxy.url],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


_FEW = """
import os, resource, sys
from headrace.io.objects.engine import ObjectEngine
url, endpoint = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
engine = ObjectEngine({"endpoint": endpoint, "region": "us-east-1", "access_key_id": "key",
                       "secret_access_key": "secret", "reads_in_flight": 200})
dests = [memoryview(bytearray(200)) for _ in range(300)]
found = engine.fetch_many([(url, i * 200, d) for i, d in enumerate(dests)])
assert len(os.listdir("/proc/self/fd")) <= 64
assert all(getattr(f, "count", 0) == 200 for f in found), found
assert b"".join(dests) == (bytes(range(256)) * 400)[: 300 * 200]
engine.close()
"""


def test_sixty_four_descriptors_are_enough_for_any_depth(proxy: FaultyProxy, blob: str) -> None:
    proxy.inject("slow", times=20, seconds=0.002)
    done = subprocess.run(
        [sys.executable, "-c", _FEW, blob, proxy.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 1 < proxy.open_most < 64


def test_a_slow_request_is_hedged_and_the_faster_answer_counts(
    proxy: FaultyProxy, blob: str, options: dict[str, Any]
) -> None:
    proxy.inject("stall")
    engine = ObjectEngine(options | {"hedge_s": 0.1})
    dest = bytearray(1000)
    try:
        engine.fetch(blob, 50, memoryview(dest))
        stats = engine.stats()
    finally:
        engine.close()
    assert bytes(dest) == DATA[50:1050]
    assert proxy.injected == {"stall": 1}
    assert (stats.hedges, stats.hedges_won, stats.requests, stats.retries) == (1, 1, 2, 0)


def test_when_to_ask_a_second_time_is_learned_from_requests_that_take_far_longer_than_most(
    proxy: FaultyProxy, blob: str, options: dict[str, Any]
) -> None:
    engine = ObjectEngine(options)
    dest = bytearray(1000)
    try:
        for k in range(96):
            # At last none: each may be asked for twice, and of twenty requests only one is.
            if k % 8 == 0 and k < 64:
                proxy.inject("slow", seconds=0.04)
            engine.fetch(blob, k, memoryview(dest))
        before = engine.stats()
        proxy.inject("stall")
        engine.fetch(blob, 50, memoryview(dest))
        after = engine.stats()
    finally:
        engine.close()
    assert bytes(dest) == DATA[50:1050]
    assert proxy.injected["stall"] == 1
    assert (after.hedges, after.hedges_won) == (before.hedges + 1, before.hedges_won + 1)
    assert after.requests == before.requests + 2
    assert after.retries == 0


def _hedging(seconds: list[float], nbytes: int = 1000) -> Hedging:
    hedging = Hedging()
    for each in seconds:
        hedging.note(nbytes, each)
    return hedging


def test_a_request_is_late_when_it_takes_longer_than_19_of_20_of_its_size() -> None:
    usual = [0.03, 0.031, 0.029, 0.033] * 40
    assert _hedging(usual[:60]).delay_s(1000) is None  # too few are known
    hedging = _hedging([0.2 if k % 10 == 0 else each for k, each in enumerate(usual)])
    assert hedging.delay_s(1000) == hedging.delay_s(1100) == 0.2
    assert hedging.delay_s(100_000) is None  # of these nothing is known
    for _ in range(600):
        hedging.note(1000, 0.03)
    assert hedging.delay_s(1000) == 0.03
    assert _hedging(usual, 8 << 20).delay_s(8 << 20) is None  # memory for two of them
    assert _hedging([0.001] * 160).delay_s(1000) == 0.02


def _spent(hedging: Hedging) -> int:
    return sum(hedging.spend() for _ in range(100))


def test_of_twenty_requests_one_is_sent_twice_at_most_and_of_two_hundred_where_it_is_in_vain() -> (
    None
):
    hedging = _hedging([0.03] * 200)
    assert _spent(hedging) == 10
    assert _spent(_hedging([0.03] * 100_000)) == 16  # however long nobody was slow
    for won, expected in ((False, 1), (True, 10)):
        for _ in range(20):
            hedging.ended(won=won)
        for _ in range(205):
            hedging.note(1000, 0.03)
        assert _spent(hedging) == expected


def test_closing_ends_reads_that_wait(
    proxy: FaultyProxy, blob: str, options: dict[str, Any]
) -> None:
    proxy.inject("stall", times=None)
    engine = ObjectEngine(options | {"reads_in_flight": 1})
    futures = engine.start([(blob, 0, memoryview(bytearray(10))) for _ in range(3)])
    until(lambda: proxy.injected)
    engine.close()
    assert [type(f.result(30)).__name__ for f in futures] == ["Failure"] * 3
    assert proxy.injected["stall"] == 1
    assert not any(t.name == "headrace-objects" for t in threading.enumerate())

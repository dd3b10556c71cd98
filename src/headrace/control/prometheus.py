"""Prometheus: figures under the names of a table, and a server that answers Prometheus with them.

A figure whose name, kind or labels are not in the table cannot be given: the table is what the
documentation lists and what dashboards rely on.

`MetricsServer` answers `GET /metrics` and `GET /healthz`, one request a connection, and nothing else.
Connections, bytes and time are bounded: when all places are taken the oldest connection makes room, so
that slow or idle clients cannot keep a scraper out. It speaks plain HTTP; keep it on loopback or a
trusted network.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from headrace.base.peers import Address, address_of
from headrace.errors import HeadraceError
from headrace.plane.stage import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric as Family

_log = logging.getLogger("headrace.metrics")

ANSWER_S: Final = 2.0
"""A loop that is asked from another thread answers within this time, or the scrape fails."""

OTHER: Final = "other"  # names all that have no label of their own
_T = TypeVar("_T")

Kind = Literal["counter", "gauge", "histogram"]

_BUCKET_POWERS: Final = range(4, 26)
"""Upper bounds of latency buckets: 16 us to 34 s, each twice the one before."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of a table of metrics."""

    name: str  # as Prometheus has it: with its unit, and `_total` if it is a counter
    kind: Kind
    labels: tuple[str, ...]
    help: str


_Key = tuple[str, ...]  # values of the labels of a figure


class Figures:
    """Figures of one scrape."""

    def __init__(self, table: Iterable[Metric]) -> None:
        self._table = {metric.name: metric for metric in table}
        self._values: defaultdict[str, dict[_Key, float]] = defaultdict(dict)
        self._histograms: defaultdict[str, dict[_Key, tuple[list[int], float]]] = defaultdict(dict)

    def add(self, name: str, value: float, **labels: str) -> None:
        """Tell a figure; of the same labels, figures are added up.

        Raises KeyError if there is no such metric, or it has other labels.
        """
        values, key = self._values[name], self._key(name, labels)
        values[key] = values.get(key, 0.0) + value

    def add_latencies(
        self, name: str, counts: Sequence[int], seconds: float, **labels: str
    ) -> None:
        """Tell a histogram; raises KeyError if there is no such metric, or it has other labels."""
        key = self._key(name, labels)
        before, total = self._histograms[name].get(key, ([0] * LATENCY_BUCKETS, 0.0))
        added = [a + b for a, b in zip(before, counts, strict=True)]
        self._histograms[name][key] = (added, total + seconds)

    def _key(self, name: str, labels: dict[str, str]) -> _Key:
        metric = self._table[name]
        if set(labels) != set(metric.labels):
            raise KeyError(f"{name} has labels {metric.labels}, not {tuple(labels)}")
        return tuple(labels[label] for label in metric.labels)

    def families(self) -> Iterator[Family]:
        """As prometheus-client has them, those without any figure too: their names are known at once."""
        from prometheus_client import core

        for metric in self._table.values():
            if metric.kind == "histogram":
                histogram = core.HistogramMetricFamily(
                    metric.name, metric.help, labels=metric.labels
                )
                for key, (counts, total) in self._histograms[metric.name].items():
                    # Buckets as Prometheus has them: how many took no longer.
                    buckets = [
                        (repr(2**power * 1e-6), float(sum(counts[: 2 * power])))
                        for power in _BUCKET_POWERS
                    ]
                    histogram.add_metric(key, [*buckets, ("+Inf", float(sum(counts)))], total)
                yield histogram
                continue
            make = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
            family = make(metric.name, metric.help, labels=metric.labels)
            for key, value in self._values[metric.name].items():
                family.add_metric(key, value)
            yield family


LABELS_MAX: Final = 64  # jobs, and file systems, that have a label of their own at a time


class Labels:
    """Which names have a label of their own: as many as there is room for, as long as they are there."""

    def __init__(self, labels_max: int = LABELS_MAX) -> None:
        self._labels_max = labels_max
        self._labelled: set[str] = set()

    def update(self, names: Iterable[str]) -> None:
        """These are there now; whoever is not gives its label up."""
        there = dict.fromkeys(names)
        self._labelled &= there.keys()
        for name in there:
            if len(self._labelled) < self._labels_max and name != OTHER:
                self._labelled.add(name)

    def of(self, name: str) -> str:
        """The label of a name."""
        return name if name in self._labelled else OTHER


class JobLabels:
    """Which jobs and file systems have a label of their own, from scrape to scrape."""

    def __init__(self) -> None:
        self.jobs, self.systems = Labels(), Labels()


def asked(call_soon: Callable[[Callable[[], None]], object], function: Callable[[], _T]) -> _T:
    """What a function gives in a loop's thread, asked from another.

    Raises TimeoutError if the loop did not answer within `ANSWER_S`.
    """
    answers: queue.SimpleQueue[_T] = queue.SimpleQueue()
    call_soon(lambda: answers.put(function()))
    try:
        return answers.get(timeout=ANSWER_S)
    except queue.Empty:
        raise TimeoutError(f"the loop did not answer within {ANSWER_S:g} s") from None


def renderer(figures: Callable[[], Figures]) -> Callable[[], bytes]:
    """What gives the metrics as text: these figures, and those of the process."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()

    class Collector:
        def collect(self) -> Iterator[Family]:
            return figures().families()

    registry.register(Collector())
    prometheus_client.ProcessCollector(registry=registry)
    return lambda: prometheus_client.generate_latest(registry)


PORT: Final = 9464  # by convention the port of exporters like this one
CLIENTS_MAX: Final = 16
HEAD_BYTES_MAX: Final = 4096
REQUEST_S: Final = 5.0  # a request comes whole, and its answer is taken, within this time each
KEPT_S: Final = 0.25
"""Scrapes within this time get the same answer: many scrapers cost no more than a few."""

_LINGER_S: Final = 1.0
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """Serves until it is closed.

    Args:
        address: where; port 0 takes a free one.
        render: gives the metrics as text, or raises TimeoutError; called in the server's threads.
        healthy: whether what is measured is alive.

    Raises:
        HeadraceError: it cannot listen there.
    """

    def __init__(
        self, address: Address, render: Callable[[], bytes], healthy: Callable[[], bool]
    ) -> None:
        self._render = render
        self._healthy = healthy
        self._rendered: tuple[float, bytes] = (-1.0, b"")
        self._rendering = threading.Lock()
        self._clients: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        try:
            self._listener = address.listen(CLIENTS_MAX)
        except OSError as e:
            taken = e.errno == errno.EADDRINUSE
            why = "another process listens there" if taken else e.strerror or str(e)
            raise HeadraceError(
                f"{address}: metrics cannot be served there: {why}.",
                next_step="Name another: --metrics [HOST:]PORT; port 0 takes a free one.",
            ) from e
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._ending = False
        self._thread = threading.Thread(target=self._accept, name="headrace-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on all; returns when nobody is accepted any more."""
        self._ending = True
        with contextlib.suppress(OSError):  # wakes the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for sock in list(self._clients):
            self._hang_up(sock)

    def _accept(self) -> None:
        while not self._ending:
            try:
                sock, _ = self._listener.accept()
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(0.25)
                continue
            while len(self._clients) >= CLIENTS_MAX:
                self._hang_up(next(iter(self._clients)))
            with self._lock:
                self._clients[sock] = None
            try:
                threading.Thread(
                    target=self._serve, args=(sock,), name="headrace-metrics-client", daemon=True
                ).start()
            except RuntimeError:  # there are no more threads
                self._hang_up(sock)
                sock.close()

    def _hang_up(self, sock: socket.socket) -> None:
        """End a connection; its thread sees that and closes it."""
        with self._lock:
            self._clients.pop(sock, None)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            answer, head, deadline_s = None, bytearray(), time.monotonic() + REQUEST_S
            while answer is None:
                sock.settimeout(max(1e-3, deadline_s - time.monotonic()))
                data = sock.recv(HEAD_BYTES_MAX)
                if not data:
                    break
                head += data
                answer = self._answer(bytes(head))
            if answer is not None:
                sock.settimeout(REQUEST_S)
                sock.sendall(answer)
                # Closed at once, with bytes of the client unread, the answer might never arrive.
                sock.shutdown(socket.SHUT_WR)
                deadline_s = time.monotonic() + _LINGER_S
                while (left_s := deadline_s - time.monotonic()) > 0:
                    sock.settimeout(left_s)
                    if not sock.recv(HEAD_BYTES_MAX):
                        break
        with self._lock:
            self._clients.pop(sock, None)

    def _answer(self, head: bytes) -> bytes | None:
        """The answer to a request; None: it is not whole."""
        # A line is enough to refuse what is no HTTP.
        line, newline, _ = head.partition(b"\n")
        words = line.split()
        content: tuple[int, str | bytes]
        if newline and (len(words) != 3 or not words[2].startswith(b"HTTP/1.")):
            content = 400, "no HTTP request\n"
        elif len(head) > HEAD_BYTES_MAX:
            content = 431, f"a request has at most {HEAD_BYTES_MAX} bytes here\n"
        elif b"\r\n\r\n" not in head and b"\n\n" not in head:
            return None
        else:
            content = self._content(words[0], words[1].partition(b"?")[0])
        return _answer(*content)

    def _content(self, method: bytes, path: bytes) -> tuple[int, str | bytes]:
        """The status and the body of a whole request's answer."""
        if path not in (b"/metrics", b"/healthz"):
            return 404, "there is /metrics, and /healthz\n"
        if method != b"GET":
            return 405, "only GET\n"
        try:
            if path == b"/metrics":
                with self._rendering:
                    at, text = self._rendered
                    if at < 0.0 or time.monotonic() - at > KEPT_S:
                        text = self._render()
                        self._rendered = (time.monotonic(), text)
                return 200, text
            if self._healthy():
                return 200, "ok\n"
        except TimeoutError:
            pass
        except Exception:  # noqa: BLE001 - whatever it is, the next scrape may succeed
            _log.exception("metrics cannot be rendered")
        return 503, "it does not answer\n"


def _answer(code: int, body: str | bytes) -> bytes:
    more = "Allow: GET\r\n" if code == 405 else ""
    content = body.encode() if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\nContent-Type: {_CONTENT_TYPE}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + content


def serve_metrics(
    address: str,
    call_soon: Callable[[Callable[[], None]], object],
    describe: Callable[[], _T],
    figures: Callable[[_T], Figures],
) -> MetricsServer:
    """Serve what runs in a loop at `[HOST:]PORT`, in threads of their own.

    `call_soon` runs `describe` in the loop; `figures` makes figures of what that returns, outside of it.
    Raises HeadraceError if nobody can listen there, ValueError if the address is none.
    """
    where = address_of(address)
    render = renderer(lambda: figures(asked(call_soon, describe)))
    return MetricsServer(where, render, lambda: asked(call_soon, lambda: True))

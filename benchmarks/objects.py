"""Reading from an object store in random order: headrace beside obstore's `get_ranges`.

    python -m benchmarks.objects --json build/bench/objects.json
    python -m benchmarks.objects --tail rare --samples 2000   # slow requests sent twice, or not

Serves one packed store from loopback, by moto's S3 server and by a bare web server whose own cost per
request is small, and reads whole epochs in the same random order: by a loader, and by obstore, which
gets the ranges of each batch and object (it coalesces them by its own rule), as many calls at once as
the loader has requests. Both touch each sample; only the loader checks it. Rounds alternate.

`--tail`: the bare server takes 30 ms for most requests; the loader reads with `hedge_s` of None and of `auto`.
`lognormal`: 200 ms for one in a hundred, as our simulated S3; `rare`: 2 s; `even`: 30 ms for all.

Read the ratios: server and client share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr
from benchmarks.processes import leaving_nothing

BUCKET = "bench"
DEPTH = 16
BATCH = 64
SEED = 7
MEDIAN_S, P99_S, RARE_S = 0.030, 0.200, 2.0
SIGMA = math.log(P99_S / MEDIAN_S) / 2.326
OPTIONS = {"region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}

MOTO = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class _Ranges(asyncio.Protocol):
    """A web server of ranges of files held in memory, as slow as it is told to be; nothing else."""

    def __init__(self, files: dict[bytes, bytes], tail: str | None) -> None:
        self.files = files
        self.tail = tail
        self.rest = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=1 << 26)

    def data_received(self, data: bytes) -> None:
        self.rest += data
        while b"\r\n\r\n" in self.rest:
            head, _, self.rest = self.rest.partition(b"\r\n\r\n")
            body = self.files[head.split(b" ", 2)[1].lstrip(b"/")]
            asked = re.search(rb"(?i)\r\nrange: *bytes=(\d+)-(\d+)", head)
            assert asked is not None
            first, last = int(asked[1]), min(int(asked[2]), len(body) - 1)
            reply = [
                b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n"
                b'Content-Range: bytes %d-%d/%d\r\nETag: "1"\r\n'
                b"Last-Modified: Sat, 21 Nov 2026 12:00:00 GMT\r\n\r\n"
                % (last + 1 - first, first, last, len(body)),
                memoryview(body)[first : last + 1],
            ]  # fmt: skip
            if self.tail is not None:
                after_s = MEDIAN_S
                if self.tail == "lognormal":
                    after_s *= math.exp(SIGMA * random.gauss(0.0, 1.0))
                elif self.tail == "rare" and random.random() < 0.01:
                    after_s = RARE_S
                asyncio.get_running_loop().call_later(after_s, self.transport.writelines, reply)
            else:
                self.transport.writelines(reply)


async def _serve(files: dict[bytes, bytes], tail: str | None) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: _Ranges(files, tail), "127.0.0.1", 0
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def make_samples(folder: Path, count: int, mean_bytes: int) -> None:
    """Writes samples of mean_bytes +- 30 percent."""
    random = np.random.default_rng(SEED)
    folder.mkdir()
    for i in range(count):
        size = int(mean_bytes * random.uniform(0.7, 1.3))
        (folder / f"{i:06d}.bin").write_bytes(random.bytes(size))


def by_headrace(url: str, options: dict[str, Any], expected: int) -> dict[str, float]:
    """One epoch by a loader, opening not counted."""
    with hr.open(url, storage_options=options | {"reads_in_flight": DEPTH}) as store:
        assert store.objects is not None
        before = store.objects.stats()
        began, cpu = time.perf_counter(), time.process_time()
        loader = hr.loader(store, BATCH, seed=SEED, tune=False, ram_bytes=0)
        samples = sum(len(batch.indices) for batch in loader)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        loader.close()
        did = store.objects.stats()
    assert samples == expected
    return {
        "samples_per_s": samples / seconds, "cpu_us_per_sample": cpu * 1e6 / samples,
        "requests": did.requests - before.requests, "fetched": did.bytes - before.bytes,
        "hedges": did.hedges - before.hedges, "hedges_won": did.hedges_won - before.hedges_won,
    }  # fmt: skip


def by_obstore(store: Any, client: Any, expected: int, coalesce: int | None) -> dict[str, float]:
    """The same epoch by get_ranges, a call for each batch and object."""
    import obstore

    order = hr.order_for(store, seed=SEED)
    segment = store.segments[0]
    calls: list[tuple[str, list[int], list[int]]] = []
    for at in range(0, expected, BATCH):
        indices = order.indices(0, at, min(at + BATCH, expected))
        found = segment.directory.extents_of(indices)
        parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for volume, offset, length in zip(
            found["volume"].tolist(), found["offset"].tolist(), found["length"].tolist(),
            strict=True,
        ):  # fmt: skip
            parts[volume].append((offset, length))
        for volume, ranges in parts.items():
            key = segment.volumes.paths[volume].split("/", 3)[3]
            calls.append((key, [o for o, _ in ranges], [n for _, n in ranges]))
    more = {} if coalesce is None else {"coalesce": coalesce}

    def get(call: tuple[str, list[int], list[int]]) -> int:
        key, starts, lengths = call
        return len(obstore.get_ranges(client, key, starts=starts, lengths=lengths, **more))

    began, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(DEPTH) as threads:
        samples = sum(threads.map(get, calls))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert samples == expected
    return {"samples_per_s": samples / seconds, "cpu_us_per_sample": cpu * 1e6 / samples}


def measure(
    name: str, url: str, options: dict[str, Any], client: Any, count: int, rounds: int
) -> dict[str, Any]:
    """Rounds of all readers in turn; medians, and the ratios to obstore as it comes."""
    with hr.open(url, storage_options=options) as store:
        wanted = store.nbytes
        readers = {
            "headrace": lambda: by_headrace(url, options, count),
            "obstore": lambda: by_obstore(store, client, count, None),
            "obstore, gaps to 128 KiB": lambda: by_obstore(store, client, count, 128 << 10),
        }
        figures: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(rounds):
            for reader, read in readers.items():
                figures[reader].append(read())
    result: dict[str, Any] = {"server": name, "samples": count, "bytes": wanted}
    for reader, each in figures.items():
        result[reader] = {key: statistics.median(f[key] for f in each) for key in each[0]}
        result[reader]["rounds"] = [round(f["samples_per_s"], 1) for f in each]
    mine = result["headrace"]
    mine["overshoot"] = mine["fetched"] / wanted
    mine["requests_per_sample"] = mine["requests"] / count
    for reader in list(readers)[1:]:
        result[f"headrace / {reader}"] = mine["samples_per_s"] / result[reader]["samples_per_s"]
    return result


def hedged(tail: str, url: str, count: int, rounds: int) -> dict[str, Any]:
    """Rounds without second requests and with them, in turn; medians, and the median of the rounds' ratios."""
    figures: dict[str, list[dict[str, float]]] = {"never": [], "auto": []}
    for at in range(rounds):
        for hedge in figures if at % 2 == 0 else reversed(figures):
            options = {"hedge_s": None if hedge == "never" else hedge}
            figures[hedge].append(by_headrace(url, options, count))
    pairs = zip(figures["never"], figures["auto"], strict=True)
    return {
        "server": f"web, {tail}", "samples": count,
        "auto / never": statistics.median(b["samples_per_s"] / a["samples_per_s"] for a, b in pairs),
        **figures,
    }  # fmt: skip


@leaving_nothing()
def main() -> int:
    """Runs the servers; prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--sample-bytes", type=int, default=110_000)
    parser.add_argument("--volume-bytes", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tail", choices=("lognormal", "rare", "even"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        files = {os.fsencode(path.name): path.read_bytes() for path in given.serve.iterdir()}
        asyncio.run(_serve(files, given.tail))
        return 0
    results = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        make_samples(folder / "source", given.samples, given.sample_bytes)
        hr.pack(folder / "source", folder / "x.hr", volume_bytes=given.volume_bytes)
        web = [sys.executable, __file__, "--serve", str(folder / "x.hr")]
        servers = {"web": web, "moto": [sys.executable, "-c", MOTO]}
        for name, command in (
            {"tail": [*web, "--tail", given.tail]} if given.tail else servers
        ).items():
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as server:
                assert server.stdout is not None
                endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
                if given.tail:
                    results.append(hedged(given.tail, endpoint, given.samples, given.rounds))
                else:
                    results.append(_on(name, endpoint, folder, given.samples, given.rounds))
                server.kill()
    text = json.dumps(results, indent=1)
    print(text)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n")
    return 0


def _on(name: str, endpoint: str, folder: Path, count: int, rounds: int) -> dict[str, Any]:
    from obstore.store import HTTPStore, S3Store

    if name == "web":
        client: Any = HTTPStore(f"{endpoint}/", client_options={"allow_http": True})
        return measure(name, endpoint, {}, client, count, rounds)
    import urllib.request

    options = OPTIONS | {"endpoint": endpoint}
    request = urllib.request.Request(
        f"{endpoint}/{BUCKET}", method="PUT",
        headers={"Authorization": "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/x"},
    )  # fmt: skip
    urllib.request.urlopen(request).close()
    url = f"s3://{BUCKET}/x.hr"
    hr.pack(folder / "source", url, storage_options=options, volume_bytes=4 << 20)
    client = S3Store(BUCKET, client_options={"allow_http": True}, **OPTIONS, endpoint=endpoint)
    return measure(name, url, options, client, count, rounds)


if __name__ == "__main__":
    sys.exit(main())

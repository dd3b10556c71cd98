"""tshark's dissector of NVMe/TCP reads what we say, and finds nothing wrong with it."""

import subprocess
from collections import Counter

import numpy as np
import pytest

from headrace.errors import FabricError
from headrace.fabric.command import LogPage
from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import Host, HostOptions, discover
from headrace.fabric.identity import HostIdentity
from peers.exporting import exporting
from peers.relay import Relay

HOST = HostIdentity("nqn.2026-11.io.example:host-a", bytes(range(1, 17)))

GOOD = "1"
ICREQ, ICRESP, CAPSULE_CMD, CAPSULE_RESP, C2H_DATA = 0, 1, 4, 5, 7


def fields(capture, *names, only=""):
    """A row for each packet that has one of the fields; each a list of values."""
    wanted = [word for name in names for word in ("-e", name)]
    options = ["-o", "nvme-tcp.check_hdgst:TRUE", "-o", "nvme-tcp.check_ddgst:TRUE"]
    if only:
        options += ["-Y", only]
    done = subprocess.run(
        ["tshark", *options, "-r", capture, "-T", "fields", *wanted, "-E", "separator=/t"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.strip()]
    return [[cell.split(",") if cell else [] for cell in row] for row in rows]


@pytest.mark.parametrize("hdgst", [False, True], ids=["", "hdgst"])
@pytest.mark.parametrize("ddgst", [False, True], ids=["", "ddgst"])
def test_what_we_say_is_well_formed(known, tmp_path, passed, hdgst, ddgst):
    path, _ = known
    capture = tmp_path / "capture.pcap"
    options = HostOptions(timeout_s=20, hdgst=hdgst, ddgst=ddgst)
    with exporting(path) as running:
        with Relay(("127.0.0.1", running.port), capture) as relay:
            address = ("127.0.0.1", relay.port)
            discover(address, HOST, options)
            with Host(address, running.nqn, HOST, options) as host:
                host.namespaces()
                host.log_page(LogPage.SMART, 512)
                with pytest.raises(FabricError):
                    host.log_page(LogPage.DISCOVERY, 1024)  # refused
            with pytest.raises(FabricError):
                Host(address, f"{running.nqn}-other", HOST, options)
            url = f"nvme+tcp://127.0.0.1:{relay.port}/{running.nqn}?ns=1"
            with FabricEngine(HOST, EngineOptions(host=options)) as fabric:
                fabric.open(url)
                random = np.random.default_rng(3)
                offsets = random.integers(0, 8 << 20, 100)
                lengths = random.integers(1, 200_000, 100)
                dest = np.zeros(lengths.sum(), np.uint8)
                found = fabric.read_many(url, offsets, lengths, dest)
                assert found.tolist() == lengths.tolist()
                commands = fabric.figures()["commands"]
        connections = relay.connections
    malformed = fields(capture, "frame.number", "_ws.expert.message", only="_ws.malformed")
    assert malformed == []
    said = {m for row in fields(capture, "_ws.expert.message") for m in row[0]}
    # TCP's, about connections that begin and end.
    assert {m for m in said if not m.startswith(("Connection ", "This frame "))} == set()
    types = Counter(t for row in fields(capture, "nvme-tcp.type") for t in row[0])
    assert types[str(ICREQ)] == types[str(ICRESP)] == connections
    assert types[str(CAPSULE_CMD)] >= commands
    assert set(types) == {str(t) for t in (ICREQ, ICRESP, CAPSULE_CMD, CAPSULE_RESP, C2H_DATA)}
    for name, on in (("hdgst", hdgst), ("ddgst", ddgst)):
        judged = [status for row in fields(capture, f"nvme-tcp.{name}.status") for status in row[0]]
        assert set(judged) == ({GOOD} if on else set())
    digests = [name for name, on in (("header", hdgst), ("data", ddgst)) if on]
    passed(
        f"tshark: {sum(types.values())} PDUs of {connections} connections, none malformed, no expert "
        f"information, digests: {' and '.join(digests) or 'none'}"
    )

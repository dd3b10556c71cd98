"""Our initiator against the Linux kernel's target (nvmet)."""

import threading

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FabricError
from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import Host, HostOptions, discover
from headrace.fabric.identity import HostIdentity
from headrace.fabric.pdu import DDGST, HDGST
from peers.nvmet import Nvmet
from peers.relay import Relay
from tests_shared import until

NQN = "nqn.2026-11.io.example:nvmet"
HOST = HostIdentity("nqn.2026-11.io.example:host-a", bytes(range(1, 17)))
OTHER = HostIdentity("nqn.2026-11.io.example:host-b", bytes(range(2, 18)))

SIZES = [
    1,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    65_536,
    131_072,
    131_073,
    1 << 20,
    (1 << 20) + 4097,
    3 << 20,
]


@pytest.fixture(scope="module")
def linux(debian):
    return Nvmet(debian, NQN, ["/dev/vdb", "/dev/vdc", "/dev/vdd"])


def engine(host=None, **options):
    made = HostOptions(**{"timeout_s": 20, **(host or {})})
    return FabricEngine(HOST, EngineOptions(host=made, **options))


def check(fabric, url, data, offsets, lengths, deadline_s=60.0):
    offsets, lengths = np.asarray(offsets), np.asarray(lengths)
    dest = np.zeros(lengths.sum(), np.uint8)
    assert fabric.read_many(url, offsets, lengths, dest, deadline_s).tolist() == lengths.tolist()
    wanted = np.concatenate([data[o : o + n] for o, n in zip(offsets, lengths, strict=True)])
    assert np.array_equal(dest, wanted)


def test_discovery_and_identity(linux, known, store_image, passed):
    assert NQN in [entry.subnqn for entry in discover(linux.address, HOST)]
    passed("discovery log names the subsystem")
    with Host(linux.address, NQN, HOST, HostOptions(timeout_s=20)) as host:
        assert host.controller.serial.strip() == "HEADRACETEST"
        assert host.controller.subnqn == NQN
        found = host.namespaces()
    assert {n: (i.blocks, i.block_bytes) for n, i in found.items()} == {
        1: (len(known[1]) // 512, 512),
        2: (len(known[1]) // 4096, 4096),
        3: (store_image.stat().st_size // 512, 512),
    }
    passed(
        f"connect, enable, identify: {host.controller.model.strip()}, 3 namespaces of 512 and 4096"
    )


# Each pair of digests and blocks is in four of the eight; the others are for `make test-slow`.
@pytest.mark.parametrize(
    ("hdgst", "ddgst", "nsid"),
    [
        pytest.param(
            hdgst, ddgst, nsid, id=f"{'hdgst' * hdgst}-{'ddgst' * ddgst}-{512 if nsid == 1 else 4096}",
            marks=() if (hdgst == ddgst) == (nsid == 1) else pytest.mark.slow,
        )
        for nsid in (1, 2)
        for hdgst in (False, True)
        for ddgst in (False, True)
    ],
)  # fmt: skip
def test_all_sizes_and_alignments(linux, known, passed, hdgst, ddgst, nsid):
    data = known[1]
    random = np.random.default_rng(7)
    edges = [
        (start + shift, size)
        for size in SIZES
        for start in (0, 1 << 20)
        for shift in (0, 1, 511, 512, 4095)
    ]
    edges += [(len(data) - size, size) for size in SIZES]
    some = random.integers(1, 200_000, 100)
    edges += [(int(random.integers(0, len(data) - n)), int(n)) for n in some]
    url = linux.url(nsid)
    with engine({"hdgst": hdgst, "ddgst": ddgst}) as fabric:
        fabric.open(url)
        (peer,) = fabric._peers.values()
        negotiated = (HDGST if hdgst else 0) | (DDGST if ddgst else 0)
        assert peer.host._admin.parameters.dgst == negotiated
        for at in range(0, len(edges), 40):
            check(fabric, url, data, *zip(*edges[at : at + 40], strict=True))
        figures = fabric.figures()
    assert figures["digest_errors"] == figures["failed"] == figures["lost_queues"] == 0
    digests = [name for name, on in (("header", hdgst), ("data", ddgst)) if on]
    block = 512 if nsid == 1 else 4096
    passed(
        f"{len(edges)} reads of 1 B to 3 MiB at all alignments, blocks of {block}, "
        f"digests: {' and '.join(digests) or 'none'}"
    )


def test_reads_behind_the_end_are_short(linux, known, passed):
    size = len(known[1])
    with engine() as fabric:
        fabric.open(linux.url())
        dest = np.zeros(3000, np.uint8)
        found = fabric.read_many(
            linux.url(), np.array([size - 100, size]), np.array([1000, 1000]), dest
        )
    assert found.tolist() == [100, 0]
    passed("reads at and behind the end are short")


def test_keep_alive_expiry(linux, known, passed):
    """The target hears nothing for longer than KATO and drops us; we connect again."""
    linux.guest.run("dmesg -c")
    with Relay(linux.address) as relay, engine({"kato_ms": 2000, "timeout_s": 3}) as fabric:
        url = linux.url(port=relay.port)
        fabric.open(url)
        check(fabric, url, known[1], [0], [4096])
        relay.hold()
        until(lambda: "expired" in linux.guest.kernel_log(), 30)
        relay.go_on()
        check(fabric, url, known[1], [5000], [100_000])
        assert fabric.figures()["reconnects"] >= 1
        said = [line for line in linux.guest.kernel_log().splitlines() if "expired" in line]
    passed(f"keep-alive expired at the target ({said[0].split('] ')[-1]}); connected anew, read on")


def test_idle_associations_live_on_keep_alives(linux, known, passed):
    linux.guest.run("dmesg -c")
    with engine({"kato_ms": 2000}) as fabric:
        fabric.open(linux.url())
        linux.guest.run("sleep 7")
        check(fabric, linux.url(), known[1], [0], [4096])
        assert fabric.figures()["reconnects"] == 0
    assert "expired" not in linux.guest.kernel_log()
    passed("7 s idle with a keep-alive timer of 2 s: the association lives")


def test_target_restart_with_reads_in_flight(linux, known, passed):
    data = known[1]
    random = np.random.default_rng(9)
    done, failures = [], []
    ends = threading.Event()
    with engine() as fabric:
        fabric.open(linux.url())

        def read():
            try:
                while not ends.is_set():
                    lengths = random.integers(1, 300_000, 64)
                    check(fabric, linux.url(), data, random.integers(0, 20 << 20, 64), lengths)
                    done.append(len(lengths))
            except BaseException as e:  # noqa: BLE001 - told below
                failures.append(e)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            until(lambda: done or failures, 60)
            for _ in range(2):
                linux.vanish()
                linux.guest.run("sleep 1")
                before, reads = fabric.figures()["reconnects"], len(done)
                linux.listen()
                until(lambda b=before: fabric.figures()["reconnects"] > b or failures, 60)
                until(lambda n=reads: len(done) > n + 1 or failures, 60)
        finally:
            ends.set()
            reader.join()
        assert not failures, failures
        figures = fabric.figures()
    assert figures["lost_queues"] >= 2
    assert figures["failed"] == 0
    assert figures["retried"] >= 1
    passed(
        f"target taken away twice in the middle of reads: {sum(done)} reads right, "
        f"{figures['retried']} commands read again, {figures['reconnects']} reconnects"
    )


def test_allow_list(linux, known, passed):
    linux.allow(HOST.nqn)
    try:
        with engine() as fabric:
            fabric.open(linux.url())
            check(fabric, linux.url(), known[1], [0], [4096])
        with pytest.raises(FabricError, match="connect invalid host"):
            Host(linux.address, NQN, OTHER, HostOptions(timeout_s=20))
    finally:
        linux.allow_all()
    passed("allow-list: the named host reads, another is refused with Connect Invalid Host")


def test_an_unknown_subsystem(linux, passed):
    with pytest.raises(FabricError, match="connect invalid parameters"):
        Host(linux.address, f"{NQN}-other", HOST, HostOptions(timeout_s=20))
    passed("a subsystem that there is not: Connect Invalid Parameters")


def test_a_store_on_a_namespace(linux, packed_photos, passed):
    with hr.open(packed_photos) as local, hr.open(linux.url(3)) as remote:
        assert list(remote.names) == list(local.names)
        order = np.random.default_rng(4).permutation(len(local))
        for i in order.tolist():
            assert bytes(remote.read(i)) == bytes(local.read(i))
    passed(f"headrace.open of a store on the guest's namespace: {len(order)} samples right")

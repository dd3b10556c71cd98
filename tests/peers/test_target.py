"""Our target against the Linux kernel's initiator and nvme-cli."""

import hashlib
import json
import os
import subprocess
import time

import numpy as np
import pytest

from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target
from peers.exporting import exporting
from peers.guest import GuestFailed
from peers.linux_host import LinuxHost

NQN = "nqn.2026-11.io.example:ours"
HOSTNQN = "nqn.2026-11.io.example:linux"
HOSTID = "11111111-2222-3333-4444-555555555555"

FIO_BYTES = 32 << 20
FIO = (
    f"--name=known --bs=64k --size={FIO_BYTES} --verify=crc32c --verify_interval=4096 --randseed=11"
)


@pytest.fixture(scope="module")
def linux(debian):
    host = LinuxHost(debian, HOSTNQN, HOSTID)
    yield host
    host.disconnect()


@pytest.fixture(scope="module")
def files(tmp_path_factory, known):
    """A file that fio wrote, an ext4 image of files, and random bytes that fill no last block."""
    folder = tmp_path_factory.mktemp("exported")
    written = folder / "fio"
    subprocess.run(
        ["fio", *FIO.split(), f"--filename={written}", "--rw=write", "--do_verify=0", "--thread"],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    tree = folder / "tree"
    random = np.random.default_rng(2)
    for i in range(40):
        path = tree / f"class{i % 4}/{i}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.bytes(int(random.integers(1, 200_000))))
    image = folder / "ext4"
    subprocess.run(
        ["mkfs.ext4", "-q", "-d", tree, image, "16M"],
        check=True, capture_output=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
    )  # fmt: skip
    odd = folder / "odd"
    odd.write_bytes(known[1][: (5 << 20) + 777].tobytes())
    return written, image, odd


@pytest.fixture(scope="module")
def export(files):
    with exporting(*files, "--nqn", NQN) as running:
        yield running


@pytest.fixture
def devices(linux, export):
    yield linux.connected(export.port, NQN, namespaces=3)
    linux.disconnect()


def test_discover(linux, export, passed):
    (found,) = linux.discover(export.port)
    assert (found["subnqn"], found["subtype"], found["trtype"]) == (NQN, "nvme subsystem", "tcp")
    assert found["trsvcid"] == str(export.port)
    passed("nvme discover names the subsystem")


def test_nvme_cli(linux, devices, passed, files):
    controller = linux.nvme("id-ctrl /dev/nvme0")
    assert controller["subnqn"] == NQN
    assert controller["mn"].strip() == "headrace"
    passed(f"nvme id-ctrl: {controller['mn'].strip()}, MDTS {controller['mdts']}")
    for nsid, path in enumerate(files, 1):
        namespace = linux.nvme(f"id-ns {devices[nsid]}")
        assert namespace["nsze"] == -(-path.stat().st_size // 512)
        assert namespace["nsattr"] & 1  # write protected
    passed("nvme id-ns: sizes of 3 namespaces, write protected")
    (listed,) = linux.nvme("list")["Devices"][:1]
    assert listed["ModelNumber"].strip() == "headrace"
    passed("nvme list")
    smart = linux.nvme("smart-log /dev/nvme0")
    assert smart["critical_warning"] in (0, 8)
    passed("nvme smart-log")
    assert linux.guest.run("nvme error-log /dev/nvme0 -e 1")
    passed("nvme error-log")
    described = linux.guest.run(f"nvme ns-descs {devices[1]}")
    assert "uuid" in described
    assert "nguid" in described
    passed("nvme ns-descs")
    supported = linux.guest.run("nvme supported-log-pages /dev/nvme0")
    assert "LID 0x2" in supported
    passed("nvme supported-log-pages")
    for feature in ("7", "0xb", "0xf"):
        assert "value" in linux.guest.run(f"nvme get-feature /dev/nvme0 -f {feature}").lower()
    passed("nvme get-feature: queues, asynchronous events, keep-alive timer")


@pytest.mark.parametrize(
    "options", ["", "--hdr-digest", "--data-digest", "--hdr-digest --data-digest"]
)
def test_bytes(linux, export, files, passed, options):
    devices = linux.connected(export.port, NQN, options, namespaces=3)
    try:
        for nsid, path in enumerate(files, 1):
            data = path.read_bytes()
            data += bytes(-len(data) % 512)
            found = linux.guest.run(f"sha256sum <{devices[nsid]}", timeout_s=120).split()[0]
            assert found == hashlib.sha256(data).hexdigest()
    finally:
        linux.disconnect()
    passed(f"all bytes of 3 namespaces, digests: {options or 'none'}")


def test_fio_verify(linux, devices, passed):
    for way in ("read", "randread"):
        said = linux.guest.run(
            f"fio {FIO} --filename={devices[1]} --rw={way} --readonly --thread --direct=1 "
            "--ioengine=libaio --iodepth=16 --output-format=json",
            timeout_s=120,
        )
        (job,) = json.loads(said[said.index("{") :])["jobs"]
        assert job["error"] == 0
        assert job["read"]["io_bytes"] == FIO_BYTES
    passed(f"fio --verify=crc32c reads {FIO_BYTES >> 20} MiB, sequential and random, depth 16")


def test_fio_verify_finds_what_is_wrong(linux, files, passed, tmp_path):
    """The check above can fail."""
    data = bytearray(files[0].read_bytes())
    data[5 << 20] ^= 1
    (tmp_path / "wrong").write_bytes(data)
    with exporting(tmp_path / "wrong") as running:
        device = linux.connected(running.port, running.nqn)[1]
        status, said = linux.guest.call(
            f"fio {FIO} --filename={device} --rw=read --readonly --thread --direct=1",
            timeout_s=120,
        )
        linux.disconnect()
    assert status
    assert "verify" in said
    passed("fio --verify finds one flipped bit")


def test_a_file_system(linux, devices, files, passed):
    image = devices[2]
    assert "clean" in linux.guest.run(f"e2fsck -n {image}")
    assert linux.guest.run(f"e2fsck -f -n {image}")
    linux.guest.run(f"mount -t ext4 -o ro,noload {image} /mnt")
    try:
        said = linux.guest.run("cd /mnt && find class* -type f | xargs sha256sum", timeout_s=120)
    finally:
        linux.guest.run("umount /mnt")
    found = {name: digest for digest, name in (line.split() for line in said.splitlines())}
    tree = files[1].with_name("tree")
    wanted = {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*.bin")
    }
    assert found == wanted
    passed(f"ext4 mounted read-only: fsck clean, checksums of {len(found)} files")


def test_writes_are_refused(linux, devices, files, passed):
    before = files[0].read_bytes()
    status, said = linux.guest.call(f"dd if=/dev/zero of={devices[1]} bs=4096 count=1 conv=fsync")
    assert status
    assert "not permitted" in said or "Read-only" in said
    passed(f"dd writes: {said.splitlines()[0]}")
    linux.guest.run("dd if=/dev/zero of=/tmp/zeros bs=512 count=1 2>/dev/null; dmesg -c >/dev/null")
    for command, what in (
        ("write {} --start-block=0 --block-count=0 --data-size=512 --data=/tmp/zeros", "Write"),
        ("write-zeroes {} --start-block=0 --block-count=0", "Write Zeroes"),
        ("dsm {} -n 1 -d -s 0 -b 1", "Dataset Management"),
    ):
        status, said = linux.guest.call(f"nvme {command.format(devices[1])}")
        assert status, what
        assert "Namespace is Write Protected" in said, (what, said)
        passed(f"nvme {what}: {said.partition(': The')[0]}")
    assert linux.guest.run(f"nvme flush {devices[1]}")
    passed("nvme flush")
    assert linux.guest.run(f"dd if={devices[1]} bs=4096 count=1 2>/dev/null | sha256sum").split()[
        0
    ] == (hashlib.sha256(before[:4096]).hexdigest())
    assert files[0].read_bytes() == before


def test_unsupported_commands_get_the_standard_status(linux, devices, passed):
    for command in (
        f"admin-passthru /dev/nvme0 --opcode=0x0d --namespace-id={1}",  # Namespace Management
        "admin-passthru /dev/nvme0 --opcode=0x80 --namespace-id=1",  # Format NVM
        f"io-passthru {devices[1]} --opcode=0x05 --namespace-id=1",  # Compare
    ):
        status, said = linux.guest.call(f"nvme {command}")
        assert status
        assert "INVALID_OPCODE" in said or "Invalid Command Opcode" in said or "0x1" in said, said
    assert linux.devices(3)  # nothing was lost by it
    passed("unsupported commands: Invalid Command Opcode, the controller lives")


def test_fio_through_a_crash_of_the_target(linux, export, devices, passed):
    guest = linux.guest
    fio = (
        f"fio {FIO} --filename={devices[1]} --rw=randread --readonly --thread --direct=1 "
        "--ioengine=libaio --iodepth=32 --verify_fatal=1 --output-format=json"
    )
    # One pass after the other: a pass that verifies reads each block once.
    guest.run(
        "rm -f /tmp/pass.* /tmp/stop; dmesg -c >/dev/null\n"
        f"(i=0; until [ -e /tmp/stop ]; do {fio} --output=/tmp/pass.$i || break; i=$((i+1)); done; "
        "touch /tmp/ended) >/tmp/fio.txt 2>&1 &"
    )
    guest.run("sleep 3")
    export.kill()
    guest.run("sleep 3")
    export.start()
    guest.run("sleep 3; touch /tmp/stop")
    end_s = time.monotonic() + 90
    while guest.call("[ -e /tmp/ended ]")[0]:
        if time.monotonic() > end_s:
            raise GuestFailed(f"fio does not end: {guest.kernel_log()[-3000:]}")
        time.sleep(0.5)
    jobs = []
    for name in guest.run("ls /tmp/pass.*").split():
        said = guest.run(f"cat {name}")
        jobs += json.loads(said[said.index("{") :])["jobs"]
    assert [job["error"] for job in jobs] == [0] * len(jobs), guest.run("cat /tmp/fio.txt")
    log = guest.kernel_log()
    assert "econnecting" in log  # it was gone
    assert "uccessfully reconnected" in log
    assert "I/O error" not in log
    longest_s = max(job["read"]["clat_ns"]["max"] for job in jobs) / 1e9
    assert longest_s > 1.5  # reads were in flight then
    count = sum(job["read"]["total_ios"] for job in jobs)
    passed(
        f"fio at depth 32 while the target was killed and started: {count} reads right, no error, "
        f"longest {longest_s:.1f} s"
    )


def test_only_named_hosts(linux, files, passed):
    with exporting(files[2], "--allow", HOSTNQN) as running:
        other = LinuxHost(
            linux.guest, "nqn.2026-11.io.example:other", "99999999-2222-3333-4444-555555555555"
        )
        status, _ = other.connect(running.port, running.nqn)
        assert status
        assert "nvme" in linux.guest.kernel_log()
        assert linux.connected(running.port, running.nqn)
        linux.disconnect()
    passed("allow-list: the named host connects, another is refused")


def test_namespaces_come_and_go(linux, files, passed):
    """Linux looks again when the event comes."""
    subsystem = Subsystem(f"{NQN}:changing")
    subsystem.add(files[2])
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        assert set(linux.connected(target.address[1], subsystem.nqn)) == {1}
        subsystem.add(files[0])
        assert set(linux.devices(2)) == {1, 2}
        subsystem.remove(1)
        assert set(linux.devices(1)) == {2}
        linux.disconnect()
    subsystem.close()
    passed("a namespace comes and one goes: Linux sees both by the asynchronous event")

"""DH-HMAC-CHAP between us and the Linux kernel, both ways, with keys that nvme-cli makes."""

import hashlib
import subprocess

import numpy as np
import pytest

from headrace.errors import AuthenticationFailed
from headrace.fabric.chap import DhGroup
from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import HostOptions
from headrace.fabric.identity import HostIdentity, HostSecret
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target, TargetOptions
from peers.exporting import exporting
from peers.linux_host import LinuxHost
from peers.nvmet import Nvmet

NQN = "nqn.2026-11.io.example:guarded"
HOST = HostIdentity("nqn.2026-11.io.example:host-a", bytes(range(1, 17)))
HOSTID = "11111111-2222-3333-4444-555555555555"


def key(nqn, transform):
    """As `nvme gen-dhchap-key` makes it: 0 as it is, 1 to 3 SHA-256, -384 and -512."""
    said = subprocess.run(
        ["nvme", "gen-dhchap-key", f"--hmac={transform}", f"--nqn={nqn}"],
        check=True, capture_output=True, text=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    return said.stdout.strip()


@pytest.fixture(scope="module")
def guest(boot, known):
    return boot("backports", [(known[0], 512)])


# -- our target, Linux's initiator -----------------------------------------------------------------


@pytest.fixture(scope="module")
def linux(guest):
    host = LinuxHost(guest, HOST.nqn, HOSTID)
    yield host
    host.disconnect()


def reads(linux, device, data):
    found = linux.guest.run(f"dd if={device} bs=64k count=32 2>/dev/null | sha256sum").split()[0]
    return found == hashlib.sha256(data[: 32 << 16].tobytes()).hexdigest()


def export(path, folder, *secrets):
    file = folder / "secrets"
    file.touch(0o600)
    file.write_text(" ".join((HOST.nqn, *secrets)) + "\n")
    return exporting(path, "--nqn", NQN, "--secrets", file)


@pytest.mark.parametrize("transform", [0, 1, 2, 3])
def test_linux_proves_itself_to_us(linux, known, tmp_path, passed, transform):
    path, data = known
    right = key(HOST.nqn, transform)
    with export(path, tmp_path, right) as running:
        devices = linux.connected(running.port, NQN, f"--dhchap-secret={right}")
        assert reads(linux, devices[1], data)
        linux.disconnect()
    passed(f"Linux authenticates to our target, key of transform {transform}")


def test_linux_is_refused_without_the_right_secret(linux, known, tmp_path, passed):
    with export(known[0], tmp_path, key(HOST.nqn, 1)) as running:
        for options, what in ((f"--dhchap-secret={key(HOST.nqn, 1)}", "a wrong"), ("", "no")):
            linux.guest.run("dmesg -c >/dev/null")
            status, _ = linux.connect(running.port, NQN, options)
            assert status
            assert linux.devices(0) == {}
            log = linux.guest.kernel_log()
            assert "uth" in log, log
            passed(f"Linux with {what} secret is refused by our target")


def test_linux_asks_us_for_a_proof_too(linux, known, tmp_path, passed):
    host, controller = key(HOST.nqn, 1), key(NQN, 2)
    with export(known[0], tmp_path, host, controller) as running:
        options = f"--dhchap-secret={host} --dhchap-ctrl-secret={controller}"
        devices = linux.connected(running.port, NQN, options)
        assert reads(linux, devices[1], known[1])
        linux.disconnect()
        passed("both ends authenticate: Linux's initiator, our target")
        wrong = f"--dhchap-secret={host} --dhchap-ctrl-secret={key(NQN, 2)}"
        status, _ = linux.connect(running.port, NQN, wrong)
        assert status
        assert linux.devices(0) == {}
    passed("Linux refuses our target with a wrong controller's secret")


@pytest.mark.parametrize("group", [DhGroup.NULL, DhGroup.FFDHE2048, DhGroup.FFDHE3072], ids=str)
def test_groups_against_linux_initiator(linux, known, passed, group):
    right = key(HOST.nqn, 1)
    subsystem = Subsystem(NQN, {HOST.nqn: HostSecret.read(right)})
    subsystem.add(known[0])
    with Target([subsystem], ("127.0.0.1", 0), TargetOptions(dhchap_groups=(group,))) as target:
        devices = linux.connected(target.address[1], NQN, f"--dhchap-secret={right}")
        assert reads(linux, devices[1], known[1])
        linux.disconnect()
    subsystem.close()
    passed(f"Linux authenticates to our target with group {group.name}")


# -- our initiator, Linux's target -----------------------------------------------------------------


@pytest.fixture(scope="module")
def nvmet(guest):
    return Nvmet(guest, "nqn.2026-11.io.example:nvmet", ["/dev/vdb"])


def read(nvmet, **options):
    made = EngineOptions(host=HostOptions(timeout_s=15, **options))
    with FabricEngine(HOST, made) as fabric:
        fabric.open(nvmet.url())
        dest = np.zeros(100_000, np.uint8)
        found = fabric.read_many(nvmet.url(), np.array([777]), np.array([len(dest)]), dest)
        assert found.tolist() == [len(dest)]
        return dest


@pytest.mark.parametrize(
    ("transform", "hmac", "group"),
    [
        (0, "sha256", "null"),
        (1, "sha256", "ffdhe2048"),
        (2, "sha384", "ffdhe3072"),
        (3, "sha512", "ffdhe4096"),
    ],
)
def test_we_prove_ourselves_to_linux(nvmet, known, passed, transform, hmac, group):
    right = key(HOST.nqn, transform)
    nvmet.allow(HOST.nqn, dhchap_key=right, dhchap_hash=f"hmac({hmac})", dhchap_dhgroup=group)
    try:
        found = read(nvmet, dhchap_secret=right)
        assert np.array_equal(found, known[1][777 : 777 + len(found)])
    finally:
        nvmet.allow_all()
    passed(f"we authenticate to Linux's target: {hmac}, {group}, key of transform {transform}")


def test_we_are_refused_without_the_right_secret(nvmet, passed):
    right, wrong = key(HOST.nqn, 1), key(HOST.nqn, 1)
    nvmet.allow(HOST.nqn, dhchap_key=right)
    try:
        with pytest.raises(AuthenticationFailed) as refused:
            read(nvmet, dhchap_secret=wrong)
        assert wrong not in str(refused.value)
        passed(f"Linux's target refuses a wrong secret: {refused.value.message}")
        with pytest.raises(AuthenticationFailed) as refused:
            read(nvmet)
        passed(f"Linux's target asks for a secret that we have not: {refused.value.message}")
    finally:
        nvmet.allow_all()


def test_we_ask_linux_for_a_proof_too(nvmet, known, passed):
    host, controller = key(HOST.nqn, 1), key(nvmet.nqn, 3)
    nvmet.allow(HOST.nqn, dhchap_key=host, dhchap_ctrl_key=controller, dhchap_dhgroup="ffdhe2048")
    try:
        found = read(nvmet, dhchap_secret=host, dhchap_controller_secret=controller)
        assert np.array_equal(found, known[1][777 : 777 + len(found)])
        passed("both ends authenticate: our initiator, Linux's target")
        with pytest.raises(AuthenticationFailed) as refused:
            read(nvmet, dhchap_secret=host, dhchap_controller_secret=key(nvmet.nqn, 3))
        passed(
            f"we refuse Linux's target with a wrong controller's secret: {refused.value.message}"
        )
    finally:
        nvmet.allow_all()

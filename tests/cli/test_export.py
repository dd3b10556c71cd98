"""`headrace export` in a process of its own, as it is run: it confines itself."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import AuthenticationFailed
from headrace.fabric.chap import DhGroup
from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import HostOptions, discover
from headrace.fabric.identity import Hash, HostIdentity, Secret

HOST = HostIdentity("nqn.2026-11.io.example:host-a", bytes(range(1, 17)))
OTHER = HostIdentity("nqn.2026-11.io.example:host-b", bytes(range(2, 18)))


def start(*arguments, listen="127.0.0.1:0"):
    program = [sys.executable, "-c", "from headrace.cli import main; main()"]
    command = [*program, "export", "--listen", listen, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _running.append(process)
    return process


_running: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _none_is_left():
    yield
    while _running:
        process = _running.pop()
        if process.returncode is None:
            process.kill()
            process.communicate()


def first_document(process):
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            return json.loads(text)["export"]
    raise AssertionError(process.communicate()[1])


def refusal(*arguments, listen="127.0.0.1:0"):
    process = start(*arguments, listen=listen)
    stdout, stderr = process.communicate(timeout=20)
    assert stdout == ""
    return process.returncode, stderr


def read(url, count, identity=HOST, **host):
    with FabricEngine(identity, EngineOptions(host=HostOptions(timeout_s=5, **host))) as fabric:
        fabric.open(url)
        dest = np.zeros(count, np.uint8)
        assert fabric.read_many(url, np.array([0]), np.array([count]), dest).tolist() == [count]
        return dest.tobytes()


@pytest.fixture
def files(tmp_path):
    (tmp_path / "one").write_bytes(os.urandom(70_000))
    (tmp_path / "two").write_bytes(os.urandom(512))
    return [tmp_path / "one", tmp_path / "two"]


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT])
def test_files_are_served_until_a_signal(files, ends):
    process = start(*files, "--json")
    exported = first_document(process)
    assert exported["pid"] == process.pid
    assert [n["bytes"] for n in exported["namespaces"]] == [70_000, 512]
    for namespace, path in zip(exported["namespaces"], files, strict=True):
        assert read(namespace["url"], namespace["bytes"]) == path.read_bytes()
    assert [e.subnqn for e in discover(tuple(exported["address"]), HOST)] == [exported["nqn"]]
    process.send_signal(ends)
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (0, "", "")


def test_a_store_is_opened_by_its_url(packed_photos):
    process = start(packed_photos, "--json")
    url = first_document(process)["url"]
    with hr.open(packed_photos) as local, hr.open(url) as remote:
        assert list(remote.names) == list(local.names)
        for i in range(len(local)):
            assert bytes(remote.read(i)) == bytes(local.read(i))
    process.terminate()
    assert process.communicate(timeout=20) == ("", "")


def test_one_line_says_where_and_how_confined(files):
    process = start(files[0])
    line = process.stdout.readline()
    assert line.startswith("nvme+tcp://127.0.0.1:")
    assert " exports 70 kB in 1 namespaces; confined: no new privileges" in line
    assert read(line.split(" ")[0], 512) == files[0].read_bytes()[:512]
    process.terminate()
    assert process.communicate(timeout=20)[1] == "served 1 reads, 512 B\n"


def test_the_walls_stand_unless_told_otherwise(files):
    for options, confined in (((), 1), (("--no-confine",), 0)):
        process = start(files[0], "--json", *options)
        exported = first_document(process)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.terminate()
        process.communicate(timeout=20)
        assert f"NoNewPrivs:\t{confined}\n" in status
        assert bool(exported["confinement"]) == confined


def test_the_name_stays_the_same_and_can_be_given(files):
    names = set()
    for _ in range(2):
        process = start(*files, "--json")
        names.add(first_document(process)["nqn"])
        process.terminate()
        process.communicate(timeout=20)
    assert len(names) == 1
    process = start(*files, "--json", "--nqn", "nqn.2026-11.io.example:mine")
    assert first_document(process)["nqn"] == "nqn.2026-11.io.example:mine"
    process.terminate()
    process.communicate(timeout=20)


def test_only_named_hosts_are_let_in(files):
    process = start(files[0], "--json", "--allow", HOST.nqn)
    exported = first_document(process)
    assert read(exported["url"], 512) == files[0].read_bytes()[:512]
    with pytest.raises(OSError, match="connect invalid host"):
        read(exported["url"], 512, OTHER)
    assert discover(tuple(exported["address"]), OTHER) == []
    process.terminate()
    process.communicate(timeout=20)


def test_hosts_of_the_file_of_secrets_authenticate(files, tmp_path):
    (_, host), (_, controller) = Secret.generate(), Secret.generate(Hash.SHA512)
    path = tmp_path / "secrets"
    path.touch(0o600)
    path.write_text(f"# two ways\n{HOST.nqn} {host} {controller}\n")
    process = start(files[0], "--json", "--secrets", path)
    exported = first_document(process)
    known = {"dhchap_secret": host, "dhchap_controller_secret": controller}
    assert read(exported["url"], 512, **known) == files[0].read_bytes()[:512]
    with pytest.raises(AuthenticationFailed):
        read(exported["url"], 512, dhchap_secret=Secret.generate()[1])
    with pytest.raises(AuthenticationFailed):
        read(exported["url"], 512)
    with pytest.raises(OSError, match="connect invalid host"):
        read(exported["url"], 512, OTHER)
    process.terminate()
    stdout, stderr = process.communicate(timeout=20)
    assert host not in stdout + stderr
    assert process.returncode == 0


def test_a_host_without_diffie_hellman_is_refused_where_it_is_required(files, tmp_path):
    _, secret = Secret.generate()
    path = tmp_path / "secrets"
    path.touch(0o600)
    path.write_text(f"{HOST.nqn} {secret}\n")
    for options, admitted in (([], True), (["--require-dh"], False)):
        process = start(files[0], "--json", "--secrets", path, *options)
        exported = first_document(process)
        weak = {"dhchap_secret": secret, "dhchap_groups": (DhGroup.NULL,)}
        assert read(exported["url"], 512, dhchap_secret=secret) == files[0].read_bytes()[:512]
        if admitted:
            assert read(exported["url"], 512, **weak) == files[0].read_bytes()[:512]
        else:
            with pytest.raises(AuthenticationFailed):
                read(exported["url"], 512, **weak)
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_another_users_idle_hosts_shut_nobody_out(files):
    """300 associations of another user, where 256 have room: a confined export still takes ours."""
    process = start(files[0], "--json")
    exported = first_document(process)
    code = (
        "import sys; from headrace.fabric.host import Host, HostOptions\n"
        "from headrace.fabric.identity import HostIdentity\n"
        "hosts = [Host((sys.argv[1], int(sys.argv[2])), sys.argv[3], HostIdentity(\n"
        "    f'nqn.2026-11.io.example:idle-{n}', bytes([1 + n // 255, 1 + n % 255]) * 8),\n"
        "    HostOptions(timeout_s=30, kato_ms=0)) for n in range(256)]\n"
        "print(len(hosts), flush=True); sys.stdin.read()"
    )
    address = [str(part) for part in exported["address"]]
    # The interpreter and the package lie where only root may look.
    change = "import os, sys, encodings.idna; import headrace.fabric.host; os.setgroups([]); os.setuid(65534)\n"
    other = subprocess.Popen(
        [sys.executable, "-c", change + code, *address, exported["nqn"]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout.readline() == "256\n"
        assert read(exported["url"], 512) == files[0].read_bytes()[:512]
    finally:
        other.communicate("", 60)
        process.terminate()
        process.communicate(timeout=20)


def test_digests_can_be_declined(files):
    process = start(files[0], "--json", "--no-digests")
    exported = first_document(process)
    assert read(exported["url"], 512) == files[0].read_bytes()[:512]
    process.terminate()
    process.communicate(timeout=20)


def test_what_cannot_be_exported_says_why(files, tmp_path):
    code, message = refusal(tmp_path / "missing")
    assert code == 3
    assert "missing cannot be exported: No such file or directory." in message
    code, message = refusal(files[0], "--nqn", "disk1")
    assert code == 2
    assert "'disk1' is no NQN, expected nqn.YYYY-MM." in message
    code, message = refusal(files[0], listen="localhost")
    assert code == 2
    assert "expected ADDR:PORT" in message
    code, message = refusal("/dev/null")
    assert code == 3
    assert "neither a file nor a block device" in message


def test_a_port_in_use_is_named(files):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, message = refusal(files[0], listen=f"127.0.0.1:{port}")
    assert code == 3
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in message
    assert "Choose another address or port" in message


def test_errors_come_as_json_too(tmp_path):
    process = start(tmp_path / "missing", "--json")
    stdout, _ = process.communicate(timeout=20)
    assert json.loads(stdout)["error"]["path"].endswith("missing")

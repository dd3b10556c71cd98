"""Several daemons at once, stale files, and clients that come, go and break off anywhere."""

import contextlib
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
from headrace.node import wire
from headrace.node.wire import Ask, Hello, Open, Release, StatusAsked, encode
from node.conftest import node_loader, report_of, seen, serving, until
from plane.conftest import SAMPLES
from tests_shared import opened_to_others

TESTS = Path(__file__).resolve().parents[1]

# Takes the folder as often as it can; whoever has it makes a file that must not be there yet.
RIVAL = """
import os, random, signal, sys
from pathlib import Path
from headrace.errors import NodeError
from headrace.runtime import RuntimeFolder
folder, proof, seed = RuntimeFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
rng = random.Random(seed)
won = lost = 0
print("there", flush=True)
sys.stdin.read(1)
while won < 40:
    try:
        claim = folder.claim()
    except NodeError:
        lost += 1
        continue
    os.close(os.open(proof, os.O_CREAT | os.O_EXCL))
    won += 1
    os.unlink(proof)
    if won == 20 and seed == 0:
        print(won, lost, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    claim.release()
print(won, lost)
"""


def test_many_daemons_at_once_and_never_two_rule(folder, tmp_path):
    """They come, end and are killed; whoever rules is alone."""
    proof = tmp_path / "proof"
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, folder.path, proof, str(k)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for k in range(4)
    ]  # fmt: skip
    assert [rival.stdout.readline() for rival in rivals] == ["there\n"] * 4
    for rival in rivals:  # all at once, when all are there
        rival.stdin.write("x")
        rival.stdin.flush()
    lost = 0
    for k, rival in enumerate(rivals):
        out, err = rival.communicate(timeout=100)
        assert rival.returncode == (-signal.SIGKILL if k == 0 else 0), err
        counted = [int(n) for n in out.split()]
        assert counted[0] == (20 if k == 0 else 40)
        lost += counted[1]
    assert lost > 0  # they met
    assert not proof.exists()
    with contextlib.suppress(FileNotFoundError):
        folder.claim().release()  # what the killed one left, if it was the last
    assert not folder.path.exists()


@pytest.mark.parametrize("stale", ["socket", "file", "folder of files", "lock of nobody"])
def test_stale_files_are_no_hindrance(folder, store, stale):
    folder.path.mkdir(mode=0o700)
    if stale == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(folder.socket))  # nobody listens
    elif stale == "file":
        folder.socket.write_text("no socket")
    elif stale == "lock of nobody":
        folder.lock.write_text("4194304\n")
    else:
        (folder.path / "node.log").write_text("old")
    alone = hr.loader(store, 32, seed=3)
    expected = seen(alone)
    alone.close()
    loader = node_loader(store)  # reads directly, whatever lies there
    assert seen(loader) == expected
    assert report_of(loader).node_batches == 0
    loader.close()
    with serving(folder):
        loader = node_loader(store)
        assert seen(loader) == expected
        assert report_of(loader).direct_batches == 0
        loader.close()


def conversation(store):
    """What a good client says, message by message."""
    indices = np.arange(20, dtype=np.int64).tobytes()
    return [
        encode(Hello(wire.PROTOCOL, "cut")),
        encode(Open(1, os.fsencode(store.path), 1, store.fingerprint, [""], None)),
        encode(StatusAsked(2)),
        encode(Ask(3, 1, indices, [])),
        encode(Release([3])),
    ]


def test_a_client_that_breaks_off_anywhere_costs_nothing(folder, store):
    """Every prefix of a conversation, then silence and a hang-up."""
    stream = b"".join(conversation(store))
    with serving(folder) as server:
        loader = node_loader(store)
        iterator = iter(loader)
        next(iterator)
        for cut in range(0, len(stream), 3):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(folder.socket))
                sock.sendall(stream[:cut])
        until(lambda: server.describe()["sessions_made"] > len(stream) // 3 > 50)
        until(lambda: len(server.describe()["sessions"]) == 1)
        assert sum(len(b) for b in iterator) == SAMPLES - 32
        assert report_of(loader).direct_batches == 0
        loader.close()
        until(lambda: not server.describe()["sessions"])
        until(lambda: not any(d["reading"] for d in server.describe()["datasets"]))
        until(lambda: not server.describe()["jobs"])  # a session leaves its job just after the list
        until(lambda: not any(d["jobs"] for d in server.describe()["datasets"]))


def test_a_recorded_conversation_played_to_a_new_connection_gets_its_own_answers(folder, store):
    """Replayed on the same connection it ends it, see test_hostile; nothing of it is remembered."""
    messages = conversation(store)
    with serving(folder) as server:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(10)
                sock.connect(str(folder.socket))
                splitter, kinds = wire.Splitter(), []
                sock.sendall(b"".join(messages[:3]))
                while kinds.count("Opened") < 1:
                    kinds += [_kind(b) for b in splitter.feed(sock.recv(1 << 16))]
                sock.sendall(messages[3])
                while kinds.count("Samples") < 1:
                    kinds += [_kind(b) for b in splitter.feed(sock.recv(1 << 16))]
                sock.sendall(messages[4] + messages[4])  # the lease comes back twice
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(1 << 16):
                        pass
        assert server.describe()["protocol_errors"] == 3


def _kind(body):
    return type(wire.decode_reply(body)).__name__


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_program_of_another_user_reads_directly(packed, folder, tmp_path_factory):
    """P14: a whole client, as nobody: it may not enter, and needs no daemon."""
    code = (
        "import json, os, sys\n"
        "import headrace as hr\n"
        "import headrace.node.reads, headrace.plane.loader\n"
        "from node.conftest import node_loader, report_of, seen\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"  # it need not be able to read us
        "store = hr.open(sys.argv[1])\n"
        "loader = node_loader(store)\n"
        "samples = sum(len(b[2]) for b in seen(loader))\n"
        "print(json.dumps([os.geteuid(), samples, report_of(loader).node_batches,"
        " report_of(loader).why]))"
    )
    with opened_to_others(packed, *packed.rglob("*")), serving(folder) as server:
        ended = subprocess.run(
            [sys.executable, "-c", code, packed], check=False, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS), "HOME": "/nonexistent"}, timeout=100,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        uid, samples, node_batches, why = json.loads(ended.stdout)
        assert (uid, samples, node_batches) == (65534, SAMPLES, 0)
        assert why
        assert server.describe()["sessions_made"] == 0  # the folder kept it out

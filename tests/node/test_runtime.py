"""The runtime folder: ours alone, and one daemon in it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import NodeError
from headrace.runtime import RuntimeFolder, runtime_folder


def test_it_is_where_the_environment_says(tmp_path):
    assert runtime_folder({"HEADRACE_RUNTIME_DIR": "/run/x"}).path == Path("/run/x")
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}).path == tmp_path / "headrace"
    ours = Path(f"/tmp/headrace-{os.geteuid()}")
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}).path == ours
    assert runtime_folder({}).path == ours


def test_a_claim_makes_it_private_and_leaves_nothing(folder):
    claim = folder.claim()
    assert folder.path.stat().st_mode & 0o7777 == 0o700
    assert folder.lock.read_text() == f"{os.getpid()}\n"
    claim.release()
    assert not folder.path.exists()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused(folder, mode):
    folder.path.mkdir()
    folder.path.chmod(mode)
    for use in (folder.check, folder.claim):
        with pytest.raises(NodeError, match=f"mode {mode:04o}"):
            use()


def test_a_symbolic_link_is_refused(folder):
    target = folder.path.with_name("elsewhere")
    target.mkdir(mode=0o700)
    folder.path.symlink_to(target)
    for use in (folder.check, folder.claim):
        with pytest.raises(NodeError, match="symbolic link"):
            use()
    folder.path.unlink()
    target.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused(folder):
    folder.path.mkdir(mode=0o700)
    os.chown(folder.path, 65534, 65534)
    for use in (folder.check, folder.claim):
        with pytest.raises(NodeError, match="user 65534"):
            use()


def test_a_lock_that_is_a_link_is_not_followed(folder, tmp_path):
    """Nor is what it points to emptied."""
    precious = tmp_path / "precious"
    precious.write_text("data")
    folder.path.mkdir(mode=0o700)
    folder.lock.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic"):
        folder.claim()
    assert precious.read_text() == "data"
    folder.lock.unlink()


def test_a_path_that_no_socket_can_have_is_refused(tmp_path):
    long = RuntimeFolder(tmp_path / ("x" * 120))
    with pytest.raises(NodeError, match="shorter path"):
        long.claim()


def test_one_claim_at_a_time(folder):
    claim = folder.claim()
    with pytest.raises(NodeError, match=f"process {os.getpid()}"):
        folder.claim()
    claim.release()
    folder.claim().release()


def test_the_socket_of_a_killed_daemon_is_replaced(folder):
    code = (
        "import os, signal, socket, sys\n"
        "from pathlib import Path\n"
        "from headrace.runtime import RuntimeFolder\n"
        "claim = RuntimeFolder(Path(sys.argv[1])).claim()\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(str(claim.folder.socket)); s.listen()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, folder.path], check=False, timeout=60)
    assert ended.returncode == -9
    assert folder.socket.is_socket()  # it is stale indeed
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(folder.socket))
    claim = folder.claim()
    assert claim.stale_socket
    assert not folder.socket.exists()
    claim.release()
    assert not folder.path.exists()

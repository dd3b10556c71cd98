"""Opening, creating, replacing and locking files that others may have made."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.base import files
from headrace.errors import VolumeError

if TYPE_CHECKING:
    from collections.abc import Callable

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def plant(kind: str, path: Path) -> None:
    """Something that is no file of ours, at a name where one is expected."""
    if kind == "link":
        path.symlink_to(path.parent / "victim")
    elif kind == "dangling":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


KINDS = ("link", "dangling", "fifo", "socket", "device", "folder")
OPENINGS: dict[str, Callable[[Path], object]] = {
    "open_file": files.open_file,
    "open to write": lambda path: files.open_file(path, os.O_RDWR),
    "read_file": lambda path: files.read_file(path, 10),
    "open_or_create": files.open_or_create,
    "within": lambda path: files.open_file(path.name, within=path.parent),
    "lock_path": files.lock_path,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opening", OPENINGS)
def test_what_is_no_file_is_refused_and_left_alone(tmp_path: Path, kind: str, opening: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    plant(kind, tmp_path / "name")
    if kind == "folder" and opening == "lock_path":
        return  # folders are locked, too
    with pytest.raises(VolumeError, match=r"name is (a|behind) .*expected a regular file"):
        OPENINGS[opening](tmp_path / "name")
    assert victim.read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["name", "victim"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_file_never_goes_through_what_is_there(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    plant(kind, tmp_path / "name")
    with pytest.raises(FileExistsError):
        files.create_file(tmp_path / "name")
    if kind == "folder":
        with pytest.raises(IsADirectoryError):
            files.replace_file(tmp_path / "name", b"new")
    else:
        files.replace_file(tmp_path / "name", b"new")  # the name is replaced, not what it led to
        assert (tmp_path / "name").read_bytes() == b"new"
        assert not (tmp_path / "name").is_symlink()
    assert victim.read_bytes() == b"mine"
    assert {p.name for p in tmp_path.iterdir()} == {"name", "victim"}


def test_folders_are_not_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(VolumeError, match="link is a symbolic link, expected a folder"):
        files.open_folder(tmp_path / "link")
    with pytest.raises(VolumeError, match="behind a symbolic link"):
        files.read_file("link/file", 10, within=tmp_path)
    assert files.read_file("real/file", 10, within=tmp_path) == b"x"
    assert files.read_file(tmp_path / "link/file", 10) == b"x"  # the user's own way


@pytest.mark.parametrize("name", ["../file", "real/../../file", "/etc/passwd", "", "real/.."])
def test_a_name_within_a_folder_does_not_lead_out_of_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "in/real").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError, match=r"expected a regular file|cross-device|Invalid"):
        files.read_file(name, 10, within=tmp_path / "in")


def openat2(folder: int, name: bytes, flags: int) -> int:
    """With RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS and RESOLVE_BENEATH."""
    how = (ctypes.c_uint64 * 3)(flags & ~os.O_NOFOLLOW, 0, 0x02 | 0x04 | 0x08)
    fd: int = ctypes.CDLL(None, use_errno=True).syscall(437, folder, name, how, ctypes.sizeof(how))
    if fd < 0:
        code = ctypes.get_errno()
        if code == errno.ENOSYS:
            pytest.skip("this kernel has no openat2")
        raise OSError(code, os.strerror(code))
    return fd


def outcome(
    opening: Callable[[int, bytes, int], int], folder: int, name: bytes, flags: int
) -> object:
    try:
        fd = opening(folder, name, flags)
    except OSError as e:
        return errno.errorcode[e.errno or 0]
    try:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    finally:
        os.close(fd)


def test_a_walk_over_components_opens_what_openat2_does(tmp_path: Path) -> None:
    """Every name of up to three components over a tree with everything in it."""
    (tmp_path / "d/d/d").mkdir(parents=True)
    (tmp_path / "d/f").write_bytes(b"")
    (tmp_path / "f").write_bytes(b"")
    for where in (tmp_path, tmp_path / "d", tmp_path / "d/d"):
        (where / "l").symlink_to("d")
        (where / "up").symlink_to("..")
        (where / "abs").symlink_to("/etc/passwd")
        (where / "loop").symlink_to("loop")
        os.mkfifo(where / "p")
    parts = [b"d", b"f", b"l", b"up", b"abs", b"loop", b"p", b"none", b".", b""]
    names = {b"/".join(c) for a in parts for b in parts for c in ((a,), (a, b))}
    names |= {name + b"/" + part for name in names for part in parts}
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    compared = opened = 0
    try:
        for name in sorted(n for n in names if n and not n.startswith(b"/")):
            for flags in (FLAGS, FLAGS | os.O_DIRECTORY, FLAGS | os.O_RDWR):
                flags |= os.O_NOFOLLOW  # noqa: PLW2901
                new = outcome(openat2, folder, name, flags)
                assert new == outcome(files._walk, folder, name, flags), (name, flags)
                compared += 1
                opened += isinstance(new, tuple)
    finally:
        os.close(folder)
    assert compared > 1000
    assert opened > 30


def test_a_swap_on_the_way_leads_nowhere_else(tmp_path: Path) -> None:
    """A folder that turns into a link and back while files in it are opened: the inside or an error."""
    (tmp_path / "in/d").mkdir(parents=True)
    (tmp_path / "in/d/f").write_bytes(b"in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/f").write_bytes(b"out")
    (tmp_path / "in/l").symlink_to("../out")
    program = (
        "import os, sys\n"
        "libc = __import__('ctypes').CDLL(None)\n"
        "print('on', flush=True)\n"
        "while True: libc.renameat2(-100, b'in/d', -100, b'in/l', 2)\n"
    )
    swapper = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE
    )
    read = refused = 0
    try:
        assert swapper.stdout is not None
        swapper.stdout.readline()
        folder = os.open(tmp_path / "in", os.O_PATH)
        for attempt in range(500_000):
            if attempt >= 2000 and read and refused:
                break
            try:
                fd = files._walk(folder, b"d/f", FLAGS)
            except OSError:
                refused += 1
                continue
            assert os.read(fd, 3) == b"in"
            os.close(fd)
            read += 1
        os.close(folder)
    finally:
        swapper.kill()
        swapper.communicate()
    assert read
    assert refused


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which root alone can")
def test_what_somebody_else_made_is_not_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"")
    os.chown(path, 12345, -1)
    os.close(files.open_file(path))
    for opening in (
        lambda: files.open_file(path, owned=True),
        lambda: files.open_or_create(path, owned=True),
        lambda: files.lock_path(path, owned=True),
    ):
        with pytest.raises(VolumeError, match="journal is of user 12345"):
            opening()
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(VolumeError, match="is of user 12345"):
        files.open_folder(tmp_path, owned=True)
    with pytest.raises(VolumeError, match="is of user 12345"):
        files.make_folder(tmp_path, exist_ok=True)


@pytest.mark.parametrize(("folder", "expected"), [(0o755, 0o644), (0o700, 0o600), (0o750, 0o640)])
def test_new_files_are_closed_to_those_who_cannot_enter(
    tmp_path: Path, folder: int, expected: int
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(folder)
    os.close(files.create_file(place / "created"))
    os.close(files.open_or_create(place / "opened"))
    files.replace_file(place / "replaced", b"")
    files.make_folder(place / "made")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in place.iterdir()}
    made = modes.pop("made")
    assert set(modes.values()) == {expected}
    assert made == folder & 0o755


def test_what_replaces_a_file_is_open_to_no_more_than_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o600)
    files.replace_file(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_readers_are_those_of_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    statuses = []
    for mode in (0o644, 0o640, 0o600):
        (tmp_path / "file").chmod(mode)
        statuses.append(((tmp_path / "file").stat().st_mode, os.getegid()))
    assert [files.readers([s]) for s in statuses] == [0o777, 0o770, 0o700]
    assert files.readers(statuses) == 0o700
    tmp_path.chmod(0o750)
    folder = tmp_path.stat().st_mode
    assert files.readers([(folder, os.getegid()), statuses[0]]) == 0o770
    assert files.readers([(folder, 12345)]) == 0o700  # a group that new files are not of


def test_a_failed_replacement_leaves_the_old_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    calls = 0

    def full(*_: object) -> int:
        nonlocal calls
        calls += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace_file(path, b"new")
    assert calls
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_writer_are_removed_alone(tmp_path: Path) -> None:
    new = files.NewFile(tmp_path / "file")
    os.close(new.fd)  # as a kill does
    new.fd = -1
    other = files.NewFile(tmp_path / "file")
    (tmp_path / ".mine.part").touch()
    files.remove_leftovers(tmp_path)
    assert {str(p) for p in tmp_path.iterdir()} == {other.temporary, str(tmp_path / ".mine.part")}
    other.discard()


def test_a_lock_is_exclusive_shared_and_signed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = files.lock_path(path, sign=True)
    assert held is not None
    assert files.locked_by(path) == str(os.getpid())
    assert files.lock_path(path) is None
    assert files.lock_path(path, shared=True, wait_s=0.05) is None
    os.close(held)
    one, two = files.lock_path(path, shared=True), files.lock_path(path, shared=True)
    assert one is not None
    assert two is not None
    assert files.lock_path(path) is None
    assert not files.lock(one)
    os.close(two)
    assert files.lock(one)
    os.close(one)
    folder = files.lock_path(tmp_path)
    assert folder is not None
    os.close(folder)
    with pytest.raises(FileNotFoundError):
        files.lock_path(tmp_path / "none", make=False)


def test_locks_exclude_each_other_while_holders_remove_the_file(tmp_path: Path) -> None:
    """Four processes take the lock, count up a file without atomicity, and remove the lock."""
    program = (
        "import os, sys\n"
        "from headrace.base import files\n"
        "for _ in range(40):\n"
        "    fd = files.lock_path('lock', wait_s=None)\n"
        "    n = int(open('count').read())\n"
        "    open('count', 'w').write(str(n + 1))\n"
        "    os.unlink('lock')\n"
        "    os.close(fd)\n"
    )
    (tmp_path / "count").write_text("0")
    running = [subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) for _ in range(4)]
    assert [p.wait(60) for p in running] == [0] * 4
    assert (tmp_path / "count").read_text() == "160"


def test_random_temporary_names_do_not_repeat(tmp_path: Path) -> None:
    random.seed(1)
    one = files.temporary_name(tmp_path / "x")
    random.seed(1)
    assert one != files.temporary_name(tmp_path / "x")


@pytest.mark.parametrize("given", ["", "state", "./state", None])
def test_a_state_folder_that_is_relative_is_ignored(given: str | None) -> None:
    """As the specification of XDG's folders has it: it would be another one wherever a program is started."""
    own = Path.home() / ".local/state/headrace"
    assert files.state_folder({} if given is None else {"XDG_STATE_HOME": given}) == own
    assert files.state_folder({"XDG_STATE_HOME": "/var/state"}) == Path("/var/state/headrace")

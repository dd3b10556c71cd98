"""The local disk tier: what is placed outlives kills, is checked before it is used, and never harms."""

import contextlib
import os
import signal
import subprocess

import pytest

from headrace.config import TierOptions
from headrace.errors import StoreError
from headrace.node.files.disk_copies import DiskCopies, DiskFolder
from node.conftest import serving, until
from node.files.conftest import bytes_of, copies_of, make_files, settle

ROW = (1, 2, 5, 4, 6)


@pytest.fixture
def disk(tmp_path):
    """A folder, and copies of one root in it."""
    folder = DiskFolder(str(tmp_path / "cache"), 1 << 20)
    copies = DiskCopies(folder, b"/data")
    yield copies
    with contextlib.suppress(OSError):
        copies.close()
    folder.close()


def reopened(disk):
    """The same, as the next daemon finds it after a kill."""
    disk._folder.used_bytes = 0
    return DiskCopies(disk._folder, b"/data")


def files_in(disk):
    return sorted(os.fsdecode(name) for _, _, names in os.walk(disk.path) for name in names)


def test_copies_are_found_again_and_checked(disk):
    strange = b"/data/\xff\n b"
    disk.write(b"/data/a", ROW, b"hello")
    disk.write(strange, (1, 3, 3, 4, 6), b"abc")
    disk.write(b"/data/gone", ROW, b"hello")
    disk.remove(b"/data/gone")
    again = reopened(disk)
    assert len(again) == 2
    assert again.find(b"/data/gone", ROW) is None
    assert again.find(strange, (1, 3, 3, 4, 6)) is not None
    copy = again.find(b"/data/a", (99, 2, 5, 4, 6))  # another device number
    assert not copy.checked
    assert again.check(copy)
    assert again.find(strange, (1, 3, 3, 4, 7)) is None  # changed, and its time set back
    assert again.find(b"/data/a", (1, 2, 5, 5, 6)) is None  # another time: it was changed
    assert len(again) == 0
    assert disk._folder.used_bytes == 0
    again.close()


def test_a_damaged_copy_is_noticed(disk):
    copy = disk.write(b"/data/a", ROW, b"hello")
    path = disk.path_of(copy)
    os.chmod(path, 0o600)
    with open(path, "r+b") as f:
        f.write(b"J")
    assert not disk.check(copy)
    os.truncate(path, 3)
    assert not disk.check(copy)
    os.unlink(path)
    assert not disk.check(copy)


def test_half_written_copies_do_no_harm(disk):
    copy = disk.write(b"/data/a", ROW, b"hello")
    with open(os.path.join(disk.path, b"tmp-3"), "wb") as f:
        f.write(b"half")
    again = reopened(disk)
    assert len(again) == again.removed == 1
    assert files_in(again) == [os.path.basename(copy.name).decode(), "files.json"]
    for number in range(4):
        again.write(b"/data/%d" % number, ROW, b"hello")
    third = reopened(again)
    assert len(third) == 5
    assert all(third.check(third.find(b"/data/%d" % number, ROW)) for number in range(4))
    third.close()


def test_what_a_daemon_with_a_journal_left_is_removed(disk):
    os.mkdir(os.path.join(disk.path, b"0"))
    for name in (b"journal", b"journal-new", b"0/1", b"0/4095"):
        with open(os.path.join(disk.path, name), "wb") as f:
            f.write(b"old")
    again = reopened(disk)
    assert again.removed == 4
    assert files_in(again) == ["files.json"]
    again.close()


def test_what_is_not_ours_is_never_removed(disk):
    os.mkdir(os.path.join(disk.path, b"0a"))
    disk.write(b"/data/a", ROW, b"hello")
    for name in (b"notes.txt", b"0a/readme", b"tmp-x", b"7x"):
        with open(os.path.join(disk.path, name), "wb") as f:
            f.write(b"precious")
    reopened(disk).close()
    assert {"notes.txt", "readme", "tmp-x", "7x"} < set(files_in(disk))


def test_a_folder_without_our_mark_is_refused(tmp_path, disk):
    other = DiskCopies(disk._folder, b"/other")
    other.write(b"/other/a", ROW, b"hello")
    other.close()
    os.unlink(os.path.join(other.path, b"files.json"))
    with pytest.raises(StoreError, match="no folder of copies"):
        DiskCopies(disk._folder, b"/other")


def test_a_copy_of_another_size_or_under_a_forged_name_is_not_used(disk):
    copy = disk.write(b"/data/a", ROW, b"hello")
    path = disk.path_of(copy)
    os.chmod(path, 0o600)
    os.truncate(path, 4)
    again = reopened(disk)
    assert again.find(b"/data/a", ROW) is None
    assert not os.path.exists(path)
    copy = again.write(b"/data/a", ROW, b"hello")
    os.rename(again.path_of(copy), again.path_of(copy)[:-8] + b"00000000")
    third = reopened(again)
    assert not third.check(third.find(b"/data/a", ROW))
    third.close()


def test_two_daemons_do_not_share_a_folder(tmp_path, disk):
    with pytest.raises(BlockingIOError):
        DiskFolder(str(tmp_path / "cache"))


def tiers(path, quota=None):
    return TierOptions(cache_dir=str(path), cache_bytes=quota, ram_bytes=1)


def test_what_memory_does_not_hold_goes_to_disk_within_its_quota(tmp_path, folder, program):
    make_files(tmp_path / "data", 60, 8000)
    settle()
    options = {"ram_bytes": 10 * 10_240, "tiers": tiers(tmp_path / "cache", 30 * 8192)}
    with serving(folder, **options) as server:
        program(tmp_path / "data", simulate="nfs").ready()
        copies = copies_of(server)
        until(lambda: len(copies) == 40)
        assert copies.held_bytes <= 10 * 10_240
        assert copies.disk_bytes == 30 * 8192
        for path in list(copies.by_path):
            with open(path, "rb") as f:
                assert bytes_of(copies.by_path.get(path), copies) == f.read()
        assert server.files.describe()["roots"][0]["disk_stopped"] == ""


def test_a_killed_daemons_copies_are_used_by_the_next_and_checked(
    tmp_path, folder, program, daemon
):
    """kill -9 while it places; one copy is damaged afterwards, and read again from the source."""
    paths = make_files(tmp_path / "data", 40, 8000)
    settle()
    options = {"ram_bytes": 0, "tiers": tiers(tmp_path / "cache")}
    first = daemon(limits="from headrace.config import TierOptions", **options)
    one = program(tmp_path / "data", simulate="nfs")
    one.ready()
    until(lambda: first.status()["files"]["roots"][0]["copies"] >= 20)
    first.end(signal.SIGKILL)
    assert first.process.returncode == -signal.SIGKILL
    (folder_of_root,) = (p for p in (tmp_path / "cache/files").iterdir() if p.is_dir())
    left = sorted(folder_of_root.glob("??/*"))
    assert len(left) >= 20
    left[3].chmod(0o600)
    left[3].write_bytes(b"J" * 8000)
    with serving(folder, **options) as server:
        program(tmp_path / "data", simulate="nfs").ready()
        copies = copies_of(server)
        until(lambda: len(copies) == 40)
        figures = copies.figures
        assert figures.damaged_files == 1
        assert figures.reused_files >= 19
        assert figures.source_files + figures.reused_files == 40
        for path in paths:
            assert bytes_of(copies.by_path.get(os.fsencode(path)), copies) == path.read_bytes()


def test_a_full_disk_is_said_and_stops_nothing(tmp_path, folder, program):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    paths = make_files(tmp_path / "data", 40, 8000)
    settle()
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(small)], check=False
    )
    if mounted.returncode:
        pytest.skip("no mount here")
    try:
        options = {"ram_bytes": 0, "tiers": tiers(small, 1 << 30)}
        with serving(folder, **options) as server:
            one = program(tmp_path / "data", simulate="nfs")
            one.ready()
            copies = copies_of(server)
            copies.disk.room = lambda: 1 << 30  # it was filled by others just now
            until(lambda: copies.disk_stopped)
            assert "No space left" in copies.disk_stopped
            assert 0 < len(copies) < 40
            # Others may be at it still.
            until(lambda: not [n for n in files_in(copies.disk) if n.startswith("tmp")])
            until(lambda: copies.figures.failures >= 1)  # counted after the disk is given up
            state = server.describe()["files"]["roots"][0]
            assert any("No space left" in text for text in state["errors"])
            for path in list(copies.by_path):
                with open(path, "rb") as f:
                    assert bytes_of(copies.by_path.get(path), copies) == f.read()
        assert len(paths) == 40
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)

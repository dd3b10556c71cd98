"""What goes wrong under a mount: an error that says so, in time, and nothing left behind."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import MountError, SampleNotFound, SourceChanged, StoreNotFound
from headrace.posix.mount import MountOptions, mount, process, unmount
from tests_shared import until

LARGE = 9 << 20


def items(seed: int = 1, count: int = 40):
    noise = random.Random(seed)
    for i in range(count):
        yield f"c{i % 4}/{i:03d}.bin", noise.randbytes(1000 + i), i % 4
    yield "large.bin", noise.randbytes(LARGE), 0


@pytest.fixture
def store(tmp_path) -> Path:
    hr.pack(items, tmp_path / "store.hr")
    return tmp_path / "store.hr"


def flip(store: Path, name: str, at: int = 17) -> None:
    """Flips one bit of a sample, in the volume where it lies."""
    with hr.open(store) as opened:
        index = opened.find(name)
        segment = opened.segment_of(index)
        extent = segment.extents(index)[0]
        volume = store / segment.entry.volumes[extent.volume].path
        good = bytes(opened.read(index))
    with volume.open("r+b") as f:
        f.seek(extent.offset + at)
        byte = f.read(1)
        assert byte == good[at : at + 1]
        f.seek(extent.offset + at)
        f.write(bytes([byte[0] ^ 4]))


def log_of(folder: Path) -> str:
    return os.getxattr(folder, "user.headrace.log").decode()


def error_of(call, *arguments) -> int | None:
    try:
        call(*arguments)
    except OSError as e:
        return e.errno
    return None


def test_a_flipped_bit_is_an_error_of_that_file_alone(store, mounts):
    flip(store, "c1/005.bin")
    folder = mounts(store)
    good = {name: data for name, data, _ in items()}
    for name, data in good.items():
        if name == "c1/005.bin":
            assert error_of((folder / name).read_bytes) == errno.EIO
        else:
            assert (folder / name).read_bytes() == data
    assert "c1/005.bin" in log_of(folder)
    assert log_of(folder).count("c1/005.bin") == 1  # though it was asked for again and again


@pytest.mark.parametrize("at", [0, 5 << 20, LARGE - 1])
def test_a_flipped_bit_of_a_large_sample_stops_all_of_it(store, mounts, at):
    """No range of it is delivered, not even one far from the bad bit: only the whole is known."""
    flip(store, "large.bin", at)
    folder = mounts(store)
    with (folder / "large.bin").open("rb", buffering=0) as f:
        assert error_of(os.pread, f.fileno(), 100, 1 << 20) == errno.EIO
        assert error_of(os.pread, f.fileno(), 100, at) == errno.EIO
    assert "large.bin" in log_of(folder)


def test_a_large_sample_that_changes_while_mounted_is_noticed(store, mounts):
    folder = mounts(store)
    data = {name: data for name, data, _ in items()}["large.bin"]
    fd = os.open(folder / "large.bin", os.O_RDONLY)
    try:
        assert os.pread(fd, 5000, 6 << 20) == data[6 << 20 :][:5000]
        flip(store, "large.bin", 1 << 20)
        assert error_of(os.pread, fd, 5000, 1 << 20) == errno.EIO
        assert os.pread(fd, 5000, 7 << 20) == data[7 << 20 :][:5000]  # its other blocks are good
    finally:
        os.close(fd)


def test_above_the_limit_it_is_delivered_unchecked_and_said(store, mounts):
    flip(store, "large.bin", 0)
    folder = mounts(store, check_bytes_max=8 << 20)
    assert len((folder / "large.bin").read_bytes()) == LARGE
    assert "unchecked" in log_of(folder)


def test_a_volume_that_disappears_is_an_error(tmp_path, mounts):
    source = tmp_path / "source"
    source.mkdir()
    for i in range(3):
        (source / f"{i}.bin").write_bytes(bytes([i]) * 100)
    hr.index(source, tmp_path / "index.hr")
    folder = mounts(tmp_path / "index.hr")
    (source / "1.bin").unlink()
    (source / "2.bin").write_bytes(b"other bytes")
    assert (folder / "0.bin").read_bytes() == b"\0" * 100
    assert error_of((folder / "1.bin").read_bytes) == errno.EIO
    assert error_of((folder / "2.bin").read_bytes) == errno.EIO
    assert "1.bin" in log_of(folder)
    assert "2.bin" in log_of(folder)


READER = """
import os, sys
paths = [os.path.join(d, n) for d, _, names in os.walk(sys.argv[1]) for n in names]
print("reads", flush=True)
while True:
    for p in paths:
        try:
            fd = os.open(p, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.read(fd, 100)
            os.close(fd)
        except OSError as e:
            print(e.errno, flush=True)
            sys.exit(3)
"""


def reader_of(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "reads\n"
    return process


def kill(mounts) -> None:
    pid = mounts.states[-1].pid
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: mounts.gone(pid), 10.0)


def test_a_killed_mount_gives_its_readers_an_error_and_is_cleaned_up(store, mounts):
    folder = mounts(store)
    with reader_of(folder) as reader:
        kill(mounts)
        assert reader.wait(10) == 3
        number = int(reader.stdout.read())
    assert number in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    assert error_of(os.statvfs, folder) == errno.ENOTCONN
    assert str(folder) in mounts.table()
    assert unmount(str(folder)) == str(folder)
    assert str(folder) not in mounts.table()
    assert os.listdir(folder) == []


def test_a_new_mount_replaces_one_that_was_killed(store, mounts):
    folder = mounts(store)
    fd = os.open(folder / "c0/000.bin", os.O_RDONLY)  # and which is in use
    kill(mounts)
    # The device is closed with the last of its threads.
    assert until(lambda: error_of(os.statvfs, folder) == errno.ENOTCONN, 10.0)
    mounts(store, folder)
    error_of(os.close, fd)
    assert (folder / "c0/000.bin").stat().st_size == 1000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_mount(store, mounts, number):
    folder = mounts(store)
    pid = mounts.states[-1].pid
    os.kill(pid, number)
    assert until(lambda: mounts.gone(pid), 10.0)
    assert str(folder) not in mounts.table()
    assert os.listdir(folder) == []


def test_a_signal_ends_a_mount_that_is_in_use(store, mounts):
    folder = mounts(store)
    fd = os.open(folder / "c0/000.bin", os.O_RDONLY)
    os.kill(mounts.states[-1].pid, signal.SIGTERM)
    assert until(lambda: mounts.gone(mounts.states[-1].pid), 10.0)
    assert str(folder) not in mounts.table()
    assert error_of(os.read, fd, 10) in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    error_of(os.close, fd)


def test_unmounting_ends_the_process(store, mounts):
    folder = mounts(store)
    unmount(str(folder))
    assert until(lambda: mounts.gone(mounts.states[-1].pid), 10.0)


def test_a_mount_in_use_is_not_unmounted_unless_asked(store, mounts):
    folder = mounts(store)
    with (folder / "c0/000.bin").open("rb", buffering=0) as f:
        with pytest.raises(MountError, match=f"busy.*{os.getpid()}.*--lazy") as caught:
            unmount(str(folder))
        assert caught.value.errno == errno.EBUSY
        assert str(folder) in mounts.table()
        unmount(str(folder), lazy=True)
        assert str(folder) not in mounts.table()
        assert len(f.read()) == 1000  # who has it open goes on
        assert not mounts.gone(mounts.states[-1].pid)
    assert until(lambda: mounts.gone(mounts.states[-1].pid), 10.0)


def test_a_stopped_process_does_not_keep_a_mount_from_being_unmounted(store, mounts):
    folder = mounts(store)
    pid = mounts.states[-1].pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    unmount(str(folder))
    assert time.monotonic() - started < 10.0
    assert str(folder) not in mounts.table()
    os.kill(pid, signal.SIGCONT)
    assert until(lambda: mounts.gone(pid), 10.0)


@pytest.mark.slow
def test_a_stopped_process_lets_its_readers_wait_no_longer_than_the_timeout(store, mounts):
    """The kernel looks every 15 s. Only kernels from 6.15 on know this timeout."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15):
        pytest.skip("the kernel knows no timeout of FUSE requests")
    folder = mounts(store, timeout_s=5)
    os.kill(mounts.states[-1].pid, signal.SIGSTOP)
    started = time.monotonic()
    number = error_of((folder / "c0/000.bin").read_bytes)
    assert 1.0 < time.monotonic() - started < 50.0
    assert number in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)


def test_a_slow_read_holds_nobody_else_up(tmp_path, mounts):
    """A sample that takes long is read beside others, not before them."""
    hr.pack(lambda: [("large.bin", os.urandom(300 << 20)), ("small.bin", b"x")], tmp_path / "s.hr")
    took: list[float] = []

    def large(path: Path) -> None:
        started = time.monotonic()
        with path.open("rb", buffering=0) as f:
            f.read(1)
        took.append(time.monotonic() - started)

    def meanwhile() -> int:
        """How many small requests were answered while the large sample was read."""
        folder = mounts(tmp_path / "s.hr")
        thread = threading.Thread(target=large, args=(folder / "large.bin",))
        thread.start()
        small = 0
        while thread.is_alive():
            assert error_of(os.stat, folder / f"nothing-{small}") == errno.ENOENT
            small += 1
        thread.join()
        return small

    # 0 or 1 each time, if it went first; once this process may have had no turn.
    assert any(meanwhile() > 3 for _ in range(4)), took


def test_two_mounts_of_one_store(store, mounts):
    one, two = mounts(store), mounts(store)
    assert (one / "c1/001.bin").read_bytes() == (two / "c1/001.bin").read_bytes()
    unmount(str(one))
    assert sorted(os.listdir(two)) == ["c0", "c1", "c2", "c3", "large.bin"]


def test_a_mount_keeps_its_snapshot_when_the_store_is_published_again(store, mounts):
    folder = mounts(store)
    before = (folder / "c0/000.bin").read_bytes()
    hr.pack(lambda: items(2, 8), store, overwrite=True)
    assert (folder / "c0/000.bin").read_bytes() == before
    assert (folder / "c3/039.bin").read_bytes() == list(items())[39][1]  # not read before
    assert len(os.listdir(folder / "c0")) == 10
    new = mounts(store)
    assert (new / "c0/000.bin").read_bytes() == next(items(2, 8))[1] != before
    assert len(os.listdir(new / "c0")) == 2


def test_samples_that_are_appended_are_seen_by_the_next_mount(store, mounts):
    folder = mounts(store)
    hr.append(lambda: [("c0/new.bin", b"new", 0), ("d/new.bin", b"newer", 0)], store)
    assert not (folder / "c0/new.bin").exists()
    new = mounts(store)
    assert (new / "c0/new.bin").read_bytes() == b"new"
    assert (new / "d/new.bin").read_bytes() == b"newer"
    assert len(os.listdir(new / "c0")) == 11
    assert sorted(os.listdir(new)) == ["c0", "c1", "c2", "c3", "d", "large.bin"]


# -- what cannot be mounted -------------------------------------------------------------------------


def test_a_folder_that_is_not_empty_is_refused(store, mounts, tmp_path):
    folder = mounts.folder()
    (folder / "precious.txt").write_text("here")
    with pytest.raises(MountError, match=r"not empty.*precious\.txt"):
        mounts(store, folder)
    assert (folder / "precious.txt").read_text() == "here"


def test_a_folder_that_is_missing_or_a_file_is_refused(store, mounts, tmp_path):
    with pytest.raises(MountError, match=r"no such folder.*mkdir"):
        mounts(store, tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(MountError, match="is a file"):
        mounts(store, tmp_path / "file")


def test_a_folder_that_shows_a_store_already_is_refused(store, mounts):
    folder = mounts(store)
    with pytest.raises(MountError, match=r"store\.hr \(fuse\.headrace\) is mounted here already"):
        mounts(store, folder)
    assert len(os.listdir(folder)) == 5


def test_a_store_that_is_missing_or_damaged_is_said_by_its_own_error(store, mounts, tmp_path):
    folder = mounts.folder()
    with pytest.raises(StoreNotFound, match="there is no store"):
        mounts(tmp_path / "no.hr", folder)
    (store / "store.json").write_bytes(b"{}")
    with pytest.raises(hr.errors.HeadraceError, match=r"store\.json"):
        mounts(store, folder)
    assert os.listdir(folder) == []


def test_only_what_is_ours_is_unmounted(tmp_path):
    for folder in (tmp_path, Path("/proc")):
        with pytest.raises(MountError, match="expected a store mounted by headrace"):
            unmount(str(folder))


def test_without_fusermount3_it_says_what_to_install(store, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "dir").mkdir()
    with pytest.raises(MountError, match=r"fusermount3 is missing.*apt install fuse3"):
        mount(str(store), str(tmp_path / "dir"), MountOptions())


def test_without_the_device_it_says_so(fuse, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(MountError, match=r"no FUSE.*--device /dev/fuse"):
        process.attach(str(tmp_path), "store")


# In one process, because another user may be able to run this Python, but not to start it anew.
AS_NOBODY = """
import errno, os, sys, threading
from headrace.errors import MountError
from headrace.posix.mount import MountOptions, serve, unmount
store, folder = sys.argv[1:]

def look():
    try:
        assert len(os.listdir(folder)) == 5
        with open(folder + "/c1/001.bin", "rb", buffering=0) as f:
            assert len(f.read()) == 1001
        status = os.stat(folder + "/c1/001.bin")
        assert (status.st_uid, status.st_gid) == (65534, 65534)
        print("seen")
    finally:
        unmount(folder)

try:
    serve(store, folder, MountOptions(), lambda _: threading.Thread(target=look).start())
except MountError as e:
    print(e)
    sys.exit(5)
assert os.listdir(folder) == []
try:
    serve(store, folder, MountOptions(allow_other=True))
except MountError as e:
    assert "user_allow_other" in str(e), e
else:
    sys.exit(6)
print("done")
"""

NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups"


@pytest.fixture
def nobodys(store):
    """A store and an empty folder that nobody can use, and how to run Python as nobody."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becomes another user, which needs root and setpriv")
    import tempfile

    with tempfile.TemporaryDirectory(dir="/var/tmp") as base:
        shutil.copytree(store, Path(base) / "store.hr")
        (Path(base) / "view").mkdir()
        subprocess.run(["chown", "-R", "65534:65534", base], check=True)
        python = f"exec {NOBODY} {sys.executable} -c"
        if subprocess.run(
            ["sh", "-c", f"{python} 'import headrace.posix.mount'"], check=False
        ).returncode:
            pytest.skip("nobody cannot import headrace here")
        yield Path(base), python


def test_another_user_mounts(fuse, nobodys):
    """With a device of its own, as most systems have it: the test's mounts are seen by itself alone."""
    base, python = nobodys
    script = (
        f"mount --make-rprivate / && mknod -m 666 {base}/fuse c 10 229 && "
        f'mount --bind {base}/fuse /dev/fuse && {python} "$AS_NOBODY" {base}/store.hr {base}/view'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False,
        env=os.environ | {"AS_NOBODY": AS_NOBODY},
    )  # fmt: skip
    if "unshare" in done.stderr or "mknod" in done.stderr or "nodev" in done.stdout:
        pytest.skip(f"no device can be made here: {done.stderr}")
    assert done.stdout == "seen\ndone\n", done.stdout + done.stderr


def test_another_user_without_the_right_to_the_device_is_told(fuse, nobodys):
    if os.stat("/dev/fuse").st_mode & 0o006:
        pytest.skip("all users may use /dev/fuse here")
    base, python = nobodys
    done = subprocess.run(
        ["sh", "-c", f'{python} "$AS_NOBODY" {base}/store.hr {base}/view'],
        capture_output=True, text=True, check=False, env=os.environ | {"AS_NOBODY": AS_NOBODY},
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert "/dev/fuse: Permission denied" in done.stdout
    assert "mode 0666" in done.stdout


def test_options_are_checked():
    for wrong in ({"threads": 0}, {"kept_bytes": -1}, {"timeout_s": 0}, {"timeout_s": 70_000}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MountOptions(**wrong)


def test_errors_keep_their_class_and_fields_on_their_way_from_the_child():
    from headrace.posix.mount.process import _mount_of

    for kind in (MountError, SampleNotFound, SourceChanged):
        answer = b'{"error": {"type": "%s", "message": "m", "path": "p", "next_step": "n"}}'
        with pytest.raises(kind) as caught:
            _mount_of(answer % kind.__name__.encode(), b"", "folder")
        assert (caught.value.path, str(caught.value)) == ("p", "m n")
    with pytest.raises(MountError, match="did not come up: last words"):
        _mount_of(b"", b"first\nlast words\n", "folder")

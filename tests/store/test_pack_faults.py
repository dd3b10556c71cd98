"""Packing when everything goes wrong: kills, full disks, rivals, sources that change."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.errors import (
    HeadraceError,
    SourceChanged,
    SourceError,
    StoreError,
    StoreExists,
    StoreNotFound,
    VolumeError,
)
from headrace.store import open_store, segment_writer
from headrace.store.pack import append, index, pack
from headrace.store.packing import PackOptions
from headrace.store.segment_writer import JOURNAL_SECONDS
from headrace.store.sources import extents
from headrace.store.verify import verify
from tests_shared import until

from .conftest import contents, flip, make_folder
from .packer import OPTIONS, items
from .test_pack import files_of

PACKER = Path(__file__).with_name("packer.py")
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def packer():
    """Runs one pack in a process of its own, which may be told to die; gives its exit code."""
    process = subprocess.Popen(
        [sys.executable, str(PACKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(source, target, kind="none", n=0, what="pack") -> int:
        process.stdin.write(f"{what} {source} {target} {kind} {n}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield run
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


# Every kind of step that packing makes, from its first to beyond its last.
DEATHS = [
    *[("pwrite", n) for n in (1, 2, 3, 5, 8, 13, 17, 20, 23, 26, 30, 34)],
    *[("fdatasync", n) for n in (1, 2, 3, 4, 6, 8, 10)],
    *[("fsync", n) for n in (1, 2, 3, 4, 5, 6)],
    *[("ftruncate", n) for n in (1, 2, 3, 4, 6)],
    ("renameat2", 1),
]


@pytest.mark.parametrize("source", ["folder", "iterable"])
def test_a_killed_pack_resumes_to_the_same_bytes(folder, tmp_path, packer, source):
    root, want = folder
    what = root if source == "folder" else "ITEMS"
    want = want if source == "folder" else {n: d for n, d, _ in items()}
    assert packer(what, tmp_path / "whole.hr") == 0
    whole = files_of(tmp_path / "whole.hr")
    kills = mid_pack = resumed = 0
    for kind, n in DEATHS if source == "folder" else DEATHS[1::3]:
        target = tmp_path / f"{kind}{n}.hr"
        code = packer(what, target, kind, n)
        assert code in (0, KILLED)
        if code == KILLED:
            kills += 1
            # Before the rename nothing stands at the target; never something half.
            with pytest.raises(StoreNotFound):
                open_store(target)
            mid_pack += (tmp_path / f"{target.name}.partial").is_dir()
            report = pack(root if source == "folder" else items, target, options=OPTIONS)
            resumed += report.resumed_samples > 0
        assert files_of(target) == whole
        with open_store(target) as store:
            assert contents(store) == want
        assert not (tmp_path / f"{target.name}.partial").exists()
        shutil.rmtree(target)
    least = 20 if source == "folder" else 6
    assert kills >= least
    assert mid_pack >= least
    assert resumed >= least // 3


def test_killed_again_and_again(folder, tmp_path, packer):
    """A pack that dies at every attempt, each time a little later, still arrives."""
    root, _ = folder
    packer(root, tmp_path / "whole.hr")
    target = tmp_path / "out.hr"
    kills = 0
    for n in range(3, 40):
        code = packer(root, target, "pwrite", n)
        if code == 0:
            break
        assert code == KILLED
        kills += 1
    assert kills >= 3
    assert files_of(target) == files_of(tmp_path / "whole.hr")


def test_kills_at_random_times(tmp_path):
    """SIGKILL from outside, whenever it hits: from the first file on, and before all is published."""
    make_folder(tmp_path / "root", classes=4, files=60, size=4000)
    r = random.Random(11)
    mid_pack = 0
    # However late the kill comes, it is not published yet.
    slow = (
        "import sys, time, os; sys.path.insert(0, sys.argv[3]); import packer; "
        "from headrace.base import files; from headrace.store.pack import pack; f = os.fdatasync; "
        "os.fdatasync = lambda fd: (time.sleep(0.01), f(fd));"
        "files._renameat2 = lambda *_: time.sleep(600);"
        "print('go', flush=True); pack(sys.argv[1], sys.argv[2], options=packer.OPTIONS)"
    )
    target, partial = tmp_path / "out.hr", tmp_path / "out.hr.partial"
    for _ in range(4):
        args = [sys.executable, "-c", slow, tmp_path / "root", target, PACKER.parent]
        with subprocess.Popen(args, stdout=subprocess.PIPE) as p:
            p.stdout.readline()
            until(lambda p=p: partial.is_dir() or p.poll() is not None)
            time.sleep(r.uniform(0.0, 0.15))
            p.kill()
        assert p.returncode == KILLED
        mid_pack += partial.is_dir() and not target.exists()
    assert mid_pack == 4
    pack(tmp_path / "root", target, options=OPTIONS)
    pack(tmp_path / "root", tmp_path / "whole.hr", options=OPTIONS)
    assert files_of(target) == files_of(tmp_path / "whole.hr")


def test_a_killed_overwrite_leaves_the_old_or_the_new(folder, tmp_path, packer):
    root, _ = folder
    target = tmp_path / "out.hr"
    packer("ITEMS", target)
    old = files_of(target)
    kills = 0
    packer(root, tmp_path / "new.hr")
    new = files_of(tmp_path / "new.hr")
    for kind, n in [("pwrite", 5), ("fsync", 3), ("renameat2", 1), ("rename", 1), ("rmdir", 1)]:
        assert files_of(target) == old
        code = packer(root, target, kind, n, "overwrite")
        kills += code == KILLED
        assert files_of(target) in (old, new)
        open_store(target).close()
    assert kills >= 4
    assert files_of(target) == new
    # What the last kill left of the old store is not taken for a resumable pack.
    (tmp_path / "photos" / "class0" / "zz.bin").write_bytes(b"newer")
    pack(root, target, overwrite=True, options=OPTIONS)
    with open_store(target) as store:
        assert len(contents(store)) == 61
    assert verify(target).ok
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.hr", "out.hr", "photos"]


def test_a_killed_append_leaves_the_store_as_it_was(folder, tmp_path, packer):
    root, want = folder
    kills = before = 0
    for kind, n in [
        ("pwrite", 4), ("pwrite", 20), ("fdatasync", 3), ("fsync", 2), ("fsync", 5), ("fsync", 7),
        ("fsync", 8), ("ftruncate", 3), ("rename", 1), ("replace", 1), ("replace", 2),
    ]:  # fmt: skip
        target = tmp_path / f"{kind}{n}.hr"
        pack(root, target)
        code = packer("ITEMS", target, kind, n, "append")
        kills += code == KILLED
        with open_store(target) as store:
            appended = len(store) == 120
            assert appended or (len(store) == 60 and code == KILLED)
            assert bytes(store.read("class0/3.bin")) == want["class0/3.bin"]
        before += code == KILLED and not appended
        if not appended:
            append(items, target, options=OPTIONS)
        append([("last", b"one")], target)  # whatever a kill left does not stand in the way
        with open_store(target) as store:
            assert contents(store) == want | {n: d for n, d, _ in items()} | {"last": b"one"}
        assert verify(target).ok
        assert not (target / "append.partial").exists()
    assert kills >= 6
    assert 4 <= before < kills


# -- full disks ---------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_before_it_begins(folder, tmp_path, monkeypatch):
    root, _ = folder
    monkeypatch.setattr("headrace.store.publish.free_bytes", lambda _: 5000)
    with pytest.raises(VolumeError, match="5,000 bytes are free") as caught:
        pack(root, tmp_path / "out.hr")
    assert caught.value.errno == errno.ENOSPC
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos"]


def test_a_full_disk_is_one_error_and_the_pack_resumes(tmp_path):
    """On a real small file system, where this user may mount one."""
    make_folder(tmp_path / "root", files=60, size=9000)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk],
            check=False,
            capture_output=True,
        ).returncode
    )
    if not mounted:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.MonkeyPatch.context() as patch:
            # The estimate would refuse at once; here the disk fills up on the way.
            patch.setattr("headrace.store.publish.free_bytes", lambda _: 1 << 40)
            with pytest.raises(VolumeError, match=r"(?s)No space left.*resume") as caught:
                pack(tmp_path / "root", disk / "out.hr", options=OPTIONS)
        assert caught.value.errno == errno.ENOSPC
        assert not (disk / "out.hr").exists()
        assert (disk / "out.hr.partial").is_dir()
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        report = pack(tmp_path / "root", disk / "out.hr", options=OPTIONS)
        assert 0 < report.resumed_samples < report.samples
        pack(tmp_path / "root", tmp_path / "whole.hr", options=OPTIONS)
        assert files_of(disk / "out.hr") == files_of(tmp_path / "whole.hr")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_file_size_limit_is_one_error_and_the_pack_resumes(folder, tmp_path):
    root, want = folder
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(VolumeError, match=r"(?s)File too large.*resume") as caught:
            pack(root, tmp_path / "out.hr", options=OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    report = pack(root, tmp_path / "out.hr", options=OPTIONS)
    assert report.resumed_samples > 0
    with open_store(tmp_path / "out.hr") as store:
        assert contents(store) == want


def test_a_failing_sync_is_not_taken_for_success(folder, tmp_path, monkeypatch):
    root, want = folder
    calls = 0

    def failing(fd):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(segment_writer.os, "fdatasync", failing)
    with pytest.raises(VolumeError, match="Input/output error"):
        pack(root, tmp_path / "out.hr", options=OPTIONS)
    monkeypatch.undo()
    assert calls >= 5
    pack(root, tmp_path / "out.hr", options=OPTIONS)
    with open_store(tmp_path / "out.hr") as store:
        assert contents(store) == want


# -- rivals -------------------------------------------------------------------------------------------


def test_two_packers_at_once_make_one_store(folder, tmp_path):
    root, want = folder
    target = tmp_path / "out.hr"
    started = threading.Event()
    go_on = threading.Event()
    outcome = []

    def wait(*_):
        started.set()
        assert go_on.wait(20)

    def first():
        outcome.append(pack(root, target, options=OPTIONS, progress=wait))

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(20)
    try:
        for rival in (pack, index):
            with pytest.raises(StoreError, match="another process is building"):
                rival(root, target)
    finally:
        go_on.set()
        thread.join()
    assert len(outcome) == 1
    with pytest.raises(StoreExists):
        pack(root, target)
    with open_store(target) as store:
        assert contents(store) == want
    assert not (tmp_path / "out.hr.partial").exists()


def test_two_appenders_at_once(folder, tmp_path):
    root, _ = folder
    target = tmp_path / "out.hr"
    pack(root, target)

    def slow_items():
        with pytest.raises(StoreError, match="another process is appending"):
            append([("rival", b"")], target)
        yield "winner", b"x"

    append(slow_items, target)
    with open_store(target) as store:
        assert (len(store), store.names[60]) == (61, "winner")


def test_a_target_made_meanwhile_is_not_replaced(folder, tmp_path):
    root, _ = folder
    target = tmp_path / "out.hr"

    def rival(*_):
        target.mkdir(exist_ok=True)
        (target / "precious").write_bytes(b"x")

    with pytest.raises(StoreExists):
        pack(root, target, progress=rival)
    assert [p.name for p in target.iterdir()] == ["precious"]


def test_a_strange_partial_folder_is_left_alone(folder, tmp_path):
    root, _ = folder
    (tmp_path / "out.hr.partial").mkdir()
    (tmp_path / "out.hr.partial" / "thesis.tex").write_bytes(b"x")
    with pytest.raises(StoreExists, match=r"thesis\.tex"):
        pack(root, tmp_path / "out.hr")
    assert (tmp_path / "out.hr.partial" / "thesis.tex").exists()


# -- sources that change between two runs ----------------------------------------------------------------


def interrupt(root, target, after=3):
    """Packs until the progress callback gives up."""
    calls = 0

    class EnoughError(Exception):
        pass

    def progress(*_):
        nonlocal calls
        calls += 1
        if calls == after:
            raise EnoughError

    with pytest.raises(EnoughError):
        pack(root, target, options=OPTIONS, progress=progress)
    assert calls == after


def test_what_was_packed_some_seconds_ago_is_kept_though_it_is_little(tmp_path, monkeypatch):
    clock = count(step=JOURNAL_SECONDS / 9)
    monkeypatch.setattr(
        "headrace.store.segment_writer.time", SimpleNamespace(monotonic=clock.__next__)
    )

    def items(stop):
        for i in range(stop):
            yield f"{i}", b"x"
        if stop < 60:
            raise SourceError("it broke")  # of which only the journal is kept, as of a kill

    with pytest.raises(SourceError, match="it broke"):
        pack(items(50), tmp_path / "out.hr")
    assert 0 < pack(items(60), tmp_path / "out.hr").resumed_samples < 50


def test_an_interrupted_pack_resumes_where_it_was(folder, tmp_path):
    root, want = folder
    interrupt(root, tmp_path / "out.hr", after=6)
    read = []
    with pytest.MonkeyPatch.context() as patch:
        original = extents.ScanReader.read
        patch.setattr(
            extents.ScanReader,
            "read",
            lambda r, plan: (read.append(plan.begin), original(r, plan))[1],
        )
        report = pack(root, tmp_path / "out.hr", options=OPTIONS)
    assert report.resumed_samples > 0
    assert min(read) == report.resumed_samples
    with open_store(tmp_path / "out.hr") as store:
        assert contents(store) == want


@pytest.mark.parametrize("change", ["content", "added", "removed", "other source", "volume size"])
def test_a_changed_source_is_not_mixed_with_the_old(folder, tmp_path, change):
    root, _ = folder
    target = tmp_path / "out.hr"
    interrupt(root, target)
    options, source = OPTIONS, root
    if change == "content":
        (root / "class2" / "5.bin").write_bytes(b"other")
    elif change == "added":
        (root / "class2" / "zz.bin").write_bytes(b"")
    elif change == "removed":
        (root / "class2" / "5.bin").unlink()
    elif change == "other source":
        source = items
    else:
        options = PackOptions(volume_bytes=50_000)
    with pytest.raises(SourceChanged, match="resume=False"):
        pack(source, target, options=options)
    assert not target.exists()
    pack(source, target, options=options, resume=False)
    assert verify(target).ok


def test_an_iterable_that_changed_is_noticed(tmp_path):
    target = tmp_path / "out.hr"
    interrupt(items, target)
    changed = [(n, b"!" + d[1:] if i == 3 else d, k) for i, (n, d, k) in enumerate(items())]
    with pytest.raises(SourceChanged, match=r"Sample 3 \('item003'\)"):
        pack(changed, target, options=OPTIONS)
    with pytest.raises(SourceChanged, match="gave 2 samples"):
        pack(list(items())[:2], target, options=OPTIONS)
    assert pack(items, target, options=OPTIONS).resumed_samples > 3


def test_a_damaged_partial_starts_over(folder, tmp_path):
    root, want = folder
    partial = tmp_path / "out.hr.partial"
    # A volume is shorter than the journal says, as after a power cut on a lying disk.
    interrupt(root, tmp_path / "out.hr", after=6)
    volume = partial / "store" / "segment-0000-0000.hrv"
    os.truncate(volume, 5000)
    report = pack(root, tmp_path / "out.hr", options=OPTIONS)
    assert report.resumed_samples == 0
    # The journal's last records are damaged: what they vouched for is packed again.
    interrupt(root, tmp_path / "b.hr", after=6)
    journal = tmp_path / "b.hr.partial" / "journal"
    flip(journal, journal.stat().st_size - 5)
    pack(root, tmp_path / "b.hr", options=OPTIONS)
    assert files_of(tmp_path / "out.hr") == files_of(tmp_path / "b.hr")
    with open_store(tmp_path / "b.hr") as store:
        assert contents(store) == want


PACK_AND_READ = """
import resource, sys
from pathlib import Path
from headrace.store import open_store
from headrace.store.pack import pack
from headrace.store.packing import PackOptions
from headrace.store.verify import verify
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
root, target = map(Path, sys.argv[1:])
pack(root, target, options=PackOptions(volume_bytes=8192, journal_bytes=500))
with open_store(target) as store:
    print(len(store), sum(len(store.read(i)) for i in range(len(store))))
print(verify(target).ok)
"""


def test_few_descriptors_are_enough(tmp_path):
    """In a process of its own: how many this one has open is its other tests' affair."""
    make_folder(tmp_path / "root", classes=100, files=2, size=1000)
    nbytes = sum(p.stat().st_size for p in (tmp_path / "root").rglob("*") if p.is_file())
    done = subprocess.run(
        [sys.executable, "-c", PACK_AND_READ, tmp_path / "root", tmp_path / "out.hr"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == f"200 {nbytes}\nTrue\n", done.stderr
    assert len(list((tmp_path / "out.hr").glob("*.hrv"))) > 20


def test_errors_survive_pickling(folder, tmp_path):
    import pickle

    root, _ = folder
    pack(root, tmp_path / "out.hr")
    flip(tmp_path / "out.hr" / "segment-0000-0000.hrv", 4100)
    with open_store(tmp_path / "out.hr") as store, pytest.raises(HeadraceError) as caught:
        contents(store)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert (again.index, again.name, again.path) == (
        caught.value.index, caught.value.name, caught.value.path,
    )  # fmt: skip

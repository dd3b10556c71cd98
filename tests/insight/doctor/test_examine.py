"""An examination: of real images and of everything that opens; read-only; ended at any moment."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest

from headrace.errors import StoreNotFound, VolumeTimeout
from headrace.insight.doctor import ExamineOptions, diagnose, examine, lines_of, reads
from headrace.insight.doctor import examine as package
from headrace.machine.host import CpuTimes
from tests_shared import write_real_images

from .findings_shared import findings

QUICK = ExamineOptions(seconds=1.0)
PATIENT_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No part is left out or given up because the machine had no turn for it."""
    monkeypatch.setattr(sys.modules[package.__module__], "_PATIENCE_S", PATIENT_S)
    monkeypatch.setattr(reads, "_LATE_LEAST_S", PATIENT_S)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "images"
    write_real_images(folder)
    return folder


class LateReads:
    """Reads whose threads begin late, as on a busy machine: until then nobody knows what they read with."""

    engine, engine_why, tries = "", "", 0

    def __init__(self, *_, **__):
        pass

    def rate(self, *_):
        self.tries += 1
        self.engine = "uring" if self.tries == 3 else ""

    def close(self):
        pass


def test_threads_that_begin_late_are_waited_for(monkeypatch):
    module = sys.modules[package.__module__]
    monkeypatch.setattr(module, "PieceReads", LateReads)
    assert module._engine() == ("uring", "")
    monkeypatch.setattr(module, "_TRY_MOST_S", 0.0)
    monkeypatch.setattr(LateReads, "rate", lambda *_: None)
    assert module._engine() == ("", "")


@pytest.mark.parametrize(
    ("got", "load", "running", "wanted"),
    [
        (
            2 / 36.9,
            8.6,
            5,
            8.6,
        ),  # a thread that got next to nothing for a moment: no more than queued
        (2 / 36.9, 3.0, 13, 12.0),  # they came just now
        (0.5, 8.6, 5, 3.0),
        (1.0, 8.6, 5, 0.0),
    ],
)
def test_others_want_no_more_than_the_run_queue_holds(monkeypatch, got, load, running, wanted):
    module = sys.modules[package.__module__]
    monkeypatch.setattr(module, "cpu_times", lambda: CpuTimes(2.0, 0.0, 1.0))
    monkeypatch.setattr(module, "_running", lambda: float(running))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    seen = findings(decode={"got": got}, environment={"cpus": 2.0})
    found = module._wanted_by_others(seen, CpuTimes(1.0, 0.0, 1.0))
    assert found == pytest.approx(wanted)


def state_of(folder):
    """All that a file system keeps of a tree, access times apart."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        s = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        kept = (s.st_mode, s.st_ino, s.st_nlink, s.st_uid, s.st_gid, s.st_size)
        found[path] = (*kept, s.st_mtime_ns, s.st_ctime_ns, content)
    return found


def test_real_images_are_examined(images):
    told = []
    # Where the machine stops for a moment, there is time for few reads: then it is tried again.
    for _ in range(5):
        told.clear()
        begun = time.monotonic()
        found = examine(
            images, ExamineOptions(seconds=3.0), lambda what, share: told.append((what, share))
        )
        took_s = time.monotonic() - begun
        if min(found.plain.reads, *(point.reads for point in found.storage.points)) > 10:
            break
    assert found.data.samples == 192
    assert found.data.classes == 3
    assert found.notes == []
    depths = [point.depth for point in found.storage.points]
    assert depths[:3] == [1, 4, 16]
    for point in found.storage.points:
        assert point.per_s > 0
        assert 0 <= point.p50_s <= point.p99_s
        assert point.bytes_per_s == pytest.approx(point.per_s * found.data.size_mean, rel=0.5)
    assert found.opens.one_per_s > 0
    assert found.plain.reads > 10
    assert found.decode.failed == 0
    assert found.decode.sample_s > 0
    assert found.environment.cpus > 0
    assert 0.0 <= found.resident <= 1.0
    assert 0 < found.seconds <= took_s
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert len(told) >= 7
    lines = lines_of(diagnose(found, batch=32, step_s=0.1))
    shown = [line.replace(str(images), "images") for kind, line in lines if kind != "command"]
    assert [line for line in shown if len(line) > 80] == []


def test_a_packed_store_and_its_reads(packed_photos):
    found = examine(packed_photos, QUICK)
    assert found.data.kind == "store"
    assert found.opens is None
    assert found.storage.points
    assert found.decode.format == "png"


@pytest.mark.parametrize("what", ["photos", "packed_photos"])
def test_nothing_is_changed(what, request, tmp_path):
    """Neither in the data nor elsewhere: whatever would write is refused by the kernel meanwhile."""
    folder = request.getfixturevalue(what)
    before = state_of(folder)
    code = """
        import ctypes, errno, os, struct, sys
        sys.dont_write_bytecode = True
        from headrace.insight.doctor import ExamineOptions, diagnose, examine, lines_of
        # BPF: openat with O_WRONLY, O_RDWR, O_CREAT or O_TRUNC, and calls that change names, are refused.
        OPENAT, WRITES = 257, 0o1 | 0o2 | 0o100 | 0o1000
        CHANGING = [2, 76, 82, 83, 84, 85, 86, 87, 88, 90, 92, 94, 132, 133, 188, 235, 258, 259, 260,
                    261, 263, 264, 265, 266, 268, 280, 316, 437]
        refuse = struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM)
        program = [struct.pack("HBBI", 0x20, 0, 0, 0)]
        for number in CHANGING:
            program += [struct.pack("HBBI", 0x15, 0, 1, number), refuse]
        program += [
            struct.pack("HBBI", 0x15, 0, 3, OPENAT),
            struct.pack("HBBI", 0x20, 0, 0, 32),        # its flags
            struct.pack("HBBI", 0x45, 0, 1, WRITES),    # any of them?
            refuse,
            struct.pack("HBBI", 0x06, 0, 0, 0x7fff0000),
        ]
        buffer = ctypes.create_string_buffer(b"".join(program))
        class Filter(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        chain = Filter(len(program), ctypes.addressof(buffer))
        assert libc.prctl(22, 2, ctypes.byref(chain)) == 0, os.strerror(ctypes.get_errno())
        for attempt in (lambda: open(sys.argv[2] + "/x", "w"), lambda: os.mkdir(sys.argv[2] + "/y"),
                        lambda: os.utime(sys.argv[1]), lambda: os.rename(sys.argv[2], sys.argv[2] + "z")):
            try:
                attempt()
            except PermissionError:
                continue
            raise SystemExit("the filter let something through")
        sys.modules["headrace.insight.doctor.reads"]._LATE_LEAST_S = float(sys.argv[3])
        sys.modules["headrace.insight.doctor.examine"]._PATIENCE_S = float(sys.argv[3])
        found = examine(sys.argv[1], ExamineOptions(seconds=1.0))
        assert found.storage.points and found.decode and not found.notes, found
        print(len(lines_of(diagnose(found))))
    """
    if os.uname().machine != "x86_64":
        pytest.skip("the filter knows the numbers of x86_64")
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), folder, tmp_path, str(PATIENT_S)],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert int(ended.stdout) > 15
    assert state_of(folder) == before
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_raised_where_it_is_waited_for(tmp_path):
    with pytest.raises(StoreNotFound):
        examine(tmp_path / "nothing", QUICK)


def test_threads_end_with_it(photos):
    examine(photos, QUICK)
    assert not [t for t in threading.enumerate() if "doctor" in t.name]


def test_ctrl_c_ends_it_with_what_is_known(photos):
    main = threading.main_thread().ident
    assert threading.get_ident() == main

    def press(what, _share):
        if what == "reading at random":
            os.kill(os.getpid(), signal.SIGINT)

    begun = time.monotonic()
    found = examine(photos, ExamineOptions(seconds=30.0), press)
    assert found.interrupted
    assert time.monotonic() - begun < 20
    assert found.data.samples == 36
    assert found.decode is None
    text = "\n".join(line for _, line in lines_of(diagnose(found)))
    assert "interrupted after" in text


def test_ctrl_c_before_anything_is_known(photos):
    def press(what, _share):
        if what == "looking at the machine":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    with pytest.raises(KeyboardInterrupt):
        examine(photos, ExamineOptions(seconds=0.2), _before_data(press))


def _before_data(press):
    """Hold the examination before it looks at the data."""

    def tell(what, share):
        press(what, share)
        if what == "looking at the data set":
            raise RuntimeError("too late")

    return tell


def test_a_storage_that_does_not_answer_is_not_waited_for(photos, monkeypatch):
    module = sys.modules[package.__module__]
    asked, hang = threading.Event(), threading.Event()

    def survey(*_a, **_k):
        asked.set()
        hang.wait(30)

    def monotonic():
        """No time passes until the data set is looked at, however long all before that takes."""
        return 100.0 if asked.is_set() else 0.0

    monkeypatch.setattr(module, "survey", survey)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    try:
        with pytest.raises(VolumeTimeout, match=r"did not answer .* while looking at the data set"):
            examine(photos, ExamineOptions(seconds=0.2))
    finally:
        hang.set()


class Answered(reads.RandomReads):
    """What is asked for has come as soon as somebody looks."""

    def __init__(self):
        nothing = SimpleNamespace(turn=lambda **_: None, stats=lambda: {"latency_us": [0] * 64})
        super().__init__(nothing, 1000.0, lambda: False)

    def _submit(self, count):
        return count

    def _take(self, job, _wait_s):
        return job, 1000 * job


def test_who_gets_no_turn_until_the_time_is_over_measures_all_the_same(monkeypatch):
    clock = count(step=1000)
    monkeypatch.setattr(
        reads, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), process_time=lambda: 0.0)
    )  # fmt: skip
    assert Answered().rate(4, 0.1).reads > 0
    assert reads.open_rates([__file__] * 4, 0.1, lambda: False).one_per_s > 0


def test_a_part_that_fails_is_noted_and_the_others_go_on(photos, monkeypatch):
    module = sys.modules[package.__module__]

    def fail(*_a, **_k):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "open_rates", fail)
    found = examine(photos, QUICK)
    assert any("opening files failed" in note for note in found.notes)
    assert found.storage is not None


@pytest.mark.parametrize("seconds", [0.0, float("nan"), 1e9])
def test_nonsense_is_refused(seconds):
    with pytest.raises(ValueError, match="seconds is"):
        ExamineOptions(seconds=seconds)

"""Injection: a known thing is made slow or forbidden, and the doctor must name that one."""

import os
import random
import subprocess
import sys
import textwrap

import pytest

from headrace.base.causes import Cause
from headrace.insight.doctor import ExamineOptions, diagnose, examine
from headrace.insight.doctor.text import facts_of
from headrace.io.simulation import Simulation

pytestmark = pytest.mark.alone
SECONDS = 2.0


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    """400 files of 60 to 100 kB that nothing decodes."""
    folder = tmp_path_factory.mktemp("blobs")
    dice = random.Random(0)
    for name in ("a", "b"):
        (folder / name).mkdir()
        for i in range(200):
            (folder / name / f"{i:03d}.bin").write_bytes(os.urandom(dice.randint(60_000, 100_000)))
    return folder


@pytest.mark.parametrize(
    ("simulation", "cause"),
    [
        (Simulation(name="metadata", open_s=5e-3, latency_s=2e-4), Cause.METADATA),
        (Simulation(name="reads", open_s=1e-4, latency_s=10e-3), Cause.LATENCY),
        (
            Simulation(name="link", open_s=1e-4, latency_s=2e-4, bandwidth_bytes_per_s=8e6),
            Cause.BANDWIDTH,
        ),
    ],
    ids=["metadata", "latency", "bandwidth"],
)
def test_slow_storage(blobs, simulation, cause):
    found = examine(blobs, ExamineOptions(seconds=SECONDS, simulate=simulation))
    assert found.place.simulated == f"simulated {simulation.name}"
    first = found.storage.points[0]
    assert 1 / first.per_s > 0.9 * (simulation.open_s + simulation.latency_s)  # it was felt
    told = diagnose(found, workers=2)
    assert told.cause == cause
    ahead = next(e for e in told.expected if "headrace" in e.loader)
    if cause == Cause.BANDWIDTH:
        assert ahead.per_s < 1.5 * first.per_s
        assert "ahead" not in {a.key for a in told.advice}
    else:
        assert ahead.per_s > 4 * first.per_s
        assert told.advice[0].key in ("ahead", "pack")


def test_slow_decoding(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for i in range(12):
        noise = random.Random(i).randbytes(700 * 700 * 3)
        image.frombytes("RGB", (700, 700), noise).save(tmp_path / f"{i}.jpg", quality=95)
    found = examine(tmp_path, ExamineOptions(seconds=SECONDS))
    told = diagnose(found, workers=1)
    assert told.cause == Cause.DECODE
    assert found.decode.pixels == 490_000
    assert found.decode.native_s < found.decode.sample_s
    assert told.advice[0].key == "images"
    assert found.decode.refused == 0
    assert {a.key for a in told.advice} & {"images", "smaller", "workers", "cpus"}
    assert "decoding" in told.verdict


def test_a_few_huge_pictures_are_told_and_counted_but_not_tried(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for i in range(42):
        noise = random.Random(i).randbytes(96 * 96)
        image.frombytes("L", (96, 96), noise).save(tmp_path / f"{i}.png")
    alone = examine(tmp_path, ExamineOptions(seconds=SECONDS))
    assert alone.decode.huge is None
    for i in range(2):
        image.new("1", (13_000, 13_000)).save(tmp_path / f"huge {i}.png")  # few bytes
    found = examine(tmp_path, ExamineOptions(seconds=SECONDS))
    huge = found.decode.huge
    assert (huge.count, huge.of, huge.most, found.decode.failed) == (2, 44, 169e6, 0)
    assert found.decode.pixels == pytest.approx((42 * 96**2 + 2 * 169e6) / 44)
    # 834 times as many pixels on average.
    assert found.decode.sample_s > 50 * alone.decode.sample_s
    told = diagnose(found, workers=1)
    assert "on average (2 of 44 hold 100% of all pixels, and count by these)" in told.verdict
    data = next(text for name, text in facts_of(told) if name == "data")
    assert "2 of 44 looked at are far larger, up to 169 million pixels, with 100% of all" in data
    assert "smaller" in {advice.key for advice in told.advice}


def test_huge_pictures_of_another_format_count_by_their_bytes(photos, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for i, path in enumerate(photos.rglob("*.png")):
        (tmp_path / f"{i}.png").write_bytes(path.read_bytes())
    alone = examine(tmp_path, ExamineOptions(seconds=SECONDS))
    image.new("RGB", (3000, 3000)).save(tmp_path / "huge.bmp")
    found = examine(tmp_path, ExamineOptions(seconds=SECONDS))
    assert (found.data.huge.count, found.data.huge.of, found.decode.huge) == (1, 37, None)
    assert found.decode.sample_s > 10 * alone.decode.sample_s
    verdict = diagnose(found, workers=1).verdict
    assert "on average (1 of 37 hold" in verdict
    assert "% of all bytes, and count by these)" in verdict


def test_pictures_that_are_left_to_pillow_do_not_hide_the_gain(tmp_path):
    """One PNG in five is grey with 16 bits, which native code does not decode."""
    image = pytest.importorskip("PIL.Image")
    for i in range(10):
        kind, depth = ("RGB", 3) if i % 5 else ("I;16", 2)
        noise = random.Random(i).randbytes(300 * 300 * depth)
        image.frombytes(kind, (300, 300), noise).save(tmp_path / f"{i}.png")
    found = examine(tmp_path, ExamineOptions(seconds=SECONDS))
    assert found.decode.failed == 0
    assert 0 < found.decode.refused < found.decode.native_samples
    assert found.decode.first_refused == "it is grey with 16 bits"
    advice = next(a for a in diagnose(found, workers=1).advice if a.key == "images")
    assert (
        f"{found.decode.refused} of {found.decode.native_samples} are left to Pillow"
        in advice.because
    )


def test_files_that_cannot_be_decoded_are_counted_and_the_first_is_named(photos, tmp_path):
    pytest.importorskip("PIL")
    import shutil

    folder = shutil.copytree(photos, tmp_path / "p")
    for path in (folder / "cats").iterdir():
        path.write_bytes(path.read_bytes()[:60])
    found = examine(folder, ExamineOptions(seconds=1.0))
    (folder / "dogs/empty head.png").write_bytes(bytes(500))
    found = examine(folder, ExamineOptions(seconds=1.0))
    assert found.decode.failed == 13  # not once for each time round
    assert found.decode.samples == 37
    assert found.decode.first_failed == "dogs/empty head.png: begins as no png does"
    notes = [text for name, text in facts_of(diagnose(found)) if name == "note"]
    tried = "13 of 37 samples that were tried were not decoded, the first: dogs/empty head.png: "
    assert any(note.startswith(tried) for note in notes)


def run_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


TELL = """
import sys
from headrace.insight.doctor import ExamineOptions, diagnose, examine
told = diagnose(examine(sys.argv[1], ExamineOptions(seconds=1.0)), workers=2)
environment = told.findings.environment
print(environment.engine, "|", environment.engine_why, "|", environment.nofile_soft)
for advice in told.advice:
    print(advice.key, "|", advice.blocking, "|", advice.because)
print("storage", "|", bool(told.findings.storage.points), "|", told.findings.notes)
"""

FORBID_URING = """
import ctypes, errno, struct
program = b"".join([
    struct.pack("HBBI", 0x20, 0, 0, 0),
    struct.pack("HBBI", 0x15, 0, 1, 425),  # io_uring_setup
    struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM),
    struct.pack("HBBI", 0x06, 0, 0, 0x7fff0000),
])
buffer = ctypes.create_string_buffer(program)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
chain = Filter(4, ctypes.addressof(buffer))
assert libc.prctl(22, 2, ctypes.byref(chain)) == 0
assert libc.syscall(425, 4, 0) == -1 and ctypes.get_errno() == errno.EPERM
"""


def test_io_uring_forbidden_by_seccomp(photos):
    ended = run_python(FORBID_URING + TELL, photos)
    lines = ended.stdout.splitlines()
    assert lines, ended.stderr
    engine, why, _ = lines[0].split(" | ")
    assert engine == "threads"
    assert "io_uring" in why
    assert any(line.startswith("io_uring | False | ") for line in lines), lines
    assert lines[-1].startswith("storage | True")


def test_few_descriptors(photos):
    ended = run_python(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n" + TELL, photos
    )
    lines = ended.stdout.splitlines()
    assert lines, ended.stderr
    assert lines[0].endswith("| 64")
    assert lines[1].startswith("nofile | True | the limit is 64 open files")
    assert lines[-1].startswith("storage | True"), ended.stdout


def test_little_shared_memory(photos):
    """In a mount namespace of its own, /dev/shm has one megabyte."""
    pytest.importorskip("PIL")
    smaller = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    uid = os.getuid()
    if libc.unshare(0x00020000 | (0x10000000 if uid else 0)) or libc.mount(
        b"none", b"/", None, 0x44000, None
    ) or libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=1m"):
        print("cannot mount"); raise SystemExit
    """
    ended = run_python(textwrap.dedent(smaller) + TELL, photos)
    if "cannot mount" in ended.stdout:
        pytest.skip("this container may not mount")
    lines = ended.stdout.splitlines()
    assert lines, ended.stderr
    assert lines[1].startswith("shm | True | torch's 2 workers keep 154 MB"), lines
    assert "1.05 MB are free" in lines[1]

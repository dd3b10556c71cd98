"""The recorder: it notes what a program opens and reads, and changes nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_symbols import _exported

from headrace.posix import launch
from headrace.posix.opens import OpenLog

PYTHON = [sys.executable, "-S", "-E", "-c"]


def recorded(command, capacity_bytes=1 << 20, **options):
    """How a command ended, and what was noted of it."""
    with OpenLog(capacity_bytes) as log:
        environment = log.environment(os.environ | options.pop("env", {}))
        ended = subprocess.run(
            command, env=environment, capture_output=True, check=False, timeout=60, **options
        )
        return ended, log.read()


def noted(opens, *paths):
    wanted = {os.fsencode(path) for path in paths}
    return [one for one in opens.opens if one.path in wanted]


def test_opens_and_reads_are_noted_with_their_times(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(bytes(10_000))
    program = f"f = open({str(file)!r}, 'rb'); f.read(4000); f.read(); f.close()"
    before = time.monotonic_ns()
    ended, log = recorded([*PYTHON, program])
    after = time.monotonic_ns()
    assert ended.returncode == 0
    (one,) = noted(log, file)
    assert (one.read_bytes, one.writes, one.mapped, log.dropped) == (10_000, False, 0, 0)
    assert one.reads >= 2
    assert before < one.began_ns < one.last_ns < after
    assert 0 < one.open_ns < after - before
    assert 0 < one.read_ns < after - before


def test_paths_are_made_absolute(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"1")
    program = (
        "import os; open('d/../d/x').read(); d = os.open('d', os.O_RDONLY | os.O_DIRECTORY);"
        "os.close(os.open('x', os.O_RDONLY, dir_fd=d)); os.chdir('d'); open('./x').close()"
    )
    _, log = recorded([*PYTHON, program], cwd=tmp_path)
    assert len(noted(log, tmp_path / "d" / "x")) == 3


def test_names_of_all_kinds_come_through(tmp_path):
    names = [b"a b", b"new\nline", b"\x1b[31mred", b"\xff\xfe", "\u00fc".encode(), b"x" * 255]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"1")
    program = "import os; [open(os.path.join(b'.', n)).close() for n in sorted(os.listdir(b'.'))]"
    _, log = recorded([*PYTHON, program], cwd=tmp_path)
    paths = [os.fsencode(tmp_path) + b"/" + name for name in sorted(names)]
    assert [one.path for one in noted(log, *paths)] == paths


def test_a_descriptor_that_is_used_again_is_not_the_file_before(tmp_path):
    """Its number goes to a pipe: what is read from that is not the file's."""
    file = tmp_path / "a"
    file.write_bytes(b"12")
    program = (
        f"import os; f = os.open({str(file)!r}, 0); os.read(f, 9); os.close(f); r, w = os.pipe();"
        "assert r == f; os.write(w, b'x' * 1000); os.read(r, 1000)"
    )
    ended, log = recorded([*PYTHON, program])
    assert ended.returncode == 0, ended.stderr
    assert [(one.reads, one.read_bytes) for one in noted(log, file)] == [(1, 2)]


def test_children_and_threads_are_noted_as_who_they_are(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(b"1")
    program = (
        "import os, threading; open('a').read()\n"
        "t = threading.Thread(target=lambda: open('b').read()); t.start(); t.join()\n"
        "p = os.fork()\nif not p: open('c').read(); os._exit(0)\nos.waitpid(p, 0)"
    )
    _, log = recorded([*PYTHON, program], cwd=tmp_path)
    a, b, c = noted(log, *(tmp_path / name for name in "abc"))
    assert a.process == a.thread == b.process
    assert b.thread != a.thread
    assert c.process == c.thread
    assert c.process not in (a.process, b.thread)


@pytest.mark.parametrize(
    ("command", "reads"),
    [("cat {}", 1), ("cp {} /dev/null", 1), ("dd if={} of=/dev/null bs=1k status=none", 9),
     ("head -c 100 {}", 1), ("tar -cf /dev/stdout {}", 1)],
)  # fmt: skip
def test_programs_that_are_not_python_are_seen(command, reads, tmp_path):
    file = tmp_path / "a"
    file.write_bytes(bytes(9 << 10))
    plain = subprocess.run(["sh", "-c", command.format(file)], capture_output=True, check=True)
    ended, log = recorded(["sh", "-c", command.format(file)])
    assert ended.stdout == plain.stdout
    assert ended.returncode == 0
    (one,) = noted(log, file)
    assert one.reads >= reads
    assert one.read_bytes >= (100 if "head" in command else file.stat().st_size)


def test_a_descriptor_that_goes_to_another_program_is_noted_without_its_reads(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    ended, log = recorded(["sh", "-c", "exec cat < a"], cwd=tmp_path)
    assert ended.stdout == b"1"
    assert [one.reads for one in noted(log, tmp_path / "a")] == [0]


def test_a_mapping_is_noted_and_writing_is_told_apart(tmp_path):
    (tmp_path / "m").write_bytes(bytes(4096))
    program = (
        "import mmap; f = open('m', 'rb'); mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ);"
        "open('w', 'w').write('x'); open('a', 'a').close(); open('w', 'r+').close()"
    )
    _, log = recorded([*PYTHON, program], cwd=tmp_path)
    (mapped,) = noted(log, tmp_path / "m")
    assert mapped.mapped == 1
    assert [one.writes for one in noted(log, tmp_path / "w", tmp_path / "a")] == [True] * 3


def test_what_the_log_has_no_room_for_is_counted(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    program = "for _ in range(1000): open('a').close()"
    ended, log = recorded([*PYTHON, program], capacity_bytes=64 << 10, cwd=tmp_path)
    assert ended.returncode == 0
    assert log.dropped > 100
    assert len(log.opens) + log.dropped >= 1000


def test_a_process_that_is_killed_costs_its_own_last_record_at_most(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    program = "import os, signal\nfor _ in range(9): open('a').close()\nos.kill(os.getpid(), 9)"
    ended, log = recorded([*PYTHON, program], cwd=tmp_path)
    assert ended.returncode == -9
    assert len(noted(log, tmp_path / "a")) == 9


def test_a_log_that_holds_nonsense_is_read_without_harm():
    with OpenLog(1 << 16) as log:
        os.pwrite(log.fd, os.urandom(1 << 16), 64)
        os.pwrite(log.fd, (1 << 62).to_bytes(8, "little"), 24)  # taken, it says
        log.read()


def test_a_place_that_was_taken_and_not_filled_is_passed(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    with OpenLog(1 << 20) as log:
        os.pwrite(log.fd, (256).to_bytes(8, "little"), 24)  # as if somebody had been killed there
        environment = log.environment(os.environ)
        subprocess.run([*PYTHON, "open('a').close()"], env=environment, cwd=tmp_path, check=True)
        assert len(noted(log.read(), tmp_path / "a")) == 1


@pytest.mark.parametrize(
    "value",
    ["", "nonsense", "/proc/1/fd/3:1", "/proc/self/fd/0:0", "/etc/passwd:1", "/proc/" + "9" * 90],
)
def test_a_wrong_address_means_that_nothing_is_noted(value):
    ended, _ = recorded(["sh", "-c", f"HEADRACE_OPENS='{value}' cat /dev/null && echo fine"])
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"fine\n", b"")


def test_errors_are_the_programs_own(tmp_path):
    program = (
        "import os\n"
        "for call in (lambda: os.open('none', 0), lambda: os.read(99, 1), lambda: os.close(99),"
        " lambda: os.open('', 0), lambda: os.pread(99, 1, 0)):\n"
        "    try: call()\n"
        "    except OSError as e: print(e.errno)"
    )
    plain = subprocess.run([*PYTHON, program], capture_output=True, check=True, cwd=tmp_path)
    ended, _ = recorded([*PYTHON, program], cwd=tmp_path)
    assert ended.stdout == plain.stdout
    assert len(ended.stdout.split()) == 5


def test_it_comes_before_what_else_is_preloaded():
    with OpenLog(1 << 16) as log:
        environment = log.environment({"LD_PRELOAD": "other.so"})
    assert environment["LD_PRELOAD"] == f"{launch.library('opens')}:other.so"


def test_it_replaces_nothing_that_the_library_does_not_have_and_brings_nothing_else():
    maps = Path("/proc/self/maps").read_text()
    library = _exported(re.search(r"\S+/libc\.so\.6", maps).group())
    ours = set(_exported(launch.library("opens")))
    assert {"open64", "__open64_2", "read", "pread64", "fread", "mmap64", "close"} <= ours
    assert ours <= set(library)
    listing = subprocess.run(
        ["readelf", "-d", launch.library("opens")], capture_output=True, check=True, text=True
    ).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", listing) == ["libc.so.6"]

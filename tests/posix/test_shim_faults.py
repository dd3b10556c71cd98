"""Whatever the shim finds in the place of a board, a copy or a daemon: programs read the right bytes."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
from posix_placing import run, sealed_copy

from headrace.posix.launch import library

READ = "import sys; print([len(open(p, 'rb').read()) for p in sys.argv[1:]], open(sys.argv[1], 'rb').read())"


def _memfd(data, *, seals=6):
    """A memfd that others might take for a board: sealed against shrinking and growing."""
    fd = os.memfd_create("fault", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, os.fstat(fd).st_ino


def _bytes_of(fd):
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _garbage(data, draw, count=40):
    flipped = bytearray(data)
    for _ in range(count):
        flipped[draw.randrange(len(flipped))] = draw.randrange(256)
    return bytes(flipped)


@pytest.mark.parametrize("seed", range(6))
def test_a_garbage_board_is_never_followed_to_a_wrong_file(files, plane, seed):
    served = plane(files)
    draw = random.Random(seed)
    command = ["cat", *map(str, sorted(files.glob("*.bin")))]
    expected = run(command)
    board, ring = _bytes_of(served.board.fd), (os.dup(served.ring.fd), served.ring.inode)
    count = [20, 2000][seed % 2]  # a few bytes, and all of it
    bad = _garbage(board, draw, count)
    if seed >= 4:  # where the files' entries are
        bad = board[:64] + _garbage(board[64:], draw, 300)
    assert bad != board
    served.page.publish(os.getpid(), _memfd(bad), ring)
    assert served.run(command) == expected


@pytest.mark.parametrize("kept", [0, 100, 2500, -200])
def test_a_truncated_board_is_refused(files, plane, kept):
    served = plane(files)
    board = _bytes_of(served.board.fd)
    cut = board[:kept]
    assert len(cut) < len(board)
    served.page.publish(os.getpid(), _memfd(cut), (os.dup(served.ring.fd), served.ring.inode))
    command = ["cat", str(files / "f03.bin")]
    assert served.run(command) == run(command)
    assert served.counts["attached"] == 0


def test_a_board_that_could_shrink_is_refused(files, plane):
    """Whoever maps it could be ended by SIGBUS."""
    served = plane(files)
    board = _memfd(_bytes_of(served.board.fd), seals=0)
    served.page.publish(os.getpid(), board, (os.dup(served.ring.fd), served.ring.inode))
    command = ["cat", str(files / "f03.bin")]
    assert served.run(command) == run(command)
    assert served.counts["attached"] == 0


def test_a_board_of_another_inode_is_refused(files, plane):
    served = plane(files)
    ring = (os.dup(served.ring.fd), served.ring.inode)
    served.page.publish(os.getpid(), (os.dup(served.board.fd), served.board.inode + 1), ring)
    command = ["cat", str(files / "f03.bin")]
    assert served.run(command) == run(command)
    assert served.counts["attached"] == 0


@pytest.mark.parametrize("size", [10, 4096, 70000])
def test_a_garbage_ring_costs_the_reports_only(files, plane, size):
    served = plane(files)
    ring = _memfd(random.Random(size).randbytes(size))
    served.page.publish(os.getpid(), (os.dup(served.board.fd), served.board.inode), ring)
    command = ["cat", str(files / "f03.bin")]
    assert served.run(command) == run(command)
    assert served.counts["attached"] == 0


@pytest.mark.parametrize(
    "address",
    ["", ":", "/proc/1/fd/0:5", "/proc/99999999/fd/3:77", "nonsense:1", "{page}9", "x" * 500],
)
def test_a_run_page_that_is_none_leaves_the_program_alone(files, plane, address):
    served = plane(files)
    environment = served.environment
    environment["HEADRACE_RUN"] = address.format(page=environment["HEADRACE_RUN"])
    command = ["cat", str(files / "f03.bin")]
    assert run(command, env=environment) == run(command)
    assert served.counts["attached"] == 0


def test_garbage_in_the_run_page_leaves_the_program_alone(files, plane):
    served = plane(files)
    command = ["cat", str(files / "f03.bin")]
    expected = run(command)
    page = _bytes_of(served.page._native.fd)
    for seed in range(8):
        fd, inode = _memfd(_garbage(page, random.Random(seed), [3, 64][seed % 2]))
        environment = served.environment | {"HEADRACE_RUN": f"/proc/{os.getpid()}/fd/{fd}:{inode}"}
        assert run(command, env=environment) == expected
        os.close(fd)


def test_a_file_that_was_changed_is_read_as_it_is_now(plane, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for name in ("same size", "longer", "replaced", "forbidden"):
        (root / name).write_bytes(b"before")
    served = plane(root)
    was = os.stat(root / "same size")
    (root / "same size").write_bytes(b"after!")
    os.utime(root / "same size", ns=(was.st_atime_ns, was.st_mtime_ns))  # only ctime tells
    with open(root / "longer", "ab") as f:
        f.write(b" and after")
    (root / "new").write_bytes(b"after!")
    os.replace(root / "new", root / "replaced")
    (root / "forbidden").unlink()
    status, out, err = served.run(
        ["cat", *(str(root / n) for n in ("same size", "longer", "replaced", "forbidden"))]
    )
    assert out == b"after!before and afterafter!"
    assert status == 1
    assert b"No such file" in err
    assert served.counts["refused"] == 4
    assert served.counts["copy"] == 0


def test_immutable_is_the_users_word(plane, tmp_path):
    """It is what the option costs: shown here, so that it stays known."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "a").write_bytes(b"before")
    served = plane(root, immutable=True)
    (root / "a").write_bytes(b"after!")
    assert served.run(["cat", str(root / "a")])[1] == b"before"


def test_a_copy_that_is_another_file_is_refused(files, plane):
    served = plane(files)
    number = served.number(files / "f03.bin")
    # The daemon's descriptor is another file by now: it died, and its number was given again.
    fd = served.fds[number]
    other = sealed_copy(b"x" * os.fstat(fd).st_size)
    os.dup2(other, fd, inheritable=False)
    os.close(other)
    command = ["cat", str(files / "f03.bin")]
    assert served.run(command) == run(command)
    assert served.counts["refused"] == 1


def test_a_fifo_in_the_place_of_a_copy_does_not_hang(files, plane):
    served = plane(files)
    fd = served.fds[served.number(files / "f03.bin")]
    r, w = os.pipe()
    os.dup2(r, fd, inheritable=False)
    os.close(r)
    command = ["cat", str(files / "f03.bin")]
    assert served.run(command, timeout=20) == run(command)
    os.close(w)
    assert served.counts["refused"] == 1


def test_a_tier_whose_file_is_gone_or_another_is_not_used(files, plane, tmp_path):
    tier = tmp_path / "tier"
    tier.mkdir()
    served = plane(files, tier=tier)
    gone, other = served.number(files / "f03.bin"), served.number(files / "f04.bin")
    (tier / f"{gone}.copy").unlink()
    data = (tier / f"{other}.copy").read_bytes()
    (tier / "new").write_bytes(bytes(len(data)))
    (tier / "new").replace(tier / f"{other}.copy")
    command = ["cat", str(files / "f03.bin"), str(files / "f04.bin")]
    assert served.run(command) == run(command)
    assert served.counts["refused"] == 2


DAEMON = """
    import os, sys, time
    sys.path.insert(0, sys.argv[1])
    from posix_placing import Plane
    plane = Plane(sys.argv[2])
    print(os.getpid(), plane.board.fd, plane.board.inode, plane.ring.fd, plane.ring.inode, flush=True)
    time.sleep(60)
"""
READER = """
    import os, sys
    paths = sys.argv[1:]
    for line in sys.stdin:
        print(sum(len(open(p, 'rb').read()) for p in paths), flush=True)
"""


def test_a_daemon_that_is_killed_in_the_middle_of_a_run_costs_its_copies_only(files, plane):
    """Its board stays mapped; its descriptors are gone."""
    ours = plane(files)  # for its page alone
    folder = os.path.dirname(__file__)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), folder, str(files)], stdout=subprocess.PIPE
    ) as daemon:
        pid, board_fd, board, ring_fd, ring = map(int, daemon.stdout.readline().split())
        taken = [os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR if fd == ring_fd else os.O_RDONLY)
                 for fd in (board_fd, ring_fd)]  # fmt: skip
        ours.page.publish(pid, (taken[0], board), (taken[1], ring))
        paths = sorted(map(str, files.glob("*.bin")))
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(READER), *paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ours.environment,
        ) as reader:  # fmt: skip

            def ask():
                reader.stdin.write("\n")
                reader.stdin.flush()
                return int(reader.stdout.readline())

            expected = sum(os.stat(p).st_size for p in paths)
            assert ask() == expected
            assert ours.page.counts()["copy"] == len(paths)
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            assert ask() == expected
            assert ours.page.counts()["copy"] == len(paths)
            assert ours.page.counts()["refused"] == len(paths)
            ours.page.clear()
            assert ask() == expected
            assert ours.page.counts()["refused"] == len(paths)
            # Another daemon: programs find it without being started again.
            ours.publish()
            assert ask() == expected
            assert ours.counts["copy"] == len(paths)
            reader.stdin.close()


FEW = """
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True: held.append(open(sys.argv[1], 'rb'))
    except OSError as e: print(e.errno, len(held), [f.fileno() for f in held][-3:])
    for f in held: f.close()
    print(len(open(sys.argv[1], 'rb').read()))
"""


def test_with_few_descriptors_a_program_meets_the_same_limit(files, plane):
    served = plane(files)
    command = [sys.executable, "-c", textwrap.dedent(FEW), str(files / "f03.bin")]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
    assert served.run(command) == run(command)
    assert served.counts["copy"] > 40


NONE_LEFT = """
    import os, resource, sys
    held = [os.open('/dev/null', os.O_RDONLY) for _ in range(20)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, 64))
    try: open(sys.argv[1], 'rb')
    except OSError as e: print(e.errno)
    os.close(held.pop())
    print(open(sys.argv[1], 'rb', 0).read(3))
"""


def test_a_plane_that_was_not_found_for_want_of_descriptors_is_found_later(files, plane):
    served = plane(files)
    served.page.clear()
    program = textwrap.dedent(NONE_LEFT)
    served.publish()
    command = [sys.executable, "-c", program, str(files / "f03.bin")]
    assert served.run(command) == run(command)
    assert served.counts["copy"] == 1


def test_writing_is_the_originals_and_is_told(plane, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    (root / "a").write_bytes(b"before")
    served = plane(root)
    assert served.run(["bash", "-c", f"echo more >> {root}/a; cat {root}/a; : > {root}/a; cat {root}/a"]) == (
        0, b"beforemore\n", b"",
    )  # fmt: skip
    assert (root / "a").read_bytes() == b""
    kinds = [r[2] for r in served.ring.take(0)]
    assert kinds.count(served.ring.WRITING) == 2
    assert served.counts["copy"] == 0


def test_the_shim_alone_changes_nothing(files):
    command = ["bash", "-c", f"cat {files}/f03.bin; ls {files}"]
    assert run(command, env=os.environ | {"LD_PRELOAD": str(library("preload"))}) == run(command)

"""Whatever the shim finds in the place of a board, a copy or a daemon: programs read the right bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import struct
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


BOTH = """
    import os, sys
    path = sys.argv[1]
    with open(path, 'r+b') as w, open(path, 'rb', 0) as r:
        w.write(b'AFTER'); w.flush()
        print(r.read(5))
        pid = os.fork()
        if pid == 0:
            os.pwrite(w.fileno(), b'child', 0)
            os._exit(0)
        os.waitpid(pid, 0)
        print(os.pread(r.fileno(), 9, 0))
"""


def test_a_file_that_is_open_for_writing_has_no_copy_for_those_who_read_it(plane, tmp_path):
    """The daemon hears of it later, and here never."""
    (tmp_path / "a").write_bytes(b"before it")
    served = plane(tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(BOTH), str(tmp_path / "a")]
    assert served.run(command) == (0, b"b'AFTER'\nb'childe it'\n", b"")
    assert served.counts["copy"] == 0


def test_the_shim_alone_changes_nothing(files):
    command = ["bash", "-c", f"cat {files}/f03.bin; ls {files}"]
    assert run(command, env=os.environ | {"LD_PRELOAD": str(library("preload"))}) == run(command)


BY_DESCRIPTOR = """
    import fcntl, os, subprocess, sys
    root = sys.argv[1]
    def show(call, *a, **k):
        try: print(call(*a, **k), flush=True)
        except OSError as e: print(type(e).__name__, e.errno, flush=True)
    def other(how):  # a process that headrace does not see
        code = f'import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDWR); {how}'
        env = {k: v for k, v in os.environ.items() if k not in ('LD_PRELOAD', 'HEADRACE_RUN')}
        ended = subprocess.run([sys.executable, '-c', code, root + '/a'], capture_output=True, env=env)
        print(ended.returncode, ended.stderr[-60:], flush=True)
    exclusive = 'fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)'
    f = os.open(root + '/a', os.O_RDONLY)
    print(os.read(f, 3))
    out = os.open(root + '/out', os.O_RDWR | os.O_CREAT)
    show(os.copy_file_range, f, out, 4)
    f = os.open(root + '/a', os.O_RDONLY)
    show(fcntl.flock, f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other(exclusive)
    show(fcntl.flock, f, fcntl.LOCK_UN)
    other(exclusive)
    f = os.open(root + '/a', os.O_RDONLY)
    show(fcntl.lockf, f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    other('fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)')
    other('fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 900)')
    os.close(f)
    with open(root + '/a', 'r+b') as w:
        fcntl.flock(w, fcntl.LOCK_EX)
        f = os.open(root + '/a', os.O_RDONLY)
        show(fcntl.flock, f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    show(fcntl.flock, f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    f = os.open(root + '/a', os.O_RDONLY)
    show(os.listxattr, f)
    show(os.getxattr, f, 'user.colour')
    show(os.setxattr, f, 'user.size', b'9')
    show(os.removexattr, f, 'user.colour')
    show(os.fchmod, f, 0o640)
    show(os.utime, f, ns=(10**18, 10**18))
    show(os.fchown, f, -1, os.getgid())
    show(os.fsync, f)
    print(os.fstatvfs(f).f_blocks == os.statvfs(root).f_blocks)
    s = os.stat(root + '/a')
    print(oct(s.st_mode), s.st_mtime_ns, os.listxattr(root + '/a'))
    f = os.open(root + '/a', os.O_RDONLY)
    for change in (os.fchmod, 0o600), (os.utime, (5, 6)), (os.setxattr, 'user.size', b'10'):
        show(change[0], f, *change[1:])
        print(oct(os.fstat(f).st_mode), os.fstat(f).st_mtime)
    f = os.open(root + '/a', os.O_RDONLY)
    os.chmod(root + '/a', 0o604)  # seen at once, though it was looked at just now
    print(oct(os.fstat(f).st_mode))
    f = os.open(root + '/holes', os.O_RDONLY)
    print(os.lseek(f, 0, os.SEEK_DATA), os.lseek(f, 0, os.SEEK_HOLE))
    f = os.open(root + '/holes', os.O_RDONLY)
    show(lambda f: fcntl.ioctl(f, 0x80086601, bytes(8)), f)  # FS_IOC_GETFLAGS
    born = ['stat', '-c', '%W', '-'], ['stat', '-c', '%W', root + '/a']
    f = os.open(root + '/a', os.O_RDONLY)
    print(len({subprocess.run(one, stdin=f, capture_output=True).stdout for one in born}))
"""


def test_what_is_done_to_a_descriptor_is_done_to_the_original(plane, tmp_path):
    """Locks, attributes, modes, times, and copies that the kernel makes."""
    outcomes = []
    for served in (False, True):
        root = tmp_path / str(served)
        root.mkdir()
        (root / "a").write_bytes(b"0123456789")
        with open(root / "holes", "wb") as f:
            f.seek(1 << 20)
            f.write(b"data")
        with contextlib.suppress(OSError):  # not every file system has them
            os.setxattr(root / "a", "user.colour", b"red")
        command = [sys.executable, "-c", textwrap.dedent(BY_DESCRIPTOR), str(root)]
        outcomes.append(plane(root).run(command) if served else run(command))
    assert outcomes[0][0] == 0, outcomes[0]
    assert outcomes[1] == outcomes[0]


FOLLOWS = """
    import os, subprocess, sys
    path = sys.argv[1]
    def append(text):
        subprocess.run(['sh', '-c', f'printf {text} >> {path}'], env={})
    buffered, plain, empty = open(path), os.open(path, os.O_RDONLY), open(path + '.empty', 'rb', 0)
    looks = [os.open(path, os.O_RDONLY) for _ in range(3)]
    print(buffered.readlines(), os.lseek(plain, 0, 2))
    append('more')
    print(os.fstat(looks[0]).st_size, os.lseek(looks[1], 0, 2), os.pread(looks[2], 9, 8))
    print(os.fstat(plain).st_size, os.read(plain, 9), buffered.read(), empty.read())
    path += '.empty'
    append('first')
    print(os.fstat(empty.fileno()).st_size, empty.read())
    os.replace(path, path + '.old')
    open(path, 'w').write('another')
    print(empty.read(), open(path).read())
"""


def test_whoever_reads_on_gets_what_others_append(plane, tmp_path):
    """As `tail -f` does, by descriptors that are open."""
    outcomes = []
    for served in (False, True):
        root = tmp_path / str(served)
        root.mkdir()
        (root / "log").write_text("one\ntwo\n")
        (root / "log.empty").touch()
        command = [sys.executable, "-c", textwrap.dedent(FOLLOWS), str(root / "log")]
        if served:
            one = plane(root)
            outcomes.append(one.run(command))
            assert one.counts["copy"] == 6
        else:
            outcomes.append(run(command))
    assert outcomes[0][0] == 0, outcomes[0]
    assert outcomes[1] == outcomes[0]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_small_file_that_is_read_asks_its_storage_once(plane, tmp_path):
    """Python opens, looks twice, reads, and reads the end: what was asked a moment ago is known."""
    (tmp_path / "root").mkdir()
    paths = [tmp_path / "root" / str(i) for i in range(60)]
    for path in paths:
        path.write_bytes(b"small")
    served, calls = plane(tmp_path / "root"), tmp_path / "calls"
    command = ["strace", "-f", "-o", str(calls), "-e", "trace=newfstatat,statx"]
    ended = served.run([*command, sys.executable, "-c", READ, *map(str, paths)])
    if not calls.exists() or "+++" not in calls.read_text():
        pytest.skip(f"strace may not look at programs here: {ended[2][-200:]}")
    assert ended[0] == 0, ended
    assert served.counts["copy"] == len(paths) + 1
    asked = [line for line in calls.read_text().splitlines() if f'"{paths[0].parent}/' in line]
    known = [line for line in asked if "AT_STATX_DONT_SYNC" in line]
    assert known
    assert len(asked) - len(known) < 2 * len(paths)  # some were a long while at it


OPEN_STILL = """
    import fcntl, os, sys
    path = sys.argv[1]
    held = [os.open(path, os.O_RDONLY) for _ in range(14)]
    for line in sys.stdin:
        f = held.pop()
        try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e: print(e.errno, end=' ')
        fcntl.flock(f, fcntl.LOCK_UN)
        print(tuple(os.fstat(f))[:7] == tuple(os.stat(path))[:7], os.read(f, 3), flush=True)
"""


@pytest.mark.parametrize("tier", [False, True])
def test_what_is_open_is_known_after_its_daemon_is_gone(plane, tmp_path, tier):
    """By the boards before: it is its original's, whoever asks, and locks hold others off."""
    path, copies = tmp_path / "root" / "a", tmp_path / "tier"
    path.parent.mkdir()
    path.write_bytes(b"0123")
    copies.mkdir()
    served = plane(path.parent, tier=copies if tier else None)
    board = _memfd(_bytes_of(served.board.fd))
    served.page.publish(os.getpid(), board, (os.dup(served.ring.fd), served.ring.inode))
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OPEN_STILL), path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=served.environment,
    ) as program:  # fmt: skip

        def ask():
            program.stdin.write("\n")
            program.stdin.flush()
            return program.stdout.readline()

        assert ask() == "True b'012'\n"
        assert served.counts["copy"] == 14
        written = os.open(f"/proc/self/fd/{board[0]}", os.O_RDWR)
        for _ in range(6):  # no daemon, and still none
            served.page.clear()
            assert ask() == "True b'012'\n"
        with open(path, "rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert ask() == f"{errno.EAGAIN} True b'012'\n"
        newer = plane(path.parent)
        for _ in range(4):  # that stays the same: the one before is not forgotten for it
            board_now, ring = newer.board, newer.ring
            served.page.publish(
                os.getpid(), (os.dup(board_now.fd), board_now.inode), (os.dup(ring.fd), ring.inode)
            )
            assert ask() == "True b'012'\n"
            served.page.clear()
        # Its inode under another name, or an entry that was being written: it may be another file.
        if tier:
            (copies / "0.copy").rename(copies / "other")
        else:
            (entries,) = struct.unpack("Q", os.pread(written, 8, 48))
            os.pwrite(written, struct.pack("II", 5, 0), entries + 92)  # generation, no copy
        assert ask() == "False b'012'\n"
        os.close(written)
        program.stdin.close()


CANNOT = """
    import errno, fcntl, os, struct, sys
    f = os.open(sys.argv[1], os.O_RDONLY)
    os.rename(sys.argv[1], sys.argv[1] + '.old')
    open(sys.argv[1], 'w').close()
    free, asked = (struct.pack('hhqqi', kind, 0, 0, 0, 0) for kind in (fcntl.F_UNLCK, fcntl.F_WRLCK))
    flags, set_flags = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
    for call, *rest in (
        (fcntl.flock, fcntl.LOCK_EX), (fcntl.lockf, fcntl.LOCK_SH), (os.fchmod, 0o600),
        (os.lockf, os.F_TLOCK, 0), (fcntl.fcntl, fcntl.F_SETLEASE, fcntl.F_RDLCK),
        (fcntl.ioctl, set_flags, bytes(8)),
        # what sets nothing
        (fcntl.flock, fcntl.LOCK_UN), (fcntl.fcntl, fcntl.F_SETLK, free), (os.lockf, os.F_ULOCK, 0),
        (fcntl.fcntl, fcntl.F_GETLK, asked), (fcntl.fcntl, fcntl.F_OFD_GETLK, asked),
        (fcntl.fcntl, fcntl.F_OFD_SETLK, free), (os.lockf, os.F_TEST, 0),
        (fcntl.fcntl, fcntl.F_GETLEASE), (fcntl.ioctl, flags, bytes(8)),
    ):
        try: call(f, *rest)
        except OSError as e: print(errno.errorcode[e.errno], end=' ')
"""


def test_what_cannot_be_done_to_the_original_is_refused(plane, tmp_path):
    """Rather than done to a copy, where nobody would see it; what sets nothing is not."""
    (tmp_path / "a").write_bytes(b"0123")
    served = plane(tmp_path)
    if shutil.which("flock") is not None:  # a copy that the shell has open too
        command = f"exec 3< {tmp_path}/a; flock 3 || echo refused; cat <&3"
        status, out, err = served.run(["bash", "-c", command])
        assert (status, out) == (0, b"refused\n0123"), err
        assert os.strerror(errno.ENOLCK).encode() in err
    outcome = served.python(textwrap.dedent(CANNOT), tmp_path / "a")
    assert outcome == (0, b"ENOLCK ENOLCK ESTALE ENOLCK ENOLCK ESTALE ", b"")


ELSEWHERE = """
    import os, sys
    root = sys.argv[1]
    def show(): print(open(root + '/a', 'rb').read(), os.stat(root + '/a').st_size, os.path.exists(root + '/b'))
    show()
    os.chroot(sys.argv[2])
    show()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes the right to change the root folder")
def test_in_another_root_a_path_means_another_file(plane, tmp_path):
    """Though nothing changes, as the user says."""
    root, other = tmp_path / "data", tmp_path / "other"
    inner = other / root.relative_to("/")
    for folder, text in ((root, b"outside"), (inner, b"inside!")):
        folder.mkdir(parents=True)
        (folder / "a").write_bytes(text)
    (root / "b").touch()
    served = plane(root, immutable=True)
    program = textwrap.dedent(ELSEWHERE)
    status, out, err = served.python(program, root, other)
    assert (status, out) == (0, b"b'outside' 7 True\nb'inside!' 7 False\n"), err

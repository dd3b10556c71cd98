"""A mount behaves like the folder that its store was made from (R18)."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import headrace as hr

NAMES = [
    b"plain.bin",
    b"a/one.png",
    b"a/two.png",
    b"a/b/c/deep.txt",
    b"a/b.png",
    b"a/b-and-more.png",
    b"a0/one.png",
    "ä/ö ü.jpg".encode(),
    "日本/写真.jpg".encode(),
    b"\xff\xfe/no utf-8 \x80",
    b"with\nnewline and 'quotes\".bin",
    b"n" * 255,
    b"m/" + b"n" * 255,
    b"empty",
    *(b"many/%04d.bin" % i for i in range(2500)),
]
SIZES = (0, 1, 4095, 4096, 4097, 70_000)
LARGE = {b"a/large.bin": 5_000_000, b"a/larger.bin": 11 << 20}

# Of what does not exist, or exists otherwise.
STRANGE = [
    b"nothing", b"a/nothing", b"nothing/at all", b"plain.bin/x", b"a/", b"a/b", b"a/b/", b"empty/",
    b"a/.", b"a/..", b".", b"a/b/../two.png", b"a//two.png", b"x" * 256, b"a/" + b"x" * 300,
    b"many", b"a/b/c", b"a/one", b"a/one.png.", b"", b"a" * 255,
]  # fmt: skip


@pytest.fixture(scope="module")
def twins(module_mounts, tmp_path_factory) -> tuple[bytes, bytes]:
    """A folder, and a mount of the store packed from it."""
    base = tmp_path_factory.mktemp("twins")
    folder = base / "folder"
    noise = random.Random(4)
    sizes = {name: noise.choice(SIZES) for name in NAMES} | LARGE | {b"empty": 0}
    for name, size in sizes.items():
        path = os.path.join(os.fsencode(folder), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(noise.randbytes(size))
    hr.pack(folder, base / "store.hr", format="files")
    mounted = module_mounts(base / "store.hr")
    return os.fsencode(folder), os.fsencode(mounted)


def outcome(call, *arguments):
    """What a call gives, or the number of its error."""
    try:
        return call(*arguments)
    except OSError as e:
        return f"error {errno.errorcode[e.errno]}"


def about(status: os.stat_result) -> tuple[int, int]:
    return stat.S_IFMT(status.st_mode), status.st_size if stat.S_ISREG(status.st_mode) else 0


class LikeAFolder(RuleBasedStateMachine):
    """The same operations on both; whatever one says, the other says."""

    roots: tuple[bytes, bytes]

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[int, int]] = []

    paths = st.sampled_from(NAMES[:30] + NAMES[-3:] + list(LARGE) + STRANGE)

    def both(self, what, name: bytes):
        ours = [outcome(what, os.path.join(root, name)) for root in self.roots]
        assert ours[0] == ours[1], (what, name)
        return ours[0]

    @rule(name=paths)
    def stat(self, name):
        self.both(lambda p: about(os.stat(p)), name)
        self.both(lambda p: about(os.lstat(p)), name)

    @rule(name=paths)
    def list_names(self, name):
        self.both(lambda p: sorted(os.listdir(p)), name)

    @rule(name=paths)
    def list_types(self, name):
        self.both(lambda p: sorted((e.name, e.is_dir(), e.is_file()) for e in os.scandir(p)), name)

    @rule(name=paths, mode=st.sampled_from([os.F_OK, os.R_OK]))
    def access(self, name, mode):
        self.both(lambda p: os.access(p, mode), name)

    @rule(name=paths)
    def attribute_that_is_not_there(self, name):
        self.both(lambda p: os.getxattr(p, "user.nothing"), name)

    @rule(name=paths)
    def link_target(self, name):
        self.both(os.readlink, name)

    @rule(name=paths)
    def open_file(self, name):
        flags = os.O_RDONLY | os.O_CLOEXEC
        fds = [outcome(os.open, os.path.join(root, name), flags) for root in self.roots]
        if isinstance(fds[0], int) and isinstance(fds[1], int):
            self.open.append((fds[0], fds[1]))
        else:
            assert fds[0] == fds[1], name

    @rule(name=paths)
    def open_as_a_folder(self, name):
        def kind(path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            os.close(fd)

        self.both(kind, name)

    @rule(data=st.data())
    def use_an_open_file(self, data):
        if not self.open:
            return
        pair = data.draw(st.sampled_from(self.open))
        offset = data.draw(st.integers(0, 12 << 20) | st.sampled_from([0, 4096, 70_000]))
        count = data.draw(st.sampled_from([0, 1, 4096, 70_000, 1 << 20]))
        what = data.draw(st.sampled_from(["read", "pread", "set", "cur", "end", "fstat", "mmap"]))
        outcomes = [outcome(USES[what], fd, offset, count) for fd in pair]
        assert outcomes[0] == outcomes[1], (what, offset, count)

    @rule(data=st.data())
    def close_file(self, data):
        if self.open:
            for fd in self.open.pop(data.draw(st.integers(0, len(self.open) - 1))):
                os.close(fd)

    def teardown(self):
        for pair in self.open:
            for fd in pair:
                os.close(fd)


def _mapped(fd: int, offset: int, count: int) -> bytes:
    if not stat.S_ISREG(os.fstat(fd).st_mode) or not os.fstat(fd).st_size:
        return b""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        return mapped[offset : offset + count]


USES = {
    "read": lambda fd, _, n: os.read(fd, n),
    "pread": lambda fd, at, n: os.pread(fd, n, at),
    "set": lambda fd, at, _: os.lseek(fd, at, os.SEEK_SET),
    "cur": lambda fd, at, _: os.lseek(fd, -(at % 100), os.SEEK_CUR),
    "end": lambda fd, at, _: (
        os.lseek(fd, -(at % 100), os.SEEK_END) if stat.S_ISREG(os.fstat(fd).st_mode) else 0
    ),
    "fstat": lambda fd, *_: about(os.fstat(fd)),
    "mmap": _mapped,
}


def test_random_operations_give_what_the_folder_gives(twins):
    LikeAFolder.roots = twins
    run_state_machine_as_test(
        LikeAFolder,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def digest(path: bytes) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def test_every_file_has_its_bytes_and_nothing_is_added(twins):
    walks = []
    for root in twins:
        files = {}
        for folder, _, names in os.walk(root):
            for name in names:
                path = os.path.join(folder, name)
                files[os.path.relpath(path, root)] = digest(path)
        walks.append(files)
    assert len(walks[0]) == len(NAMES) + len(LARGE)
    assert walks[0] == walks[1]


def test_threads_read_the_same_at_once(twins):
    noise = random.Random(9)
    names = [*NAMES, *LARGE]

    def some(seed: int) -> int:
        own = random.Random(seed)
        for _ in range(60):
            name = own.choice(names)
            fds = [os.open(os.path.join(root, name), os.O_RDONLY) for root in twins]
            try:
                at, n = own.randrange(1 << 20), own.choice((100, 70_000))
                assert os.pread(fds[0], n, at) == os.pread(fds[1], n, at), name
            finally:
                for fd in fds:
                    os.close(fd)
        return 60

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(some, [noise.random() for _ in range(8)])) == 480


def test_a_child_after_fork_and_exec_reads_on(twins):
    path = os.path.join(twins[1], b"a/large.bin")
    with open(path, "rb") as f:
        f.seek(4000)
        child = subprocess.run(
            [sys.executable, "-c", "import os,sys; sys.stdout.buffer.write(os.read(0, 100))"],
            stdin=f, capture_output=True, check=True,
        )  # fmt: skip
        assert f.raw.tell() == 4100
    with open(os.path.join(twins[0], b"a/large.bin"), "rb") as f:
        f.seek(4000)
        assert child.stdout == f.read(100)


WRITES = {
    "write": lambda p: os.open(p, os.O_WRONLY),
    "read and write": lambda p: os.open(p, os.O_RDWR),
    "truncate": lambda p: os.truncate(p, 0),
    "create": lambda p: os.open(p + b".new", os.O_CREAT | os.O_WRONLY),
    "mkdir": lambda p: os.mkdir(p + b".new"),
    "unlink": os.unlink,
    "rename": lambda p: os.rename(p, p + b".new"),
    "link": lambda p: os.link(p, p + b".new"),
    "symlink": lambda p: os.symlink(p, p + b".new"),
    "chmod": lambda p: os.chmod(p, 0o600),
    "utime": os.utime,
    "setxattr": lambda p: os.setxattr(p, "user.x", b"1"),
    "removexattr": lambda p: os.removexattr(p, "user.headrace.index"),
    "mkfifo": lambda p: os.mkfifo(p + b".new"),
}


@pytest.mark.parametrize("what", WRITES)
def test_writing_is_refused(twins, what):
    path = os.path.join(twins[1], b"a/one.png")
    before = digest(path)
    assert outcome(WRITES[what], path) == "error EROFS"
    assert not os.access(path, os.W_OK)
    assert digest(path) == before


def test_what_a_file_says_of_itself(twins):
    path = os.path.join(twins[1], b"a/one.png")
    status = os.stat(path)
    assert stat.S_IMODE(status.st_mode) == 0o444
    assert stat.S_IMODE(os.stat(twins[1] + b"/a").st_mode) == 0o555
    assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())
    with hr.open(os.getxattr(twins[1], "user.headrace.store").decode()) as store:
        index = store.find(b"a/one.png")
        assert status.st_mtime_ns == os.stat(Path(store.path) / "store.json").st_mtime_ns
        assert os.getxattr(twins[1], "user.headrace.fingerprint").decode() == store.fingerprint
    assert os.getxattr(path, "user.headrace.index") == b"%d" % index
    assert os.getxattr(path, "user.headrace.name") == b"a/one.png"
    from headrace.base.checksum import crc32c

    data = Path(os.fsdecode(path)).read_bytes()
    assert os.getxattr(path, "user.headrace.crc32c") == b"%08x" % crc32c(data)
    assert set(os.listxattr(path)) == {f"user.headrace.{x}" for x in ("index", "name", "crc32c")}
    assert status.st_ino == 16 + index
    assert len({os.stat(os.path.join(twins[1], n)).st_ino for n in NAMES}) == len(NAMES)


def test_a_listing_goes_on_where_it_was_left(twins):
    """A large folder is read in pieces; `telldir` and `seekdir` work."""
    script = """
import ctypes, sys
c = ctypes.CDLL(None, use_errno=True)
c.opendir.restype = ctypes.c_void_p; c.readdir.restype = ctypes.c_void_p
c.telldir.restype = ctypes.c_long
for f, a in (("readdir", 1), ("telldir", 1)): getattr(c, f).argtypes = [ctypes.c_void_p]
c.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
d = c.opendir(sys.argv[1].encode())
def name():
    e = c.readdir(d)
    return ctypes.string_at(e + 19) if e else None
first, places = [], []
while True:
    places.append(c.telldir(d)); n = name()
    if n is None: break
    first.append(n)
assert len(set(first)) == len(first) == 2502, len(first)
for at in (0, 1, 2, 3, 700, 1500, 2501):
    c.seekdir(d, places[at])
    rest = []
    while (n := name()) is not None: rest.append(n)
    assert rest == first[at:], at
"""
    subprocess.run([sys.executable, "-c", script, os.fsdecode(twins[1]) + "/many"], check=True)

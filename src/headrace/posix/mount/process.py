"""A mount as a process: opened, attached, serving until it is unmounted or told to end.

In the background a child of its own session does this. It gets its options on stdin (they may hold
secrets, which a command line would show), says on stdout that it serves or what is wrong, and then keeps
its log in memory: `getfattr -n user.headrace.log --only-values DIR`. Nothing is left on disk, however it ends.

Requests come from /dev/fuse. One thread at a time waits for one. While a request can be answered from memory
it stays that one thread: handing over would cost more than the answer. Before it reads from the store it
lets the next one take its place, so that slow reads wait beside each other.

Any user may attach and detach, through fusermount3. Mounts are looked at in the kernel's table and never
touched: one whose process hangs or is dead must not make this hang.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.base.lifetime import Latch
from headrace.errors import HeadraceError, MountError
from headrace.io.objects.location import is_url, local_path, shown
from headrace.machine.host import Mount, mounts
from headrace.posix.mount import protocol
from headrace.posix.mount.filesystem import FileSystem, SampleBytes
from headrace.posix.mount.protocol import READ_BYTES_MAX, REQUEST_BYTES, BadRequestError
from headrace.store import Store, open_store
from headrace.store.manifest import FILE_NAME
from headrace.store.opening import store_of_scan
from headrace.store.sources.folder import scan_folder
from headrace.store.sources.scan import SourceOptions, raise_problems

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("headrace.mount")

_GOES_ON = frozenset((errno.EINTR, errno.EAGAIN, errno.ENOENT))
"""ENOENT: the request was interrupted before it was taken, or before it was answered."""


class Serving:
    """Threads over one connection: the mounted descriptor of /dev/fuse, closed by `close`.

    `over` is set when it is unmounted; who sets it ends the threads.
    """

    def __init__(self, device: int, file_system: FileSystem, *, threads: int = 16) -> None:
        self._device = device
        self._file_system = file_system
        self._turn = threading.Lock()
        self.over = Latch()
        self._threads = [
            threading.Thread(target=self._serve, name=f"mount-{i}", daemon=True)
            for i in range(threads)
        ]

    def start(self) -> None:
        """Begin to serve."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the connection: whoever waits for an answer gets an error."""
        # Not closed: a thread that is about to read must not meet another file under this number.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, self._device, inheritable=False)
        os.close(nothing)

    def _serve(self) -> None:
        buffer = memoryview(bytearray(REQUEST_BYTES))
        turn = self._turn
        mine = False

        def let_others() -> None:
            nonlocal mine
            if mine:
                mine = False
                turn.release()

        try:
            while not self.over.is_set():
                if not mine:
                    turn.acquire()
                    mine = True
                if not self._one(buffer, let_others):
                    break
        finally:
            let_others()
            self.over.set()

    def _one(self, buffer: memoryview, let_others: Callable[[], None]) -> bool:
        """Takes and answers one request; False when there will be none."""
        try:
            count = os.readv(self._device, [buffer])
        except OSError as e:
            if e.errno in _GOES_ON:
                return True
            if e.errno != errno.ENODEV and not self.over.is_set():  # ENODEV says: unmounted
                _log.error("the connection to the kernel broke: %s", e)
            return False
        if not count:
            return False
        try:
            reply = self._file_system.answer(buffer[:count], let_others)
        except BadRequestError as e:
            _log.error("not a request: %s", e)
            return True
        if reply is None:
            return True
        try:
            os.writev(self._device, reply)
        except OSError as e:
            if e.errno not in _GOES_ON and e.errno != errno.ENODEV:
                _log.error("the kernel refused an answer: %s", e)
                # Without any answer the caller would wait until the kernel's timeout.
                refusal = protocol.error_reply(protocol.unique_of(reply), errno.EIO)
                with contextlib.suppress(OSError):
                    os.writev(self._device, refusal)
        return True


_START_S = 600.0
"""Longest wait for a mount in the background. Listing a source without an index takes most of it."""

_LOG_LINES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """How a store is mounted. Most users leave all of it alone."""

    allow_other: bool = False
    """Other users may look in. Needs `user_allow_other` in /etc/fuse.conf, or root."""

    kept_bytes: int = 64 << 20
    """Memory for samples that were read last, before the kernel's page cache has them."""

    check_bytes_max: int = 1 << 30
    """Samples above this are delivered unchecked: checking reads all of one before its first byte."""

    threads: int = 16
    """Reads of the store under way at most: enough for a local disk, and for a few objects."""

    timeout_s: int = 120
    """After so long without an answer the kernel ends the mount (Linux 6.15 and later)."""

    log: str | None = None  # file that the log goes to as well
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    """For URLs, as for `open`. Not shown: secrets may be among them."""

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name, least in (("kept_bytes", 0), ("check_bytes_max", 0), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {least} or more")
        if not 1 <= self.timeout_s <= 65535:
            raise ValueError(f"timeout_s is {self.timeout_s}, expected 1 to 65535")


@dataclass(frozen=True, slots=True)
class MountedStore:
    """What was mounted."""

    store: str
    folder: str
    samples: int
    pid: int
    fingerprint: str = field(repr=False)


def serve(
    store: str,
    folder: str,
    options: MountOptions,
    ready: Callable[[MountedStore], None] = lambda _: None,
) -> None:
    """Mounts, and serves until it is unmounted, or SIGTERM or SIGINT comes. In the main thread.

    The store may be a source that can be opened directly, the folder must be empty; `ready` is called once
    when it shows the store. Raises HeadraceError if the store cannot be opened, or not mounted there.
    """
    where = check_folder(folder)
    lines = _Lines()
    handlers = [lines] if options.log is None else [lines, logging.FileHandler(options.log)]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        with _open(store, options) as opened:
            _serve(opened, where, options, ready, lines)
    finally:
        for handler in handlers:
            _log.removeHandler(handler)
            handler.close()


def _open(store: str, options: MountOptions) -> Store:
    """A folder that is no store as it lies: programs open also what lies beside samples."""
    path = local_path(store)
    if is_url(store) or not os.path.isdir(path) or os.path.lexists(os.path.join(path, FILE_NAME)):
        return open_store(store, storage_options=options.storage_options)
    files = SourceOptions(format="files", dot_files=True, on_error="skip")
    scan: Any = scan_folder(path, files)
    dangling = [p for p in scan.skipped if os.path.islink(p.path) and not os.path.exists(p.path)]
    raise_problems(path, [p for p in scan.skipped if p not in dangling], "Mend or remove them.")
    for link in dangling:  # whoever opens it finds nothing, here and there
        _log.warning("%s is left out: %s", link.path, link.reason)
    return store_of_scan(path, scan, files)


def _serve(
    store: Store,
    where: str,
    options: MountOptions,
    ready: Callable[[MountedStore], None],
    lines: _Lines,
) -> None:
    file_system = FileSystem(
        store,
        SampleBytes(store, kept_bytes=options.kept_bytes, check_bytes_max=options.check_bytes_max),
        owner=(os.getuid(), os.getgid()),
        mtime_ns=_mtime_ns(store.path),
        timeout_s=options.timeout_s,
        log_lines=lambda: "".join(lines.kept),
    )
    name = shown(store.path)
    device = attach(where, name, allow_other=options.allow_other)
    serving = Serving(device, file_system, threads=options.threads)
    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before[number] = signal.signal(number, lambda *_: serving.over.set())
        serving.start()
        _log.info("%s: %d samples at %s", name, len(store), where)
        ready(MountedStore(name, where, len(store), os.getpid(), store.fingerprint))
        serving.over.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        mounted = mounted_at(where)
        if mounted is not None and mounted.kind == TYPE:
            # Whoever has files open keeps them until the connection ends below, and then gets errors.
            detach(where, lazy=True)
        serving.close()
        _log.info("%s ends", where)


def mount(store: str, folder: str, options: MountOptions) -> MountedStore:
    """Mounts in the background, and returns when the folder shows the store; as `serve` otherwise."""
    request = {
        "store": store if is_url(store) else os.path.abspath(local_path(store)),
        "folder": os.path.abspath(folder),
        "options": asdict(options),
    }
    deadline = time.monotonic() + _START_S
    with open(os.memfd_create("headrace-mount"), "w+b") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-c", "from headrace.posix.mount.process import child; child()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
            start_new_session=True, cwd="/",
        )  # fmt: skip
        timer = threading.Timer(_START_S, process.terminate)
        timer.start()
        try:
            output = _answer_of(process, json.dumps(request).encode())
            complaints.seek(0)
            mounted = _mount_of(output, complaints.read(), folder)
        except BaseException as e:
            process.terminate()
            process.wait()
            if isinstance(e, MountError) and time.monotonic() >= deadline:
                raise MountError(
                    f"{folder}: {store} was not mounted within {_START_S:g} s.", path=folder
                ) from e
            raise
        finally:
            timer.cancel()
    # So that it is no zombie when it ends, should this process live so long.
    threading.Thread(target=process.wait, daemon=True).start()
    return mounted


def _answer_of(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """What a child says until it lets go of its streams."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and said why
            process.stdin.write(request)
            process.stdin.close()
        return process.stdout.read()


def _mount_of(output: bytes, complaint: bytes, folder: str) -> MountedStore:
    """The mount that a child's answer speaks of.

    Raises:
        HeadraceError: what the child met.
    """
    try:
        answer = json.loads(output)
    except ValueError:
        last = (complaint.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise MountError(
            f"{folder}: the mount did not come up: {last}",
            path=folder,
            next_step="Run it in the foreground: headrace mount --foreground.",
        ) from None
    if "error" in answer:
        fields = answer["error"]
        kind = getattr(errors, fields.pop("type"), HeadraceError)
        raise kind(fields.pop("message"), **fields)
    return MountedStore(**answer)


def child() -> None:
    """The process in the background: see the module."""
    request = json.load(sys.stdin)
    answered = False

    def answer(fields: dict[str, Any]) -> None:
        """The parent waits for the end of stdout: let go of its streams."""
        nonlocal answered
        answered = True
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(fields))
            sys.stdout.flush()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.close(nothing)

    def ready(mounted: MountedStore) -> None:
        answer(asdict(mounted))
        _log.addHandler(logging.NullHandler())

    try:
        serve(request["store"], request["folder"], MountOptions(**request["options"]), ready)
    except (HeadraceError, ValueError) as e:
        if answered:
            raise
        kept = {k: v for k, v in vars(e).items() if k != "message" and isinstance(v, (str, int))}
        message = getattr(e, "message", str(e))
        answer({"error": {"type": type(e).__name__, "message": message, **kept}})
        sys.exit(1)


def unmount(folder: str, *, lazy: bool = False) -> str:
    """Takes a mount away, whatever became of its process. Returns the absolute path.

    With `lazy` though it is in use: whoever uses it gets errors when the process ends.

    Raises MountError if nothing of ours is mounted there, or it is in use.
    """
    path = resolved(folder)
    mounted = mounted_at(path)
    if mounted is None or mounted.kind != TYPE:
        what = "nothing" if mounted is None else f"{mounted.source} ({mounted.kind})"
        raise MountError(
            f"{path}: {what} is mounted here, expected a store mounted by headrace.",
            path=path,
            next_step="`findmnt -t fuse.headrace` lists the mounts.",
        )
    detach(path, lazy=lazy)
    return path


def _mtime_ns(path: str) -> int:
    """When the data came to be: of the manifest, or of the source; now, where it is remote."""
    if not is_url(path):
        for candidate in (os.path.join(path, "store.json"), path):
            with contextlib.suppress(OSError):
                return os.stat(candidate).st_mtime_ns
    return time.time_ns()


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.kept: deque[str] = deque(maxlen=_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(self.format(record) + "\n")


DEVICE = "/dev/fuse"
TYPE = "fuse.headrace"

_HELPER = "fusermount3"
_HELPER_S = 30.0
_ALIVE_S = 10.0
_INSTALL = "Install it: `apt install fuse3` (Debian, Ubuntu), `dnf install fuse3` (Fedora, Rocky)."
_USERS_S = 2.0
_USERS_MAX = 10


def attach(folder: str, source: str, *, allow_other: bool = False) -> int:
    """Mounts, and returns the file descriptor of /dev/fuse on which requests come.

    The mount table and `df` show `source`.

    Raises MountError if fusermount3 or /dev/fuse is missing or refuses.
    """
    helper = _helper()
    if not os.path.exists(DEVICE):
        raise MountError(
            f"{DEVICE} is missing: this system has no FUSE.",
            path=DEVICE,
            next_step="Load the module (`modprobe fuse`), or give the container the device "
            "(`--device /dev/fuse --cap-add SYS_ADMIN`).",
        )
    # `default_permissions`: the kernel checks the modes, without asking for each access.
    options = f"ro,nosuid,nodev,default_permissions,max_read={READ_BYTES_MAX},subtype=headrace"
    options += ",allow_other" if allow_other else ""
    # Backslash and comma have a meaning in options.
    options += ",fsname=" + re.sub(r"([\\,])", r"\\\1", source)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, its:
        done = _run([helper, "-o", options, "--", folder], comm=its)
        its.close()
        fds: list[int] = []
        if done.returncode == 0:
            ours.settimeout(_HELPER_S)
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    if not fds:
        raise _refused(folder, done.stderr)
    return fds[0]


def check_folder(folder: str) -> str:
    """The absolute path of a folder to mount on, which has to be empty.

    A mount of ours whose process was killed is taken away first.

    Raises MountError if it is missing, no folder, not empty, or in use as a mount.
    """
    path = resolved(folder)
    mounted = mounted_at(path)
    if mounted is not None and mounted.kind == TYPE and _is_dead(path):
        detach(path, lazy=True)
        mounted = mounted_at(path)
    if mounted is not None:
        raise MountError(
            f"{path}: {mounted.source} ({mounted.kind}) is mounted here already.",
            path=path,
            next_step=f"Unmount it (`headrace unmount {path}`), or name another folder.",
        )
    try:
        with os.scandir(path) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        raise MountError(
            f"{path}: there is no such folder.", path=path, next_step=f"Make it: mkdir -p {path}"
        ) from None
    except NotADirectoryError:
        problem = f"{path} is a file, expected an empty folder."
    else:
        if first is None:
            return path
        problem = (
            f"{path}: the folder is not empty (it holds {os.fsdecode(first.name)!r}), and what lies in it "
            "would be hidden."
        )
    raise MountError(problem, path=path, next_step="Name an empty folder.")


def detach(folder: str, *, lazy: bool = False) -> None:
    """Unmounts; with `lazy` at once, though files in it are open: they end with their users.

    Raises MountError if it is in use, or another user's.
    """
    arguments = ["-u", *(["-z"] if lazy else []), "--", folder]
    done = _run([_helper(), *arguments])
    mounted = mounted_at(folder)
    if mounted is None or mounted.kind != TYPE:
        return
    errors = done.stderr.strip()
    if done.returncode and "busy" in errors.lower():
        users = users_of(folder)
        shown = ", ".join(f"{pid} ({name})" for pid, name in users)
        raise MountError(
            f"{folder}: the mount is busy"
            + (f"; files in it are used by process {shown}." if users else "."),
            path=folder,
            next_step="End what uses it, or take it away all the same: "
            f"`headrace unmount --lazy {folder}`.",
            errno=errno.EBUSY,
        )
    raise MountError(f"{folder}: cannot be unmounted: {errors or 'no reason given'}.", path=folder)


def mounted_at(folder: str) -> Mount | None:
    """The topmost mount on a folder (an absolute path without links); None where nothing is."""
    return next((mount for mount in reversed(mounts()) if mount.point == folder), None)


def resolved(folder: str) -> str:
    """The absolute path without links of a folder that may be a dead mount: it is not touched."""
    # Not the last component: looking at a mount whose process hangs would hang.
    head, tail = os.path.split(os.path.abspath(folder))
    path = os.path.join(os.path.realpath(head), tail)
    if mounted_at(path) is None and os.path.islink(path):
        path = os.path.realpath(path)
    return path


def users_of(folder: str) -> list[tuple[int, str]]:
    """Processes that have something open below a folder: number and name; those we may look at."""
    inside, users = folder + "/", []
    deadline = time.monotonic() + _USERS_S
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or time.monotonic() > deadline:
            continue
        uses = False
        try:
            for link in (process / "cwd", process / "root", *(process / "fd").iterdir()):
                with contextlib.suppress(OSError):
                    uses = uses or f"{os.readlink(link)}/".startswith(inside)
            if uses or f" {inside}" in (process / "maps").read_text(errors="replace"):
                users.append((int(process.name), (process / "comm").read_text().strip()))
        except OSError:  # it has ended, or is another user's
            continue
        if len(users) >= _USERS_MAX:
            break
    return users


def _is_dead(path: str) -> bool:
    """Whether nobody serves a mount any more. Asked of the kernel's cache, it would still seem alive.

    By a process of its own, which can be given up where the mount's process hangs.
    """
    try:
        done = _run(["stat", "-f", "--", path], seconds=_ALIVE_S)
    except MountError:
        return False
    return os.strerror(errno.ENOTCONN) in done.stderr or "connection abort" in done.stderr


def _helper() -> str:
    program = shutil.which(_HELPER)
    if program is None:
        raise MountError(
            f"{_HELPER} is missing: it is what lets a user mount.", path=_HELPER, next_step=_INSTALL
        )
    return program


def _run(
    command: list[str], comm: socket.socket | None = None, seconds: float = _HELPER_S
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, LC_ALL="C")
    handed: tuple[int, ...] = ()
    if comm is not None:
        environment["_FUSE_COMMFD"] = str(comm.fileno())
        handed = (comm.fileno(),)
    try:
        return subprocess.run(  # noqa: S603 - found by its name, with our arguments
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=environment, pass_fds=handed, timeout=seconds, check=False, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise MountError(
            f"{' '.join(command)} did not end within {seconds:g} s.", path=command[0]
        ) from e


def _refused(folder: str, errors: str) -> MountError:
    errors = errors.strip().removeprefix(f"{_HELPER}: ").rstrip(".") or "no reason given"
    next_step = None
    if "allow_other" in errors:
        next_step = (
            "Let root put `user_allow_other` into /etc/fuse.conf, or leave --allow-other out."
        )
    elif DEVICE in errors or "permission denied" in errors.lower():
        next_step = (
            f"Users need read and write access to {DEVICE} (mode 0666, as most systems have it), "
            f"and fusermount3 needs its set-user-ID bit."
        )
    elif "write access" in errors:
        next_step = "Name a folder of your own."
    return MountError(f"{folder}: cannot be mounted: {errors}.", path=folder, next_step=next_step)

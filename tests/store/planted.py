"""Plants what is no file of ours at every name that a command opens, and sees what the command does.

The names are those that an audit hook hears while the command runs undisturbed; nobody lists them by hand.
Each attempt runs in a child of its own, as the owner of everything or as another user.

    python planted.py [--kinds link,fifo] [--commands repair,append]     prints what happened, as JSON
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing.util  # noqa: F401 - another user may be unable to read the interpreter
import os
import re
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import zipfile  # noqa: F401 - likewise
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import headrace as hr
from headrace import checkpoint
from headrace.errors import HeadraceError
from headrace.runtime import RuntimeFolder
from headrace.store.pack import append, index, pack
from headrace.store.repair import repair
from headrace.store.summary import summarise
from headrace.store.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANG_S = float(os.environ.get("PLANTED_HANG_S", "15"))
"""After which a child counts as waiting for ever; an undisturbed one needs a fraction of a second."""

OTHER, STRANGER = 65534, 12345
"""Users: the one who runs the second half of the attempts, and the one whose folders are planted."""

KINDS = ("link", "dangling", "folder-link", "fifo", "socket", "device", "folder", "foreign")
_RANDOM = re.compile(r"\.[0-9a-f]{16}\.part$|/tail-")

FORMER = {
    "repair": ("store.hr/segment-0000-0000.hrv.new",),
    "append": ("store.hr/store.json.new", "store.hr/append.partial/journal"),
    "pack": (
        "new.hr.partial/journal",
        "new.hr.partial/store",
        "new.hr.partial/store/store.json.new",
    ),
    "index": ("index.hr.partial/store/segment-0000.hrd", "index.hr.partial/store/store.json.new"),
    "save": ("checkpoints/step-000000000002/manifest.json.0.new",),
}
"""Names that a command has opened at some time, and may again."""


def samples(folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    for i in range(6):
        (source / f"{i}.txt").write_bytes(b"sample %d " % i * 200)
    return source


def prepare(base: Path) -> None:
    """The tree that each attempt begins with."""
    source = samples(base)
    (base / "tree").mkdir()
    pack(source, base / "tree/store.hr")
    store = base / "tree/store.hr"
    volume = next(store.glob("*.hrv"))
    with volume.open("r+b") as f:
        f.seek(4096 + 100)
        f.write(b"damage")
    more = base / "more"
    more.mkdir()
    for i in range(3):
        (more / f"more{i}.txt").write_bytes(b"more %d " % i * 100)
    pack(source, base / "tree/whole.hr")
    with checkpoint.Checkpointer(base / "tree/checkpoints") as saver:
        saver.save({"a": np.arange(10)}, 1)


def _info(base: Path) -> None:
    with hr.open(base / "tree/store.hr") as store:
        summarise(store)


def _cache(base: Path) -> None:
    with hr.open(base / "tree/whole.hr") as store:
        loader = hr.loader(store, 2, cache_dir=str(base / "tree/cache"), tune=False)
        assert sum(len(b) for b in loader) == 6
        loader.close()


def _save(base: Path) -> None:
    options = checkpoint.CheckpointOptions(asynchronous=False, keep=1)
    checkpoint.Checkpointer(base / "tree/checkpoints", options=options).save({"a": np.arange(9)}, 2)


def _load(base: Path) -> None:
    checkpoint.Checkpointer(base / "tree/checkpoints").load()


def _runtime(base: Path) -> None:
    RuntimeFolder(base / "tree/runtime").claim().release()


COMMANDS: dict[str, Callable[[Path], object]] = {
    "info": _info,
    "verify": lambda base: verify(base / "tree/store.hr"),
    "repair": lambda base: repair(base / "tree/store.hr"),
    "append": lambda base: append(base / "more", base / "tree/store.hr"),
    "pack": lambda base: pack(base / "source", base / "tree/new.hr"),
    "overwrite": lambda base: pack(base / "source", base / "tree/whole.hr", overwrite=True),
    "index": lambda base: index(base / "source", base / "tree/index.hr"),
    "cache": _cache,
    "save": _save,
    "load": _load,
    "runtime": _runtime,
}


# -- one child ----------------------------------------------------------------------------------------


def in_child(work: Callable[[], str], user: int) -> str:
    """What `work` returns in a child of its own; '' if it waits for ever."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = "untyped: died"
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            if user:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            answer = work()
        except HeadraceError as e:
            answer = f"refused: {e}"
        except BaseException as e:  # noqa: BLE001 - what a user would see as a traceback
            answer = f"untyped: {e!r}"
        finally:
            os.write(here, answer.encode(errors="replace")[:60000])
            os._exit(0)
    os.close(here)
    ready, _, _ = select.select([there], [], [], HANG_S)
    answer = os.read(there, 60000).decode() if ready else ""
    if not ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(there)
    return answer


def names_opened(command: str, base: Path) -> list[str]:
    """Below the tree, relative to it: what the command opens, makes, lists, renames or removes."""

    def work() -> str:
        heard: set[str] = set()

        def hear(event: str, args: tuple[Any, ...]) -> None:
            if event in ("open", "os.mkdir", "os.listdir", "os.scandir", "os.rename", "os.remove"):
                for path in args[:2]:
                    if isinstance(path, str | bytes | os.PathLike):
                        heard.add(os.fsdecode(path))

        sys.addaudithook(hear)
        COMMANDS[command](base)
        root = os.path.realpath(base / "tree")
        found = set()
        for path in sorted(heard):
            folder, name = os.path.split(path.rstrip("/"))
            with contextlib.suppress(OSError, ValueError):
                inside = os.path.relpath(os.path.join(os.path.realpath(folder), name), root)
                if not inside.startswith("..") and inside != "." and not _RANDOM.search(inside):
                    found.add(inside)
        return json.dumps(sorted(found))

    answer = in_child(work, 0)
    assert answer.startswith("["), f"{command} fails undisturbed: {answer or 'it hangs'}"
    return list(json.loads(answer))


# -- planting -----------------------------------------------------------------------------------------


def plant(kind: str, path: Path, victim: Path) -> None:  # noqa: C901 - a list of kinds
    """Puts something at a name, in the place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    was_folder = path.is_dir() and not path.is_symlink()
    aside = path.with_name(path.name + "-moved")
    if os.path.lexists(path) and kind in ("foreign", "folder-link"):
        path.rename(aside)
    elif was_folder:
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    if kind == "link":
        path.symlink_to(victim / "file")
    elif kind == "dangling":
        path.symlink_to(victim / "none")
    elif kind == "folder-link":
        path.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(path, 0o666)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as s, contextlib.chdir(path.parent):
            s.bind(path.name)
    elif kind == "device":
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    elif kind == "folder":
        path.mkdir()
    elif was_folder:
        shutil.copytree(aside, path)
        for each in (path, *path.rglob("*")):
            os.chown(each, STRANGER, STRANGER)
            each.chmod(0o777)
    else:
        path.mkdir()
        path.chmod(0o777)
        os.chown(path, STRANGER, STRANGER)
    if os.path.lexists(aside):
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def state_of(victim: Path) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for path in sorted([victim, *victim.rglob("*")]):
        s = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found.append((str(path), s.st_mode, s.st_uid, s.st_mtime_ns, s.st_ino, content))
    return found


def attempts(commands: list[str], kinds: list[str], users: list[int]) -> Iterator[tuple[str, ...]]:
    """Runs them all; yields (command, name, kind, user, outcome, detail)."""
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        top = Path(temporary).resolve()
        top.chmod(0o755)
        os.environ["HEADRACE_STATE_DIR"] = str(top / "state")
        base = top / "base"
        base.mkdir()
        in_child(lambda: (prepare(base), "done")[1], 0)
        pristine = top / "pristine"
        shutil.copytree(base, pristine)
        for command in commands:
            _renew(base, pristine)
            names = sorted({*names_opened(command, base), *FORMER.get(command, ())})
            for name in names:
                for kind in kinds:
                    if kind == "folder-link" and name in ("checkpoints", "cache"):
                        continue  # the user's own word for where they are
                    for user in users:
                        yield (
                            command,
                            name,
                            kind,
                            str(user),
                            *_attempt(base, pristine, command, name, kind, user),
                        )


def _renew(base: Path, pristine: Path) -> None:
    shutil.rmtree(base)
    shutil.copytree(pristine, base)


def _attempt(
    base: Path, pristine: Path, command: str, name: str, kind: str, user: int
) -> tuple[str, str]:
    _renew(base, pristine)
    if user:
        for each in (base, *base.rglob("*")):
            os.chown(each, user, user)
    victim = base / "victim"
    victim.mkdir()
    (victim / "file").write_bytes(b"precious " * 1000)
    for each in (victim, victim / "file"):
        each.chmod(0o777 if each.is_dir() else 0o666)
    plant(kind, base / "tree" / name, victim)
    for each in (base / "tree").rglob("*"):  # folders that were made for what is planted in them
        if user and each.is_dir() and not each.is_symlink() and each.stat().st_uid == 0:
            os.chown(each, user, user)
    before = state_of(victim)
    answer = in_child(lambda: (COMMANDS[command](base), "harmless")[1], user)
    outcome = (answer or "hang").partition(":")[0]
    if state_of(victim) != before:
        outcome = "changed"
    return outcome, answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--users", default=f"0,{OTHER}" if os.geteuid() == 0 else "0")
    given = parser.parse_args()
    kinds = [
        k for k in given.kinds.split(",") if os.geteuid() == 0 or k not in ("device", "foreign")
    ]
    counts: Counter[str] = Counter()
    by_command: dict[str, Counter[str]] = {}
    bad = []
    started = time.monotonic()
    users = [int(u) for u in given.users.split(",")]
    for *what, outcome, detail in attempts(given.commands.split(","), kinds, users):
        counts[outcome] += 1
        by_command.setdefault(what[0], Counter())[outcome] += 1
        if outcome not in ("harmless", "refused"):
            bad.append((*what, outcome, detail[:200]))
    print(json.dumps({
        "attempts": sum(counts.values()), **counts, "by_command": by_command, "bad": bad,
        "seconds": round(time.monotonic() - started),
    }))  # fmt: skip


if __name__ == "__main__":
    main()

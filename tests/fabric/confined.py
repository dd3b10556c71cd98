"""A confined target that says what it still can do: `confined.py files|calls|all NQN FILE...`.

It prints its address and walls, then answers each line of its input with a line of JSON. Run as a
process of its own: the walls stay.
"""

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import sys
import threading

from headrace.fabric.confinement import Confinement, confine_calls, confine_files
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target

_PTRACE_ATTACH = 16
_LIBC = ctypes.CDLL(None, use_errno=True)


def _refusal(attempt):
    try:
        attempt()
    except OSError as e:
        return errno.errorcode[e.errno]
    return "done"


def _call(name, *arguments):
    if getattr(_LIBC, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)


def _fork():
    if os.fork() == 0:
        os._exit(0)


def probes(path):
    """By name, the error's name of each attempt, or `done`."""
    new = f"{path}.new".encode()
    attempts = {
        "read /etc/passwd": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
        "open what is exported again": lambda: os.close(os.open(path, os.O_RDONLY)),
        "write what is exported": lambda: os.close(os.open(path, os.O_WRONLY)),
        "create": lambda: os.close(os.open(new, os.O_WRONLY | os.O_CREAT)),
        "remove": lambda: os.unlink(path),
        "list": lambda: os.listdir("/"),
        "stat": lambda: os.stat("/etc/passwd"),
        "change mode": lambda: os.chmod(path, 0),
        "truncate": lambda: os.truncate(path, 0),
        "execute": lambda: os.execv("/bin/true", ["true"]),
        "fork": _fork,
        "connect": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "signal the parent": lambda: os.kill(os.getppid(), signal.SIGTERM),
        "trace the parent": lambda: _call("ptrace", _PTRACE_ATTACH, os.getppid(), None, None),
        "new code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
        "new namespace": lambda: _call("unshare", 0x10000000),
        "become root": lambda: os.setuid(0),
        "io_uring": lambda: _call("syscall", 425, 4, ctypes.create_string_buffer(120)),
    }
    return {name: _refusal(attempt) for name, attempt in attempts.items()}


def in_thread(function, *arguments):
    """What a thread that starts now says."""
    said = []
    thread = threading.Thread(target=lambda: said.append(function(*arguments)))
    thread.start()
    thread.join()
    return said[0]


def main(which, nqn, *paths):
    subsystem = Subsystem(nqn)
    kept = [os.open(subsystem.add(path).path, os.O_RDONLY) for path in paths]
    if which == "calls":
        walls = Confinement(no_new_privileges=_LIBC.prctl(38, 1, 0, 0, 0) == 0)
    else:
        walls = confine_files()
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        if which != "files":
            walls = confine_calls(walls)
        said = {"address": target.address, "landlock": walls.landlock, "seccomp": walls.seccomp}
        print(json.dumps(said), flush=True)
        for line in sys.stdin:
            match line.split():
                case ["probe"]:
                    answer = {"main": probes(paths[0]), "thread": in_thread(probes, paths[0])}
                case ["read"]:
                    answer = os.pread(kept[0], 16, 0).hex()
                case ["remove", nsid]:
                    answer = subsystem.remove(int(nsid))
                case ["figures"]:
                    answer = target.figures()
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

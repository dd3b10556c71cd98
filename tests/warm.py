"""Warm: Python programs that need torch, in processes of their own that have it already.

Importing torch takes two seconds of a processor. A server, one for all tests of a process, imports it once and
forks for each program; headrace is imported by the program. What a program sees is what `python -c` would show
it: its own environment, folder, arguments, warning filters and random numbers, and an end like any other.

    ended = run("import torch; print(torch.ones(2).sum())", warnings=["error"])
    assert (ended.returncode, ended.stdout) == (0, "tensor(2.)\\n")
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import warnings as python_warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["run"]

_REQUEST_BYTES_MAX = 1 << 20
_CLEAN = ("HEADRACE", "SLURM", "OMPI", "PYTHONWARNINGS")


def run(
    program: str | Path,
    *arguments: object,
    warnings: Sequence[str] = (),
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a text as `python -W ... -c text arguments` does, or a script, and waits for its end.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
    """
    environment = dict(os.environ if env is None else env)
    request = {
        "code": program if isinstance(program, str) else program.read_text(),
        "script": None if isinstance(program, str) else str(program),
        "arguments": list(map(str, arguments)), "warnings": list(warnings),
        "cwd": str(cwd or Path.cwd()), "environment": environment,
    }  # fmt: skip
    temporary = tempfile.TemporaryFile
    with Path(os.devnull).open() as null, temporary() as out, temporary() as err:
        server = _server()
        fds = [null.fileno(), out.fileno(), err.fileno()]
        data = json.dumps(request).encode()
        assert len(data) < _REQUEST_BYTES_MAX
        pid = 0
        try:
            socket.send_fds(server, [data], fds)
            pid = int(server.recv(64))
            server.settimeout(timeout)
            status = int(server.recv(64))
            server.settimeout(None)
        except BaseException as e:
            # Whatever ended the wait: the next program must not be told this one's end.
            server.close()
            _server.cache_clear()
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if isinstance(e, TimeoutError):
                raise subprocess.TimeoutExpired([str(program)], timeout) from None
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([str(program)], status, *texts)


@cache
def _server() -> socket.socket:
    """The line to this process's server, which ends when the line does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_CLEAN)}
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=clean,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Forks for each request; returns the request in the child, and None when the line has ended."""
    while True:
        data, fds, _, _ = socket.recv_fds(line, _REQUEST_BYTES_MAX, 3)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            for to, fd in enumerate(fds):
                os.dup2(fd, to)
                os.close(fd)
            line.close()
            request: dict[str, Any] = json.loads(data)
            return request
        for fd in fds:
            os.close(fd)
        with suppress(BrokenPipeError):  # nobody waits for it any more
            line.send(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            line.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: dict[str, Any]) -> ModuleType:
    """Makes this process what `python -c` would be; returns its `__main__`."""
    import numpy as np

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    script = request["script"]
    sys.argv = [script or "-c", *request["arguments"]]
    own = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:1] = [os.path.dirname(script) if script else "", *own]  # noqa: PTH120 - as it stands there
    sys.warnoptions[:] = request["warnings"]
    python_warnings.resetwarnings()
    for text in (*_USUAL, *request["warnings"]):
        python_warnings._setoption(text)  # type: ignore[attr-defined]  # as the interpreter does
    random.seed()
    np.random.seed()  # noqa: NPY002 - as each process has its own
    main = ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if script:
        main.__file__ = script
    sys.modules["__main__"] = main
    return main


_USUAL = [
    *(
        f"ignore::{kind}Warning"
        for kind in ("Resource", "Import", "PendingDeprecation", "Deprecation")
    ),
    "default::DeprecationWarning:__main__",
]
"""An interpreter's own filters; the last counts first."""


if __name__ == "__main__":
    import numpy as np  # noqa: F401
    import torch.utils.data  # noqa: F401

    gc.collect()
    gc.freeze()  # the collectors of programs need not look at it, nor copy its pages
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:
        _program = compile(_request["code"], _request["script"] or "<string>", "exec")
        exec(_program, vars(_become(_request)))

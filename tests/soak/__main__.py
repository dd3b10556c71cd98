"""Run the soak, print what was counted, write it as JSON; ends with 1 if anything was wrong."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from soak.driver import run

# Processes of its own, and an empty /tmp and /dev/shm: what is found at the end is of this run.
PRIVATE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
MOUNTS = 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
INSIDE = "HEADRACE_SOAK_INSIDE"


def in_private(json_path: Path | None) -> int | None:
    """Run all of this where nobody else is, if the system allows it; returns how it ended."""
    ours = [sys.prefix, str(Path(__file__).resolve())]
    if os.environ.get(INSIDE) or any(Path(p).is_relative_to("/tmp") for p in ours):
        return None
    if subprocess.run([*PRIVATE, "true"], check=False, capture_output=True).returncode:
        return None
    command = [*PRIVATE, "sh", "-c", MOUNTS, "sh", sys.executable, "-m", "soak", *sys.argv[1:]]
    environment = os.environ | {INSIDE: "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    if json_path is None:
        return subprocess.run(command, check=False, env=environment).returncode
    with json_path.open("w") as out:  # its place may be out of sight from within
        command += ["--json", f"/proc/self/fd/{out.fileno()}"]
        ended = subprocess.run(command, check=False, env=environment, pass_fds=[out.fileno()])
    return ended.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--no-torch", action="store_true", help="no client with worker processes")
    parser.add_argument("--programs", action="store_true", help="with one under `headrace run`")
    parser.add_argument("--json", type=Path, help="where the counts go")
    parser.add_argument("--dir", type=Path, help="work below this folder, on a disk")
    given = parser.parse_args()
    if (code := in_private(given.json)) is not None:
        return code
    # As the first process of its namespace it would not hear of it; all others end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"seed {given.seed}", flush=True)
    work = Path(tempfile.mkdtemp(prefix="hr-soak-", dir=given.dir or "/var/tmp"))
    result = run(
        work / "w", kills=given.kills, seed=given.seed, torch=not given.no_torch, programs=given.programs,
        private=bool(os.environ.get(INSIDE)), say=lambda text: print(text, flush=True),
    )  # fmt: skip
    if result["ok"]:
        work.rmdir()
    result["machine"] = {
        "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
        "private_namespaces": bool(os.environ.get(INSIDE)), "load_1min": round(os.getloadavg()[0], 2),
    }  # fmt: skip
    print(table(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if not result["ok"]:
        print(f"what is left lies in {work}", file=sys.stderr)
    return 0 if result["ok"] else 1


def table(result: dict[str, object]) -> str:
    """The result in lines: counts, then what must be nothing."""
    rows: list[tuple[str, object]] = list(result["counts"].items())  # type: ignore[attr-defined]
    for name, value in result.items():
        if name in ("counts", "starts", "machine"):
            continue
        rows.append((name, value if not isinstance(value, list) else len(value)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    for name in ("problems", "hangs", "leftovers"):
        lines += [f"\n{name}: {text}" for text in result[name]]  # type: ignore[attr-defined]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""The limits: what a C program reaches on the same packed file, with no loader around it.

`limit_probe` is built from `limit_probe.cc` (CMake option HEADRACE_BENCH). It plays the part of an
engine under the names `limit:MODE:N`, N threads or depth.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import forms
from benchmarks.forms import MANIFEST, PACKED

if TYPE_CHECKING:
    from benchmarks.datasets import DataSet

BUILD = Path(__file__).resolve().parents[1] / "build"

PREFIX = "limit:"

PREAD = "pread"
MMAP = "mmap"
URING = "uring-direct"
URING_4K = "uring-direct-4k"
PREAD_DIRECT = "preaddirect"

HOT = tuple(f"{PREFIX}{mode}" for mode in ("pread:1", "pread:2", "mmap:1"))
COLD_A = tuple(
    f"{PREFIX}{mode}"
    for mode in (
        "pread:16",
        "preaddirect:16",
        "uring-direct:8",
        "uring-direct:32",
        "uring-direct:64",
    )
)
COLD_B = tuple(
    f"{PREFIX}{mode}"
    for mode in ("pread:16", "uring-direct:64", "uring-direct-4k:64", "uring-direct-4k:128")
)


class NoProbeError(Exception):
    """The probe is not built."""


def find_probe(root: Path = BUILD) -> Path:
    """The built probe: $HEADRACE_LIMIT_PROBE, or wherever the build put it below `build/`."""
    named = os.environ.get("HEADRACE_LIMIT_PROBE")
    found = [Path(named)] if named else sorted(root.rglob("limit_probe"))
    for path in found:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise NoProbeError(
        "limit_probe is not built: no limits are measured, and targets against them stay open. "
        "Build it with: cmake -S . -B build/probe -DHEADRACE_PYTHON=OFF -DHEADRACE_BENCH=ON "
        "&& cmake --build build/probe --target limit_probe"
    )


def ensure_probe(source: Path) -> None:
    """Builds the probe below `source`/build unless it is there; says so where it cannot."""
    build = source / "build/probe"
    with contextlib.suppress(NoProbeError):
        find_probe(source / "build")
        return
    forms.say("building limit_probe")
    configure = ["cmake", "-S", str(source), "-B", str(build)]
    configure += ["-DHEADRACE_PYTHON=OFF", "-DHEADRACE_BENCH=ON"]
    compile_it = ["cmake", "--build", str(build), "--target", "limit_probe"]
    for words in (configure, compile_it):
        try:
            subprocess.run(words, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            forms.say("cmake was not found: the limits are left out")
            return
        except subprocess.CalledProcessError as error:
            last = (error.stderr or error.stdout).strip().splitlines()[-1:]
            forms.say(f"{' '.join(words)} failed: {''.join(last)}. The limits are left out.")
            return


def mode_of(engine: str) -> tuple[str, int]:
    """The mode and the threads or depth in an engine's name."""
    _, mode, width = engine.split(":")
    return mode, int(width)


def command(
    engine: str, path: Path, data: DataSet, seed: int, caps: tuple[int, float]
) -> list[str]:
    """The probe's command line for one run that ends at `caps`: samples, seconds."""
    mode, width = mode_of(engine)
    options = {
        "mode": mode,
        "file": path / PACKED,
        "manifest": path / MANIFEST,
        "depth" if mode in (URING, URING_4K) else "threads": width,
        "batch": data.batch_size,
        "seed": seed,
        "samples": caps[0],
        "seconds": caps[1],
    }
    words = [str(find_probe())]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return words

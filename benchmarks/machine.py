"""What the figures were taken on: machine, kernel, commit, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from benchmarks import loaders


def _first_value(path: Path, key: str) -> str | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _file_system(path: Path) -> str | None:
    return _output("findmnt", "--noheadings", "--output", "FSTYPE,OPTIONS", "--target", str(path))


def versions() -> dict[str, str]:
    """The installed version of everything that is compared."""
    found = {"python": platform.python_version()}
    for package in sorted({"numpy", "pyarrow", *loaders.PACKAGES.values()}):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def describe(work_folder: Path) -> dict[str, object]:
    """Everything a reader needs to judge or repeat the figures."""
    return {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name"),
        "cores": os.cpu_count(),
        "memory": _first_value(Path("/proc/meminfo"), "MemTotal"),
        "kernel": platform.release(),
        "system": platform.platform(),
        "file_system": _file_system(work_folder),
        "load_before": os.getloadavg()[0],
        "commit": _output("git", "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_output("git", "status", "--porcelain")),
        "versions": versions(),
    }

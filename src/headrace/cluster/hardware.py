"""Hardware: what a node computes with, as the kernel and the GPUs' driver say; asks no other program."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["hardware"]


def hardware(root: Path = Path("/")) -> dict[str, Any]:
    """CPU, memory, GPUs and kernel of this node, as plain values.

    Args:
        root: where /proc and /sys are; another one in tests.
    """
    return {
        "architecture": platform.machine(),
        "cpu": _cpu_model(root),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": _memory_bytes(root),
        "gpus": _gpus(root),
        "gpu_driver": _first_line(root / "proc/driver/nvidia/version"),
        "kernel": platform.release(),
    }


def _cpu_model(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "cpu", "Model"):
            return value.strip()
    return platform.machine()


def _memory_bytes(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _gpus(root: Path) -> list[str]:
    """Models, in the order of their bus addresses."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for path in files for line in _text(path).splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _first_line(path: Path) -> str:
    return (_text(path).splitlines() or [""])[0].strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

"""Hosts: what is told of each machine of a run, and of the file system that the data lies on."""

from __future__ import annotations

import os
import platform
import socket
import sys
from typing import Any

import numpy as np

import headrace

__all__ = ["host_document", "mount_of", "provenance"]


def host_document() -> dict[str, Any]:
    """This machine, ready for JSON."""
    memory = _pairs("/proc/meminfo")
    return {
        "hostname": socket.gethostname(),
        "cpu_count": os.cpu_count() or 1,
        "processor": _processor(),
        "cpuinfo": {"model name": _processor(), "cpu_count": os.cpu_count() or 1},
        "meminfo": memory,
        "memory_gb": int(memory.get("MemTotal", "0 kB").split()[0]) / 2**20,
    }


def _pairs(path: str) -> dict[str, str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in lines if value.strip()}


def _processor() -> str:
    return _pairs("/proc/cpuinfo").get("model name") or platform.machine()


def mount_of(path: str) -> dict[str, str]:
    """The mount that a path lies on: its place, type, source and options; empty if nobody tells."""
    real = os.path.realpath(path)
    best: dict[str, str] = {}
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                fields, behind = left.split(), right.split()
                place = fields[4]
                inside = real == place or real.startswith(place.rstrip("/") + "/")
                if inside and len(place) >= len(best.get("place", "")):
                    best = {
                        "place": place, "type": behind[0], "source": behind[1],
                        "options": fields[5], "device": fields[2],
                    }  # fmt: skip
    except (OSError, IndexError):
        return best
    return best


def provenance(data_folder: str, command: list[str]) -> dict[str, Any]:
    """What one needs to know to believe a result, and to make it again."""
    return {
        "headrace": headrace.__version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "kernel": platform.release(),
        "platform": platform.platform(),
        "mount": mount_of(data_folder),
        "command": command,
    }

"""Guests and disks of known bytes; and each check is printed as it passes.

Part of `make test-peers` alone: without naming this folder nothing of it is collected.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.fabric.image import write_image
from peers.guest import Guest
from peers.guest_image import Kernel, build_kernel, build_tools
from tests_shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FOLDER = ROOT / "build/peers"
"""Kernels and tools are kept from run to run."""

_TOOLS = (
    "qemu-system-x86_64", "nvme", "fio", "e2fsck", "mkfs.ext4", "cpio", "modprobe", "apt-get", "tshark"
)  # fmt: skip
_KNOWN_BYTES = 24 << 20

_started_s = time.monotonic()


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Not for whoever runs all tests."""
    return None if any("tests/peers" in argument for argument in config.args) else True


@pytest.fixture(scope="session", autouse=True)
def _what_guests_need() -> None:
    missing = [
        tool
        for tool in _TOOLS
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    if missing:
        text = f"nothing of this is checked: no {', '.join(missing)}; make test-peers as root installs them"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)


@pytest.fixture(scope="session")
def passed(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a check that was passed."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  [{time.monotonic() - _started_s:5.1f} s] ok: {text}", end="", flush=True)

    return say


@pytest.fixture(scope="session")
def kernels() -> dict[str, Kernel]:
    """Debian 12's kernel, and its backports', which knows DH-HMAC-CHAP."""
    return {
        "debian": build_kernel(FOLDER / "debian"),
        "backports": build_kernel(FOLDER / "backports", backports=True),
    }


@pytest.fixture(scope="session")
def tools(kernels: dict[str, Kernel]) -> Path:
    """The disk of programs for guests."""
    return build_tools(FOLDER, list(kernels.values()))


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A disk image and its bytes."""
    data = np.random.default_rng(5).integers(0, 256, _KNOWN_BYTES, dtype=np.uint8)
    path = tmp_path_factory.mktemp("known") / "disk"
    data.tofile(path)
    return path, data


@pytest.fixture(scope="session")
def boot(
    kernels: dict[str, Kernel],
    tools: Path,
    tmp_path_factory: pytest.TempPathFactory,
    passed: Callable[[str], None],
) -> Iterator[Callable[..., Guest]]:
    """Boots a guest: `boot("debian", [(image, 512), ...])`. One at a time: the one before ends."""
    running: list[Guest] = []

    def make(name: str, disks: list[tuple[Path, int]]) -> Guest:
        while running:
            running.pop().close()
        began_s = time.monotonic()
        guest = Guest(kernels[name], tools, tmp_path_factory.mktemp(name), disks)
        running.append(guest)
        tries = "1 try" if guest.boots == 1 else f"{guest.boots} tries"
        passed(
            f"Linux {kernels[name].version} booted in {time.monotonic() - began_s:.1f} s, {tries}"
        )
        return guest

    yield make
    while running:
        running.pop().close()


@pytest.fixture(scope="session")
def store_image(packed_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed store as one image."""
    path = tmp_path_factory.mktemp("image") / "store"
    write_image(packed_photos, path)
    return path


@pytest.fixture(scope="session")
def debian(boot: Callable[..., Guest], known: tuple[Path, np.ndarray], store_image: Path) -> Guest:
    """A guest of Debian 12's kernel. Disks: the known image in blocks of 512, and of 4096; a store."""
    return boot("debian", [(known[0], 512), (known[0], 4096), (store_image, 512)])

"""Guest: a Linux kernel under QEMU, without hardware help, that runs the commands it is given.

It reaches this machine's loopback as 10.0.2.2, and its own port 4420 is one of our loopback's. A boot
that does not come up is tried again; how often is kept in `boots`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from tests_shared import free_ports

if TYPE_CHECKING:
    from pathlib import Path

    from peers.guest_image import Kernel

__all__ = ["BOOTS_MAX", "HOST", "Guest", "GuestFailed"]

BOOTS_MAX = 5
_BOOT_S = 60.0
HOST = "10.0.2.2"
"""This machine, seen by a guest."""

# On a busy machine the emulated timer is late, and the kernel would panic over it.
_TIMER = "tsc=reliable no_timer_check"


class GuestFailed(AssertionError):
    """A guest did not come up, or a command in it failed."""


class Guest:
    """A running guest.

    Args:
        kernel: what is booted.
        tools: the disk of programs; shared, read-only.
        folder: for the console's log and the socket of commands.
        disks: images that the guest sees as /dev/vdb and on, and the bytes of a block of each.
    """

    def __init__(
        self, kernel: Kernel, tools: Path, folder: Path, disks: list[tuple[Path, int]]
    ) -> None:
        self.kernel = kernel
        self.boots = 0
        self.console = folder / "console"
        self._control = folder / "control"
        self._tools = tools
        self._disks = disks
        while True:
            self.boots += 1
            try:
                self._boot()
            except GuestFailed as failure:
                self.close()
                print(f"guest {kernel.version}: boot {self.boots} failed: {failure}")
                if self.boots == BOOTS_MAX:
                    raise
            except BaseException:
                self.close()
                raise
            else:
                return

    def run(self, script: str, *, timeout_s: float = 60.0, check: bool = True) -> str:
        """What a shell script in the guest prints.

        Raises:
            GuestFailed: it fails (unless `check` is off), or does not end in time.
        """
        status, text = self.call(script, timeout_s=timeout_s)
        if check and status:
            raise GuestFailed(f"exit {status}: {script}\n{text}\n{self.tail()}")
        return text

    def call(self, script: str, *, timeout_s: float = 60.0) -> tuple[int, str]:
        """The exit status of a shell script in the guest, and what it prints."""
        self._channel.settimeout(timeout_s)
        try:
            self._channel.sendall(base64.b64encode(script.encode()) + b"\n")
            answer = self._line()
        except OSError as e:
            raise GuestFailed(f"{type(e).__name__} {e}: {script}\n{self.tail()}") from e
        status, _, text = answer.partition(" ")
        return int(status), base64.b64decode(text).decode(errors="replace").rstrip()

    def kernel_log(self) -> str:
        """What its kernel said since it booted."""
        return self.run("dmesg")

    def tail(self) -> str:
        """The last lines of its console."""
        with contextlib.suppress(OSError):
            return self.console.read_text(errors="replace")[-2000:]
        return ""

    def close(self) -> None:
        """Ends it at once."""
        with contextlib.suppress(AttributeError, OSError):
            self._channel.close()
        with contextlib.suppress(AttributeError):
            self._process.kill()
            self._process.wait()

    # -- booting ----------------------------------------------------------------------------------

    def _boot(self) -> None:
        self._control.unlink(missing_ok=True)
        self.port = free_ports(1)[0]
        self._process = subprocess.Popen(
            self._command(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT, preexec_fn=_lower,  # noqa: PLW1509 - nothing of ours runs in threads yet
        )  # fmt: skip
        end_s = time.monotonic() + _BOOT_S
        while True:
            try:
                self._channel = socket.socket(socket.AF_UNIX)
                self._channel.connect(os.fspath(self._control))
                break
            except OSError:
                self._channel.close()
                if self._process.poll() is not None or time.monotonic() > end_s:
                    raise GuestFailed(f"QEMU does not start: {self.tail()}") from None
                time.sleep(0.05)
        self._channel.settimeout(_BOOT_S)
        self._received = b""
        try:
            said = self._line()
        except OSError as e:
            raise GuestFailed(f"{type(e).__name__}: {self.tail()[-300:]}") from e
        if said != "ready":
            raise GuestFailed(f"it says {said!r}: {self.tail()[-300:]}")

    def _line(self) -> str:
        while b"\n" not in self._received:
            more = self._channel.recv(1 << 16)
            if not more:
                raise ConnectionError("the guest has ended")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _command(self) -> list[str]:
        words = [
            "qemu-system-x86_64", "-M", "q35,accel=tcg", "-cpu", "Nehalem,-cx16", "-m", "512", "-smp", "1",
            "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
            "-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console",
            "-kernel", str(self.kernel.image), "-initrd", str(self.kernel.initramfs),
            "-append", f"console=ttyS0 panic=-1 mitigations=off nokaslr {_TIMER} random.trust_cpu=on",
            "-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.port}-:4420",
            "-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=control,path={self._control},server=on,wait=off",
            "-device", "virtserialport,chardev=control,name=control",
        ]  # fmt: skip
        words += [
            "-drive", f"if=none,id=tools,file={self._tools},format=raw,readonly=on",
            "-device", "virtio-blk-pci,drive=tools",
        ]  # fmt: skip
        for number, (path, block_bytes) in enumerate(self._disks):
            # nvmet opens its devices for writing: what is written goes nowhere.
            blocks = f"logical_block_size={block_bytes},physical_block_size={block_bytes}"
            words += [
                "-drive", f"if=none,id=disk{number},file={path},format=raw,snapshot=on",
                "-device", f"virtio-blk-pci,drive=disk{number},{blocks}",
            ]  # fmt: skip
        return words


def _lower() -> None:
    os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

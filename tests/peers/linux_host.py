"""The Linux kernel's initiator in a guest, worked by nvme-cli."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from peers.guest import HOST, GuestFailed

if TYPE_CHECKING:
    from peers.guest import Guest

__all__ = ["LinuxHost"]


class LinuxHost:
    """Connects a guest to targets on this machine.

    Args:
        guest: where.
        nqn: of the host.
        hostid: a UUID.
    """

    def __init__(self, guest: Guest, nqn: str, hostid: str) -> None:
        self.guest = guest
        self.nqn = nqn
        self._who = f"--hostnqn={nqn} --hostid={hostid}"
        guest.run("modprobe nvme_tcp")

    def nvme(self, words: str) -> Any:
        """What an nvme command answers, from its JSON."""
        return json.loads(self.guest.run(f"nvme {words} -o json"))

    def discover(self, port: int) -> list[dict[str, Any]]:
        """The discovery log of the target on a port of ours."""
        found = self.nvme(f"discover -t tcp -a {HOST} -s {port} {self._who}")
        return list(found["records"])

    def connect(self, port: int, nqn: str, options: str = "") -> tuple[int, str]:
        """The exit status of `nvme connect`, and what it said."""
        return self.guest.call(
            f"nvme connect -t tcp -a {HOST} -s {port} -n {nqn} {self._who} --reconnect-delay=1 "
            f"--ctrl-loss-tmo=60 {options}"
        )

    def connected(
        self, port: int, nqn: str, options: str = "", namespaces: int = 1
    ) -> dict[int, str]:
        """Connects; the block devices of all namespaces, by NSID."""
        status, said = self.connect(port, nqn, options)
        if status:
            raise GuestFailed(f"nvme connect: {said}\n{self.guest.kernel_log()[-2000:]}")
        return self.devices(namespaces)

    def devices(self, namespaces: int) -> dict[int, str]:
        """By NSID; waits until there are so many."""
        end_s = time.monotonic() + 20
        while True:
            text = self.guest.run(
                "for d in /sys/block/nvme*; do [ -e $d/nsid ] || continue; case ${d##*/} in *c*) ;; nvme*)"
                ' echo "$(cat $d/nsid 2>/dev/null) /dev/${d##*/}";; esac; done'
            )
            # A namespace on its way out has a folder still and no NSID any more.
            found = dict(words for line in text.splitlines() if len(words := line.split()) == 2)
            if len(found) == namespaces:
                return {int(nsid): device for nsid, device in found.items()}
            if time.monotonic() > end_s:
                raise GuestFailed(
                    f"{found}, expected {namespaces}\n{self.guest.kernel_log()[-2000:]}"
                )
            time.sleep(0.2)

    def disconnect(self) -> None:
        """From every subsystem."""
        self.guest.run("nvme disconnect-all")

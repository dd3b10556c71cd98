"""The Linux kernel's target in a guest: what it exports, to whom, and its going away."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peers.guest import Guest

__all__ = ["Nvmet"]

_ROOT = "/sys/kernel/config/nvmet"


class Nvmet:
    """A subsystem on the guest's port 4420, for any host at first.

    Args:
        guest: where.
        nqn: the subsystem.
        devices: block devices of the guest: namespaces 1 and on.
    """

    def __init__(self, guest: Guest, nqn: str, devices: list[str]) -> None:
        self.guest = guest
        self.nqn = nqn
        self._subsystem = f"{_ROOT}/subsystems/{nqn}"
        lines = [
            "modprobe nvmet_tcp",
            f"mkdir {self._subsystem}",
            f"echo 1 >{self._subsystem}/attr_allow_any_host",
            f"echo HEADRACETEST >{self._subsystem}/attr_serial",
        ]
        for nsid, device in enumerate(devices, 1):
            namespace = f"{self._subsystem}/namespaces/{nsid}"
            lines += [
                f"mkdir {namespace}",
                f"echo -n {device} >{namespace}/device_path",
                f"echo 1 >{namespace}/enable",
            ]
        guest.run("set -e\n" + "\n".join(lines))
        self.listen()

    @property
    def address(self) -> tuple[str, int]:
        """Where this machine reaches it."""
        return "127.0.0.1", self.guest.port

    def url(self, nsid: int = 1, port: int | None = None) -> str:
        """A namespace, at the guest's port or a relay's."""
        return f"nvme+tcp://127.0.0.1:{port or self.guest.port}/{self.nqn}?ns={nsid}"

    def listen(self) -> None:
        """Makes the port and links the subsystem to it."""
        port = f"{_ROOT}/ports/1"
        self.guest.run(
            f"set -e; mkdir -p {port}; cd {port}; echo tcp >addr_trtype; echo ipv4 >addr_adrfam\n"
            f"echo 0.0.0.0 >addr_traddr; echo 4420 >addr_trsvcid; ln -s {self._subsystem} subsystems/"
        )

    def vanish(self) -> None:
        """Unlinks the subsystem and removes the port: all connections end."""
        self.guest.run(f"rm {_ROOT}/ports/1/subsystems/{self.nqn} && rmdir {_ROOT}/ports/1")

    def allow(self, hostnqn: str, **attributes: str) -> None:
        """Lets this host in, and from now on no unnamed one; attributes are the host's (dhchap_key)."""
        host = f"{_ROOT}/hosts/{hostnqn}"
        lines = [f"mkdir -p {host}"]
        lines += [f"echo -n '{value}' >{host}/{name}" for name, value in attributes.items()]
        lines += [
            f"echo 0 >{self._subsystem}/attr_allow_any_host",
            f"ln -s {host} {self._subsystem}/allowed_hosts/",
        ]
        self.guest.run("set -e\n" + "\n".join(lines))

    def allow_all(self) -> None:
        """Any host, and no keys."""
        self.guest.run(
            f"rm -f {self._subsystem}/allowed_hosts/*; echo 1 >{self._subsystem}/attr_allow_any_host\n"
            f"rmdir {_ROOT}/hosts/*"
        )

"""Who a host is: its NQN and identifier, and the secrets of DH-HMAC-CHAP that prove it.

Secrets are text, `DHHC-1:hh:base64(secret, crc32):`, read, checked, made, and never shown. The bytes of one
leave this module only as a key that is derived for one name. No message, `repr` or log line of ours has a
secret in it, not even a part of one that was mistyped.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import os
import re
import secrets
import stat
import uuid
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NQN = re.compile(r"nqn\.\d{4}-\d{2}\.[a-z0-9][a-z0-9.\-]*(:.+)?", re.IGNORECASE)
_NQN_BYTES_MAX = 223
_UUID_NQN = "nqn.2014-08.org.nvmexpress:uuid:"
_ID_BYTES = 16


def check_nqn(nqn: str) -> str:
    """Returns an NQN that keeps to the form; raises ValueError if it does not."""
    if len(nqn.encode()) > _NQN_BYTES_MAX or not _NQN.fullmatch(nqn) or "\0" in nqn:
        raise ValueError(f"{nqn!r} is no NQN, expected nqn.YYYY-MM.reversed.domain:name")
    return nqn


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """A host's NQN and its 16 bytes of identifier.

    Raises ValueError if one of them does not keep to the form.
    """

    nqn: str
    id: bytes

    def __post_init__(self) -> None:
        check_nqn(self.nqn)
        if len(self.id) != _ID_BYTES or self.id == bytes(_ID_BYTES):
            raise ValueError(
                f"host identifier is {self.id.hex()}, expected 16 bytes that are not all 0"
            )

    @classmethod
    def of_machine(cls) -> HostIdentity:
        """What is the same on this machine after every start: made from its machine-id."""
        try:
            seed = Path("/etc/machine-id").read_text().strip()
        except OSError:
            seed = f"{uuid.getnode():x}"
        # Not the machine-id itself: systemd asks that it stays on the machine.
        own = uuid.uuid5(uuid.NAMESPACE_OID, f"headrace host {seed}")
        return cls(f"{_UUID_NQN}{own}", own.bytes)


_log = logging.getLogger("headrace.fabric")

_FORM = "DHHC-1:hh:base64:"
_LABEL = b"NVMe-over-Fabrics"
_SIZES = (32, 48, 64)
_CRC_BYTES = 4
_FILE_BYTES_MAX = 1 << 20
HOST_VARIABLE = "HEADRACE_DHCHAP_SECRET"
CONTROLLER_VARIABLE = "HEADRACE_DHCHAP_CONTROLLER_SECRET"


class Hash(IntEnum):
    """Hash functions, by the specification's identifiers."""

    SHA256 = 1
    SHA384 = 2
    SHA512 = 3

    @property
    def function(self) -> str:
        """Its name in hashlib."""
        return self.name.lower()

    @property
    def nbytes(self) -> int:
        """Of a digest."""
        return {Hash.SHA256: 32, Hash.SHA384: 48, Hash.SHA512: 64}[self]


class Secret:
    """A secret that a host and a controller share.

    Args:
        text: `DHHC-1:hh:base64:`, as `nvme gen-dhchap-key` and `Secret.generate` write it.

    Raises:
        ValueError: it is none. The message has nothing of the text.
    """

    __slots__ = ("_bytes", "transform")

    def __init__(self, text: str) -> None:
        version, *fields = text.strip().split(":")
        if version != "DHHC-1" or len(fields) != 3 or fields[2]:
            raise ValueError(f"a DH-HMAC-CHAP secret has the form {_FORM}")
        if fields[0] not in {"00", "01", "02", "03"}:
            raise ValueError("a DH-HMAC-CHAP secret's second field is 00, 01, 02 or 03")
        try:
            decoded = base64.b64decode(fields[1], validate=True)
        except (binascii.Error, ValueError):
            decoded = None
        if decoded is None:  # not raised within the except: a cause would carry the text
            raise ValueError("a DH-HMAC-CHAP secret's third field is not base64")
        if len(decoded) - _CRC_BYTES not in _SIZES:
            raise ValueError(
                f"a DH-HMAC-CHAP secret has 32, 48 or 64 bytes, found {len(decoded) - _CRC_BYTES}"
            )
        self._bytes, crc = decoded[:-_CRC_BYTES], decoded[-_CRC_BYTES:]
        if zlib.crc32(self._bytes) != int.from_bytes(crc, "little"):
            raise ValueError("a DH-HMAC-CHAP secret's checksum is wrong: it was mistyped or cut")
        self.transform = Hash(int(fields[0])) if fields[0] != "00" else None

    @classmethod
    def generate(cls, transform: Hash | None = Hash.SHA256) -> tuple[Secret, str]:
        """A new random secret, and its text: to be stored, not shown."""
        value = secrets.token_bytes(transform.nbytes if transform else 32)
        encoded = base64.b64encode(value + zlib.crc32(value).to_bytes(_CRC_BYTES, "little"))
        text = f"DHHC-1:{int(transform or 0):02d}:{encoded.decode()}:"
        return cls(text), text

    @classmethod
    def read(cls, source: Secret | str | os.PathLike[str]) -> Secret:
        """A secret from what an option says.

        Args:
            source: a secret; its text; `env:NAME`, a variable that has it; `file:PATH`, or a path
                object: a file whose first line it is.

        Raises:
            ValueError: there is no secret there.
        """
        if isinstance(source, Secret):
            return source
        if isinstance(source, os.PathLike) or source.startswith("file:"):
            path = Path(source.removeprefix("file:") if isinstance(source, str) else source)
            return _secret_of(f"file {path}", _read(path).partition("\n")[0])
        if source.startswith("env:"):
            name = source.removeprefix("env:")
            if name not in os.environ:
                raise ValueError(f"there is no environment variable {name}")
            return _secret_of(f"environment variable {name}", os.environ[name])
        return cls(source)

    def key(self, nqn: str) -> bytes:
        """The key of the responses of `nqn`: the secret as it was transformed for that name."""
        if self.transform is None:
            return self._bytes
        return hmac.digest(self._bytes, nqn.encode() + _LABEL, self.transform.function)

    def __repr__(self) -> str:
        return f"Secret({len(self._bytes)} bytes, not shown)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        same = hmac.compare_digest(self._bytes, other._bytes)
        return same and self.transform == other.transform

    def __hash__(self) -> int:
        return hash((self._bytes, self.transform))


@dataclass(frozen=True, slots=True)
class HostSecret:
    """What a target knows of a host.

    Args:
        secret: the host proves that it knows it.
        controller: the controller proves that it knows it, to hosts that ask; another one than `secret`.

    Raises:
        ValueError: both are the same, or one is no secret.
    """

    secret: Secret
    controller: Secret | None = None

    def __post_init__(self) -> None:
        if self.secret == self.controller:
            raise ValueError("host and controller have the same DH-HMAC-CHAP secret, expected two")

    @classmethod
    def read(
        cls,
        secret: Secret | str | os.PathLike[str],
        controller: Secret | str | os.PathLike[str] | None = None,
    ) -> HostSecret:
        """Both, each from what `Secret.read` takes."""
        return cls(Secret.read(secret), None if controller is None else Secret.read(controller))


def read_host_secrets(path: str | os.PathLike[str]) -> Mapping[str, HostSecret | None]:
    """Reads the hosts of a subsystem from a file.

    A line for each host: its NQN, its secret, the controller's secret to it, with blanks between. Both
    secrets may be left out: that host is let in as it is. Lines that begin with # say nothing.

    Raises ValueError if a line is wrong; the message has its number and nothing of it.
    """
    hosts: dict[str, HostSecret | None] = {}
    for number, line in enumerate(_read(Path(path)).splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        where = f"{os.fspath(path)}, line {number}"
        try:
            nqn = check_nqn(fields[0])
        except ValueError:
            nqn = ""
        if not nqn or nqn in hosts or len(fields) > 3:
            raise ValueError(f"{where}: expected a host's NQN once, and at most two secrets")
        known = [_secret_of(where, field) for field in fields[1:]]
        hosts[nqn] = HostSecret(*known) if known else None
    return hosts


def secret_of_environment(name: str) -> Secret | None:
    """What HEADRACE_DHCHAP_SECRET or ..._CONTROLLER_SECRET says, or the same with _FILE; None: neither.

    Raises ValueError if it is no secret.
    """
    if os.environ.get(name):
        return Secret.read(f"env:{name}")
    path = os.environ.get(f"{name}_FILE")
    return Secret.read(Path(path)) if path else None


def _secret_of(where: str, text: str) -> Secret:
    try:
        return Secret(text)
    except ValueError as e:
        why = str(e)
    raise ValueError(f"{where}: {why}")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                _log.warning("%s holds secrets and others may read it: chmod 600", path)
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as e:
        raise ValueError(f"the file of secrets {path} cannot be read: {e.strerror}") from e
    if len(content) > _FILE_BYTES_MAX:
        raise ValueError(f"the file of secrets {path} has more than {_FILE_BYTES_MAX} bytes")
    return content.decode("ascii", "replace")

"""Structures: the data of Identify and Get Log Page, packed and unpacked.

Only fields that a read-only controller has something to say about; all others are zero.
"""

from __future__ import annotations

import struct
import uuid
from typing import NamedTuple

__all__ = [
    "ControllerIdentity",
    "DiscoveryEntry",
    "NamespaceIdentity",
    "pack_active_namespaces",
    "pack_changed_namespaces",
    "pack_descriptors",
    "pack_discovery_log",
    "pack_smart_log",
    "pack_supported_logs",
    "text",
    "unpack_active_namespaces",
    "unpack_discovery_log",
]

IDENTIFY_BYTES = 4096
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
NQN_BYTES_MAX = 223

CONTROLLER_IO, CONTROLLER_DISCOVERY = 1, 2
"""CNTRLTYPE."""


def text(raw: bytes) -> str:
    """An ASCII field: up to the first NUL, without the spaces that fill it up."""
    return raw.partition(b"\0")[0].decode("ascii", "replace").strip()


def _ascii(value: str, size: int) -> bytes:
    return value.encode("ascii", "replace")[:size].ljust(size)


class ControllerIdentity(NamedTuple):
    """Identify Controller (CNS 01h)."""

    serial: str
    model: str
    firmware: str
    cntlid: int
    subnqn: str
    mdts: int = 0
    """Largest transfer: 2^mdts pages of 4 KiB; 0: no limit."""
    version: int = 0x00010400
    kind: int = CONTROLLER_IO
    kas: int = 10
    """Granularity of the keep-alive timer, in 100 ms."""
    maxcmd: int = 128
    namespaces: int = 0
    ioccsz: int = 4
    """Bytes of an I/O capsule / 16: 4 leaves no room for data."""
    async_events: int = 4

    def pack(self) -> bytes:
        """The 4096 bytes."""
        out = bytearray(IDENTIFY_BYTES)
        out[4:24] = _ascii(self.serial, 20)
        out[24:64] = _ascii(self.model, 40)
        out[64:72] = _ascii(self.firmware, 8)
        out[76] = 1 << 1  # CMIC: several controllers
        out[77] = self.mdts
        struct.pack_into("<HI", out, 78, self.cntlid, self.version)
        struct.pack_into("<I", out, 92, 1 << 8)  # OAES: changed namespaces are told
        struct.pack_into("<I", out, 96, 1)  # CTRATT: host identifiers of 128 bits
        out[111] = self.kind
        out[259] = self.async_events - 1
        out[261] = 1 << 2  # LPA: Get Log Page with offsets
        out[262] = 0  # ELPE: one error entry
        struct.pack_into("<H", out, 320, self.kas)
        if self.kind == CONTROLLER_IO:
            out[512:514] = bytes((0x66, 0x44))  # SQES, CQES: 64 and 16 bytes
            struct.pack_into("<I", out, 516, self.namespaces)
        struct.pack_into("<H", out, 514, self.maxcmd)
        struct.pack_into("<I", out, 536, 1)  # SGLS: supported; no data in I/O capsules
        out[768 : 768 + len(self.subnqn)] = self.subnqn.encode()
        struct.pack_into(
            "<IIHBB", out, 1792, self.ioccsz, 1, 0, 0, 1
        )  # IORCSZ, ICDOFF, FCATT, MSDBD
        return bytes(out)

    @classmethod
    def unpack(cls, data: bytes) -> ControllerIdentity:
        """From 4096 bytes."""
        cntlid, version = struct.unpack_from("<HI", data, 78)
        return cls(
            serial=text(data[4:24]),
            model=text(data[24:64]),
            firmware=text(data[64:72]),
            cntlid=cntlid,
            subnqn=text(data[768:1024]),
            mdts=data[77],
            version=version,
            kind=data[111],
            kas=struct.unpack_from("<H", data, 320)[0],
            maxcmd=struct.unpack_from("<H", data, 514)[0],
            namespaces=struct.unpack_from("<I", data, 516)[0],
            ioccsz=struct.unpack_from("<I", data, 1792)[0],
            async_events=data[259] + 1,
        )


class NamespaceIdentity(NamedTuple):
    """Identify Namespace (CNS 00h), and what its descriptors add."""

    blocks: int
    block_bytes: int
    metadata_bytes: int = 0
    write_protected: bool = True
    uid: uuid.UUID = uuid.UUID(int=0)
    """NGUID, and UUID among the descriptors."""

    def pack(self) -> bytes:
        """The 4096 bytes."""
        out = bytearray(IDENTIFY_BYTES)
        struct.pack_into("<QQQ", out, 0, self.blocks, self.blocks, self.blocks)
        out[30] = 1  # NMIC: shared by controllers
        out[99] = 1 if self.write_protected else 0
        out[104:120] = self.uid.bytes
        out[130] = self.block_bytes.bit_length() - 1
        return bytes(out)

    @classmethod
    def unpack(cls, data: bytes) -> NamespaceIdentity:
        """From 4096 bytes; `blocks` is 0 for a namespace that is not active."""
        blocks = struct.unpack_from("<Q", data, 0)[0]
        flbas = data[26]
        number = flbas & 0xF | (flbas >> 5 & 3) << 4
        metadata, shift = struct.unpack_from("<HB", data, 128 + 4 * number)
        return cls(
            blocks, 1 << shift if shift < 32 else 0, metadata, bool(data[99] & 1),
            uuid.UUID(bytes=bytes(data[104:120])),
        )  # fmt: skip


_DESCRIPTOR_NGUID, _DESCRIPTOR_UUID, _DESCRIPTOR_CSI = 2, 3, 4


def pack_descriptors(uid: uuid.UUID) -> bytes:
    """Namespace Identification Descriptors (CNS 03h): NGUID, UUID, and the NVM command set."""
    out = b"".join(
        bytes((kind, len(value), 0, 0)) + value
        for kind, value in (
            (_DESCRIPTOR_NGUID, uid.bytes),
            (_DESCRIPTOR_UUID, uid.bytes),
            (_DESCRIPTOR_CSI, b"\0"),
        )
    )
    return out.ljust(IDENTIFY_BYTES, b"\0")


def pack_active_namespaces(nsids: list[int], above: int) -> bytes:
    """Active Namespace ID list (CNS 02h): those greater than `above`, at most 1024."""
    chosen = sorted(nsid for nsid in nsids if nsid > above)[:1024]
    return struct.pack(f"<{len(chosen)}I", *chosen).ljust(IDENTIFY_BYTES, b"\0")


def unpack_active_namespaces(data: bytes) -> list[int]:
    """The list up to its first 0."""
    numbers = struct.unpack("<1024I", data)
    return list(numbers[: numbers.index(0)] if 0 in numbers else numbers)


# -- log pages ------------------------------------------------------------------------------------


def pack_supported_logs(pages: list[int]) -> bytes:
    """Supported Log Pages (00h): a dword for each identifier."""
    out = bytearray(1024)
    for page in pages:
        out[page * 4] = 1
    return bytes(out)


def pack_smart_log(bytes_read: int, reads: int, uptime_s: float) -> bytes:
    """SMART / Health Information (02h): what a file has: no wear, no temperature."""
    out = bytearray(512)
    struct.pack_into("<H", out, 1, 300)  # kelvin: 27 degrees, as good as any
    out[3] = out[4] = 100  # spare, threshold of 0 below
    out[4] = 0
    for at, value in ((32, bytes_read // 512_000), (64, reads), (128, int(uptime_s // 3600))):
        out[at : at + 16] = value.to_bytes(16, "little")
    return bytes(out)


def pack_changed_namespaces(nsids: list[int]) -> bytes:
    """Changed Namespace List (04h)."""
    if len(nsids) > 1024:
        return b"\xff\xff\xff\xff".ljust(IDENTIFY_BYTES, b"\0")
    return struct.pack(f"<{len(nsids)}I", *sorted(nsids)).ljust(IDENTIFY_BYTES, b"\0")


class DiscoveryEntry(NamedTuple):
    """An entry of the discovery log page (70h)."""

    subnqn: str
    address: str
    port: int
    ipv6: bool = False
    kind: int = 2
    """SUBTYPE: 2 an NVM subsystem, 3 the discovery subsystem itself."""
    transport: int = 3
    """TRTYPE: 3 is TCP."""


_ENTRY = struct.Struct("<BBBBHHHHI16x32s192x256s256s256x")
_LOG_HEADER = struct.Struct("<QQH1006x")
assert _ENTRY.size == 1024
_SECURE_CHANNEL_NOT_REQUIRED = 2
_DYNAMIC_CNTLID = 0xFFFF


def pack_discovery_log(generation: int, entries: list[DiscoveryEntry]) -> bytes:
    """Header and entries, 1024 bytes each."""
    out = [_LOG_HEADER.pack(generation, len(entries), 0)]
    for number, entry in enumerate(entries):
        out.append(
            _ENTRY.pack(
                entry.transport, 2 if entry.ipv6 else 1, entry.kind, _SECURE_CHANNEL_NOT_REQUIRED,
                number + 1, _DYNAMIC_CNTLID, 32, 0, 0, str(entry.port).encode().ljust(32),
                entry.subnqn.encode(), entry.address.encode().ljust(256),
            )
        )  # fmt: skip
    return b"".join(out)


def unpack_discovery_log(data: bytes) -> tuple[int, int, list[DiscoveryEntry]]:
    """Generation, number of records that there are, and the entries that `data` holds whole."""
    generation, count, _ = _LOG_HEADER.unpack_from(data)
    entries = []
    for at in range(_LOG_HEADER.size, min(len(data), 1024 * (1 + count)) - 1023, 1024):
        trtype, adrfam, kind, *_, port, nqn, address = _ENTRY.unpack_from(data, at)
        digits = text(port)
        entries.append(
            DiscoveryEntry(
                text(nqn), text(address), int(digits) if digits.isdecimal() else 0,
                adrfam == 2, kind, trtype,
            )
        )  # fmt: skip
    return generation, count, entries

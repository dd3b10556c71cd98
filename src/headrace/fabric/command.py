"""Commands and completions, the data of Identify and Get Log Page, and the properties of a controller.

Names are those of the specification (NVM Express Base 2.0; Fabrics commands in section 6). Of structures only
the fields are here that a read-only controller has something to say about; all others are zero.
"""

from __future__ import annotations

import struct
import uuid
from enum import IntEnum
from typing import NamedTuple

ADMIN_CAPSULE_DATA_MAX = 8192
"""In-capsule data of Fabrics and admin commands on TCP, whatever IOCCSZ says."""

SGL_TRANSPORT = 0x5A
SGL_IN_CAPSULE = 0x01
_PSDT_SGL = 0x40


class Admin(IntEnum):
    """Admin opcodes."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT = 0x0C
    KEEP_ALIVE = 0x18
    FABRICS = 0x7F


class Fabrics(IntEnum):
    """FCTYPE."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04
    AUTH_SEND = 0x05
    AUTH_RECEIVE = 0x06
    DISCONNECT = 0x08


class Feature(IntEnum):
    """Feature identifiers."""

    NUMBER_OF_QUEUES = 0x07
    ASYNC_EVENTS = 0x0B
    KEEP_ALIVE_TIMER = 0x0F


class LogPage(IntEnum):
    """Log identifiers."""

    SUPPORTED = 0x00
    ERROR = 0x01
    SMART = 0x02
    CHANGED_NAMESPACES = 0x04
    DISCOVERY = 0x70


class Status(IntEnum):
    """Status code type and code, as in a completion without the phase: SC in 7:0, SCT in 10:8."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    DATA_TRANSFER_ERROR = 0x004
    INTERNAL_ERROR = 0x006
    INVALID_NAMESPACE = 0x00B
    COMMAND_SEQUENCE_ERROR = 0x00C
    SGL_LENGTH_INVALID = 0x00F
    HOST_ID_INCONSISTENT = 0x018
    KEEP_ALIVE_EXPIRED = 0x019
    KEEP_ALIVE_INVALID = 0x01A
    NAMESPACE_WRITE_PROTECTED = 0x020
    TRANSIENT_TRANSPORT = 0x022
    LBA_OUT_OF_RANGE = 0x080
    AER_LIMIT_EXCEEDED = 0x105
    INVALID_LOG_PAGE = 0x109
    FEATURE_NOT_CHANGEABLE = 0x10E
    CONNECT_INCOMPATIBLE_FORMAT = 0x180
    CONNECT_CONTROLLER_BUSY = 0x181
    CONNECT_INVALID_PARAMETERS = 0x182
    CONNECT_INVALID_HOST = 0x184
    AUTHENTICATION_REQUIRED = 0x191
    UNRECOVERED_READ_ERROR = 0x281


DO_NOT_RETRY = 0x4000
_CODE = 0x07FF


def status_text(status: int) -> str:
    """A status in words: the name where we know it."""
    code = status & _CODE
    name = Status(code).name.replace("_", " ").lower() if code in set(Status) else "status"
    return f"{name} (type {code >> 8}, code {code & 0xFF:#04x})"


class Sqe(NamedTuple):
    """A submission queue entry."""

    opcode: int
    cid: int = 0
    nsid: int = 0
    """FCTYPE of a Fabrics command."""
    sgl_address: int = 0
    sgl_length: int = 0
    sgl_type: int = 0
    cdw10: int = 0
    cdw11: int = 0
    cdw12: int = 0
    cdw13: int = 0
    cdw14: int = 0
    cdw15: int = 0

    def pack(self) -> bytes:
        """The 64 bytes."""
        return _SQE.pack(
            self.opcode, _PSDT_SGL, self.cid, self.nsid, self.sgl_address, self.sgl_length,
            self.sgl_type, self.cdw10, self.cdw11, self.cdw12, self.cdw13, self.cdw14, self.cdw15,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> Sqe:
        """From 64 bytes."""
        opcode, _, *rest = _SQE.unpack(data)
        return cls(opcode, *rest)

    @property
    def dwords(self) -> bytes:
        """CDW10 to CDW15 as they lie: what Fabrics commands define byte by byte."""
        return self.pack()[40:]


_SQE = struct.Struct("<BBHI16xQI3xBIIIIII")
assert _SQE.size == 64


class Completion(NamedTuple):
    """A completion queue entry."""

    cid: int
    status: int = 0
    """Without the phase."""
    result: int = 0
    sqhd: int = 0

    def pack(self) -> bytes:
        """The 16 bytes."""
        return _CQE.pack(self.result, self.sqhd, 0, self.cid, self.status << 1)

    @classmethod
    def unpack(cls, data: bytes) -> Completion:
        """From 16 bytes."""
        result, sqhd, _, cid, status = _CQE.unpack(data)
        return cls(cid, status >> 1, result, sqhd)


_CQE = struct.Struct("<QHHHH")

CONNECT_DWORDS = struct.Struct("<HHHBxI12x")
"""RECFMT, QID, SQSIZE, CATTR, KATO, from CDW10."""
CONNECT_DATA = struct.Struct("<16sH238x256s256s256x")
"""HOSTID, CNTLID, SUBNQN, HOSTNQN."""
PROPERTY_DWORDS = struct.Struct("<B3xIQ8x")
"""ATTRIB, OFST, VALUE, from CDW10."""
CATTR_NO_FLOW_CONTROL = 1 << 2
AUTHREQ_ATR, AUTHREQ_ASCR = 1 << 17, 1 << 18
"""In Connect's result: the host must authenticate; and then make a secure channel of it."""


def fabrics_command(fctype: Fabrics, dwords: bytes, data_bytes: int = 0) -> Sqe:
    """A Fabrics command; `dwords` are its bytes from CDW10 on."""
    sgl_type = SGL_IN_CAPSULE if data_bytes else SGL_TRANSPORT
    return Sqe(Admin.FABRICS, 0, fctype, 0, data_bytes, sgl_type, *struct.unpack("<6I", dwords))


def connect_command(qid: int, entries: int, *, flow_control: bool, kato_ms: int = 0) -> Sqe:
    """Connect for a queue of so many entries; its data is `CONNECT_DATA`."""
    cattr = 0 if flow_control else CATTR_NO_FLOW_CONTROL
    dwords = CONNECT_DWORDS.pack(0, qid, entries - 1, cattr, kato_ms)
    return fabrics_command(Fabrics.CONNECT, dwords, CONNECT_DATA.size)


IDENTIFY_BYTES = 4096
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"

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


class Property(IntEnum):
    """Offsets."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C


class Cc:
    """Bits of Controller Configuration."""

    EN = 1
    SHN_MASK = 3 << 14
    SHN_NORMAL = 1 << 14
    IOSQES_64 = 6 << 16
    IOCQES_16 = 4 << 20


class Csts:
    """Bits of Controller Status."""

    RDY = 1
    CFS = 2
    SHST_MASK = 3 << 2
    SHST_COMPLETE = 2 << 2


class Cap:
    """Controller Capabilities."""

    @staticmethod
    def make(entries: int, timeout_s: float) -> int:
        """Queues of so many entries, contiguous, the NVM command set."""
        return entries - 1 | 1 << 16 | int(timeout_s * 2) << 24 | 1 << 37

    @staticmethod
    def entries_max(cap: int) -> int:
        """MQES."""
        return (cap & 0xFFFF) + 1

    @staticmethod
    def timeout_s(cap: int) -> float:
        """TO: the longest that enabling takes."""
        return (cap >> 24 & 0xFF) / 2

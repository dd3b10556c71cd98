"""Commands and completions: the 64 and 16 bytes that capsules carry, and their numbers.

Names are the specification's (NVM Express Base 2.0; Fabrics commands in section 6).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "ADMIN_CAPSULE_DATA_MAX",
    "AUTHREQ_ASCR",
    "AUTHREQ_ATR",
    "Admin",
    "Completion",
    "Fabrics",
    "Feature",
    "LogPage",
    "NvmOpcode",
    "Sqe",
    "Status",
    "connect_command",
    "fabrics_command",
    "status_text",
]

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


class NvmOpcode(IntEnum):
    """I/O opcodes that we send or refuse by name."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02


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

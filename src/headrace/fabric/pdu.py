"""PDUs: how a connection's bytes are divided, and the rules that each PDU must keep.

For a target's queues that carry control commands. Bytes in, PDUs out: nothing here knows sockets. Lengths are
judged from a PDU's first 8 bytes, by native/fabric/pdu.h, before anything else of it is taken in.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from headrace import _native
from headrace.base.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator


class Type(IntEnum):
    """PDU types, by the specification's names."""

    IC_REQ = 0
    IC_RESP = 1
    H2C_TERM_REQ = 2
    C2H_TERM_REQ = 3
    CAPSULE_CMD = 4
    CAPSULE_RESP = 5
    H2C_DATA = 6
    C2H_DATA = 7
    R2T = 9


HDGST, DDGST, LAST, SUCCESS = 1, 2, 4, 8
"""FLAGS. The first two are also DGST's bits in ICReq and ICResp."""


class Fatal(IntEnum):
    """Fatal Error Status of a TermReq."""

    INVALID_HEADER_FIELD = 1
    SEQUENCE_ERROR = 2
    HEADER_DIGEST = 3
    OUT_OF_RANGE = 4
    LIMIT_EXCEEDED = 5
    UNSUPPORTED_PARAMETER = 6


class PduFault(Exception):
    """A PDU breaks a rule; the connection ends with a TermReq that says which.

    Args:
        status: what a TermReq says.
        info: the byte offset of the field, or the header digest found.
        what: for our own log.
    """

    def __init__(self, status: Fatal, info: int, what: str) -> None:
        super().__init__(f"{status.name.replace('_', ' ').lower()}: {what}")
        self.status = status
        self.info = info
        self.what = what


COMMON = struct.Struct("<BBBBI")
DATA = struct.Struct("<HHII4x")
"""CCCID, TTAG, DATAO, DATAL (or R2TO, R2TL), after the common header."""

_INIT = struct.Struct("<HBBI112x")
_TERM = struct.Struct("<HHH10x")
_DIGEST_BYTES = 4
_TERM_BYTES_MAX = 152
_PDA_MAX = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a receiver takes."""

    to_host: bool
    """The receiver is the host."""
    established: bool = True
    """False: ICReq or ICResp comes first."""
    hdgst: bool = False
    ddgst: bool = False
    alignment: int = 4
    """Of data in received PDUs, in bytes."""
    capsule_data_max: int = 0
    data_max: int = 0
    """Bytes of one H2CData or C2HData."""


class PduLayout(NamedTuple):
    """Where a PDU's parts end, in bytes."""

    type: Type
    flags: int
    hlen: int
    hdgst: bool
    ddgst: bool
    header_bytes: int
    pad_bytes: int
    data_bytes: int


class Pdu(NamedTuple):
    """A PDU that came whole."""

    layout: PduLayout
    header: bytes
    data: bytes
    intact: bool
    """False: its data digest is wrong."""

    @property
    def type(self) -> Type:
        """Its type."""
        return self.layout.type


def _invalid(offset: int, what: str) -> PduFault:
    return PduFault(Fatal.INVALID_HEADER_FIELD, offset, what)


def check_common(header: bytes, rules: Rules) -> PduLayout:
    """Judges the first 8 bytes of a PDU as native queues do; raises PduFault if they break a rule."""
    status, info, what, *parts = _native.fabric_check_common(header, **asdict(rules))
    if status:
        raise PduFault(Fatal(status), info, what)
    number, flags, hlen, _, _ = COMMON.unpack(header)
    return PduLayout(Type(number), flags, hlen, bool(flags & HDGST), bool(flags & DDGST), *parts)


class PduSplitter:
    """Divides the bytes of a connection into PDUs.

    Args:
        rules: may be replaced between PDUs.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._bytes = bytearray()
        self._layout: PduLayout | None = None

    @property
    def header(self) -> bytes:
        """The beginning of the current PDU, for the echo in a TermReq."""
        return bytes(self._bytes[:128])

    def feed(self, received: bytes) -> Iterator[Pdu]:
        """Takes bytes; yields PDUs as they are complete, each judged by the rules of that moment.

        Raises PduFault if a rule is broken; nothing more may be fed.
        """
        self._bytes += received
        while (pdu := self._next()) is not None:
            yield pdu

    def left(self) -> bytes:
        """Bytes after the last PDU; they are no longer ours."""
        rest, self._bytes = bytes(self._bytes), bytearray()
        return rest

    def _next(self) -> Pdu | None:
        if self._layout is None:
            if len(self._bytes) < COMMON.size:
                return None
            self._layout = check_common(bytes(self._bytes[: COMMON.size]), self.rules)
        layout = self._layout
        start = layout.header_bytes + layout.pad_bytes
        end = start + layout.data_bytes
        if layout.hdgst and len(self._bytes) >= layout.header_bytes:
            digest = int.from_bytes(self._bytes[layout.hlen : layout.header_bytes], "little")
            if digest != crc32c(self._bytes[: layout.hlen]):
                raise PduFault(Fatal.HEADER_DIGEST, digest, "the header digest is wrong")
        if len(self._bytes) < end + (_DIGEST_BYTES if layout.ddgst else 0):
            return None
        data = bytes(self._bytes[start:end])
        intact = True
        if layout.ddgst:
            digest = int.from_bytes(self._bytes[end : end + _DIGEST_BYTES], "little")
            intact = digest == crc32c(data)
            end += _DIGEST_BYTES
        pdu = Pdu(layout, bytes(self._bytes[: layout.header_bytes]), data, intact)
        _check_fields(pdu)
        del self._bytes[:end]
        self._layout = None
        return pdu


def _check_fields(pdu: Pdu) -> None:
    if pdu.type not in {Type.C2H_DATA, Type.H2C_DATA}:
        return
    _, _, datao, datal = DATA.unpack_from(pdu.header, COMMON.size)
    if datal != pdu.layout.data_bytes or datal % 4:
        raise _invalid(16, f"DATAL is {datal}, PLEN leaves {pdu.layout.data_bytes}")
    if datao % 4:
        raise _invalid(12, f"DATAO is {datao}")
    if datao + datal >= 1 << 32:
        raise PduFault(Fatal.OUT_OF_RANGE, 12, "DATAO and DATAL exceed 2^32")


@dataclass(frozen=True, slots=True)
class Format:
    """What the receiver of our PDUs asked for."""

    hdgst: bool = False
    ddgst: bool = False
    alignment: int = 4


def encode(
    type_: Type, body: bytes, data: bytes = b"", flags: int = 0, form: Format | None = None
) -> bytes:
    """A PDU: `body` is the header after the common 8 bytes."""
    form = form or Format()
    hlen = COMMON.size + len(body)
    end = hlen + (_DIGEST_BYTES if form.hdgst else 0)
    pdo = -(-end // form.alignment) * form.alignment if data else 0
    plen = end
    if data:
        plen = pdo + len(data) + (_DIGEST_BYTES if form.ddgst else 0)
        flags |= DDGST if form.ddgst else 0
    flags |= HDGST if form.hdgst else 0
    out = bytearray(COMMON.pack(type_, flags, hlen, pdo, plen) + body)
    if form.hdgst:
        out += crc32c(out).to_bytes(4, "little")
    if data:
        out += bytes(pdo - len(out)) + data
        if form.ddgst:
            out += crc32c(data).to_bytes(4, "little")
    return bytes(out)


class InitParameters(NamedTuple):
    """What ICReq and ICResp say."""

    pda: int
    """HPDA or CPDA: dwords of alignment, less one."""
    dgst: int
    limit: int
    """MAXR2T (less one) or MAXH2CDATA."""

    @property
    def alignment(self) -> int:
        """Bytes."""
        return (self.pda + 1) * 4


def icresp(dgst: int, maxh2cdata: int) -> bytes:
    """Our ICResp: CPDA 0."""
    return encode(Type.IC_RESP, _INIT.pack(0, 0, dgst, maxh2cdata))


def read_icreq(header: bytes) -> InitParameters:
    """Judges an ICReq; raises PduFault if PFV, HPDA or DGST is none that we know."""
    pfv, pda, dgst, limit = _INIT.unpack_from(header, COMMON.size)
    if pfv:
        raise PduFault(Fatal.UNSUPPORTED_PARAMETER, 8, f"PFV is {pfv}")
    if pda > _PDA_MAX:
        raise _invalid(10, f"HPDA is {pda}")
    if dgst & ~(HDGST | DDGST):
        raise _invalid(11, f"DGST is {dgst:#x}")
    return InitParameters(pda, dgst, limit)


def term_req(fault: PduFault, header: bytes, *, from_host: bool) -> bytes:
    """The TermReq that answers a fault, with the beginning of what was at fault."""
    echo = header[: _TERM_BYTES_MAX - COMMON.size - _TERM.size]
    body = _TERM.pack(fault.status, fault.info & 0xFFFF, fault.info >> 16 & 0xFFFF)
    type_ = Type.H2C_TERM_REQ if from_host else Type.C2H_TERM_REQ
    hlen = COMMON.size + len(body)
    return COMMON.pack(type_, 0, hlen, 0, hlen + len(echo)) + body + echo


def read_term_req(header: bytes) -> str:
    """What a peer's TermReq says, in words."""
    status, low, high = _TERM.unpack_from(header, COMMON.size)
    name = Fatal(status).name if status in set(Fatal) else str(status)
    return f"{name} ({low | high << 16:#x})"


def established(rules: Rules, dgst: int) -> Rules:
    """The rules after ICReq and ICResp."""
    return replace(rules, established=True, hdgst=bool(dgst & HDGST), ddgst=bool(dgst & DDGST))

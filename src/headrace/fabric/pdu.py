"""PDUs: how a connection's bytes are divided, and the rules that each PDU must keep.

The plain-Python side of native/fabric/pdu.h, for queues that carry control commands; tests hold the
two against each other. Bytes in, PDUs out: nothing here knows sockets. Lengths are judged from a
PDU's first 8 bytes, before anything else of it is taken in.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

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
_PDO_MAX = 255
_PDA_MAX = 31
_MAXH2CDATA_MIN = 4096


class _Kind(NamedTuple):
    to_host: bool
    hlen: int
    flags: int
    digested: bool
    has_data: bool
    may_have_data: bool


_KINDS = {
    Type.IC_REQ: _Kind(False, 128, 0, False, False, False),
    Type.IC_RESP: _Kind(True, 128, 0, False, False, False),
    Type.H2C_TERM_REQ: _Kind(False, 24, 0, False, False, False),
    Type.C2H_TERM_REQ: _Kind(True, 24, 0, False, False, False),
    Type.CAPSULE_CMD: _Kind(False, 72, HDGST | DDGST, True, False, True),
    Type.CAPSULE_RESP: _Kind(True, 24, HDGST, True, False, False),
    Type.H2C_DATA: _Kind(False, 24, HDGST | DDGST | LAST, True, True, True),
    Type.C2H_DATA: _Kind(True, 24, HDGST | DDGST | LAST | SUCCESS, True, True, True),
    Type.R2T: _Kind(True, 24, HDGST, True, False, False),
}
_OPENING = (Type.IC_REQ, Type.IC_RESP)
_ENDING = (Type.H2C_TERM_REQ, Type.C2H_TERM_REQ)


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


def check_common(header: bytes, rules: Rules) -> PduLayout:  # noqa: C901 - a list of rules
    """Judges the first 8 bytes of a PDU; raises PduFault if they break a rule."""
    number, flags, hlen, pdo, plen = COMMON.unpack(header)
    try:
        kind = _KINDS[type_ := Type(number)]
    except ValueError:
        raise _invalid(0, f"unknown PDU type {number}") from None
    if kind.to_host != rules.to_host:
        raise _invalid(0, f"{type_.name} comes from the wrong side")
    if type_ not in _ENDING and (type_ in _OPENING) == rules.established:
        raise PduFault(Fatal.SEQUENCE_ERROR, 0, f"{type_.name} out of order")
    if hlen != kind.hlen:
        raise _invalid(2, f"HLEN is {hlen}, expected {kind.hlen}")
    if flags & ~kind.flags:
        raise _invalid(1, f"FLAGS is {flags:#x}")
    hdgst = kind.digested and rules.hdgst
    if bool(flags & HDGST) != hdgst:
        raise _invalid(1, "HDGSTF differs from what was negotiated")
    if flags & SUCCESS and not flags & LAST:
        raise _invalid(1, "SUCCESS without LAST_PDU")
    if type_ in _ENDING:
        if not hlen <= plen <= _TERM_BYTES_MAX:
            raise _invalid(4, f"PLEN of a TermReq is {plen}")
        if pdo:
            raise _invalid(3, "PDO of a PDU without data is not 0")
        return PduLayout(type_, 0, hlen, False, False, plen, 0, 0)
    return _lengths(PduLayout(type_, flags, hlen, hdgst, False, 0, 0, 0), kind, (plen, pdo), rules)


def _lengths(  # noqa: C901 - a list of rules
    layout: PduLayout, kind: _Kind, lengths: tuple[int, int], rules: Rules
) -> PduLayout:
    plen, pdo = lengths
    header = layout.hlen + (_DIGEST_BYTES if layout.hdgst else 0)
    layout = layout._replace(header_bytes=header)
    if plen < header:
        raise _invalid(4, f"PLEN is {plen}, the header alone has {header}")
    if plen == header:
        if kind.has_data:
            raise _invalid(4, "PLEN leaves no data")
        if pdo:
            raise _invalid(3, "PDO of a PDU without data is not 0")
        if layout.flags & DDGST:
            raise _invalid(1, "DDGSTF on a PDU without data")
        return layout
    if not kind.may_have_data:
        raise _invalid(4, f"PLEN is {plen}, expected {header}")
    most = rules.capsule_data_max if layout.type is Type.CAPSULE_CMD else rules.data_max
    trailer = _DIGEST_BYTES if rules.ddgst else 0
    if plen > _PDO_MAX + most + trailer:
        raise _invalid(4, f"PLEN is {plen}, data at most {most}")
    if bool(layout.flags & DDGST) != rules.ddgst:
        raise _invalid(1, "DDGSTF differs from what was negotiated")
    if pdo < header or pdo % rules.alignment or pdo + trailer >= plen:
        raise _invalid(3, f"PDO is {pdo}")
    data = plen - pdo - trailer
    if data > most:
        raise _invalid(4, f"PLEN is {plen}, data at most {most}")
    return layout._replace(ddgst=rules.ddgst, pad_bytes=pdo - header, data_bytes=data)


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


def icreq(dgst: int) -> bytes:
    """Our ICReq: HPDA 0, one R2T."""
    return encode(Type.IC_REQ, _INIT.pack(0, 0, dgst, 0))


def icresp(dgst: int, maxh2cdata: int) -> bytes:
    """Our ICResp: CPDA 0."""
    return encode(Type.IC_RESP, _INIT.pack(0, 0, dgst, maxh2cdata))


def read_icreq(header: bytes) -> InitParameters:
    """Judges an ICReq; raises PduFault if PFV, HPDA or DGST is none that we know."""
    return _read_init(header, HDGST | DDGST)


def read_icresp(header: bytes, offered: int) -> InitParameters:
    """Judges an ICResp against the digests that were offered.

    Raises PduFault if PFV, CPDA, DGST or MAXH2CDATA is none that is allowed.
    """
    parameters = _read_init(header, offered)
    if parameters.limit < _MAXH2CDATA_MIN or parameters.limit % 4:
        raise _invalid(12, f"MAXH2CDATA is {parameters.limit}")
    return parameters


def _read_init(header: bytes, dgst_allowed: int) -> InitParameters:
    pfv, pda, dgst, limit = _INIT.unpack_from(header, COMMON.size)
    if pfv:
        raise PduFault(Fatal.UNSUPPORTED_PARAMETER, 8, f"PFV is {pfv}")
    if pda > _PDA_MAX:
        raise _invalid(10, f"HPDA or CPDA is {pda}")
    if dgst & ~dgst_allowed:
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

"""Hosts that break the protocol on a real connection: each hears why, is closed, and harms nobody."""

import socket
import struct

import pytest

from fabric.conftest import HOST, NQN
from headrace.fabric.command import CONNECT_DATA, Admin, Sqe, Status, connect_command
from headrace.fabric.host import Host, HostOptions
from headrace.fabric.pdu import (
    COMMON,
    DATA,
    Format,
    PduSplitter,
    Rules,
    Type,
    encode,
    icreq,
    read_term_req,
)
from tests_shared import until

DIGESTS = Format(hdgst=True, ddgst=True)


def common(type_, flags, hlen, pdo, plen):
    return COMMON.pack(type_, flags, hlen, pdo, plen)


def connect(subnqn=NQN, *, qid=0, sqsize=31, recfmt=0, cntlid=0xFFFF, cid=0, form=None, data=None):
    sqe = connect_command(qid, 32, flow_control=True)._replace(cid=cid)
    sqe = sqe._replace(cdw10=recfmt | qid << 16, cdw11=sqsize)
    data = (
        data
        if data is not None
        else CONNECT_DATA.pack(HOST.id, cntlid, subnqn.encode(), HOST.nqn.encode())
    )
    return encode(Type.CAPSULE_CMD, sqe.pack(), data, form=form or Format())


def talk(address, *messages):
    """Sends all of it and reads until the target closes; returns the PDUs."""
    with socket.create_connection(address, timeout=10) as sock:
        for message in messages:
            sock.sendall(message)
        sock.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := sock.recv(1 << 16):
            received += chunk
    splitter = PduSplitter(Rules(to_host=True, established=False, data_max=1 << 20))
    pdus = []
    for pdu in splitter.feed(received):
        pdus.append(pdu)
        if pdu.type is Type.IC_RESP:
            dgst = pdu.header[11]
            splitter.rules = Rules(
                to_host=True, hdgst=bool(dgst & 1), ddgst=bool(dgst & 2), data_max=1 << 20
            )
    return pdus


flipped = bytearray(connect(form=DIGESTS))
flipped[30] ^= 1

MISTAKES = {
    "no ICReq": ([connect()], "SEQUENCE_ERROR (0x0)"),
    "ICReq twice": ([icreq(0), icreq(0)], "SEQUENCE_ERROR (0x0)"),
    "PFV": ([icreq(0)[:8] + b"\1" + icreq(0)[9:]], "UNSUPPORTED_PARAMETER (0x8)"),
    "HPDA": ([icreq(0)[:10] + b"\x20" + icreq(0)[11:]], "INVALID_HEADER_FIELD (0xa)"),
    "garbage": ([b"GET / HTTP/1.1\r\n\r\n"], "INVALID_HEADER_FIELD (0x0)"),
    "HLEN 255": ([icreq(1), common(4, 1, 255, 0, 76)], "INVALID_HEADER_FIELD (0x2)"),
    "PLEN 4 GiB": ([icreq(0), common(4, 0, 72, 72, 2**32 - 1)], "INVALID_HEADER_FIELD (0x4)"),
    "PLEN 8 KiB + 4": ([icreq(0), common(4, 0, 72, 72, 72 + 8196)], "INVALID_HEADER_FIELD (0x4)"),
    "PDO": ([icreq(0), common(4, 0, 72, 73, 72 + 1024)], "INVALID_HEADER_FIELD (0x3)"),
    "HDGSTF": ([icreq(0), common(4, 1, 72, 0, 76)], "INVALID_HEADER_FIELD (0x1)"),
    "header digest": ([icreq(3), bytes(flipped)], "HEADER_DIGEST"),
    "H2CData": (
        [icreq(0), encode(Type.H2C_DATA, DATA.pack(0, 0, 0, 512), bytes(512), 4)],
        "INVALID_HEADER_FIELD (0xa)",
    ),
    "C2HData": (
        [icreq(0), encode(Type.C2H_DATA, DATA.pack(0, 0, 0, 512), bytes(512), 4)],
        "INVALID_HEADER_FIELD (0x0)",
    ),
    "CID FFFFh": ([icreq(0), connect(cid=0xFFFF)], "INVALID_HEADER_FIELD (0xa)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_a_term_req(exported, name):
    messages, said = MISTAKES[name]
    pdus = talk(exported.target.address, *messages)
    assert pdus[-1].type is Type.C2H_TERM_REQ
    assert read_term_req(pdus[-1].header).startswith(said)
    until(lambda: exported.target.figures()["connections"] == 0)
    with Host(exported.target.address, NQN, HOST, HostOptions(timeout_s=5)) as host:
        assert host.namespaces()


REFUSALS = {
    "not a Connect": (
        encode(Type.CAPSULE_CMD, Sqe(Admin.IDENTIFY).pack()),
        Status.COMMAND_SEQUENCE_ERROR,
    ),
    "RECFMT": (connect(recfmt=1), Status.CONNECT_INCOMPATIBLE_FORMAT),
    "SQSIZE 0": (connect(sqsize=0), Status.CONNECT_INVALID_PARAMETERS),
    "SQSIZE 65535": (connect(sqsize=0xFFFF), Status.CONNECT_INVALID_PARAMETERS),
    "CNTLID": (connect(cntlid=1), Status.CONNECT_INVALID_PARAMETERS),
    "no such controller": (connect(qid=1, cntlid=77), Status.CONNECT_INVALID_PARAMETERS),
    "short data": (connect(data=bytes(512)), Status.SGL_LENGTH_INVALID),
    "no SUBNQN": (connect(subnqn=""), Status.CONNECT_INVALID_PARAMETERS),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_connect_that_is_refused(exported, name):
    message, status = REFUSALS[name]
    pdus = talk(exported.target.address, icreq(0), message)
    assert pdus[-1].type is Type.CAPSULE_RESP
    found = struct.unpack_from("<H", pdus[-1].header, 22)[0] >> 1
    assert found == status | 0x4000


def test_a_damaged_connect_may_be_sent_again(exported):
    """A data digest costs the command alone."""
    damaged = bytearray(connect(form=DIGESTS))
    damaged[-1] ^= 1
    pdus = talk(exported.target.address, icreq(3), bytes(damaged), connect(form=DIGESTS))
    statuses = [struct.unpack_from("<H", p.header, 22)[0] >> 1 for p in pdus[1:]]
    assert statuses == [Status.TRANSIENT_TRANSPORT, 0]

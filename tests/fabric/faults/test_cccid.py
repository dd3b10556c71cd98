"""CCCID and CID: of no live command, or of one that is live already."""

import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES, READ, command
from fabric.faults.hostile_target import c2h, response

OTHERS = [1 << 6, 1 << 15, 0xFFFF]
"""Bits that make another CID."""


@pytest.mark.parametrize("place", PLACES)
def test_a_host_s_cid_ffff(target, place):
    message = command(READ._replace(cid=0xFFFF))
    hostile_host.check_term(target, place, message, "INVALID_HEADER_FIELD (0xa)")


def test_a_host_s_live_cid(target):
    """Two event requests with one CID: the first waits for its event."""
    event = command(READ._replace(opcode=0x0C))
    with hostile_host.line(target, "admin") as sock:
        sock.sendall(b"".join([command(ENABLE), event, event]))
        pdus = hostile_host.heard(sock)
    assert [pdu.type.name for pdu in pdus] == ["CAPSULE_RESP", "C2H_TERM_REQ"]


ENABLE = READ._replace(opcode=0x7F, nsid=0, sgl_length=0, cdw11=0x14, cdw12=0x460001)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dgst", [0, 3])
def test_data_of_a_target(place, other, dgst):
    def mistake(sqe, form):
        return c2h(sqe, form, cccid=sqe.cid ^ other)

    hostile_target.check_term(place, mistake, "INVALID_HEADER_FIELD (0x8)", dgst)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", OTHERS)
def test_a_response_of_a_target(place, other):
    def mistake(sqe, form):
        return response(sqe, form, cid=sqe.cid ^ other)

    hostile_target.check_term(place, mistake, "INVALID_HEADER_FIELD (0x14)")

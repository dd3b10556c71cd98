"""TTAG: a read-only controller never asks for data, and a host that only reads has none to give."""

import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES
from headrace.fabric.pdu import DATA, Format, Type, encode


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dgst", [0, 3])
def test_h2c_data_of_a_host(target, place, dgst):
    form = Format(bool(dgst & 1), bool(dgst & 2))
    for cccid, ttag in ((0, 0), (3, 1), (0xFFFF, 0xFFFF)):
        for flags in (0, 4):
            body = DATA.pack(cccid, ttag, 0, 512)
            message = encode(Type.H2C_DATA, body, bytes(512), flags, form)
            hostile_host.check_term(target, place, message, "INVALID_HEADER_FIELD (0xa)", dgst)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dgst", [0, 3])
@pytest.mark.parametrize(
    ("ttag", "at", "length"), [(0, 0, 512), (1, 512, 4), (0xFFFF, 0, 2**32 - 4)]
)
def test_r2t_of_a_target(place, dgst, ttag, at, length):
    def mistake(sqe, form):
        return encode(Type.R2T, DATA.pack(sqe.cid, ttag, at, length), form=form)

    hostile_target.check_term(place, mistake, "SEQUENCE_ERROR (0x0)", dgst)

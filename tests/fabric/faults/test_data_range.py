"""DATAO and DATAL: gaps, overlaps, more than was asked for, and lengths that contradict PLEN."""

import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES
from fabric.faults.hostile_target import c2h
from headrace.fabric.pdu import DATA, Type, encode

RANGE = "OUT_OF_RANGE"
WRONG = {
    "gap": ([{"datao": 4, "nbytes": 8}], RANGE),
    "gap of 4 GiB": ([{"datao": 2**32 - 512, "nbytes": 8}], RANGE),
    "overlap": ([{"nbytes": 8, "flags": 0}, {"datao": 4, "nbytes": 8, "flags": 0}], RANGE),
    "back to the beginning": ([{"nbytes": 8, "flags": 0}, {"nbytes": 8, "flags": 0}], RANGE),
    "beyond the command": ([{"nbytes": 8192}], RANGE),
    "DATAL above PLEN": ([{"datal": 516, "nbytes": 512}], "INVALID_HEADER_FIELD (0x10)"),
    "DATAL below PLEN": ([{"datal": 4, "nbytes": 512}], "INVALID_HEADER_FIELD (0x10)"),
    "DATAL 0": ([{"datal": 0, "nbytes": 4}], "INVALID_HEADER_FIELD (0x10)"),
    "DATAL 4 GiB": ([{"datal": 2**32 - 1, "nbytes": 512}], "INVALID_HEADER_FIELD (0x10)"),
    "DATAL no dwords": ([{"nbytes": 6}], "INVALID_HEADER_FIELD (0x10)"),
    "DATAO no dwords": ([{"datao": 2, "nbytes": 8}], "INVALID_HEADER_FIELD (0xc)"),
    "LAST too early": ([{"nbytes": 8}], "INVALID_HEADER_FIELD (0x1)"),
    "LAST missing": ([{"flags": 0}], "INVALID_HEADER_FIELD (0x1)"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dgst", [0, 3])
@pytest.mark.parametrize("name", WRONG)
def test_of_a_target(place, name, dgst):
    pdus, said = WRONG[name]

    def mistake(sqe, form):
        return b"".join(c2h(sqe, form, **fields) for fields in pdus)

    hostile_target.check_term(place, mistake, said, dgst)


@pytest.mark.parametrize("place", PLACES)
def test_of_a_host(target, place):
    """On an I/O queue it is refused before its lengths are looked at: nobody asked for it."""
    for datao, datal, at in ((0, 508, 16), (0, 516, 16), (2, 512, 12), (0, 510, 16)):
        message = encode(Type.H2C_DATA, DATA.pack(0, 0, datao, datal), bytes(512), 4)
        said = f"INVALID_HEADER_FIELD ({at if place == 'admin' else 10:#x})"
        hostile_host.check_term(target, place, message, said)

"""PLEN: below the header, of a length that the type cannot have, or beyond every limit."""

import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES, common

SAID = "INVALID_HEADER_FIELD (0x4)"


@pytest.mark.parametrize("place", PLACES)
def test_of_a_host(target, place):
    beyond = 8196 if place == "admin" else 4
    for message in (
        common(4, 0, 72, 0, 0), common(4, 0, 72, 0, 71), common(4, 0, 72, 72, 72 + beyond),
        common(4, 0, 72, 72, 2**32 - 1), common(6, 4, 24, 0, 24), common(6, 4, 24, 24, 2**31),
        common(6, 4, 24, 24, 24 + 131072 + 4), common(2, 0, 24, 0, 23), common(2, 0, 24, 0, 153),
    ):  # fmt: skip
        hostile_host.check_term(target, place, message, SAID)


WRONG = {
    "response, short": (5, 0, 23),
    "response, long": (5, 0, 28),
    "response, 4 GiB": (5, 0, 2**32 - 1),
    "data, below the header": (7, 4, 8),
    "data without data": (7, 4, 24),
    "data, 4 GiB": (7, 4, 2**32 - 1),
    "R2T, long": (9, 0, 25),
    "TermReq, long": (3, 0, 153),
    "TermReq, short": (3, 0, 20),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WRONG)
def test_of_a_target(place, name):
    type_, flags, plen = WRONG[name]
    pdo = 24 if type_ == 7 and plen > 24 else 0

    def mistake(sqe, form):
        return common(type_, flags, 24, pdo, plen)

    hostile_target.check_term(place, mistake, SAID)

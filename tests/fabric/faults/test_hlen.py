"""HLEN: every type has its own, and no other is taken."""

import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES, common

WRONG = [0, 7, 8, 23, 25, 71, 73, 127, 129, 255]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("type_", "own"), [(4, 72), (6, 24), (2, 24)])
def test_of_a_host(target, place, type_, own):
    for hlen in WRONG[:: 3 if place == "io" else 1]:
        assert hlen != own
        message = common(type_, 0, hlen, 0, 72)
        hostile_host.check_term(target, place, message, "INVALID_HEADER_FIELD (0x2)")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("type_", [5, 7, 9, 3])
@pytest.mark.parametrize("hlen", [0, 23, 25, 255])
def test_of_a_target(place, type_, hlen):
    def mistake(sqe, form):
        return common(type_, 4 if type_ == 7 else 0, hlen, 0, 536)

    hostile_target.check_term(place, mistake, "INVALID_HEADER_FIELD (0x2)")

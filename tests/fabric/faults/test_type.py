"""PDU types: unknown ones, those of the other side, flags that a type has not."""

import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES, common

UNKNOWN = [8, 10, 11, 127, 255]


@pytest.mark.parametrize("place", PLACES)
def test_of_a_host(target, place):
    for type_ in (1, 3, 5, 7, 9, *UNKNOWN):
        message = common(type_, 0, 24, 0, 24)
        hostile_host.check_term(target, place, message, "INVALID_HEADER_FIELD (0x0)")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("type_", [0, 2, 4, 6, *UNKNOWN])
def test_of_a_target(place, type_):
    def mistake(sqe, form):
        return common(type_, 0, 24, 0, 24)

    hostile_target.check_term(place, mistake, "INVALID_HEADER_FIELD (0x0)")


@pytest.mark.parametrize("place", PLACES)
def test_flags_of_a_host(target, place):
    for type_, hlen, flags in (
        (4, 72, 4),
        (4, 72, 8),
        (4, 72, 1),
        (4, 72, 2),
        (4, 72, 0x80),
        (6, 24, 0x44),
    ):
        message = common(type_, flags, hlen, 24 if type_ == 6 else 0, 536 if type_ == 6 else 72)
        hostile_host.check_term(target, place, message, "INVALID_HEADER_FIELD (0x1)")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("type_", "flags"), [(5, 1), (5, 2), (5, 4), (5, 8), (7, 1), (7, 2), (7, 0x14), (9, 4), (7, 8)]
)
def test_flags_of_a_target(place, type_, flags):
    """Among them digests that were not agreed, and SUCCESS without LAST_PDU."""

    def mistake(sqe, form):
        has_data = type_ == 7
        return common(type_, flags, 24, 24 if has_data else 0, 536 if has_data else 24)

    hostile_target.check_term(place, mistake, "INVALID_HEADER_FIELD (0x1)")

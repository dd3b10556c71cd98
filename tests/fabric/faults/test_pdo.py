"""PDO: within the header, not aligned, beyond the data, or of a PDU that has none."""

import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import PLACES, common

SAID = "INVALID_HEADER_FIELD (0x3)"


@pytest.mark.parametrize("place", PLACES)
def test_of_a_host(target, place):
    messages = [common(6, 4, 24, pdo, 536) for pdo in (0, 4, 23, 25, 26)]
    messages += [common(4, 0, 72, pdo, 72) for pdo in (1, 72, 255)]
    if place == "admin":  # on I/O queues no capsule has data
        messages += [common(4, 0, 72, pdo, 72 + 1024) for pdo in (0, 71, 73, 74, 8)]
    for message in messages:
        hostile_host.check_term(target, place, message, SAID)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("type_", "pdo", "plen"),
    [
        (7, 0, 536),
        (7, 8, 536),
        (7, 23, 536),
        (7, 25, 536),
        (7, 28, 28),
        (7, 255, 536),
        (5, 24, 24),
        (9, 4, 24),
    ],
)
def test_of_a_target(place, type_, pdo, plen):
    def mistake(sqe, form):
        return common(type_, 4 if type_ == 7 else 0, 24, pdo, plen)

    hostile_target.check_term(place, mistake, SAID)

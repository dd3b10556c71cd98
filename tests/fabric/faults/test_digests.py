"""Digests: every wrong header digest ends the connection, every wrong data digest one command alone."""

import numpy as np
import pytest

from fabric.faults import hostile_host, hostile_target
from fabric.faults.hostile_host import DIGESTS, PLACES, command
from fabric.faults.hostile_target import HostileTarget, c2h, check_reads, engine, response
from fabric.faults.tally import count
from headrace.fabric.pdu import Type, encode


def flipped(message, bit):
    out = bytearray(message)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


# Behind the common header, whose own rules are judged before: SQE and digest.
BITS = [64, 71, 100, 200, 333, 575, 576, 607]


@pytest.mark.parametrize("place", PLACES)
def test_a_host_s_header_digest(target, place):
    for bit in BITS:
        message = flipped(command(form=DIGESTS), bit)
        hostile_host.check_term(target, place, message, "HEADER_DIGEST", 3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bit", [64, 100, 191, 192, 223])
@pytest.mark.parametrize("data", [False, True])
def test_a_target_s_header_digest(place, bit, data):
    def mistake(sqe, form):
        return flipped(c2h(sqe, form) if data else response(sqe, form), bit)

    hostile_target.check_term(place, mistake, "HEADER_DIGEST", 3)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("bit", [0, 4095, -1, -32])
def test_a_target_s_data_digest_costs_the_command_alone(times, bit):
    """It is read again on the same connection."""

    def mistake(sqe, form):
        whole = c2h(sqe, form)
        at = 28 * 8 + bit if bit >= 0 else len(whole) * 8 + bit
        return flipped(whole, at) + response(sqe, form)

    with (
        HostileTarget(io=mistake, times=times, dgst=3, fatal=False) as target,
        engine(3) as fabric,
    ):
        fabric.open(target.url)
        check_reads(fabric, target.url)
        figures = fabric.figures()
    assert target.made == figures["digest_errors"] == times
    assert figures["retried"] >= times
    assert figures["lost_queues"] == figures["failed"] == 0
    count("data digests of targets", times, figures["digest_errors"])


def test_data_that_stays_damaged_is_an_error_and_no_data():
    def mistake(sqe, form):
        return flipped(c2h(sqe, form), 28 * 8) + response(sqe, form)

    with (
        HostileTarget(io=mistake, times=1 << 30, dgst=3, fatal=False) as target,
        engine(3) as fabric,
    ):
        fabric.open(target.url)
        dest = np.zeros(512, np.uint8)
        found = fabric.read_many(target.url, np.array([0]), np.array([512]), dest, 20.0)
        assert found[0] < 0
        count("data digests of targets", target.made, fabric.figures()["digest_errors"])


def test_a_host_s_data_where_no_capsule_has_any(target):
    """On an I/O queue; a damaged Connect is in test_hostile_hosts.py."""
    message = encode(Type.CAPSULE_CMD, hostile_host.READ.pack(), bytes(512), form=DIGESTS)
    hostile_host.check_term(target, "io", message, "INVALID_HEADER_FIELD (0x4)", 3)

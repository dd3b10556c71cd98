"""Waits are cut along the way that a batch took: for many at once, what one by one would give."""

import random

import numpy as np
import pytest

from headrace.plane.batch_trace import PHASES, TRACE, Interruptions, waits

STAMPS = (
    "started_s",
    "taken_s", "planned_s", "begun_s", "ready_s", "decoding_s", "decoded_s", "collated_s", "moved_s",
)  # fmt: skip
ASKED_S = 1000.0


def way(**stamps):
    """A way with stamps in seconds after `ASKED_S`; other attributes as they are."""
    made = np.zeros(1, TRACE)
    for name, value in stamps.items():
        made[name] = ASKED_S + value if name in STAMPS else value
    return made


def asides(detours):
    """The detours of each wait, the first ones first."""
    found = []
    for turn in range(max(map(len, detours))):
        those = [(row, *each[turn]) for row, each in enumerate(detours) if len(each) > turn]
        rows, until_s, came = zip(*those, strict=True)
        found.append(Interruptions(np.array(rows), np.array(until_s), np.concatenate(came)))
    return found


def cut(one, delivered_s=1.0, detours=()):
    """The phases of one wait, without those that are nothing, and what its reads had waited for."""
    turns = asides([[(ASKED_S + until_s, other) for until_s, other in detours]])
    found = waits(np.array([ASKED_S]), np.array([ASKED_S + delivered_s]), one, turns)
    assert found.phases.sum() == pytest.approx(max(0.0, delivered_s))
    assert (found.phases >= 0.0).all()
    named = {name: s for name, s in zip(PHASES, found.phases[0].tolist(), strict=True) if s > 1e-9}
    return named, found.room_s.item(), found.held_s.item()


def close(**seconds):
    return pytest.approx(seconds)


WHOLE = {
    "taken_s": 0.1, "planned_s": 0.15, "begun_s": 0.25, "ready_s": 0.45, "decoding_s": 0.5,
    "decoded_s": 0.7, "collated_s": 0.75, "moved_s": 0.85,
}  # fmt: skip


def test_a_whole_way_has_every_phase():
    named, *_ = cut(way(**WHOLE, read_s=2.0, open_s=0.5))
    assert named == close(
        hold=0.2, open=0.05 + 0.05, read=0.15, queue=0.05, decode=0.2, collate=0.05, transfer=0.1, hand=0.15
    )  # fmt: skip


def test_what_was_over_before_somebody_asked_is_not_waited_for():
    early = {name: value - 0.5 for name, value in WHOLE.items()}
    named, *_ = cut(way(**early))
    assert named == close(decode=0.2, collate=0.05, transfer=0.1, hand=0.65)


def test_what_begins_with_an_epoch_is_a_phase_of_its_own():
    early = {name: value - 0.5 for name, value in WHOLE.items()}
    named, *_ = cut(way(**early, started_s=0.3))
    assert named == close(start=0.3, transfer=0.05, hand=0.65)
    named, *_ = cut(way(**WHOLE, started_s=0.3, serial=1.0))
    assert named["start"] == pytest.approx(0.3)


def test_a_batch_that_was_there_only_needed_handing_over():
    named, *_ = cut(way(ready_s=-1.0))
    assert named == close(hand=1.0)


@pytest.mark.parametrize("delivered_s", [0.0, -1.0])
def test_no_wait_has_no_phases(delivered_s):
    assert cut(way(**WHOLE), delivered_s)[0] == {}
    assert cut(way(**WHOLE, serial=True), delivered_s)[0] == {}
    assert cut(way(), delivered_s)[0] == {}


def test_of_an_unknown_way_all_is_reading():
    assert cut(way())[0] == close(read=1.0)


def test_stamps_after_the_delivery_count_up_to_it():
    assert cut(way(begun_s=0.25, ready_s=3.0))[0] == close(hold=0.25, read=0.75)


def test_what_one_process_made_in_turn_shares_the_wait():
    """It began before anybody asked: 1 s of reading, 2 s of decoding, 1 s of collating."""
    serial = way(
        taken_s=-3.2, ready_s=-2.2, decoding_s=-2.2, decoded_s=-0.2, collated_s=0.8, moved_s=0.9,
        serial=True, read_s=1.0, open_s=0.5,
    )  # fmt: skip
    named, *_ = cut(serial)
    assert named == close(open=0.1, read=0.1, decode=0.4, collate=0.2, transfer=0.1, hand=0.1)


def test_a_process_whose_work_took_no_time_handed_it_over():
    at_once = dict.fromkeys(("taken_s", "ready_s", "decoding_s", "decoded_s", "collated_s"), 0.5)
    assert cut(way(**at_once, serial=True))[0] == close(hand=1.0)


def test_a_detour_is_what_the_consumer_was_busy_with():
    """Its own batch was there; then it waited for bytes of a later one, until 0.6."""
    own, later = (
        way(ready_s=-1.0, room_s=9.0),
        way(begun_s=0.1, ready_s=0.5, room_s=2.0, held_s=3.0),
    )
    named, room_s, held_s = cut(own, detours=[(0.6, later)])
    assert named == close(hold=0.1, read=0.4, hand=0.5)
    assert (room_s, held_s) == (2.0, 3.0)


def test_a_batch_that_was_not_done_waited_for_its_own_reads_too():
    own, later = way(ready_s=0.2, room_s=9.0), way(ready_s=0.5, room_s=2.0)
    named, room_s, _ = cut(own, detours=[(0.6, later), (0.1, later)])
    assert named == close(read=0.5, hand=0.5)
    assert room_s == 13.0
    assert cut(way(ready_s=-1.0, room_s=9.0))[1] == 9.0


def drawn(rnd):
    stamps = sorted(rnd.uniform(-2.0, 2.0) for _ in STAMPS)
    if rnd.random() < 0.2:
        rnd.shuffle(stamps)
    known = {n: s for n, s in zip(STAMPS, stamps, strict=True) if rnd.random() < 0.8}
    return way(
        **known, read_s=rnd.choice([0.0, 1.0]), open_s=rnd.choice([0.0, 0.5, 3.0]),
        room_s=rnd.random(), held_s=rnd.random(), serial=rnd.random() < 0.3,
    )  # fmt: skip


def test_many_at_once_are_what_each_is_alone():
    rnd = random.Random(11)
    many = 500
    asked_s = np.array([ASKED_S + rnd.uniform(-1, 1) for _ in range(many)])
    delivered_s = asked_s + np.array([rnd.choice([0.0, rnd.uniform(0, 3)]) for _ in range(many)])
    ways = [drawn(rnd) for _ in range(many)]
    detours = [
        [(ASKED_S + rnd.uniform(-1, 3), drawn(rnd)) for _ in range(rnd.choice([0, 0, 1, 2, 3]))]
        for _ in range(many)
    ]
    found = waits(asked_s, delivered_s, np.concatenate(ways), asides(detours))
    assert (found.phases >= 0.0).all()
    assert np.allclose(found.phases.sum(1), delivered_s - asked_s)
    for i in range(many):
        alone = waits(
            asked_s[i : i + 1], delivered_s[i : i + 1], ways[i], asides(detours[i : i + 1])
        )
        for one, all_of_them in zip(alone, found, strict=True):
            assert np.array_equal(one[0], all_of_them[i])

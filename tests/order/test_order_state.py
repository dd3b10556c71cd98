"""OrderState: small, exact, and clear about what does not fit."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OrderError, StateMismatch
from headrace.order import OrderState, Shuffled

ORDER = Shuffled(1000, seed=7)
STATE = OrderState.begin(ORDER, "f" * 64, epoch=2).delivered(512, 123)
UINT64 = st.integers(0, 2**64 - 1)


@given(
    seed=UINT64,
    epoch=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**48),
    order_hash=UINT64,
)
def test_a_state_survives_json_and_is_small(seed, epoch, position, order_hash):
    state = replace(STATE, seed=seed, epoch=epoch, position=position, order_hash=order_hash)
    text = json.dumps(state.to_dict())
    assert len(text) < 300
    assert OrderState.from_dict(json.loads(text)) == state


def test_a_state_moves_forward():
    state = OrderState.begin(ORDER, "data").delivered(10, 2**64 - 1).delivered(20, 3, 4)
    assert (state.epoch, state.position, state.order_hash) == (0, 20, 6)
    following = state.next_epoch()
    assert (following.epoch, following.position, following.order_hash) == (1, 0, 0)
    with pytest.raises(OrderError, match="position is 19, but 20 were delivered already"):
        state.delivered(19)


def test_the_same_order_and_data_resume():
    STATE.check(Shuffled(1000, seed=7), "f" * 64)


@pytest.mark.parametrize(
    ("state", "order", "fingerprint", "message"),
    [
        (STATE, ORDER, "other", "state belongs to data f{64}, this data is other: .* start anew"),
        (STATE, ORDER, "other", "It has 1,000 samples, as many as the state's"),
        (STATE, Shuffled(1200, seed=7), "other", "It has 1,200 samples, another number than"),
        (STATE, Shuffled(1000, seed=8), "f" * 64, r"seed 7, .* seed 8\. Resume with seed=7\."),
        (STATE, Shuffled(999, seed=7), "f" * 64, "saved with order [0-9a-f]{16}, .*'samples': 999"),
        (replace(STATE, position=1001), ORDER, "f" * 64, "position 1001, .* 1000 positions"),
    ],
)
def test_every_mismatch_says_what_was_found_and_expected(state, order, fingerprint, message):
    with pytest.raises(StateMismatch, match=message):
        state.check(order, fingerprint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"version 2, expected 1\. Resume with the version of headrace"),
        ({"version": None}, "version None, expected 1"),
        ({"epoch": -1}, "epoch is -1, expected 0 to"),
        ({"epoch": "2"}, "epoch is '2', expected a whole number"),
        ({"position": -5}, "position is -5, expected at least 0"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"order_hash": "xyz"}, "invalid literal .*'xyz'"),
        ({"order_hash": 5}, "state cannot be read"),
        ({"order_hash": "1" * 17}, "order_hash is"),
        ({"fingerprint": ""}, "fingerprint is '', expected 1 to 64 plain ASCII"),
        ({"fingerprint": "f" * 65}, "fingerprint is"),
        ({"fingerprint": "é"}, "fingerprint is 'é'"),
        ({"fingerprint": None}, "fingerprint is None, expected text"),
        ({"order_digest": "0" * 17}, "order_digest is"),
        ({"more": 1}, "wrong fields: more unknown. .*use an earlier checkpoint"),
    ],
)
def test_a_damaged_state_is_refused(change, message):
    with pytest.raises(OrderError, match=message):
        OrderState.from_dict({**STATE.to_dict(), **change})


@pytest.mark.parametrize("name", sorted(set(STATE.to_dict()) - {"version"}))
def test_a_missing_field_is_named(name):
    saved = STATE.to_dict()
    del saved[name]
    with pytest.raises(OrderError, match=f"wrong fields: {name} missing"):
        OrderState.from_dict(saved)


def test_a_state_of_another_version_cannot_be_made():
    with pytest.raises(OrderError, match="version 3, expected 1"):
        replace(STATE, version=3)


@pytest.mark.parametrize("saved", [None, [], "state"])
def test_what_is_no_dict_is_refused(saved):
    with pytest.raises(OrderError, match="expected the dict that state_dict"):
        OrderState.from_dict(saved)

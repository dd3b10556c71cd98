"""The rules of trying again, without a clock."""

from __future__ import annotations

import email.utils

from hypothesis import given
from hypothesis import strategies as st

from headrace.io.objects.faults import RETRY_AFTER_MAX_S, Backoff, parse_retry_after


@given(
    attempt=st.integers(1, 10_000),
    elapsed=st.floats(0, 1e4),
    budget=st.floats(0.01, 1e4),
    luck=st.floats(0, 1),
    asked=st.none() | st.floats(0, 1e4),
)
def test_a_pause_is_bounded_ends_within_the_budget_and_obeys_the_server(
    attempt: int, elapsed: float, budget: float, luck: float, asked: float | None
) -> None:
    backoff = Backoff()
    pause = backoff.pause_s(attempt, elapsed, budget, luck, asked)
    if pause is None:
        assert elapsed + luck * backoff.most_s + (asked or 0) >= budget
        return
    assert elapsed + pause < budget
    assert (asked or 0) <= pause <= (asked or 0) + backoff.most_s


def test_pauses_grow_twofold_up_to_their_bound() -> None:
    pauses = [Backoff(0.1, 1.0).pause_s(n, 0, 100, 1.0, None) for n in range(1, 7)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_full_jitter_may_try_again_at_once() -> None:
    assert Backoff().pause_s(5, 0, 1, 0.0, None) == 0.0


def test_retry_after_is_a_number_or_a_date() -> None:
    assert parse_retry_after("3", 0) == 3
    assert parse_retry_after(" 0 ", 0) == 0
    assert parse_retry_after(email.utils.formatdate(1060, usegmt=True), 1000) == 60
    assert parse_retry_after(email.utils.formatdate(900, usegmt=True), 1000) == 0


@given(st.text())
def test_a_senseless_retry_after_is_none_or_bounded(text: str) -> None:
    seconds = parse_retry_after(text, 0)
    assert seconds is None or 0 <= seconds <= RETRY_AFTER_MAX_S


def test_no_retry_after_is_none() -> None:
    assert parse_retry_after(None, 0) is None
    assert parse_retry_after("soon", 0) is None

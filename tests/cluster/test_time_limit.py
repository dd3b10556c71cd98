"""Every form of a time limit, and that nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.notation import read_minutes, slurm_time, time_text
from headrace.errors import ClusterRequestError

NUMBERS = st.integers(0, 400)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90), ("90:00", 90), ("90:01", 91), ("0:30", 1), ("1:30:00", 90), ("01:30:00", 90),
        ("100:00:00", 6000), ("1-0", 1440), ("2-12", 3600), ("2-12:30", 3630), ("2-12:30:01", 3631),
        ("0", 0), ("UNLIMITED", None), ("infinite", None), ("-1", None), (" 15 ", 15), ('"42"', 42),
        ("90m", 90), ("90min", 90), ("36h", 2160), ("2d12h", 3600), ("1h30m", 90), ("30s", 1), ("1D", 1440),
    ],
)  # fmt: skip
def test_forms(text, minutes):
    assert read_minutes(text) == minutes


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("4", 240),
        ("72", 4320),
        ("0", 0),
        ("04:00:00", 240),
        ("4:30", 5),
        ("1-0", 1440),
        ("30m", 30),
    ],
)
def test_a_bare_number_is_hours_in_hals_commands(text, minutes):
    assert read_minutes(text, bare_hours=True) == minutes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "four", "4x", "1:2:3:4", "1-", "-5", "1-2-3", "1.5h", "4:", ":30", "٣", "1 2", "h", "0x10",
        "9" * 39, "9" * 5000, "1-2:3:4:5", "--time=4", "4\n5",
    ],
)  # fmt: skip
def test_what_is_no_time(text):
    with pytest.raises(ClusterRequestError, match="time limit"):
        read_minutes(text)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_each_form_counts_as_slurm_counts(days, hours, minutes, seconds):
    def up(total_s):
        return -(-total_s // 60)

    clock = (hours * 60 + minutes) * 60 + seconds
    assert read_minutes(f"{minutes}:{seconds}") == up(minutes * 60 + seconds)
    assert read_minutes(f"{hours}:{minutes}:{seconds}") == up(clock)
    assert read_minutes(f"{days}-{hours}") == (days * 24 + hours) * 60
    assert read_minutes(f"{days}-{hours}:{minutes}") == (days * 24 + hours) * 60 + minutes
    assert read_minutes(f"{days}-{hours}:{minutes}:{seconds}") == up(days * 86400 + clock)
    assert read_minutes(f"{days}d{hours}h{minutes}m{seconds}s") == up(days * 86400 + clock)


@given(st.one_of(st.none(), st.integers(0, 10**6)))
def test_what_is_written_for_slurm_is_read_back(minutes):
    assert read_minutes(slurm_time(minutes)) == minutes
    assert read_minutes(slurm_time(minutes), bare_hours=True) == minutes


@given(st.text())
def test_any_text_is_a_time_or_an_error(text):
    try:
        found = read_minutes(text)
    except ClusterRequestError as e:
        if e.next_step is None:
            raise
        return
    assert found is None or found >= 0


@pytest.mark.parametrize(
    ("minutes", "text"),
    [
        (None, "no limit"), (0, "0 min"), (5, "5 min"), (60, "1 h"), (90, "90 min"), (150, "2 h 30 min"),
        (2520, "42 h"), (4320, "72 h"), (7200, "5 d"), (7230, "5 d 30 min"),
    ],
)  # fmt: skip
def test_as_people_say_it(minutes, text):
    assert time_text(minutes) == text

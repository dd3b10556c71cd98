"""Axes: their marks are round numbers at even distances."""

import re

import pytest

from headrace.pages.charts import Part, columns, round_up


@pytest.mark.parametrize("most", [1.0, 3.3, 21_000.0, 24_900.0, 2.1e-4, 1.01, 99.0, 4.9e6])
def test_quarters_of_an_axis_are_round(most):
    end = round_up(most)
    assert most <= end <= 2.01 * most
    for quarter in (0.25, 0.5, 0.75, 1.0):
        assert float(f"{quarter * end:.1e}") == pytest.approx(quarter * end)


def test_marks_say_exactly_where_they_stand():
    parts = [Part("1", 24_000.0, "24,000/s")]
    drawn = columns("reads", parts, lambda value: f"{value:,.10g}/s", below="depth")
    marks = re.findall(r'text-anchor="end" class="">([^<]+)<', drawn)
    assert marks == ["0/s", "10,000/s", "20,000/s", "30,000/s", "40,000/s"]

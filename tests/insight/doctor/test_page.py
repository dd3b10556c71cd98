"""The doctor's page: what it says, what it cannot be made to do, and how it looks."""

from __future__ import annotations

import html
import re

import pytest

from bench.test_report_page import LOOKS, TEXTS
from headrace.insight.doctor import Findings, diagnose, doctor_page
from insight.doctor.findings_shared import findings

HOSTILE = '/data/<script>alert(1)</script>"\u202e\x1b[2J'

TITLES = {
    "What loaders would deliver now", "How fast the storage answers, by how many reads at a time",
    "What bytes cost, and what opening costs",
}  # fmt: skip


def page_of(target="/scratch/train", workers=8, step_s=0.08, **changes):
    found = findings(**changes)
    return doctor_page(diagnose(found, batch=256, step_s=step_s, workers=workers, target=target))


def test_it_says_the_verdict_what_to_do_and_the_curves():
    told = diagnose(findings(), batch=256, step_s=0.08, workers=8, target="/scratch/train")
    page = doctor_page(told)
    assert html.escape(told.verdict) in page
    assert html.escape(told.advice[0].do) in page
    assert f"<pre>{html.escape(told.advice[0].command)}</pre>" in page
    for rate in ("310/s", "1,200/s", "4,000/s", "9,800/s", "14,000/s"):
        assert rate in page
    assert "<td>6.53 ms</td>" in page
    assert "waits 51%" in page
    assert "lustre on /scratch" in page


@pytest.mark.parametrize(
    ("data", "unit"),
    [
        ({}, "samples"),
        ({"in_place": False}, "rows"),
        ({"in_place": False, "blocks": True}, "blocks"),
    ],
)
def test_what_is_counted_is_called_what_it_is(data, unit):
    text = re.sub(r"<[^>]*>", " ", page_of(data={"samples": 123_456, **data}))
    assert re.search(rf"123,456\s+{unit}\b", text)


def test_what_was_not_measured_has_no_empty_picture_or_heading():
    page = page_of(storage=None, opens=None, step_s=None)
    assert "How fast the storage answers" not in page
    assert "your model" not in page
    assert doctor_page(diagnose(Findings(), target="x")).count("<h2>") == 0


def test_nothing_of_hostile_data_acts_on_the_page():
    page = page_of(target=HOSTILE, data={"path": HOSTILE}, place={"mount": HOSTILE})
    assert "<script" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert not re.search(r"https?://", page)


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_whole_and_legible(browser, tmp_path, look):
    path = tmp_path / "doctor.html"
    path.write_text(page_of(workers=0))
    browser.open(path, **LOOKS[look])
    assert set(browser.texts("figcaption")) == TITLES
    assert not browser.too_wide()
    assert not browser.run(TEXTS)
    assert browser.said_and_asked() == ([], [])

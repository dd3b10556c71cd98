"""Documents: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import json
import re

import pytest

from base.flips import flips, outcomes
from headrace.base.documents import DocumentKind, seal, unseal
from headrace.errors import TelemetryError, TraceError

KIND = DocumentKind(
    name="the test's document",
    version=3,
    unchecked=2,
    error=TraceError,
    next_step="Write it again.",
    marks={"kind": "headrace test"},
    bytes_max=2000,
    containers_max=20,
    depth_max=5,
)
CONTENT = {
    "name": 'a \u00e9 \ud800 "quoted" \\ [{',
    "count": 7,
    "rate": 1e-05,
    "on": True,
    "nothing": None,
    "inner": {"files": {"a": 1, "b": 2}},
    "rows": [{"x": 1}, {"x": 2}],
    "words": ["p", "q"],
}


@pytest.mark.parametrize("indent", [None, 1])
def test_what_was_written_comes_back_and_others_read_it_as_json(indent):
    data = KIND.encode(CONTENT, indent=indent)
    fields = KIND.decode(data, "f")
    assert {key: fields.value(key) for key in CONTENT} == CONTENT
    plain = json.loads(data)
    assert plain.pop("crc32c") == unseal(data)[0]
    assert plain == {"kind": "headrace test", "version": 3, **CONTENT}


@pytest.mark.parametrize("unchecked", [None, 0, 2])
def test_every_flipped_bit_is_found(unchecked):
    """Also where documents without a checksum, and without a version, are believed."""
    kind = DocumentKind(
        name="it", version=3, unchecked=unchecked, error=TraceError, next_step="Write it again."
    )
    data = kind.encode(CONTENT)
    counts = outcomes(data, lambda bad: kind.decode(bad, "f").value("count"))
    assert counts == {"TraceError": 8 * len(data)}


def test_every_byte_that_is_changed_added_or_lost_is_found():
    data = KIND.encode({"lr": 0.001})
    for at in range(len(data)):
        for byte in set(range(256)) - {data[at]}:
            with pytest.raises(TraceError):
                KIND.decode(data[:at] + bytes([byte]) + data[at + 1 :], "f")
        for bad in (data[:at], data[:at] + data[at + 1 :], data[:at] + b"0" + data[at:]):
            with pytest.raises(TraceError):
                KIND.decode(bad, "f")


def test_a_document_of_before_is_read_and_its_version_is_not_taken_by_a_new_one():
    old = json.dumps({"kind": "headrace test", "version": 2, "count": 7}).encode()
    assert KIND.decode(old, "f").integer("count", 0, 9) == 7
    for bad, message in (
        (old.replace(b"2", b"3"), "the checksum of the test's document is missing or damaged"),
        (old.replace(b"2", b"4"), "version .* is 4, expected 3: a newer headrace wrote it"),
        (old.replace(b"2", b"1"), "version .* is 1, expected 3"),
        (old.replace(b"2", b"true"), "version .* is True, expected 3"),
        (seal(old), "version .* is 2, expected 3"),
        (old.replace(b"test", b"tent"), "kind .* is 'headrace tent', expected 'headrace test'"),
    ):
        with pytest.raises(TraceError, match=message) as raised:
            KIND.decode(bad, "f")
        assert (raised.value.path, raised.value.next_step) == ("f", "Write it again.")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"x" * 2001, "the size .* is over 2,000 bytes"),
        (b"[" * 6 + b"]" * 6, "the nesting .* is over 5 deep"),
        (b'{"a": [[[[[1]]]]]}', "the nesting"),
        (b"[" + b"[]," * 30 + b"1]", "the number of objects and lists .* is 31, expected at most 20"),
        (b'"' + b"[" * 100 + b'"', "is a str, expected an object"),
        (b'{"a": 99999}', "kind"),
        (b"{" * 5, "no JSON"),
        (b"\xff", "no JSON"),
        (b"", "no JSON"),
        (b"null", "a NoneType"),
        (b'{"a": "[[[[[[[[[", "b": 1}', "kind"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused_before_it_costs_anything(body, message):
    with pytest.raises(TraceError, match=message):
        KIND.decode(body, "f")


def test_every_value_is_checked_when_it_is_asked_for():
    fields = KIND.decode(KIND.encode(CONTENT), "f")
    assert fields.text("name").startswith("a")
    assert fields.number("rate", 0, 1) == 1e-05
    assert fields.inner("inner").integers("files", 0, 9) == {"a": 1, "b": 2}
    assert [row.integer("x", 0, 9) for row in fields.each("rows")] == [1, 2]
    assert fields.texts("words") == ("p", "q")
    assert fields.one_of("name", [CONTENT["name"]]) == CONTENT["name"]
    assert fields.matching("name", re.compile("a.*"), "a word") == CONTENT["name"]
    for ask, message in (
        (lambda: fields.text("count"), "count of .* is 7, expected a string"),
        (lambda: fields.text("name", characters_max=2), "at most 2"),
        (lambda: fields.integer("on", 0, 9), "on of .* is True, expected an integer from 0 to 9"),
        (lambda: fields.integer("count", 8, 9), "is 7, expected an integer from 8 to 9"),
        (lambda: fields.integer("rate", 0, 9), "1e-05"),
        (lambda: fields.number("on", 0, 9), "a number"),
        (lambda: fields.number("nothing", 0, 9), "is None, expected a number"),
        (lambda: fields.inner("rows"), "an object"),
        (lambda: fields.each("words"), "a list of 0 to .* objects"),
        (lambda: fields.each("rows", 3), "a list of 3 to"),
        (lambda: fields.texts("rows"), "strings"),
        (lambda: fields.texts("missing"), "missing of .* is 'missing', expected a list"),
        (lambda: fields.one_of("name", ["x"]), "one of x"),
        (lambda: fields.matching("name", re.compile("x"), "a word"), "expected a word"),
        (lambda: fields.each("rows")[1].integer("y", 0, 9), r"rows\[1\]\.y of the test's document"),
        (lambda: fields.inner("inner").integers("files", 2, 9), r"inner\.files\.a"),
    ):
        with pytest.raises(TraceError, match=message):
            ask()


def test_a_value_that_is_no_number_is_none():
    kind = DocumentKind(name="it", version=1, error=TelemetryError, next_step="")
    fields = kind.decode(kind.encode({"x": float("nan"), "y": float("inf")}), "f")
    for key in "xy":
        with pytest.raises(TelemetryError):
            fields.number(key, 0, 1e9)


def test_only_objects_that_are_not_empty_are_sealed():
    for text in (b"{}", b"[]", b"", b"1"):
        with pytest.raises(ValueError, match="expected the text of a JSON object"):
            seal(text)
    assert len(list(flips(b"ab"))) == 16

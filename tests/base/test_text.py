"""Numbers as people read them, and names that cannot move a terminal's cursor."""

import pytest

from headrace.base import text
from headrace.pages.html import axis_text


@pytest.mark.parametrize(
    ("form", "pairs"),
    [
        (text.bytes_text, {0: "0 B", 999: "999 B", 1500: "1.5 kB", 1234567: "1.23 MB", 999_700: "1 MB"}),
        (text.rate_text, {0: "0 MB/s", 47_940_000: "47.9 MB/s", 1_234_567_890: "1,235 MB/s"}),
        (text.binary_text, {512: "512 B", 65536: "64 KiB", 1 << 30: "1 GiB", 1 << 42: "4 TiB"}),
        (text.count_text, {0: "0", 1234567: "1,234,567"}),
        (text.number_text, {0: "0", 12345.6: "12,346", 123.45: "123.5", 1.234: "1.23", 0.01234: "0.0123"}),
        (text.rough_text, {-1: "0", 0.24: "0.2", 9832.1: "9,800", 123: "120"}),
        (text.percent_text, {0: "0 %", 0.1234: "12.3 %", 0.0001: "less than 0.1 %"}),
        (text.seconds_text, {0: "0 s", 1.5: "1.5 s", 0.003124: "3.12 ms", 1.5e-6: "1.5 us", 4321.0: "4,321 s"}),
        (text.duration_text, {0: "0 s", 0.0031: "3.1 ms", 3.21: "3.2 s", 83.2: "1:23", 3723: "1:02:03"}),
        (axis_text, {0: "0", 9_999: "9,999", 12_500: "12.50 k", 25e9: "25 G", 3e15: "3,000,000 G"}),
    ],
)  # fmt: skip
def test_numbers_are_short(form, pairs):
    assert {value: form(value) for value in pairs} == pairs


def test_sizes_are_read_in_powers_of_1024():
    assert [text.bytes_of(t) for t in ("8G", "512 MiB", "1024", "1.5k")] == [
        8 << 30,
        512 << 20,
        1024,
        1536,
    ]
    with pytest.raises(ValueError, match="'8 apples' is no size"):
        text.bytes_of("8 apples")


def test_what_is_counted_has_its_plural():
    assert [text.counted(n, "rank") for n in (0, 1, 1200)] == ["0 ranks", "1 rank", "1,200 ranks"]
    assert text.counted(2, "epoch that was cut", "epochs that were cut") == "2 epochs that were cut"


def test_a_name_cannot_move_the_cursor():
    assert text.printable("plain é") == "plain é"
    assert text.printable("a\x1b[2Jb\nc\udcff") == "a\\x1b[2Jb\\nc\\xff"
    assert text.printable("one\n\x1btwo", lines=True) == "one\n\\x1btwo"

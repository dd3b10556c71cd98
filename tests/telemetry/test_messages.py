"""Messages of processes: good ones are read whole; what is none is refused, whatever it is."""

import json
import random

import pytest

from headrace.telemetry.messages import MESSAGE_BYTES_MAX, parse_message
from telemetry.shared import message


def test_a_message_is_read_whole():
    report = parse_message(message(stall={"/scratch": {"storage": 2.5}}, worked=4, gpus=2), 7, 1000)
    assert (report.pid, report.uid, report.identity.gpus, report.consumer) == (7, 1000, 2, True)
    assert report.figures["stall_s", "storage", "/scratch"] == 2.5
    assert report.figures["worked_s", "", ""] == 4


BAD = {
    "no JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 8000,
    "another version": json.dumps({"v": 2}).encode(),
    "too long": b" " * (MESSAGE_BYTES_MAX + 1),
    "no instance": message(instance="x"),
    "no job": message(job=""),
    "a negative wait": message(stall={"/": {"storage": -1}}),
    "an infinite wait": message(stall={"/": {"storage": 1e999}}),
    "a wait that is text": message(stall={"/": {"storage": "1"}}),
    "a cause that is no word": message(stall={"/": {"<script>": 1}}),
    "a cause that moves the cursor": message(stall={"/": {"\x1b[2J": 1}}),
    "too many file systems": message(stall={str(i): {"storage": 1} for i in range(40)}),
    "too many causes": message(stall={"/": {f"a{'b' * i}": 1 for i in range(30)}}),
    "a list": b"[]",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_is_no_message_is_refused(bad):
    with pytest.raises(ValueError, match=r"."):
        parse_message(bad, 1, 1)


NOTICE = b'{"v":1,"notice":"step","at_s":9,"uid":1000,"job":{"job_id":"7"},"step":"0","cpu_s":1.5}'


def test_a_notice_is_read_whole():
    notice = parse_message(NOTICE, 7, 1000)
    assert (notice.kind, notice.at_s, notice.uid, notice.sender) == ("step", 9, 1000, 1000)
    assert (notice.identity.job_id, notice.step, notice.cpu_s) == ("7", "0", 1.5)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b'"step",', b'"stop",'), (b'"step",', b"[],"), (b'"step":"0"', b'"step":0'),
        (b"1000", b"-1"), (b"1000", b"1e99"), (b"1.5", b"Infinity"), (b"1.5", b'"1"'), (b'"7"', b"7"),
        (b'{"job_id":"7"}', b"[]"), (b'"cpu_s"', b'"cpu_s'), (b"1.5}", b"1.5" + b" " * MESSAGE_BYTES_MAX),
    ],
)  # fmt: skip
def test_what_is_no_notice_is_refused(good, bad):
    assert good in NOTICE
    with pytest.raises(ValueError, match=r"."):
        parse_message(NOTICE.replace(good, bad), 1, 1)


def test_no_bytes_at_all_make_it_fail_in_another_way():
    noise = random.Random(3)
    good = message(stall={"/": {"storage": 1}})
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(noise.randrange(1, 6)):
            at = noise.randrange(len(bad))
            bad[at : at + noise.randrange(4)] = noise.randbytes(noise.randrange(4))
        try:
            report = parse_message(bytes(bad), 1, 1)
        except ValueError:
            continue
        assert all(value >= 0 for value in report.figures.values())
        assert report.identity.job_id.isprintable()

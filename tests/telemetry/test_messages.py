"""Messages of processes: good ones are read whole; what is none is refused, whatever it is."""

import json
import random

import pytest

from headrace.telemetry.messages import MESSAGE_BYTES_MAX, parse_report
from telemetry.shared import message


def test_a_message_is_read_whole():
    report = parse_report(message(stall={"/scratch": {"storage": 2.5}}, worked=4, gpus=2), 7, 1000)
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
        parse_report(bad, 1, 1)


def test_no_bytes_at_all_make_it_fail_in_another_way():
    noise = random.Random(3)
    good = message(stall={"/": {"storage": 1}})
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(noise.randrange(1, 6)):
            at = noise.randrange(len(bad))
            bad[at : at + noise.randrange(4)] = noise.randbytes(noise.randrange(4))
        try:
            report = parse_report(bytes(bad), 1, 1)
        except ValueError:
            continue
        assert all(value >= 0 for value in report.figures.values())
        assert report.identity.job_id.isprintable()

"""A run's folder read back: whole, cut off anywhere, damaged, foreign, from another version."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.documents import seal
from headrace.errors import TraceError
from headrace.order import Shuffled, Slices
from headrace.plane.batch_trace import PHASES, STEP
from headrace.trace import read_run
from headrace.trace.format import EVENT, STEPS, TraceFile, chunk, header_line

from .runs import Loaders, about, made_run, steps_of


@pytest.fixture
def run(tmp_path):
    """A small run on two ranks, with an event in it."""
    return Loaders(tmp_path / "run", samples=100).epoch(0).event(0, "host", grown={}).close()


def folder_of(run):
    return Path(run.files[0].path).parent


def test_what_was_written_is_read_back(run):
    found = read_run(folder_of(run))
    assert found.facts["command"] == ["python", "train.py"]
    assert [(t.rank, t.world_size, t.host, t.cut) for t in found.ranks] == [
        (0, 2, "node0", ""), (1, 2, "node0", ""),
    ]  # fmt: skip
    for trace, slices in zip(found.ranks, run.slices, strict=True):
        assert np.array_equal(trace.steps, steps_of(run.order, slices, 0))
        assert trace.order == run.order.describe()
    assert [event["kind"] for event in found.ranks[0].events] == ["host", "end"]


def test_a_rank_that_comes_again_has_a_second_file(tmp_path):
    made_run(tmp_path / "run", epochs=1, world=1)
    made_run(tmp_path / "run", epochs=1, world=1, samples=50)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "rank-00000-1.trace", "rank-00000.trace", "run.json",
    ]  # fmt: skip
    assert [trace.samples for trace in read_run(tmp_path / "run").ranks] == [1000, 50]


def test_cut_off_anywhere_it_counts_up_to_there_and_says_so(run, tmp_path):
    whole = read_run(folder_of(run)).ranks[0]
    path = run.files[0].path
    data = Path(path).read_bytes()
    seen = set()
    for length in range(len(data)):
        Path(path).write_bytes(data[:length])
        found = read_run(folder_of(run)).ranks[0]
        assert found.cut
        assert np.array_equal(found.steps, whole.steps[: len(found.steps)])
        seen.add((len(found.steps), len(found.events)))
    assert seen == {(0, 0), (len(whole.steps), 0), (len(whole.steps), 1)}


def test_zeros_after_a_power_failure_are_a_cut(run):
    with Path(run.files[0].path).open("ab") as file:
        file.write(bytes(100))
    assert "100 bytes" in read_run(folder_of(run)).ranks[0].cut


def test_a_flipped_bit_is_told_with_its_place(run):
    path = run.files[1].path
    with Path(path).open("r+b") as file:
        file.seek(-200, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(TraceError, match=r"rank-00001\.trace: at byte .* checksum") as caught:
        read_run(folder_of(run))
    assert caught.value.path == path
    assert caught.value.offset_bytes


@pytest.mark.parametrize("what", ["empty", "other files", "a file", "nothing"])
def test_a_folder_of_something_else_is_no_run(tmp_path, what):
    folder = tmp_path / "x"
    if what == "a file":
        folder.write_text("hello")
    elif what != "nothing":
        folder.mkdir()
    if what == "other files":
        (folder / "rank-1.trace").write_text("hello")
    with pytest.raises(TraceError, match=r"no run's folder|is no folder") as refused:
        read_run(folder)
    assert "HEADRACE_TRACE=" in refused.value.next_step


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n", b"x" * 100_000, b"[]\n", b"{}\n", b"[" * 60_000 + b"\n",
             b'{"headrace_trace": 1}\n', b'{"headrace_trace": true}\n', b'{"headrace_trace":2}\n',
             seal(b'{"headrace_trace": 1}'), seal(b'{"headrace_trace": 3}')],
)  # fmt: skip
def test_a_foreign_file_under_a_traces_name_is_refused(tmp_path, data):
    (tmp_path / "rank-00000.trace").write_bytes(data)
    with pytest.raises(TraceError):
        read_run(tmp_path)


def test_what_would_block_or_never_end_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "rank-00000.trace")
    with pytest.raises(TraceError, match="no plain file"):
        read_run(tmp_path)
    (tmp_path / "rank-00000.trace").unlink()
    (tmp_path / "rank-00000.trace").symlink_to("/dev/zero")
    with pytest.raises(TraceError, match="no plain file"):
        read_run(tmp_path)
    (tmp_path / "rank-00000.trace").unlink()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "rank-00000.trace"))
        with pytest.raises(OSError):
            read_run(tmp_path)


def header(**changes):
    """A header, with some fields otherwise."""
    order, slices = Loaders.__new__(Loaders), None
    del order, slices

    order = Shuffled(100, seed=1)
    fields = about(order, Slices(100, 10))
    document = json.loads(header_line({**fields, "began_unix_s": 1.0, "began_s": 1.0}))
    del document["crc32c"]
    return seal(json.dumps({**document, **changes}).encode())


@pytest.mark.parametrize(
    "changes", [
        {"rank": 1}, {"rank": "0"}, {"rank": True}, {"world_size": 1 << 40}, {"order": []},
        {"source": "x" * 5000}, {"began_s": float("nan")}, {"began_s": 1e999}, {"samples": -1},
        {"step": []}, {"step": [["epoch", "O", []]]}, {"step": [["epoch", "<u4", [1 << 40]]]},
        {"step": "u4"}, {"phases": ["read"] * len(PHASES)}, {"phases": None}, {"tiers": ["moon"]},
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_is_refused(tmp_path, changes):
    (tmp_path / "rank-00000.trace").write_bytes(header(**changes))
    with pytest.raises(TraceError):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"asked_s": np.nan}, {"delivered_s": 1.0}, {"waited_s": np.inf}, {"waited_s": -1},
                {"position": 1 << 63}],
)  # fmt: skip
def test_a_step_that_cannot_be_is_refused(tmp_path, changes):
    rows = np.zeros(3, STEP)
    rows["asked_s"] = rows["delivered_s"] = 5.0
    for name, value in changes.items():
        rows[name][1] = value
    data = header() + chunk(STEPS, rows.tobytes())
    (tmp_path / "rank-00000.trace").write_bytes(data)
    with pytest.raises(TraceError, match="cannot be"):
        read_run(tmp_path)


def test_what_another_version_laid_out_is_refused_and_other_chunks_are_skipped(tmp_path):
    rows = np.zeros(2, STEP)
    path = tmp_path / "rank-00000.trace"
    path.write_bytes(header() + chunk(STEPS, rows.tobytes()) + chunk(77, b"new"))
    assert len(read_run(tmp_path).ranks[0].steps) == 2
    described = json.loads(header().partition(b"\n")[0])["step"]
    path.write_bytes(header(step=described[:-1]))
    with pytest.raises(TraceError, match="another version"):
        read_run(tmp_path)


def test_events_are_objects_with_a_kind_and_a_time(tmp_path):
    for event in (
        b"[]",
        b"{}",
        b'{"kind": 1, "at_s": 1}',
        b'{"kind": "x", "at_s": "soon"}',
        b"\xff",
    ):
        (tmp_path / "rank-00000.trace").write_bytes(header() + chunk(EVENT, event))
        with pytest.raises(TraceError):
            read_run(tmp_path)


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_whatever_bytes_there_are_it_is_a_run_or_a_trace_error(run, data):
    path = run.files[0].path
    whole = bytearray(Path(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    other = folder_of(run) / "rank-00002.trace"
    other.write_bytes(whole)
    with suppress(TraceError):
        read_run(folder_of(run))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_run_json_is_an_object_of_ours_or_a_trace_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("x")
    (folder / "run.json").write_bytes(data)
    with pytest.raises(TraceError):
        read_run(folder)


def test_a_file_stops_at_its_size_and_says_so(tmp_path, caplog):
    run = Loaders(tmp_path / "run", world=1, most=20_000)
    for epoch in range(50):
        run.epoch(epoch)
    run.close()
    path = run.files[0].path
    assert Path(path).stat().st_size <= 20_000
    assert "HEADRACE_TRACE_BYTES" in read_run(tmp_path / "run").ranks[0].cut
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, monkeypatch, caplog):
    run = Loaders(tmp_path / "run", world=1)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("headrace.trace.format.os.write", lambda *_: (_ for _ in ()).throw(full))
    run.epoch(0).epoch(1).close()
    assert "No space left" in caplog.text
    assert isinstance(run.files[0], TraceFile)
    assert not run.files[0].open

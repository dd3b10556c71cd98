"""Every kind of document that headrace writes: each of its bits is flipped, and none goes unnoticed.

Each kind is a function that makes a small real document, and gives its bytes and what reads them.
Checkpoints have theirs in tests/checkpoint, stores in tests/store.
"""

from __future__ import annotations

import pytest

from base.flips import flips, outcomes
from cluster.clusters import hal
from headrace.cluster.executor import Submission
from headrace.cluster.local.jobs import LocalJob, TaskState
from headrace.cluster.manifest import read_manifest, write_manifest
from headrace.cluster.snapshot import snapshot_from_json, snapshot_to_json
from headrace.insight.record.recording import _read_run
from headrace.job.meeting import Meeting, NodeDocument, SharePlace
from headrace.plane.disk_cache import MARK, read_mark, write_mark
from headrace.posix.launch import RUN_FILE, ProgramEnd, RecordedRun
from headrace.store.manifest import load_manifest
from headrace.store.pack import pack
from headrace.trace import read_run
from traces.runs import Loaders


def in_a_file(path, read):
    """Bytes of a file, and what reads them from there."""

    def again(data):
        path.write_bytes(data)
        return read()

    return path.read_bytes(), again


def run_manifest(folder):
    path = folder / "m.json"
    write_manifest(
        path, {"run": {"id": "é"}, "versions": {"torch": "2.13.0"}, "result": {"s": 1.5}}
    )
    return in_a_file(path, lambda: read_manifest(path))


def cluster_snapshot(folder):
    return snapshot_to_json(hal()), snapshot_from_json


def node_document(folder):
    place = SharePlace(0, "nvme+tcp://h:1/d", ("nvme+tcp://h:1/v",))
    document = NodeDocument(
        session="s", node=0, host="h", pid=1, address="127.0.0.1:9", nqn="nqn.x", local="/tmp",
        state="staged", samples=3, segment={"samples": 3}, place=place, replicas=(place,),
    )  # fmt: skip
    return document.to_bytes(), lambda data: NodeDocument.parse(data, "node-0.json")


def meeting_head(folder):
    meeting = Meeting(folder)
    meeting.open_session(2, "17", lambda _: False)
    return in_a_file(folder / "meeting.json", meeting.head)


def meeting_end(folder):
    meeting = Meeting(folder)
    meeting.end(session := meeting.open_session(2, None, lambda _: False))
    return in_a_file(folder / "ended", lambda: meeting.ended(session))


def meeting_agreement(folder):
    meeting = Meeting(folder)
    meeting.agree("epoch", "s", ((1, 2), (3, 4)))
    return in_a_file(folder / "agreed-s-epoch.json", lambda: meeting.agree("epoch", "s", ()))


def recording(folder):
    run = RecordedRun(["python", "train.py"], str(folder), 1.5, "/tmp", 2, 7, ended=ProgramEnd(0))
    run.write(folder)
    return in_a_file(folder / RUN_FILE, lambda: _read_run(folder))


def local_job(folder):
    script = b"#!/bin/sh\n"
    job = LocalJob(
        number=1, folder=folder / "1", submission=Submission(script), user="u", submitted_s=1.5, key="k",
        tasks={None: TaskState(started_s=1.5, exit_code=0)},
    )  # fmt: skip
    job.create()
    job.save()
    return in_a_file(job.folder / "state.json", lambda: LocalJob.load(job.folder).tasks)


def run_facts(folder):
    Loaders(folder / "run", world=1, samples=4, batch=2).close()
    return in_a_file(folder / "run/run.json", lambda: read_run(folder / "run").facts)


def store_manifest(folder):
    pack([("é", b"x")], folder / "s.hr")
    return in_a_file(folder / "s.hr/store.json", lambda: load_manifest(folder / "s.hr"))


KINDS = (
    run_manifest, cluster_snapshot, node_document, meeting_head, meeting_end,
    meeting_agreement, recording, local_job, run_facts,
)  # fmt: skip


STEPS = (pytest.param(29, id="each 29th bit"), pytest.param(1, id="all", marks=pytest.mark.slow))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_flipped_bit_is_found(tmp_path, kind, step):
    good, read = kind(tmp_path)
    counts = outcomes(good, read, step)
    assert counts.total() == -(-8 * len(good) // step) > 10
    assert not counts["silent"] + counts["same"], counts


@pytest.mark.parametrize("step", STEPS)
def test_a_flipped_bit_of_a_stores_manifest_is_found_or_spells_the_same(tmp_path, step):
    """Its checksum is of the canonical form, as its format has it: `\\u00e9` and `\\u00E9` are one name."""
    good, read = store_manifest(tmp_path)
    counts = outcomes(good, read, step)
    assert counts["CorruptStore"] >= counts.total() - 2
    assert not counts["silent"]


def test_a_damaged_mark_of_a_cache_folder_is_none(tmp_path):
    write_mark(tmp_path, {"fingerprint": "f", "source": "/data", "samples": 3, "parts": []})
    good, read = in_a_file(tmp_path / MARK, lambda: read_mark(tmp_path))
    assert read(good)["samples"] == 3
    marks = [read(bad) for _, bad in flips(good, 3)]
    assert marks
    assert not any(marks)

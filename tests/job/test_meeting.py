"""How nodes find each other: whose word is believed, what an earlier job leaves, who is told."""

import os
from pathlib import Path

import pytest

from headrace.base.files import NewFile
from headrace.errors import JobError
from headrace.job.meeting import KIND, Meeting, NodeDocument, meeting_folder


def document(session: str, node: int = 0, **more: object) -> NodeDocument:
    values = {
        "host": "h", "pid": 1, "address": "127.0.0.1:9", "nqn": "nqn.2026-11.io.example:x",
        "local": "/tmp", "state": "planned",
    }  # fmt: skip
    return NodeDocument(session=session, node=node, **(values | more))


def nobody(_: NodeDocument) -> bool:
    return False


def test_a_greeting_is_answered_by_a_living_node_0_only(tmp_path):
    """The others may come first, and the folder may hold the answer of an earlier job."""
    meeting = Meeting(tmp_path / "meet")
    old = meeting.open_session(2, None, nobody)
    earlier = meeting.greet(1, "h")
    meeting.announce(old, listing="/old")
    assert meeting.answer(1, earlier)["listing"] == "/old"
    nonce = meeting.greet(1, "h")
    assert meeting.answer(1, nonce) is None
    new = meeting.open_session(2, None, nobody)
    assert meeting.answer(1, nonce) is None
    meeting.announce(new)
    assert meeting.answer(1, nonce) is None  # nothing is listed yet
    meeting.announce(new, listing="/new")
    assert meeting.answer(1, nonce)["session"] == new != old


def test_a_greeting_that_is_being_written_outlives_the_beginning_of_the_session(tmp_path):
    meeting = Meeting(tmp_path)
    left = tmp_path / f".hello-2.json.{0:016x}.part"  # nobody writes it any more
    left.write_text("{")
    with NewFile(tmp_path / "hello-1.json") as new:
        session = meeting.open_session(3, None, nobody)
        meeting.announce(session, listing="/here")
        assert not left.exists()
        new.publish()
    nonce = meeting.greet(1, "h")
    meeting.announce(session, listing="/here")
    assert meeting.answer(1, nonce)["session"] == session


def test_who_writes_while_the_last_one_leaves_hears_of_the_end(tmp_path, monkeypatch):
    """Nodes that cannot reach each other share the folder still: one may clear it while another lives."""
    meeting = Meeting(tmp_path / "meet")
    session = meeting.open_session(2, None, nobody)
    for node in range(2):
        meeting.publish_node(document(session, node))
    meeting.end(session)
    real, written = Path.rmdir, []

    def rmdir(self):
        if not written:
            written.append(self)
            meeting.publish_node(document(session, 0))
            meeting._write("meeting.json", {"session": session, "nodes": 2, "seen": {}})
        real(self)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    Meeting(meeting.folder).leave(1, session, nobody)
    assert written == [meeting.folder]
    assert meeting.head()["session"] == session
    assert meeting.ended(session)
    meeting.leave(0, session, nobody)
    assert not meeting.folder.exists()


def test_nothing_is_announced_in_a_folder_that_was_cleared_or_taken_over(tmp_path):
    meeting = Meeting(tmp_path / "meet")
    session = meeting.open_session(1, None, nobody)
    (meeting.folder / "meeting.json").unlink()
    meeting.announce(session, listing="/here")
    assert meeting.head() is None
    assert meeting.ended(session)
    other = meeting.open_session(1, None, nobody)
    meeting.announce(session, listing="/here")
    assert meeting.head()["session"] == other
    assert "listing" not in meeting.head()


def test_a_folder_of_a_dead_job_is_taken_over_and_a_living_ones_is_not(tmp_path):
    meeting = Meeting(tmp_path)
    session = meeting.open_session(1, None, nobody)
    meeting.publish_node(document(session))
    meeting.end(session)
    with pytest.raises(JobError, match="another job meets here"):
        meeting.open_session(1, None, lambda _: True)
    other = meeting.open_session(1, None, nobody)
    assert other != session
    assert meeting.nodes() == {}
    assert not meeting.ended(other)
    assert meeting.ended(session)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(JobError, match=r"thesis\.tex"):
        Meeting(tmp_path).open_session(1, None, nobody)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_last_node_that_lives_cleans_up(tmp_path):
    meeting = Meeting(tmp_path / "meet")
    session = meeting.open_session(3, None, nobody)
    for node in range(3):
        meeting.greet(node, "h")
        meeting.publish_node(document(session, node))
    meeting.leave(0, session, lambda d: d.node == 1)
    assert sorted(meeting.nodes(session)) == [1, 2]
    meeting.leave(1, session, nobody)  # node 2 does not answer: it may be us who cannot be heard
    assert sorted(meeting.nodes(session)) == [2]
    assert not meeting.ended(session)
    meeting.publish_node(document(session, 1))
    meeting.end(session)
    meeting.leave(1, session, nobody)  # node 2 was killed, and the job is over
    assert not meeting.folder.exists()
    assert meeting.ended(session)


def test_damaged_documents_are_refused_or_left_out(tmp_path):
    meeting = Meeting(tmp_path)
    session = meeting.open_session(2, None, nobody)
    meeting.publish_node(document(session, 0))
    (tmp_path / "node-1.json").write_text('{"version": 1, "session": ')
    assert sorted(meeting.nodes(session)) == [0]
    for bad in (b"", b"[]", b'{"version": 9}', KIND.encode({"segments": 7})):
        (tmp_path / "job.json").write_bytes(bad)
        with pytest.raises(JobError, match="of a document of the meeting folder is"):
            meeting.job()
    (tmp_path / "meeting.json").write_bytes(b"{")
    for ask in (meeting.head, lambda: meeting.ended(session), lambda: meeting.answer(1, "nonce")):
        with pytest.raises(JobError, match=r"meeting\.json: the text .* is no JSON"):
            ask()


def test_a_node_that_waits_in_vain_is_told_for_whom(tmp_path):
    meeting = Meeting(tmp_path / "meet")
    with pytest.raises(JobError, match="no job meets here"):
        meeting.wait_for_job(0.0)
    session = meeting.open_session(3, None, nobody)
    meeting.publish_node(document(session, 1))
    with pytest.raises(JobError, match="nodes 0, 2 are missing"):
        meeting.wait_for_job(0.0)


def test_the_folder_is_given_or_in_the_environment(tmp_path):
    assert meeting_folder(tmp_path, {}) == tmp_path
    assert meeting_folder(None, {"HEADRACE_JOB_FOLDER": "meet"}) == tmp_path.cwd() / "meet"
    with pytest.raises(JobError, match="HEADRACE_JOB_FOLDER"):
        meeting_folder(None, {})
    assert os.fspath(meeting_folder("/a/b", {"HEADRACE_JOB_FOLDER": "/c"})) == "/a/b"

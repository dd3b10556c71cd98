"""One process, several servers: what staging copies, and what readers get meanwhile and after."""

import errno
import itertools
import os
import pickle
import shutil
import stat
import subprocess
import threading
import time
from collections import Counter

import numpy as np
import pytest

import headrace as hr
from headrace.errors import HeadraceError, JobError, SourceChanged
from headrace.fabric.engine import FabricEngine
from headrace.insight.report.figures import run_figures, tiers_of
from headrace.job import engine as job_engine
from headrace.job.engine import connect_options, identity_of
from headrace.job.store import open_job
from headrace.trace import flush
from job.local import LocalJob
from store.nth_call import Refusing
from tests_shared import opened_to_others, until, write_photos


def same(store, source):
    with hr.open(source) as wanted:
        assert len(store) == len(wanted)
        assert list(store.names) == list(wanted.names)
        assert store.labels.tolist() == wanted.labels.tolist()
        assert store.classes == wanted.classes
        assert store.fingerprint == wanted.fingerprint
        for order in ("shuffled", "sequential"):
            mine, theirs = (hr.loader(s, 8, seed=1, order=order) for s in (store, wanted))
            for a, b in zip(mine, theirs, strict=True):
                assert a.indices.tolist() == b.indices.tolist()
                assert [bytes(x) for x in a] == [bytes(x) for x in b]
            mine.close()
            theirs.close()
        for i in (0, len(wanted) - 1):
            assert bytes(store.read(i)) == bytes(wanted.read(i))
            assert bytes(store.read(i, 3, 5)) == bytes(wanted.read(i, 3, 5))


def test_what_is_planned_is_readable_and_what_is_staged_is_checked(photos, tmp_path):
    with LocalJob(photos, tmp_path) as job:
        job.each("plan")
        with open_job(job.where) as store:
            assert store.document.state == "staging"
            assert not any(s.directory.has_crc for s in store.segments)
            same(store, photos)
            figures = store.objects.figures()
            assert figures["reads_last"] > 0
            assert figures["unwritten"] > 0
            assert figures["reads"] == figures["failed"] == 0
            job.each("stage")
            same(store, photos)  # a store that was opened early goes on, from the nodes now
            later = store.objects.figures()
            assert store.objects.stats().peer_bytes == later["bytes"] > 0
            assert later["reads"] > 0
            assert later["reads_last"] == figures["reads_last"]


def test_a_report_knows_what_other_nodes_served(photos, tmp_path):
    with LocalJob(photos, tmp_path) as job:
        job.each("plan")
        job.each("stage")
        with open_job(job.where) as store:
            loader = hr.loader(store, 4, seed=1, trace=tmp_path / "run")
            for _ in loader:
                pass
            flush()
            until(lambda: "peer" in tiers_of(run_figures(str(tmp_path / "run")).total))
            assert "source" not in tiers_of(run_figures(str(tmp_path / "run")).total)
            loader.close()


@pytest.mark.parametrize(
    ("step", "codes"),
    [
        pytest.param(13, (errno.EIO,), id="each 13th call"),
        pytest.param(1, (errno.EIO, errno.ENOSPC), id="all", marks=pytest.mark.slow),
    ],
)
def test_whatever_call_is_refused_nothing_is_left_and_the_next_job_is_right(
    photos, tmp_path, step, codes
):
    counts = Counter()
    for code in codes:
        for number in itertools.count(1, step):
            folder = tmp_path / f"{code}-{number}"
            folder.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                refusing = Refusing(folder, number, code)
                try:
                    with LocalJob(photos, folder, nodes=1) as job:
                        refusing.install(patch)
                        job.each("plan", "stage")
                        with open_job(job.where) as store:
                            same(store, photos)
                except HeadraceError as e:
                    counts["refused" if isinstance(e, OSError) and e.next_step else "wrong"] += 1
            if not refusing.refused:
                break
            counts["attempts"] += 1
            shutil.rmtree(folder / "meet", ignore_errors=True)
            left = [path.name for path in (folder / "disk-0").iterdir()]
            assert not left or refusing.tidying, (number, refusing.refused)
            with LocalJob(photos, folder, nodes=1) as job:
                job.each("plan", "stage")
                with open_job(job.where) as store:
                    same(store, photos)
            (folder / "disk-0").rmdir()
            shutil.rmtree(folder)
    assert counts["refused"] > 1, counts
    assert not counts["wrong"], counts


def test_a_packed_source_has_its_checksums_from_the_beginning(packed_photos, tmp_path):
    with LocalJob(packed_photos, tmp_path, nodes=3) as job:
        job.each("plan")
        assert job.meeting.wait_for_job(20).listing == str(packed_photos)
        with open_job(job.where) as store:
            assert all(s.directory.has_crc for s in store.segments)
            job.each("stage")
            same(store, packed_photos)
    assert packed_photos.exists()
    assert not job.meet.exists()


def test_reads_beyond_the_mark_are_no_data(photos, tmp_path):
    with LocalJob(photos, tmp_path, nodes=1) as job:
        job.each("plan")
        document = job.meeting.wait_for_job(20)
        url = document.segments[0].places[0].volumes[0]
        server = job.servers[0]
        with FabricEngine(identity_of(document.session), connect_options()) as fabric:
            fabric.open(url)
            data = np.empty(1024, np.uint8)

            def read(offset):
                counts = fabric.read_many(
                    url, np.array([offset], np.int64), np.array([1024], np.int64), data
                )
                return int(counts[0])

            assert read(0) == -errno.ENODATA
            server._exports.set_written(server._nsid, 4096)
            assert read(3072) == 1024
            assert read(3073) == -errno.ENODATA
            job.each("stage")
            assert read(3073) == 1024


def test_only_hosts_that_know_the_session_are_admitted(photos, tmp_path):
    """It stands in the meeting folder, which is this user's alone."""
    with LocalJob(photos, tmp_path, nodes=1) as job:
        job.each("plan")
        document = job.meeting.wait_for_job(20)
        url = document.segments[0].places[0].directory
        for session in (document.session, "0123456789abcdef"):
            with FabricEngine(identity_of(session), connect_options()) as fabric:
                if session == document.session:
                    fabric.open(url)
                else:
                    with pytest.raises(HeadraceError):
                        fabric.open(url)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_another_user_reads_nothing_of_a_job(photos, tmp_path):
    """Under an umask that lets others read: folder and samples are this user's alone."""
    before = os.umask(0)
    try:
        with opened_to_others(tmp_path), LocalJob(photos, tmp_path, nodes=1) as job:
            job.each("plan", "stage")
            assert stat.S_IMODE(job.meet.stat().st_mode) == 0o700
            tries = [["ls", str(job.meet)], *(["cat", str(path)] for path in job.meet.rglob("*"))]
            assert len(tries) > 4
            for command in tries:
                ended = subprocess.run(
                    ["setpriv", "--reuid=65534", "--clear-groups", *command],
                    check=False, capture_output=True, text=True,
                )  # fmt: skip
                assert (ended.returncode != 0, "Permission denied" in ended.stderr) == (True, True)
    finally:
        os.umask(before)


def test_a_kept_share_is_a_store(photos, tmp_path):
    with LocalJob(photos, tmp_path, keep=True) as job:
        job.each("plan", "stage")
    with hr.open(photos) as wanted:
        names = []
        for node in range(2):
            (kept,) = (tmp_path / f"disk-{node}").iterdir()
            assert hr.verify(kept).ok
            with hr.open(kept) as share:
                names += list(share.names)
                assert bytes(share.read(0)) == bytes(wanted.read(share.names[0]))
        assert names == list(wanted.names)


def test_a_share_that_was_not_finished_is_not_kept(photos, tmp_path):
    with LocalJob(photos, tmp_path, keep=True) as job:
        job.each("plan")
    assert [list((tmp_path / f"disk-{node}").iterdir()) for node in range(2)] == [[], []]


def test_a_copy_is_used_when_its_owner_is_gone(photos, tmp_path):
    with LocalJob(photos, tmp_path, replicas=2) as job:
        job.each("plan", "stage", "replicate")
        assert all(server.document.replicas for server in job.servers)
        with open_job(job.where) as store:
            while len(job.meeting.job().segments[0].places) < 2:
                pass
        with open_job(job.where) as store:
            same(store, photos)
            job.servers[0].close()
            same(store, photos)
            figures = store.objects.figures()
            assert figures["reads_elsewhere"] > 0
            assert figures["reads_last"] == figures["failed"] == 0


def test_a_source_that_changed_ends_staging_and_says_so(tmp_path):
    source = write_photos(tmp_path / "source")
    with LocalJob(source, tmp_path, nodes=1) as job:
        job.each("plan")
        victim = sorted(source.rglob("*.png"))[20]
        victim.write_bytes(b"another")
        with pytest.raises(SourceChanged):
            job.each("stage")
        document = job.servers[0].document
        assert document.state == "failed"
        assert victim.name in document.why


def test_more_nodes_than_samples(tmp_path):
    source = write_photos(tmp_path / "source", per_class=1)
    with LocalJob(source, tmp_path, nodes=5) as job:
        job.each("plan", "stage")
        assert sum(server.document.samples == 0 for server in job.servers) == 2
        with open_job(job.where) as store:
            same(store, source)


def test_a_store_survives_pickling_and_fork(photos, tmp_path):
    with LocalJob(photos, tmp_path) as job:
        job.each("plan", "stage")
        with open_job(job.where) as store:
            wanted = bytes(store.read(5))
            with pickle.loads(pickle.dumps(store)) as again:
                assert bytes(again.read(5)) == wanted
            child = os.fork()
            if child == 0:
                os._exit(0 if bytes(store.read(5)) == wanted else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert bytes(store.read(5)) == wanted


def test_a_loader_that_asks_for_the_node_daemon_reads_a_staged_store_itself(
    photos, tmp_path, caplog, monkeypatch
):
    with LocalJob(photos, tmp_path) as job:
        job.each("plan", "stage")
        monkeypatch.setenv("HEADRACE_PLANE", "node")
        with open_job(job.where) as store:
            loader = hr.loader(store, 8, seed=1)
            assert sorted(i for batch in loader for i in batch.indices) == list(range(len(store)))
            loader.close()
    assert "the node daemon cannot serve" in caplog.text
    assert "it is staged" in caplog.text


def test_a_job_of_another_scheduler_id_is_refused(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with LocalJob(photos, tmp_path, nodes=1) as job:
        job.each("plan")
        open_job(job.where).close()
        monkeypatch.setenv("SLURM_JOB_ID", "42")
        with pytest.raises(JobError, match="belongs to 42"):
            open_job(job.where)


def test_a_dead_jobs_folder_is_no_job(photos, tmp_path):
    with LocalJob(photos, tmp_path, nodes=1) as job:
        job.each("plan")
        job.servers[0]._exports.close()
        with pytest.raises(JobError, match="no node of the job"):
            open_job(job.where, wait_s=0.2)


@pytest.mark.parametrize("where", ["headrace://", "headrace://elsewhere", "s3://job"])
def test_what_is_no_job_is_refused(where):
    with pytest.raises(ValueError, match="is no job"):
        open_job(where)


def test_an_opportunistic_order_begins_with_what_is_staged_and_all_agree(photos, tmp_path):
    with LocalJob(photos, tmp_path) as job:
        job.each("plan")
        job.servers[0].stage()
        with open_job(job.where) as store, open_job(job.where) as other:
            first = hr.order_for(store, "opportunistic", seed=4)
            staged = job.servers[0].document.samples
            assert first.resident == ((0, staged),)
            assert 0 < first.randomness().entropy_share < 1
            job.servers[1].stage()
            assert hr.order_for(other, "opportunistic", seed=4) == first
            assert hr.order_for(other, "opportunistic", seed=5).resident_samples == len(store)
            delivered = []
            for rank in range(2):
                loader = hr.loader(
                    (store, other)[rank], 4, order="opportunistic", seed=4, rank=rank, world_size=2,
                    tail="exact",
                )  # fmt: skip
                delivered += [int(i) for batch in loader for i in batch.indices]
                loader.close()
            assert sorted(delivered) == list(range(len(store)))


def test_a_closed_store_follows_the_job_no_more(photos, tmp_path, monkeypatch):
    """A Python thread that is inside native code when the interpreter ends would abort the process."""
    looking = threading.Event()

    def look_long():
        looking.set()
        time.sleep(0.3)

    monkeypatch.setattr(job_engine, "_FOLLOW_S", 0.01)
    with LocalJob(photos, tmp_path) as job:
        job.each("plan")
        with open_job(job.where) as store:
            monkeypatch.setattr(store.objects._meeting, "job", look_long)
            same(store, photos)
            assert looking.wait(10)
            (follower,) = (t for t in threading.enumerate() if t.name == "headrace-job")
            looking.clear()
            assert looking.wait(10)  # it is at it while the store is closed
        assert not follower.is_alive()

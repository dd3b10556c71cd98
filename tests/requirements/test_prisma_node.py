"""Requirements that the node daemon meets: PRISMA's socket server turned round, MONARCH's sharing.

P1   replies carry status and length                  here; tests/node/test_wire.py
P6   a missing file is an error, to its reader only   here
P10  local data goes through shared memory            here; tests/node/test_serving.py
P12  no input ends the user's process                 here; tests/node/test_hostile.py
P14  jobs are isolated, the socket checks who it is   here; tests/node/test_hostile.py
P16  many data sets and splits, counters live         here
F2   two jobs fetch one data set once, quotas hold    here; tests/node/test_quota.py
F4   the first file does not wait for a full scan     tests/node/files/test_changes.py
"""

from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import HeadraceError
from headrace.node.wire import Ask, Hurry, ReplyStatus, Samples, Working
from node.conftest import folder, link, node_loader, report_of, seen, serving, until  # noqa: F401
from node.test_hostile import opened
from plane.conftest import SAMPLES, content, packed, photos, store  # noqa: F401

pytestmark = pytest.mark.usefixtures("patient")


def test_p1_every_answer_has_a_status_and_its_length(folder, store, link):  # noqa: F811
    with serving(folder):
        one = link()
        number = opened(one, store)
        for indices in ([7], [7, 3, 7], []):  # the 7th sample is empty
            asked = np.array(indices, np.int64)
            one.send(Ask(one.new_ticket(), number, asked.tobytes(), []))
            reply = one.wait(Samples, 30)
            assert reply.status is ReplyStatus.OK
            lengths = np.frombuffer(reply.lengths, np.int64).tolist()
            assert lengths == [len(content(i)) for i in indices]
        one.send(Hurry(reply.ticket))  # long answered: an answer all the same
        assert one.wait(Working, 30).status is ReplyStatus.WORKING


def test_p6_a_missing_file_is_an_error_by_its_name_to_its_reader_only(
    folder,  # noqa: F811
    photos,  # noqa: F811
    tmp_path,
):
    _, files = photos
    for name in list(files)[:40]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(files[name])
    with hr.open(tmp_path) as opened_folder, serving(folder) as server:
        gone = opened_folder.names[11]
        first, second = node_loader(opened_folder, 4), node_loader(opened_folder, 4)
        for loader in (first, second):  # the daemon has listed the folder
            loader.reader.fetch(np.arange(20, 22))
        (tmp_path / gone).unlink()
        with pytest.raises(HeadraceError, match=gone):
            first.reader.fetch(np.arange(10, 14))
        fetched = second.reader.fetch(np.arange(0, 10)).batch
        assert [bytes(s) for s in fetched] == [files[opened_folder.names[i]] for i in range(10)]
        assert report_of(second).node_batches == 2
        (data,) = server.describe()["datasets"]
        assert data["failed_batches"] == 1
        first.close()
        second.close()


def test_p10_samples_come_in_the_daemons_memory(folder, store):  # noqa: F811
    with serving(folder):
        loader = node_loader(store)
        batch = next(iter(loader))
        address = batch.data.ctypes.data
        with Path("/proc/self/maps").open() as maps:
            for line in maps:
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                if low <= address < high:
                    break
        assert "memfd:headrace" in line
        assert line.split()[1] == "r--s"
        loader.close()


@pytest.mark.parametrize("job", ["j" * 5000, "jöb", "a\nb"])
def test_p12_no_name_ends_anybody(folder, store, monkeypatch, job):  # noqa: F811
    monkeypatch.setenv("HEADRACE_JOB", job)
    with serving(folder) as server:
        loader = node_loader(store)
        assert len(seen(loader)) == 16
        assert report_of(loader).direct_batches == 0
        assert server.describe()["jobs"][0]["name"] == job[:256]
        loader.close()


def test_p14_jobs_have_quotas_of_their_own(folder, store, tmp_path, monkeypatch):  # noqa: F811
    other_path = tmp_path / "other.hr"
    hr.pack(((f"{i}", content(i), 0) for i in range(SAMPLES)), other_path)
    with hr.open(other_path) as other, serving(folder, job_ram_bytes=1 << 20) as server:
        loaders = []
        for job, data in (("one", store), ("two", other)):
            monkeypatch.setenv("HEADRACE_JOB", job)
            loaders.append(node_loader(data))
            seen(loaders[-1])
        for data in server.describe()["datasets"]:
            assert 0 < data["held_bytes"] <= data["quota_bytes"] <= 1 << 20
            assert len(data["jobs"]) == 1
        for loader in loaders:
            loader.close()


def delivered(server):
    return {d["path"]: d["delivered_samples"] for d in server.describe()["datasets"]}


def test_p16_many_data_sets_and_splits_at_once(folder, store, photos, tmp_path):  # noqa: F811
    root, _ = photos
    with hr.open(root) as files, serving(folder) as server:
        loaders = [node_loader(store), node_loader(files), node_loader(store, seed=9)]
        iterators = [iter(loader) for loader in loaders]
        for _ in range(16):
            for iterator in iterators:
                assert len(next(iterator))
        # What clients took out of the daemon's memory by themselves they say once a second.
        expected = {str(store.path): 2 * SAMPLES, str(root): SAMPLES}
        until(lambda: delivered(server) == expected)
        assert len(server.describe()["sessions"]) == 3
        for loader in loaders:
            loader.close()


def test_f2_two_jobs_fetch_one_data_set_once_and_quotas_hold(
    folder,  # noqa: F811
    store,  # noqa: F811
    monkeypatch,
):
    with serving(folder, ram_bytes=4 << 20) as server:
        for job in ("one", "two"):
            monkeypatch.setenv("HEADRACE_JOB", job)
            loader = node_loader(store, seed=len(job))
            seen(loader)
            loader.close()
        (data,) = server.describe()["datasets"]
        assert data["source_samples_bytes"] == store.nbytes
        assert data["held_bytes"] <= 4 << 20

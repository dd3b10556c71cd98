"""A job's store from C: one order, whoever serves the bytes: the owner, a replica, or the source."""

import contextlib
import json

import pytest

import headrace as hr
from capi.library import Failed, mount_options
from capi.test_local import python_epoch
from headrace.base.checksum import crc32c
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target

SESSION = "0123456789abcdef"
HOST = f"nqn.2026-11.io.headrace:job:{SESSION}"


class Node:
    """A node that has the files of a store, each in a namespace."""

    def __init__(self, rank, store):
        self.rank = rank
        self.subsystem = Subsystem(f"nqn.2026-11.io.headrace:node{rank}", hosts=[HOST])
        self.nsids = {
            path.name: self.subsystem.add(path).nsid
            for path in sorted(store.iterdir()) if path.suffix in (".hrd", ".hrv")
        }  # fmt: skip
        self.target = Target([self.subsystem], ("127.0.0.1", 0))

    def url(self, name):
        host, port = self.target.address
        return f"nvme+tcp://{host}:{port}/{self.subsystem.nqn}?ns={self.nsids[name]}"

    def place(self, entry):
        volumes = [self.url(volume["path"]) for volume in entry["volumes"]]
        return {"node": self.rank, "directory": self.url(entry["directory"]), "volumes": volumes}

    def stop(self):
        self.target.close()
        self.subsystem.close()


@pytest.fixture
def nodes(packed_photos):
    made = [Node(rank, packed_photos) for rank in range(2)]
    yield made
    for node in made:
        with contextlib.suppress(Exception):
            node.stop()


def write_job(folder, store, nodes, **changed):
    manifest = json.loads((store / "store.json").read_text())
    document = {
        "version": 1, "session": SESSION, "job": SESSION, "generation": 1, "state": "staged",
        "nodes": len(nodes), "fingerprint": manifest["fingerprint"], "source": "photos",
        "listing": "", "samples": manifest["samples"],
        "segments": [
            {"entry": entry, "places": [node.place(entry) for node in nodes]}
            for entry in manifest["segments"]
        ],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(document | changed, indent=1))
    return folder


def mounted(library, folder, **options):
    return library.mount(f"headrace://{folder}", mount_options(timeout_s=20.0, **options))


def test_the_example_reads_the_jobs_order(read_epoch, packed_photos, nodes, tmp_path):
    folder = write_job(tmp_path, packed_photos, nodes)
    lines, _ = read_epoch(f"headrace://{folder}", "-b", "5", "-s", "3")
    with hr.open(packed_photos) as store:
        expected = [(i, la, len(d), crc32c(d)) for i, la, d in python_epoch(store, 5, 3)]
    assert [line[2:] for line in lines] == expected


def test_headrace_job_is_where_the_environment_says(
    library, packed_photos, nodes, tmp_path, monkeypatch
):
    monkeypatch.delenv("HEADRACE_JOB_FOLDER", raising=False)
    with pytest.raises(Failed, match=r"HR_ERR_ARGUMENT: .*HEADRACE_JOB_FOLDER"):
        library.mount("headrace://job")
    write_job(tmp_path, packed_photos, nodes)
    mount = library.mount("headrace://job", mount_options(job_folder=str(tmp_path).encode()))
    assert library.info(mount).samples == 36
    library.call("hr_unmount", mount)


@pytest.mark.parametrize("when", ["before the mount", "in the middle"])
@pytest.mark.parametrize("left", ["a replica", "the source"])
def test_the_order_is_unchanged_when_the_owner_is_gone(
    library, packed_photos, nodes, tmp_path, when, left
):
    """The target that served is closed: every later byte came from elsewhere."""
    more = {"listing": str(packed_photos)} if left == "the source" else {}
    serving = nodes if left == "a replica" else nodes[:1]
    folder = write_job(tmp_path, packed_photos, serving, **more)
    if when == "before the mount":
        if left == "the source":
            pytest.skip("the directory comes from a node")
        nodes[0].stop()
    mount = mounted(library, folder)
    sequence = library.sequence(mount, 9)
    library.set(sequence, "HR_SET_BUFFER_BYTES", 1)  # so that little is read ahead
    first = library.batch(sequence, 4)
    found = first.content()
    library.release(first)
    if when == "in the middle":
        nodes[0].stop()
    found += library.epoch(sequence, 4)
    found += library.epoch(sequence, 4)
    with hr.open(packed_photos) as store:
        expected = python_epoch(store, 4, 9) + python_epoch(store, 4, 9, epoch=1)
    assert [(i, label, data) for i, label, [data] in found] == expected
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_when_nobody_has_the_bytes_it_is_an_error(library, packed_photos, nodes, tmp_path):
    folder = write_job(tmp_path, packed_photos, nodes)
    mount = mounted(library, folder, give_up_s=0.3)
    sequence = library.sequence(mount, 9)
    for node in nodes:
        node.stop()
    with pytest.raises(Failed, match=r"HR_ERR_(FABRIC|TIMEOUT): "):
        for _ in range(3):
            library.epoch(sequence, 4)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)
    with pytest.raises(Failed, match=r"HR_ERR_FABRIC: .*no node gives the directory"):
        mounted(library, folder)


def test_a_job_that_is_not_there_yet(library, packed_photos, nodes, tmp_path):
    options = mount_options(timeout_s=0.3)
    with pytest.raises(Failed, match=r"HR_ERR_NO_STORE: .*no job meets here"):
        library.mount(f"headrace://{tmp_path}", options)
    write_job(tmp_path, packed_photos, nodes, state="staging")
    with pytest.raises(Failed, match=r"HR_ERR_TIMEOUT: .*still being staged"):
        library.mount(f"headrace://{tmp_path}", options)


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 3}, {"session": "../x"}, {"session": None}, {"segments": []},
        {"segments": [{}]}, {"segments": 7}, {"fingerprint": ""}, {"state": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_documents_that_make_no_sense(library, packed_photos, nodes, tmp_path, changed):
    write_job(tmp_path, packed_photos, nodes, **changed)
    with pytest.raises(Failed, match=r"HR_ERR_CORRUPT_STORE: .*job.json"):
        mounted(library, tmp_path)


def test_places_must_match_their_segment(library, packed_photos, nodes, tmp_path):
    document = json.loads((write_job(tmp_path, packed_photos, nodes) / "job.json").read_text())
    document["segments"][0]["places"][1]["volumes"] = []
    (tmp_path / "job.json").write_text(json.dumps(document))
    with pytest.raises(Failed, match=r"HR_ERR_CORRUPT_STORE: .*one for each"):
        mounted(library, tmp_path)

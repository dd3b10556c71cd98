"""The command line over the fabric: every command that takes a store takes its URL."""

import os

import pytest

import headrace as hr
from cli.conftest import program, run  # noqa: F401 - fixtures
from fabric.conftest import NQN
from headrace.errors import CorruptStore
from headrace.fabric.image import parse_header
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target
from store.conftest import flip, make_folder


@pytest.fixture
def store(tmp_path):
    samples = make_folder(tmp_path / "photos")
    hr.pack(tmp_path / "photos", tmp_path / "packed", volume_bytes=30_000)
    return tmp_path / "packed", samples


@pytest.fixture
def url(store):
    subsystem = Subsystem(NQN)
    subsystem.add_store(store[0])
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        yield f"nvme+tcp://127.0.0.1:{target.address[1]}/{NQN}?ns=1"
    subsystem.close()


def test_commands_take_the_url(run, store, url):  # noqa: F811 - the fixture
    folder, samples = store
    info = run("info", url, "--json")
    assert info.code == 0, info.err
    assert info.document["samples"] == len(samples)
    assert info.document["fingerprint"] == run("info", folder, "--json").document["fingerprint"]
    assert run("info", url).code == 0
    listed = run("ls", url, "--json")
    assert listed.code == 0
    assert run("ls", url).out == run("ls", folder).out
    verified = run("verify", url, "--json")
    assert (verified.code, verified.document["report"]["checked_samples"]) == (0, len(samples))
    read = run("read", url, "--seconds", "5", "--json")
    assert read.code == 0, read.err


def test_cat_and_options(program, store, url):  # noqa: F811 - the fixture
    name = max(store[1], key=lambda n: len(store[1][n]))
    ended = program("cat", url, name, "-O", "queues=1", "-O", "ddgst=false")
    assert (ended.returncode, ended.stdout) == (0, store[1][name])
    wrong = program("cat", url, name, "-O", "quues=1")
    assert wrong.returncode == 2
    assert b"storage_options has 'quues'" in wrong.stderr


def test_an_image(run, tmp_path, store):  # noqa: F811 - the fixture
    image = tmp_path / "image"
    ended = run("image", store[0], image, "--json")
    assert ended.code == 0, ended.err
    report = ended.document
    assert report["bytes"] == image.stat().st_size
    assert report["bytes"] % 4096 == 0
    assert report["files"] == len(list(store[0].iterdir()))
    again = run("image", store[0], image)
    assert again.code == 3
    assert "is not empty" in again.err
    assert "--force" in again.err
    assert run("image", store[0], image, "--force").code == 0
    assert f"wrote {report['files']} files" in run("image", store[0], tmp_path / "other").out
    assert (tmp_path / "other").read_bytes() == image.read_bytes()


def test_what_cannot_be_imaged(run, tmp_path, store):  # noqa: F811 - the fixture
    assert "there is no store here" in run("image", tmp_path, tmp_path / "x").err
    assert not (tmp_path / "x").exists()
    os.mkfifo(tmp_path / "fifo")
    assert "neither a file nor a block device" in run("image", store[0], tmp_path / "fifo").err
    assert run("image", store[0], tmp_path / "no" / "folder").code == 3
    (store[0] / "segment-0000.hrd").unlink()
    ended = run("image", store[0], tmp_path / "x")
    assert ended.code == 3
    assert "the file is missing" in ended.err


def test_an_image_that_was_not_finished_is_none(run, tmp_path, store, monkeypatch):  # noqa: F811
    """The page that makes it a store comes last: a full disk before leaves no store."""
    from headrace.fabric import image as module

    image = tmp_path / "image"
    assert run("image", store[0], image).code == 0
    whole = image.read_bytes()
    parse_header(whole[:4096], "image", namespace_bytes=len(whole))
    flip(image, 0)  # a catalog again, after `--force` begins, would be an older one
    image.write_bytes(whole)
    written = []

    def fail(fd, data, offset):
        if offset > 20_000:
            raise OSError(28, "No space left on device")
        written.append(offset)
        os.pwrite(fd, data, offset)

    monkeypatch.setattr(module, "write_all", fail)
    ended = run("image", store[0], image, "--force")
    assert ended.code == 3
    assert "No space left" in ended.err
    assert written
    page = image.read_bytes()[:4096]
    with pytest.raises(CorruptStore, match="no store lies here"):
        parse_header(page, "image", namespace_bytes=len(whole))


def test_a_block_device(run, tmp_path, store):  # noqa: F811 - the fixture
    """Through a loop device, where this user may have one."""
    import subprocess

    backing = tmp_path / "backing"
    backing.write_bytes(bytes(4 << 20))
    made = subprocess.run(
        ["/sbin/losetup", "--find", "--show", str(backing)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        assert run("image", store[0], device).code == 0
        assert run("image", store[0], device).code == 3
        small = tmp_path / "small"
        assert run("image", store[0], small).code == 0
        assert backing.read_bytes()[: small.stat().st_size] == small.read_bytes()
    finally:
        subprocess.run(["/sbin/losetup", "--detach", device], check=True)

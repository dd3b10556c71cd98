"""Stores that name places outside their folder: read where somebody agreed, and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.errors import StoreError
from headrace.store.manifest import Manifest, VolumeEntry, load_manifest
from headrace.store.repair import repair
from headrace.store.verify import verify

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user's machine begins: nothing was agreed to."""
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("headrace.store.trust._agreed", set())


def on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "another"))
    monkeypatch.setattr("headrace.store.trust._agreed", set())


def indexed(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """An index, and where its samples lie."""
    source = tmp_path / "source"
    source.mkdir()
    for i in range(4):
        (source / f"{i}.txt").write_bytes(b"sample %d" % i)
    if kind == "file":
        subprocess.run(["tar", "cf", tmp_path / "tar.tar", "-C", source, "."], check=True)
        source = tmp_path / "tar.tar"
    hr.index(source, tmp_path / "index.hr")
    return tmp_path / "index.hr", source


@pytest.mark.parametrize("kind", ["tree", "file"])
def test_what_was_indexed_here_needs_no_consent_and_a_copy_elsewhere_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store, source = indexed(tmp_path, kind)
    hr.open(store).close()
    opened = subprocess.run(
        [sys.executable, "-c", f"import headrace as hr; hr.open({str(store)!r})"], check=False
    )
    assert opened.returncode == 0  # by another process, from the record
    on_another_machine(monkeypatch, tmp_path)
    for opening in (hr.open, verify):
        with pytest.raises(StoreError, match="lie outside its folder") as refused:
            opening(store)
        assert str(source) in str(refused.value)
        assert f"--trust {source}" in str(refused.value)
    with pytest.raises(StoreError, match="lie outside its folder"):
        hr.open(store, trust=tmp_path / "elsewhere")
    hr.open(store, trust=source).close()
    monkeypatch.setattr("headrace.store.trust._agreed", set())
    hr.open(store).close()  # from now on
    shutil.copytree(store, tmp_path / "moved.hr")
    hr.open(tmp_path / "moved.hr").close()  # the same content and the same places


def tampered(store: Path, volume: VolumeEntry) -> None:
    from dataclasses import replace

    manifest = load_manifest(store)
    segment = replace(manifest.segments[0], volumes=(volume,))
    Manifest(manifest.uuid, manifest.fingerprint, (segment,)).save(store)


def test_other_places_in_a_store_that_is_trusted_are_another_question(tmp_path: Path) -> None:
    store, _ = indexed(tmp_path, "tree")
    (tmp_path / "secret").mkdir()
    for i in range(4):
        (tmp_path / f"secret/{i}.txt").write_bytes(b"secret %d" % i)
    tampered(store, VolumeEntry("tree", str(tmp_path / "secret")))
    with pytest.raises(StoreError, match="lie outside its folder"):
        hr.open(store)
    tampered(store, VolumeEntry("tree", "../secret"))
    with pytest.raises(StoreError, match="lie outside its folder"):
        hr.open(store)
    (store / "inside").symlink_to("../secret")
    tampered(store, VolumeEntry("tree", "inside"))
    with pytest.raises(StoreError, match="lie outside its folder"):
        hr.open(store)


@pytest.mark.parametrize("trust", [None, "/somewhere"])
def test_a_mere_look_asks_no_server(tmp_path: Path, packed_photos: Path, trust: str | None) -> None:
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815 - the name that the class wants

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/volume"
    store = shutil.copytree(packed_photos, tmp_path / "store.hr")
    tampered(store, VolumeEntry("object", url, 8192))
    try:
        with pytest.raises(StoreError, match="lie outside its folder"):
            hr.open(store, trust=trust)
        assert not requests
        with pytest.raises(hr.errors.HeadraceError):
            hr.open(store, trust=url.removesuffix("/volume"))
        assert requests  # the server is one that would have seen it
    finally:
        server.shutdown()
        server.server_close()


def test_repair_reads_no_source_that_somebody_else_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photos: Path
) -> None:
    hr.pack(photos, tmp_path / "store.hr")
    assert repair(tmp_path / "store.hr").ok
    on_another_machine(monkeypatch, tmp_path)
    hr.open(tmp_path / "store.hr").close()  # its samples are its own
    with pytest.raises(StoreError, match="came from elsewhere"):
        repair(tmp_path / "store.hr")
    assert repair(tmp_path / "store.hr", trust=photos).ok


def test_appending_keeps_an_index_trusted(tmp_path: Path, photos: Path) -> None:
    store, _ = indexed(tmp_path, "tree")
    hr.append(photos, store)
    hr.open(store).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as root and as two users")
def test_roots_consent_counts_for_all_and_a_users_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.store.trust._SYSTEM_FOLDER", str(tmp_path / "system"))
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "system"))
    store, _ = indexed(tmp_path, "tree")
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr("headrace.store.trust._agreed", set())
    hr.open(store).close()
    [record] = [p for p in (tmp_path / "system/trusted").iterdir() if "index" in p.read_text()][:1]
    assert json.loads(record.read_text())["places"]
    for path in (tmp_path / "system/trusted").iterdir():
        os.chown(path, 12345, -1)  # not root's: nobody's word
    monkeypatch.setattr("headrace.store.trust._agreed", set())
    with pytest.raises(StoreError, match="lie outside its folder"):
        hr.open(store)


def test_without_a_place_for_records_this_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "file"))
    store, _ = indexed(tmp_path, "tree")
    assert "cannot be written down" in caplog.text
    hr.open(store).close()


def test_the_commands_ask_and_take_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, source = indexed(tmp_path, "tree")
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "another"))
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "info", str(store)]
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert refused.returncode == 3
    assert "Traceback" not in refused.stderr
    assert str(source) in refused.stderr
    assert subprocess.run([*command, "--trust", str(source)], check=False).returncode == 0
    assert subprocess.run(command, check=False).returncode == 0

"""The how-to page's examples run as they stand, against the server on loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.io.objects.listing import write
from objects.conftest import ask
from objects.test_index import tar_of
from tests_shared import blocks, write_photos

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/object-stores.md"


def _environment(monkeypatch: pytest.MonkeyPatch, moto_port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto_port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def test_the_pages_examples_run(
    moto_port: int, direct: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(moto_port, "PUT", "/bucket")
    write(tar_of({"1.jpg": b"one", "1.cls": b"1"}), "s3://bucket/shards/1.tar", direct, create=True)
    write_photos(tmp_path / "photos")
    _environment(monkeypatch, moto_port)
    snippets = blocks(PAGE, "py")
    assert len(snippets) == 3
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(snippets)],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert b"one"[:4].hex() in ended.stdout


def test_the_command_line_takes_urls(
    packed: str, proxy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moto_port: int
) -> None:
    _environment(monkeypatch, moto_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the options count
    given = ["-O", f"endpoint={proxy.url}", "-O", "deadline_s=20"]

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, *given])
        assert result.exit_code == 0, result.output
        return result.stdout_bytes.decode("utf-8", "replace")

    assert "60" in run("info", packed)
    assert "a/0000.bin" in run("ls", packed)
    assert len(run("cat", packed, "a/0000.bin", "--force")) > 0
    assert "all good" in run("verify", packed)

"""The how-to page's examples run as they stand, against the server on loopback."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from documents.blocks import blocks_of
from documents.running import Reader
from documents.texts import texts, write_tokenizer
from headrace.cli.app import app
from headrace.io.objects.listing import write
from objects.conftest import ask
from objects.test_index import tar_of
from tests_shared import blocks, write_photos

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/object-stores.md"
START = PAGE.parents[1] / "start/texts.md"


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


def test_a_model_is_trained_on_texts_from_a_bucket(
    moto_port: int, direct: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the page, from compressed Parquet on a local S3 server to the first training steps."""
    pytest.importorskip("torch")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("tokenizers")
    (*_, block) = [b for b in blocks_of(START) if "run by" in b.remarks]
    (script,) = [b.text for b in blocks_of(START) if b.remarks.get("file") == "train.py"]
    commands = block.text.splitlines()
    assert len(commands) < 5
    ask(moto_port, "PUT", "/bucket")
    rows = texts()
    for k in range(3):
        sink = io.BytesIO()
        parquet.write_table(arrow.table({"text": rows[k::3], "n": list(range(100))}), sink)
        write(sink.getvalue(), f"s3://bucket/texts/{k}.parquet", direct, create=True)
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "train.py").write_text(script)
    _environment(monkeypatch, moto_port)
    with Reader(START, tmp_path / "reader") as reader:
        environment = reader.environment | {
            k: os.environ[k] for k in os.environ if k.startswith("AWS_")
        }
        shell = "\n".join(["set -e", *commands[1:]])
        ended = subprocess.run(
            ["bash", "-c", shell], cwd=tmp_path, env=environment, check=False, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ended.stdout)]
    assert losses[-1] < losses[0] / 2


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

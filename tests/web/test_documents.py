"""What docs/howto/web.md says is run: each command serves pages, and ends when it is told to."""

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import headrace as hr
from tests_shared import blocks, write_photos
from web.serving import until

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/howto/web.md"
PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()"]
COMMANDS = [
    line
    for block in blocks(PAGE, "sh")
    for line in block.splitlines()
    if line.startswith("headrace web")
]


@pytest.fixture
def place(tmp_path):
    """A folder with everything that the page's commands name."""
    write_photos(tmp_path / "photos")
    hr.pack(tmp_path / "photos", tmp_path / "photos.hr")
    (tmp_path / "history").mkdir()
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(blocks(PAGE, "text")[0])
    return tmp_path


class Command:
    """A command that serves, as a user runs it."""

    def __init__(self, line, place):
        words = [*shlex.split(line)[1:], "--listen", "127.0.0.1:0", "--json"]
        environment = os.environ | {"HEADRACE_RUNTIME_DIR": str(place / "run")}
        self.process = subprocess.Popen(
            [*PROGRAM, *words],
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def address(self):
        text = b""
        while not text.rstrip().endswith(b"}"):
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read().decode()
            text += line
        return json.loads(text)["url"]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out + err


def test_the_page_has_commands():
    assert len(COMMANDS) == 5


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_serves_and_ends(place, line):
    command = Command(line, place)
    try:
        url = command.address()
        with urllib.request.urlopen(url, timeout=20) as answer:
            text = answer.read().decode()
        assert "headrace" in text
        assert ("recorded demo" in text) == ("--demo" in line)
        assert ("Sign in</h1>" in text) == ("--demo" not in line)
    finally:
        code, log = command.end()
    assert code == 0, log
    assert log == b""


def test_what_is_wrong_is_said_before_anything_is_served(place):
    for words, problem in (
        ("--listen 0.0.0.0:0", b"--token-file"), ("--public --listen 0.0.0.0:0", b"everybody could look"),
        ("--store nothing.hr", b"nothing.hr"),
        ("--token-file photos/none", b"cannot be read"), ("--listen here", b"HOST:PORT"),
    ):  # fmt: skip
        ended = subprocess.run(
            [*PROGRAM, "web", *words.split()],
            cwd=place,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode in (2, 3), words
        assert problem in ended.stderr


def test_the_example_in_json_is_answered(place):
    command = Command("headrace web --demo", place)
    try:
        url = command.address()
        for path in (
            "api/starving?sort=lost&limit=50&user=ann",
            "api/storage",
            "api/policy",
            "api/stores",
        ):
            with urllib.request.urlopen(url + path, timeout=20) as answer:
                assert json.load(answer)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url + "api/job?id=4711", timeout=20)
        assert refused.value.code == 404
        refused.value.close()
    finally:
        command.end()
    until(lambda: command.process.poll() is not None)

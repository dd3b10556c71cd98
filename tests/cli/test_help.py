"""What `headrace --help` shows: the commands that people use, by what they are for; each help has examples."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer

import headrace
from headrace.cli.app import NAMES, SECTIONS, SELDOM, app, examples

COMMANDS = typer.main.get_command(app).commands
LEAVES = {
    f"{name} {sub}".strip(): leaf
    for name, command in COMMANDS.items()
    for sub, leaf in getattr(command, "commands", {"": command}).items()
}


def test_each_command_stands_in_one_section():
    assert len(set(NAMES)) == len(NAMES)
    assert set(COMMANDS) == set(NAMES)


@pytest.mark.parametrize("columns", [80, 132])
@pytest.mark.parametrize("option", ["--help", "--all"])
def test_help_is_one_screen_and_all_shows_every_command(run, monkeypatch, columns, option):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(option).out.splitlines()
    assert max(map(len, lines)) <= columns
    assert option == "--all" or len(lines) <= 54
    at = 0
    for title, commands in SECTIONS.items():
        for name, (_, line) in commands.items():
            if option == "--all" or name not in SELDOM:
                at = lines.index(f"  {name.ljust(max(map(len, NAMES)))}  {line}", at)
                assert f"{title}:" in lines[:at]
    assert set(NAMES) > SELDOM


def test_the_version_is_an_option_too(run):
    assert run("--version").out == f"headrace {headrace.__version__}\n"


@pytest.mark.parametrize(("words", "command"), LEAVES.items(), ids=LEAVES)
def test_each_help_ends_with_examples_that_parse(words, command):
    assert examples(words)
    for example in examples(words):
        assert example in command.epilog
        given = [word for word in shlex.split(example) if word[0] != ">"]
        assert given[:1] + given[1 : 1 + len(words.split())] == ["headrace", *words.split()]
        command.make_context(words, given[1 + len(words.split()) :])


@pytest.mark.parametrize("words", LEAVES, ids=LEAVES)
def test_each_help_says_what_a_word_stands_for_and_defaults_in_one_way(run, words):
    shown = run(*words.split(), "--help").out
    assert not re.search(r"<[a-z]|[(. ]Default[: ]|; default|x>=|\(default", shown)
    usage = " ".join(shown.partition("\n\n")[0].split()).partition("[OPTIONS]")[2]
    assert usage == usage.upper() or words == "launch"  # SCRIPT.py


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--all"], ["--version"], []])
def test_help_imports_no_commands_module(words):
    code = (
        f"import sys; sys.argv = ['headrace', *{words!r}]\n"
        "from headrace.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('headrace.cli.')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names = ["app", "exit_codes", "options", "printing"]
    assert ended.stdout.splitlines()[-1] == str([f"headrace.cli.{name}" for name in names])


def test_python_m_headrace_is_the_command_line():
    asked = [sys.executable, "-m", "headrace", "--version"]
    ended = subprocess.run(asked, check=True, capture_output=True, text=True)
    assert ended.stdout == f"headrace {headrace.__version__}\n"


def test_a_shell_is_given_all_commands():
    asked = os.environ | {
        "_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": "headrace ve", "COMP_CWORD": "1",
    }  # fmt: skip
    code = "import sys; sys.argv = ['headrace']; from headrace.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=asked, check=False
    )
    assert ended.stdout.split() == ["verify", "verify-epoch", "version"]


def test_ctrl_c_before_there_is_a_command_is_no_traceback():
    code = (
        "import signal, sys\n"
        "class Finder:\n"
        "  def find_spec(self, name, *_):\n"
        "    if name == 'headrace.cli.app': signal.raise_signal(signal.SIGINT)\n"
        "from headrace.cli import main\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")

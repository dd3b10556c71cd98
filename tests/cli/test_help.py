"""What `headrace --help` shows: each command, by what it is for, with its whole first sentence."""

import subprocess
import sys

import pytest
import typer

from headrace.cli.app import NAMES, SECTIONS, app

COMMANDS = typer.main.get_command(app).commands


def test_each_command_stands_in_one_section():
    assert len(set(NAMES)) == len(NAMES)
    assert set(COMMANDS) == set(NAMES)


@pytest.mark.parametrize("columns", [80, 132])
def test_nothing_of_what_a_command_does_is_cut_off(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run("--help").out
    assert max(map(len, out.splitlines())) <= columns
    words = " ".join(out.split())
    at = 0
    for title, names in SECTIONS.items():
        at = words.index(f" {title}: ", at)
        for name in names:
            says = " ".join(COMMANDS[name].help.split()).partition(". ")[0]
            at = words.index(f" {name} {says}", at)


def test_help_imports_no_commands_module():
    code = (
        "import sys; sys.argv = ['headrace', '--help']\n"
        "from headrace.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('headrace.cli.')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names = ["app", "exit_codes", "options", "printing"]
    assert ended.stdout.splitlines()[-1] == str([f"headrace.cli.{name}" for name in names])

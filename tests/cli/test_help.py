"""What `headrace --help` shows: each command, by what it is for, with its whole first sentence."""

import pytest
import typer

from headrace.cli.app import app
from headrace.cli.commands import NAMES, SECTIONS

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

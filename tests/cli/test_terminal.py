"""On a real terminal: a bar, colours, and no binary."""

import os
import pty
import select
import sys

import pytest

from headrace.cli.printing import Output, plain_table


def in_terminal(arguments, environment=None):
    """Runs `headrace` on a pseudo-terminal; returns its exit code and all that it showed."""
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.environ.update({"TERM": "xterm-256color", "COLUMNS": "100"} | (environment or {}))
            code = "from headrace.cli import main; main()"
            os.execv(sys.executable, [sys.executable, "-c", code, *map(str, arguments)])
        finally:
            os._exit(127)
    shown = b""
    try:
        while select.select([terminal], [], [], 60)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # Linux: the other side is closed
                break
            if not data:
                break
            shown += data
    finally:
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), shown.decode()


def test_packing_shows_a_bar_and_leaves_the_result(photos, tmp_path):
    code, shown = in_terminal(["pack", photos, tmp_path / "new.hr"])
    assert code == 0
    assert "packing" in shown
    assert "100%" in shown
    assert "packed 36 samples" in shown


def test_no_color_is_honoured(packed_photos):
    coloured = in_terminal(["info", packed_photos], {"COLORTERM": "truecolor"})[1]
    plain = in_terminal(["info", packed_photos], {"NO_COLOR": "1"})[1]
    assert "\x1b[1m" in coloured
    assert "\x1b[3" not in plain


@pytest.mark.parametrize("sample", ["cats/7.png"])
def test_cat_spares_the_terminal(packed_photos, sample):
    code, shown = in_terminal(["cat", packed_photos, sample])
    assert code == 2
    assert "is binary and stdout is a terminal" in shown
    assert "IHDR" not in shown
    code, shown = in_terminal(
        ["cat", packed_photos, sample, "--force", "--start", "12", "--size", "4"]
    )
    assert code == 0
    assert "IHDR" in shown


def test_text_goes_to_the_terminal(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Grüße\n")
    code, shown = in_terminal(["cat", tmp_path / "texts", "a.txt"])
    assert code == 0
    assert "Grüße" in shown


def test_names_in_tables_are_no_markup(capsys):
    table = plain_table("JOB")
    for name in ("train[/x]", "[red]x"):
        table.add_row(name)
    Output().console().print(table)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()][1:] == [
        "train[/x]",
        "[red]x",
    ]

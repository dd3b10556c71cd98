"""Commands that the pages name, in blocks or in passing: each exists, with the options it is given."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from documents.blocks import PAGES, SHOWN, blocks_of, prose_of
from headrace.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = typer.main.get_command(app)
INLINE = re.compile(r"(?<!`)`(headrace [^`]+)`(?!`)")
IN_SHELL = re.compile(r"(?:^|[\s;&|(])(headrace .*)")


def named(page: Path) -> list[str]:
    """The shell lines of a page, in blocks and in its text, from the word `headrace` on."""
    found = [text.replace("\n", " ") for text in INLINE.findall(prose_of(page))]
    for block in blocks_of(page):
        if block.language not in SHOWN and not block.language.startswith("py"):
            for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
                at = IN_SHELL.search(line.partition(" #")[0])
                printed = block.language == "console" and not line.startswith("$ ")
                if at and not printed and not line.lstrip().startswith("#"):
                    found.append(at[1])
    return found


def words_of(line: str) -> list[str]:
    """The words behind `headrace`, as far as they are headrace's."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words = []
    for word in list(reader)[1:]:
        if re.fullmatch(r"--|---|[();<>|&]+", word):
            break
        words.append(word.rstrip(","))
    return words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_that_are_named_exist(page):
    for line in named(page):
        words, command = words_of(line), COMMANDS
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            name = words.pop(0)
            if name in ("COMMAND", "..."):  # any of them
                break
            assert name in command.commands, f"{line!r}: there is no command {name!r}"
            command = command.commands[name]
        known = {"-h", "--help"}
        known |= {
            option for each in command.params for option in (*each.opts, *each.secondary_opts)
        }
        if command.name == "unit":  # hands them on to `start`
            known |= {
                o for each in COMMANDS.commands["node"].commands["start"].params for o in each.opts
            }
        if command.context_settings.get("ignore_unknown_options"):
            known |= {"--config-dir"}  # hydra's
        program = command.context_settings.get("allow_interspersed_args") is False
        for word in words:
            if program and re.search(r"\.(py|sh)$", word):
                break  # what follows is the script's
            if re.match(r"--?[a-zA-Z]", word):
                assert word.partition("=")[0] in known, f"{line!r}: no option {word!r}"

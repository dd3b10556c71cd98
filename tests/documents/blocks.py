"""Blocks: the fenced code of the pages, and what the comments above it say about running it.

Blocks of the languages in `RUN` are run, in their page's order, unless a comment right above says otherwise:

    <!-- not run: REASON -->                nobody can run it here
    <!-- run by: tests/FILE.py::TEST -->    that test runs this very block
    <!-- tested by: tests/FILE.py::TEST --> that test gives the same commands, with other words or places
    <!-- file: train.py -->                 it is written to that file instead
    <!-- before: SHELL -->                  done first, unseen by the reader; $ROOT is the repository
    <!-- after: SHELL -->                   the same, afterwards; what the block serves is stopped first
    <!-- ends with: 1 -->                  its commands end with this exit code
    <!-- serves: TEXT -->                   goes on until the page ends; the page goes on once it says TEXT

Before the first heading comments are about the whole page:

    <!-- all run by: tests/FILE.py::TEST -->
    <!-- here: 4420 -->                     a port that stands for one that is free
    <!-- here: node7 = 127.0.0.1 -->        a word that stands for another
    <!-- needs: slurm -->                   run beside a real Slurm (tests/cluster/test_documents.py)
    <!-- needs: ray -->                     run beside a real Ray (tests/on_ray/test_ray_page.py)
    <!-- found by: s3, bucket -->           what the site's search finds it by, before other pages
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests_shared import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PAGES", "RUN", "SHOWN", "Block", "blocks_of", "page_remarks", "prose_of"]

RUN: Final = ("python", "py", "console", "sh", "bash", "shell")
SHOWN: Final = (
    "text",
    "json",
    "yaml",
    "c",
    "diff",
    "{toctree}",
    "{eval-rst}",
    "{image}",
    "{include}",
)
"""Languages that nobody runs. Commands must not hide in them."""

PAGES: Final = sorted(
    [*ROOT.glob("*.md"), *(p for p in ROOT.glob("docs/**/*.md") if "_build" not in p.parts)]
)
"""Every page: the documentation, and what lies beside the README."""

_FENCE: Final = re.compile(r"^( *)(`{3,}|~{3,}|:{3,})(.*)$")
_FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_REMARK: Final = re.compile(r"^<!-- ([\w ]+?): (.+?) -->$")
_OF_BLOCKS: Final = (
    "not run",
    "run by",
    "tested by",
    "file",
    "before",
    "after",
    "ends with",
    "serves",
)
_NOT_HERE: Final = {"not run", "run by", "tested by", "file"}
_OF_PAGES: Final = ("all run by", "here", "needs", "found by")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    """Of its opening fence, from 1."""
    language: str
    text: str
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether somebody who works through the page runs it."""
        return self.language in RUN and not _NOT_HERE & set(self.remarks)

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def prose_of(page: Path) -> str:
    """A page without its blocks."""
    return _FENCED.sub("", page.read_text())


def page_remarks(page: Path) -> list[tuple[str, str]]:
    """The remarks before the first heading, which are about the whole page."""
    found = []
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            break
        if remark := _REMARK.match(line):
            assert remark[1] in _OF_PAGES, f"{page}: {line}, expected one of {_OF_PAGES}"
            found.append((remark[1], remark[2]))
    return found


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in its order. A fence that is never closed is an error."""
    found: list[Block] = []
    everywhere = dict(page_remarks(page)).get("all run by")
    remarks: dict[str, str] = {}
    begun = False
    opened: tuple[int, str, str, list[str]] | None = None  # line, fence, language, lines
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened:
            at, mark, language, lines = opened
            if fence and fence[2].startswith(mark) and not fence[3].strip():
                text = "".join(f"{each}\n" for each in lines)
                of_page = {"run by": everywhere} if everywhere and language in RUN else {}
                if "not run" in remarks:
                    of_page = {}
                found.append(Block(page, at, language, text, of_page | remarks))
                opened, remarks = None, {}
            else:
                lines.append(line)
        elif fence and fence[2][0] != ":":
            opened = (number, fence[2], fence[3].strip().split(" ")[0], [])
        elif begun and (remark := _REMARK.match(line)):
            assert remark[1] in _OF_BLOCKS, f"{page}:{number}: {line}, expected one of {_OF_BLOCKS}"
            remarks[remark[1]] = remark[2]
        else:
            begun = begun or line.startswith("#")
            assert not (line.strip() and remarks), (
                f"{page}:{number}: {remarks} belong above a block"
            )
    assert opened is None, f"{page}: the fence of line {opened and opened[0]} is never closed"
    assert not remarks, f"{page}: {remarks} belong above a block"
    return found

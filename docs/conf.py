"""Sphinx: MyST pages, furo, and the API from the docstrings."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src"


def _source_as_it_lies() -> None:
    """Make a clone importable that was never built: what is native comes from its stub."""
    sys.path.insert(0, str(SOURCE))
    native = ModuleType("headrace._native")
    # Constants have no value in a stub.
    native.__dict__["__getattr__"] = lambda name: MagicMock(name=name)
    stub = SOURCE / "headrace/_native.pyi"
    exec(compile(stub.read_text(), stub, "exec"), native.__dict__)  # noqa: S102 - our own file
    sys.modules[native.__name__] = native


_source_as_it_lies()
import headrace  # noqa: E402

project = "headrace"
author = "The headrace authors"
project_copyright = "The headrace authors"
release = version = headrace.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "headrace"
html_extra_path = ["llms.txt"]
html_static_path = ["versions.js"]
html_js_files = ["versions.js"]
html_search_scorer = str(DOCS / "search_scorer.js")
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# Docstrings are Google style; code in them is written with single backticks.
default_role = "code"
nitpicky = True
# What need not be there to read about it.
autodoc_mock_imports = ["torch", "tensorflow", "jax", "grain", "ray"]
# Types of other projects, whose pages this build does not look up, and modules below the facade: their
# names stand in signatures, and their pages would only repeat the facade's.
nitpick_ignore_regex = [("py:.*", r"(?!headrace\.\w+$).*")]

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]*\.md)[^)]*\)")
CLONE = re.compile(
    r"(?<![`\[])`((?:make |python -m benchmarks|(?:python )?benchmarks/|tools/)[^`]+)`(?!`)"
)
FOUND_BY = re.compile(r"^<!-- found by: (.+) -->$", re.MULTILINE)
FILE = re.compile(r"<!-- file: (\S+) -->\n+```(\w+)\n")


def setup(app: Sphinx) -> None:
    """Pages link to Markdown that is not part of the site; the pages' own Markdown lies beside them."""
    app.connect("source-read", _as_a_page)
    app.connect("build-finished", _sources_beside)


def _as_a_page(_app: Sphinx, name: str, source: list[str]) -> None:
    """What needs a clone leads to the words that say so; files have their names above them."""

    def inside(link: re.Match[str]) -> str:
        target = ((DOCS / name).parent / link[2]).resolve()
        return link[0] if target.is_relative_to(DOCS) else f"[{link[1]}]({clone})"

    clone = f"{os.path.relpath('start/install.md', Path(name).parent)}#a-clone"
    text = CLONE.sub(rf"[`\1`]({clone})", LINK.sub(inside, source[0]))
    if words := FOUND_BY.search(text):  # main entries of the index, which search puts first
        entries = ", ".join(f"! {each}" for each in words[1].split(", "))
        text = re.sub(
            r"^# .+$", rf"\g<0>\n\n```{{index}} {entries}\n```", text, count=1, flags=re.MULTILINE
        )
    # The tests' name of a file is its reader's, too.
    source[0] = FILE.sub(r"```{code-block} \2\n:caption: \1\n\n", text)


def _sources_beside(app: Sphinx, error: Exception | None) -> None:
    """`llms.txt` names the pages' Markdown: it is there under the same names on a site too."""
    if error or app.builder.format != "html":
        return
    for name in app.env.found_docs:
        source, target = app.srcdir / f"{name}.md", app.outdir / f"{name}.md"
        if source.is_file():
            shutil.copyfile(source, target)

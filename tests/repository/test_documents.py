"""What the documents say must be so: snippets run, commands run, links resolve."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests_shared import BLOCK, blocks, write_photos

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for p in ROOT.glob("docs/**/*.md") if "_build" not in p.parts)]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, *languages)]


def anchors(page: Path) -> set[str]:
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_python_snippets_run(page, tmp_path):
    """The snippets of a page run one after the other, beside a folder `photos/`."""
    write_photos(tmp_path / "photos")
    for snippet in blocks(page, "python"):
        # TensorFlow's and JAX's pages run in their own environment, beside their tests.
        wanted = set(re.findall(r"\b(torch|tensorflow|jax|grain|datasets)\b", snippet))
        if any(importlib.util.find_spec(name) is None for name in wanted):
            continue
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", snippet],
            cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, f"{snippet}\n{ended.stderr}"


@pytest.mark.parametrize("page", pages_with("console"), ids=name_of)
def test_console_commands_run(page, tmp_path):
    write_photos(tmp_path / "photos")
    program = [sys.executable, "-c", "from headrace.cli import main; main()"]
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if not line.startswith("$ headrace "):
                continue
            command, _, target = line.removeprefix("$ headrace ").partition(" > ")
            arguments = shlex.split(command, comments=True)
            ended = subprocess.run(
                [*program, *arguments], cwd=tmp_path, check=False, capture_output=True, timeout=120,
                env=os.environ | {"HEADRACE_RUNTIME_DIR": str(tmp_path / "run")},
            )  # fmt: skip
            assert ended.returncode == 0, f"{line}\n{ended.stderr.decode()}"
            if target:
                assert ended.stdout[:4] == b"\x89PNG", line


def test_make_targets_that_are_named_exist():
    targets = set(
        re.findall(r"^([a-z][a-z -]*?):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    known = {word for target in targets for word in target.split()}
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= known, f"{name_of(page)}: {named - known}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name_of(page)} links to {target}"


def test_every_page_is_in_the_table_of_contents():
    listed = set()
    for index in (ROOT / "docs/index.md", ROOT / "docs/decisions/index.md"):
        toctrees = re.findall(r"```\{toctree\}(.*?)```", index.read_text(), re.DOTALL)
        for line in "\n".join(toctrees).splitlines():
            if line and not line.startswith(":"):
                listed |= set(index.parent.glob(f"{line}.md"))
    pages = {p for p in PAGES if "docs" in p.parts and p != ROOT / "docs/index.md"}
    assert pages <= listed

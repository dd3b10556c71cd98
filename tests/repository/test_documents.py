"""What the documents say must be so: blocks run, commands exist, links resolve."""

import json
import re
from pathlib import Path

import pytest
import yaml

from documents.blocks import PAGES, RUN, SHOWN, blocks_of, page_remarks, prose_of
from documents.output import difference
from documents.running import read_page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runs_here(page: Path) -> bool:
    """Whether blocks of the page are run by this file's test."""
    elsewhere = any(kind == "needs" for kind, _ in page_remarks(page))
    return not elsewhere and any(block.runs for block in blocks_of(page))


@pytest.mark.parametrize("page", list(filter(runs_here, PAGES)), ids=name_of)
def test_the_blocks_of_a_page_run_in_its_order(page, tmp_path):
    assert read_page(page, tmp_path) > 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_says_why_not(page):
    for block in blocks_of(page):
        assert block.language in (*RUN, *SHOWN), f"{block.place}: a block of {block.language!r}"
        if block.language in SHOWN:
            hidden = re.search(r"^(\$|>>>) .*", block.text, re.MULTILINE)
            assert not hidden, f"{block.place}: {hidden and hidden[0]!r}: write it as `console`"
        if block.language == "json":
            json.loads(block.text)
        if block.language == "yaml":
            assert yaml.safe_load(block.text), block.place
        if reason := block.remarks.get("not run"):
            assert len(reason.split()) > 2, f"{block.place}: {reason!r} explains nothing"
        if block.language == "console" and "file" not in block.remarks:
            assert block.text.startswith("$ "), f"{block.place}: no `$ ` at its beginning"
        if test := block.remarks.get("run by") or block.remarks.get("tested by"):
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file(), f"{block.place}: {file} is not there"
            assert f"def {function}(" in (ROOT / file).read_text(), f"{block.place}: no {test}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_stands_in_fences(page):
    """Indented code has no language: nobody would know whether to run it."""
    before, in_list = "", False
    for line in prose_of(page).splitlines():
        assert in_list or before or not re.match(r" {4}\S", line), line
        in_list = bool(re.match(r"\s*([-*]|\d+\.) ", line)) or (in_list and line[:1] in ("", " "))
        before = line.strip()


@pytest.mark.parametrize(
    ("shown", "said", "agree"),
    [
        ("36 samples, 1.2 MB", "5,012 samples, 340 kB", True),
        ("36 samples, 1.2 MB", "36 classes, 1.2 MB", False),
        ("GPUs ██░░ 6 of 16", "GPUs █░░░░ 1 of 2", True),
        ("a\n...\nz 3", "a\nb\nc\nz 4", True),
        ("a\n...\nz", "a\nb", False),
        ("packed into ... in 3 s", "packed into /tmp/x in 0.25 s", True),
        ("one", "one\ntwo", False),
        ("one\n...", "one\ntwo", True),
        ("one\ntwo", "one", False),
    ],
)
def test_output_agrees_but_for_numbers(shown, said, agree):
    assert (difference(shown, said) == "") is agree


def test_make_targets_that_are_named_exist():
    targets = set(
        re.findall(r"^([a-z][a-z -]*?):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    known = {word for target in targets for word in target.split()}
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= known, f"{name_of(page)}: {named - known}"


def test_benchmarks_that_are_named_exist():
    for page in PAGES:
        for name in re.findall(r"python -m benchmarks\.(\w+)", page.read_text()):
            assert (ROOT / f"benchmarks/{name}.py").is_file(), f"{name_of(page)}: benchmarks.{name}"


def anchors(page: Path) -> set[str]:
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for target in LINK.findall(prose_of(page)):
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


def test_decisions_have_their_numbers_and_are_found_by_topic():
    index = ROOT / "docs/decisions/index.md"
    pages = sorted(index.parent.glob("0*.md"))
    for page in pages:
        assert page.read_text().startswith(f"# {int(page.name[:4])}. "), page.name
    assert sorted(LINK.findall(prose_of(index))) == [page.name for page in pages]


def test_llms_txt_names_every_page_and_nothing_else():
    text = (ROOT / "docs/llms.txt").read_text()
    assert re.match(r"# headrace\n\n> ", text)
    named = {ROOT / "docs" / target for target in LINK.findall(text)}
    pages = {page for page in PAGES if "docs" in page.parts}
    decisions = {page for page in pages if re.match(r"\d{4}-", page.name)}
    assert named == pages - decisions - {ROOT / "docs/index.md"}


def test_the_landing_page_links_to_every_start():
    linked = set(LINK.findall(prose_of(ROOT / "docs/index.md")))
    assert {str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/start/*.md")} <= linked


def test_pictures_have_texts_and_are_small():
    for page in PAGES:
        text = prose_of(page)
        for tag in re.findall(r"<img\b[^>]*>", text):
            assert re.search(r'alt="[^"]{20,}"', tag), f"{name_of(page)}: {tag}"
        assert not re.search(r"!\[\s*\]\(", text), f"{name_of(page)}: a picture without a text"
        for source in re.findall(r'(?:src|srcset)="([^"]+)"', text):
            file = page.parent / source
            assert file.is_file(), f"{name_of(page)}: {source}"
            assert file.stat().st_size < 200_000, f"{name_of(page)}: {source} is too large"

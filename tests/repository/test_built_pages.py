"""The documentation as it is built: without a warning, every link leads somewhere, and it can be read by all.

What is checked of accessibility is what a machine can: headings in order, texts for pictures, names
for links and buttons, a language, a title, header cells.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

import browser
from contract.public_names import MODULES, exported
from documents.blocks import PAGES, page_remarks
from tests_shared import until

ROOT = Path(__file__).resolve().parents[2]
NAMED = ("a", "button", "summary", "title", *(f"h{n}" for n in range(1, 7)))

FIRST = "return document.querySelector('ul.search li a')?.pathname"
# Each search as if the page were opened with it, but for the other pages, which would be fetched to be cited.
SEARCH = f"""
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
return arguments[0].map((words) => {{
  history.replaceState(null, "", `?q=${{encodeURIComponent(words)}}`);
  document.getElementById("search-results").replaceChildren();
  Search.performSearch(words);
  {FIRST};
}});
"""
# A frame loads a page in a third of the time that a window takes.
WIDTHS = """
const frame = document.createElement("iframe");
frame.width = 400;
frame.src = arguments[0];
document.body.replaceChildren(frame);
return new Promise((done) => {
  frame.onload = () =>
    done([frame.contentWindow.innerWidth, frame.contentDocument.documentElement.scrollWidth]);
});
"""

GENERATED = ("genindex.html", "py-modindex.html", "search.html")  # Sphinx's own, laid out in tables


class Page(HTMLParser):
    """What there is on a page: anchors, links, headings, pictures, and what has no name."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.anchors: Counter[str] = Counter()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.headings: list[int] = []
        self.faults: list[str] = []
        self.language = ""
        self.title = ""
        self.tables = self.header_cells = 0
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        if "id" in found:
            self.anchors[found["id"]] += 1
        if tag == "html":
            self.language = found.get("lang", "")
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "source", "iframe"):
            self.loads += [found[key] for key in ("src", "srcset") if key in found]
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(found["href"])
        self._want_names(tag, found)
        self.tables += tag == "table"
        self.header_cells += tag == "th"
        if tag in NAMED:
            self._open.append((tag, found, []))

    def _want_names(self, tag: str, found: dict[str, str]) -> None:
        if tag == "img":
            if not found.get("alt", "").strip():
                self.faults.append(f"a picture without a text: {found.get('src')}")
            self._say(found.get("alt", ""))
        unseen = found.get("type") in ("hidden", "submit")
        if tag == "input" and not unseen and not {"aria-label", "placeholder"} & set(found):
            self.faults.append(f"a field without a name: {found}")

    def handle_data(self, data: str) -> None:
        self._say(data)

    def handle_endtag(self, tag: str) -> None:
        if not (self._open and self._open[-1][0] == tag):
            return
        _, found, texts = self._open.pop()
        name = "".join(texts).strip() or found.get("aria-label", "") or found.get("title", "")
        self._say(name)
        if tag == "title":
            self.title = self.title or name
        elif not name and ("href" in found or tag != "a"):
            self.faults.append(f"<{tag}> without a name: {found}")
        if tag[0] == "h" and tag[1:].isdigit():
            self.headings.append(int(tag[1:]))

    def _say(self, text: str) -> None:
        if self._open:
            self._open[-1][2].append(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built as `make docs` builds it."""
    pytest.importorskip("sphinx", reason="the group `docs` is not installed: make docs")
    out = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "-d",
         out.parent / "doctrees", ROOT / "docs", out],
        check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_built(site, pages):
    sources = {p.relative_to(ROOT / "docs").with_suffix("") for p in ROOT.glob("docs/**/*.md")}
    built = {path.relative_to(site).with_suffix("") for path in pages}
    assert {p for p in sources if "_build" not in p.parts} <= built


def test_every_public_name_is_in_the_index(site):
    """Whatever a program imports has a place in the reference, which search and other projects' links find."""
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    listed = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    missing = [
        f"{module}.{name}"
        for module in MODULES
        for name in sorted(exported(module))
        if not {f"{module}.{name}", f"headrace.{name}"} & listed and name != "__version__"
    ]
    assert missing == []


def test_every_link_leads_somewhere(site, pages):
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_another_host(site, pages):
    loads = {load for page in pages.values() for load in page.loads}
    assert [load for load in loads if urlsplit(load).netloc] == []


def test_the_pages_can_be_read_by_all(site, pages):
    faults = []
    for path, page in pages.items():
        name = path.relative_to(site)
        faults += [f"{name}: {fault}" for fault in page.faults]
        if page.language != "en" or not page.title.strip():
            faults.append(f"{name}: language {page.language!r}, title {page.title!r}")
        if page.headings.count(1) != 1 and name.name not in GENERATED:
            faults.append(f"{name}: {page.headings.count(1)} headings of the first rank")
        for above, below in zip(page.headings, page.headings[1:], strict=False):
            if below > above + 1:
                faults.append(f"{name}: a heading of rank {below} below one of rank {above}")
        doubled = {a for a, times in page.anchors.items() if times > 1}
        if doubled:
            faults.append(f"{name}: anchors twice: {doubled}")
    assert faults == []


def test_tables_have_header_cells(pages):
    bare = [path for path, page in pages.items() if page.header_cells < page.tables]
    assert [path for path in bare if path.name not in GENERATED] == []


@pytest.fixture(scope="module")
def window():
    if why := browser.missing():
        pytest.skip(why)
    opened = browser.Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def served(site):
    """The site's address: a browser lets no page of a folder fetch others."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_search_finds_each_page_first_by_the_words_that_it_names(served, window):
    words = {
        word: page.relative_to(ROOT / "docs").with_suffix("")
        for page in PAGES
        for kind, names in page_remarks(page)
        if kind == "found by"
        for word in names.split(", ")
    }
    assert words["slow training"] == Path("howto/doctor")
    window.open(f"{served}/search.html?q={quote('slow training')}")
    found = "return document.querySelector('.search-summary')?.textContent.includes('found')"
    until(lambda: window.run(found), 20.0)
    assert window.run(FIRST) == "/howto/doctor.html"
    assert window.run(SEARCH, list(words)) == [f"/{page}.html" for page in words.values()]


def test_wide_tables_scroll_in_their_own_box(site, pages, served, window):
    window.open(f"{served}/llms.txt")  # has no style
    wide = {}
    for path in pages:
        name = str(path.relative_to(site))
        if window.run(WIDTHS, f"{served}/{name}") != [400, 400]:
            window.open(path, width=400)
            wide[name] = window.too_wide()
            window.open(f"{served}/llms.txt")
    assert wide == {}


def test_the_sources_lie_beside_the_pages(site):
    assert (site / "llms.txt").is_file()
    assert (site / "index.md").read_bytes() == (ROOT / "docs/index.md").read_bytes()


def test_versions_beside_each_other_have_a_switch_that_needs_no_server(site, tmp_path, window):
    """The second version is this one under another name, without a page."""
    other, out = tmp_path / "older", tmp_path / "out"
    shutil.copytree(site, other)
    options = other / "_static/documentation_options.js"
    own = re.search(r"VERSION: '(.*)'", options.read_text())[1]
    options.write_text(options.read_text().replace(own, "0.0.9"))
    (other / "howto/node.html").unlink()
    switch, choose = "[aria-label^='Version']", "document.querySelector(arguments[0])"
    for given, versions in ((site, [own]), (other, [own, "0.0.9"])):
        done = subprocess.run(
            [sys.executable, ROOT / "tools/site", out, given],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout == f"{out / 'index.html'}: {', '.join(versions)}\n"
        window.open(out / own / "howto/run.html")
        assert len(window.visible(switch)) == len(versions) - 1
    for page, there in (("run", "howto/run.html"), ("node", "index.html")):
        window.open(out / own / f"howto/{page}.html")
        window.run(f"{choose}.value = '0.0.9'; {choose}.dispatchEvent(new Event('change'))", switch)
        until(lambda there=there: window.driver.current_url.endswith(f"/0.0.9/{there}"))
        assert window.run(f"return {choose}.value", switch) == "0.0.9"
    assert (out / "index.html").read_text().count(f"{own}/index.html") == 2
    refused = subprocess.run([sys.executable, ROOT / "tools/site", out, tmp_path],
                             check=False, capture_output=True, text=True)  # fmt: skip
    assert refused.returncode == 1
    assert "these are no built pages. next: make docs" in refused.stderr

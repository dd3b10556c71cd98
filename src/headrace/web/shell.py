"""Shell: the HTML around every page, and the files that pages load. Written once, at start."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import Final, NamedTuple

from headrace import __version__
from headrace.base.causes import Cause
from headrace.pages.html import STYLE, safe

_FOLDER: Final = Path(__file__).parent / "static"

_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class WebPage(NamedTuple):
    """A page: its file of HTML in `static` is what stands in the middle.

    `loads` are other scripts that it loads, so that a browser need not find out one by one.
    """

    path: str
    title: str
    file: str
    script: str
    loads: tuple[str, ...] = ("core.js",)
    in_menu: bool = True

    @property
    def menu(self) -> str:
        """What it is called in the menu."""
        return "Runs" if self.path == "/job" else self.title


PAGES: Final = (
    WebPage("/", "Cluster", "cluster.html", "cluster.js", ("core.js", "charts.js", "grid.js")),
    WebPage("/starving", "Starving", "starving.html", "starving.js"),
    WebPage("/storage", "File systems", "storage.html", "storage.js", ("core.js", "charts.js")),
    WebPage("/policies", "Policies", "policies.html", "policies.js"),
    WebPage("/stores", "Stores", "stores.html", "stores.js"),
    WebPage("/job", "Job", "job.html", "job.js", ("core.js", "charts.js"), in_menu=False),
    WebPage("/signin", "Sign in", "signin.html", "", in_menu=False),
)


_CAUSES: Final = b"export const CAUSES = {}"

_COLOURS: Final = {
    Cause.PREFETCH: "rest", Cause.POLICY: "rest", Cause.WINDOW: "rest", Cause.DIRECT: "b4",
    Cause.NODE: "rest", Cause.METADATA: "b1", Cause.STORAGE: "b1", Cause.LATENCY: "b4",
    Cause.BANDWIDTH: "b6", Cause.NETWORK: "b5", Cause.PEER: "b5", Cause.MEMORY: "b0",
    Cause.DECODE: "b0", Cause.PYTHON: "b2", Cause.COLLATE: "b2", Cause.TRANSFER: "b3",
    Cause.SLOW_RANK: "b3", Cause.OTHER: "rest",
}  # fmt: skip
"""The class of each cause's colour."""


def files() -> dict[str, tuple[bytes, str]]:
    """What pages load, by name: bytes and type."""
    by_name = {
        path.name: (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _TYPES
    }
    by_name["pages.css"] = STYLE.encode(), _TYPES[".css"]
    script, kind = by_name["core.js"]
    causes = json.dumps({each: [_COLOURS[each], each.phrase] for each in Cause}).encode()
    assert _CAUSES in script
    by_name["core.js"] = script.replace(_CAUSES, _CAUSES[:-2] + causes), kind
    return by_name


def document(page: WebPage, *, label: str, who: str, problem: str = "", runs: bool = False) -> str:
    """A page."""
    shown = [each for each in PAGES if each.in_menu or (runs and each.path == "/job")]
    menu = "".join(
        f'<li><a href="{each.path}"{" aria-current=page" if each is page else ""}>{each.menu}</a></li>'
        for each in shown
    )
    if who:
        door = (
            f'<form method="post" action="/signout"><span>{safe(who)}</span> '
            '<button class="quiet">Sign out</button></form>'
        )
    else:
        door = '<a href="/signin">Sign in</a>'
    banner = (
        f'<p class="banner"><strong>{safe(label)}</strong> The cluster, its users and its jobs '
        "are made up by a seeded model.</p>"
        if label
        else ""
    )
    scripts = ""
    if page.script:
        loads = (f'<link rel="modulepreload" href="/static/{name}">' for name in page.loads)
        scripts = "".join((*loads, f'<script type="module" src="/static/{page.script}"></script>'))
    alert = f'<p class="problem" role="alert">{safe(problem)}</p>' if problem else ""
    body = (_FOLDER / page.file).read_text(encoding="utf-8").replace("<!--said-->", alert)
    return Template((_FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        title=page.title, path=page.path, who=safe(who), menu=menu, door=door, banner=banner,
        scripts=scripts, body=body, version=safe(__version__),
    )  # fmt: skip

"""What makes a page usable for everybody, checked over a browser's DOM: names, roles, order, contrast.

Each problem is a sentence. Contrast is that of WCAG 2.2, from computed styles; what is disabled is exempt.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TEXT_LEAST, LARGE_LEAST = 4.5, 3.0
TARGET_LEAST = 24  # WCAG 2.5.8
HEADINGS = re.compile(r"H([1-6])")
ROLES = {
    "alert", "grid", "gridcell", "img", "region", "row", "search", "status", "columnheader", "rowheader",
}  # fmt: skip
STATES = {
    "aria-activedescendant", "aria-colcount", "aria-colindex", "aria-current", "aria-describedby",
    "aria-hidden", "aria-label", "aria-labelledby", "aria-live", "aria-pressed", "aria-rowcount",
    "aria-rowindex", "aria-sort",
}  # fmt: skip

_GATHERED = {
    "unnamed": "has no name", "tabindex": "changes the order of tabs", "nested": "acts within another",
    "images": "is a picture that says nothing", "tables": "has no heads",
    "scrolls": "scrolls, but not by keys", "lists": "is in no list", "small": "is too small to hit",
    "styled": "has a script in it",
}  # fmt: skip

_LOOK = Path(__file__).with_suffix(".js").read_text()


def colour(text: str) -> tuple[float, float, float, float]:
    """A computed colour, 0..1 each."""
    numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)]
    if text.startswith("color("):  # color(srgb r g b / a)
        red, green, blue, *rest = numbers
        return red, green, blue, rest[0] if rest else 1.0
    red, green, blue, *rest = numbers
    return red / 255, green / 255, blue / 255, rest[0] if rest else 1.0


def over(top: tuple[float, ...], below: tuple[float, ...]) -> tuple[float, float, float, float]:
    """One colour painted on another."""
    a = top[3]
    r, g, b = (a * t + (1 - a) * u for t, u in zip(top[:3], below[:3], strict=True))
    return r, g, b, 1.0


def contrast(ink: str, papers: list[str]) -> float:
    """WCAG's ratio, 1 to 21; `papers` from the text's own outwards."""
    paper: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    for each in reversed(papers):
        paper = over(colour(each), paper)
    light, dark = sorted((_luminance(over(colour(ink), paper)), _luminance(paper)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(rgb: tuple[float, ...]) -> float:
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb[:3])
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def problems(browser: Any) -> list[str]:
    """What is wrong with the page that is open."""
    seen = browser.run(_LOOK.replace("TARGET", str(TARGET_LEAST)))
    faults = []
    if not re.fullmatch(r"[a-z]{2}(-[A-Z]{2})?", seen["lang"]):
        faults.append(f"the page's language is {seen['lang']!r}")
    if not seen["title"].strip():
        faults.append("the page has no title")
    levels = [int(HEADINGS.fullmatch(tag)[1]) for tag, _ in seen["headings"]]
    if levels.count(1) != 1:
        faults.append(f"the page has {levels.count(1)} headings of the first level")
    jumps = [b for a, b in zip([0, *levels], levels, strict=False) if b > a + 1]
    faults += [f"a heading of level {level} skips one: {seen['headings']}" for level in jumps]
    faults += [f"an empty {tag}" for tag, text in seen["headings"] if not text]
    if seen["mains"] != 1:
        faults.append(f"the page has {seen['mains']} main parts")
    if not seen["navs"] or not all(seen["navs"]):
        faults.append("its menu has no name")
    ids = seen["ids"]
    faults += [f"the id {each!r} is there twice" for each in {i for i in ids if ids.count(i) > 1}]
    faults += [f"{who}: {attribute} names {to!r}, which is not there" for who, attribute, to in seen["refs"]
              if to not in ids]  # fmt: skip
    faults += [f"{who}: role {role!r}" for who, role, _ in seen["roles"] if role not in ROLES]
    inside = {"gridcell": "row", "row": "grid"}
    faults += [f"{who}: a {role} within {parent!r}" for who, role, parent in seen["roles"]
              if inside.get(role, parent) != parent]  # fmt: skip
    faults += [f"{who}: {state}" for who, state, _ in seen["states"] if state not in STATES]
    for what, text in _GATHERED.items():
        faults += [f"{each} {text}" for each in seen[what]]
    for who, ink, papers, size, weight in seen["texts"]:
        large = size >= 24 or (size >= 18.66 and weight >= 700)
        ratio = contrast(ink, papers)
        if ratio < (LARGE_LEAST if large else TEXT_LEAST):
            faults.append(f"{who}: contrast {ratio:.2f}, {ink} on {papers}")
    return faults

"""Document: the page around pictures and tables: one HTML file that works offline and in which nothing acts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.pages.style import STYLE
from headrace.pages.text import safe

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["POLICY", "document"]

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may do with a page of ours: show it, and nothing else."""


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """The page.

    Args:
        title: of the window; escaped here.
        parts: HTML, from top to bottom; empty ones are left out.
        style: CSS beside that of all pages.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{STYLE}{style}</style></head>\n<body>"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )

"""Card: a small box of figures for notebooks: HTML that needs no style sheet, no script and no address.

It takes the notebook's own colours, light or dark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.pages.text import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["card"]

_BOX: Final = (
    "display:inline-block;max-width:44rem;border:1px solid rgba(128,128,128,.4);border-radius:6px;"
    "padding:8px 14px;font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;"
    "font-variant-numeric:tabular-nums"
)
_SOFT: Final = "opacity:.75"
_NAME: Final = f"text-align:left;font-weight:400;{_SOFT};padding:1px 12px 1px 0"
_VALUE: Final = "text-align:left;padding:1px 0;overflow-wrap:anywhere"
_BAR: Final = (
    "display:flex;height:8px;margin:6px 0 2px;border-radius:4px;overflow:hidden;background:#3f8cc0"
)


def card(
    title: str, rows: Sequence[tuple[str, object]], *, waited: float | None = None, note: str = ""
) -> str:
    """The card.

    Args:
        title: in bold; all texts are escaped here.
        rows: names and values, from top to bottom.
        waited: share of the time that was waited for data, drawn as a bar; None: nothing is known.
        note: a line below.
    """
    lines = "".join(
        f'<tr style="background:none"><th style="{_NAME}">{safe(name)}</th>'
        f'<td style="{_VALUE}">{safe(value)}</td></tr>'
        for name, value in rows
    )
    return (
        f'<div style="{_BOX}"><div style="font-weight:600;overflow-wrap:anywhere">{safe(title)}</div>'
        f'{_bar(waited)}<table style="border-collapse:collapse;margin:4px 0 0">{lines}</table>'
        + (f'<div style="{_SOFT};margin-top:4px">{safe(note)}</div>' if note else "")
        + "</div>"
    )


def _bar(waited: float | None) -> str:
    if waited is None:
        return ""
    share = 100.0 * min(1.0, max(0.0, waited))
    said = f"{share:.1f} % of the time waited for data"
    return (
        f'<div role="img" aria-label="{said}" style="{_BAR}">'
        f'<div style="width:{share:.1f}%;background:#d55e00"></div></div><div style="{_SOFT}">{said}</div>'
    )

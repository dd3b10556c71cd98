"""Output: whether a command said what its page shows. Words must be the same, numbers need not."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["difference"]

_NUMBER: Final = r"[-+]?\d[\d.,:]*"
_UNIT: Final = r"(?:[kMGT]?i?B(?:/s)?|[µmn]?s|min|h)"
_BAR: Final = "█▇▆▅▄▃▂▁░▒▓·"
_TOKEN: Final = re.compile(
    rf"(?P<any>\.\.\.)|(?P<number>{_NUMBER})(?P<unit> ?{_UNIT}\b)?|(?P<bar>[{_BAR}]+)|(?P<space>[ \t]+)"
)


def difference(shown: str, said: str) -> str:
    """What a page shows against what a command said; empty if they agree.

    A number (and its unit, from its family) stands for any other, a bar for any bar, spaces for
    spaces, `...` for any text in its line, and a line of it alone for any lines.
    """
    wanted = [line.rstrip() for line in shown.strip("\n").splitlines()]
    heard = [line.rstrip() for line in said.strip("\n").splitlines()]
    at = 0
    anywhere = False
    for line in wanted:
        if line.strip() == "...":
            anywhere = True
            continue
        pattern = re.compile(_pattern(line))
        while at < len(heard) and anywhere and not pattern.fullmatch(heard[at]):
            at += 1
        if at == len(heard) or not pattern.fullmatch(heard[at]):
            return f"shown:   {line}\nsaid:    {heard[at] if at < len(heard) else 'nothing more'}"
        at += 1
        anywhere = False
    if at < len(heard) and not anywhere:
        return f"said and not shown: {heard[at]}"
    return ""


def _pattern(line: str) -> str:
    parts, at = [], 0
    for token in _TOKEN.finditer(line):
        parts.append(re.escape(line[at : token.start()]))
        if token["any"]:
            parts.append(".*")
        elif token["number"]:
            parts.append(_NUMBER + (rf" ?{_UNIT}" if token["unit"] else ""))
        elif token["bar"]:
            parts.append(f"[{_BAR}]*")
        else:
            parts.append(r"\s+" if token.start() else r"\s*")
        at = token.end()
    return "".join(parts) + re.escape(line[at:])

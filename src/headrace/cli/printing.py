"""What a command prints: its result on stdout, everything else on stderr.

With `--json`, stdout carries one JSON document and nothing else, errors included. Colours and bars are
for terminals (rich looks at `NO_COLOR` and at the stream). Apart from typer, which takes a third of the time in
which `swbatch` is done.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from headrace.base.text import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Output", "plain", "printable"]

_FILE_COLUMNS = 160
"""Width where there is no terminal: tables in a log need not be squeezed."""


class Output:
    """Where one command prints.

    Args:
        as_json: the result is a JSON document.
        quiet: nothing on stderr but errors.
        verbose: remarks that most do not need.
    """

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose

    def console(self, *, stderr: bool = False) -> Console:
        """A rich console; made anew, because tests and pipes exchange the streams."""
        from rich.console import Console

        console = Console(stderr=stderr, highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _FILE_COLUMNS
        return console

    def document(self, data: dict[str, Any]) -> None:
        r"""The result as JSON. Names that are not UTF-8 come as `\udcXX`, as Python has them."""
        json.dump(data, sys.stdout, indent=2, default=plain)
        sys.stdout.write("\n")

    def line(self, text: str) -> None:
        """One line of the result."""
        sys.stdout.write(printable(text, lines=True) + "\n")

    def remark(self, text: str) -> None:
        """Something worth knowing beside the result."""
        if not self.quiet:
            print(printable(text, lines=True), file=sys.stderr)


def plain(value: Any) -> Any:
    """JSON's form of numpy scalars, arrays, bytes, paths and dataclasses."""
    import dataclasses

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return os.fsdecode(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")

"""Printing: what a command prints: its result on stdout, everything else on stderr; and how it ends.

With `--json`, stdout carries one JSON document and nothing else, errors included. Colours and bars are
for terminals (rich looks at `NO_COLOR` and at the stream). Imports no typer, which takes a third of the
time in which `swbatch` is done.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import traceback
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.base.extras import EXTRAS, missing_package
from headrace.base.lifetime import Latch
from headrace.base.text import printable
from headrace.cli import exit_codes
from headrace.errors import HeadraceError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table


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

    def console(self) -> Console:
        """A rich console; made anew, because tests and pipes exchange the streams."""
        from rich.console import Console

        console = Console(highlight=False, markup=False)  # names are of any origin
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

    def result(self, document: dict[str, Any], *lines: str) -> None:
        """The result: the document with `--json`, else the lines."""
        if self.as_json:
            self.document(document)
        else:
            for line in lines:
                self.line(line)

    def write(self, path: str | None, text: Callable[[], str]) -> None:
        """Write a file that an option asks for, whole or not at all, and say so; nothing without a path."""
        if path is None:
            return
        from headrace.base.files import replace_file

        file, data = Path(path), text().encode()
        try:
            if file.is_symlink() or (file.exists() and not file.is_file()):
                file.write_bytes(data)  # through a link or into a device, never in its place
            else:
                replace_file(path, data, sync=False)
        except OSError as e:
            raise OSError(e.errno, e.strerror, path) from e
        self.remark(f"wrote {path}")

    def remark(self, text: str) -> None:
        """Something worth knowing beside the result."""
        if not self.quiet:
            print(printable(text, lines=True), file=sys.stderr)


def plain_table(
    *columns: str, title: str | None = None, rows: Iterable[Sequence[str]] = (), **options: Any
) -> Table:
    """A table without lines; columns whose names end in `>` are numbers; `options` are of all columns."""
    from rich.text import Text

    table = _table_class()(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False,
        padding=(0, 2, 0, 0), header_style="dim",
    )  # fmt: skip
    for name in columns:
        justify: Any = "right" if name.endswith(">") else "left"
        own: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"} | options
        table.add_column(name.rstrip(">"), justify=justify, **own)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


@cache
def _table_class() -> type[Table]:
    from rich.segment import Segment
    from rich.table import Table

    class Trimmed(Table):
        """Without blanks at the ends of lines, which `diff` and whoever copies would meet."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            cells = cast("Iterable[Segment]", super().__rich_console__(console, options))
            for line in Segment.split_lines(cells):
                while line and not line[-1].text.strip():
                    line.pop()
                yield from line[:-1]
                yield from (Segment(text.rstrip(), style) for text, style, _ in line[-1:])
                yield Segment.line()

    return Trimmed


def cut(text: str, room: int) -> str:
    """A name of any origin in so many columns."""
    text = printable(text)
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"


def stall_style(share: float) -> str:
    """How the share of time that is lost to waiting for data is shown."""
    return "red" if share > 0.25 else "yellow" if share > 0.05 else ""


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


def write_json(where: str | os.PathLike[str], document: object) -> None:
    """Write a report into a file; "-" is stdout."""
    text = json.dumps(document, indent=2, default=plain) + "\n"
    if where == "-":
        sys.stdout.write(text)
    else:
        Path(where).write_text(text, encoding="utf-8")


_WORDS = (
    ("pass overwrite=True", "give --overwrite"),
    ("overwrite=True", "--overwrite"),
    ("pass on_error='skip'", "give --skip-errors"),
    ("pass resume=False", "give --restart"),
    ("headrace.pack(source, target)", "headrace pack SOURCE TARGET"),
    ("headrace.pack()", "headrace pack"),
    ("headrace.index()", "headrace index"),
    ("The names are in `store.names`.", "`headrace ls` lists the names."),
    ("name one, part=", "name one, --part "),
)
"""The library speaks Python; here the same advice is an option."""


_NEXT_STEPS = {
    errno.ENOENT: "Check the path, and that the folder above it exists.",
    errno.ENOTDIR: "Check the path: a file stands where a folder is meant.",
    errno.EISDIR: "Name a file: this is a folder.",
    errno.EACCES: "Ask its owner for access, or name another place.",
    errno.EPERM: "Ask its owner for access, or name another place.",
    errno.EROFS: "Name a place that can be written: this file system is read-only.",
    errno.ENOSPC: "Free some space, or name another place.",
}
"""After errors of the system that nobody below has explained."""


def report(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Prints the error and returns the exit code.

    Args:
        error: what a command raised; the first note of a KeyboardInterrupt says what was kept.
        as_json: print a JSON document on stdout; else text on stderr.
        verbose: with the traceback.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        error = missing_package(error, error.name, "this command")
    if isinstance(error, KeyboardInterrupt):
        code, next_step = exit_codes.INTERRUPTED, next(iter(getattr(error, "__notes__", ())), None)
        message = "interrupted"
    elif isinstance(error, HeadraceError):
        wrong_words = isinstance(error, WorkloadError)
        code = exit_codes.USAGE if wrong_words else exit_codes.STORE_ERROR
        next_step = error.next_step or _NEXT_STEPS.get(getattr(error, "errno", None) or 0)
        message = error.message
    elif isinstance(error, (ValueError, TypeError)):
        code, next_step = exit_codes.USAGE, None
        message = str(error)
    elif isinstance(error, OSError):
        code, next_step = exit_codes.STORE_ERROR, _NEXT_STEPS.get(error.errno or 0)
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}"
    else:
        code, verbose = exit_codes.BUG, True
        message = f"headrace failed: {type(error).__name__}: {error}"
        next_step = "This is a mistake in headrace; please report it with the traceback above."
    message = _in_our_words(message)
    next_step = _in_our_words(next_step) if next_step else None
    if verbose and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error, file=sys.stderr)
    if as_json:
        known = {
            n: getattr(error, n, None) for n in ("path", "offset_bytes", "errno", "index", "name")
        }
        details = {"type": type(error).__name__, "message": message} | {
            name: value for name, value in known.items() if isinstance(value, (str, int))
        }
        json.dump({"error": {**details, "next_step": next_step}}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif isinstance(error, KeyboardInterrupt):
        print(": ".join(filter(None, (message, next_step))), file=sys.stderr)
    else:
        print(f"error: {printable(message, lines=True)}", file=sys.stderr)
        if next_step:
            print(f"  next: {printable(next_step, lines=True)}", file=sys.stderr)
    return code


def _in_our_words(text: str) -> str:
    for python, ours in _WORDS:
        text = text.replace(python, ours)
    return text


def log_to_stderr() -> None:
    """Log there what a daemon in the foreground has to say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("headrace")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


@contextmanager
def interrupt() -> Iterator[Latch]:
    """A latch that Ctrl-C opens. The exception would be lost in a finaliser now and then."""
    ended = Latch()
    before = signal.signal(signal.SIGINT, lambda *_: ended.set())
    try:
        yield ended
    finally:
        signal.signal(signal.SIGINT, before)


def watch(
    output: Output, first: RenderableType, frame: Callable[[int], RenderableType], every_s: float
) -> None:
    """Show frame after frame until Ctrl-C: on a screen of its own, or, in a log, one below the other.

    Args:
        output: the command's.
        first: what a terminal shows until the next.
        frame: the next one, for so many columns.
        every_s: seconds between them.
    """
    console = output.console()
    with interrupt() as ended:
        if not sys.stdout.isatty():
            while not ended.wait(every_s):
                console.print(frame(console.width))
                sys.stdout.flush()
            return
        from rich.live import Live

        with Live(first, console=console, screen=True, auto_refresh=False) as live:
            while not ended.wait(every_s):
                live.update(frame(console.width), refresh=True)

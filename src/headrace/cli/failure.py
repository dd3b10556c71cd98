"""How a command ends when something is wrong: what, where, found, expected, the next step."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from headrace.base.text import printable
from headrace.cli import exit_codes

__all__ = ["report"]

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

_EXTRAS = {
    "msgspec": "node", "yaml": "bench", "PIL": "demo", "torch": "torch", "tensorflow": "tensorflow",
    "jax": "jax", "grain": "jax", "starlette": "control", "uvicorn": "control", "pynvml": "gpu",
    "prometheus_client": "metrics", "obstore": "objects", "fsspec": "fsspec", "h5py": "hdf5",
    "pyarrow": "arrow", "array_record": "array-record", "datasets": "hf",
}  # fmt: skip
"""Which extra brings a module that headrace itself does not need."""


def report(error: BaseException, *, as_json: bool, verbose: bool) -> int:
    """Prints the error and returns the exit code.

    Args:
        error: what a command raised.
        as_json: print a JSON document on stdout; else text on stderr.
        verbose: with the traceback.
    """
    from headrace.errors import HeadraceError, WorkloadError

    if isinstance(error, KeyboardInterrupt):
        code, next_step = exit_codes.INTERRUPTED, next(iter(getattr(error, "__notes__", ())), None)
        message = "interrupted"
    elif isinstance(error, HeadraceError):
        wrong_words = isinstance(error, WorkloadError)
        code = exit_codes.USAGE if wrong_words else exit_codes.STORE_ERROR
        next_step = error.next_step
        message = error.message
    elif isinstance(error, (ValueError, TypeError)):
        code, next_step = exit_codes.USAGE, None
        message = str(error)
    elif isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        code, next_step = exit_codes.STORE_ERROR, f"pip install 'headrace[{_EXTRAS[error.name]}]'"
        message = f"this command needs {error.name}, which is not installed."
    elif isinstance(error, OSError):
        code, next_step = exit_codes.STORE_ERROR, None
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
        _print_json(error, message, next_step)
    else:
        print(f"error: {printable(message, lines=True)}", file=sys.stderr)
        if next_step:
            print(f"  next: {printable(next_step, lines=True)}", file=sys.stderr)
    return code


def _in_our_words(text: str) -> str:
    for python, ours in _WORDS:
        text = text.replace(python, ours)
    return text


def _print_json(error: BaseException, message: str, next_step: str | None) -> None:
    details: dict[str, Any] = {"type": type(error).__name__, "message": message}
    for name in ("path", "offset_bytes", "errno", "index", "name"):
        value = getattr(error, name, None)
        if value is not None and isinstance(value, (str, int)):
            details[name] = value
    details["next_step"] = next_step
    json.dump({"error": details}, sys.stdout, indent=2)
    sys.stdout.write("\n")

"""`--storage-option`: how the command line says where an object store is and who asks."""

from __future__ import annotations

from typing import Annotated, Any

import typer

__all__ = ["StorageOptions", "storage_options"]

StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        "-O",
        help="URLs: KEY=VALUE for the object store (endpoint, region, skip_signature, ...); repeat. "
        "Secrets belong into the environment (AWS_SECRET_ACCESS_KEY, ...).",
        metavar="KEY=VALUE",
    ),
]

TrustOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        help="A folder, file or URL that a store made elsewhere may read, once and from now on; "
        "may be repeated.",
        metavar="PLACE",
    ),
]

_WORDS = {"true": True, "false": False, "none": None}


def storage_options(given: list[str] | None) -> dict[str, Any] | None:
    """The options as the library takes them; None where none were given.

    Raises:
        ValueError: one is no KEY=VALUE, or a secret itself.
    """
    options: dict[str, Any] = {}
    for each in given or []:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise ValueError(f"--storage-option is {each!r}, expected KEY=VALUE")
        if value.startswith("DHHC-1:"):  # every user of the machine can read a command line
            raise ValueError(
                f"--storage-option {key} is a secret on the command line. Use {key}=file:PATH or "
                f"{key}=env:NAME, or HEADRACE_DHCHAP_SECRET_FILE."
            )
        options[key] = _value(key, value)
    return options or None


def _value(key: str, text: str) -> Any:
    """Our own numbers as numbers; what the client gets stays text, which it parses itself."""
    from dataclasses import fields

    from headrace.io.objects.options import ReadPolicy

    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    kinds = {f.name: str(f.type) for f in fields(ReadPolicy)}
    if kinds.get(key) == "int":
        return int(text)
    return float(text) if kinds.get(key, "").startswith("float") else text

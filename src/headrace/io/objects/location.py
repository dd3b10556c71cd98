"""Where an object lies: URLs taken apart and put together.

A URL of an object store is `scheme://bucket/key`, and its key is taken as it stands (spaces, `#`, `%`
and all), as the stores' own tools do. Only `http(s)` URLs are percent-encoded and may carry a query,
which often is a secret: `shown` leaves it out, and whatever is printed goes through `shown`.
"""

from __future__ import annotations

import os
import re

_SCHEME = re.compile(r"([a-z][a-z0-9+.\-]*)(?:::|://)", re.IGNORECASE)
_USER = re.compile(r"//[^/@]*@")
_MAGIC = re.compile(r"[*?\[]")
_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")

EXPANSION_MAX = 1_000_000
"""Most names that one `{000..999}` may stand for."""

HTTP = ("http", "https")


def is_url(text: object) -> bool:
    """Whether `text` names an object rather than a local file; `file://` is a local file."""
    return isinstance(text, str) and (m := _SCHEME.match(text)) is not None and m[1] != "file"


def local_path(path: str | os.PathLike[str]) -> str:
    """A URL as it is, `file://` and anything else as an absolute path."""
    text = os.fsdecode(path)
    return text if is_url(text) else os.path.abspath(text.removeprefix("file://"))  # noqa: PTH100 - `..` is not resolved


def scheme_of(url: str) -> str:
    """`s3`, `https`, ...; of a chained fsspec URL the outermost."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        raise ValueError(f"{url!r} is no URL, expected scheme://...")
    return scheme[1].lower()


def root_of(url: str) -> str:
    """Scheme and bucket (or host): what one set of credentials and one connection pool serve."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.partition('/')[0].partition('?')[0]}"


def key_of(url: str) -> str:
    """The object's name below its root."""
    return url.partition("://")[2].partition("/")[2]


def join(folder: str, name: str) -> str:
    """The path or URL of `name` below `folder`; a query stays at the end."""
    if not is_url(folder) or scheme_of(folder) not in HTTP:
        return f"{folder.rstrip('/')}/{name}"
    path, question, query = folder.partition("?")
    return f"{path.rstrip('/')}/{name}{question}{query}"


def base_name(url: str) -> str:
    """What stands after the last `/`, without a query."""
    path = url.partition("?")[0] if scheme_of(url) in HTTP else url
    return path.rstrip("/").rpartition("/")[2]


def shown(url: str) -> str:
    """The URL without what may be a secret: user, password, query."""
    if is_url(url) and scheme_of(url) in HTTP:
        url = url.partition("?")[0]
    return _USER.sub("//", url, count=1)


def has_magic(url: str) -> bool:
    """Whether the URL is a pattern. A `?` of an http URL begins its query."""
    return _MAGIC.search(url.partition("?")[0] if scheme_of(url) in HTTP else url) is not None


def is_pattern(url: str) -> bool:
    """Whether the URL may stand for several objects."""
    return has_magic(url) or _NUMBERS.search(url) is not None


def literal_folder(pattern: str) -> str:
    """The longest folder without pattern characters: what has to be listed."""
    magic = _MAGIC.search(pattern)
    return pattern[: magic.start() if magic else len(pattern)].rpartition("/")[0]


def matches(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern: `*` and `?` stop at `/`, `**` does not."""
    out = []
    at = 0
    while at < len(pattern):
        if pattern.startswith("**", at):
            out.append(".*")
            at += 2
            continue
        c = pattern[at]
        end = pattern.find("]", at + 2) if c == "[" else -1
        if end > 0:
            inside = pattern[at + 1 : end].replace("\\", r"\\")
            out.append(f"[{'^' + inside[1:] if inside[0] in '!^' else inside}]")
            at = end
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(c, re.escape(c)))
        at += 1
    return re.compile("".join(out) + r"\Z", re.DOTALL)


def expand_numbers(url: str) -> list[str]:
    """`shard-{000..002}.tar` as its three names; other URLs as they are."""
    numbers = _NUMBERS.search(url)
    if numbers is None:
        return [url]
    first, last = int(numbers[1]), int(numbers[2])
    if not 0 <= last - first < EXPANSION_MAX:
        raise ValueError(
            f"{numbers[0]} of {url!r} counts {last - first + 1} names, expected 1 or more"
        )
    width = len(numbers[1]) if numbers[1].startswith("0") else 0
    return [
        name
        for number in range(first, last + 1)
        for name in expand_numbers(
            f"{url[: numbers.start()]}{number:0{width}d}{url[numbers.end() :]}"
        )
    ]

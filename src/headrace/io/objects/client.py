"""obstore's clients: made when first needed, one per bucket, never used across a fork.

obstore runs a thread pool of its own that a forked child does not have: a call there would never
return. Reads therefore go over our own connections to URLs that obstore signs (`addresses`), and a
forked child asks a fresh interpreter for the signatures.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.errors import VolumeError
from headrace.io.objects.location import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"})
"""URLs that obstore serves."""

_TIMEOUT_S = 60

_used_by: int | None = None


def after_fork() -> bool:
    """Whether obstore was in use before this process was forked, so that it may not be used here."""
    return _used_by is not None and _used_by != os.getpid()


def make_client(root: str, options: Mapping[str, Any]) -> Any:
    """A new obstore store for a bucket. It has not fetched credentials yet.

    Raises:
        VolumeError: obstore is not installed, does not take these options, or this process was forked
            from one that used it.
    """
    global _used_by  # noqa: PLW0603 - what a fork inherits is the process's state
    if after_fork():
        raise VolumeError(
            f"{shown(root)}: cannot be listed or written in a process that was forked after headrace "
            "used the object store.",
            path=shown(root),
            next_step="Do it in the main process, or start workers with spawn.",
        )
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as e:
        raise VolumeError(
            f"{shown(root)}: reading {root.partition(':')[0]}:// needs the package obstore.",
            path=shown(root),
            next_step="pip install 'headrace[objects]'",
        ) from e
    _used_by = os.getpid()
    given = dict(options)
    client: Any = dict(given.pop("client_options", None) or {})
    if "allow_http" in given:
        client["allow_http"] = given.pop("allow_http")
    elif _endpoint(given).startswith("http://"):
        client.setdefault("allow_http", True)
    retry: Any = given.pop("retry_config", None) or {"retry_timeout": timedelta(seconds=_TIMEOUT_S)}
    try:
        return from_url(root, client_options=client or None, retry_config=retry, **given)
    except (BaseError, ValueError, TypeError, KeyError) as e:
        raise VolumeError(
            f"{shown(root)}: obstore does not take these options ({', '.join(sorted(given))}): "
            f"{first_line(e)}.",
            path=shown(root),
            next_step="See docs/howto/object-stores.md for endpoints and credentials.",
        ) from e


def _endpoint(given: Mapping[str, Any]) -> str:
    """The endpoint that was asked for; one without TLS is meant so."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    stated = given.get("endpoint") or given.get("endpoint_url")
    return str(stated or next((os.environ[n] for n in names if n in os.environ), ""))


def first_line(error: BaseException) -> str:
    """Obstore's errors end in a page of debugging; the first line is for people."""
    return str(error).partition("\n")[0].rstrip(".")

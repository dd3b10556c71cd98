"""Clients of obstore, and the addresses of objects: plain, or signed by obstore for an hour.

obstore runs a thread pool of its own that a forked child does not have: a call there would never
return. Reads therefore go over our own connections to URLs that obstore signs, and a forked child asks a
fresh interpreter for the signatures. One signature serves all ranges of an object, so reading costs no
signing. When a server says that the credentials have expired, `refresh` makes a new client, which asks the
credential provider (or the environment, or the metadata service of the instance) again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.base.extras import missing_package
from headrace.errors import VolumeError
from headrace.io.objects.faults import Fault
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
        raise missing_package(e, "obstore", f"reading {shown(root)}") from e
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


VALID_S = 3600
_RENEW_S = 3000
"""An address older than this is signed again; the rest is for the request itself."""

_ELSEWHERE_S = 60


class Addresses:
    """Where the objects of a web server are reached: the URL is the address.

    Args:
        root: scheme and host, or bucket.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def known(self, key: str) -> str | None:
        """The URL of an object where it can be said at once."""
        return f"{self._root}/{key}"

    def __call__(self, key: str) -> str:
        """The URL of an object; may block. Thread-safe."""
        return f"{self._root}/{key}"

    def refresh(self) -> bool:
        """Fetches credentials anew; False where there are none."""
        return False


class SignedAddresses(Addresses):
    """Objects of a bucket: URLs that obstore signs, or unsigned ones with `skip_signature`."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        super().__init__(root)
        self._options = dict(options)
        self._anonymous = str(self._options.get("skip_signature", "")).lower() in ("true", "1")
        if self._anonymous:
            # Any key pair makes an address; the signature is then cut off.
            del self._options["skip_signature"]
            self._options |= {"access_key_id": "none", "secret_access_key": "none"}
        self._client: Any = None
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, str]] = {}

    def known(self, key: str) -> str | None:
        """The URL of an object, if it was signed not long ago."""
        signed = self._known.get(key)
        fresh = signed is not None and time.monotonic() - signed[0] < _RENEW_S
        return signed[1] if fresh and signed is not None else None

    def __call__(self, key: str) -> str:
        """The URL of an object."""
        if (known := self.known(key)) is not None:
            return known
        now = time.monotonic()
        url = self._sign(key)
        if self._anonymous:
            url = url.partition("?")[0]
        self._known[key] = (now, url)
        return url

    def refresh(self) -> bool:
        """Forgets the client with its credentials, and all addresses."""
        with self._lock:
            self._client = None
            self._known.clear()
        return not self._anonymous

    def _sign(self, key: str) -> str:
        if after_fork():
            return _sign_elsewhere(self._root, self._options, key)
        with self._lock:
            if self._client is None:
                self._client = make_client(self._root, self._options)
            client = self._client
        return sign(client, key)


def sign(client: Any, key: str) -> str:
    """A URL that anybody may read `key` with, for an hour.

    Raises:
        Fault: no credentials were found.
    """
    import obstore
    from obstore.exceptions import BaseError

    try:
        return str(obstore.sign(client, "GET", key, timedelta(seconds=VALID_S)))
    except BaseError as e:
        raise Fault("refused", f"no usable credentials: {first_line(e)}") from e


def _sign_elsewhere(root: str, options: Mapping[str, Any], key: str) -> str:
    """Signs in a fresh interpreter. The options go through a pipe: no other user sees them."""
    try:
        request = pickle.dumps((root, dict(options), key))
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise Fault(
            "refused", f"a forked process cannot sign with options that cannot be pickled: {e}"
        ) from e
    command = [sys.executable, "-m", "headrace.io.objects.clients"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command, input=request, capture_output=True, timeout=_ELSEWHERE_S, check=False,
            env=environment,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Fault("transient", f"signing in a fresh interpreter failed: {e}") from e
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Fault("refused", f"no usable credentials: {lines[-1] if lines else 'no answer'}")
    return done.stdout.decode("utf-8")


def _sign_for_parent() -> int:
    """Reads a pickled (root, options, key) from our parent, and writes the signed address."""
    root, options, key = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    try:
        sys.stdout.write(sign(make_client(root, options), key))
    except Fault as fault:
        sys.stderr.write(f"{fault.reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_sign_for_parent())

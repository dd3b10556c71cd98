"""Transports: one way each to read a range of an object into memory, and which one serves a URL.

`HttpTransport` for signed or public addresses, `ObstoreTransport` where obstore cannot sign (some
credentials of Google and Azure) or must keep the connection to itself (a proxy, own certificates),
`FsspecTransport` for any other URL. All raise `Fault` and nothing else. `Roots` chooses.
"""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from headrace.base.extras import import_extra
from headrace.errors import MissingPackage
from headrace.io.objects.clients import (
    SCHEMES,
    Addresses,
    SignedAddresses,
    after_fork,
    first_line,
    make_client,
)
from headrace.io.objects.faults import Failure, Fault, parse_retry_after, status_fault
from headrace.io.objects.location import HTTP, key_of, root_of, scheme_of, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import ThreadPoolExecutor

    from headrace.io.objects.connections import Pool, Response
    from headrace.io.objects.reading import RemoteObject

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)\Z")
_STATUS_IN_TEXT = re.compile(r"status code: (\d{3})")
_REDIRECTS = (301, 302, 303, 307, 308)
_REDIRECTS_MAX = 5


@dataclass(frozen=True, slots=True)
class Found:
    """What a read met.

    Attributes:
        count: bytes stored; fewer than asked for only at the object's end.
        size: the object's size.
        etag: the object's version as the store names it, or None.
        modified_ns: when it was written, or None.
    """

    count: int
    size: int
    etag: str | None
    modified_ns: int | None


class RangeEngine(ABC):
    """Reads ranges of volumes that are no files, and keeps what is known of them.

    Attributes:
        storage_options: as they were given.
        looked_at: URLs that somebody has looked at and found right, here or before pickling.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None) -> None:
        self.storage_options = dict(storage_options or {})
        self.looked_at: set[str] = set()
        self._known: dict[str, RemoteObject] = {}

    def register(self, objects: Iterable[RemoteObject]) -> None:
        """States what volumes are like: reads of objects that find another one fail."""
        for each in objects:
            self._known[each.url] = each

    def forget(self, url: str) -> None:
        """Takes a `register` back."""
        self._known.pop(url, None)

    def known(self, url: str) -> RemoteObject | None:
        """What was registered for a URL."""
        return self._known.get(url)

    def fetch(self, url: str, offset: int, dest: memoryview, *, exact: bool = True) -> Found:
        """Reads one range and waits for it.

        Args:
            url: the volume.
            offset: first byte.
            dest: writable; its length is the range's, and may not be 0.
            exact: fewer bytes are an error; else they mark the volume's end.

        Raises:
            SourceChanged: another one stands there.
            VolumeError: it cannot be read.
        """
        outcome = self.fetch_many([(url, offset, dest)], exact=exact)[0]
        if isinstance(outcome, Failure):
            raise outcome.to_error()
        return outcome

    @abstractmethod
    def fetch_many(
        self, ranges: list[tuple[str, int, memoryview]], *, exact: bool = True
    ) -> list[Found | Failure]:
        """Reads many ranges at once and waits for all of them; failures are returned."""


class Transport(Protocol):
    """Reads ranges of the objects of one bucket or host, within one event loop."""

    async def read(self, key: str, offset: int, dest: memoryview, etag: str | None) -> Found:
        """Fills `dest` from `offset` of the object; the caller checks what was found.

        Raises:
            Fault: it was not possible.
        """
        ...

    def refresh(self) -> bool:
        """Fetches credentials anew; False where there are none to fetch. May block."""
        ...


class HttpTransport:
    """Ranged GETs over connections of our own."""

    def __init__(self, addresses: Addresses, pool: Pool, threads: ThreadPoolExecutor) -> None:
        self._addresses = addresses
        self._pool = pool
        self._threads = threads

    async def read(self, key: str, offset: int, dest: memoryview, etag: str | None) -> Found:
        """As `Transport.read`."""
        url = self._addresses.known(key)
        if url is None:
            loop = asyncio.get_running_loop()
            url = await loop.run_in_executor(self._threads, self._addresses, key)
        headers = {"Range": f"bytes={offset}-{offset + len(dest) - 1}"}
        if etag is not None and not etag.startswith("W/"):
            headers["If-Match"] = etag  # a weak tag never matches, says RFC 9110
        response = await self._pool.get(url, headers, dest)
        for _ in range(_REDIRECTS_MAX):
            target = response.headers.get("location", "")
            if response.status not in _REDIRECTS or not target.startswith(("https://", "http://")):
                break
            if url.startswith("https://") and not target.startswith("https://"):
                raise Fault("final", "redirected from https to http")
            url = target
            response = await self._pool.get(url, headers, dest)
        if response.status == 200:
            # Right only where we asked for all of the object.
            size = int(response.headers.get("content-length", "0") or 0)
            if offset != 0 or size > len(dest):
                raise Fault("final", "ranges ignored: the server sends whole objects only")
            return _found(response, size)
        if response.status != 206:
            after = parse_retry_after(response.headers.get("retry-after"), time.time())
            raise status_fault(response.status, response.text, after)
        stated, received = response.headers.get("content-range", ""), response.received
        extent = _CONTENT_RANGE.match(stated)
        if extent is None or int(extent[1]) != offset or int(extent[2]) - offset + 1 != received:
            raise Fault(
                "transient", f"wrong range: {stated[:60] or 'none'} for {offset}+{received}"
            )
        return _found(response, offset + received if extent[3] == "*" else int(extent[3]))

    def refresh(self) -> bool:
        """As `Transport.refresh`."""
        return self._addresses.refresh()


def _found(response: Response, size: int) -> Found:
    modified_ns = _time_ns(response.headers.get("last-modified", ""))
    return Found(response.received, size, response.headers.get("etag"), modified_ns)


@lru_cache(1024)
def _time_ns(date: str) -> int | None:
    """The nanoseconds since 1970 of an HTTP date; None for nonsense."""
    try:
        return int(email.utils.parsedate_to_datetime(date).timestamp()) * 1_000_000_000
    except (ValueError, TypeError, OverflowError):
        return None


class _InThreads(ABC):
    """Reads by a library that blocks and copies each body once."""

    def __init__(self, options: Mapping[str, Any], threads: ThreadPoolExecutor) -> None:
        self._options = dict(options)
        self._threads = threads

    async def read(self, key: str, offset: int, dest: memoryview, etag: str | None) -> Found:
        """As `Transport.read`."""
        loop = asyncio.get_running_loop()
        body, reply = await loop.run_in_executor(
            self._threads, self._get, key, offset, len(dest), etag
        )
        # Stored here and not in the thread: a read that was given up must not be written to.
        dest[: reply.count] = body
        return reply

    @abstractmethod
    def _get(
        self, key: str, offset: int, size: int, etag: str | None
    ) -> tuple[memoryview | bytes, Found]:
        """Reads a range; raises Fault."""


class ObstoreTransport(_InThreads):
    """Reads by obstore. Does not survive a fork."""

    def __init__(self, root: str, options: Mapping[str, Any], threads: ThreadPoolExecutor) -> None:
        super().__init__(options, threads)
        self._root = root
        self._options.setdefault("retry_config", {"max_retries": 0})  # the engine retries
        self._client: Any = None

    def refresh(self) -> bool:
        """As `Transport.refresh`."""
        self._client = None
        return True

    def _get(self, key: str, offset: int, size: int, etag: str | None) -> tuple[memoryview, Found]:
        if after_fork():
            raise Fault("final", "obstore cannot be used in a forked process: start it with spawn")
        import obstore
        from obstore import exceptions as kinds

        if self._client is None:
            self._client = make_client(self._root, self._options)
        options: Any = {"range": (offset, offset + size)}
        if etag is not None and not etag.startswith("W/"):
            options["if_match"] = etag
        try:
            result = obstore.get(self._client, key, options=options)
            body = memoryview(result.bytes())
        except (FileNotFoundError, kinds.NotFoundError) as e:
            raise Fault("missing", "status 404", status=404) from e
        except kinds.PreconditionError as e:
            raise Fault("changed", "status 412", status=412) from e
        except (kinds.PermissionDeniedError, kinds.UnauthenticatedError) as e:
            raise Fault("expired", f"status 403: {first_line(e)}", status=403) from e
        except kinds.BaseError as e:
            status = _STATUS_IN_TEXT.search(str(e))
            if status is not None:
                raise status_fault(int(status[1]), first_line(e)) from e
            raise Fault("transient", f"obstore: {first_line(e)}") from e
        meta = result.meta
        modified = int(meta["last_modified"].timestamp()) * 1_000_000_000
        if result.range[0] != offset or len(body) > size:
            raise Fault("transient", f"wrong range: {result.range}")
        return body, Found(len(body), meta["size"], meta["e_tag"], modified)


class FsspecTransport(_InThreads):
    """Reads by fsspec. Keys are whole URLs; versions are compared when an object is opened."""

    def __init__(self, options: Mapping[str, Any], threads: ThreadPoolExecutor) -> None:
        super().__init__(options, threads)
        self._info: dict[str, Found] = {}

    def refresh(self) -> bool:
        """There is nothing we could do for an unknown file system."""
        return False

    def _get(self, key: str, offset: int, size: int, etag: str | None) -> tuple[bytes, Found]:
        del etag  # nobody can be asked for it
        fs, path = file_system(key, self._options)
        try:
            known = self._info.get(key)
            if known is None or offset == 0:
                known = self._info[key] = _found_by_fsspec(fs.info(path))
            body = fs.cat_file(path, start=offset, end=min(offset + size, known.size))
        except FileNotFoundError as e:
            raise Fault("missing", f"not found: {e}") from e
        except PermissionError as e:
            raise Fault("refused", f"refused: {e}") from e
        except Exception as e:  # file systems raise what they like
            raise Fault("transient", f"{type(e).__name__}: {e}") from e
        if len(body) > size:
            raise Fault("final", f"wrong range: {len(body):,} bytes for {size:,}")
        return body, Found(len(body), known.size, known.etag, known.modified_ns)


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Fsspec's file system for a URL, and the path in it.

    Raises:
        Fault: fsspec is not installed or knows no such URL.
    """
    try:
        fsspec = import_extra("fsspec", f"reading {shown(url)}")
    except MissingPackage as e:
        raise Fault("final", str(e)) from e
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError, TypeError) as e:
        raise Fault("final", f"fsspec: {e}") from e
    return fs, str(path)


def _found_by_fsspec(info: Mapping[str, Any]) -> Found:
    etag = info.get("ETag") or info.get("etag")
    modified = next(
        (info[k] for k in ("mtime", "LastModified", "last_modified", "created") if info.get(k)),
        None,
    )
    seconds: Any = modified.timestamp() if hasattr(modified, "timestamp") else modified  # type: ignore[union-attr]
    ns = int(seconds * 1e9) if isinstance(seconds, (int, float)) else None
    return Found(0, int(info["size"]), etag, ns)


_OWN_CLIENT_OPTIONS = frozenset(
    {"allow_http", "connect_timeout", "timeout", "pool_idle_timeout", "pool_max_idle_per_host"}
)
"""Options of obstore's HTTP client that our connections satisfy, or need not know."""

_AZURE = frozenset({"az", "adl", "azure", "abfs", "abfss"})
_PLAIN = "/()+=,-._~"
"""Signatures of keys with these, letters and digits are known to be right."""


class Roots:
    """The transports of one event loop, one for each bucket or host.

    Args:
        options: the client's part of `storage_options`.
        pool: connections.
        threads: for what blocks.
    """

    def __init__(self, options: Mapping[str, Any], pool: Pool, threads: ThreadPoolExecutor) -> None:
        self._options = dict(options)
        self._pool = pool
        self._threads = threads
        self._known: dict[tuple[str, bool], asyncio.Future[Transport]] = {}

    async def transport(self, url: str) -> tuple[Transport, str]:
        """The transport for a URL, and the key that it knows the object by."""
        scheme = scheme_of(url)
        known_scheme = "://" in url and (scheme in HTTP or scheme in SCHEMES)
        root = root_of(url) if known_scheme else scheme
        key = key_of(url) if known_scheme else url
        own = not (scheme in _AZURE and urllib.parse.quote(key, safe=_PLAIN) != key)
        waiting = self._known.get((root, own))
        if waiting is not None and waiting.done():
            return waiting.result(), key
        if waiting is None:
            waiting = asyncio.get_running_loop().create_future()
            self._known[root, own] = waiting
            try:
                waiting.set_result(await self._make(root, scheme, url, own=own))
            except BaseException as e:
                del self._known[root, own]
                waiting.set_exception(e if isinstance(e, Exception) else Fault("final", "stopped"))
                waiting.exception()  # nobody else may be waiting
                raise
        return await asyncio.shield(waiting), key

    async def _make(self, root: str, scheme: str, url: str, *, own: bool) -> Transport:
        if scheme in HTTP:
            return HttpTransport(Addresses(root), self._pool, self._threads)
        if scheme not in SCHEMES:
            return FsspecTransport(self._options, self._threads)
        client_options = self._options.get("client_options") or {}
        if not own:
            # obstore signs the encoded path, Azure the decoded one: it would refuse our address.
            return ObstoreTransport(root, self._options, self._threads)
        if set(client_options) - _OWN_CLIENT_OPTIONS or _proxied(self._options, root):
            return ObstoreTransport(root, self._options, self._threads)
        addresses = SignedAddresses(root, self._options)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, addresses, key_of(url))
        except Fault:
            if scheme in ("s3", "s3a"):
                raise
            # Tokens of Google and Azure can read without being able to sign.
            return ObstoreTransport(root, self._options, self._threads)
        return HttpTransport(addresses, self._pool, self._threads)


def _proxied(options: Mapping[str, Any], root: str) -> bool:
    """Whether the environment names a proxy for this bucket's server."""
    endpoint = str(options.get("endpoint") or options.get("endpoint_url") or root)
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    proxies = urllib.request.getproxies()
    return any(k in proxies for k in ("http", "https", "all")) and not urllib.request.proxy_bypass(
        host
    )

"""Which transport serves a bucket or host."""

from __future__ import annotations

import asyncio
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

from headrace.io.objects.addresses import PlainAddresses, SignedAddresses
from headrace.io.objects.client import SCHEMES
from headrace.io.objects.fault import Fault
from headrace.io.objects.location import HTTP, key_of, root_of, scheme_of
from headrace.io.objects.transport import FsspecTransport, HttpTransport, ObstoreTransport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import ThreadPoolExecutor

    from headrace.io.objects.pool import Pool
    from headrace.io.objects.transport import Transport

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
            return HttpTransport(PlainAddresses(root), self._pool, self._threads)
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

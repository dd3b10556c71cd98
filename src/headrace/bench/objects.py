"""Objects as files: workloads of `storage.storage_type` s3, or aistore, by the S3 interface that AIStore has.

`storage.storage_root` is the bucket, and everything lies in it: `data_folder` and `checkpoint_folder` are
`s3://bucket/...`, or names below the bucket. Objects have the names and bytes that files would have. They are
read by the object engine in ranges, and written in one piece, or in parts when they are large. DLIO names its
objects by the whole URL, the bucket in front; those that it generated are not found here.

Results name the endpoint and never a secret: `base.text.redacted` is applied to everything that is written.
The engine and its event loop are imported by who has objects: each command of the benchmark passes here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from datetime import timedelta
from functools import cached_property
from posixpath import normpath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import numpy as np

from headrace.bench.engines import engine_name
from headrace.bench.formats import bad_file
from headrace.errors import BenchError, StoreError, VolumeError
from headrace.io.objects.faults import Failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.bench.config import LoadedWorkload
    from headrace.bench.run import SessionOptions
    from headrace.bench.schema import StorageSection, Workload
    from headrace.io.objects.reading import RemoteObject

RANGE_BYTES: Final = 8 << 20
"""Large objects are read in pieces of this."""

_RANGES_AHEAD: Final = 4
_SMALL_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 5
"""DLIO's `s3_max_attempts`, where it is not given."""

_MAGIC: Final = {"npy": b"\x93NUMPY", "npz": b"PK\x03\x04", "synthetic": b""}
"""What the objects of each format that is done begin with."""

_INSTEAD: Final = {
    "dataset.format": "expected npy or npz",
    "reader.engine": "expected headrace",
    "checkpoint.writer": "expected plain",
}
_CREDENTIALS: Final = ("access_key_id", "secret_access_key", "session_token")
_OPTIONS: Final = {
    **dict.fromkeys(_CREDENTIALS, (".+", "text")),
    "endpoint_url": (r"https?://[^\s@]+", "http://HOST:PORT, or https, without credentials"),
    "region": (".*", "text"),
    "s3_force_path_style": ("(?i)true|false", "True or False"),
    "s3_max_attempts": (r"[1-9]\d{0,3}", "a whole number of at least 1"),
}
"""What values look like, as an expression and in words. Values are not printed: they may be secret."""
_AISTORE: Final = "http://localhost:8080"


def object_problems(loaded: LoadedWorkload) -> Iterator[tuple[str, str]]:
    """What is not done with a workload's storage: (key, why)."""
    workload = loaded.workload
    storage, data, does = workload.storage, workload.dataset, workload.workflow
    if (kind := storage.storage_type) == "direct_fs":
        yield (
            "storage.storage_type",
            f"{kind} is not read by the benchmark: mount it, give local_fs",
        )
    if not storage.is_objects:
        return
    for name, value in storage.storage_options.items():
        key = f"storage.storage_options.{name}"
        if name not in _OPTIONS:
            yield key, f"is not known for {kind}, expected {', '.join(_OPTIONS)}"
        elif not re.fullmatch(_OPTIONS[name][0], str(value).strip()):
            yield key, f"expected {_OPTIONS[name][1]}"
    reads, engine, writer = does.train, engine_name(loaded), workload.checkpoint.writer
    refused = {
        "dataset.format": (reads or does.generate_data) and data.format not in _MAGIC,
        "dataset.requests": data.requests is not None,
        "dataset.skip_listing": loaded.listing_interval is not None,
        "reader.engine": reads and engine not in ("headrace", "null"),
        "reader.odirect": reads and workload.reader.odirect,
        "checkpoint.writer": does.checkpoint and writer not in (None, "plain", "fsync"),
    }
    for key in (name for name, is_so in refused.items() if is_so):
        yield key, f"is of files, and {kind} has objects: {_INSTEAD.get(key, 'leave it out')}"


def check_options(workload: Workload, options: SessionOptions) -> None:
    """Refuse options that are about files. Raises BenchError."""
    for name in ("cold", "stage", "simulate"):
        if workload.storage.is_objects and getattr(options, name):
            kind = workload.storage.storage_type
            raise BenchError(
                f"--{name} is of files, and storage.storage_type={kind} has objects.",
                next_step="Leave it out.",
            )


def object_url(storage: StorageSection, folder: str, key: str) -> str:
    """Where a folder of the workload is: `s3://bucket/...`. Raises ValueError if it is not in the bucket."""
    root = storage.storage_root.removeprefix("s3://").removeprefix("ais://").rstrip("/")
    if not root or "/" in root or root.startswith("."):
        raise ValueError(
            f"storage.storage_root is {storage.storage_root!r}, expected a bucket's name with "
            f"storage_type {storage.storage_type}"
        )
    scheme, separator, rest = folder.partition("://")
    bucket, _, name = rest.partition("/") if separator else (root, "", folder)
    name = "" if normpath(name) == "." else normpath(name)
    outside = bucket != root or (separator and scheme not in ("s3", "ais"))
    if outside or name.startswith("/") or name.split("/")[0] == "..":
        raise ValueError(
            f"{key} is {folder!r}, expected s3://{root}/... or a name below the bucket"
        )
    return f"s3://{root}/{name}".rstrip("/")


class ObjectFolder:
    """A workload's bucket. All errors are VolumeError, and name endpoint and bucket."""

    def __init__(self, storage: StorageSection) -> None:
        given = storage.storage_options
        aistore = storage.storage_type == "aistore"
        endpoint = str(given.get("endpoint_url") or (_AISTORE if aistore else ""))
        if aistore and urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/s3"  # where AIStore has its S3 interface
        self.endpoint = endpoint or "the endpoint of the environment"
        self.bucket = object_url(storage, "", "")
        attempts = int(given.get("s3_max_attempts") or _ATTEMPTS)
        self._options: dict[str, Any] = {
            n: str(given[n]) for n in _CREDENTIALS if given.get(n) is not None
        }
        self._options["region"] = str(given.get("region") or "us-east-1")
        if aistore and "access_key_id" not in self._options:
            self._options["skip_signature"] = True
        host = urlsplit(endpoint).netloc
        styled = str(given.get("s3_force_path_style", "")).strip().lower() == "true"
        # Not forced, it is for the store to choose: only AWS's has a host name for each bucket.
        if host.partition(":")[0].endswith(".amazonaws.com") and not styled:
            self._options["virtual_hosted_style_request"] = True
            endpoint = endpoint.replace(host, f"{self.bucket.removeprefix('s3://')}.{host}", 1)
        if endpoint:
            self._options["endpoint"] = endpoint
        self._attempts = attempts
        from headrace.io.objects.engine import ObjectEngine

        self.engine = ObjectEngine(self._options | {"attempts_max": attempts})

    @cached_property
    def _client(self) -> Any:
        from headrace.io.objects.clients import make_client

        retries = {"max_retries": self._attempts - 1, "retry_timeout": timedelta(seconds=60)}
        return make_client(self.bucket, self._options | {"retry_config": retries})

    def refused(self, error: Exception, url: str) -> VolumeError:
        """An error of the object engine's, with the endpoint."""
        next_step = getattr(error, "next_step", None)
        message = getattr(error, "message", str(error))
        return VolumeError(f"{self.endpoint}: {message}", path=url, next_step=next_step)

    @contextlib.contextmanager
    def _naming(self, url: str) -> Iterator[None]:
        try:
            yield
        except (VolumeError, StoreError) as e:
            raise self.refused(e, url) from e

    def objects(self, folder: str) -> list[RemoteObject]:
        """All objects below a folder, by name."""
        from headrace.io.objects.listing import list_objects

        with self._naming(folder):
            return sorted(list_objects(folder, self._options), key=lambda each: each.url)

    def sizes(self, folder: str) -> dict[str, int]:
        """The same, as URLs and sizes in bytes."""
        return {each.url: each.size for each in self.objects(folder)}

    def read(self, url: str, most: int = _SMALL_BYTES) -> bytes | None:
        """A small object, or the beginning of a large one; None where there is none."""
        dest = bytearray(most)
        outcome = self.engine.fetch_many([(url, 0, memoryview(dest))], exact=False)[0]
        if not isinstance(outcome, Failure):
            return bytes(dest[: outcome.count])
        if outcome.fault.kind == "missing":
            return None
        raise self.refused(outcome.to_error(), url)

    def send(self, url: str, blocks: Iterable[Any], size: int) -> None:
        """Write an object of so many bytes, piece by piece; it is there whole or not at all."""
        from headrace.io.objects.listing import write_blocks

        with self._naming(url):
            write_blocks(self._client, url, (bytes(block) for block in blocks), size)

    def move_here(self, path: str, url: str) -> None:
        """Write a file's bytes as an object, and remove the file."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.send(url, iter(lambda: file.read(RANGE_BYTES), b""), size)
        os.unlink(path)

    def check_begin(self, url: str, form: str, most: int) -> bytes:
        """The first bytes of an object, if it begins as its format does. Raises SourceError."""
        begin, magic = self.read(url, most) or b"", _MAGIC[form]
        if not begin.startswith(magic):
            raise bad_file(url, "its beginning", begin[: len(magic)], magic)
        return begin

    def remove(self, urls: list[str]) -> None:
        """Remove objects; what is gone already is no error."""
        from headrace.io.objects.listing import remove

        with self._naming(self.bucket):
            remove(urls, self._options)

    def count_bytes(self, url: str, size: int) -> int | None:
        """Read all of an object that should have so many bytes; how many it has, or None where it is not."""
        spare = [np.empty(min(size, RANGE_BYTES), np.uint8) for _ in range(_RANGES_AHEAD)]
        running: deque[Any] = deque()
        done, has = 0, size
        for number, at in enumerate(range(0, size, RANGE_BYTES)):
            if len(running) == _RANGES_AHEAD:  # its memory is the next one's
                done += self._count(running.popleft(), url)
            dest = spare[number % _RANGES_AHEAD].data[: size - at]
            running += self.engine.start([(url, at, dest)], exact=False)
            if not number:
                first = running[0].result()
                if isinstance(first, Failure) and first.fault.kind == "missing":
                    return None
                has = size if isinstance(first, Failure) else first.size
                if has != size:
                    return has
        return done + sum(self._count(each, url) for each in running)

    def _count(self, future: Any, url: str) -> int:
        outcome = future.result()
        if isinstance(outcome, Failure):
            raise self.refused(outcome.to_error(), url)
        return int(outcome.count)

    def close(self) -> None:
        """End the engine's thread."""
        self.engine.close()


def objects_of(workload: Workload) -> ObjectFolder | None:
    """The bucket of a workload; None: it has files."""
    return ObjectFolder(workload.storage) if workload.storage.is_objects else None

"""Listing, writing and removing objects: rare, so they block and run in the caller's process only."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import SourceError, StoreExists, VolumeError
from headrace.io.objects.clients import SCHEMES, first_line, make_client
from headrace.io.objects.faults import Fault
from headrace.io.objects.location import (
    HTTP,
    expand_numbers,
    has_magic,
    key_of,
    literal_folder,
    matches,
    root_of,
    scheme_of,
    shown,
)
from headrace.io.objects.reading import RemoteObject
from headrace.io.objects.transport import file_system

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

PART_BYTES = 16 << 20
"""One part of a multipart upload: 10,000 parts, which is what S3 allows, are 160 GB."""

_PARTS_AT_ONCE = 8
_LISTED_AT_ONCE = 1000


def expand(pattern: str, options: Mapping[str, Any]) -> list[str]:
    """The URLs that a pattern stands for, sorted; a URL without a pattern stands for itself.

    Args:
        pattern: may hold `*` and `?` (within one folder), `**`, `[...]` and `{000..123}`.
        options: the client's part of `storage_options`.

    Raises:
        SourceError: a web server's URL with a pattern: it cannot be listed.
        VolumeError: the store refuses the listing.
    """
    urls: list[str] = []
    for each in expand_numbers(pattern):
        if not has_magic(each):
            urls.append(each)
            continue
        accept = matches(each)
        there = (o.url for o in list_objects(literal_folder(each), options))
        urls += sorted(url for url in there if accept.match(url))
    return urls


def list_objects(folder: str, options: Mapping[str, Any]) -> Iterator[RemoteObject]:
    """All objects below a folder.

    Raises:
        SourceError: it cannot be listed.
        VolumeError: the store refuses.
    """
    scheme = scheme_of(folder + "/")
    if scheme in HTTP:
        raise SourceError(
            f"{shown(folder)}: a web server has no listing.",
            path=shown(folder),
            next_step="Name the objects: shard-{000..099}.tar, or a list of URLs.",
        )
    yield from (_list_obstore if scheme in SCHEMES else _list_fsspec)(folder, options)


def _list_obstore(folder: str, options: Mapping[str, Any]) -> Iterator[RemoteObject]:
    import obstore
    from obstore.exceptions import BaseError

    root = root_of(folder)
    client = make_client(root, options)
    try:
        for chunk in obstore.list(client, key_of(folder) or None, chunk_size=_LISTED_AT_ONCE):
            for meta in chunk:
                ns = int(meta["last_modified"].timestamp()) * 1_000_000_000
                yield RemoteObject(f"{root}/{meta['path']}", meta["size"], meta["e_tag"], ns)
    except BaseError as e:
        raise _refused(folder, "listed", e) from e


def _list_fsspec(folder: str, options: Mapping[str, Any]) -> Iterator[RemoteObject]:
    try:
        fs, path = file_system(folder, options)
        entries = fs.find(path, detail=True)
    except Fault as e:
        raise _refused(folder, "listed", e) from e
    except OSError as e:
        raise _refused(folder, "listed", e) from e
    for name, info in entries.items():
        rest = name.removeprefix(path).lstrip("/")
        yield RemoteObject(f"{folder.rstrip('/')}/{rest}", int(info["size"]))


def upload(path: str | os.PathLike[str], url: str, options: Mapping[str, Any]) -> None:
    """Copies a local file to an object; large ones in parts, which are dropped on failure.

    Raises:
        VolumeError: the store refuses.
    """
    file = Path(path)
    _put(url, options, partial(file.open, "rb"), file.stat().st_size, create=False)


def write(data: bytes, url: str, options: Mapping[str, Any], *, create: bool) -> None:
    """Writes a small object whole.

    Args:
        data: its bytes.
        url: where to.
        options: the client's part of `storage_options`.
        create: only if nothing stands there.

    Raises:
        StoreExists: something stands there.
        VolumeError: the store refuses.
    """
    _put(url, options, partial(io.BytesIO, data), len(data), create=create)


def write_blocks(client: Any, url: str, blocks: Iterable[bytes], size: int) -> None:
    """Writes an object of so many bytes with an open client, whose connections are used again.

    Raises:
        VolumeError: the store refuses.
    """
    _put_object(client, url, iter(blocks), size)


def _put_object(client: Any, url: str, data: Any, size: int, *, create: bool = False) -> None:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError

    try:
        obstore.put(
            client, key_of(url), data, use_multipart=size > PART_BYTES, chunk_size=PART_BYTES,
            max_concurrency=_PARTS_AT_ONCE, mode="create" if create else "overwrite",
        )  # fmt: skip
    except (AlreadyExistsError, FileExistsError) as e:
        raise store_exists(url) from e
    except (BaseError, FileNotFoundError, PermissionError) as e:
        raise _refused(url, "written", e) from e


def _put(url: str, options: Mapping[str, Any], opener: Any, size: int, *, create: bool) -> None:
    if scheme_of(url) in HTTP:
        raise VolumeError(
            f"{shown(url)}: a web server cannot be written to.",
            path=shown(url),
            next_step="Write to an object store (s3://, gs://, az://) or a folder.",
        )
    if scheme_of(url) not in SCHEMES:
        _put_fsspec(url, options, opener, create=create)
        return
    client = make_client(root_of(url), options)
    with opener() as file:
        _put_object(client, url, file, size, create=create)


def _put_fsspec(url: str, options: Mapping[str, Any], opener: Any, *, create: bool) -> None:
    try:
        fs, path = file_system(url, options)
        if create and fs.exists(path):
            raise store_exists(url)
        with opener() as file, fs.open(path, "wb") as target:
            while piece := file.read(PART_BYTES):
                target.write(piece)
    except (Fault, OSError) as e:
        if isinstance(e, StoreExists):
            raise
        raise _refused(url, "written", e) from e


def remove(urls: list[str], options: Mapping[str, Any]) -> None:
    """Removes objects; what is gone already is no error.

    Raises:
        VolumeError: the store refuses.
    """
    for url in urls:
        if scheme_of(url) not in SCHEMES:
            try:
                fs, path = file_system(url, options)
                fs.rm_file(path)
            except FileNotFoundError:
                continue
            except (Fault, OSError, NotImplementedError) as e:
                raise _refused(url, "removed", e) from e
            continue
        import obstore
        from obstore.exceptions import BaseError, NotFoundError

        try:
            obstore.delete(make_client(root_of(url), options), key_of(url))
        except (NotFoundError, FileNotFoundError):
            continue
        except BaseError as e:
            raise _refused(url, "removed", e) from e


def store_exists(url: str) -> StoreExists:
    """The error for a URL that is taken."""
    return StoreExists(
        f"{shown(url)} exists already.",
        path=shown(url),
        next_step="Choose another target, or pass overwrite=True to replace the store there.",
    )


def _refused(url: str, done: str, error: Exception) -> VolumeError:
    reason = error.reason if isinstance(error, Fault) else first_line(error)
    return VolumeError(
        f"{shown(url)}: cannot be {done}: {reason}.",
        path=shown(url),
        next_step="Check the URL and the credentials: docs/howto/object-stores.md.",
    )

"""HeadraceFileSystem: `headrace://PATH_OF_STORE/NAME_OF_SAMPLE`, read-only.

The path's first part is a store's folder, or a file that can be opened as one (a tar, a Parquet file,
...); the rest is a name in it. Names come from the store's directory, and sizes too: listing reads no
sample. Whatever asks for several files at once is read as one native batch.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from fsspec.utils import stringify_path

from headrace.config import reader_options
from headrace.errors import HeadraceError, StoreNotFound
from headrace.io import BatchReader
from headrace.store import Store, open_store
from headrace.store.folders import FolderTree
from headrace.store.manifest import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_BLOCK_MAX = 4096
"""Names that are read at once where many files stand side by side."""

_FOLDER = 1  # the kind of an entry, see `Directory.children`


class SampleFile(NamedTuple):
    """One part of one sample, seen as a file."""

    path: str
    """In the store."""
    sample: int
    part: int
    """Number among the store's parts."""
    size: int
    """In bytes."""


def _prefix(path: str) -> bytes:
    return os.fsencode(path) + b"/" if path else b""


def _is_path(name: bytes) -> bool:
    return (
        bool(name) and not name.startswith(b"/") and not name.endswith(b"/") and b"//" not in name
    )


BATCH_BYTES = 32 << 20
"""Bytes that one native batch reads. A file larger than this is read alone, and ranges of it as such."""

_PROTOCOL = "headrace"


class HeadraceFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Stores as folders, samples as files. Writing raises `OSError` (EROFS).

    Args:
        column: for tables and arrays that are opened directly: as for `headrace.open`.
        label: the same.
        options: those of fsspec.
    """

    protocol = _PROTOCOL
    root_marker = "/"
    local_file = False
    async_impl: ClassVar[bool] = False

    def __init__(
        self, column: str | Sequence[str] | None = None, label: str | None = None, **options: Any
    ) -> None:
        super().__init__(column=column, label=label, **options)
        self._opened: dict[str, _OpenStore] = {}
        self._column, self._label = column, label

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """An absolute path without the protocol."""
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        text = stringify_path(path)
        for begin in (f"{_PROTOCOL}://", f"{_PROTOCOL}::"):
            text = text.removeprefix(begin)
        if not text.startswith("/"):
            text = f"{os.getcwd()}/{text}"  # noqa: PTH109 - text, and no normalising of names
        return text.rstrip("/") or cls.root_marker

    # -- what there is --------------------------------------------------------------------------

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size in bytes and type of a file or folder; for files also sample and part.

        Raises:
            FileNotFoundError: there is none.
        """
        store, inner = self._split(path)
        file = store.find(inner) if inner else None
        if file is not None:
            return store.entry(file)
        if store.is_folder(inner):
            return store.folder_entry(inner)
        raise _missing(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The entries of a folder, or of a file.

        Raises:
            FileNotFoundError: there is neither.
        """
        store, inner = self._split(path)
        entries = []
        if store.is_folder(inner):
            folders, files = store.children(inner)
            entries = [*map(store.folder_entry, folders), *map(store.entry, files)]
        if not entries:
            file = store.find(inner)
            if file is None:
                raise _missing(path)
            entries = [store.entry(file)]
        entries.sort(key=lambda entry: str(entry["name"]))
        return entries if detail else [entry["name"] for entry in entries]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,
    ) -> Any:
        """All files below a path: one walk over its range of names."""
        if maxdepth is not None or withdirs:
            return super().find(path, maxdepth, withdirs, detail, **options)
        try:
            store, inner = self._split(path)
        except FileNotFoundError:
            return {} if detail else []
        file = store.find(inner) if inner else None
        files = [file] if file is not None else store.below(inner)
        entries = {e["name"]: e for e in map(store.entry, files)}
        names = sorted(entries)
        return {name: entries[name] for name in names} if detail else names

    # -- reading --------------------------------------------------------------------------------

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """The bytes of a file or of a range; negative bounds count from its end.

        Raises:
            FileNotFoundError: there is no such file.
            IsADirectoryError: it is a folder.
            CorruptSample: its bytes differ from their checksum.
        """
        store, file = self._file(path)
        return store.read(file, *_range(file.size, start, end))

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,  # noqa: ARG002 - fsspec's
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """The bytes of many ranges, read in native batches.

        Args:
            paths: files; each may stand several times.
            starts: first bytes, one each or one for all; None for the beginning.
            ends: ends, alike; None for the file's end.
            max_gap: has no meaning here: neighbours are joined by the reader.
            on_error: `return` puts an error in the place of its bytes, `raise` raises it.
        """
        if not isinstance(paths, list):
            raise TypeError(f"paths is {type(paths).__name__}, expected a list")
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError(
                f"{len(paths)} paths, {len(starts)} starts and {len(ends)} ends, expected as many"
            )
        out: list[Any] = [None] * len(paths)
        wanted: dict[int, tuple[_OpenStore, list[_Wanted]]] = {}
        for k, (path, start, end) in enumerate(zip(paths, starts, ends, strict=True)):
            try:
                store, file = self._file(path)
                item = _Wanted(k, file, *_range(file.size, start, end))
            except (HeadraceError, OSError) as e:
                out[k] = e
            else:
                wanted.setdefault(id(store), (store, []))[1].append(item)
        for store, items in wanted.values():
            store.read_many(items, out)
        error = next((x for x in out if isinstance(x, BaseException)), None)
        if error is not None and on_error == "raise":
            raise error
        return out

    def cat(
        self,
        path: Any,
        recursive: bool = False,
        on_error: str = "raise",
        **_: Any,
    ) -> Any:
        """The bytes of a file, or {path: bytes} of several, of a pattern or of a folder."""
        paths = self.expand_path(path, recursive=recursive)
        if isinstance(path, (str, os.PathLike)) and paths == [self._strip_protocol(path)]:
            return self.cat_file(paths[0])
        if recursive:
            paths = [p for p in paths if not self.isdir(p)]
        contents = self.cat_ranges(paths, None, None, on_error=on_error)
        return {
            path: content
            for path, content in zip(paths, contents, strict=True)
            if on_error != "omit" or not isinstance(content, BaseException)
        }

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> HeadraceFile:
        if mode != "rb":
            raise _read_only(path)
        self._file(path)  # says what is wrong, before a file object exists
        return HeadraceFile(
            self, path, mode, block_size or "default", autocommit, cache_options=cache_options,
            **options,
        )  # fmt: skip

    def created(self, path: str) -> Any:
        """Not known: a store keeps no times of its samples."""
        raise NotImplementedError(f"{path}: a store keeps no times of its samples")

    modified = created

    def invalidate_cache(self, path: str | None = None) -> None:
        """Closes the stores that were opened (those at or above `path`), to see their new state."""
        stripped = None if path is None else self._strip_protocol(path)
        for where in list(self._opened):
            if stripped is None or stripped == where or stripped.startswith(where + "/"):
                self._opened.pop(where).close()
        super().invalidate_cache(path)

    # -- writing is refused ---------------------------------------------------------------------

    def mkdir(self, path: str, *_: Any, **__: Any) -> None:
        """Refused: stores are read-only here."""
        raise _read_only(path)

    def makedirs(self, path: str, *_: Any, **__: Any) -> None:
        """Refused, as `mkdir`."""
        raise _read_only(path)

    def rmdir(self, path: str) -> None:
        """Refused, as `mkdir`."""
        raise _read_only(path)

    def rm(self, path: Any, *_: Any, **__: Any) -> None:
        """Refused, as `mkdir`."""
        raise _read_only(path)

    def rm_file(self, path: str) -> None:
        """Refused, as `mkdir`."""
        raise _read_only(path)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Refused, as `mkdir`; `get` copies out of a store."""
        del path1
        raise _read_only(path2)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Refused, as `mkdir`."""
        del value, mode
        raise _read_only(path)

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        """Refused, as `mkdir`."""
        del lpath
        raise _read_only(rpath)

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Refused, as `mkdir`."""
        del truncate
        raise _read_only(path)

    # -- stores ---------------------------------------------------------------------------------

    def _split(self, path: str) -> tuple[_OpenStore, str]:
        """The store that a path leads into, and the rest of the path."""
        stripped = self._strip_protocol(path)
        at = 0
        while at >= 0:
            at = stripped.find("/", at + 1)
            where = stripped if at < 0 else stripped[:at]
            store = self._opened.get(where)
            if store is None and _may_be_store(where):
                try:
                    opened = open_store(where, column=self._column, label=self._label)
                except StoreNotFound as e:
                    raise _missing(path) from e
                # Of two threads that open the same store, one keeps its own.
                mine = _OpenStore(where, opened)
                store = self._opened.setdefault(where, mine)
                if store is not mine:
                    opened.close()
            if store is not None:
                return store, stripped[len(where) + 1 :]
        raise FileNotFoundError(
            errno.ENOENT,
            "no store stands on this path (a folder with store.json, a tar, ...)",
            path,
        )

    def _file(self, path: str) -> tuple[_OpenStore, SampleFile]:
        store, inner = self._split(path)
        file = store.find(inner) if inner else None
        if file is not None:
            return store, file
        if store.is_folder(inner):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise _missing(path)


class HeadraceFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A sample as an open file. Ranges of parts above 4 MiB are read as such, smaller ones whole."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


class _Wanted(NamedTuple):
    """One range that was asked for: where its bytes go, of which file, from where to where."""

    place: int
    file: SampleFile
    start: int
    end: int


class _OpenStore:
    """An open store: the files and folders that its names make, and readers of whole batches.

    A sample is a file of its name. Where the store has several parts, each part is a file: the name, a
    dot and the part's name, as in a WebDataset tar. Names with empty components (`a//b`, `a/`) have no
    place in a hierarchy and are not listed.
    """

    def __init__(self, where: str, store: Store) -> None:
        self._where = where
        self._store = store
        self._tree = FolderTree(store)
        self._readers: dict[int, BatchReader] = {}

    def find(self, path: str) -> SampleFile | None:
        """The file at a path of the store."""
        file = self._tree.file(os.fsencode(path))
        return None if file is None else SampleFile(path, file.sample, file.part, file.size)

    def is_folder(self, path: str) -> bool:
        """Whether any name goes on below a path."""
        return not path or self._tree.folder(os.fsencode(path)) is not None

    def children(self, path: str) -> tuple[list[str], list[SampleFile]]:
        """The folders and files directly in a folder: paths in the store, sorted."""
        prefix = _prefix(path)
        folders: set[bytes] = set()
        files: list[SampleFile] = []
        for number, segment in enumerate(self._store.segments):
            rank = 0
            while True:
                names, samples, ranks, kinds = segment.directory.children(prefix, rank, _BLOCK_MAX)
                if not names:
                    break
                rank = int(ranks[-1])
                folders.update(
                    n for n, kind in zip(names, kinds, strict=True) if kind == _FOLDER and n
                )
                listed = [
                    (sample, prefix + name)
                    for name, sample, kind in zip(names, samples.tolist(), kinds, strict=True)
                    if kind != _FOLDER and _is_path(prefix + name)
                ]
                files += self._files(number, [s for s, _ in listed], [n for _, n in listed])
        files.sort()
        return sorted(os.fsdecode(prefix + f) for f in folders), files

    def below(self, path: str) -> Iterator[SampleFile]:
        """All files below a folder, segment by segment in the order of their names."""
        prefix = _prefix(path)
        # The successor of all names below: "/" is followed by "0".
        stop = prefix[:-1] + b"0" if prefix else None
        for number, segment in enumerate(self._store.segments):
            directory = segment.directory
            first = directory.seek(prefix)
            last = directory.samples if stop is None else directory.seek(stop)
            for begin in range(first, last, _BLOCK_MAX):
                ranks = range(begin, min(begin + _BLOCK_MAX, last))
                locals_ = [directory.index_at_rank(rank) for rank in ranks]
                names = directory.names(np.array(locals_, np.int64))
                shown = [i for i, name in enumerate(names) if _is_path(name)]
                yield from self._files(
                    number, [locals_[i] for i in shown], [names[i] for i in shown]
                )

    def _files(
        self, number: int, locals_: Sequence[int], names: Sequence[bytes]
    ) -> list[SampleFile]:
        """The files of samples of a segment, whose names these are."""
        base, sizes = self._store.segments[number].base, self._tree.sizes(number, locals_)
        return [
            SampleFile(os.fsdecode(self._tree.file_name(name, part)), base + local, part, size)
            for local, name, own in zip(locals_, names, zip(*sizes, strict=True), strict=True)
            for part, size in enumerate(own) if size >= 0
        ]  # fmt: skip

    def entry(self, file: SampleFile) -> dict[str, Any]:
        """What fsspec is told of a file."""
        return {
            "name": f"{self._where}/{file.path}", "size": file.size, "type": "file",
            "sample": file.sample, "part": self._store.parts[file.part],
        }  # fmt: skip

    def folder_entry(self, path: str) -> dict[str, Any]:
        """What fsspec is told of a folder."""
        name = f"{self._where}/{path}" if path else self._where
        return {"name": name, "size": 0, "type": "directory"}

    def read(self, file: SampleFile, start: int, end: int) -> bytes:
        """A range of one file."""
        part = self._store.parts[file.part]
        return bytes(self._store.read(file.sample, start, end - start, part=part))

    def read_many(self, wanted: list[_Wanted], out: list[Any]) -> None:
        """Puts each range's bytes, or its error, in its place."""
        by_part: dict[int, dict[int, list[_Wanted]]] = {}
        for item in wanted:
            if item.file.size > BATCH_BYTES:
                try:
                    out[item.place] = self.read(item.file, item.start, item.end)
                except (HeadraceError, OSError) as e:
                    out[item.place] = e
            else:
                same = by_part.setdefault(item.file.part, {})
                same.setdefault(item.file.sample, []).append(item)
        for part, samples in by_part.items():
            batch: dict[int, list[_Wanted]] = {}
            size = 0
            for index, items in samples.items():
                if batch and size + items[0].file.size > BATCH_BYTES:
                    self._read_batch(part, batch, out)
                    batch, size = {}, 0
                batch[index] = items
                size += items[0].file.size
            self._read_batch(part, batch, out)

    def _read_batch(self, part: int, samples: dict[int, list[_Wanted]], out: list[Any]) -> None:
        native = self._reader(part).submit(np.array(list(samples), np.int64)).take()
        errors = {}
        if native.failed:
            for failure in self._store.catalog.failures(native):
                index = int(native.indices[failure["slot"]])
                errors[index] = self._store.failure_error(index, failure)
        data = memoryview(native.data)  # type: ignore[arg-type]  # numpy's stubs lag
        for slot, (index, items) in enumerate(samples.items()):
            begin = int(native.offsets[slot])
            for item in items:
                if index in errors:
                    out[item.place] = errors[index]
                else:
                    out[item.place] = bytes(data[begin + item.start : begin + item.end])

    def close(self) -> None:
        """Ends the readers and closes the store."""
        for reader in self._readers.values():
            reader.close()
        self._store.close()

    def _reader(self, part: int) -> BatchReader:
        reader = self._readers.get(part)
        if reader is None or not reader.usable:  # of the process that this one was forked from
            options, _ = reader_options({})
            reader = self._readers[part] = BatchReader(self._store.catalog, [part], options)
        return reader


def _may_be_store(where: str) -> bool:
    return os.path.isfile(where) or os.path.lexists(os.path.join(where, FILE_NAME))  # noqa: PTH113, PTH118


def _range(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Bounds inside a file, as slices have them."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _read_only(path: Any) -> OSError:
    return OSError(
        errno.EROFS,
        "stores are read-only through fsspec; headrace.pack and headrace.append write them",
        str(path),
    )

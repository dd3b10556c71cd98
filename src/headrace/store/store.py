"""`Store`: an open store, the object that users and loaders hold.

Joins the segments into one sequence of samples: names, labels, columns, look-up, single reads. It knows
no loaders and no order. It may be shared by threads, inherited by fork and sent by pickle (as its
path and fingerprint: the receiver opens it again and refuses other data).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from operator import index as as_integer
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from headrace import _native
from headrace.base.files import readers
from headrace.base.lifetime import Closing
from headrace.errors import HeadraceError, SampleNotFound
from headrace.io.objects.location import is_url, shown
from headrace.store.directory import printable
from headrace.store.segment import read_error, read_extent
from headrace.store.sources.scan import readers_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from headrace.store.manifest import Manifest
    from headrace.store.mixture import Mixture
    from headrace.store.opening import RemoteEngine
    from headrace.store.segment import Extent, OpenSegment
    from headrace.store.sources.scan import SourceOptions


CHECKED_RANGE_BYTES = 4 << 20
"""A range of a part up to this long is cut from the whole part, so that its checksum is checked."""


class Store(Closing):
    """An open store. Made by `open_store`."""

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        segments: list[OpenSegment],
        *,
        direct: SourceOptions | bytes | None = None,
        objects: RemoteEngine | None = None,
        modes: AbstractSet[tuple[int, int]] = frozenset(),
    ) -> None:
        self.path = path
        self._modes = modes
        self.objects = objects
        self.manifest = manifest
        self.segments = segments
        self._direct = direct
        self._kept: object = None
        self._bases = [s.base for s in segments]
        self._samples = sum(s.directory.samples for s in segments)
        self._closed = False
        self._catalog: _native.Catalog | None = None
        self._catalog_pid = -1
        self._nbytes: int | None = None
        self._part_names = list(dict.fromkeys(p for s in segments for p in s.directory.part_names))

    def __len__(self) -> int:
        return self._samples

    @overload
    def __getitem__(self, sample: int) -> memoryview | dict[str, memoryview]: ...
    @overload
    def __getitem__(self, sample: slice) -> list[memoryview | dict[str, memoryview]]: ...
    def __getitem__(
        self, sample: int | slice
    ) -> memoryview | dict[str, memoryview] | list[memoryview | dict[str, memoryview]]:
        """The bytes of a sample, by index (negative ones count from the end), or those of a slice.

        Whoever wants many takes a loader, which reads ahead; `read` takes names, ranges and parts.

        Returns:
            A read-only view of the bytes; a dict of them by part, where samples may have several.

        Raises:
            SampleNotFound: there is no such sample; an IndexError, too.
            TypeError: it is neither a whole number nor a slice.
            CorruptSample, SourceChanged, VolumeError: as for `read`.
        """
        if isinstance(sample, slice):
            return [self[i] for i in range(*sample.indices(self._samples))]
        index = self.index_of(as_integer(sample))
        if len(self._part_names) == 1:
            return self.read(index)
        return {part: self.read(index, part=part) for part in self.parts_of(index)}

    def __iter__(self) -> Iterator[memoryview | dict[str, memoryview]]:
        """The bytes of each sample in the stored order, one read at a time."""
        return (self[i] for i in range(self._samples))

    # `name in store` would read every sample and compare its bytes: `name in store.names` is meant.
    __contains__ = None

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Store({shown(self.path)!r}, {self._samples:,} samples{state})"

    def _repr_html_(self) -> str:
        """A card for notebooks, of what is known without a look at the storage."""
        from headrace.pages.html import card

        rows: list[tuple[str, object]] = [
            ("samples", f"{self._samples:,}"),
            ("segments", len(self._bases)),
        ]
        if any(self.parts):
            rows.append(("parts", ", ".join(self.parts)))
        rows.append(("fingerprint", self.fingerprint))
        return card(f"Store: {shown(self.path)}", rows, note="closed" if self._closed else "")

    def __reduce__(self) -> tuple[Any, ...]:
        from headrace.store.opening import reopen, reopen_memory

        if isinstance(self._direct, bytes):
            entry = self.segments[0].entry
            return reopen_memory, (self.path, entry, self._direct, self.objects)
        return reopen, (
            self.path, len(self.segments), self.fingerprint, self._direct, self.objects,
        )  # fmt: skip

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # Made when asked for: kept, it would be a cycle, and a store that is dropped would hold its files
    # until garbage is collected.
    @property
    def names(self) -> Names:
        """The samples' names, by index."""
        return Names(self)

    @property
    def fingerprint(self) -> str:
        """Names the content: equal samples, names, labels and layout give equal fingerprints."""
        return self.manifest.fingerprint

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        if self._nbytes is None:
            self._nbytes = sum(
                int(e["length"].sum()) for s in self.segments for _, _, e in s.walk()
            )
        return self._nbytes

    def readers(self) -> int:
        """Who may read all of it, as the mode of a folder that holds a copy; see `base.files.readers`."""
        if self.objects is not None or is_url(self.path):
            return 0o700
        paths = [path for s in self.segments for path in s.volumes.paths]
        if self._direct is None:
            paths += [os.path.join(self.path, s.entry.directory) for s in self.segments]
        return readers(self._modes) & readers_of(paths)

    @property
    def labels(self) -> NDArray[Any] | None:
        """(n,) signed integers, -1 for none, read-only; None where no sample has a label."""
        by_segment = [s.directory.labels for s in self.segments]
        if all(labels is None for labels in by_segment):
            return None
        if len(by_segment) == 1:
            return by_segment[0]
        filled = [
            np.full(s.directory.samples, -1, np.int8) if labels is None else labels
            for s, labels in zip(self.segments, by_segment, strict=True)
        ]
        return _read_only(np.concatenate(filled))

    @property
    def classes(self) -> list[str] | None:
        """The names of labels 0, 1, ..., or None."""
        # A later segment's list begins with the earlier one's: appending sees to it.
        longest = max((s.directory.class_names for s in self.segments), key=len)
        return [os.fsdecode(name) for name in longest] or None

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The user's columns by name, each (n,) and read-only."""
        by_segment = [s.directory.columns for s in self.segments]
        if len(by_segment) == 1:
            return by_segment[0]
        return {
            name: _read_only(np.concatenate([columns[name] for columns in by_segment]))
            for name in by_segment[0]
            if all(name in columns for columns in by_segment)
        }

    @property
    def parts(self) -> list[str]:
        """The names of the parts that samples may have; one empty name where they have one part."""
        return [os.fsdecode(p) for p in self._part_names]

    def find(self, name: str | bytes) -> int:
        """The index of the sample named `name`.

        Raises:
            SampleNotFound: there is none.
        """
        index = self._find(name)
        if index < 0:
            raise SampleNotFound(
                f"{self.path}: there is no sample named {printable(os.fsencode(name))}.",
                path=self.path,
                next_step="The names are in `store.names`.",
            )
        return index

    def _find(self, name: str | bytes) -> int:
        """The index of a name; -1: no sample has it."""
        self._check_open()
        for segment in self.segments:
            if (index := segment.directory.find(name)) >= 0:
                return index + segment.base
        return -1

    def find_many(self, names: Sequence[str | bytes]) -> NDArray[np.int64]:
        """The indices of `names`, (k,) int64; -1 for a name that no sample has."""
        self._check_open()
        if isinstance(names, (str, bytes)):
            raise TypeError(f"names is {names!r}, expected a sequence of names")
        wanted = names if isinstance(names, list) else list(names)
        if len(self.segments) == 1:
            return self.segments[0].directory.find_many(wanted)
        indices = np.full(len(wanted), -1, np.int64)
        for segment in self.segments:
            missing = np.flatnonzero(indices < 0)
            if not len(missing):
                break
            queries = wanted if len(missing) == len(wanted) else [wanted[i] for i in missing]
            local = segment.directory.find_many(queries)
            indices[missing] = np.where(local < 0, -1, local + segment.base)
        return indices

    def read(
        self,
        sample: int | str | bytes,
        start: int | None = None,
        size: int | None = None,
        part: str | bytes | None = None,
    ) -> memoryview:
        """The bytes of a sample, or a range of them.

        Args:
            sample: its index (negative ones count from the end) or its name.
            start: first byte; 0 if not given.
            size: number of bytes; to the end if not given. Fewer come at the end.
            part: which part, for samples of several.

        Returns:
            A read-only view of the bytes.

        Raises:
            SampleNotFound: no such sample, or it has no such part.
            ValueError: the sample has several parts and none was named, or the range is negative.
            CorruptSample: the bytes differ from their checksum. Ranges of parts larger than 4 MiB
                are not checked.
            SourceChanged: an indexed file is not as it was.
            VolumeError: the system refuses the read.
        """
        self._check_open()
        if (start is not None and start < 0) or (size is not None and size < 0):
            raise ValueError(f"start is {start} and size is {size}, expected 0 or more")
        index = self.index_of(sample)
        extent = self._extent(index, part)
        first = start or 0
        whole = first == 0 and (size is None or size >= extent.length)
        if whole or extent.length <= CHECKED_RANGE_BYTES:
            data = self._read_extent(extent, 0, None)
            return data if whole else data[first : None if size is None else first + size]
        return self._read_extent(extent, first, size)

    def parts_of(self, sample: int | str | bytes) -> dict[str, int]:
        """The parts of a sample and their sizes in bytes, in the order of `parts`."""
        self._check_open()
        index = self.index_of(sample)
        segment = self.segment_of(index)
        names = segment.directory.part_names
        return {os.fsdecode(names[e.part]): e.length for e in segment.extents(index)}

    def close(self) -> None:
        """Closes the volumes. Arrays that were handed out stay valid."""
        self._closed = True
        self._catalog = None
        self._kept = None
        for segment in self.segments:
            segment.volumes.close()
        if self.objects is not None:
            self.objects.close()

    @property
    def appendable(self) -> bool:
        """Whether it lies in a folder or at a URL as a store: `append` adds segments to it."""
        return self._direct is None

    @property
    def mixture(self) -> Mixture | None:
        """Itself, if it is a mixture of stores."""
        return None

    agrees = False
    """Whether `resident_ranges` says the same to all processes that ask with one name."""

    def resident_ranges(self, name: str = "") -> tuple[tuple[int, int], ...]:
        """Ranges (first, behind the last) of samples that are near now, ascending: in the page cache.

        Args:
            name: what is asked for; stores that agree say the same to everybody who gives it.
        """
        from headrace.store.residency import resident_samples

        del name
        return tuple(each for segment in self.segments for each in resident_samples(segment))

    def keep(self, memory: object) -> None:
        """Keeps what the volumes lie in alive as long as the store is open."""
        self._kept = memory

    # -- for loaders, verify and repair -----------------------------------------------------------

    def index_of(self, sample: int | str | bytes) -> int:
        """The index 0..n-1 of a sample given by index (negative: from the end) or name."""
        if isinstance(sample, (str, bytes)):
            return self.find(sample)
        index = int(sample)
        if not -self._samples <= index < self._samples:
            raise SampleNotFound(
                f"{self.path}: there is no sample {index}, expected {-self._samples} to "
                f"{self._samples - 1}.",
                path=self.path,
            )
        return index + self._samples if index < 0 else index

    def segment_of(self, index: int) -> OpenSegment:
        """The segment that holds the sample with index `index`."""
        return self.segments[bisect_right(self._bases, index) - 1]

    @property
    def catalog(self) -> _native.Catalog:
        """The native catalog of this process.

        Raises:
            ValueError: the store is closed.
        """
        self._check_open()
        if self._catalog is None or self._catalog_pid != os.getpid():
            # A forked child makes its own: it must not share locks with its parent.
            self._catalog = _native.Catalog(
                [(s.directory, s.volumes.native()) for s in self.segments],
                None if self.objects is None else self.objects.native,
            )
            self._catalog_pid = os.getpid()
        return self._catalog

    def failure_error(self, index: int, failure: dict[str, Any]) -> HeadraceError:
        """The error for a failure that the native catalog or reader reports of sample `index`."""
        segment = self.segment_of(index)
        kind = str(failure["kind"])
        actual, expected = "an incomplete read", f"{failure['length']} bytes"
        if kind == "checksum":
            actual = f"{failure['crc_found']:08x}"
            expected = f"{failure['crc_expected']:08x}"
        elif kind == "changed":
            actual, expected = "no file or another size or modification time", "the indexed file"
        name = segment.directory.name(index - segment.base)
        path = str(failure["path"])
        why = None if self.objects is None else self.objects.reason_of(failure)
        if why is not None and kind not in ("checksum", "short"):
            error = why.to_error(f"sample {index} ({os.fsdecode(name)!r}): ")
            error.__dict__.update(index=index, name=os.fsdecode(name))
            return error
        tree = any(v.kind == "tree" for v in segment.entry.volumes)
        if tree:
            path = os.path.join(path, os.fsdecode(name))
        return read_error(
            kind, index, name, path, int(failure["offset"]),
            actual=actual, expected=expected, code=int(failure["errno"]),
            foreign=any(v.kind != "packed" for v in segment.entry.volumes),
        )  # fmt: skip

    def _extent(self, index: int, part: str | bytes | None) -> Extent:
        segment = self.segment_of(index)
        extents = segment.extents(index)
        parts = {os.fsdecode(segment.directory.part_names[e.part]): e for e in extents}
        names = list(parts)
        if part is None:
            if len(extents) == 1:
                return extents[0]
            raise ValueError(f"sample {index} has the parts {names}: name one, part={names[-1]!r}")
        wanted = os.fsdecode(part)
        if wanted not in parts:
            what = f"{self.path}: sample {index} has no part {wanted!r}, it has {names}."
            raise SampleNotFound(what, path=self.path)
        return parts[wanted]

    def _read_extent(self, extent: Extent, start: int, size: int | None) -> memoryview:
        segment = self.segment_of(extent.index)
        if self.objects is not None and self.objects.native is self.objects:
            # One range of one object: there is nothing to plan, and its engine is Python's anyway.
            return memoryview(read_extent(segment, extent, start, size)).toreadonly()
        catalog = self.catalog
        part = self._part_names.index(segment.directory.part_names[extent.part])
        batch = catalog.read_one(extent.index, part, start, -1 if size is None else size)
        if batch.failed:
            raise self.failure_error(extent.index, catalog.failures(batch)[0])
        return memoryview(batch.data).toreadonly()  # type: ignore[arg-type]  # numpy's stubs lag

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the store {self.path} is closed")


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


_NAMES_AT_ONCE = 4096


class Names(Sequence[str]):
    """The names of a store's samples, by index; read when asked for.

    Bytes that are no UTF-8 come as surrogates (`os.fsdecode`), and `os.fsencode` gives them back.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """One name, or the names of a slice."""
        self._store._check_open()  # noqa: SLF001 - its own other half
        if isinstance(index, slice):
            return self.many(range(*index.indices(len(self))))
        at = int(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"index {at}, expected {-len(self)} to {len(self) - 1}")
        return self.many([at + len(self) if at < 0 else at])[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _NAMES_AT_ONCE):
            yield from self[start : start + _NAMES_AT_ONCE]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, (str, bytes)) and self._store._find(name) >= 0  # noqa: SLF001

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """The index of a name, by the name tree.

        Raises:
            ValueError: no sample has it, in this range.
        """
        index = self._store._find(value)  # noqa: SLF001 - its own other half
        if index < 0 or index not in range(len(self))[start:stop]:
            raise ValueError(f"{value!r} is not among the names")
        return index

    def many(self, indices: Sequence[int] | NDArray[Any]) -> list[str]:
        """The names of many samples."""
        wanted = np.asarray(indices, np.int64)
        out: list[str] = [""] * len(wanted)
        for segment in self._store.segments:
            inside = (wanted >= segment.base) & (wanted < segment.base + segment.directory.samples)
            where = np.flatnonzero(inside)
            local = np.ascontiguousarray(wanted[where] - segment.base)
            for k, name in zip(where, segment.directory.names(local), strict=True):
                out[k] = os.fsdecode(name)
        return out

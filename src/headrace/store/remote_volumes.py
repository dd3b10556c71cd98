"""The volumes of a segment that are objects: packed ones below a store's URL, or somebody's own.

Has the face of `Volumes`. An object's version (its etag, else its modification time) is learnt when it
is first looked at, or stands in the manifest; from then on a read that meets another version fails.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.errors import CorruptStore, HeadraceError, SourceChanged
from headrace.io.objects.failure import Failure
from headrace.io.objects.location import join, root_of, shown
from headrace.io.objects.reading import RemoteObject
from headrace.store.format import PAGE_BYTES, corrupt
from headrace.store.volume_format import VolumeHeader, check_volume_header
from headrace.store.volumes import Volumes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.io.objects.transport import Found
    from headrace.store.manifest import Segment, VolumeEntry
    from headrace.store.opening import RemoteEngine


class RemoteVolumes(Volumes):
    """The remote volumes of one segment.

    Args:
        folder: the store's URL, or the local folder of an index.
        segment: the segment's manifest entry.
        engine: reads them.
        remote: whether the manifest itself came from `folder`, a URL, and is trusted less.
        paths: the volumes' URLs, where somebody else has found them.

    Raises:
        CorruptStore: a remote manifest names local files, or objects of other buckets.
    """

    def __init__(
        self,
        folder: str,
        segment: Segment,
        engine: RemoteEngine,
        *,
        remote: bool,
        paths: Sequence[str] | None = None,
    ) -> None:
        super().__init__(folder, segment)
        self.engine = engine
        if paths is None:
            self.paths = [
                join(folder, v.path) if v.kind == "packed" else v.path for v in segment.volumes
            ]
            self._check_places(folder, remote=remote)
        else:
            self.paths = list(paths)
        engine.register(
            RemoteObject(path, v.bytes or 0, v.etag, v.mtime_ns)
            for v, path in zip(self.entries, self.paths, strict=True)
            if v.kind == "object" and engine.known(path) is None
        )

    def problems(self) -> list[HeadraceError]:
        """What is wrong with the volumes, one error each; all are looked at together."""
        wanted = [n for n, path in enumerate(self.paths) if not self._seen(path)]
        pages = [memoryview(bytearray(self._head_bytes(n))) for n in wanted]
        outcomes = self.engine.fetch_many(
            [(self.paths[n], 0, page) for n, page in zip(wanted, pages, strict=True) if len(page)]
        )
        found = []
        looked_at = [(n, page) for n, page in zip(wanted, pages, strict=True) if len(page)]
        for (number, page), outcome in zip(looked_at, outcomes, strict=True):
            try:
                self._judge(number, page, outcome)
            except HeadraceError as e:
                found.append(e)
        return found

    def check(self, number: int) -> None:
        """Looks at one volume; errors as for `check_all`."""
        page = memoryview(bytearray(self._head_bytes(number)))
        if page:
            outcome = self.engine.fetch_many([(self.paths[number], 0, page)])[0]
            self._judge(number, page, outcome)

    def read_into(self, number: int, view: memoryview, offset: int) -> int:
        """As `Volumes.read_into`."""
        if not len(view):
            return 0
        return self.engine.fetch(self.paths[number], offset, view).count

    read_unchecked = read_into

    def borrow(self, number: int) -> tuple[int, bool]:
        """There are no descriptors.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.paths[number]} is an object and has no descriptor")

    def native(self) -> list[tuple[str, bytes, int, int]]:
        """As `headrace._native.Catalog` wants them."""
        return [
            ("remote", os.fsencode(path), entry.bytes or 0, -1)
            for entry, path in zip(self.entries, self.paths, strict=True)
        ]

    def _check_places(self, folder: str, *, remote: bool) -> None:
        local = next((v.path for v in self.entries if v.kind not in ("packed", "object")), None)
        if local is not None:
            raise CorruptStore(
                f"{shown(folder) if remote else folder}: the volume {local!r} is a local file, expected "
                "objects.",
                path=local,
                next_step="Index the source again.",
            )
        if not remote or self.engine.policy.other_roots:
            return
        root = root_of(folder)
        other = next((p for p in self.paths if root_of(p) != root), None)
        if other is not None:
            raise CorruptStore(
                f"{shown(folder)}: the manifest names the object {shown(other)}, expected objects "
                f"below {root}.",
                path=shown(folder),
                next_step="If you trust who wrote it, pass storage_options={'other_roots': True}.",
            )

    def _seen(self, path: str) -> bool:
        """Whether this volume was looked at before it was sent to this process."""
        known = self.engine.known(path)
        return known is not None and path in self.engine.looked_at

    def _head_bytes(self, number: int) -> int:
        """A packed volume's header; one byte is enough to learn an object's size and version."""
        entry = self.entries[number]
        return PAGE_BYTES if entry.kind == "packed" else min(1, entry.bytes or 0)

    def _judge(self, number: int, page: memoryview, outcome: Found | Failure) -> None:
        entry, path = self.entries[number], self.paths[number]
        if isinstance(outcome, Failure):
            raise _missing(entry, outcome)
        if outcome.size != entry.bytes:
            raise corrupt(
                shown(path), "volume size in bytes", found=f"{outcome.size:,}",
                expected=f"{entry.bytes:,}", offset=min(outcome.size, entry.bytes or 0),
                next_step="Pack the source again, or upload the right file.",
            )  # fmt: skip
        if entry.kind == "packed":
            expected = VolumeHeader(
                bytes.fromhex(entry.uuid or ""), bytes.fromhex(self._segment_uuid), number
            )
            check_volume_header(bytes(page), expected, shown(path))
            self.engine.register(
                [RemoteObject(path, outcome.size, outcome.etag, outcome.modified_ns)]
            )
        self.engine.looked_at.add(path)


def _missing(entry: VolumeEntry, failure: Failure) -> HeadraceError:
    """A missing object is what a missing file is; a shorter one is not the one that was meant."""
    error = failure.to_error()
    if failure.fault.kind not in ("missing", "changed"):
        return error
    kind = CorruptStore if entry.kind == "packed" else SourceChanged
    return kind(error.message, path=error.path, next_step=error.next_step)

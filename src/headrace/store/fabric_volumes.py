"""The volumes of a segment that lie on NVMe/TCP namespaces.

Has the face of `Volumes`: packed volumes only, each a window of a namespace, checked by its header like
a file's. Reads are the engine's; `native` hands it the volumes' URLs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import CorruptStore
from headrace.store.remote_volumes import RemoteVolumes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.store.manifest import Segment
    from headrace.store.namespace_engine import NamespaceEngine

__all__ = ["FabricVolumes"]


class FabricVolumes(RemoteVolumes):
    """The volumes of one segment.

    Args:
        folder: the namespace's URL.
        segment: the segment's manifest entry.
        engine: reads them.
        urls: of the volumes, in the segment's order; None: as the catalog of `folder` says.

    Raises:
        CorruptStore: one is not packed, or the catalog has none of its name.
        FabricError: a target cannot be reached.
    """

    def __init__(
        self,
        folder: str,
        segment: Segment,
        engine: NamespaceEngine,
        urls: Sequence[str] | None = None,
    ) -> None:
        foreign = next((v.path for v in segment.volumes if v.kind != "packed"), None)
        if foreign is not None:
            raise CorruptStore(
                f"{folder}: the volume {foreign!r} lies elsewhere, expected packed volumes only.",
                path=folder,
                next_step="Pack the source: an index cannot be read from a namespace.",
            )
        if urls is None:
            urls = [engine.place(folder, v.path) for v in segment.volumes]
        else:
            for url in urls:
                engine.open(url)
        super().__init__(folder, segment, engine, remote=True, paths=urls)

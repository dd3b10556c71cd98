"""Trust: a store whose samples lie outside its folder is read only where somebody agreed to that.

An index names files, folders and objects that lie elsewhere, and a manifest is a text that anybody can
write: a copied store could have its reader open any file of the user, or ask any server. So volumes outside
the store's folder are opened where this user agreed once (`trust=`, `--trust`), or made the index on this
machine; what root agreed to counts for all. The same holds for the sources that `repair` reads again.

What was agreed to is the store's content together with all of these places: a store with other samples, or
the same one that names other places, is another question. A copy of the very same store is none.

    STATE/trusted/KEY      one file for each store: its path, and the places

STATE is HEADRACE_STATE_DIR, else XDG_STATE_HOME/headrace or ~/.local/state/headrace; root's is
/var/lib/headrace, which all users believe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

from headrace.base.files import open_file, replace_file, state_folder
from headrace.errors import StoreError
from headrace.io.objects.location import is_url, shown
from headrace.store.sources.scan import absolute_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from headrace.store.manifest import Manifest

    Trust: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    """Folders, files or URLs below which volumes may lie; "*": anywhere."""

Kind = Literal["volumes", "sources"]

ANYWHERE = "*"

_SYSTEM_FOLDER = "/var/lib/headrace"
_SHOWN = 5

_log = logging.getLogger("headrace")
_agreed: set[str] = set()  # by this process, should there be no folder to write it down in


def check_trust(kind: Kind, where: str, manifest: Manifest, trust: Trust = None) -> None:
    """Sees that what the store at `where` names outside its folder may be opened.

    `kind`: its volumes, or the sources that they were packed from. `trust`: places that the caller agrees to,
    from now on. Raises StoreError if nobody has agreed to them.
    """
    places = _places(kind, where, manifest)
    if not places:
        return
    key = _key(kind, manifest, places)
    if key in _agreed or any(
        _is_recorded(folder, key) for folder in (_state_folder(), _SYSTEM_FOLDER)
    ):
        return
    given = [trust] if isinstance(trust, str | os.PathLike) else list(trust or ())
    if ANYWHERE in given:
        return  # of this call alone
    roots = [absolute_path(os.fspath(each)) for each in given]
    refused = [p for p in places if not any(_lies_below(p, root) for root in roots)]
    if not refused:
        _record(key, where, places)
        return
    named = "".join(f"\n  {shown(p)}" for p in refused[:_SHOWN])
    more = f"\n  and {len(refused) - _SHOWN:,} more" if len(refused) > _SHOWN else ""
    what = (
        f"{len(refused):,} of its volumes lie outside its folder"
        if kind == "volumes"
        else "it says that its samples came from elsewhere"
    )
    root = shown(_common_root(refused))
    raise StoreError(
        f"{shown(where)}: {what}, and nobody on this machine has agreed to reading there:"
        f"{named}{more}\n",
        path=shown(where),
        next_step=f"If you trust whoever made this store, agree once: trust={root!r}, or --trust {root}.",
    )


def record_trust(where: str, manifest: Manifest) -> None:
    """Writes down that this user has made the store: its volumes and sources are of the user's choice."""
    for kind in get_args(Kind):
        places = _places(kind, where, manifest)
        if places:
            _record(_key(kind, manifest, places), where, places)


def _key(kind: str, manifest: Manifest, places: Iterable[str]) -> str:
    """Names the content and the places; the fingerprint is that of the directories."""
    document = json.dumps([kind, manifest.fingerprint, sorted(places)], ensure_ascii=True)
    return hashlib.sha256(document.encode("ascii")).hexdigest()


# -- places -------------------------------------------------------------------------------------------


def _places(kind: Kind, where: str, manifest: Manifest) -> list[str]:
    """The sources that a manifest names, or the volumes that lie outside the store's folder."""
    places: set[str] = set()
    if kind == "sources":
        for segment in manifest.segments:
            named: Any = segment.source.get("paths") or segment.source.get("path") or ()
            named = [named] if isinstance(named, str) else named
            places.update(absolute_path(p) for p in named if isinstance(p, str))
        return sorted(places)
    for volume in (v for s in manifest.segments for v in s.volumes if v.kind != "packed"):
        if is_url(volume.path):
            if not (is_url(where) and _origin(volume.path) == _origin(where)):
                places.add(volume.path)
        elif is_url(where) or not _is_inside(os.path.join(where, volume.path), where):
            places.add(absolute_path(os.path.join("" if is_url(where) else where, volume.path)))
    return sorted(places)


def _is_inside(path: str, folder: str) -> bool:
    """Whether a path lies in a folder, and no link in it leads out."""
    if not _lies_below(os.path.abspath(path), os.path.abspath(folder)):
        return False
    return _lies_below(os.path.realpath(path), os.path.realpath(folder))


def _lies_below(place: str, root: str) -> bool:
    return place == root or place.startswith(root.rstrip("/") + "/")


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _common_root(places: list[str]) -> str:
    """What `trust` would have to be: the folder of all, or one place where they have none."""
    if all(not is_url(p) for p in places):
        common = os.path.commonpath(places)
        return common if common != "/" else places[0]
    return places[0]


# -- the record ---------------------------------------------------------------------------------------


def _state_folder() -> str:
    given = os.environ.get("HEADRACE_STATE_DIR")
    if given:
        return given
    if os.geteuid() == 0:
        return _SYSTEM_FOLDER
    return str(state_folder())


def _is_recorded(folder: str, key: str) -> bool:
    try:
        fd = open_file(os.path.join("trusted", key), within=folder, owned=True)
    except OSError:
        return False
    try:
        return folder != _SYSTEM_FOLDER or os.fstat(fd).st_uid == 0
    finally:
        os.close(fd)


def _record(key: str, where: str, places: list[str]) -> None:
    _agreed.add(key)
    folder = os.path.join(_state_folder(), "trusted")
    text = json.dumps(
        {"store": shown(absolute_path(where)), "places": [shown(p) for p in places]}, indent=1
    )
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        replace_file(os.path.join(folder, key), text.encode() + b"\n", sync=False)
    except OSError as e:
        _log.warning(
            "%s: it cannot be written down that %s may be read: %s. Other processes will ask for trust.",
            folder, shown(where), e.strerror or e,
        )  # fmt: skip

"""`storage_options=`: what goes to the object store's client, and what headrace itself obeys.

One mapping, because users think of one thing. Our own keys are the fields of `ReadPolicy`; everything
else (endpoint, region, access_key_id, credential_provider, client_options, ...) is handed to obstore or
to fsspec untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPolicy:
    """How objects are read. The defaults suit nearly everyone.

    Attributes:
        deadline_s: a read that has not succeeded after this long, retries included, fails.
        attempts_max: a read that has failed so often fails; None: only the deadline counts.
        pause_first_s: the longest pause after a first failure; it doubles with each further one.
        pause_most_s: the longest pause after any failure, unless the server asks for more.
        stall_s: a request that gives no byte for this long is dropped and sent anew.
        reads_in_flight: requests at once, to begin with; the tuner turns it.
        hedge_s: send a request a second time when it has not finished after this long; None: never. `auto`:
            after longer than 19 of 20 of its size take; at most one request in twenty, and fewer where the
            second answer seldom comes first.
        directory_cache: a local folder that keeps sample directories between runs.
        staging: a local folder in which stores are built before they are uploaded; None: the
            system's folder for temporary files.
        other_roots: let a remote manifest name objects of other buckets or hosts.
    """

    deadline_s: float = 60.0
    attempts_max: int | None = None
    pause_first_s: float = 0.1
    pause_most_s: float = 10.0
    stall_s: float = 10.0
    reads_in_flight: int = 16
    hedge_s: float | Literal["auto"] | None = "auto"
    directory_cache: str | None = None
    staging: str | None = None
    other_roots: bool = False

    def __post_init__(self) -> None:
        for name in ("deadline_s", "pause_first_s", "pause_most_s", "stall_s", "hedge_s"):
            value = getattr(self, name)
            if value is None or (name == "hedge_s" and value == "auto"):
                continue
            if not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name} is {value!r}, expected seconds above 0")
        for name in ("reads_in_flight", "attempts_max"):
            value = getattr(self, name)
            if name == "attempts_max" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected 1 or more")


def split_options(options: Mapping[str, Any] | None) -> tuple[ReadPolicy, dict[str, Any]]:
    """Our own options, and the client's."""
    client = dict(options or {})
    own = {f.name: client.pop(f.name) for f in fields(ReadPolicy) if f.name in client}
    return ReadPolicy(**own), client

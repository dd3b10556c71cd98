"""`storage_options=` of `nvme+tcp://` URLs: one mapping, because users think of one thing.

Its keys are the fields of `HostOptions` and `EngineOptions`, and those of `FabricOptions`. Values may be
text, as the command line gives them.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.fabric.engine import EngineOptions
from headrace.fabric.host import HostOptions
from headrace.fabric.identity import HostIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FabricOptions", "options_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricOptions:
    """How a store is read over the fabric.

    Attributes:
        identity: who we are to targets; by default what is the same on this machine after every start.
        engine: queues, deadlines, digests.
        directory_cache: a local folder that keeps sample directories between runs.
    """

    identity: HostIdentity = field(default_factory=HostIdentity.of_machine)
    engine: EngineOptions = field(default_factory=EngineOptions)
    directory_cache: str | None = None
    other_roots: ClassVar[bool] = False
    """A namespace never sends its readers to objects elsewhere."""


def options_of(given: Mapping[str, Any] | None) -> FabricOptions:
    """The options that a mapping stands for.

    Keys beside the fields' names: `hostnqn` and `hostid` (32 hexadecimal digits or a UUID), and
    `deadline_s`, how long a read may take while a target is gone.

    Raises:
        ValueError: an unknown key, or a value that makes no sense.
    """
    left = dict(given or {})
    identity = _identity(left.pop("hostnqn", None), left.pop("hostid", None))
    cache = left.pop("directory_cache", None)
    if "deadline_s" in left:
        left["give_up_s"] = left.pop("deadline_s")
    host = HostOptions(**_take(left, HostOptions))
    engine = EngineOptions(host=host, **_take(left, EngineOptions))
    if left:
        known = sorted(
            {f.name for kind in (HostOptions, EngineOptions) for f in fields(kind)} - {"host"}
        )
        raise ValueError(
            f"storage_options has {min(left)!r}, expected hostnqn, hostid, directory_cache, deadline_s, "
            f"{', '.join(known)}"
        )
    if engine.queues < 1 or engine.give_up_s <= 0 or engine.command_timeout_s <= 0:
        raise ValueError(
            f"queues is {engine.queues}, deadline_s {engine.give_up_s}, command_timeout_s "
            f"{engine.command_timeout_s}, expected numbers above 0"
        )
    return FabricOptions(
        identity=identity, engine=engine, directory_cache=None if cache is None else str(cache)
    )


def _identity(nqn: str | None, number: str | bytes | None) -> HostIdentity:
    own = HostIdentity.of_machine()
    if number is None:
        return HostIdentity(nqn or own.nqn, own.id)
    try:
        raw = number if isinstance(number, bytes) else uuid.UUID(number).bytes
    except ValueError:
        raise ValueError(f"hostid is {number!r}, expected a UUID") from None
    return HostIdentity(nqn or own.nqn, raw)


def _take(left: dict[str, Any], kind: type[HostOptions | EngineOptions]) -> dict[str, Any]:
    """The values of `kind`'s fields, taken out of `left`."""
    found = {}
    for each in fields(kind):
        if each.name in left and each.name != "host":
            found[each.name] = _value(each.name, str(each.type), left.pop(each.name))
    return found


def _value(name: str, kind: str, value: Any) -> Any:
    if not isinstance(value, str) or kind not in ("int", "float", "bool"):
        return value
    try:
        if kind == "bool":
            return {"true": True, "false": False}[value.lower()]
        return int(value) if kind == "int" else float(value)
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {value!r}, expected {kind}") from None

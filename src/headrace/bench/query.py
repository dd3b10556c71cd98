"""Query: one resolved value of a workload, as `dlio_benchmark_query` prints it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.config import closest_key, load_workload, parse_value
from headrace.bench.schema import KEYS, TimeDistribution
from headrace.errors import WorkloadError

if TYPE_CHECKING:
    from headrace.bench.config import CommandLine
    from headrace.bench.schema import Workload

_KEY: Final = "workflow.query"


def queried(line: CommandLine) -> Any:
    """The value of the key that `workflow.query` names: as given, else its default; None without a query.

    Args:
        line: a command line with `++workload.workflow.query=KEY`.

    Raises:
        WorkloadError: the workload is wrong, or has no such key.
    """
    asked = [override for override in line.overrides if override.key == _KEY]
    others = tuple(override for override in line.overrides if override.key != _KEY)
    loaded = load_workload(replace(line, overrides=others))
    if not asked or asked[-1].value is None:
        return None
    key = str(parse_value(asked[-1].value))
    given: Any = loaded.document
    for part in key.split("."):
        given = given.get(part) if isinstance(given, dict) else None
    if given is None or (isinstance(given, dict) and key not in KEYS):
        return _default(loaded.workload, key, asked[-1].written)
    return given


def _default(workload: Workload, key: str, written: str) -> Any:
    section, *inner = key.split(".")
    # Sections within sections are dataclasses, or joined with `_`.
    for path in ((section, *inner), (section, "_".join(inner))):
        value: Any = workload
        known = True
        for name in path:
            known = known and name in _names(value)
            value = getattr(value, name) if known else None
        if known and not _names(value):
            return value.mean_s if isinstance(value, TimeDistribution) else value
    raise WorkloadError(f"command line: {written}: {closest_key(key)}")


def _names(value: Any) -> set[str]:
    """The fields of a section."""
    section = is_dataclass(value) and not isinstance(value, TimeDistribution)
    return {each.name for each in fields(value)} if section else set()

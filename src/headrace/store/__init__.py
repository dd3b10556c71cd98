"""Stores: a sample directory and its volumes. Write them (`pack`, `index`), open them, check them.

This door opens them, and names what is returned and what options are. What writes and checks (`pack`, `repair`,
`verify`) is imported from its own module, or from `headrace`: training only opens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.store.opening import from_hf, open_store
from headrace.store.store import Names, Store

if TYPE_CHECKING:
    from headrace.store.packing import PackOptions, WriteReport
    from headrace.store.repair import RepairReport
    from headrace.store.verify import BadSample, VerifyReport, VolumeProblem

__all__ = [
    "BadSample",
    "Names",
    "PackOptions",
    "RepairReport",
    "Store",
    "VerifyReport",
    "VolumeProblem",
    "WriteReport",
    "from_hf",
    "open_store",
]

_HOMES = {
    **dict.fromkeys(("PackOptions", "WriteReport"), "packing"),
    "RepairReport": "repair",
    **dict.fromkeys(("BadSample", "VerifyReport", "VolumeProblem"), "verify"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.store' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"headrace.store.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Stores: a sample directory and its volumes. Write them (`pack`, `index`), open them, check them."""

from headrace.store.opening import from_hf, open_store
from headrace.store.pack import append, index, pack
from headrace.store.packing import PackOptions, WriteReport
from headrace.store.repair import RepairReport, repair
from headrace.store.store import Names, Store
from headrace.store.verify import BadSample, VerifyReport, VolumeProblem, verify

__all__ = [
    "BadSample",
    "Names",
    "PackOptions",
    "RepairReport",
    "Store",
    "VerifyReport",
    "VolumeProblem",
    "WriteReport",
    "append",
    "from_hf",
    "index",
    "open_store",
    "pack",
    "repair",
    "verify",
]

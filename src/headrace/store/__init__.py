"""Stores: a sample directory and its volumes. Write them (`pack`, `index`), open them, check them."""

from headrace.store.hf import from_hf
from headrace.store.index import index
from headrace.store.name_list import Names
from headrace.store.open_store import open_store
from headrace.store.pack import append, pack
from headrace.store.packing import PackOptions, WriteReport
from headrace.store.repair import RepairReport, repair
from headrace.store.store import Store
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

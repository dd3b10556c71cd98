"""Stores: a sample directory and its volumes. Write them (`pack`, `index`), open them, check them."""

from headrace.store.hf import from_hf
from headrace.store.index import index
from headrace.store.pack import PackOptions, WriteReport, append, pack
from headrace.store.repair import RepairReport, repair
from headrace.store.store import Names, Store, open_store
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

"""Stores: a sample directory and its volumes. Write them (`pack`, `index`), open them, check them."""

from headrace.store.index import index
from headrace.store.pack import PackOptions, WriteReport, append, pack
from headrace.store.store import Names, Store, open_store

__all__ = ["Names", "PackOptions", "Store", "WriteReport", "append", "index", "open_store", "pack"]

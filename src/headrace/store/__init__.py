"""Stores: a sample directory and its volumes.

This door opens them. What writes and checks them (`pack`, `repair`, `verify`) is imported from its own module:
training only opens.
"""

from headrace.store.opening import from_hf, open_store
from headrace.store.store import Names, Store

__all__ = ["Names", "Store", "from_hf", "open_store"]

"""The engines under test, one file each, behind one small interface.

An engine is what a user of that library would write by following its documentation, for raw bytes
in random order. It copies each sample's bytes out of the page cache (a view of a mapping that
nobody reads would measure nothing). `load` imports, `open` opens, `batches` delivers one epoch.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.check import Batch
    from benchmarks.datasets import DataSet


class Loader(Protocol):
    """One engine under test. It lives in a process of its own."""

    form: str
    """The form of the data set that it reads, see `forms`."""

    order: str
    """What its random order is: `exact`, or how it falls short of that."""

    def load(self) -> None:
        """Imports what the engine needs. Not measured."""

    def open(self, data: DataSet, path: Path) -> None:
        """Opens the data set at `path`. Measured as `open_s`."""

    def batches(self, seed: int) -> Iterator[Batch]:
        """One epoch in random order. Measured."""

    def close(self) -> None:
        """Ends threads and processes. Not measured."""

    def facts(self) -> dict[str, object]:
        """What else should stand in the result, e.g. the randomness level."""


class Plain:
    """What most engines have in common: nothing to close, no more facts."""

    order = "exact"

    def close(self) -> None:
        """Nothing to end."""

    def facts(self) -> dict[str, object]:
        """Nothing to add."""
        return {}


_MODULES = {
    "openread": "openread:OpenRead",
    "torch0": "torch_files:Torch0",
    "torch2": "torch_files:Torch2",
    "lmdb": "lmdb_values:Lmdb",
    "litdata": "litdata_chunks:LitData",
    "spdl": "spdl_files:Spdl",
    "hf": "hf_arrow:HfDatasets",
    "headrace": "headrace_store:Exact",
    "headrace-blocked": "headrace_store:Blocked",
}

LOADERS = tuple(_MODULES)

_ADAPTERS = {
    "tf-files": "tensorflow_data:Files",
    "tf-records": "tensorflow_data:Records",
    "headrace-tf": "tensorflow_data:Headrace",
    "headrace-tf-files": "tensorflow_data:HeadraceFiles",
    "headrace-tf-strings": "tensorflow_data:HeadraceStrings",
    "grain0": "grain_records:Grain0",
    "grain2": "grain_records:Grain2",
    "headrace-grain": "grain_records:Headrace",
    "headrace-jax": "grain_records:HeadraceJax",
}

ADAPTERS = tuple(_ADAPTERS)
"""Engines of `plane_parts/adapters.py`, which run in the frameworks' own environment."""

_FRAMEWORKS = Path(__file__).resolve().parents[2] / ".venv-frameworks/bin/python"
PEERS = ("torch0", "torch2", "lmdb", "litdata", "spdl", "hf")

PACKAGES = {
    "torch0": "torch",
    "torch2": "torch",
    "lmdb": "lmdb",
    "litdata": "litdata",
    "spdl": "spdl",
    "hf": "datasets",
    "headrace": "headrace",
    "headrace-blocked": "headrace",
}
"""The distribution whose version is recorded."""

FORMS = {
    "openread": "files",
    "torch0": "files",
    "torch2": "files",
    "spdl": "files",
    "lmdb": "lmdb",
    "litdata": "litdata",
    "hf": "hf",
    "headrace": "headrace",
    "headrace-blocked": "headrace",
    "tf-files": "files",
    "tf-records": "tfrecord",
    "headrace-tf": "headrace",
    "headrace-tf-files": "files",
    "headrace-tf-strings": "headrace",
    "grain0": "arrayrecord",
    "grain2": "arrayrecord",
    "headrace-grain": "headrace",
    "headrace-jax": "headrace",
}
"""Each engine's form, readable without importing the engine."""


def interpreter(name: str) -> str:
    """The Python that runs an engine."""
    return str(_FRAMEWORKS) if name in _ADAPTERS else sys.executable


def create(name: str) -> Loader:
    """The engine called `name`, or the one at `module:Class` (tests bring their own)."""
    known = {**_MODULES, **_ADAPTERS}
    if name not in known and ":" not in name:
        raise ValueError(f"engine is {name!r}, one of {', '.join(known)} is known")
    where = f"benchmarks.loaders.{known[name]}" if name in known else name
    module, _, attribute = where.partition(":")
    loader: Loader = getattr(importlib.import_module(module), attribute)()
    return loader

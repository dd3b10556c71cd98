"""Optional packages: which extra of headrace brings each, and one error where one is missing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from headrace.errors import MissingPackage

if TYPE_CHECKING:
    from types import ModuleType

EXTRAS: Final = {
    "torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "grain": "jax", "starlette": "web",
    "uvicorn": "web", "pynvml": "gpu", "obstore": "objects", "fsspec": "objects", "h5py": "hdf5",
    "pyarrow": "arrow", "array_record": "array-record", "datasets": "hf", "zarr": "zarr",
    "lmdb": "lmdb", "lance": "lance", "zstandard": "text", "tokenizers": "tokens", "darshan": "darshan",
    "ray": "ray",
}  # fmt: skip
"""Which of our extras brings a module that headrace itself does not need."""


def import_extra(module: str, purpose: str) -> ModuleType:
    """Import an optional package, or a module inside.

    `purpose` is what needs it, as the beginning of a sentence: "reading data.h5". Raises MissingPackage if it
    is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise missing_package(e, module.partition(".")[0], purpose) from e


def missing_package(error: ImportError, package: str, purpose: str) -> MissingPackage:
    """The error that says what needs this package, and how to install it."""
    why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"fails: {error}"
    wanted = f"headrace[{EXTRAS[package]}]" if package in EXTRAS else package
    message = f"{purpose} needs the package {package}, which {why}."
    return MissingPackage(message, next_step=f"Install it: pip install '{wanted}'")

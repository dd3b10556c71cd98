"""Swap: torch's DataLoader becomes headrace's in a program that does not know of it.

This file is copied under the name `sitecustomize.py` into a folder that stands first in PYTHONPATH,
so it imports nothing of headrace before torch is there. When the program has imported torch,
`torch.utils.data.DataLoader` is replaced, under its other name `torch.utils.data.dataloader.DataLoader`, too,
which is what changing one import does. What it did, it writes into the file that HEADRACE_SWAP names:
`swapped`, `made` with the first loader, or `failed: why`.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__: list[str] = []

_HERE = os.path.dirname(os.path.abspath(__file__))


def _say(text: str) -> None:
    path = os.environ.get("HEADRACE_SWAP")
    if path:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(fd, text.replace("\n", " ").encode() + b"\n")
        os.close(fd)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as everybody does, and swaps when it has been loaded."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the interface's
        target: ModuleType | None = None,  # noqa: ARG002 - the same
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_swap(module: ModuleType) -> None:
                load(module)
                try:
                    _swap()
                except Exception as e:  # noqa: BLE001 - the program goes on with torch's
                    _say(f"failed: {type(e).__name__}: {e}")

            spec.loader.exec_module = load_and_swap  # type: ignore[method-assign]
        return spec


def _swap() -> None:
    import torch.utils.data as torch_data

    from headrace.torch import DataLoader

    begin = DataLoader.__init__

    @functools.wraps(begin)
    def begin_and_say(self: Any, *args: Any, **options: Any) -> None:
        if DataLoader.__init__ is begin_and_say:  # the first says it for all
            DataLoader.__init__ = begin  # type: ignore[method-assign]
            _say("made")
        begin(self, *args, **options)

    DataLoader.__init__ = begin_and_say  # type: ignore[method-assign]
    torch_data.DataLoader = torch_data.dataloader.DataLoader = DataLoader  # type: ignore[misc]
    _say("swapped")


def _next_sitecustomize() -> None:
    """The one that would have been imported without this one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as e:
        if e.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own  # whose import is not over


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _AfterTorch())
    _next_sitecustomize()

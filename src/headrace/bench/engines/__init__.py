"""Engines under test: what reads the batches of emulated accelerators, and which one a workload is run with.

* base: what every engine is, and the null engine
* native: headrace's own
* frameworks: PyTorch's DataLoader, tf.data, a class of the user's
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.bench.engines.base import Engine, EngineContext, NullEngine
from headrace.bench.engines.frameworks import CustomEngine, TensorFlowEngine, TorchEngine
from headrace.bench.engines.native import ExtentsEngine, FilesEngine
from headrace.bench.plan import replay_of
from headrace.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.bench.config import LoadedWorkload

__all__ = ["Engine", "EngineContext", "engine_name", "make_engine"]


def _native_engine(context: EngineContext) -> Engine:
    """Whole files by path, or samples by their extents where files hold many."""
    data = context.workload.dataset
    whole = data.num_samples_per_file == 1
    if data.requests is not None:
        whole = replay_of(data.requests).recorded.is_whole_files
    return FilesEngine(context) if whole else ExtentsEngine(context)


_ENGINES: Mapping[str, Callable[[EngineContext], Engine]] = {
    "headrace": _native_engine,
    "torch": TorchEngine,
    "tensorflow": TensorFlowEngine,
    "null": NullEngine,
}


def engine_name(loaded: LoadedWorkload) -> str:
    """The engine's name, checked against what it can do.

    Raises:
        WorkloadError: there is no such engine, or it cannot do what the workload asks for.
    """
    reader = loaded.workload.reader
    if reader.engine.startswith("custom:"):
        return reader.engine
    if reader.engine not in _ENGINES:
        raise WorkloadError(
            f"{loaded.at('reader.engine')} is {reader.engine!r}, expected one of "
            f"{', '.join(_ENGINES)} or custom:MODULE:CLASS."
        )
    if reader.data_loader == "synthetic":
        return "null"
    if loaded.workload.dataset.requests is not None and reader.engine in ("torch", "tensorflow"):
        raise WorkloadError(
            f"{loaded.at('reader.engine')} is {reader.engine}: recorded files are read, not decoded.",
            next_step="Give ++workload.reader.engine=headrace, or leave out the exact requests: "
            "++workload.dataset.requests=null.",
        )
    if reader.odirect and reader.engine in ("torch", "tensorflow"):
        raise WorkloadError(
            f"{loaded.at('reader.odirect')} is not done by the engine {reader.engine}.",
            next_step="Give ++workload.reader.engine=headrace.",
        )
    return reader.engine


def make_engine(name: str, context: EngineContext) -> Engine:
    """Make an engine; errors as for its class."""
    if name.startswith("custom:"):
        return CustomEngine(context, name.removeprefix("custom:"))
    return _ENGINES[name](context)

"""GPUs: how busy they are, what memory they hold, and for which processes, through NVML.

Needs nvidia-ml-py (`headrace[gpu]`) and the driver; without them there are no GPUs to see, and `why` says
which is missing. A GPU that falls off the bus is left out until it is back. Each value that a GPU does
not support (MIG, vGPU, old ones) is left out alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

GPUS_MAX: Final = 64
PROCESSES_MAX: Final = 256

RETRY_LOOKS: Final = 60
"""A driver that was not there is looked for again after so many looks: it may be loaded later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One GPU at a moment; what it does not tell is None."""

    index: int
    busy: float | None = None
    """Share of the last sampling period in which a kernel ran, 0 to 1."""
    memory_bytes: float | None = None
    power_w: float | None = None
    processes: tuple[int, ...] = ()
    """Process ids that compute on it."""


def _nvml() -> Any:
    import pynvml

    return pynvml


class GPUs:
    """The GPUs of this node."""

    name = "gpu"

    def __init__(self, module: Callable[[], Any] = _nvml) -> None:
        self._module = module
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._looks = 0
        self.why = ""

    def read(self) -> list[GPU]:
        """What there is now; [] without GPUs."""
        if self._nvml is None and not self._begin():
            return []
        gpus = []
        for index, handle in enumerate(self._handles):
            gpu = self._look(index, handle)
            if gpu is not None:
                gpus.append(gpu)
        if self._handles and not gpus:
            self._end("no GPU answers any more")
        return gpus

    def close(self) -> None:
        """Let go of the driver."""
        self._end("closed")

    def _begin(self) -> bool:
        self._looks += 1
        if self._looks % RETRY_LOOKS != 1:
            return False
        try:
            nvml = self._module()
        except ImportError:
            self.why = "nvidia-ml-py is not installed: pip install 'headrace[gpu]'"
            return False
        try:
            nvml.nvmlInit()
            count = min(int(nvml.nvmlDeviceGetCount()), GPUS_MAX)
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except Exception as e:  # noqa: BLE001 - a driver's errors are its own
            self.why = f"the NVIDIA driver does not answer: {e}"
            return False
        self._nvml, self.why = nvml, "" if count else "the NVIDIA driver knows no GPU"
        return True

    def _end(self, why: str) -> None:
        nvml, self._nvml, self._handles, self.why = self._nvml, None, [], why
        self._looks = 0 if why == "closed" else 1
        if nvml is not None:
            _asked(nvml.nvmlShutdown)

    def _look(self, index: int, handle: Any) -> GPU | None:
        nvml = self._nvml
        busy = _number(_asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        memory = _number(_asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used))
        power = _number(_asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle)))
        running = _asked(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if busy is None and memory is None and running is None:
            return None
        pids = (getattr(process, "pid", None) for process in running or ())
        return GPU(
            index=index,
            busy=None if busy is None else min(1.0, busy / 100),
            memory_bytes=memory,
            power_w=None if power is None else power / 1e3,
            processes=tuple(pid for pid in pids if isinstance(pid, int))[:PROCESSES_MAX],
        )


def _asked(call: Callable[[], Any]) -> Any:
    """What the driver says; None if it refuses."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - NVMLError, and whatever a driver in trouble raises
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if value >= 0 else None

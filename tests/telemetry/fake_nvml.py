"""A driver's library without a driver: the calls that the agent makes of NVML, over GPUs of our own."""

# ruff: noqa: N802 - the names are NVML's

from types import SimpleNamespace


class NVMLError(Exception):
    """What NVML raises."""


class FakeNVML:
    """GPUs that do what they are told.

    Attributes:
        gpus: a dictionary each: `busy` (percent), `memory` (bytes), `power` (milliwatts), `pids`; what is
            missing is not supported; None is a GPU that fell off the bus.
    """

    NVMLError = NVMLError

    def __init__(self, *gpus):
        self.gpus = list(gpus)
        self.up = False
        self.refuses = ""

    def nvmlInit(self):
        if self.refuses:
            raise NVMLError(self.refuses)
        self.up = True

    def nvmlShutdown(self):
        self.up = False

    def nvmlDeviceGetCount(self):
        assert self.up
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def _of(self, handle, name):
        assert self.up
        if self.gpus[handle] is None:
            raise NVMLError("GPU is lost")
        if name not in self.gpus[handle]:
            raise NVMLError("Not Supported")
        return self.gpus[handle][name]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._of(handle, "busy"), memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=self._of(handle, "memory"), total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._of(handle, "power")

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        pids = self._of(handle, "pids")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]

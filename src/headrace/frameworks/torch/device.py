"""ToDevice: pictures that native threads decoded, sent to a GPU ahead of the consumer.

The batch's recycled buffer is page-locked where it lies, once, and uint8 goes over the bus on a stream of its
own; what is normalised is normalised there. The consumer's stream waits for a batch by an event, the host does
not.

Two things must never happen, and `Locked` and `ToDevice` see to one each:

* Memory that is locked is unmapped: CUDA would go on to read the old pages when the addresses are used again.
  The decode stage therefore gives no buffer back to the system while a device is in use, its pool is kept until
  the last buffer is unlocked, and unlocking waits for all copies.
* A buffer is decoded into while it is still being copied: each is held until the event behind its copy.

This is why `pin_memory=True` alone copies each batch into torch's own page-locked memory instead: the copies to
a device are the user's then, and torch knows when its own memory is free again.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.frameworks.torch.dataset import shared_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.plane.decoding import Decoding
    from headrace.plane.images import ImageBatch, Images

log = logging.getLogger("headrace.torch")

IN_FLIGHT_MAX = 3
"""Batches whose copies may be under way; the host waits for the oldest of more. Two hide the bus."""


class CudaTransfer:
    """Tensors on their way: an event for the host's memory, one for what the consumer gets."""

    def __init__(
        self, device: torch.device, tensors: list[Tensor], copied: Any, ready: Any
    ) -> None:
        self._device = device
        self._tensors = tensors
        self._copied, self._ready = copied, ready

    @property
    def copied(self) -> bool:
        """Whether the host's memory is free again."""
        return bool(self._copied.query())

    def wait(self) -> None:
        """Wait until the host's memory is free again."""
        self._copied.synchronize()

    def take(self) -> list[Tensor]:
        """The tensors; the current stream waits for them, the host does not."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._ready)
        for tensor in self._tensors:
            tensor.record_stream(stream)  # their memory belongs to the side stream's allocator
        return self._tensors


class CudaDevice:
    """A GPU, with a stream of its own for batches.

    Args:
        device: `cuda`, `cuda:1`, ...

    Raises:
        RuntimeError: there is no such GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"device is {str(device)!r}, and torch finds no CUDA here")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._cuda: Any = torch.cuda  # torch does not say the types of what is used here
        self._stream = self._cuda.Stream(self.device)

    def lock(self, address: int, nbytes: int) -> bool:
        """Page-lock memory for all devices; False: the system refuses, as RLIMIT_MEMLOCK may have it."""
        with torch.cuda.device(self.device):
            return int(self._cuda.cudart().cudaHostRegister(address, nbytes, 1)) == 0

    def unlock(self, address: int) -> None:
        """Undo `lock`."""
        with torch.cuda.device(self.device):
            self._cuda.cudart().cudaHostUnregister(address)

    def send(
        self, host: Tensor, labels: Tensor, finish: Callable[[Tensor], Tensor]
    ) -> CudaTransfer:
        """Copy on the side stream; returns at once where the memory is page-locked."""
        with torch.cuda.stream(self._stream):
            try:
                small = labels.pin_memory().to(self.device, non_blocking=True)
                pixels = host.to(self.device, non_blocking=True)
                copied = self._stream.record_event()
            except BaseException:
                self._stream.synchronize()  # whatever was begun reads the host's memory
                raise
            return CudaTransfer(
                self.device, [finish(pixels), small], copied, self._stream.record_event()
            )


class Locked:
    """Buffers of a decode stage that are page-locked, each when it is first sent."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pool: object = None
        self._bytes: dict[int, int] = {}
        self._refused = False

    def __len__(self) -> int:
        return len(self._bytes)

    def lock(self, batch: ImageBatch, stage: Decoding) -> None:
        """Lock a batch's buffer, unless it is already, or is none that is recycled.

        REQUIRES that no copy is under way when the stage's pool is another than before.
        """
        if self._pool is not stage.pool:
            self.unlock()
            self._pool = stage.pool
        address, nbytes = batch.pixels.ctypes.data, batch.pixels.nbytes
        if self._refused or not batch.recycled or self._bytes.get(address, 0) >= nbytes > 0:
            return
        if nbytes == 0:
            return
        if self._bytes.pop(address, 0):  # a larger batch in the same buffer
            self._device.unlock(address)
        if self._device.lock(address, nbytes):
            self._bytes[address] = nbytes
            return
        self._refused = True
        log.warning(
            "memory for batches cannot be page-locked (%d bytes; see ulimit -l): copies to the device wait "
            "for the host",
            nbytes,
        )

    def unlock(self) -> None:
        """Unlock all; REQUIRES that no copy is under way. Then the pool may go."""
        while self._bytes:
            self._device.unlock(self._bytes.popitem()[0])
        self._pool = None


class ToDevice:
    """Sends batches of pixels to a device.

    Args:
        device: where to.
        images: what the consumer gets.

    Attributes:
        locks: page-lock buffers; off for comparing.
    """

    def __init__(self, device: CudaDevice, images: Images) -> None:
        self.images = images
        self.locks = True
        self.locked = Locked(device)
        self._device = device
        self._in_flight: deque[tuple[CudaTransfer, ImageBatch]] = deque()

    @staticmethod
    def host_images(images: Images) -> Images:
        """What native threads decode to, so that the least goes over the bus: uint8."""
        return replace(images, dtype="uint8", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

    def send(self, batch: ImageBatch, stage: Decoding) -> CudaTransfer:
        """Begin to send a batch (mixed pictures: two rows of labels); its buffer is held until it is copied."""
        while self._in_flight and (
            self._in_flight[0][0].copied or len(self._in_flight) >= IN_FLIGHT_MAX
        ):
            self._in_flight.popleft()[0].wait()
        if self.locks:
            if stage.pool is not self.locked._pool:  # noqa: SLF001 - its own other half
                self.wait()
            self.locked.lock(batch, stage)
        if (mixed := batch.mixed) is None:
            labels = shared_tensor(batch.labels)
        else:
            labels = torch.from_numpy(np.stack([mixed.labels_a, mixed.labels_b]))
        transfer = self._device.send(torch.from_numpy(batch.pixels), labels, self.finish)
        self._in_flight.append((transfer, batch))
        return transfer

    def finish(self, pixels: Tensor) -> Tensor:
        """Lay out and normalise on the device: (value / 255 - mean) / std in float32, then as `dtype` says."""
        images = self.images
        if images.layout == "nhwc":
            pixels = pixels.permute(0, 3, 1, 2)  # channels-last memory
        if images.dtype == "uint8":
            return pixels
        shift, scale = (
            torch.tensor([255 * each for each in values], device=pixels.device).view(1, 3, 1, 1)
            for values in (images.mean, images.std)
        )
        normalised = pixels.to(torch.float32).sub_(shift).div_(scale)
        return normalised.to(getattr(torch, images.dtype))

    def wait(self) -> None:
        """Wait until no copy is under way."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

    def close(self) -> None:
        """Wait for all copies and unlock all buffers. What was delivered stays valid."""
        self.wait()
        self.locked.unlock()

    def __del__(self) -> None:
        """Of a loader that nobody closed: its pool is still there, so that no locked memory is unmapped."""
        with contextlib.suppress(Exception):  # at the program's end the device may be gone
            self.close()


def device_of(device: torch.device | str | int) -> CudaDevice | None:
    """The device that pictures are sent to; None: this process's own memory.

    Raises:
        ValueError: it is none that can be sent to.
        RuntimeError: there is no such GPU.
    """
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type == "cpu":
        return None
    if place.type != "cuda":
        raise ValueError(f"device is {str(place)!r}, expected 'cuda', 'cuda:0', ... or 'cpu'")
    return CudaDevice(place)

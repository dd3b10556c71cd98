"""TensorBatch: a batch as tensors that share headrace's buffer.

Nothing is copied: the tensors lie over the memory that the disk's bytes were read into, and keep it
from being recycled for as long as one of them, or a view of one, lives. PyTorch knows no read-only
tensors, so the rule is the reader's: never write into them in place. Whoever does changes that
batch for everyone else who holds it, and nothing more; the next batch is unharmed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.plane import Batch
    from headrace.plane.images import ImageBatch, Images


class _Writable:
    """Describes an array's memory to numpy as writable, and keeps the array alive.

    `torch.from_numpy` warns about read-only arrays, because it cannot keep the promise. Silencing
    the warning would silence it for the whole process; this says what is meant for one array.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def shared_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor over the memory of an array, which may be read-only.

    Args:
        array: any shape and strides, of a dtype that torch has.

    Returns:
        A tensor of equal shape and dtype. It must not be written if the array is read-only.
    """
    if array.flags.writeable or array.size == 0:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    return torch.from_numpy(np.asarray(_Writable(array)))


def pixel_tensors(batch: ImageBatch, images: Images) -> list[Tensor]:
    """Return pictures and labels as tensors over the batch's buffer, which is its own.

    Args:
        batch: decoded pictures.
        images: what they were decoded to.

    Returns:
        Pixels, shape (samples, 3, height, width), of channels-last memory where `Images` asked for that;
        labels, int64, shape (samples,), -1: none.
    """
    pixels = torch.from_numpy(batch.pixels)
    if images.dtype == "bfloat16":  # which numpy has not
        pixels = pixels.view(torch.bfloat16)
    if images.layout == "nhwc":
        pixels = pixels.permute(0, 3, 1, 2)
    return [pixels, shared_tensor(batch.labels)]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorBatch:
    """Samples that are delivered together, as tensors. Do not write into them in place."""

    data: Tensor
    """uint8, shape (bytes,): headrace's buffer. Samples lie in it in any order and with gaps."""

    offsets: Tensor
    """int64, shape (samples,), or (samples, parts) where several parts are read."""

    lengths: Tensor
    """int64, shaped like `offsets`; 0 where a sample lacks a part."""

    indices: Tensor
    """int64, shape (samples,): the samples' indices in the store."""

    labels: Tensor
    """int64, shape (samples,), -1 where a sample has none."""

    part_names: tuple[str, ...]
    """The parts that were read; `("",)` for samples of one part."""

    epoch: int
    """The epoch the batch belongs to."""

    position: int
    """The global position of its first sample."""

    @classmethod
    def over(cls, batch: Batch) -> TensorBatch:
        """Return tensors over a batch, without a copy."""
        return cls(
            shared_tensor(batch.data),
            shared_tensor(batch.offsets),
            shared_tensor(batch.lengths),
            shared_tensor(batch.indices),
            shared_tensor(batch.labels),
            batch.part_names,
            batch.epoch,
            batch.position,
        )

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int | tuple[int, str]) -> Tensor:
        """Return the bytes of the i-th sample, or of one of its parts: `batch[3, "jpg"]`.

        Returns:
            uint8, shape (length,): a view of `data`.

        Raises:
            IndexError: the batch has no such sample.
            KeyError: the part was not read.
            ValueError: several parts were read and none is named.
        """
        sample, part = i if isinstance(i, tuple) else (i, None)
        offsets, lengths = self._of_part(part)
        return self.data.narrow(0, int(offsets[sample]), int(lengths[sample]))

    def stacked(self, part: str | None = None) -> Tensor:
        """Return samples of equal length as the rows of one tensor.

        A view of `data` where they lie evenly spaced, as those gathered from the page cache do, and
        one copy otherwise.

        Returns:
            uint8, shape (samples, length).

        Raises:
            ValueError: the lengths differ.
        """
        offsets, lengths = self._of_part(part)
        if len(self) == 0:
            return self.data.new_empty((0, 0))
        length = int(lengths[0])
        if bool((lengths != length).any()):
            low, high = int(lengths.min()), int(lengths.max())
            raise ValueError(f"lengths are {low} to {high} bytes, expected all equal")
        strides = offsets.diff()
        stride = int(strides[0]) if len(strides) else length
        if stride >= 0 and bool((strides == stride).all()):
            start = self.data.storage_offset() + int(offsets[0])
            return self.data.as_strided((len(self), length), (stride, 1), start)
        return torch.stack([self.data.narrow(0, int(at), length) for at in offsets])

    def pin_memory(self) -> TensorBatch:
        """Return a copy in page-locked memory, for asynchronous copies to an accelerator."""
        return self._each(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TensorBatch:
        """Return the batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def __repr__(self) -> str:
        size = int(self.lengths.sum())
        return f"TensorBatch({len(self)} samples, {size:,} bytes, epoch {self.epoch})"

    def _of_part(self, part: str | None) -> tuple[Tensor, Tensor]:
        if part is None and self.offsets.ndim == 2:
            raise ValueError(f"name a part, one of {self.part_names}")
        if part is not None and part not in self.part_names:
            raise KeyError(f"part {part!r} was not read, only {self.part_names}")
        if part is None or self.offsets.ndim == 1:
            return self.offsets, self.lengths
        number = self.part_names.index(part)
        return self.offsets[:, number], self.lengths[:, number]

    def _each(self, change: Callable[[Tensor], Tensor]) -> TensorBatch:
        return replace(
            self,
            data=change(self.data),
            offsets=change(self.offsets),
            lengths=change(self.lengths),
            indices=change(self.indices),
            labels=change(self.labels),
        )

"""Collating into the arena: a stacked batch is written where it will be handed over.

Torch's `default_collate` stacks tensors in a worker into a shared-memory file made for each. It asks
a registry, `default_collate_fn_map`, how to stack; torch documents it as the place to extend. In
our workers the entry for tensors stacks into a region of the arena instead, with torch's own
function, or leaves it to torch's entry if there is no room or anything is unusual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils import collate as torch_collate

from headrace.frameworks.torch.dropin.packing import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.frameworks.torch.dropin.arena import Regions

__all__ = ["ArenaCollate"]


class ArenaCollate:
    """Stacks tensors into regions of a worker's arena.

    Args:
        regions: gives out the memory.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def install(self) -> None:
        """Let `default_collate` stack into the arena, in this process."""
        registry = torch_collate.default_collate_fn_map
        theirs = registry.get(torch.Tensor)
        if theirs is torch_collate.collate_tensor_fn:  # else the user's own: left alone
            registry[torch.Tensor] = self.stack

    def stack(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """Stack as torch does, in the arena."""
        first = batch[0]
        nbytes = len(batch) * first.numel() * first.element_size()
        out = self._empty(batch, first, nbytes) if nbytes > INLINE_BYTES else None
        if out is None and nbytes <= INLINE_BYTES and self._is_plain(batch, first):
            return torch.stack(tuple(batch), 0)  # goes inline: no need of a shared-memory file
        if out is None:
            theirs: torch.Tensor = torch_collate.collate_tensor_fn(
                batch, collate_fn_map=collate_fn_map
            )
            return theirs
        return torch.stack(tuple(batch), 0, out=out)

    @staticmethod
    def _is_plain(batch: Sequence[torch.Tensor], first: torch.Tensor) -> bool:
        shape, dtype = first.shape, first.dtype
        return all(
            type(one) is torch.Tensor
            and one.layout is torch.strided
            and one.shape == shape
            and one.dtype is dtype
            and one.device.type == "cpu"
            and not one.requires_grad
            and not one.is_quantized
            and not one.is_conj()
            and not one.is_neg()
            for one in batch
        )

    def _empty(
        self, batch: Sequence[torch.Tensor], first: torch.Tensor, nbytes: int
    ) -> torch.Tensor | None:
        if not self._is_plain(batch, first):
            return None
        region = self._regions.take(nbytes)
        if region is None:
            return None
        memory = torch.from_numpy(self._regions.hold(region)).untyped_storage()
        shape = (len(batch), *first.shape)
        return torch.empty(0, dtype=first.dtype).set_(memory, 0, shape, _contiguous(shape))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

"""Tokens for PyTorch: windows of tokens as tensors over the loader's own buffers.

The order, resume and ranks are those of `headrace.tokens`: under DDP or FSDP each rank takes its part of one
sequence, whatever their number, and no sampler is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace import api
from headrace.frameworks.torch.store_loader import sampler_of
from headrace.frameworks.view import LoaderView
from headrace.plane.loader import PassIterator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.data import Sampler

    from headrace.plane.loader import Pass
    from headrace.plane.tokens import TokenBatch, TokenDtype
    from headrace.store import Store


class TokenTensors:
    """A batch of windows as tensors; see `headrace.TokenBatch`.

    Attributes:
        batch: the batch that they share their memory with, unless it is page-locked.
        tokens: shape (windows, length + 1).
        inputs: shape (windows, length): a view of `tokens`.
        targets: the token that follows each input, a view likewise.
    """

    def __init__(self, batch: TokenBatch, *, pin_memory: bool = False) -> None:
        self.batch = batch
        self._pin = pin_memory
        self.tokens = self._tensor(batch.tokens)
        length = batch.tokens.shape[1] - 1
        self.inputs, self.targets = (
            self.tokens.narrow(1, 0, length),
            self.tokens.narrow(1, 1, length),
        )

    def __len__(self) -> int:
        return len(self.batch)

    def __repr__(self) -> str:
        return f"TokenTensors({self.batch!r})"

    @property
    def indices(self) -> NDArray[np.int64]:
        """The number of each window; see `headrace.TokenBatch`."""
        return self.batch.indices

    @property
    def sources(self) -> list[str]:
        """The name of each window's source in the mixture; see `headrace.TokenBatch`."""
        return self.batch.sources

    @property
    def documents(self) -> torch.Tensor:
        """int64: the document of each input, -1 for padding."""
        return self._tensor(self.batch.documents)

    @property
    def positions(self) -> torch.Tensor:
        """int64: counted from 0 at the first token of a document in its window."""
        return self._tensor(self.batch.positions).long()

    @property
    def loss_mask(self) -> torch.Tensor:
        """bool: the target is of the same document as its input, and no padding."""
        return self._tensor(self.batch.loss_mask)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Where sequences begin in the flattened inputs, and where they end; int32, shape (sequences + 1,)."""
        return self._tensor(self.batch.cu_seqlens)

    @property
    def max_seqlen(self) -> int:
        """The longest sequence of `cu_seqlens`."""
        return self.batch.max_seqlen

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pin else tensor


class TokenDataLoader(LoaderView):
    """Batches of windows of tokens, for PyTorch.

    Args:
        store: as for `headrace.tokens`.
        length: inputs of a window.
        batch_size: windows per batch and rank.
        dtype: `int64` as losses take it, or `int32`.
        pin_memory: deliver in page-locked memory. None: where CUDA is.
        options: all else that `headrace.tokens` takes.

    Raises:
        OrderError: length, batch size, rank or world size do not fit.
        StoreError: a document is no whole number of tokens, or all of them make no window.
        ValueError: an unknown option, or nobody says what the tokens are.
    """

    batch_sampler = None
    """Batches are cut here; Lightning looks for it."""

    def __init__(
        self,
        store: Store | str | PathLike[str],
        length: int,
        batch_size: int,
        *,
        dtype: TokenDtype = "int64",
        pin_memory: bool | None = None,
        **options: Any,
    ) -> None:
        self._loader = api.tokens(store, length, batch_size, dtype=dtype, **options)
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory

    @property
    def sampler(self) -> Sampler[int]:
        """The windows of this rank in the epoch under way; as a store's `DataLoader` has it."""
        return sampler_of(self)

    def __iter__(self) -> Iterator[TokenTensors]:
        # With the first batch, as torch does: trainers call set_epoch after iter().
        return PassIterator(self._loader.begin, self._deliver)

    def _deliver(self, a_pass: Pass) -> Iterator[TokenTensors]:
        for batch in self._loader._deliver(a_pass):  # noqa: SLF001
            yield TokenTensors(batch, pin_memory=self.pin_memory)  # type: ignore[arg-type]  # a TokenLoader's

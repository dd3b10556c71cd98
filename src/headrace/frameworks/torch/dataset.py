"""Dataset: a store as a map-style data set, for torch's own loaders and samplers; and batches as tensors.

`TensorBatch` shares headrace's buffer. Nothing is copied: the tensors lie over the memory that the disk's
bytes were read into, and keep it from being recycled for as long as one of them, or a view of one, lives.
PyTorch knows no read-only tensors, so the rule is the reader's: never write into them in place. Whoever does
changes that batch for everyone else who holds it, and nothing more; the next batch is unharmed.

`Dataset.__getitems__` reads a whole batch in one native call, and torch's DataLoader calls it. The native
reader is made when a process first reads, so the data set may be forked, or pickled (as the store's
path and fingerprint) to spawned workers.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import default_collate, default_convert

from headrace import api
from headrace.config import reader_options, tier_options
from headrace.frameworks.view import decode_error, sample_data, takes_two
from headrace.order.hash import Purpose, derive_key
from headrace.plane.augment import MixedLabels
from headrace.plane.batch import Skipped, mixture_of
from headrace.plane.images import ImageBatch, Images
from headrace.plane.pipeline import Pipeline
from headrace.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from headrace.plane import Batch
    from headrace.plane.batch import OnError
    from headrace.plane.pipeline import Fetched
    from headrace.store.mixture import Mixture


_log = logging.getLogger("headrace.torch")


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


def labelled_pixels(batch: ImageBatch, images: Images) -> list[tuple[Any, ...]]:
    """Return each picture with its label, as `collate_fn` takes them; and its mask and boxes, where there are.

    Raises:
        ValueError: pictures were mixed, and have two labels.
    """
    if batch.mixed is not None:
        raise ValueError(
            "collate_fn takes each picture with its label, and mixed ones (mixup, cutmix) have two: "
            "leave one of them out"
        )
    pixels, _, *targets = pixel_tensors(batch, images)
    return list(zip(pixels, batch.labels.tolist(), *targets, strict=True))


def pixel_tensors(batch: ImageBatch, images: Images) -> list[Any]:
    """Return pictures and labels as tensors over the batch's buffer, which is its own.

    Args:
        batch: decoded pictures.
        images: what they were decoded to.

    Returns:
        Pixels, shape (samples, 3, height, width), of channels-last memory where `Images` asked for that;
        labels, int64, shape (samples,), -1: none; `MixedLabels` of two such tensors
        where pictures were mixed. Behind them masks, uint8, shape (samples, height, width), and a list of each
        sample's boxes, where `Images` asked for them.
    """
    pixels = torch.from_numpy(batch.pixels)
    if images.dtype == "bfloat16":  # which numpy has not
        pixels = pixels.view(torch.bfloat16)
    if images.layout == "nhwc":
        pixels = pixels.permute(0, 3, 1, 2)
    if (mixed := batch.mixed) is not None:
        labels = (shared_tensor(mixed.labels_a), shared_tensor(mixed.labels_b))
        return [pixels, MixedLabels(*labels, mixed.lam)]
    targets: list[Any] = [] if batch.masks is None else [torch.from_numpy(batch.masks)]
    if batch.boxes is not None:
        targets.append([torch.from_numpy(each) for each in batch.boxes])
    return [pixels, shared_tensor(batch.labels), *targets]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorBatch:
    """Samples that are delivered together, as tensors. Do not write into them in place."""

    data: Tensor
    """headrace's buffer, uint8, shape (bytes,). Samples lie in it in any order and with gaps."""

    offsets: Tensor
    """int64, shape (samples,), or (samples, parts) where several parts are read."""

    lengths: Tensor
    """int64, shaped like `offsets`; 0 where a sample lacks a part."""

    indices: Tensor
    """The samples' indices in the store, int64, shape (samples,)."""

    labels: Tensor
    """int64, shape (samples,), -1 where a sample has none."""

    part_names: tuple[str, ...]
    """The parts that were read; `("",)` for samples of one part."""

    epoch: int
    """The epoch the batch belongs to."""

    position: int
    """The global position of its first sample."""

    mixture: Mixture | None = None
    """What it was drawn from, or None: one store."""

    @property
    def sources(self) -> list[str]:
        """The name of each sample's source in the mixture.

        Raises:
            ValueError: the batch is of one store.
        """
        return mixture_of(self.mixture).source_names(self.indices.cpu().numpy())

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
            batch.mixture,
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


Decoded = tuple[Any, int]
"""What the user's function returned, and the sample's label (-1: none)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a decode function may want to know beside the bytes."""

    index: int
    """The sample's index in the store."""

    label: int
    """Its label, -1 if it has none."""

    epoch: int
    """The epoch it is delivered in."""

    seed: int
    """The loader's seed."""

    @property
    def key(self) -> int:
        """64 random bits that depend on seed, epoch and index only."""
        return derive_key(self.seed, Purpose.SAMPLES, self.epoch, self.index)

    def rng(self) -> np.random.Generator:
        """Return numpy's random numbers for this sample in this epoch."""
        return np.random.Generator(np.random.Philox(key=self.key))

    def torch_generator(self) -> torch.Generator:
        """Return torch's random numbers for this sample in this epoch."""
        return torch.Generator().manual_seed(self.key)


class Decoder:
    """Decodes samples of batches. May be shared by threads; is pickled if its function is.

    Args:
        function: `decode(data)` or `decode(data, sample)`, where data is a read-only memoryview of
            the sample's bytes (a dict of them by part, where several parts are read). None: samples
            are delivered as uint8 tensors over headrace's buffer.
        seed: of the random keys.
        on_error: what to do with a sample that cannot be decoded.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        seed: int = 0,
        on_error: OnError = "raise",
    ) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"decode is {function!r}, expected a function")
        self.function = function
        self.seed = seed
        self._on_error = on_error
        self.takes_sample = function is not None and takes_two(function)

    def decode(
        self,
        fetched: Fetched,
        names: Sequence[str],
        skipped: list[Skipped],
        span: slice = slice(None),
    ) -> list[Decoded]:
        """Decode some samples of a batch.

        Raises:
            DecodeError: the user's function failed; names the sample.
        """
        batch = fetched.batch
        places = range(len(batch))[span]
        if self.function is None:
            tensors = TensorBatch.over(batch)
            return [(sample_data(tensors, i), int(batch.labels[i])) for i in places]
        decoded = []
        for i in places:
            try:
                decoded.append((self._call(batch, i), int(batch.labels[i])))
            except Exception as e:
                index = int(batch.indices[i])
                error = decode_error(index, names[index], f"{type(e).__name__}: {e}")
                if self._on_error == "raise":
                    raise error from e
                one = Skipped(error.index, error.name, error.message)
                fetched.trace.left_out.append(one)
                skipped.append(one)
        return decoded

    def _call(self, batch: Batch, i: int) -> Any:
        assert self.function is not None
        data = sample_data(batch, i)
        if not self.takes_sample:
            return self.function(data)
        index, label = int(batch.indices[i]), int(batch.labels[i])
        return self.function(data, Sample(index, label, batch.epoch, self.seed))


class Dataset(torch_data.Dataset[Decoded]):
    """A map-style data set over a store: item i is (decoded sample, label).

    Args:
        store: an open store, or the path of one (or of a folder, a tar, ...).
        decode: `decode(data)` or `decode(data, sample)`, see `headrace.torch.Sample`. Without it,
            samples are uint8 tensors over headrace's buffer.
        parts: parts to read of samples that have several; all if empty.
        seed: of the random keys that `decode` gets.
        on_error: `raise`, or `skip` samples that cannot be read or decoded: batches get smaller.
        options: fields of `headrace.config.ReaderOptions`.

    Attributes:
        store: the open store.

    Raises:
        ValueError: an unknown part or option.
    """

    _warned = False

    def __init__(
        self,
        store: Store | str | PathLike[str],
        decode: Callable[..., Any] | None = None,
        *,
        parts: Sequence[str] = (),
        seed: int = 0,
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        self.store = store if isinstance(store, Store) else api.open(store)
        self.decode = decode
        self.parts = tuple(parts)
        self.seed = seed
        self.on_error = on_error
        self.given_options = options
        self.decoder = Decoder(decode, seed, on_error)
        # One thread reads a batch; there is nothing for another one to do.
        self._tiers, reading, _ = tier_options(options)
        self._options, _ = reader_options({"workers": 1, **reading})
        self._epoch = 0
        self._reader = self._new_reader()

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Decoded:
        """Return (decoded sample, label).

        Raises:
            IndexError: there is no such sample.
            DecodeError: `decode` failed.
            HeadraceError: the sample cannot be read.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index is {index}, expected {-len(self)} to {len(self) - 1}")
        items = self.__getitems__([index % len(self)])
        if not items:
            raise IndexError(f"sample {index} was left out: {self.skipped[-1].reason}")
        return items[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Decoded]:
        """Return (decoded sample, label) of each index; one native read for all.

        Raises:
            SampleNotFound: an index lies outside the store.
            DecodeError: `decode` failed.
            HeadraceError: a sample cannot be read.
        """
        if len(indices) > 1 and self.store.mixture is not None and not self._warned:
            self._warned = True
            _log.warning(
                "a mixture is read in the order of torch's sampler, which knows no proportions: each sample "
                "comes once an epoch. headrace.torch.DataLoader over the mixture keeps them."
            )
        return self.decoded(self.fetch(np.asarray(indices, np.int64), self._epoch))

    @property
    def skipped(self) -> list[Skipped]:
        """Samples that this process left out so far."""
        return self._reader.skipped

    @property
    def classes(self) -> list[str] | None:
        """The names of labels 0, 1, ..., or None."""
        return self.store.classes

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch it is, so that `decode` gets other random keys than in the last.

        Like every change of a data set, it reaches workers that are started afterwards.
        """
        self._epoch = epoch

    def replaced(
        self,
        decode: Callable[..., Any] | None,
        parts: Sequence[str],
        seed: int | None,
        on_error: OnError | None,
        options: dict[str, Any],
    ) -> Dataset:
        """Return a data set over the same store; what is None or empty stays as it is here."""
        return Dataset(
            self.store,
            self.decode if decode is None else decode,
            parts=parts or self.parts,
            seed=self.seed if seed is None else seed,
            on_error=self.on_error if on_error is None else on_error,
            **{**self.given_options, **options},
        )

    def fetch(self, indices: Any, epoch: int) -> Fetched:
        """Read one batch; int64, shape (samples,)."""
        return self._reader.fetch(indices, epoch)

    def decoded(self, fetched: Fetched) -> list[Decoded]:
        """Decode a batch that was read."""
        return self.decoder.decode(fetched, self.store.names, self.skipped)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reader = self._new_reader()

    def _new_reader(self) -> Pipeline:
        over = api.plane_over(self._tiers, self._options)
        return Pipeline(
            self.store, self._options, self.parts, self.on_error, self._tiers,
            over=over, decoding=self._decoding(),
        )  # fmt: skip

    def _decoding(self) -> tuple[Images, int] | None:
        """What pictures become, in native threads; None: bytes are read."""
        return None


class _Whole(list[Any]):
    """What torch's fetcher hands to `collate_fn`: a list of one batch, which is complete."""


def whole(samples: Any) -> Any:
    """The `collate_fn` of batches that are complete; others, and single samples, go through torch's own."""
    if isinstance(samples, _Whole):
        return samples[0]
    together: Any = default_convert if isinstance(samples, tuple) else default_collate
    return together(samples)


class SampledDataset(Dataset):
    """A store whose batches torch's samplers choose: what `DataLoader` makes of one that is given a sampler.

    Everything that is random is torch's then: where crops, flips or keys are wanted, the process that fetches
    draws a seed for each batch from torch's generator, which its loader seeds anew in each epoch.

    Args:
        store: as for `Dataset`.
        decode: likewise; or `headrace.Images`.
        collates: batches are put together by a `collate_fn` of the user's, from (sample, label).
        options: further arguments of `Dataset`.
    """

    def __init__(
        self,
        store: Store | str | PathLike[str],
        decode: Callable[..., Any] | Images | None,
        *,
        collates: bool,
        **options: Any,
    ) -> None:
        self._images = decode if isinstance(decode, Images) else None
        self._collates = collates
        function = None if isinstance(decode, Images) else decode
        super().__init__(store, function, **options)
        self._draws = self.decoder.takes_sample or (
            self._images is not None and self._images.is_random
        )

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read a batch: a list of it alone where it is complete, else of (sample, label)."""
        if self._draws:
            self.decoder.seed = self.seed = int(torch.empty((), dtype=torch.int64).random_())
        fetched = self._fetched(np.asarray(indices, np.int64))
        batch = fetched.batch
        if isinstance(batch, ImageBatch) and self._images is not None:
            if not self._collates:
                return _Whole([pixel_tensors(batch, self._images)])
            return labelled_pixels(batch, self._images)
        if self.decoder.function is None and not self._collates:
            return _Whole([TensorBatch.over(batch)])
        return self.decoded(fetched)

    def __getitem__(self, index: int) -> Decoded:
        """Return (decoded sample, label): batches of one are not asked for here."""
        collates, self._collates = self._collates, True
        try:
            return super().__getitem__(index)
        finally:
            self._collates = collates

    def _fetched(self, indices: NDArray[np.int64]) -> Fetched:
        decoding = self._reader.decoding
        if decoding is not None:
            decoding.seed = self.seed
            if (worker := torch_data.get_worker_info()) is not None:
                threads = max(1, len(os.sched_getaffinity(0)) // worker.num_workers)
                if decoding.knobs()["decode_threads"] != threads:
                    decoding.turn({"decode_threads": threads})
        return self.fetch(indices, 0)

    def _decoding(self) -> tuple[Images, int] | None:
        return None if self._images is None else (self._images, self.seed)

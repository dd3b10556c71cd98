"""Decoding: the stage `decode`, by which pictures become pixels without the interpreter.

Native threads (`native/pixels`) decode each picture straight into its place in the batch's recycled buffer,
only the region that its crop needs, resize it once and augment it.

What the native decoders refuse is given to Pillow; that is counted and said once. A
picture that nobody can decode is an error that names its sample, or is left out, as `on_error` says. Its place
in the buffer never shows what was there before.

Boxes of a picture (`Images.boxes`) follow its crop, resize, flips, padding and affine steps. Coordinates are
continuous: a pixel at (x, y) covers x to x + 1 and y to y + 1, so a box of a whole picture is 0, 0, width,
height. A box that is turned or sheared becomes the smallest upright one around it, as torchvision's does.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace import _native
from headrace.errors import DecodeError, HeadraceError, VolumeError
from headrace.plane import augment
from headrace.plane.batch import Batch, Skipped
from headrace.plane.images import TOO_LARGE, ImageBatch
from headrace.plane.stage import ReadStage, StageStats, own_knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.plane.batch import OnError
    from headrace.plane.images import Images
    from headrace.plane.stage import BatchReads, PendingReads


log = logging.getLogger("headrace")

BATCHES_DECODED_AHEAD: Final = 2
"""Beside the one that is asked for next: threads never wait for the consumer's next request."""

_LARGE_BYTES: Final = 32 << 20
"""Of encoded pictures or of pixels: a batch with more keeps threads busy for so long that one ahead is
enough, and each one more is memory that is touched for the first time, at a quarter of the speed of a copy."""

THREADS_MAX: Final = 1024

RETAIN_ALL: Final = (1 << 64) - 1  # `kRetainAll` of native/core/arena.h
_POLL_S: Final = 0.004
"""How often a wait for pixels looks whether further batches were read, to have them decoded."""


_Refusal = tuple[int, str, Exception | None]
"""A sample that cannot be delivered, by its place in the batch, what is wrong with it, and the cause."""


class Decoded(NamedTuple):
    """A batch that was read, and its pixels."""

    native: _native.Batch
    job: _native.DecodeJob


class PendingPixels:
    """A batch that is being read, or decoded.

    Args:
        reads: what is being read of it; None: nothing is.
        take: gives the batch, once that was read.
    """

    def __init__(
        self,
        stage: Decoding,
        epoch: int,
        reads: PendingReads | None,
        take: Callable[[], _native.Batch],
    ) -> None:
        self._stage = stage
        self._epoch = epoch
        self._reads = reads
        self._take = take
        self._decoded: Decoded | None = None
        self._error: HeadraceError | None = None

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        return self._decoded is not None and self._decoded.job.done

    def begin(self) -> bool:
        """Have it decoded if it was read; returns whether it is being decoded.

        An error waits for its turn: batches before it are delivered first.
        """
        if self._decoded is None and self._error is None:
            if self._reads is not None and not self._reads.done:
                return False
            try:
                self._submit()
            except HeadraceError as e:
                self._error = e
        return self._decoded is not None

    def _submit(self) -> Decoded:
        self._decoded = self._stage.submit(self._take(), self._epoch)
        return self._decoded

    def take(self, behind: Iterable[PendingPixels] = ()) -> Decoded:
        """Wait for the pixels.

        Args:
            behind: further batches; some are begun with while this one is waited for, of large ones one.

        Raises:
            VolumeTimeout: it was not read within the deadline.
        """
        if self._error is not None:
            raise self._error
        decoded = self._decoded or self._submit()
        native = decoded.native
        largest = max(native.data.nbytes, self._stage.pixel_bytes(native))
        ahead = 1 if largest > _LARGE_BYTES else BATCHES_DECODED_AHEAD
        while True:
            for pending in islice(behind, ahead):
                if not pending.begin():
                    break
            if decoded.job.wait(_POLL_S):
                return decoded


class _DecodeThreads:
    """Threads that decode, as a stage. Without a number, there are as many as this process has processors."""

    name = "decode"

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and not 1 <= threads <= THREADS_MAX:
            raise ValueError(f"decode_threads is {threads}, expected 1 to {THREADS_MAX}")
        self._threads = threads or len(os.sched_getaffinity(0))
        self._pool: _native.DecodePool | None = None
        self._pid = os.getpid()

    @property
    def pool(self) -> _native.DecodePool | None:
        """What owns the buffers in this process: they are mapped as long as it is kept; None before any.

        Over a fork, its threads are not inherited.
        """
        return self._pool if self._pid == os.getpid() else None

    def stats(self) -> StageStats:
        """What its threads did in this process."""
        pool = self.pool
        return StageStats(name=self.name, **({} if pool is None else pool.stats()))

    def knobs(self) -> Mapping[str, int]:
        """Threads that decode."""
        return {"decode_threads": self._threads}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set the number of threads; it holds for pools that are made anew, too.

        Raises ValueError if it is not positive.
        """
        threads = own_knobs(knobs, self.knobs()).get("decode_threads", self._threads)
        self._threads = min(threads, THREADS_MAX)
        if (pool := self.pool) is not None:
            pool.turn(self._threads)


class DecodedOnce(_DecodeThreads, ReadStage):
    """The stage `decode` of the node daemon: pictures as `keep="decoded"` keeps them, for all who ask for that.

    They are passed on as PPM. What cannot be decoded here passes as it is: clients give it to Pillow, or
    say what is wrong with it. `done_fd` is rung whenever a batch is decoded. `waits`: to take what was read may
    take its time, since several tiers have it.
    """

    def __init__(
        self,
        below: BatchReads,
        images: Images,
        part_names: Sequence[str],
        done_fd: int,
        *,
        waits: bool = False,
    ) -> None:
        _DecodeThreads.__init__(self)
        ReadStage.__init__(self, below)
        self._done_fd = done_fd
        self._aside = ThreadPoolExecutor(1, "headrace-tiers") if waits else None
        self._recipe, self._part = images.recipe(), images.part_of(part_names)
        self._pool = _native.DecodePool(
            self._threads, 2 * _LARGE_BYTES, shared=True, done_fd=done_fd
        )

    def _own_bytes(self) -> int:
        return 0 if (pool := self.pool) is None else pool.mapped_bytes

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        """Ask for one batch."""
        return _Reduced(self, self._below.submit(indices))

    def reduce(self, reads: PendingReads) -> _native.DecodeJob:
        """Have the pictures of a batch decoded; waits until it was read."""
        native, pool = reads.take(), self._pool
        if pool is None:
            raise VolumeError("the data set was closed")
        return pool.reduce(self._recipe, native, self._part)

    def begin(self, reads: PendingReads) -> Future[_native.DecodeJob]:
        """Have a batch that was read decoded, without waiting for anything."""
        if self._aside is not None:
            future = self._aside.submit(self.reduce, reads)
            future.add_done_callback(self._ring)
            return future
        future = Future()
        try:
            future.set_result(self.reduce(reads))
        except Exception as e:  # noqa: BLE001 - whatever goes wrong is for whoever takes it
            future.set_exception(e)
        return future

    def _ring(self, _: Any) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._done_fd, 1)

    def close(self) -> None:
        """Close what is below, and end all threads: nothing rings any more."""
        self._below.close()
        if self._aside is not None:
            self._aside.shutdown()
        self._pool = None


class _Reduced:
    """A batch of `DecodedOnce`."""

    def __init__(self, stage: DecodedOnce, reads: PendingReads) -> None:
        self._stage, self._reads = stage, reads
        self._job: Future[_native.DecodeJob] | None = None

    @property
    def done(self) -> bool:
        if self._job is None and self._reads.done:
            self._job = self._stage.begin(self._reads)
        job = self._job
        return job is not None and job.done() and (bool(job.exception()) or job.result().done)

    @property
    def waits_for(self) -> str:
        return self._reads.waits_for if self._job is None else "threads that decode its pictures"

    def take(self) -> _native.Batch:
        job = self._stage.reduce(self._reads) if self._job is None else self._job.result()
        while not job.wait(1.0):  # signals are handled in between
            pass
        return job.reduced


class Decoding(_DecodeThreads):
    """The stage `decode`: threads that decode the batches of one pipeline.

    Args:
        part_names: of the samples' parts that are read.
        names: of the store's samples, for errors.

    Attributes:
        below: what is asked for batches; a node daemon that answers keeps what is decoded, not this process.
    """

    def __init__(
        self,
        images: Images,
        seed: int,
        part_names: Sequence[str],
        *,
        names: Sequence[str],
        on_error: OnError,
        threads: int | None = None,
    ) -> None:
        super().__init__(threads)
        self.images = images
        self._part_names, self._names, self._on_error = list(part_names), names, on_error
        self.below: BatchReads | None = None
        self.fallbacks = 0  # pictures that Pillow decoded, because the native decoders refused them
        self.seed = seed  # of the crops and flips of batches that are submitted from now on
        # Give no buffer back to the system while a pool lives, so that they may be page-locked: set it
        # before the first batch.
        self.keeps_buffers = False
        self._part = images.part_of(part_names)
        self._mask = None if images.mask is None else self._part_names.index(images.mask)
        self._recipe = images.recipe()

    @property
    def mapped_bytes(self) -> int:
        """Memory that pixels take, those of delivered batches included."""
        return 0 if (pool := self.pool) is None else pool.mapped_bytes

    @property
    def kept(self) -> tuple[int, int]:
        """How many pictures this process keeps decoded, and their bytes."""
        return (0, 0) if (pool := self.pool) is None else pool.kept

    # -- decoding ----------------------------------------------------------------------------------

    def pixel_bytes(self, native: _native.Batch) -> int:
        """What the pixels of a batch take."""
        return native.samples * int(self._recipe.output_bytes)

    def submit(self, native: _native.Batch, epoch: int) -> Decoded:
        """Have a batch decoded that was read; returns at once."""
        pool = self.pool
        if pool is None:
            free = (BATCHES_DECODED_AHEAD + 2) * self.pixel_bytes(native)
            if self.keeps_buffers:
                free = RETAIN_ALL
            self._pool = pool = _native.DecodePool(self._threads, free, self._keep_bytes())
            self._pid = os.getpid()
        job = pool.submit(
            self._recipe, self.seed, epoch, native, self._part, self._mask, self.images.mask_fill
        )
        return Decoded(native, job)

    def _keep_bytes(self) -> int:
        served = self.below is not None and self.below.attached
        if self.images.keep is None or served:
            return 0
        if self.images.keep_bytes is not None:
            return self.images.keep_bytes
        from headrace.machine.host import available_memory
        from headrace.plane.tiers import memory_quota

        return memory_quota(
            "auto", far=False, data_bytes=1 << 60, available_bytes=available_memory()
        )

    def pending(self, reads: PendingReads | _native.Batch, epoch: int) -> PendingPixels:
        """A batch that will be decoded once it was read."""
        if isinstance(reads, _native.Batch):
            return PendingPixels(self, epoch, None, lambda: reads)
        return PendingPixels(self, epoch, reads, reads.take)

    def ask(
        self, reader: BatchReads, catalog: _native.Catalog, epoch: int, indices: NDArray[np.int64]
    ) -> PendingPixels:
        """Ask for a batch, but for the bytes of pictures that are kept decoded."""
        pool = self.pool
        if self.images.keep is None or len(self._part_names) > 1 or pool is None:
            return self.pending(reader.submit(indices), epoch)
        missing = np.flatnonzero(pool.keeps(indices) == 0)
        if len(missing) == len(indices):
            return self.pending(reader.submit(indices), epoch)
        reads = reader.submit(indices[missing]) if len(missing) else None
        return PendingPixels(
            self, epoch, reads,
            lambda: catalog.filled_up(indices, None if reads is None else reads.take(), missing),
        )  # fmt: skip

    def ahead_of(
        self, natives: Generator[_native.Batch, None, None], epoch: int
    ) -> Generator[Decoded, None, None]:
        """Decode batches that were read, some of them ahead, and yield them in order."""
        waiting: deque[PendingPixels] = deque()
        try:
            for native in natives:
                waiting.append(self.pending(native, epoch))
                waiting[-1].begin()
                if len(waiting) > BATCHES_DECODED_AHEAD:
                    yield waiting.popleft().take()
            while waiting:
                yield waiting.popleft().take()
        finally:
            natives.close()

    def close(self) -> None:
        """End its threads; the stage can be used again. Pixels that were taken stay valid."""
        self._pool = None

    def batch(
        self,
        decoded: Decoded,
        skipped: list[Skipped],
        *,
        epoch: int,
        position: int,
        keep: NDArray[np.bool_] | None,
    ) -> ImageBatch:
        """Make the batch that is delivered.

        `skipped` takes what is left out; `position` is the global one of the first sample; `keep`, bool of
        shape (samples,), says which samples were read, None: all.

        Raises:
            DecodeError: a picture cannot be decoded and `on_error` is `raise`; names the sample.
        """
        native, job = decoded
        wanted = np.ones(native.samples, np.bool_) if keep is None else keep
        boxes: list[NDArray[np.float64]] = []
        for sample, what, cause in chain(
            self._refused(decoded, wanted), self._without_boxes(native, wanted, boxes)
        ):
            wanted[sample] = False
            index = int(native.indices[sample])
            name = self._names[index]
            error = DecodeError(
                f"sample {index} ({name!r}) {what}.", index=index, name=name,
                next_step="Take it out of the data, or give on_error='skip'.",
            )  # fmt: skip
            if self._on_error == "raise":
                raise error from cause
            skipped.append(Skipped(index, name, error.message))
        keep = None if wanted.all() else wanted
        batch = ImageBatch(native, self._part_names, epoch=epoch, position=position, keep=keep)
        pixels = job.pixels.view(self.images.numpy_dtype).reshape(-1, *self.images.shape)
        batch.pixels = pixels if keep is None else pixels[keep]
        batch.recycled = keep is None
        batch.kept_part = None if self.images.keep is None else self._part_names[self._part]
        batch.mixed = batch.masks = batch.boxes = None
        if self._mask is not None:
            masks = job.masks.reshape(-1, *self.images.planes[1:])
            batch.masks = masks if keep is None else masks[keep]
        if self.images.boxes is not None:
            batch.boxes = moved_boxes(self.images, boxes, job.mappings[wanted])
        job.let_go()  # who keeps pixels keeps no batch of the node daemon's
        if self.images.mixup or self.images.cutmix:
            batch.mixed = augment.mix(
                self.images, batch.pixels, batch.labels, batch.indices,
                seed=self.seed, epoch=epoch,
            )  # fmt: skip
        return batch

    def _refused(self, decoded: Decoded, wanted: NDArray[np.bool_]) -> Iterator[_Refusal]:
        """Have Pillow decode what the native decoders did not; yields what it does not, and bad masks."""
        native, job = decoded
        for sample, reason, of_mask in job.failures:
            if not wanted[sample]:
                continue
            try:
                mask = reason if of_mask else self._replace(native, job, sample, reason)
            except Exception as e:  # noqa: BLE001 - whatever Pillow raises
                why = f"is no picture that can be decoded: {reason}; Pillow: {e}"
                if str(e).endswith(TOO_LARGE):
                    why = f"is too large: {e}: give a larger Images(max_pixels=...)"
                yield sample, why, e
                continue
            if mask:
                yield sample, f"has no mask that can be used: {mask}", None

    def _without_boxes(
        self, native: _native.Batch, wanted: NDArray[np.bool_], boxes: list[NDArray[np.float64]]
    ) -> Iterator[_Refusal]:
        """Add the boxes of each sample that is wanted, as they are given; yields those that have none."""
        if self.images.boxes is None:
            return
        read = Batch(native, self._part_names)
        for sample in np.flatnonzero(wanted).tolist():
            parts = {name: read[sample, name] for name in self._part_names}
            try:
                boxes.append(boxes_of(self.images, int(native.indices[sample]), parts))
            except Exception as e:  # noqa: BLE001 - whatever the user's function raises
                yield sample, f"has no boxes that can be used: {type(e).__name__}: {e}", e

    def _replace(
        self, native: _native.Batch, job: _native.DecodeJob, sample: int, reason: str
    ) -> str:
        """Decode with Pillow what the native decoders refused; returns what is wrong with its mask, or ''."""
        from headrace.plane.rare_pictures import by_pillow  # Pillow takes a while to import

        if reason.endswith(TOO_LARGE):
            raise ValueError(reason)
        slot = sample * native.parts + self._part
        start = int(native.offsets[slot])
        encoded = native.data[start : start + int(native.lengths[slot])]
        mask = job.replace(sample, by_pillow(encoded.tobytes(), self.images))
        self.fallbacks += 1
        if self.fallbacks == 1:
            log.warning(
                "Pillow decodes what headrace's own decoders do not, sample %d first (%s); "
                "the loader's decoding.fallbacks counts them",
                int(native.indices[sample]), reason,
            )  # fmt: skip
        return mask


def boxes_of(images: Images, index: int, parts: Mapping[str, memoryview]) -> NDArray[np.float64]:
    """The boxes of one sample as `Images.boxes` says where they are: shape (boxes, 4 or more).

    Raises ValueError if they are no such array; or whatever the user's function raises.
    """
    given: Any
    if callable(images.boxes):
        given = images.boxes(index, parts)
    else:
        data = parts[str(images.boxes)]
        given = _of_npy(data) if bytes(data[:6]) == b"\x93NUMPY" else _of_coco(data)
    boxes = np.asarray(given, np.float64)
    if boxes.size == 0 and boxes.ndim < 2:
        boxes = boxes.reshape(0, 4)
    if boxes.ndim != 2 or boxes.shape[1] < 4:
        raise ValueError(f"boxes have the shape {boxes.shape}, expected (boxes, 4 or more)")
    corners = boxes[:, :4]
    if not np.isfinite(corners).all() or (corners[:, :2] > corners[:, 2:]).any():
        raise ValueError("a box is not finite, or its right or bottom lies before its left or top")
    return boxes


def _of_npy(data: memoryview) -> NDArray[Any]:
    """The array of a .npy file of numbers, over its own bytes."""
    from headrace.store.sources.npy import read_npy_header  # for boxes in arrays only

    file = io.BytesIO(data)
    shape, fortran, dtype = read_npy_header(file)
    values = data[file.tell() :]
    if fortran or dtype.kind not in "iuf" or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(
            f"boxes are no whole .npy file of numbers in C order: {dtype}, shape {shape}"
        )
    return np.frombuffer(values, dtype).reshape(shape)


def _of_coco(data: memoryview) -> NDArray[np.float64]:
    """COCO's list of annotations: x, y, width, height and category become corners and category."""
    try:
        listed = [(*each["bbox"], each["category_id"]) for each in json.loads(bytes(data))]
        boxes = np.array(listed, np.float64).reshape(len(listed), 5)
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(
            f"boxes are neither an array (.npy) nor COCO's list of annotations: {type(e).__name__}: {e}"
        ) from e
    boxes[:, 2:4] += boxes[:, :2]
    return boxes


def moved_boxes(
    images: Images, boxes: Sequence[NDArray[np.float64]], mappings: NDArray[np.float64]
) -> list[NDArray[np.float32]]:
    """The boxes of some samples in pixels of the output, cut off at its edges.

    `boxes` are as `boxes_of` gives them; `mappings`, shape (samples, 6), are native/pixels/decode.h's. Columns
    that go with a box stay.
    """
    _, height, width = images.planes
    results = []
    for each, (a, b, c, d, e, f) in zip(boxes, mappings, strict=True):
        x, y = each[:, [0, 2, 2, 0]], each[:, [1, 1, 3, 3]]
        corners = (a * x + b * y + c, d * x + e * y + f)
        result = each.astype(np.float32)
        for axis, side in enumerate((width, height)):
            result[:, axis] = np.clip(corners[axis].min(1), 0, side)
            result[:, axis + 2] = np.clip(corners[axis].max(1), 0, side)
        if images.empty_boxes == "drop":
            result = result[(result[:, :2] < result[:, 2:4]).all(1)]
        results.append(result)
    return results

"""Elements: what one batch is in TensorFlow.

The buffer crosses into TensorFlow without a copy: a numpy array keeps its memory there, if that is
aligned to 64 bytes, and headrace's buffers are aligned to pages. TensorFlow owns the memory of its strings, so
`strings` are cut out of the buffer on the other side (`strings`), by reference where it can be.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library

from headrace import _native
from headrace.frameworks.view import check_form, check_pixels, pixels_of, rows_of
from headrace.order.hash import GOLDEN, Purpose, derive_key, mix64_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.plane import Batch
    from headrace.plane.images import Images


_log = logging.getLogger("headrace")

_OPERATION = "HeadraceStrings"


def cut(data: Any, offsets: Any, lengths: Any) -> Any:
    """Return the samples as tf.string, shaped like `offsets`; in graphs only.

    Args:
        data: uint8, shape (bytes,): the buffer.
        offsets: int64: where each sample starts.
        lengths: int64, shaped like `offsets`.
    """
    strings = op_def_library.apply_op(_OPERATION, data=data, offsets=offsets, lengths=lengths)
    strings.set_shape(offsets.shape)
    return strings


@cache
def can_cut() -> bool:
    """Whether this TensorFlow runs the operation, tried on strings of all kinds."""
    why = _native.register_string_kernel(_library(), _shares())
    if not why:
        try:
            why = _tried()
        except Exception as e:  # noqa: BLE001 - any other TensorFlow: strings are made in Python
            why = f"{type(e).__name__}: {e}"
    if why:
        _log.debug("TensorFlow's strings are made in Python: %s", why)
    return not why


def _library() -> str:
    """The path of the library that holds TensorFlow's C API, as it was loaded."""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            path = Path(line.split(maxsplit=5)[-1].rstrip("\n"))
            if path.name.startswith("libtensorflow_framework.so"):
                return str(path)
    return "libtensorflow_framework.so.2"


def _shares() -> bool:
    """Whether this TensorFlow's strings can be views that share ownership, as its own header says."""
    header = Path(tf.sysconfig.get_include(), "tensorflow/tsl/platform/ctstring_internal.h")
    try:
        return "TStringOwnerCApi *owner_ref;\n} TF_TString_View;" in header.read_text("utf-8")
    except (OSError, ValueError):
        return False


def _tried() -> str:
    data = np.arange(9000).astype(np.uint8)
    offsets = np.array([[0, 7, 8999], [0, 3, 1]], np.int64)
    lengths = np.array([[9000, 22, 1], [0, 23, 5000]], np.int64)
    with tf.init_scope(), tf.device("/CPU:0"):  # whoever asks may be building a graph
        strings = tf.function(cut, autograph=False)(
            *(tf.constant(array) for array in (data, offsets, lengths))
        ).numpy()
    for at in np.ndindex(offsets.shape):
        start = int(offsets[at])
        if strings[at] != data[start : start + int(lengths[at])].tobytes():
            return f"sample {at} of a trial came out wrong"
    return ""


Form = Literal["strings", "rows", "buffer"]
"""`strings`: (bytes, labels), bytes as tf.string, shape (samples,); a dict of them by part, where
several parts are read. `rows`: (rows, labels), rows as uint8, shape (samples, length), for samples
of equal length; no copy where they lie one after the other. `buffer`: a dict of `data` (uint8, the
buffer), `offsets`, `lengths`, `indices` and `labels`; never a copy."""


class Elements:
    """Makes the arrays that cross into TensorFlow.

    Args:
        form: see `Form`.
        part_names: the parts that are read.
        samples: samples of every batch, None if that may vary.
        seed: of the random keys, where they are wanted; else None.
        images: what pictures are decoded to: elements are (pixels, labels) then; None: bytes are delivered.

    Raises:
        ValueError: an unknown form, or rows of several parts.
    """

    def __init__(
        self,
        form: Form,
        part_names: Sequence[str],
        samples: int | None,
        seed: int | None,
        images: Images | None = None,
    ) -> None:
        check_form(form, get_args(Form), part_names)
        if images is not None:
            check_pixels(form, "strings", images)
        self.form = form
        self._images = images
        self._part_names = tuple(part_names)
        self.samples = samples
        self._seed = seed

    @property
    def cuts(self) -> bool:
        """Whether the buffer crosses and strings are cut there, rather than made here."""
        return self._images is None and self.form == "strings" and can_cut()

    @property
    def signature(self) -> Any:
        """The `tf.TensorSpec` of each component that crosses, in the structure of `crossing`."""
        if not self.cuts:
            return self._signature(self.form)
        extra = () if self._seed is None else (tf.TensorSpec((self.samples, 2), tf.int64),)
        return (self._signature("buffer"), *extra)

    def crossing(self, batch: Batch) -> Any:
        """Return the arrays of one batch that cross into TensorFlow.

        Raises:
            ValueError: `rows` of samples that differ in length.
        """
        if not self.cuts:
            return self.of(batch)
        extra = () if self._seed is None else (_seeds(self._seed, batch),)
        return (_buffer(batch), *extra)

    def strings(self, buffer: Any, *seeds: Any) -> Any:
        """Make of a buffer that crossed what `of` makes, inside TensorFlow."""
        data = cut(buffer["data"], buffer["offsets"], buffer["lengths"])
        if len(self._part_names) > 1:
            data = {name: data[:, p] for p, name in enumerate(self._part_names)}
        return data, buffer["labels"], *seeds

    def _signature(self, form: Form) -> Any:
        n = self.samples
        labels = tf.TensorSpec((n,), tf.int64, "labels")
        if self._images is not None:
            pixels = tf.TensorSpec((n, *self._images.shape), tf.dtypes.as_dtype(self._images.dtype))
            return pixels, labels
        if form == "buffer":
            several = (len(self._part_names),) if len(self._part_names) > 1 else ()
            return {
                "data": tf.TensorSpec((None,), tf.uint8),
                "offsets": tf.TensorSpec((n, *several), tf.int64),
                "lengths": tf.TensorSpec((n, *several), tf.int64),
                "indices": tf.TensorSpec((n,), tf.int64),
                "labels": labels,
            }
        if form == "rows":
            return tf.TensorSpec((n, None), tf.uint8), labels
        strings = tf.TensorSpec((n,), tf.string)
        data = dict.fromkeys(self._part_names, strings) if len(self._part_names) > 1 else strings
        if self._seed is None:
            return data, labels
        return data, labels, tf.TensorSpec((n, 2), tf.int64, "seeds")

    def of(self, batch: Batch) -> Any:
        """Return one batch in its final form.

        Raises:
            ValueError: `rows` of samples that differ in length.
        """
        if self._images is not None:
            return pixels_of(batch, self._images), batch.labels
        if self.form == "buffer":
            return _buffer(batch)
        if self.form == "rows":
            return rows_of(batch, "take 'strings' or 'buffer'"), batch.labels
        if len(self._part_names) > 1:
            data: Any = {name: _strings(batch, name) for name in self._part_names}
        else:
            data = _strings(batch, None)
        if self._seed is None:
            return data, batch.labels
        return data, batch.labels, _seeds(self._seed, batch)


def _buffer(batch: Batch) -> dict[str, Any]:
    return {
        name: getattr(batch, name) for name in ("data", "offsets", "lengths", "indices", "labels")
    }


def _strings(batch: Batch, part: str | None) -> NDArray[np.object_]:
    strings = np.empty(len(batch), np.object_)
    for i in range(len(batch)):
        strings[i] = bytes(batch[i] if part is None else batch[i, part])
    return strings


def _seeds(seed: int, batch: Batch) -> NDArray[np.int64]:
    """Two numbers for each sample that depend on seed, epoch and index only."""
    of_epoch = np.uint64(derive_key(seed, Purpose.SAMPLES, batch.epoch))
    mixed = mix64_array((batch.indices.astype(np.uint64) ^ of_epoch) + np.uint64(GOLDEN))
    return np.stack([mixed.view(np.int64), batch.indices], axis=1)

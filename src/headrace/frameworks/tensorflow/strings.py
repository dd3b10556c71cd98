"""Strings: cuts the samples of a batch's buffer into TensorFlow's strings, inside TensorFlow.

A string that is made in Python is copied twice, under Python's lock: out of the buffer, and into
TensorFlow. headrace's own operation works in TensorFlow's threads; where TensorFlow's strings can share memory
(2.21), it copies none but the smallest, else each once. It is registered
through TensorFlow's C API when the first pipeline needs it; where that cannot be had, strings are
made in Python, and a debug line says why.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library

from headrace import _native

__all__ = ["can_cut", "cut"]

_log = logging.getLogger("headrace")

_OPERATION = "HeadraceStrings"


def cut(data: Any, offsets: Any, lengths: Any) -> Any:
    """Return the samples as tf.string, shaped like `offsets`; in graphs only.

    Args:
        data: uint8, shape (bytes,): the buffer.
        offsets: int64: where each sample starts.
        lengths: int64, shaped like `offsets`.
    """
    found = op_def_library.apply_op(_OPERATION, data=data, offsets=offsets, lengths=lengths)
    found.set_shape(offsets.shape)
    return found


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
        found = tf.function(cut, autograph=False)(
            *(tf.constant(array) for array in (data, offsets, lengths))
        ).numpy()
    for at in np.ndindex(offsets.shape):
        start = int(offsets[at])
        if found[at] != data[start : start + int(lengths[at])].tobytes():
            return f"sample {at} of a trial came out wrong"
    return ""

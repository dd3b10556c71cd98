"""Decoders that Grain's worker processes import."""

from __future__ import annotations

import numpy as np


def number_of(data):
    """The index that a sample begins with."""
    return np.frombuffer(data[:4], np.int32)[0]


def number_and_size(data):
    """Several arrays a sample."""
    return {"number": number_of(data), "size": (np.int64(len(data)),)}

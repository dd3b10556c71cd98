"""Targets: the boxes of a picture, which follow its crop, resize, flips, padding and affine steps.

Where they are given, see `Images.boxes`. Coordinates are continuous: a pixel at (x, y) covers x to x + 1 and y
to y + 1, so a box of a whole picture is 0, 0, width, height. A box that is turned or sheared becomes the
smallest upright one around it, as torchvision's does.
"""

from __future__ import annotations

import io
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.plane.augment import Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.plane.images import Images

_COCO_COLUMNS = 5


def boxes_of(images: Images, index: int, parts: Mapping[str, memoryview]) -> NDArray[np.float64]:
    """The boxes of one sample as they are given.

    Args:
        images: its `boxes` says where they are.
        index: the sample's in the store.
        parts: bytes by name.

    Returns:
        Shape (boxes, 4 or more): left, top, right and bottom in pixels of the picture, and what goes with them.

    Raises:
        ValueError: they are no such array; or whatever the user's function raises.
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
        boxes = np.array(listed, np.float64).reshape(len(listed), _COCO_COLUMNS)
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(
            f"boxes are neither an array (.npy) nor COCO's list of annotations: {type(e).__name__}: {e}"
        ) from e
    boxes[:, 2:4] += boxes[:, :2]
    return boxes


def moved_boxes(
    images: Images,
    boxes: Sequence[NDArray[np.float64]],
    mappings: NDArray[np.float64],
    steps: NDArray[np.float64] | None,
) -> list[NDArray[np.float32]]:
    """The boxes of some samples in pixels of the output, cut off at its edges.

    Args:
        images: the output's size, and whether boxes without an area stay.
        boxes: of each sample, as `boxes_of` gives them.
        mappings: shape (samples, 4), see native/pixels/decode.h.
        steps: what is done to each output, see `Images.steps`.

    Returns:
        Of each sample float32, shape (boxes that stay, as many columns as were given).
    """
    _, height, width = images.planes
    to = np.zeros((len(mappings), 3, 3))
    to[:, 0, 0], to[:, 0, 2], to[:, 1, 1], to[:, 1, 2] = mappings.T
    to[:, 2, 2] = 1
    for step in () if steps is None else steps.transpose(1, 0, 2):
        back = np.broadcast_to(np.eye(3), to.shape).copy()  # steps say where an output comes from
        at = np.isin(step[:, 0], (Op.AFFINE, Op.AFFINE_BILINEAR))
        back[at, :2] = step[at, 1:].reshape(-1, 2, 3)
        to = np.linalg.inv(back) @ to
    results = []
    for each, matrix in zip(boxes, to, strict=True):
        x, y = each[:, [0, 2, 2, 0]], each[:, [1, 1, 3, 3]]
        corners = np.einsum("ij,jbc->ibc", matrix, np.stack([x, y, np.ones_like(x)]))[:2]
        result = each.astype(np.float32)
        for axis, side in enumerate((width, height)):
            result[:, axis] = np.clip(corners[axis].min(1), 0, side)
            result[:, axis + 2] = np.clip(corners[axis].max(1), 0, side)
        if images.empty_boxes == "drop":
            result = result[(result[:, :2] < result[:, 2:4]).all(1)]
        results.append(result)
    return results

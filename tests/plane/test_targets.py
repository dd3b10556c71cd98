"""Masks and boxes are what Pillow and numpy make of the same crop and flips; errors name the sample."""

import dataclasses
import io
import json

import numpy as np
import pytest
from PIL import Image
from tests.plane.test_images import KINDS, SIZES, encoded, picture, png

import headrace as hr
from headrace.errors import DecodeError
from headrace.plane.augment import Op

NEAREST = Image.Resampling.NEAREST


def rows_of(values: np.ndarray, bits: int) -> bytes:
    """Rows of a PNG without filters, of 1, 2 or 4 bits a pixel."""
    each = 8 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % each)))
    shifts = np.arange(each)[::-1] * bits
    packed = (padded.reshape(len(values), -1, each) << shifts).sum(-1).astype(np.uint8)
    return b"".join(b"\0" + row.tobytes() for row in packed)


def palette(values: np.ndarray) -> bytes:
    im = Image.fromarray(values).convert("P")
    im.putdata(values.ravel().tolist())
    im.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
    return encoded(im, "PNG")


MASKS = {
    "grey": (8, lambda v: encoded(Image.fromarray(v), "PNG")),
    "palette": (8, palette),
    "1 bit": (1, lambda v: png(v.shape[1], v.shape[0], 1, 0, rows_of(v, 1))),
    "2 bits": (2, lambda v: png(v.shape[1], v.shape[0], 2, 0, rows_of(v, 2))),
    "4 bits": (4, lambda v: png(v.shape[1], v.shape[0], 4, 0, rows_of(v, 4))),
}


def sample(i: int, *, boxes: int = 6):
    """A picture, its mask and boxes: bytes by part, and the mask's values and the boxes as arrays."""
    width, height = SIZES[i % len(SIZES)]
    rng = np.random.default_rng(i)
    bits, make = list(MASKS.values())[i % len(MASKS)]
    values = rng.integers(0, 1 << bits, (height, width)).astype(np.uint8)
    corners = np.sort(rng.uniform(-5, 1.1 * max(width, height), (boxes, 2, 2)), 1).reshape(-1, 4)
    given = np.concatenate([corners, np.arange(boxes)[:, None]], 1)
    array = io.BytesIO()
    np.save(array, given)
    kind = list(KINDS.values())[i % len(KINDS)] if i % 4 else lambda im: encoded(im, "BMP")
    parts = {
        "jpg": kind(picture(width, height, i)),
        "seg.png": make(values),
        "npy": array.getvalue(),
    }
    return parts, values, given


def store_of(tmp_path, samples):
    hr.pack(((f"{i:03d}", parts) for i, parts in enumerate(samples)), tmp_path / "parts.hr")
    return tmp_path / "parts.hr"


def mask_by_pillow(images, values, index, seed, epoch) -> np.ndarray:
    height, width = values.shape
    draw = images.recipe().draw(width, height, seed, epoch, index)
    left, top, scale_x, scale_y, first_x, first_y, flip, flip_vertical = draw
    rows, columns = images.planes[1:]
    im = Image.fromarray(values)
    if images.crop == "center":
        im = im.resize((round(width / scale_x), round(height / scale_y)), NEAREST)
        im = im.crop((first_x, first_y, first_x + columns, first_y + rows))
    else:
        box = (left, top, round(left + scale_x * columns), round(top + scale_y * rows))
        im = im.crop(tuple(map(int, box))).resize((columns, rows), NEAREST)
    cut = np.asarray(im)[:: -1 if flip_vertical else 1, :: -1 if flip else 1]
    im = Image.fromarray(np.ascontiguousarray(cut))
    steps = images.steps(seed, epoch, np.array([index]))
    for op, *values_of in () if steps is None else steps[0]:
        if op == Op.AFFINE:
            how = Image.Transform.AFFINE
            im = im.transform(im.size, how, values_of, NEAREST, fillcolor=images.mask_fill)
    return np.asarray(im)


def boxes_by_numpy(images, given, size, index, seed, epoch) -> np.ndarray:
    """One corner of one box after the other."""
    width, height = size
    draw = images.recipe().draw(width, height, seed, epoch, index)
    left, top, scale_x, scale_y, first_x, first_y, flip, flip_vertical = draw
    rows, columns = images.planes[1:]
    steps = images.steps(seed, epoch, np.array([index]))
    results = []
    for x0, y0, x1, y1, number in given:
        corners = []
        for corner in ((x0, y0), (x1, y0), (x1, y1), (x0, y1)):
            at = (np.array(corner) - (left, top)) / (scale_x, scale_y) - (first_x, first_y)
            at = np.where((flip, flip_vertical), (columns, rows) - at, at)
            for op, a, b, c, d, e, f in () if steps is None else steps[0]:
                if op == Op.AFFINE:
                    at = np.linalg.solve([[a, b], [d, e]], at - (c, f))
            corners.append(at)
        low, high = np.min(corners, 0), np.max(corners, 0)
        low, high = (np.clip(each, 0, (columns, rows)) for each in (low, high))
        if (high > low).all() or images.empty_boxes == "keep":
            results.append([*low, *high, number])
    return np.array(results).reshape(-1, 5)


RECIPES = {
    "random": hr.Images(size=(40, 56), flip=True, flip_vertical=0.4),
    "center": hr.Images(size=48, crop="center", short=61, flip=True),
    "stretch, padded": hr.Images(size=48, crop="stretch", padding=9, flip=True, mask_fill=255),
    "randaugment": hr.Images(size=64, augment="randaugment", operations=3, mask_fill=7),
    "boxes that stay": hr.Images(size=32, scale=(0.05, 0.3), empty_boxes="keep", erase=1.0),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_masks_are_pillows_and_boxes_numpys_after_the_same_crop(tmp_path, recipe):
    images = dataclasses.replace(RECIPES[recipe], mask="seg.png", boxes="npy")
    samples = [sample(i) for i in range(45)]
    loader = hr.loader(store_of(tmp_path, [s[0] for s in samples]), 8, seed=5, decode=images)
    dropped = 0
    for epoch in range(2):
        for batch in loader:
            assert batch.masks.shape == (len(batch), *images.planes[1:])
            for i, mask, boxes in zip(
                batch.indices.tolist(), batch.masks, batch.boxes, strict=True
            ):
                _, values, given = samples[i]
                np.testing.assert_array_equal(mask, mask_by_pillow(images, values, i, 5, epoch))
                expected = boxes_by_numpy(images, given, values.shape[::-1], i, 5, epoch)
                assert boxes.dtype == np.float32
                np.testing.assert_allclose(boxes, expected, atol=1e-3)
                dropped += len(given) - len(boxes)
    assert (dropped == 0) == (images.empty_boxes == "keep")
    loader.close()


def test_a_box_lies_around_what_it_lies_around_in_the_mask(tmp_path):
    images = hr.Images(size=200, scale=(0.3, 1), flip=True, padding=0, mask="png", boxes=None)
    images = dataclasses.replace(
        images, boxes=lambda _, parts: np.frombuffer(parts["box"], np.float64).reshape(1, 4)
    )
    samples = []
    for i in range(30):
        left, top = np.random.default_rng(i).integers(10, 200, 2)
        mask = np.zeros((300, 400), np.uint8)
        mask[top : top + 80, left : left + 130] = 1
        box = np.array([left, top, left + 130, top + 80], np.float64)
        parts = {"jpg": encoded(picture(400, 300, i), "JPEG"), "box": box.tobytes()}
        samples.append(parts | {"png": encoded(Image.fromarray(mask), "PNG")})
    loader = hr.loader(store_of(tmp_path, samples), 10, decode=images)
    for batch in loader:
        for mask, boxes in zip(batch.masks, batch.boxes, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            if not len(boxes):
                assert len(rows) <= 1 or len(columns) <= 1
                continue
            around = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            np.testing.assert_allclose(boxes[0], around, atol=1.01)
    loader.close()


def test_cocos_annotations_are_boxes_with_their_category(tmp_path):

    listed = [
        {"bbox": [10, 20, 30, 40], "category_id": 17},
        {"bbox": [0, 0, 5, 5], "category_id": 3},
    ]
    samples = [
        {"image": encoded(picture(100, 80), "JPEG"), "annotations": json.dumps(each).encode()}
        for each in (listed, [])
    ]
    images = hr.Images(size=(40, 50), crop="stretch", boxes="annotations")
    loader = hr.loader(store_of(tmp_path, samples), 2, order="sequential", decode=images)
    (batch,) = loader
    assert batch.masks is None
    np.testing.assert_allclose(batch.boxes[0], [[5, 10, 20, 30, 17], [0, 0, 2.5, 2.5, 3]])
    assert batch.boxes[1].shape == (0, 5)
    loader.close()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_boxes_are_read_of_all_versions_of_npy(tmp_path, version):
    array = io.BytesIO()
    np.lib.format.write_array(array, np.float32([[1, 2, 30, 40]]), version=(version, 0))
    parts = {"jpg": encoded(picture(80, 60), "JPEG"), "npy": array.getvalue()}
    images = hr.Images(size=(60, 80), crop="stretch", boxes="npy")
    loader = hr.loader(store_of(tmp_path, [parts]), 1, decode=images)
    (batch,) = loader
    np.testing.assert_array_equal(batch.boxes, [[[1, 2, 30, 40]]])
    loader.close()


def test_a_mask_is_as_large_as_the_picture_that_is_turned_upright(tmp_path):
    im = picture(90, 60)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    im.save(turned, "JPEG", exif=exif)
    values = np.random.default_rng(0).integers(0, 9, (90, 60)).astype(np.uint8)
    parts = {"jpg": turned.getvalue(), "png": encoded(Image.fromarray(values), "PNG")}
    images = hr.Images(size=32, orient=True, mask="png")
    loader = hr.loader(store_of(tmp_path, [parts]), 1, decode=images)
    (batch,) = loader
    np.testing.assert_array_equal(batch.masks[0], mask_by_pillow(images, values, 0, 0, 0))
    loader.close()
    loader = hr.loader(tmp_path / "parts.hr", 1, decode=dataclasses.replace(images, orient=False))
    with pytest.raises(DecodeError, match="60 x 90 pixels, and the picture 90 x 60"):
        list(loader)


GREY = np.zeros((60, 80), np.uint8)
MASK = "has no mask that can be used: "


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seg.png": encoded(Image.fromarray(GREY[:-1]), "PNG")}, MASK + "it has 80 x 59 pixels"),
        ({"seg.png": encoded(Image.fromarray(GREY), "JPEG")}, MASK + "it is no PNG"),
        ({"seg.png": encoded(picture(80, 60), "PNG")}, MASK + "it is no PNG of 8 bits"),
        ({"seg.png": b""}, MASK + "it is empty"),
        ({"jpg": encoded(picture(80, 60), "BMP"), "seg.png": b""}, MASK + "it is empty"),
        ({"seg.png": encoded(Image.fromarray(GREY), "PNG")[:-20]}, MASK + "the file is cut off"),
        ({"npy": b"\x93NUMPY\x01\x00"}, "no boxes that can be used: ValueError"),
        ({"npy": b"\x93NUMPY\x01\x00\x06\x00{'a' 5"}, "no boxes that can be used: ValueError"),
        ({"npy": b"[{}]"}, "COCO's list of annotations: KeyError"),
        ({"npy": b'[{"bbox": [5, 5, -3, 2], "category_id": 1}]'}, "its right or bottom lies before"),
        ({"npy": b'[{"bbox": [5, 5, NaN, 2], "category_id": 1}]'}, "is not finite"),
        ({"npy": b'[{"bbox": [5, 5, 1], "category_id": 1}]'}, "COCO's list of annotations"),
    ],
)  # fmt: skip
def test_what_is_no_mask_and_no_boxes_names_its_sample(tmp_path, changed, words):
    good = {
        "jpg": encoded(picture(80, 60), "JPEG"), "seg.png": encoded(Image.fromarray(GREY + 1), "PNG"),
        "npy": b'[{"bbox": [0, 0, 80, 60], "category_id": 4}]',
    }  # fmt: skip
    path = store_of(tmp_path, [good, good | changed, good])
    images = hr.Images(size=32, crop="stretch", mask="seg.png", boxes="npy")
    with pytest.raises(DecodeError, match="sample 1 ") as caught:
        list(hr.loader(path, 3, order="sequential", decode=images))
    assert words in str(caught.value)
    loader = hr.loader(path, 3, order="sequential", decode=images, on_error="skip")
    (batch,) = loader
    assert batch.indices.tolist() == [0, 2]
    assert [skipped.index for skipped in loader.skipped] == [1]
    assert (batch.masks == 1).all()
    np.testing.assert_array_equal(np.stack(batch.boxes), [[[0, 0, 32, 32, 4]]] * 2)
    loader.close()


def test_an_array_whose_header_lies_is_refused_before_memory_is_taken(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 4)}
    )
    parts = {"jpg": encoded(picture(80, 60), "JPEG"), "npy": head.getvalue()}
    loader = hr.loader(store_of(tmp_path, [parts]), 1, decode=hr.Images(size=32, boxes="npy"))
    with pytest.raises(DecodeError, match=r"no whole \.npy file"):
        list(loader)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": "png", "mixup": 0.2}, "do not go with mixup"),
        ({"boxes": "npy", "keep": "decoded"}, "do not go with keep"),
        ({"mask": "png", "mask_fill": 256}, "mask_fill is 256"),
        ({"boxes": "npy", "empty_boxes": "leave"}, "empty_boxes is 'leave'"),
    ],
)
def test_what_contradicts_masks_and_boxes_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        hr.Images(**options)


def test_a_part_that_is_not_there_is_named(tmp_path):
    path = store_of(tmp_path, [sample(1)[0]])
    for given in ({"mask": "png"}, {"boxes": "json", "mask": "seg.png"}):
        with pytest.raises(ValueError, match="and the samples have"):
            hr.loader(path, 1, decode=hr.Images(**given))

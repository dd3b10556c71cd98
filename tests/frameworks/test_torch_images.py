"""Pictures as torch users get them: tensors over the batch's buffer, by one argument."""

import ast
import inspect
import re
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image
from tests.plane.test_images import KINDS, encoded, picture

import headrace as hr
from headrace.frameworks.torch.dropin import augmentations, transforms
from headrace.torch import DataLoader, Dataset, StoreLoader
from tests_shared import ROOT


@pytest.fixture(scope="module")
def photo_store(tmp_path_factory):
    kinds = [KINDS["jpeg 4:2:0"], KINDS["png"], KINDS["webp"], lambda im: encoded(im, "BMP")]
    folder = tmp_path_factory.mktemp("torch images") / "photos.hr"
    pictures = ((f"{i:02d}", kinds[i % 4](picture(90 + i, 70, i)), i % 5) for i in range(30))
    hr.pack(pictures, folder)
    return folder


def pixels_of(store, images, order="sequential"):
    loader = hr.loader(store, 30, order=order, decode=images)
    (batch,) = loader
    loader.close()
    return batch


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_pixels_and_labels_are_tensors_without_a_copy(photo_store, dtype, layout):
    images = hr.Images(size=(24, 40), flip=True, dtype=dtype, layout=layout)
    loader = DataLoader(photo_store, batch_size=30, shuffle=False, decode=images, num_workers=2)
    assert isinstance(loader, StoreLoader)
    assert loader.decode_threads == 2
    ((pixels, labels),) = loader
    expected = pixels_of(photo_store, images)
    assert pixels.dtype == getattr(torch, dtype)
    assert pixels.shape == (30, 3, 24, 40)
    assert pixels.is_contiguous(memory_format=torch.channels_last) == (layout == "nhwc")
    flat = pixels if layout == "nchw" else pixels.permute(0, 2, 3, 1)
    bits = flat.contiguous().view(torch.uint8).numpy()
    assert bits.tobytes() == np.ascontiguousarray(expected.pixels).tobytes()
    assert labels.tolist() == expected.labels.tolist()
    pixels.zero_()  # the buffer is this batch's alone
    loader.close()


def test_a_run_that_is_resumed_sees_the_same_pixels(photo_store):
    images = hr.Images(size=16, flip=True)
    first = DataLoader(photo_store, batch_size=7, shuffle=True, seed=4, decode=images)
    whole = [pixels.clone() for pixels, _ in first]
    first.set_epoch(0)
    batches = iter(first)
    next(batches)
    second = DataLoader(photo_store, batch_size=7, shuffle=True, seed=4, decode=images, threads=3)
    second.load_state_dict(first.state_dict())
    rest = [pixels.clone() for pixels, _ in second]
    assert len(rest) == len(whole) - 1
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[1:], strict=True))
    first.close()
    second.close()


def test_mixed_batches_carry_both_labels_as_tensors(photo_store):
    images = hr.Images(size=16, mixup=0.8)
    loader = DataLoader(photo_store, batch_size=30, shuffle=False, decode=images)
    ((pixels, mixed),) = loader
    assert isinstance(mixed, hr.MixedLabels)
    assert mixed.labels_a.tolist() == [i % 5 for i in range(30)]
    assert mixed.labels_b.tolist() == mixed.labels_a.tolist()[::-1]
    plain = pixels_of(photo_store, hr.Images(size=16)).pixels.astype(float)
    exact = mixed.lam * plain + (1 - mixed.lam) * plain[::-1]
    assert np.abs(pixels.numpy() - exact).max() <= 0.5
    loader.close()


def test_masks_and_boxes_are_tensors_behind_the_labels(tmp_path):
    mask = np.arange(60 * 80, dtype=np.uint8).reshape(60, 80)
    parts = {"jpg": encoded(picture(80, 60), "JPEG"), "png": encoded(Image.fromarray(mask), "PNG")}
    hr.pack(((f"{i}", parts) for i in range(6)), tmp_path / "scenes.hr")
    images = hr.Images(size=24, flip=True, mask="png", boxes=box_by_index)
    expected = pixels_of(tmp_path / "scenes.hr", images)
    for options in ({}, {"collate_fn": list}, {"sampler": range(6)}):
        loader = DataLoader(tmp_path / "scenes.hr", batch_size=6, decode=images, **options)
        (batch,) = loader
        if "collate_fn" in options:
            batch = list(zip(*batch, strict=True))
        pixels, labels, masks, boxes = batch
        assert len(pixels) == len(labels) == 6
        if "sampler" in options:  # torch's own draws
            assert masks.shape == (6, 24, 24)
            continue
        for i in range(6):
            np.testing.assert_array_equal(masks[i].numpy(), expected.masks[i])
            np.testing.assert_array_equal(boxes[i].numpy(), expected.boxes[i])


def box_by_index(index, parts):
    assert set(parts) == {"jpg", "png"}
    return [[0, 0, 80 - index, 60]]


def test_what_contradicts_images_is_refused(photo_store):
    images = hr.Images(size=16)
    with pytest.raises(ValueError, match="shuffle is True and order is"):
        DataLoader(photo_store, batch_size=4, decode=images, shuffle=True, order="blocked")
    with pytest.raises(ValueError, match="function of its own"):
        StoreLoader(Dataset(photo_store, bytes), 4, decode=images)


def test_the_page_names_every_transform_that_is_known_and_what_a_store_has_for_it():
    tree = ast.parse(textwrap.dedent(inspect.getsource(transforms._Prefix.takes)))
    cases = [
        p for c in ast.walk(tree) if isinstance(c, ast.match_case) for p in ast.walk(c.pattern)
    ]
    known = {p.value.value for p in cases if isinstance(p, ast.MatchValue)}
    assert {"Resize", "RandomCrop", "Normalize"} <= known
    page = (ROOT / "docs/howto/images.md").read_text()
    (bullet,) = re.findall(r"^- \*\*Known:\*\*.*?(?=^- )", page, re.MULTILINE | re.DOTALL)
    (table,) = re.findall(
        r"^## From torchvision, over a store\n(.*?)^##", page, re.MULTILINE | re.DOTALL
    )
    for name in known | set(augmentations.NAMES):
        flip = "both flips" if name.endswith("Flip") else None
        assert re.search(rf"\b{name}\b", bullet) or (flip and flip in bullet), name
        assert re.search(rf"`[^`]*\b{name}\b", table), name

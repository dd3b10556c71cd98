"""Augmentations: Pillow's operators to the last bit, drawn alike wherever and whenever a picture is drawn."""

import dataclasses
import math

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from tests.plane.test_images import (
    KINDS,
    SIZES,
    Stream,
    decoded,
    encoded,
    photograph,
    picture,
    store_of,
)

import headrace as hr
from headrace import _native
from headrace.order.hash import Purpose, derive_key
from headrace.plane.augment import Op, mix

ENHANCERS = {
    Op.BRIGHTNESS: ImageEnhance.Brightness,
    Op.CONTRAST: ImageEnhance.Contrast,
    Op.COLOUR: ImageEnhance.Color,
    Op.SHARPNESS: ImageEnhance.Sharpness,
}


def with_steps(im: Image.Image, *steps) -> Image.Image:
    """Native steps on a picture that is not resized."""
    images = hr.Images(size=(im.height, im.width), crop="stretch", layout="nhwc")
    raw = _native.decode_picture(
        images.recipe(), encoded(im, "PNG"), 0, 0, 0, np.array([steps], np.float64)
    )
    return Image.fromarray(np.frombuffer(raw, np.uint8).reshape(images.shape))


def turned(im: Image.Image, levels: int) -> Image.Image:
    hue, saturation, value = im.convert("HSV").split()
    hue = Image.fromarray(np.asarray(hue) + np.uint8(levels % 256))
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def by_pillow(im: Image.Image, step) -> Image.Image:
    """One step by Pillow."""
    op, *values = step
    if op in ENHANCERS:
        return ENHANCERS[Op(op)](im).enhance(values[0])
    match int(op):
        case 0:
            return im
        case Op.HUE:
            return turned(im, int(values[0]))
        case Op.POSTERIZE:
            return ImageOps.posterize(im, int(values[0]))
        case Op.SOLARIZE:
            return ImageOps.solarize(im, values[0])
        case Op.AUTOCONTRAST:
            return ImageOps.autocontrast(im)
        case Op.EQUALIZE:
            return ImageOps.equalize(im)
        case Op.AFFINE | Op.AFFINE_BILINEAR:
            how = Image.Resampling.NEAREST if op == Op.AFFINE else Image.Resampling.BILINEAR
            return im.transform(im.size, Image.Transform.AFFINE, values, how)
        case Op.ERASE:
            left, top, width, height, colour, _ = map(int, values)
            im = im.copy()
            im.paste(
                (colour & 255, colour >> 8 & 255, colour >> 16),
                (left, top, left + width, top + height),
            )
            return im
    raise AssertionError(step)


def named(im: Image.Image, name: str, magnitude: float) -> Image.Image:
    """An operator as torchvision's documentation has it on Pillow's pictures."""
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return getattr(ImageEnhance, name)(im).enhance(1 + magnitude)
    match name:
        case "Rotate":
            return im.rotate(magnitude)
        case "ShearX":
            matrix = (1, magnitude, 0, 0, 1, 0)
        case "ShearY":
            matrix = (1, 0, 0, magnitude, 1, 0)
        case "TranslateX":
            matrix = (1, 0, -int(magnitude), 0, 1, 0)
        case "TranslateY":
            matrix = (1, 0, 0, 0, 1, -int(magnitude))
        case "Posterize":
            return ImageOps.posterize(im, int(magnitude))
        case "Solarize":
            return ImageOps.solarize(im, magnitude)
        case _:
            return {
                "Identity": Image.Image.copy,
                "AutoContrast": ImageOps.autocontrast,
                "Equalize": ImageOps.equalize,
                "Invert": ImageOps.invert,
            }[name](im)
    return im.transform(im.size, Image.Transform.AFFINE, matrix)


def pictures():
    """Waves, noise, few levels, one colour, and sides that leave no room."""
    rng = np.random.default_rng(3)
    yield from (picture(*size, seed=i) for i, size in enumerate([*SIZES, (2, 9), (3, 3)]))
    yield photograph(101, 83, 1)
    yield Image.fromarray(rng.integers(0, 256, (64, 70, 3), np.uint8))
    yield Image.fromarray((rng.integers(0, 5, (60, 77, 3)) * 20 + 60).astype(np.uint8))
    yield Image.new("RGB", (50, 40), (3, 9, 200))


OPERATORS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize", "Invert",
)  # fmt: skip

MAGNITUDES = {
    "Posterize": (2, 5, 8),
    "Solarize": (0, 17, 127.5, 255),
    "ShearX": (0.1, -0.3, 0.99), "ShearY": (0.1, -0.3, 0.99),
    "TranslateX": (3.9, -7.2, 32), "TranslateY": (3.9, -7.2, 32),
    "Rotate": (0, 9, -17.3, 90, -90, 135, -135),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_pillows_to_the_last_bit(name):
    magnitudes = MAGNITUDES.get(name, (0.0, -0.9, 0.27, 0.99))
    for im in pictures():
        for magnitude in magnitudes:
            step = _native.augmentation(name, magnitude, *im.size)
            expected = named(im, name, magnitude)
            np.testing.assert_array_equal(with_steps(im, step), expected, f"{magnitude} {im.size}")


def test_pixels_between_others_are_pillows_to_the_last_bit():
    """Turned, sheared, shifted by parts of a pixel, and scaled up and down."""
    for im in pictures():
        steps = [
            *(_native.augmentation("Rotate", angle, *im.size) for angle in (0, 90, -17.3, 135)),
            _native.augmentation("ShearX", 0.3, *im.size),
            (Op.AFFINE, 1, 0, 0.5, 0, 1, -0.25), (Op.AFFINE, 0.3, 0.1, -2.7, -0.05, 0.4, 3.3),
            (Op.AFFINE, 2.5, 0, -9, 0.3, 1.9, -7), (Op.AFFINE, -1, 0, im.width, 0, -1, im.height),
        ]  # fmt: skip
        for _, *numbers in steps:
            step = (Op.AFFINE_BILINEAR, *numbers)
            np.testing.assert_array_equal(with_steps(im, step), by_pillow(im, step), str(im.size))


def blurred(im: Image.Image, columns: int, rows: int, *sigmas: float) -> np.ndarray:
    """In double precision over the whole kernel, before it is rounded."""
    weights = [
        np.exp(-0.5 * ((np.arange(size) - size // 2) / sigma) ** 2)
        for size, sigma in zip((columns, rows), sigmas, strict=True)
    ]
    kernel = np.outer(weights[1] / weights[1].sum(), weights[0] / weights[0].sum())
    edges = ((rows // 2,) * 2, (columns // 2,) * 2, (0, 0))
    padded = np.pad(np.asarray(im, np.float64), edges, "reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (rows, columns), axis=(0, 1))
    return np.einsum("yxcij,ij->yxc", windows, kernel)


def test_a_blur_is_the_sum_over_its_kernel_with_reflected_edges():
    """Which is torchvision's definition; kernels as wide as the picture allows, and of one pixel."""
    for im in pictures():
        most = [2 * side - 1 for side in im.size]
        for columns, rows, sigmas in [
            (5, 3, (1.1, 0.3)), (1, 1, (2.0, 2.0)), (23, 23, (0.1, 9.0)), (*most, (3.0, 800.0)),
        ]:  # fmt: skip
            size = min(columns, most[0], 41), min(rows, most[1], 41)
            ours = np.asarray(with_steps(im, (Op.BLUR, *size, *sigmas, 0, 0)), np.float64)
            assert np.abs(ours - blurred(im, *size, *sigmas)).max() <= 0.5 + 1e-3


def test_every_colours_hue_is_turned_as_pillow_turns_it():
    """All pairs of two channels beside some of the third; in all places."""
    pairs = np.stack(np.meshgrid(*[np.arange(256)] * 2, indexing="ij"), -1)
    for third in (0, 1, 77, 200, 255):
        for places in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
            whole = np.concatenate([pairs, np.full((256, 256, 1), third)], -1)[..., places]
            im = Image.fromarray(whole.astype(np.uint8))
            for levels in (0, 1, -127, 96):
                step = (Op.HUE, levels, 0, 0, 0, 0, 0)
                np.testing.assert_array_equal(with_steps(im, step), turned(im, levels))


EVERYTHING = {
    "flip": True, "flip_vertical": 0.3, "jitter": (0.4, 0.4, 0.4, 0.1), "grey": 0.2,
    "erase": 0.5, "erase_value": (9, 80, 255),
}  # fmt: skip


def plain(images: hr.Images) -> hr.Images:
    """The same without augmentations."""
    return hr.Images(
        size=images.size, crop=images.crop, flip=images.flip, flip_vertical=images.flip_vertical,
        orient=images.orient, layout="nhwc",
    )  # fmt: skip


def augmented(images: hr.Images, data: bytes, index: int, seed=7, epoch=1) -> np.ndarray:
    steps = images.steps(seed, epoch, np.array([index]))
    raw = _native.decode_picture(images.recipe(), data, seed, epoch, index, steps)
    return np.frombuffer(raw, images.numpy_dtype).reshape(images.shape)


RECIPES = (
    {"augment": "randaugment", "operations": 3, "magnitude": 17},
    {"augment": "trivialaugment", "crop": "center", "padding": 5},
    {"crop": "stretch", "padding": 4, "orient": True},
)


def check_recipes(indices) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for index in indices:
        layout = ("nhwc", "nchw")[index % 2]
        images = hr.Images(size=(40, 56), layout=layout, **EVERYTHING, **RECIPES[index % 3])
        data = encoded(picture(*SIZES[index % 4], seed=index), "PNG", exif=exif)
        expected = Image.fromarray(decoded(plain(images), data, index))
        for step in images.steps(7, 1, np.array([index]))[0]:
            expected = by_pillow(expected, step)
        ours = augmented(images, data, index)
        ours = ours if layout == "nhwc" else ours.transpose(1, 2, 0)
        np.testing.assert_array_equal(ours, expected)


def test_whole_recipes_are_pillows_on_what_was_cut_and_flipped():
    check_recipes(range(240))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(240, 2240, 200))
def test_whole_recipes_of_two_thousand_pictures_are_pillows(first):
    check_recipes(range(first, first + 200))


def test_erased_noise_stays_in_its_rectangle_and_floats_are_normalised_after_it():
    data = encoded(Image.new("RGB", (60, 50), (128, 128, 128)), "PNG")
    images = hr.Images(size=(50, 60), crop="stretch", erase=1, erase_value="random", layout="nhwc")
    for index in range(20):
        ((_, *values),) = images.steps(7, 1, np.array([index]))[0]
        left, top, width, height = map(int, values[:4])
        ours = augmented(images, data, index).astype(int)
        inside = ours[top : top + height, left : left + width]
        assert np.unique(inside).size > min(100, inside.size // 3)
        assert (ours != 128).sum() == (inside != 128).sum()
        single = dataclasses.replace(images, dtype="float32", mean=(0.5,) * 3, std=(0.25,) * 3)
        np.testing.assert_allclose(
            augmented(single, data, index), (ours / 255 - 0.5) / 0.25, atol=1e-6
        )


# -- what is drawn ---------------------------------------------------------------------------------


class Numbers(Stream):
    """The numbers of one picture, one after the other."""

    def __init__(self, seed, epoch, index):
        self.state = derive_key(seed, Purpose.AUGMENTATIONS, epoch, index)


def test_a_picture_gets_its_own_steps_in_any_batch():
    images = hr.Images(size=96, augment="randaugment", **EVERYTHING)
    indices = np.random.default_rng(1).integers(0, 1 << 47, 300)
    whole = images.steps(5, 2, indices)
    assert whole.shape == (300, 2 + 4 + 1 + 1, 7)
    for i in range(0, 300, 7):
        np.testing.assert_array_equal(images.steps(5, 2, indices[i : i + 1])[0], whole[i])
    assert (images.steps(5, 3, indices) != whole).any(axis=(1, 2)).all()
    assert (images.steps(6, 2, indices) != whole).any(axis=(1, 2)).all()
    assert hr.Images().steps(5, 2, indices) is None
    assert images.steps(5, 2, indices[:0]).shape == (0, 8, 7)


def test_draws_are_those_of_the_plain_definition():
    images = hr.Images(
        size=(40, 64), jitter=(0.4, 0.2, 1.5, 0.25), blur=0.3, blur_sigma=(0.5, 3.5), erase=0.7,
        erase_ratio=(0.5, 2),
    )  # fmt: skip
    for index in range(200):
        numbers = Numbers(3, 1, index)
        bounds = ((0.6, 1.4), (0.8, 1.2), (0, 2.5), (-0.25, 0.25))
        factors = [numbers.uniform(*each) for each in bounds]
        factors[3] = int(factors[3] * 255)
        place, left = numbers.below(24), list(range(4))
        order = [left.pop(place // math.factorial(k) % (k + 1)) for k in (3, 2, 1, 0)]
        expected = [(1 + i, factors[i]) for i in order]
        blur, sigma = numbers.uniform() < 0.3, numbers.uniform(0.5, 3.5)
        wanted, _ = numbers.uniform() < 0.7, numbers.uniform()
        rectangle = None
        for _ in range(10):
            area = 40 * 64 * numbers.uniform(0.02, 0.33)
            ratio = math.exp(numbers.uniform(math.log(0.5), math.log(2)))
            rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            top, left = (
                numbers.below(max(1, 40 - rows + 1)),
                numbers.below(max(1, 64 - columns + 1)),
            )
            if rectangle is None and rows < 40 and columns < 64:
                rectangle = (left, top, columns, rows)
        (*jitter, blurs, erase) = images.steps(3, 1, np.array([index]))[0]
        np.testing.assert_allclose(blurs[1:5], (7, 7, sigma, sigma), rtol=1e-12)
        assert blurs[0] == (Op.BLUR if blur else 0)
        np.testing.assert_allclose([step[:2] for step in jitter], expected, rtol=1e-12)
        assert (erase[0] == Op.ERASE) == wanted
        if wanted:
            assert tuple(erase[1:5]) == rectangle


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_policies_are_those_of_the_plain_definition(policy):
    wide = policy == "trivialaugment"
    images = hr.Images(
        size=(40, 64),
        crop="stretch",
        padding=7,
        augment=policy,
        operations=3,
        magnitude=11,
        grey=0.4,
    )
    for index in range(300):
        numbers = Numbers(3, 1, index)
        shift = [numbers.below(15) - 7 for _ in range(2)]
        expected = [[Op.AFFINE, 1, 0, shift[0], 0, 1, shift[1]]]
        for _ in range(1 if wide else 3):
            name, level = OPERATORS[numbers.below(14)], numbers.below(31) / 30
            sign = -1 if numbers.uniform() < 0.5 else 1
            level = level if wide else 11 / 30
            most = {
                "ShearX": (0.3, 0.99), "ShearY": (0.3, 0.99), "Rotate": (30, 135),
                "TranslateX": (150 / 331 * 64, 32), "TranslateY": (150 / 331 * 40, 32),
            }.get(name, (0.9, 0.99))  # fmt: skip
            magnitude = sign * level * most[wide]
            if name == "Posterize":
                magnitude = 8 - round(level * (6 if wide else 4))
            if name == "Solarize":
                magnitude = 255 * (1 - level)
            expected.append(_native.augmentation(name, magnitude, 64, 40))
        for _ in range(4):
            numbers.uniform()  # of the jitter, drawn in any case
        expected.append([Op.COLOUR if numbers.uniform() < 0.4 else 0, *[0] * 6])
        np.testing.assert_array_equal(images.steps(3, 1, np.array([index]))[0], expected)


def test_policies_choose_among_all_operators_evenly_and_span_their_magnitudes():
    indices = np.arange(14_000)
    wide = hr.Images(size=224, augment="trivialaugment").steps(1, 0, indices)[:, 0]
    narrow = hr.Images(size=224, augment="randaugment", magnitude=15, operations=1)
    narrow = narrow.steps(1, 0, indices)[:, 0]
    for steps in (wide, narrow):
        counts = np.bincount(steps[:, 0].astype(int), minlength=11)
        assert (np.abs(counts[[0, 1, 2, 3, 5, 6, 7, 8, 9]] - 1000) < 150).all()
        assert abs(counts[Op.AFFINE] - 5000) < 300
    brightness = wide[wide[:, 0] == Op.BRIGHTNESS, 1]
    assert brightness.min() == pytest.approx(0.01)
    assert brightness.max() == pytest.approx(1.99)
    assert set(wide[wide[:, 0] == Op.POSTERIZE, 1]) == {2, 3, 4, 5, 6, 7, 8}
    assert set(np.round(narrow[narrow[:, 0] == Op.COLOUR, 1], 9)) == {0.55, 1.45}
    assert set(narrow[narrow[:, 0] == Op.POSTERIZE, 1]) == {6}
    assert set(narrow[narrow[:, 0] == Op.SOLARIZE, 1]) == {127.5}
    shifts = np.round(np.abs(narrow[narrow[:, 0] == Op.AFFINE][:, 3]), 6)
    assert {0, int(75 / 331 * 224)} <= set(shifts)


# -- in a loader -----------------------------------------------------------------------------------


def test_a_loader_augments_alike_on_any_ranks_and_threads_after_a_resume_and_by_pillow(tmp_path):
    makers = [KINDS["jpeg 4:2:0"], KINDS["png"], lambda im: encoded(im, "BMP")]
    files = [makers[i % 3](picture(*SIZES[i % 4], seed=i)) for i in range(31)]
    store = store_of(tmp_path, {f"{i:02d}": data for i, data in enumerate(files)})
    images = hr.Images(size=32, augment="trivialaugment", **EVERYTHING)
    png = [
        data if i % 3 < 2 else encoded(picture(*SIZES[i % 4], seed=i), "PNG")
        for i, data in enumerate(files)
    ]
    expected = {i: augmented(images, data, i, 4, 0).tobytes() for i, data in enumerate(png)}

    def of(loader):
        pixels = {}
        for batch in loader:
            pixels |= {
                int(i): each.tobytes() for i, each in zip(batch.indices, batch.pixels, strict=True)
            }
        return pixels

    together = {}
    for rank in range(3):
        loader = hr.loader(
            store, 4, seed=4, decode=images, decode_threads=1 + rank, rank=rank, world_size=3,
            tail="exact",
        )  # fmt: skip
        together |= of(loader)
        loader.close()
    assert together == expected
    first = hr.loader(store, 5, seed=4, decode=images)
    next(iter(first))
    second = hr.loader(store, 2, seed=4, decode=images)
    second.load_state_dict(first.state_dict())
    rest = of(second)
    assert len(rest) == 26
    assert rest.items() <= expected.items()
    first.close()
    second.close()


def mixed_by(images: hr.Images, pixels: np.ndarray, seed=3, epoch=1, indices=None):
    indices = np.arange(len(pixels)) if indices is None else indices
    ours = pixels.copy()
    return ours, mix(images, ours, np.arange(len(pixels)) % 5, indices, seed=seed, epoch=epoch)


@pytest.mark.parametrize("count", [0, 1, 7, 8])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16"])
def test_mixup_blends_each_picture_with_its_partner_in_labels_and_pixels(dtype, count):
    images = hr.Images(size=(12, 20), mixup=0.4, dtype=dtype)
    pixels = np.random.default_rng(1).integers(0, 256, (count, 3, 12, 20)).astype(dtype)
    shares = []
    for epoch in range(40):
        ours, (a, b, lam) = mixed_by(images, pixels, epoch=epoch)
        exact = pixels.astype(float) * lam + pixels[::-1].astype(float) * (1 - lam)
        np.testing.assert_allclose(
            ours, exact, atol={"uint8": 0.5, "float16": 0.2}.get(dtype, 1e-4)
        )
        assert b.tolist() == a[::-1].tolist()
        shares.append(lam)
    assert len(set(shares)) > 20
    assert 0 <= min(shares) < 0.1 < 0.9 < max(shares) <= 1


def test_pictures_that_cannot_be_blended_in_place_are_refused():
    good = np.zeros((3, 8, 8), np.uint8)
    for one, other in (
        (good.astype(np.uint16), good.astype(np.uint16)),
        (good, good.astype(np.float32)),
        (good[:, :, ::2], good[:, :, ::2]),
    ):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            _native.blend_pictures(one, other, 0.5)
    for other, share in ((good[1:], 0.5), (good, 1.5), (good, math.nan)):
        with pytest.raises(ValueError, match="two sizes, or a share"):
            _native.blend_pictures(good, other, share)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_cutmix_swaps_one_box_and_says_its_share(layout):
    images = hr.Images(size=(24, 32), cutmix=1.0, layout=layout, dtype="bfloat16")
    pixels = np.random.default_rng(2).integers(0, 256, (9, *images.shape)).astype(np.uint16)
    shares = []
    for seed in range(60):
        ours, (_, _, lam) = mixed_by(images, pixels, seed=seed)
        planes, before = (
            x if layout == "nchw" else x.transpose(0, 3, 1, 2) for x in (ours, pixels)
        )
        other = before[::-1]
        swapped = (planes != before).any(axis=(0, 1))
        assert (np.where(swapped, other, before) == planes).all()
        rows, columns = np.flatnonzero(swapped.any(1)), np.flatnonzero(swapped.any(0))
        if len(rows):
            assert swapped[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert lam == pytest.approx(1 - swapped.mean())
        shares.append(lam)
    assert min(shares) < 0.4
    assert max(shares) > 0.9


def test_how_a_batch_is_mixed_follows_from_seed_epoch_and_indices(tmp_path):
    images = hr.Images(size=16, mixup=0.5, cutmix=1.0)
    pixels = np.random.default_rng(3).integers(0, 256, (6, 3, 16, 16)).astype(np.uint8)
    first = mixed_by(images, pixels)
    for change in ({"seed": 4}, {"epoch": 2}, {"indices": np.arange(6)[::-1]}):
        assert mixed_by(images, pixels, **change)[1].lam != first[1].lam
    again = mixed_by(images, pixels)
    assert (again[0] == first[0]).all()
    assert again[1].lam == first[1].lam
    cut = [(mixed_by(images, pixels, seed=s)[0] != pixels).all(axis=1).mean() for s in range(60)]
    assert 10 < sum(share < 0.9 for share in cut) < 50  # a box, or everything
    store = store_of(tmp_path, {f"{i}": encoded(picture(40, 30, i), "PNG") for i in range(8)})
    loader = hr.loader(store, 4, seed=3, decode=images)
    plain = hr.loader(store, 4, seed=3, decode=hr.Images(size=16))
    for ours, whole in zip(loader, plain, strict=True):
        expected = whole.pixels.copy()
        labels = mix(images, expected, whole.labels, whole.indices, seed=3, epoch=0)
        assert whole.mixed is None
        assert ours.mixed.lam == labels.lam
        np.testing.assert_array_equal(ours.mixed.labels_b, labels.labels_b)
        np.testing.assert_array_equal(ours.pixels, expected)
    loader.close()
    plain.close()


def test_steps_that_would_reach_outside_are_refused():
    data = encoded(picture(32, 32), "PNG")
    recipe = hr.Images(size=32, crop="stretch").recipe()
    good = (Op.ERASE, 0, 0, 32, 32, 0, 0)
    _native.decode_picture(recipe, data, 0, 0, 0, np.array([[good]], np.float64))
    bad = [
        (14, 0, 0, 0, 0, 0, 0), (-1, 0, 0, 0, 0, 0, 0), (0.5, 0, 0, 0, 0, 0, 0),
        (math.nan, 0, 0, 0, 0, 0, 0), (1, math.nan, 0, 0, 0, 0, 0), (1, math.inf, 0, 0, 0, 0, 0),
        (Op.POSTERIZE, 9, 0, 0, 0, 0, 0), (Op.POSTERIZE, -1, 0, 0, 0, 0, 0),
        (Op.AFFINE, 1, 0, 2.0**21, 0, 1, 0), (Op.AFFINE, -math.inf, 0, 0, 0, 1, 0),
        (Op.ERASE, 1, 0, 32, 32, 0, 0), (Op.ERASE, 0, 31, 1, 2, 0, 0), (Op.ERASE, -1, 0, 1, 1, 0, 0),
        (Op.ERASE, 0, 0, -5, 1, 0, 0), (Op.ERASE, 0, 0, 1, 1, 1 << 24, 0), (Op.ERASE, 0, 0, 1, 1, 0, -1),
        (Op.HUE, 2.0**40, 0, 0, 0, 0, 0), (Op.BLUR, 2, 1, 1, 1, 0, 0), (Op.BLUR, 1, 65, 1, 1, 0, 0),
        (Op.BLUR, 65, 1, 1, 1, 0, 0), (Op.BLUR, -1, 1, 1, 1, 0, 0), (Op.BLUR, 1.5, 1, 1, 1, 0, 0),
        (Op.BLUR, 3, 3, 0, 1, 0, 0), (Op.BLUR, 3, 3, 1, -1, 0, 0), (Op.BLUR, 3, 3, 1, math.nan, 0, 0),
    ]  # fmt: skip
    for step in bad:
        with pytest.raises(ValueError, match="augmentation is out of bounds"):
            _native.decode_picture(recipe, data, 0, 0, 0, np.array([[good, step]], np.float64))
    with pytest.raises(ValueError, match="for each picture"):
        _native.decode_picture(recipe, data, 0, 0, 0, np.zeros((2, 1, 7)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"augment": "autoaugment"}, "augment is 'autoaugment', expected one of"),
        ({"augment": "randaugment", "magnitude": 31}, "magnitude is 31"),
        ({"augment": "randaugment", "operations": 0}, "operations is 0"),
        ({"padding": 4}, "padding is 4, expected 0 to 0 with crop='random'"),
        ({"padding": 33, "size": 32, "crop": "stretch"}, "padding is 33, expected 0 to 32"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, "jitter is"),
        ({"jitter": (0.4, 0.4, 0.4)}, "jitter is"),
        ({"grey": 1.5}, "grey is 1.5"),
        ({"blur": 1.5}, "blur is 1.5"),
        ({"blur": 1, "blur_kernel": 4}, "blur_kernel is 4, expected an odd number, 1 to 447"),
        ({"blur": 1, "size": (9, 400)}, "blur_kernel is 41, expected an odd number, 1 to 17"),
        ({"blur_sigma": (0, 1)}, "blur_sigma"),
        ({"erase": -0.5}, "erase is -0.5"),
        ({"erase": 0.5, "erase_scale": (0, 0.3)}, "erase_scale"),
        ({"erase": 0.5, "erase_ratio": (3, 0.3)}, "erase_ratio"),
        ({"erase": 0.5, "erase_value": (1, 2, 300)}, "erase_value"),
        ({"mixup": -1}, "mixup is -1"),
        ({"mixup": 1, "dtype": "bfloat16"}, "numpy cannot blend"),
    ],
)
def test_augmentations_that_cannot_be_drawn_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        hr.Images(**options)

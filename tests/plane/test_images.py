"""Pictures decoded into batches: Pillow's pixels, the same crop anywhere, and never what was there before."""

import dataclasses
import io
import math
import multiprocessing
import pickle
import random
import struct
import zlib
from unittest import mock

import numpy as np
import pytest
from PIL import Image, ImageOps

import headrace as hr
from fuzz.mutation import mutated
from headrace import _native
from headrace.errors import DecodeError, VolumeError
from headrace.order.hash import GOLDEN, Purpose, derive_key, mix64
from headrace.plane.decoding import THREADS_MAX

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SIZES = [
    (500, 375),
    (375, 500),
    (233, 117),
    (64, 64),
    (17, 9),
    (1, 1),
    (640, 480),
    (300, 30),
    (7, 400),
]
FILTERS = {
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Slopes, waves, noise, and a block with hard edges."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [
        128 + 100 * np.sin(x / 17 + y / 31),
        128 + 100 * np.cos(x / 23 - y / 11),
        (3 * x + 5 * y) % 256,
    ]
    pixels = np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = rng.integers(0, 256, 3)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encoded(im: Image.Image, form: str, **options) -> bytes:
    out = io.BytesIO()
    im.save(out, form, **options)
    return out.getvalue()


def png(width, height, depth, colour, rows: bytes, interlace=0) -> bytes:
    """A PNG of rows that have their filters already; Pillow writes neither interlaced nor deep ones."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )  # fmt: skip


def interlaced(im: Image.Image) -> bytes:
    pixels = np.asarray(im)
    passes = [
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    ]
    rows = b"".join(
        b"\0" + row.tobytes()
        for x, y, dx, dy in passes
        if x < im.width
        for row in pixels[y::dy, x::dx]
    )
    return png(im.width, im.height, 8, 2, rows, interlace=1)


def deep(im: Image.Image) -> bytes:
    pixels = np.asarray(im).astype(">u2") * 257
    return png(im.width, im.height, 16, 2, b"".join(b"\0" + row.tobytes() for row in pixels))


KINDS = {
    "jpeg 4:4:4": lambda im: encoded(im, "JPEG", quality=91, subsampling=0),
    "jpeg 4:2:2": lambda im: encoded(im, "JPEG", quality=60, subsampling=1),
    "jpeg 4:2:0": lambda im: encoded(im, "JPEG", quality=88, subsampling=2),
    "jpeg, restart markers": lambda im: encoded(im, "JPEG", restart_marker_rows=1),
    "jpeg, progressive": lambda im: encoded(im, "JPEG", progressive=True),
    "jpeg, progressive 4:4:4": lambda im: encoded(im, "JPEG", progressive=True, subsampling=0),
    "jpeg, grey": lambda im: encoded(im.convert("L"), "JPEG"),
    "jpeg, cmyk": lambda im: encoded(im.convert("CMYK"), "JPEG"),
    "png": lambda im: encoded(im, "PNG"),
    "png, interlaced": interlaced,
    "png, alpha": lambda im: encoded(im.convert("RGBA"), "PNG"),
    "png, palette": lambda im: encoded(im.quantize(64), "PNG"),
    "png, palette of 4 bits": lambda im: encoded(im.quantize(9), "PNG", bits=4),
    "png, 1 bit": lambda im: encoded(im.convert("1"), "PNG"),
    "png, grey": lambda im: encoded(im.convert("L"), "PNG"),
    "png, grey and alpha": lambda im: encoded(im.convert("LA"), "PNG"),
    "png, 16 bits": deep,
    "webp": lambda im: encoded(im, "WEBP", quality=80),
    "webp, lossless": lambda im: encoded(im, "WEBP", lossless=True),
    "ppm": lambda im: encoded(im, "PPM"),
    "webp, alpha": lambda im: encoded(im.convert("RGBA"), "WEBP"),
}


def decoded(images: hr.Images, data: bytes, index: int, seed=7, epoch=1) -> np.ndarray:
    raw = _native.decode_picture(images.recipe(), data, seed, epoch, index)
    return np.frombuffer(raw, images.numpy_dtype).reshape(images.shape)


def by_pillow(images: hr.Images, data: bytes, index: int, seed=7, epoch=1) -> np.ndarray:
    """The same by Pillow, whole picture first; uint8, shape (height, width, 3)."""
    im = Image.open(io.BytesIO(data))
    if images.orient:
        im = ImageOps.exif_transpose(im)
    if images.background is not None:
        behind = Image.new("RGBA", im.size, (*images.background, 255))
        im = Image.alpha_composite(behind, im.convert("RGBA"))
    im = im.convert("RGB")
    drawn = images.recipe().draw(im.width, im.height, seed, epoch, index)
    left, top, scale_x, scale_y, first_x, first_y, flip, flip_vertical = drawn
    height, width = images.size if isinstance(images.size, tuple) else (images.size,) * 2
    how = FILTERS[images.filter]
    if images.crop == "center":
        im = im.resize((round(im.width / scale_x), round(im.height / scale_y)), how)
        im = im.crop((first_x, first_y, first_x + width, first_y + height))
    else:
        right, bottom = round(left + scale_x * width), round(top + scale_y * height)
        im = im.crop((int(left), int(top), right, bottom)).resize((width, height), how)
    pixels = np.asarray(im)
    return pixels[:: -1 if flip_vertical else 1, :: -1 if flip else 1]


def differences(kinds, count: int, **options):
    """Levels between ours and Pillow's: one array for each picture."""
    for i in range(count):
        data = KINDS[kinds[i % len(kinds)]](picture(*SIZES[i % len(SIZES)], seed=i))
        images = hr.Images(
            crop=("random", "center", "stretch")[i % 3],
            filter=list(FILTERS)[i % len(FILTERS)],
            flip=True, flip_vertical=0.3, layout="nhwc", **options,
        )  # fmt: skip
        ours, pillows = decoded(images, data, i), by_pillow(images, data, i)
        yield np.abs(ours.astype(int) - pillows)


def filtered(pixels: np.ndarray, filters: np.ndarray, pixel: int) -> bytes:
    """Rows of a PNG, uint8 of shape (height, bytes), each by the filter of its number."""
    values = np.pad(pixels.astype(int), ((1, 0), (pixel, 0)))
    up, left, corner = values[:-1, pixel:], values[1:, :-pixel], values[:-1, :-pixel]
    to = left + up - corner
    far = [np.abs(to - each) for each in (left, up, corner)]
    paeth = np.where(
        (far[0] <= far[1]) & (far[0] <= far[2]), left, np.where(far[1] <= far[2], up, corner)
    )
    guesses = np.stack([np.zeros_like(up), left, up, (left + up) // 2, paeth])
    rows = (pixels - guesses[filters, np.arange(len(pixels))]).astype(np.uint8)
    return b"".join(bytes([f]) + row.tobytes() for f, row in zip(filters, rows, strict=True))


@pytest.mark.parametrize(("colour", "depth"), [(0, 8), (4, 8), (2, 8), (6, 8), (2, 16), (6, 16)])
def test_rows_of_a_png_come_back_from_whatever_filters_they_have(colour, depth):
    rng = np.random.default_rng(colour)
    pixel = {0: 1, 4: 2, 2: 3, 6: 4}[colour] * depth // 8
    for i in range(60):
        height, width = (int(side) for side in rng.integers(1, 41, 2))
        pixels = rng.integers(0, 256, (height, width * pixel)).astype(np.uint8)
        if i % 2:  # runs of one filter, and steps that tie
            pixels //= 64
        filters = np.repeat(rng.integers(0, 5, height), rng.integers(1, 7))[:height]
        data = png(width, height, depth, colour, filtered(pixels, filters, pixel))
        whole = hr.Images(size=(height, width), crop="stretch", layout="nhwc")
        values = pixels.reshape(height, width, -1, depth // 8)[..., 0]
        expected = values[..., [0, 0, 0]] if colour in {0, 4} else values[..., :3]
        assert (decoded(whole, data, i) == expected).all()
        part = hr.Images(size=(5, 7), scale=(0.01, 0.5), layout="nhwc")
        plain = encoded(Image.fromarray(np.ascontiguousarray(expected)), "PPM")
        assert (decoded(part, data, i) == decoded(part, plain, i)).all()
    bad = bytearray(filtered(pixels, filters, pixel))
    bad[(height // 2) * (width * pixel + 1)] = 5
    with pytest.raises(ValueError, match="unknown filter"):
        decoded(whole, png(width, height, depth, colour, bytes(bad)), 0)


def check_exactness(count: int) -> None:
    levels = list(differences(list(KINDS), count, exact=True))
    assert max(level.max() for level in levels) <= 1
    assert np.mean([level.mean() for level in levels]) < 1e-5


def test_pixels_are_pillows():
    check_exactness(4 * len(KINDS) * 3)


@pytest.mark.slow
def test_pixels_of_two_thousand_pictures_are_pillows():
    check_exactness(2000)


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Noise with the spectrum of photographs (amplitude falls with frequency), and a sensor's noise."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    planes = []
    for _ in range(3):
        waves = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
        plane = np.fft.irfft2(waves / frequency**1.15, (height, width))
        planes.append(plane / plane.std())
    pixels = 128 + 36 * planes[0][..., None] + 18 * np.stack(planes, -1)
    pixels += rng.normal(0, 3, pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@pytest.mark.parametrize("short", [330, 256, 160, 120, 80, 60])
def test_a_jpeg_decoded_smaller_is_close_and_exact_turns_it_off(short):
    data = encoded(photograph(1301, 977, short), "JPEG", quality=90)
    images = hr.Images(size=60, crop="center", short=short, layout="nhwc")
    levels = np.abs(decoded(images, data, 0).astype(int) - by_pillow(images, data, 0))
    assert (levels.max() > 1) == (977 / short >= 3)  # it was decoded smaller, or not
    assert levels.mean() <= 1.5
    assert np.percentile(levels, 99) <= 4
    assert levels.max() <= 32
    exact = dataclasses.replace(images, exact=True)
    assert np.abs(decoded(exact, data, 0).astype(int) - by_pillow(exact, data, 0)).max() <= 1


class Stream:
    """SplitMix64 from the picture's key, in plain Python."""

    def __init__(self, seed, epoch, index):
        self.state = derive_key(seed, Purpose.PICTURES, epoch, index)

    def uniform(self, low=0.0, high=1.0):
        self.state = (self.state + GOLDEN) & 0xFFFFFFFFFFFFFFFF
        return low + (high - low) * ((mix64(self.state) >> 11) * 2.0**-53)

    def below(self, n):
        return min(n - 1, int(self.uniform() * n))


def drawn(images, width, height, seed, epoch, index):
    """RandomResizedCrop and the flips: (left, top, width, height, flip, flip_vertical)."""
    stream = Stream(seed, epoch, index)
    box = None
    for _ in range(10):
        area = width * height * stream.uniform(*images.scale)
        ratio = math.exp(stream.uniform(*map(math.log, images.ratio)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = stream.below(height - h + 1), stream.below(width - w + 1)
            box = (left, top, w, h)
            break
    if box is None:
        w, h = width, height
        if width / height < images.ratio[0]:
            h = max(1, min(height, round(w / images.ratio[0])))
        elif width / height > images.ratio[1]:
            w = max(1, min(width, round(h * images.ratio[1])))
        box = ((width - w) // 2, (height - h) // 2, w, h)
    return (*box, stream.uniform() < images.flip, stream.uniform() < images.flip_vertical)


def test_crops_and_flips_are_a_function_of_seed_epoch_and_index():
    images = hr.Images(flip=0.5, flip_vertical=0.25, size=(120, 224))
    recipe, flips = images.recipe(), []
    for i in range(2000):
        width, height = SIZES[i % len(SIZES)]
        x, y, sx, sy, _, _, flip, vertical = recipe.draw(width, height, i % 5, i % 3, i)
        ours = (int(x), int(y), round(sx * 224), round(sy * 120), flip, vertical)
        assert ours == drawn(images, width, height, i % 5, i % 3, i)
        flips.append((flip, vertical))
    assert 0.45 < np.mean([flip for flip, _ in flips]) < 0.55
    assert 0.21 < np.mean([vertical for _, vertical in flips]) < 0.29


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_followed_where_it_is_asked_for(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for form, options in (("JPEG", {"quality": 95}), ("PNG", {})):
        data = encoded(picture(83, 61), form, exif=exif, **options)
        for crop in ("random", "center", "stretch"):
            images = hr.Images(size=(40, 56), crop=crop, orient=True, layout="nhwc", flip=0.5)
            for index in range(6):
                ours, pillows = decoded(images, data, index), by_pillow(images, data, index)
                # Passes come in another order where a picture lies on its side.
                assert np.abs(ours.astype(int) - pillows).max() <= 2
    asked_not = hr.Images(size=40, crop="stretch", layout="nhwc")
    assert (
        np.abs(decoded(asked_not, data, 0).astype(int) - by_pillow(asked_not, data, 0)).max() <= 1
    )


def test_types_and_layouts_hold_the_same_values():
    data = encoded(picture(200, 150), "PNG")
    base = {"size": (48, 80), "flip": True}
    raw = decoded(hr.Images(**base, layout="nhwc"), data, 3)
    assert (decoded(hr.Images(**base), data, 3) == raw.transpose(2, 0, 1)).all()
    mean, std = np.float32(IMAGENET_MEAN), np.float32(IMAGENET_STD)
    expected = (raw.astype(np.float32) / np.float32(255) - mean) / std
    for layout, turned in (("nhwc", expected), ("nchw", expected.transpose(2, 0, 1))):
        options = {**base, "layout": layout, "mean": IMAGENET_MEAN, "std": IMAGENET_STD}
        single = decoded(hr.Images(**options, dtype="float32"), data, 3)
        np.testing.assert_array_equal(single, turned)
        half = decoded(hr.Images(**options, dtype="float16"), data, 3)
        np.testing.assert_array_equal(half, turned.astype(np.float16))
        brain = decoded(hr.Images(**options, dtype="bfloat16"), data, 3).astype(np.uint32) << 16
        np.testing.assert_allclose(brain.view(np.float32), turned, rtol=2.0**-8, atol=0)


def test_halves_are_rounded_as_ieee_754_says():
    data = encoded(picture(64, 64), "PNG")
    for scale in (1e-6, 1e-4, 3.0, 1e4):
        images = hr.Images(
            size=64, crop="stretch", dtype="float16", mean=(0.5,) * 3, std=(scale,) * 3
        )
        single = hr.Images(
            size=64, crop="stretch", dtype="float32", mean=(0.5,) * 3, std=(scale,) * 3
        )
        with np.errstate(over="ignore"):
            expected = decoded(single, data, 0).astype(np.float16)
        np.testing.assert_array_equal(decoded(images, data, 0), expected)


# -- in a loader ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures():
    return {
        f"{i:03d}": KINDS[list(KINDS)[i % len(KINDS)]](picture(*SIZES[i % 4], seed=i))
        for i in range(97)
    }


@pytest.fixture(scope="module")
def photo_store(tmp_path_factory, pictures):
    folder = tmp_path_factory.mktemp("images") / "photos.hr"
    hr.pack(((name, data, i % 5) for i, (name, data) in enumerate(pictures.items())), folder)
    return folder


IMAGES = hr.Images(size=32, flip=True)


def epoch_of(loader) -> dict[int, bytes]:
    """Pixels by index; checks what else a batch says."""
    pixels = {}
    for batch in loader:
        assert isinstance(batch, hr.ImageBatch)
        assert batch.pixels.shape == (len(batch), 3, 32, 32)
        for i, index in enumerate(batch.indices.tolist()):
            assert batch.labels[i] == index % 5
            assert index not in pixels
            pixels[index] = batch.pixels[i].tobytes()
    return pixels


def expected_epoch(pictures, seed, epoch):
    data = list(pictures.values())
    return {i: decoded(IMAGES, data[i], i, seed, epoch).tobytes() for i in range(len(data))}


@pytest.mark.parametrize("order", ["shuffled", "sequential", "blocked"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_loader_delivers_every_pictures_own_pixels(photo_store, pictures, order, threads):
    loader = hr.loader(photo_store, 8, order=order, seed=5, decode=IMAGES, decode_threads=threads)
    assert epoch_of(loader) == expected_epoch(pictures, 5, 0)
    assert epoch_of(loader) == expected_epoch(pictures, 5, 1)
    assert loader.decoding.stats().samples == 2 * len(pictures)
    assert loader.decoding.fallbacks == 0
    loader.close()


def test_the_same_crops_on_any_number_of_ranks_and_after_a_resume(photo_store, pictures):
    expected = expected_epoch(pictures, 3, 0)
    together = {}
    for rank in range(3):
        loader = hr.loader(
            photo_store, 4, seed=3, decode=IMAGES, rank=rank, world_size=3, tail="exact"
        )
        together |= epoch_of(loader)
        loader.close()
    assert together == expected
    first = hr.loader(photo_store, 4, seed=3, decode=IMAGES)
    batches = iter(first)
    for _ in range(6):
        next(batches)
    state = first.state_dict()
    first.close()
    second = hr.loader(photo_store, 4, seed=3, decode=IMAGES, decode_threads=2)
    second.load_state_dict(state)
    rest = epoch_of(second)
    assert len(rest) == len(pictures) - 24
    assert rest.items() <= expected.items()
    second.close()


def test_threads_are_a_knob_and_its_numbers_are_published(photo_store):
    loader = hr.loader(photo_store, 8, decode=IMAGES, decode_threads=1)
    stage = loader.decoding
    assert stage in loader.stages_now()
    assert stage.knobs() == {"decode_threads": 1}
    for batch in loader:
        stage.turn({"decode_threads": 1 + len(batch) % 4, "buffer_bytes": 1})
    stats = stage.stats()
    assert stats.samples == 97
    assert stats.busy_s > 0
    assert stage.mapped_bytes >= batch.pixels.nbytes
    with pytest.raises(ValueError, match="at least 1"):
        stage.turn({"decode_threads": 0})
    loader.close()
    with pytest.raises(ValueError, match=str(THREADS_MAX)):
        hr.loader(photo_store, 8, decode=IMAGES, decode_threads=THREADS_MAX + 1)


@pytest.mark.parametrize(("size", "ahead"), [(8, 2), (1700, 1)])  # of 35 MB of floats
def test_of_batches_with_many_pixels_one_is_decoded_ahead(photo_store, size, ahead):
    images = hr.Images(size=size, crop="stretch", dtype="float32")
    with hr.open(photo_store) as store:
        loader = hr.loader(store, 1, decode=images)
        next(iter(loader))
        native = loader.reader._reader().submit(np.arange(1)).take()
        behind = [mock.Mock() for _ in range(4)]
        loader.decoding.pending(native, 0).take(behind)
        loader.close()
    assert [pending.begin.called for pending in behind] == [i < ahead for i in range(4)]


def test_pixels_stay_when_the_loader_is_gone_and_are_not_recycled_under_a_view(
    photo_store, pictures
):
    loader = hr.loader(photo_store, 8, order="sequential", decode=IMAGES)
    kept = [batch.pixels[0] for batch in loader]
    loader.close()
    expected = expected_epoch(pictures, 0, 0)
    for place, pixels in enumerate(kept):
        assert pixels.tobytes() == expected[8 * place]


def _epoch_in_child(loader, pipe):
    pipe.send(epoch_of(loader))


def test_a_forked_child_decodes_with_threads_of_its_own(photo_store, pictures):
    loader = hr.loader(photo_store, 8, seed=2, decode=IMAGES)
    batches = iter(loader)
    next(batches)  # its threads run
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    other = hr.loader(photo_store, 8, seed=2, decode=IMAGES)
    next(iter(other))
    other.set_epoch(0)
    child = context.Process(target=_epoch_in_child, args=(other, there))
    child.start()
    assert here.recv() == expected_epoch(pictures, 2, 0)
    child.join(60)
    assert child.exitcode == 0
    loader.close()
    other.close()


class _Read:
    """A batch of which it is known that reading it has ended, well or not."""

    done = True

    def __init__(self, result):
        self.result = result

    def take(self):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_batch_that_cannot_be_read_is_an_error_in_its_turn(photo_store):
    with hr.open(photo_store) as store:
        loader = hr.loader(store, 4, order="sequential", decode=IMAGES)
        next(iter(loader))
        stage = loader.decoding
        native = loader.reader._reader().submit(np.arange(4)).take()
        first, second = (
            stage.pending(_Read(result), 0) for result in (native, VolumeError("lost"))
        )
        assert len(first.take([second]).native.indices) == 4
        assert not second.done
        with pytest.raises(VolumeError, match="lost"):
            second.take()
        loader.close()


# -- bad pictures -----------------------------------------------------------------------------------

GOOD = encoded(picture(80, 60), "JPEG", quality=85)


def store_of(tmp_path, samples: dict[str, bytes]):
    hr.pack(samples.items(), tmp_path / "bad.hr")
    return tmp_path / "bad.hr"


def bomb() -> bytes:
    """A header that claims 2^30 pixels, with a few bytes behind it."""
    return png(1 << 15, 1 << 15, 8, 2, b"\0" * 100)


BAD = {
    "nothing": b"",
    "text": b"no picture at all",
    "cut off": GOOD[: len(GOOD) // 2],
    "without its end": GOOD[:-2],
    "png cut off": encoded(picture(80, 60), "PNG")[:-40],
    "png with a wrong checksum": encoded(picture(80, 60), "PNG")[:60]
    + b"\0\0"
    + encoded(picture(80, 60), "PNG")[62:],
    "webp cut off": encoded(picture(80, 60), "WEBP")[:-30],
    "bomb": bomb(),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_picture_that_nobody_can_decode_is_named(tmp_path, kind):
    samples = {"a.jpg": GOOD, "b.jpg": BAD[kind], "c.jpg": GOOD}
    store = store_of(tmp_path, samples)
    loader = hr.loader(store, 3, order="sequential", decode=IMAGES)
    with pytest.raises(DecodeError, match=r"sample 1 \('b.jpg'\)") as failure:
        next(iter(loader))
    assert failure.value.index == 1
    loader.close()
    loader = hr.loader(store, 3, order="sequential", decode=IMAGES, on_error="skip")
    (batch,) = loader
    assert batch.indices.tolist() == [0, 2]
    assert len(batch.pixels) == 2
    for place, index in enumerate((0, 2)):
        assert (batch.pixels[place] == decoded(IMAGES, GOOD, index, 0, 0)).all()
    (skipped,) = loader.skipped
    assert (skipped.index, skipped.name) == (1, "b.jpg")
    assert ("no format that it knows" in skipped.reason) == (kind in {"nothing", "text"})
    loader.close()


def head_of(kind, side):
    """A picture of which little more is there than its head."""
    if kind == "PNG":
        return png(side, side, 8, 2, b"\0" * 100)
    data = bytearray(encoded(Image.new("L", (7, 7)), kind))
    if kind == "TIFF":
        lengths = struct.pack("<HHL", 256, 4, 1), struct.pack("<HHL", 257, 4, 1)
        for at in (data.index(tag) for tag in lengths):
            struct.pack_into("<L", data, at + 8, side)
    else:
        struct.pack_into(
            "<HH" if kind == "GIF" else "<LL", data, 6 if kind == "GIF" else 18, side, side
        )
    return bytes(data)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("side", [10_000, 1 << 15])
def test_a_picture_above_max_pixels_is_refused_without_a_word_of_pillows(
    tmp_path, recwarn, side, kind
):
    """It warns of more than 89 million pixels, and raises an error of its own above twice as many."""
    samples = {"a.jpg": GOOD, "b": head_of(kind, side)}
    loader = hr.loader(store_of(tmp_path, samples), 2, decode=IMAGES, on_error="skip")
    assert [len(batch) for batch in loader] == [1]
    (skipped,) = loader.skipped
    loader.close()
    assert f"{side} x {side} pixels, more than the 89478485 of max_pixels" in skipped.reason
    assert skipped.reason.endswith(": give a larger Images(max_pixels=...).")
    assert not recwarn.list


def test_a_jpeg_cut_off_anywhere_is_never_delivered():
    images = hr.Images(size=16)
    for size in range(len(GOOD)):
        with pytest.raises(ValueError, match=r"\w"):
            _native.decode_picture(images.recipe(), GOOD[:size], 0, 0, 0)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "PPM"])
def test_others_cut_off_anywhere_are_never_delivered(form):
    data = encoded(picture(33, 21), form)
    for size in range(len(data) - (1 if form == "WEBP" else 0)):
        with pytest.raises(ValueError, match=r"\w"):
            _native.decode_picture(hr.Images(size=16).recipe(), data[:size], 0, 0, 0)


@pytest.mark.parametrize(
    "header",
    [b"P6", b"P6 4 4 65535\n", b"P6\n#\n4 4 255\n", b"P6 0 4 255\n", b"P6 4 4 255", b"P6 4 4 -1\n",
     b"P6 123456789 4 255\n", b"P6 99999999 99999999 255\n", b"P64 4 255\n"],
)  # fmt: skip
def test_a_header_of_ppm_that_lies_is_refused(header):
    with pytest.raises(ValueError, match=r"header|8 bits|truncated|pixels"):
        _native.decode_picture(hr.Images(size=16).recipe(), header + bytes(48), 0, 0, 0)


def test_damaged_scans_are_refused_although_libjpeg_goes_on():
    data = bytearray(encoded(picture(400, 300), "JPEG", quality=85))
    start = data.index(b"\xff\xda") + 200
    data[start : start + 40] = b"\xff\xd9" * 20  # an end marker within the scan
    with pytest.raises(ValueError, match=r"\w"):
        _native.decode_picture(hr.Images(crop="stretch").recipe(), bytes(data), 0, 0, 0)


def test_of_ten_thousand_hostile_files_each_is_named_or_shows_its_own_pixels(tmp_path):
    rng = random.Random(11)
    seeds = [
        make(picture(*size, seed=3)) for make in KINDS.values() for size in ((33, 21), (40, 64))
    ]
    files = [mutated(rng, seeds) for _ in range(10_000)]
    store = store_of(tmp_path, {f"{i:05d}": data for i, data in enumerate(files)})
    pixels, what = {}, {"delivered": 0, "by Pillow": 0}
    loader = hr.loader(store, 64, seed=2, decode=IMAGES, on_error="skip", decode_threads=3)
    for batch in loader:
        pixels |= zip(batch.indices.tolist(), batch.pixels, strict=True)
    left_out = {each.index: each for each in loader.skipped}
    what["left out"] = len(left_out)
    loader.close()
    assert not left_out.keys() & pixels.keys()
    assert len(left_out) + len(pixels) == len(files)
    for index, data in enumerate(files):
        if index in left_out:
            assert f"{index:05d}" in left_out[index].reason
            with pytest.raises(ValueError, match=r"\w"):
                decoded(IMAGES, data, index, 2, 0)
            continue
        try:
            alone = decoded(IMAGES, data, index, 2, 0)
            what["delivered"] += 1
        except ValueError:  # ours refuse it: then Pillow decoded it, from its own bytes
            with Image.open(io.BytesIO(data)) as im:
                alone = decoded(IMAGES, encoded(im.convert("RGB"), "PPM"), index, 2, 0)
            what["by Pillow"] += 1
        assert (pixels[index] == alone).all()
    assert min(what.values()) > 0, what


def segments_of(data: bytes) -> list[tuple[int, bytes]]:
    """A JPEG's markers in front of its scan, with what follows them, and the rest as one."""
    segments, at = [(data[1], data[:2])], 2
    while data[at + 1] != 0xDA:
        size = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        segments.append((data[at + 1], data[at : at + size]))
        at += size
    return [*segments, (0xDA, data[at:])]


def test_no_picture_is_decoded_with_the_tables_of_the_one_before():
    """Motion JPEG leaves out the standard Huffman codes; without quantisers there is no picture."""
    images = hr.Images(size=64, crop="stretch", exact=True, layout="nhwc")
    im = picture(200, 150)
    for progressive in (False, True):
        before = encoded(im, "JPEG", quality=30, optimize=True, progressive=progressive)
        segments = segments_of(encoded(im, "JPEG", quality=95))
        bare = b"".join(each for marker, each in segments if marker != 0xC4)
        decoded(images, before, 0)
        ours, pillows = decoded(images, bare, 0), by_pillow(images, bare, 0)
        assert np.abs(ours.astype(int) - pillows).max() <= 1
        lacking = b"".join(each for marker, each in segments if marker != 0xDB)
        decoded(images, before, 0)
        with pytest.raises(ValueError, match="uantization table"):
            decoded(images, lacking, 0)


def test_max_pixels_is_asked_before_memory_is_taken():
    images = hr.Images(max_pixels=4799)
    with pytest.raises(ValueError, match="80 x 60 pixels, more than the 4799"):
        _native.decode_picture(images.recipe(), GOOD, 0, 0, 0)
    assert len(_native.decode_picture(hr.Images(max_pixels=4800).recipe(), GOOD, 0, 0, 0))


def test_pillow_decodes_what_the_native_decoders_refuse_and_it_is_said_once(tmp_path, caplog):
    grey = Image.fromarray((np.arange(60 * 80).reshape(60, 80) * 13).astype(np.uint16))
    samples = {
        "grey of 16 bits": encoded(grey, "PNG"),
        "bmp": encoded(picture(80, 60), "BMP"),
        "gif": encoded(picture(80, 60).quantize(20), "GIF"),
    }
    loader = hr.loader(
        store_of(tmp_path, samples), 3, order="sequential",
        decode=hr.Images(size=32, layout="nhwc", flip=True),
    )  # fmt: skip
    with caplog.at_level("WARNING", "headrace"):
        (batch,) = loader
    for i, data in enumerate(samples.values()):
        expected = by_pillow(loader.decoding.images, data, i, 0, 0)
        assert np.abs(batch.pixels[i].astype(int) - expected).max() <= 1
    assert loader.decoding.fallbacks == 3
    assert len([r for r in caplog.records if "Pillow decodes" in r.message]) == 1
    loader.close()


def test_what_is_left_out_is_said_once_and_not_counted_as_delivered(
    tmp_path, caplog, capsys, monkeypatch
):
    monkeypatch.setenv("HEADRACE_VERDICT", "1")
    samples = {f"{i}.jpg": b"none" if i in (3, 4, 8) else GOOD for i in range(12)}
    loader = hr.loader(
        store_of(tmp_path, samples), 5, order="sequential", decode=IMAGES, on_error="skip"
    )
    with caplog.at_level("WARNING", "headrace"):
        assert [[len(batch) for batch in loader] for _ in range(2)] == [[3, 4, 2]] * 2
    (warning,) = [r.getMessage() for r in caplog.records if "left out" in r.message]
    assert "2 samples so far" in warning
    assert "skipped lists all. The first: sample 3 ('3.jpg') is no picture" in warning
    assert len(loader.skipped) == 6
    assert "| 9 samples |" in capsys.readouterr().err
    loader.close()


def translucent(mode: str) -> Image.Image:
    """A picture whose alpha slopes from nothing to all."""
    im = picture(90, 70).convert("RGBA")
    im.putalpha(Image.linear_gradient("L").resize(im.size))
    return im.convert(mode)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_what_lies_behind_shines_through_transparent_pixels(tmp_path):
    few = translucent("RGBA").quantize(30)
    grey = translucent("L")
    samples = {
        "rgba": encoded(translucent("RGBA"), "PNG"),
        "grey": encoded(translucent("LA"), "PNG"),
        "palette": encoded(few, "PNG", transparency=bytes(range(0, 240, 8))),
        "webp": encoded(translucent("RGBA"), "WEBP", lossless=True, exact=True),
        "opaque": encoded(picture(90, 70), "PNG"),
        "jpeg": encoded(picture(90, 70), "JPEG"),
        "a colour": encoded(grey, "PNG", transparency=grey.getpixel((4, 5))),  # by Pillow
    }
    images = hr.Images(size=48, crop="stretch", layout="nhwc", background=(250, 100, 0))
    loader = hr.loader(store_of(tmp_path, samples), 7, order="sequential", decode=images)
    (batch,) = loader
    for i, (name, data) in enumerate(samples.items()):
        expected = by_pillow(images, data, i, 0, 0)
        assert np.abs(batch.pixels[i].astype(int) - expected).max() <= 1, name
        plain = by_pillow(dataclasses.replace(images, background=None), data, i, 0, 0)
        assert (plain == expected).all() == (name in ("opaque", "jpeg"))
    assert loader.decoding.fallbacks == 1
    loader.close()


def test_samples_of_several_parts_say_which_is_the_picture(tmp_path):
    samples = [(f"{i}", {"jpg": GOOD, "cls": b"%d" % i}) for i in range(5)]
    hr.pack(samples, tmp_path / "parts.hr")
    loader = hr.loader(tmp_path / "parts.hr", 5, order="sequential", decode=IMAGES)
    (batch,) = loader
    assert [bytes(batch[i, "cls"]) for i in range(5)] == [b"%d" % i for i in range(5)]
    assert (batch.pixels[4] == decoded(IMAGES, GOOD, 4, 0, 0)).all()
    loader.close()
    with pytest.raises(ValueError, match="part is 'png'"):
        hr.loader(tmp_path / "parts.hr", 5, decode=hr.Images(part="png"))
    with pytest.raises(ValueError, match="which is the picture"):
        hr.Images().part_of(("left.png", "right.png"))


@pytest.mark.parametrize("budget", [None, 400_000, 1])
def test_kept_pictures_give_the_same_pixels_in_any_epoch_and_within_their_budget(
    photo_store, pictures, budget
):
    images = hr.Images(
        size=64, flip=True, keep="decoded", keep_short=80, keep_bytes=budget, layout="nhwc"
    )
    files = list(pictures.values())
    loader = hr.loader(photo_store, 4, seed=3, decode=images)
    for epoch in range(3):
        count, _ = loader.decoding.kept
        read = 0
        for batch in loader:
            assert (batch.labels == batch.indices % 5).all()
            read += np.count_nonzero(batch.lengths)
            for i, pixels in zip(batch.indices.tolist(), batch.pixels, strict=True):
                im = Image.open(io.BytesIO(files[i])).convert("RGB")
                short = min(im.size)
                if short > 80:
                    im = im.resize(
                        [round(80 * side / short) for side in im.size], FILTERS["bilinear"]
                    )
                small = encoded(im, "PNG")
                once = dataclasses.replace(images, keep=None, keep_short=None, keep_bytes=None)
                expected = by_pillow(once, small, i, 3, epoch)
                # A JPEG that was scaled while it was decoded differs by a few levels.
                assert np.abs(pixels.astype(int) - expected).mean() < 2
                assert (pixels == decoded(images, files[i], i, 3, epoch)).all()
        assert read == len(pictures) - count  # what is kept is not read again
        count, nbytes = loader.decoding.kept
        if budget is None:
            assert count == len(pictures)
            with pytest.raises(ValueError, match=f"sample {batch.indices[0]} are not here"):
                batch[0]
        else:
            assert nbytes <= budget
            assert (count > 0) == (budget > 1)
        assert loader.decoding.mapped_bytes >= nbytes
    loader.close()
    assert loader.decoding.kept == (0, 0)


def test_an_error_among_kept_pictures_names_the_sample_that_has_it(tmp_path):
    samples = {f"{i}": encoded(picture(80, 60, i), "JPEG") for i in range(12)}
    path = store_of(tmp_path, samples)
    images = hr.Images(size=32, keep="decoded", keep_bytes=37 * 49 * 3 * 5)
    with hr.open(path) as store:
        loader = hr.loader(store, 4, seed=1, decode=images, on_error="skip", direct="never")
        list(loader)
        assert loader.decoding.kept[0] == 5
        kept = {i for batch in loader for i in batch.indices[batch.lengths == 0].tolist()}
        lost = max(set(range(12)) - kept)
        offset = store.segments[0].directory.extents_of(np.array([lost]))["offset"][0]
        with next(path.glob("*.hrv")).open("r+b") as f:
            f.seek(int(offset) + 40)
            f.write(b"damage")
        assert sum(len(batch) for batch in loader) == 11
        assert [skipped.index for skipped in loader.skipped] == [lost]
        loader.close()


def test_what_pillow_decodes_is_reduced_likewise(tmp_path):
    im = picture(200, 150)
    images = hr.Images(size=64, crop="center", keep="decoded", layout="nhwc", keep_bytes=1 << 20)
    samples = {"bmp": encoded(im, "BMP"), "png": encoded(im, "PNG")}
    loader = hr.loader(store_of(tmp_path, samples), 2, order="sequential", decode=images)
    (batch,) = loader
    assert (batch.pixels[0] == batch.pixels[1]).all()
    assert loader.decoding.fallbacks == 1
    loader.close()


def test_images_is_a_value():
    images = hr.Images(
        size=(160, 224), crop="center", short=256, dtype="float32", mean=IMAGENET_MEAN
    )
    assert pickle.loads(pickle.dumps(images)) == images
    assert eval(repr(images), {"Images": hr.Images}) == images
    assert images.shape == (3, 160, 224)
    assert hr.Images(layout="nhwc").shape == (224, 224, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "between 1 and 16,384"),
        ({"crop": "centre"}, "crop is 'centre'"),
        ({"crop": "center", "size": 224, "short": 200}, "short side is smaller"),
        ({"scale": (0.5, 0.1)}, "areas"),
        ({"ratio": (0, 1)}, "aspect"),
        ({"flip": 1.5}, "flip"),
        ({"filter": "nearest"}, "filter is 'nearest'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"layout": "chw"}, "layout is 'chw'"),
        ({"background": (0, 0, 256)}, "background is"),
        ({"keep": "pixels"}, "keep is 'pixels'"),
        ({"keep_short": 256}, "without keep='decoded'"),
        ({"keep": "decoded", "keep_bytes": 0}, "keep_bytes is 0"),
        ({"keep": "decoded", "keep_short": 200}, "keep_short is smaller"),
        ({"mean": IMAGENET_MEAN}, "give a float dtype"),
        ({"dtype": "float32", "std": (1, 0, 1)}, "deviation not positive"),
    ],
)
def test_contradictions_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        hr.Images(**options)

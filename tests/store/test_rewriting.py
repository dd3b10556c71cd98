"""JPEGs rewritten while they are packed: the same pixels and metadata, or the same bytes; never an error."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json

import numpy as np
import pytest
from PIL import Image

import headrace as hr
from headrace import _native
from headrace.errors import SourceChanged
from headrace.store import open_store
from headrace.store.manifest import load_manifest
from headrace.store.pack import append, pack
from headrace.store.packing import PackOptions
from headrace.store.repair import repair
from headrace.store.rewriting import ImageRecipe
from headrace.store.sources import extents
from headrace.store.summary import summarise
from headrace.store.verify import verify

from .test_pack import files_of

SMALL = PackOptions(volume_bytes=60_000, batch_bytes=9000, journal_bytes=9000)
SIZES = [(1, 1), (17, 9), (64, 64), (233, 117), (300, 31), (7, 200)]


def picture(width: int, height: int, mode: str, seed: int = 0) -> Image.Image:
    """Waves, noise, and a block with hard edges."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 100 * np.sin(x / (9 + c) + y / (31 - 4 * c)) for c in range(4)]
    pixels = np.stack(waves, -1) + rng.normal(0, 9, (height, width, 4))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = rng.integers(0, 256, 4)
    pixels = np.clip(pixels, 0, 255).astype(np.uint8)
    if mode == "L":
        return Image.fromarray(pixels[..., 0])
    return Image.fromarray(pixels, "CMYK") if mode == "CMYK" else Image.fromarray(pixels[..., :3])


def jpeg(im: Image.Image, form: str = "JPEG", **options) -> bytes:
    out = io.BytesIO()
    im.save(out, form, **options)
    return out.getvalue()


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112], block[0x010F] = orientation, "Maker"
    return block


def kinds() -> dict[str, bytes]:
    """Files of every kind that can be rewritten, by name."""
    modes = {"L": [{}], "CMYK": [{}], "RGB": [{"subsampling": s} for s in range(3)]}
    codings = [
        {}, {"progressive": True}, {"optimize": True}, {"restart_marker_rows": 1},
        {"restart_marker_blocks": 5, "progressive": True},
    ]  # fmt: skip
    files: dict[str, bytes] = {}
    for mode, samplings in modes.items():
        for (n, sampling), coding in itertools.product(enumerate(samplings), codings):
            i = len(files)
            im = picture(*SIZES[i % len(SIZES)], mode, i)
            files[f"{mode}{n}-{i:02}.jpg"] = jpeg(im, quality=40 + 3 * i, **sampling, **coding)
    for orientation in range(1, 9):
        files[f"exif-{orientation}.jpg"] = jpeg(
            picture(90, 60, "RGB", orientation), exif=exif(orientation), dpi=(72, 300),
            icc_profile=bytes(70_000), comment=b"a comment", progressive=orientation % 2 == 0,
        )  # fmt: skip
    files["rgb.jpg"] = jpeg(picture(80, 50, "RGB"), keep_rgb=True)
    files["large.jpg"] = jpeg(picture(2000, 1500, "RGB"), progressive=True)
    return files


def odd_ones() -> dict[str, bytes]:
    """Files that must be left as they are."""
    whole = jpeg(picture(90, 60, "RGB"))
    progressive = jpeg(picture(90, 60, "RGB"), progressive=True)
    several = jpeg(picture(90, 60, "RGB"), "MPO", save_all=True, append_images=[picture(9, 9, "L")])
    scans = [i for i in range(len(progressive)) if progressive[i : i + 2] == b"\xff\xda"]
    return {
        "damaged-1.jpg": whole[:-1], "damaged-2.jpg": whole[: len(whole) // 2],
        "damaged-3.jpg": whole[:40], "damaged-4.jpg": progressive[: len(progressive) // 2],
        "damaged-5.jpg": whole[:3], "lacks-bits.jpg": progressive[: scans[-1]] + b"\xff\xd9",
        "several.jpg": several, "more.jpg": whole + b"\0\0",
        "png.jpg": jpeg(picture(90, 60, "RGB"), "PNG"), "empty.jpg": b"", "text.jpg": b"text",
    }  # fmt: skip


def write(folder, files: dict[str, bytes]):
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def seen(data: bytes) -> list[object]:
    """Everything that Pillow reads from a picture."""
    im = Image.open(io.BytesIO(data))
    info = {k: v for k, v in im.info.items() if k not in ("progressive", "progression")}
    return [im.mode, im.size, im.tobytes(), info, dict(im.getexif())]


def test_every_kind_of_jpeg_keeps_its_pixels_its_metadata_and_its_crops(tmp_path):
    files = kinds()
    report = pack(write(tmp_path / "in", files), tmp_path / "p.hr", images="lossless")
    assert report.images is not None
    # One of them is coded just so already.
    assert (
        report.images.rewritten + sum(report.images.kept.values()) == len(files) == report.samples
    )
    assert set(report.images.kept) <= {"as it would be rewritten already"}
    recipes = [
        hr.Images(size=48, flip=True, orient=orient, exact=exact)
        for orient in (False, True) for exact in (False, True)
    ]  # fmt: skip
    with open_store(tmp_path / "p.hr") as store:
        assert list(store.names) == sorted(files)
        after = {name: bytes(store.read(name)) for name in files}
    for name, before in files.items():
        assert seen(after[name]) == seen(before), name
        assert not Image.open(io.BytesIO(after[name])).info.get("progressive")
        for images, index in itertools.product(recipes, range(3)):
            crops = [
                _native.decode_picture(images.recipe(), data, 7, 1, index)
                for data in (before, after[name])
            ]
            levels = np.frombuffer(crops[0], np.uint8).astype(int) - np.frombuffer(
                crops[1], np.uint8
            )
            # Progressive files, and CMYK, are libjpeg's, whose means of blocks round otherwise.
            assert np.abs(levels).max() <= (0 if images.exact else 4), name
    sizes = [sum(map(len, each.values())) for each in (files, after)]
    assert report.images.bytes_before - report.images.bytes_after == sizes[0] - sizes[1]
    assert report.bytes == sizes[1]


def test_what_is_odd_is_kept_as_it_is_and_counted_with_its_reason(tmp_path):
    files = odd_ones()
    report = pack(write(tmp_path / "in", files), tmp_path / "p.hr", images="lossless")
    assert report.images is not None
    assert report.images.rewritten == report.images.bytes_before == report.images.bytes_after == 0
    assert report.images.kept == {
        "damaged": 5, "coded in an unusual way": 1,
        "with further pictures, or bytes behind the end": 2,
    }  # fmt: skip
    with open_store(tmp_path / "p.hr") as store:
        assert {name: bytes(store.read(name)) for name in files} == files


def test_files_cut_off_or_mutated_anywhere_are_kept_or_keep_their_pixels():
    rng = np.random.default_rng(3)
    recipe = ImageRecipe.parse("lossless")
    for progressive in (False, True):
        whole = jpeg(picture(60, 45, "RGB"), quality=60, progressive=progressive)
        for size in range(len(whole)):
            assert recipe.rewrite_one(whole[:size]) == whole[:size]
        for _ in range(1500):
            data = bytearray(whole)
            for at in rng.integers(0, len(whole), rng.integers(1, 5)):
                data[at] = rng.integers(0, 256)
            after = recipe.rewrite_one(bytes(data))
            if after == data:
                continue
            im = Image.open(io.BytesIO(after))
            assert im.tobytes() == Image.open(io.BytesIO(bytes(data))).tobytes()


def test_reduced_pictures_are_pillows_to_a_level_and_small_ones_are_kept(tmp_path):
    files = {
        "wide.jpg": jpeg(picture(300, 200, "RGB"), quality=95, exif=exif(6)),
        "tall.jpg": jpeg(picture(120, 500, "L"), quality=95, progressive=True),
        "small.jpg": jpeg(picture(64, 90, "RGB")),
        "inks.jpg": jpeg(picture(200, 200, "CMYK")),
        "grows.jpg": jpeg(picture(70, 70, "RGB"), quality=5),
        "cut.jpg": jpeg(picture(300, 200, "RGB"))[:-50] + b"\xff\xd9",
        "mask.png": jpeg(picture(200, 200, "L"), "PNG"),
    }
    recipe = "short=64,quality=98"
    report = pack(write(tmp_path / "in", files), tmp_path / "p.hr", images=recipe)
    assert report.images is not None
    assert report.images.lossy
    assert report.images.rewritten == 2
    assert "lossy, short=64,quality=98" in report.images.lines()[0]
    assert report.images.kept == {
        "small enough": 1, "coded in an unusual way": 1, "damaged": 1, "larger if rewritten": 1,
    }  # fmt: skip
    with open_store(tmp_path / "p.hr") as store:
        after = {name: bytes(store.read(name)) for name in files}
    assert {n for n in files if after[n] != files[n]} == {"wide.jpg", "tall.jpg"}
    for name, size in (("wide.jpg", (96, 64)), ("tall.jpg", (64, 267))):
        im = Image.open(io.BytesIO(after[name]))
        before = Image.open(io.BytesIO(files[name]))
        assert (im.size, im.mode, dict(im.getexif())) == (size, before.mode, dict(before.getexif()))
        expected = before.resize(size, Image.Resampling.BILINEAR)
        again = Image.open(io.BytesIO(jpeg(expected, quality=98)))
        levels = np.abs(np.asarray(im).astype(int) - np.asarray(again))
        assert levels.mean() < 0.2


@pytest.mark.parametrize("kind", ["folder", "iterable"])
def test_an_interrupted_run_goes_on_and_counts_what_it_had_rewritten(tmp_path, kind):
    files = {
        f"{i:03}.jpg": jpeg(picture(70, 50 + i, "RGB", i), progressive=i % 2 == 0)
        for i in range(40)
    } | odd_ones()
    files = dict(sorted(files.items()))
    folder = write(tmp_path / "in", files)

    def source():
        return folder if kind == "folder" else ((name, data) for name, data in files.items())

    def interrupt(done, *_):
        if done > 20:
            raise KeyboardInterrupt

    whole = pack(source(), tmp_path / "whole.hr", images="lossless", options=SMALL)
    with pytest.raises(KeyboardInterrupt):
        pack(source(), tmp_path / "p.hr", images="lossless", options=SMALL, progress=interrupt)
    for other in (None, "short=9"):
        with pytest.raises(SourceChanged, match="images was 'lossless'"):
            pack(source(), tmp_path / "p.hr", images=other, options=SMALL)
    report = pack(source(), tmp_path / "p.hr", images="lossless", options=SMALL)
    assert 20 < report.resumed_samples < len(files)
    assert report.images == whole.images
    assert report.images is not None
    assert report.images.rewritten == 40
    assert files_of(tmp_path / "p.hr") == files_of(tmp_path / "whole.hr")
    assert verify(tmp_path / "p.hr").ok


def test_the_manifest_says_what_was_rewritten_and_repair_rewrites_again(tmp_path):
    files = {f"{i}.jpg": jpeg(picture(90, 60, "RGB", i), progressive=True) for i in range(6)}
    folder = write(tmp_path / "in", files | {"odd.jpg": files["0.jpg"] + b"more"})
    report = pack(folder, tmp_path / "p.hr", images="lossless")
    assert report.images is not None
    manifest = load_manifest(tmp_path / "p.hr")
    assert manifest.segments[0].source["images"] == report.images.to_json()
    with open_store(tmp_path / "p.hr") as store:
        assert summarise(store).segments[0].images == report.images
    volume = next((tmp_path / "p.hr").glob("*.hrv"))
    packed = volume.read_bytes()
    volume.write_bytes(packed[:4096] + bytes(report.bytes) + packed[4096 + report.bytes :])
    assert len(verify(tmp_path / "p.hr").bad_samples) == 7
    mended = repair(tmp_path / "p.hr")
    assert mended.ok
    assert len(mended.repaired) == 7
    assert volume.read_bytes() == packed


def test_a_recipe_in_a_manifest_that_nobody_knows_mends_nothing(tmp_path):
    files = {"a.jpg": jpeg(picture(90, 60, "RGB"))}
    pack(write(tmp_path / "in", files), tmp_path / "p.hr", images="lossless")
    manifest = load_manifest(tmp_path / "p.hr")
    segment = manifest.segments[0]
    source = json.loads(json.dumps(segment.source).replace("lossless", "short=1,foo=3"))
    segment = dataclasses.replace(segment, source=source)
    dataclasses.replace(manifest, segments=(segment,)).save(tmp_path / "p.hr")
    volume = next((tmp_path / "p.hr").glob("*.hrv"))
    volume.write_bytes(volume.read_bytes()[:4096] + bytes(volume.stat().st_size - 4096))
    report = repair(tmp_path / "p.hr")
    assert not report.ok
    assert "short=1,foo=3" in report.unrepairable[0][1]


def test_appended_pictures_are_rewritten_too_and_parts_are_looked_at_one_by_one(tmp_path):
    photo = jpeg(picture(90, 60, "RGB"), progressive=True)
    parts = {"jpg": photo, "json": b"{}", "mask.jpg": photo + b"more"}
    pack([("a", parts)], tmp_path / "p.hr")
    report = append([("b", parts)], tmp_path / "p.hr", images="lossless")
    assert report.images is not None
    assert (report.images.rewritten, sum(report.images.kept.values())) == (1, 1)
    with open_store(tmp_path / "p.hr") as store:
        assert bytes(store.read("a", part="jpg")) == photo
        rewritten = bytes(store.read("b", part="jpg"))
        assert rewritten == ImageRecipe.parse("lossless").rewrite_one(photo) != photo
        assert bytes(store.read("b", part="json")) == b"{}"
        assert bytes(store.read("b", part="mask.jpg")) == photo + b"more"


def test_a_sample_too_large_for_memory_is_packed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(extents, "LARGE_BYTES", 20_000)
    files = {
        "large.jpg": jpeg(picture(400, 300, "RGB"), quality=98),
        "b.jpg": jpeg(picture(9, 9, "L")),
    }
    report = pack(
        write(tmp_path / "in", files), tmp_path / "p.hr", images="lossless", options=SMALL
    )
    assert report.images is not None
    assert report.images.rewritten == 1
    with open_store(tmp_path / "p.hr") as store:
        assert bytes(store.read("large.jpg")) == files["large.jpg"]


@pytest.mark.parametrize(
    "text",
    ["", "Lossless", "short", "short=", "short=0", "short=-5", "short=9,short=9", "quality=9",
     "short=9,quality=101", "short=20000", "short=9,level=3", "lossless,short=9", "short=٣",
     "decoded,", "decoded,short=0", "decoded,quality=9", "decoded,short=9,quality=9"],
)  # fmt: skip
def test_recipes_that_mean_nothing_are_refused_before_anything_is_read(tmp_path, text):
    with pytest.raises(ValueError, match="images is"):
        pack(tmp_path / "nowhere", tmp_path / "p.hr", images=text)


def test_decoded_pictures_are_stored_as_pixels_and_give_the_batches_that_kept_ones_give(tmp_path):
    im = picture(300, 200, "RGB")
    files = {
        "a.jpg": jpeg(im, quality=90), "b.png": jpeg(im, "PNG"), "c.webp": jpeg(im, "WEBP", lossless=True),
        "d.jpg": jpeg(picture(60, 50, "L")), "e.jpg": jpeg(im, progressive=True),
    }  # fmt: skip
    odd = {
        "turned.jpg": jpeg(im, exif=exif(6)), "alpha.png": jpeg(im.convert("RGBA"), "PNG"),
        "text.txt": b"no picture", "cut.jpg": jpeg(im)[:-40],
    }  # fmt: skip
    write(tmp_path / "files", files)
    write(tmp_path / "odd", odd)
    report = pack(tmp_path / "odd", tmp_path / "odd.hr", images="decoded", format="files")
    assert report.images.rewritten == 0
    assert report.images.kept == {
        "turned by EXIF": 1, "transparent": 1, "damaged": 1,
    }  # fmt: skip
    with open_store(tmp_path / "odd.hr") as store:
        assert {name: bytes(store.read(name)) for name in odd} == odd
    assert not pack(tmp_path / "files", tmp_path / "whole.hr", images="decoded").images.lossy
    report = pack(tmp_path / "files", tmp_path / "small.hr", images="decoded,short=64")
    assert (report.images.rewritten, report.images.lossy) == (5, True)
    with open_store(tmp_path / "whole.hr") as whole, open_store(tmp_path / "small.hr") as small:
        for name, data in files.items():
            pixels = np.asarray(Image.open(io.BytesIO(bytes(whole.read(name)))))
            assert (pixels == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()
            with Image.open(io.BytesIO(bytes(small.read(name)))) as stored:
                assert min(stored.size) == min(64, *pixels.shape[:2])
    pack(tmp_path / "files", tmp_path / "plain.hr")
    kept = hr.Images(size=48, flip=True, exact=True, keep="decoded", keep_short=64)
    plain = dataclasses.replace(kept, keep=None, keep_short=None)
    batches = [
        next(iter(hr.loader(tmp_path / name, 5, seed=3, decode=images)))
        for name, images in (("plain.hr", kept), ("small.hr", plain))
    ]
    assert (batches[0].indices == batches[1].indices).all()
    assert (batches[0].pixels == batches[1].pixels).all()


@pytest.mark.parametrize("images", [None, "lossless"])
@pytest.mark.parametrize("how", ["folder", "shuffled", "stream"])
def test_empty_and_cut_off_pictures_are_noticed_whatever_the_order(tmp_path, images, how):
    """Files that go on behind their end are whole, a thumbnail's end is none; other samples may be empty."""
    im = picture(64, 48, "RGB")
    thumbnail = b"\xff\xe1" + (2 + 400).to_bytes(2) + b"Exif\0\0" + jpeg(im)[:392] + b"\xff\xd9"
    whole = jpeg(im)
    files = {
        "a/behind.jpg": whole + b"motion",
        "a/cut.jpg": whole[:2] + thumbnail + whole[2:-40],
        "a/empty.jpg": b"",
        "a/whole.jpg": whole[:2] + thumbnail + whole[2:],
        "b/cut.png": jpeg(im, "PNG")[:-3],
        "b/whole.png": jpeg(im, "PNG"),
        "b/short.jpg": whole[:9],
    }
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    source = iter(sorted(files.items())) if how == "stream" else str(tmp_path / "in")
    report = pack(
        source, tmp_path / "out.hr", images=images, shuffle=3 if how == "shuffled" else None
    )
    (note,) = [each for each in report.notes if "broken" in each]
    assert note.startswith("pictures are broken: 1 empty (a/empty.jpg first), 2 cut off (")
    assert how == "shuffled" or "2 cut off (a/cut.jpg first)" in note
    assert not pack(iter([("x", b""), ("y", b"text")]), tmp_path / "texts.hr").notes

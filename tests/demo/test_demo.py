"""The demo, whole, on a folder of pictures small enough for a test."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from PIL import Image, ImageDraw

from headrace.demo import DemoOptions, main, run
from headrace.demo.images import choose, list_images, pack_images
from headrace.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = 60


def write_pictures(folder: Path) -> Path:
    """Discs, squares and a few things that no demo should train on."""
    chance = random.Random(1)
    for kind in ("discs", "squares"):
        (folder / kind).mkdir(parents=True)
        for i in range(IMAGES):
            image = Image.new("RGBA", (40, 40))
            draw = ImageDraw.Draw(image)
            x, y = chance.randrange(16), chance.randrange(16)
            box = (x, y, x + 20, y + 20)
            colour = (255, 0, 0, 255) if kind == "discs" else (0, 0, 255, 255)
            (draw.ellipse if kind == "discs" else draw.rectangle)(box, fill=colour)
            image.save(folder / kind / f"{i}.png")
    (folder / "rare").mkdir()
    Image.new("P", (8, 8)).save(folder / "rare" / "one.png")
    (folder / "discs" / "broken.png").write_bytes(b"\x89PNG and no more")
    (folder / "discs" / "empty.png").touch()
    (folder / "discs" / "notes.txt").write_text("not an image")
    (folder / "discs" / "link.png").symlink_to(folder / "squares" / "0.png")
    Image.new("1", (9000, 9000)).save(folder / "discs" / "poster.png")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures") / "source")


@pytest.fixture
def options(pictures, tmp_path):
    return DemoOptions(
        data=pictures, out=tmp_path / "out", epochs=2, batch_size=4, compare_samples=16
    )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("batch_size", [4, 64])  # 64: less than two batches
def test_the_demo_trains_is_killed_resumes_in_the_same_order_and_compares(
    options, batch_size, capsys
):
    seen = []

    def phase(what, noun):
        return nullcontext(lambda done, of, *_: seen.append((what, noun, done, of)))

    report = run(replace(options, batch_size=batch_size), phase)
    images = 2 * report.packed.train_samples
    trained = [done for what, _, done, of in seen if what == "training" and of == images]
    assert trained[-1] == images
    assert len(trained) > 2 * 10
    assert {what for what, *_ in seen} == {"training"}  # nothing runs beside what is compared
    stop = report.interruption
    assert stop.killed_by == 9
    assert 0 < stop.resumed_at < stop.killed_at < report.packed.train_samples
    assert stop.identical
    assert report.exactly_once
    assert [epoch.epoch for epoch in report.epochs] == [0, 1]
    assert [epoch.samples for epoch in report.epochs] == [report.packed.train_samples] * 2
    assert report.accuracy > report.chance
    assert report.passed
    assert {(m.work, m.loader.split(",")[0]) for m in report.comparison} == {
        ("training", "headrace"), ("training", "torch"),
        ("decoding", "headrace"), ("decoding", "torch"),
    }  # fmt: skip
    saved = json.loads((options.out / "report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    assert saved["interruption"]["identical"] is True

    from headrace.demo import show

    show(report)
    shown = capsys.readouterr().out
    for text in ("identical", "headrace, Images", "held-out accuracy", "#####"):
        assert text in shown


def test_what_is_no_sample_is_left_out_and_counted(options):
    choice = choose(list_images(options.source), options)
    assert choice.classes == ["discs", "squares"]
    assert len(choice.images) == 2 * IMAGES
    assert choice.left_out == {
        "empty": 1, "unreadable": 1, "too large": 1, "in classes of fewer than 20": 1,
    }  # fmt: skip


def test_stores_are_packed_anew_over_older_ones(options, pictures):
    first = pack_images(options)
    assert first.train_samples + first.held_out_samples == 2 * IMAGES
    new = pictures / "squares" / "new.png"
    try:
        Image.new("RGB", (30, 30)).save(new)
        changed = pack_images(options)
    finally:
        new.unlink()
    assert changed.train_samples + changed.held_out_samples == 2 * IMAGES + 1
    (options.out / "train.hr" / "store.json").write_text("{}")
    assert pack_images(options).train_samples == first.train_samples


def test_a_folder_without_classes_is_refused_with_a_next_step(tmp_path):
    with pytest.raises(SourceError, match=r"no images in class folders.*--data DIR"):
        main(DemoOptions(data=tmp_path, out=tmp_path / "out"))
    with pytest.raises(SourceError, match="nowhere: there is no such folder"):
        main(DemoOptions(data=tmp_path / "nowhere", out=tmp_path / "out"))


def test_options_are_checked():
    with pytest.raises(ValueError, match="epochs is 1"):
        DemoOptions(epochs=1)

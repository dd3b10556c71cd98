"""The example and the how-to page: what they show is run, on real images."""

import re

import pytest

from tests_shared import CLIPART, ROOT, blocks, example, write_photos, write_real_images

EPOCHS = 5


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_real_images(tmp_path_factory.mktemp("images") / "images")


def run(images, checkpoint, *options):
    main = example("train_tensorflow").main
    return main([str(images), "--checkpoint", str(checkpoint), "--epochs", str(EPOCHS), *options])


def test_the_example_learns_and_resumes_exactly(images, tmp_path, capsys):
    whole = run(images, tmp_path / "whole")
    said = capsys.readouterr().out
    epoch = len(whole) // EPOCHS
    assert epoch == 3 * 64 // 32
    first, last = sum(whole[:epoch]), sum(whole[-epoch:])
    assert last < 0.9 * first
    accuracy = [float(a) for a in re.findall(r"accuracy ([\d.]+)", said)]
    assert len(accuracy) == EPOCHS
    if CLIPART.is_dir():  # noise has nothing to learn but its samples by heart
        assert accuracy[-1] > 0.7
    begun = run(images, tmp_path / "parts", "--stop-after", str(epoch + 2))
    rest = run(images, tmp_path / "parts")
    assert "resumed in epoch 1, 64 samples in" in capsys.readouterr().out
    assert begun + rest == whole


def test_the_snippets_of_the_howto_page_run(tmp_path, monkeypatch):
    """In this process: importing the framework takes longer than running them."""
    write_photos(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    snippets = blocks(ROOT / "docs/howto/tensorflow.md", "python")
    assert len(snippets) >= 3
    for i, snippet in enumerate(snippets):
        script = tmp_path / f"snippet-{i}.py"  # AutoGraph reads the source of what it traces
        script.write_text(snippet)
        exec(compile(snippet, str(script), "exec"), {"__name__": script.stem})

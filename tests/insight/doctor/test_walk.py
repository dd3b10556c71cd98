"""Walking: what is counted, what is drawn, what is left out, and an estimate where there is too much."""

import os
from collections import Counter

import pytest

from headrace.insight.doctor import survey as module
from headrace.insight.doctor.survey import walk


def fill(folder, count, suffix=".jpg"):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:05d}{suffix}").touch()


def test_everything_is_counted(tmp_path):
    for name, count in (("cats", 3), ("dogs", 4), ("dogs/old", 5)):
        fill(tmp_path / name, count)
    (tmp_path / "cats/label.TXT").touch()
    found = walk(tmp_path, 10.0)
    assert (found.files, found.folders, found.complete) == (13, 3, True)
    assert found.files_estimated == 13
    assert found.formats == Counter(jpeg=12, text=1)
    assert found.tops == {b"cats", b"dogs"}
    assert len(set(found.drawn)) == 13
    assert all((tmp_path / os.fsdecode(name)).is_file() for name in found.drawn)


def test_what_is_no_sample_is_left_out_and_counted(tmp_path):
    fill(tmp_path / "a", 2)
    (tmp_path / "a/.hidden").touch()
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / "a/pipe")
    (tmp_path / "a/nowhere").symlink_to("missing")
    (tmp_path / "a/again").symlink_to("..")
    (tmp_path / "a/same.jpg").symlink_to("00000.jpg")
    found = walk(tmp_path, 10.0)
    assert found.files == 3
    counts = {what.split(",")[0]: count for what, (count, _) in found.left_out.items()}
    assert sorted(counts.values()) == [1, 2, 2]
    (odd,) = (first for what, (_, first) in found.left_out.items() if "no regular files" in what)
    assert odd in ("a/pipe", "a/nowhere")
    assert found.complete


def test_a_folder_that_nobody_may_list_is_told(tmp_path, monkeypatch):
    fill(tmp_path / "good", 2)
    fill(tmp_path / "bad", 2)
    real = os.scandir

    def scandir(path):
        if os.fsdecode(path).endswith("bad"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = walk(tmp_path, 10.0)
    assert found.files == 2
    assert list(found.left_out.values()) == [(1, "bad: Permission denied")]


def test_a_walk_that_is_stopped_estimates_the_rest(tmp_path):
    for i in range(40):
        fill(tmp_path / f"{i:02d}", 5)
    asked = iter(range(10_000))
    found = walk(tmp_path, 10.0, stop=lambda: next(asked) > 10)
    assert not found.complete
    assert 0 < found.files < 200
    assert found.pending > 0
    assert 120 <= found.files_estimated <= 280


def test_a_huge_folder_is_cut_off(tmp_path, monkeypatch):
    fill(tmp_path, 600)
    now = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))
    found = walk(tmp_path, 2.5)  # three looks at the clock
    assert found.cut
    assert not found.complete
    assert 200 < found.files < 600


def test_the_draw_is_fair(tmp_path, monkeypatch):
    fill(tmp_path, 400)
    monkeypatch.setattr(module, "DRAWN_MAX", 20)
    counts = Counter()
    for seed in range(200):
        drawn = walk(tmp_path, 10.0, seed=seed).drawn
        assert len(set(drawn)) == 20
        counts.update(int(name[:5]) // 100 for name in drawn)
    # 4,000 draws over four quarters: 1,000 each, give or take four standard deviations.
    assert all(880 < counts[quarter] < 1120 for quarter in range(4)), counts


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        walk(tmp_path / "nothing", 1.0)

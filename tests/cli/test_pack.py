import contextlib
import io
import itertools
import json
import re
import tarfile
import time

import numpy as np
import pytest
from PIL import Image

import headrace as hr
from headrace.store.sources.detect import stream_iterable


@pytest.mark.parametrize("command", ["pack", "index"])
def test_a_folder_becomes_a_store(run, photos, tmp_path, command):
    ended = run(command, photos, tmp_path / "new.hr")
    assert ended.code == 0
    assert re.match(rf"{command}ed 36 samples \(files\), [\d.]+ kB, in ", ended.out)
    with hr.open(tmp_path / "new.hr") as store:
        assert len(store) == 36
        assert bytes(store.read("cats/7.png")) == (photos / "cats/7.png").read_bytes()


@pytest.mark.parametrize("command", ["pack", "index"])
def test_json_holds_the_report_and_stdout_nothing_else(run, photos, tmp_path, command):
    ended = run(command, photos, tmp_path / "new.hr", "--json")
    report = ended.document["report"]
    assert ended.document["action"] == f"{command}ed"
    assert (report["samples"], report["skipped"]) == (36, [])
    assert report["bytes"] == sum(p.stat().st_size for p in photos.glob("*/*.png"))
    assert report["path"] == str(tmp_path / "new.hr")


def test_append_adds_a_segment(run, photos, own_store, tmp_path):
    (tmp_path / "more" / "cats").mkdir(parents=True)
    (tmp_path / "more" / "cats" / "new.png").write_bytes(b"new")
    assert run("append", tmp_path / "more", own_store).code == 0
    with hr.open(own_store) as store:
        assert len(store) == 37
        assert bytes(store.read("cats/new.png")) == b"new"


def test_only_files_with_the_given_extensions(run, photos, tmp_path):
    assert run("pack", photos, tmp_path / "new.hr", "--ext", "jpg,png", "--json").code == 0
    ended = run("pack", photos, tmp_path / "none.hr", "--ext", "jpg")
    assert ended.code == 3
    assert "no samples found" in ended.err


def test_a_taken_target_is_kept_and_the_way_to_replace_it_named(run, photos, own_store):
    before = (own_store / "store.json").read_bytes()
    ended = run("pack", photos, own_store)
    assert ended.code == 3
    assert "exists already" in ended.err
    assert "give --overwrite to replace" in ended.err
    assert "Traceback" not in ended.err
    assert (own_store / "store.json").read_bytes() == before
    assert run("pack", photos, own_store, "--overwrite").code == 0


def test_what_cannot_be_read_is_left_out_on_demand_and_is_a_finding(run, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "good").write_bytes(b"good")
    (source / "loop").symlink_to("loop")
    ended = run("pack", source, tmp_path / "new.hr")
    assert ended.code == 3
    assert "--skip-errors" in ended.err
    ended = run("pack", source, tmp_path / "new.hr", "--skip-errors", "--json")
    assert ended.code == 1
    assert ended.document["report"]["samples"] == 1
    assert len(ended.document["report"]["skipped"]) == 1


@pytest.mark.parametrize(
    "arguments", [[], ["pack"], ["pack", "only-a-source"], ["pack", "--nope"], ["unheard-of"]]
)
def test_a_command_line_without_sense_exits_with_2(run, arguments):
    ended = run(*arguments)
    assert ended.code == 2
    assert "Usage: headrace" in ended.err + ended.out
    if arguments:
        ended = run(*arguments, "--json")
        assert ended.code == 2
        assert json.loads(ended.out)["error"]["message"]


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch, capsys):
    from headrace.cli import progress as progress_module
    from headrace.cli.printing import Output

    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress_module.progress(Output(), "packing", bytes_are="read") as tell:
        for second in range(13):
            now = 100.0 + second
            tell(1000 * second, 26_000, 5_000_000 * second, 130_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, "one every five seconds"
    assert (
        lines[0]
        == "packing: 5,000 of 26,000 samples, 25 MB, 1,000 samples/s, 5 MB/s read, 21.0 s left"
    )


def test_a_script_sees_progress_if_it_asks_for_it(photos, tmp_path, monkeypatch, capsys):
    clock = itertools.count(0.0, 5.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    hr.pack(photos, tmp_path / "a.hr", progress=True)
    assert capsys.readouterr().err.splitlines()[-1].startswith("packing: 36 of 36 samples, ")
    hr.index(photos, tmp_path / "b.hr", progress=True)
    assert capsys.readouterr().err.splitlines()[-1].startswith("indexing: 36 of 36 samples, ")
    hr.verify(tmp_path / "a.hr", progress=True)
    assert capsys.readouterr().err.splitlines()[-1].startswith("verifying: 36 of 36 samples, ")
    hr.pack(photos, tmp_path / "c.hr", progress=False)
    assert not capsys.readouterr().err


def test_progress_of_packing_counts_what_is_read_though_less_is_written(tmp_path):
    """Of a folder and of a stream alike."""
    picture = io.BytesIO()
    Image.effect_noise((640, 640), 90).convert("RGB").save(picture, "JPEG", quality=95)
    (tmp_path / "photos").mkdir()
    with tarfile.open(tmp_path / "photos.tar.gz", "w:gz") as tar:
        for number in range(8):
            path = tmp_path / f"photos/{number}.jpg"
            path.write_bytes(picture.getvalue())
            tar.add(path, path.name)
    for source in ("photos", "photos.tar.gz"):
        sizes = []
        report = hr.pack(
            tmp_path / source, tmp_path / f"{source}.hr", images="short=64",
            progress=lambda _, __, size, ___, sizes=sizes: sizes.append(size),
        )  # fmt: skip
        assert report.bytes < picture.tell() < sizes[-1] == 8 * picture.tell(), source


def test_progress_counts_rates_from_what_an_interrupted_run_had_done(monkeypatch, capsys):
    from headrace.cli import progress as progress_module
    from headrace.cli.printing import Output

    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress_module.progress(Output(), "packing") as tell:
        tell(1_000_000, None, 10**9, None)
        now = 10.0
        tell(1_000_010, None, 10**9 + 1000, None)
    assert capsys.readouterr().err == ("packing: 1,000,010 samples, 1 GB, 1 samples/s, 100 B/s\n")


def test_progress_that_comes_at_once_and_late_has_no_rate(monkeypatch, capsys):
    from headrace.cli import progress as progress_module
    from headrace.cli.printing import Output

    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress_module.progress(Output(), "tokenizing", "tokens") as tell:
        now = 7.0
        tell(3_000, None, 6_000, None)
    assert capsys.readouterr().err == "tokenizing: 3,000 tokens, 6 kB\n"


def test_quiet_says_nothing_beside_the_result(run, photos, tmp_path):
    ended = run("pack", photos, tmp_path / "new.hr", "-q")
    assert ended.err == ""


def interrupt_at(monkeypatch, samples: int) -> None:
    """Ctrl-C as soon as so many samples are done."""

    def tell(done, *_):
        if done >= samples:
            raise KeyboardInterrupt

    progress = contextlib.nullcontext(tell)
    monkeypatch.setattr("headrace.cli.pack.progress", lambda *_, **__: progress)


@pytest.mark.parametrize("command", ["pack", "append"])
def test_an_interrupted_run_says_what_it_keeps(run, photos, own_store, monkeypatch, command):
    target = own_store if command == "append" else own_store.with_name("new.hr")
    items = [{"name": f"{i}", "data": bytes(1 << 20)} for i in range(20)]
    words = command, photos, target
    monkeypatch.setattr("headrace.store.pack.open_source", lambda *_: stream_iterable(items))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 8)
        ended = run(*words)
        assert ended.code == 130
        kept = "16 samples packed and kept; the same command goes on from there"
        assert ended.err.splitlines() == [f"interrupted: {kept}"]
        assert run(*words, "--json").document["error"]["next_step"].endswith("from there")
    again = run(*words)
    assert again.code == 0
    assert "of them by an interrupted run" in again.err


def test_an_interrupted_index_keeps_nothing(run, photos, tmp_path, monkeypatch):
    interrupt_at(monkeypatch, 0)
    ended = run("index", photos, tmp_path / "s.hr")
    assert ended.code == 130
    assert ended.err == "interrupted: nothing is kept; run the same command again\n"
    assert not list(tmp_path.iterdir())


def test_an_interrupted_command_without_more_to_say_says_so_in_one_line(run, photos, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.store.verify.verify", interrupt)
    ended = run("verify", photos)
    assert (ended.code, ended.out, ended.err) == (130, "", "interrupted\n")


def test_rewritten_pictures_are_counted_by_pack_and_by_info(run, tmp_path):
    photo = Image.fromarray(np.arange(60 * 90 * 3, dtype=np.uint8).reshape(60, 90, 3))
    (tmp_path / "in").mkdir()
    for name in ("a.jpg", "b.jpg"):
        photo.save(tmp_path / "in" / name, progressive=True)
    (tmp_path / "in/cut.jpg").write_bytes((tmp_path / "in/a.jpg").read_bytes()[:-9])
    ended = run("pack", tmp_path / "in", tmp_path / "p.hr", "--images", "lossless")
    assert ended.code == 0
    for text in (ended.out, run("info", tmp_path / "p.hr").out):
        assert "rewrote 2 JPEGs (without loss)" in text
        assert "kept as they are: 1 damaged" in text
    again = ("--images", "short=32", "--overwrite", "--json")
    images = run("pack", tmp_path / "in", tmp_path / "p.hr", *again).document["report"]["images"]
    assert (images["recipe"], images["rewritten"]) == ("short=32,quality=92", 2)
    assert run("pack", tmp_path / "in", tmp_path / "q.hr", "--images", "small").code == 2


def test_info_says_which_segments_are_shuffled(run, tmp_path):
    def shuffled():
        (line,) = [x for x in run("info", tmp_path / "s.hr").out.splitlines() if "shuffled  " in x]
        return line.split(maxsplit=1)[1]

    for command, seed in (("pack", 6), ("append", None), ("append", 7)):
        folder = tmp_path / f"{command}{seed}"
        folder.mkdir()
        (folder / f"{seed}.bin").write_bytes(b"data")
        how = () if seed is None else ("--shuffle", seed)
        assert run(command, folder, tmp_path / "s.hr", *how).code == 0
        if command == "pack":
            assert shuffled() == "by seed 6"
    assert shuffled() == "segment 0 of 3 by seed 6, segment 2 of 3 by seed 7"

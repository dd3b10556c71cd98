import base64
import json
import re

import pytest

import headrace as hr


def test_info_shows_what_the_store_holds(run, packed_photos):
    ended = run("info", packed_photos)
    assert ended.code == 0
    for expected in (
        "36",
        "checksums    yes",
        "cats",
        "owls",
        "segment-0000",
        "packed",
        "resident",
    ):
        assert expected in ended.out


def test_info_as_json(run, packed_photos, photos):
    data = run("info", packed_photos, "--json").document
    sizes = [p.stat().st_size for p in photos.glob("*/*.png")]
    assert data["samples"] == 36
    assert data["bytes"] == sum(sizes)
    assert (data["size_min"], data["size_max"]) == (min(sizes), max(sizes))
    assert sum(each["samples"] for each in data["sizes"]) == 36
    for each in data["sizes"]:
        inside = [s for s in sizes if each["low_bytes"] <= s < each["high_bytes"]]
        assert len(inside) == each["samples"]
    assert data["classes"] == [
        {"label": i, "name": name, "samples": 12} for i, name in enumerate(["cats", "dogs", "owls"])
    ]
    assert data["checksums"] is True
    assert data["segments"][0]["volumes"][0]["kind"] == "packed"
    assert 0.0 <= data["resident_share"] <= 1.0
    with hr.open(packed_photos) as store:
        assert data["fingerprint"] == store.fingerprint


def test_info_of_a_folder_that_is_not_packed(run, photos):
    data = run("info", photos, "--json").document
    assert data["samples"] == 36
    assert data["checksums"] is False
    assert data["segments"][0]["volumes"][0]["kind"] == "tree"


def test_ls_lists_index_size_class_and_name(run, packed_photos, photos):
    lines = run("ls", packed_photos).out.splitlines()
    assert len(lines) == 36
    index, size, label, name = lines[0].split()
    assert (index, label) == ("0", "cats")
    assert int(size) == (photos / name).stat().st_size


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["cats/"], 12), (["*/7.png"], 3), (["cats/1?.png"], 2), (["nothing"], 0),
        (["-n", "5"], 5), (["-n", "0"], 0), (["dogs/", "--limit", "2"], 2),
    ],
)  # fmt: skip
def test_ls_selects(run, packed_photos, arguments, count):
    assert len(run("ls", packed_photos, *arguments, "--names").out.splitlines()) == count
    samples = run("ls", packed_photos, *arguments, "--json").document["samples"]
    assert len(samples) == count


def test_ls_says_that_nothing_matched_and_what_there_is(run, packed_photos):
    ended = run("ls", packed_photos, "birds/*")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.startswith(
        f"no sample of {packed_photos} matches 'birds/*'. It has 36 samples: cats/"
    )
    assert ended.err.endswith("; classes: cats, dogs, owls\n")
    assert run("ls", packed_photos, "cats/*", "--limit", "0").err == ""


def test_ls_across_segments_and_parts(run, own_store, tmp_path):
    hr.append([{"name": "a", "data": b"12"}, {"name": "b", "data": b"3456"}], own_store)
    samples = run("ls", own_store, "--json").document["samples"]
    assert [(s["index"], s["bytes"], s["name"]) for s in samples[-2:]] == [
        (36, 2, "a"),
        (37, 4, "b"),
    ]


def test_a_name_cannot_move_the_cursor(run, tmp_path):
    (tmp_path / "source").mkdir()
    evil = tmp_path / "source" / "\x1b[2Jx\udcff.png"
    evil.write_bytes(b"x")
    out = run("ls", tmp_path / "source").out
    assert "\x1b" not in out
    assert r"\x1b[2Jx\xff.png" in out
    name = run("ls", tmp_path / "source", "--json").document["samples"][0]["name"]
    assert name == evil.name


@pytest.mark.parametrize("sample", ["cats/7.png", "7"])
def test_cat_writes_exactly_the_bytes(program, packed_photos, sample):
    with hr.open(packed_photos) as store:
        expected = bytes(store.read(int(sample) if sample.isdigit() else sample))
    assert program("cat", packed_photos, sample).stdout == expected
    ranged = program("cat", packed_photos, sample, "--start", "3", "--size", "4").stdout
    assert ranged == expected[3:7]


def test_cat_as_json(run, packed_photos, photos):
    data = run("cat", packed_photos, "cats/7.png", "--json").document
    assert base64.b64decode(data["base64"]) == (photos / "cats/7.png").read_bytes()
    assert data["name"] == "cats/7.png"
    assert data["bytes"] == (photos / "cats/7.png").stat().st_size


def test_cat_takes_a_number_as_a_name_on_demand(run, tmp_path):
    hr.pack([{"name": "1", "data": b"one"}, {"name": "0", "data": b"zero"}], tmp_path / "s.hr")
    assert run("cat", tmp_path / "s.hr", "1").out == "zero"
    assert run("cat", tmp_path / "s.hr", "1", "--name").out == "one"


@pytest.mark.parametrize("sample", ["36", "-37", "cats/77.png"])
def test_a_sample_that_is_not_there(run, packed_photos, sample):
    arguments = ["cat", packed_photos, "--", sample]
    ended = run(*arguments)
    assert ended.code == 3
    assert "there is no sample" in ended.err
    assert "Traceback" not in ended.err
    ended = run("cat", "--json", packed_photos, "--", sample)
    assert ended.code == 3
    assert ended.document["error"]["type"] == "SampleNotFound"


@pytest.mark.parametrize("command", ["info", "ls", "verify", "repair"])
def test_a_store_that_is_not_there(run, tmp_path, command):
    ended = run(command, tmp_path / "nothing.hr")
    assert ended.code == 3
    assert str(tmp_path / "nothing.hr") in ended.err
    assert "next: " in ended.err
    error = run(command, tmp_path / "nothing.hr", "--json").document["error"]
    assert error["type"] == "StoreNotFound"
    assert error["next_step"]


def test_a_traceback_only_with_v(run, tmp_path):
    assert "Traceback" not in run("info", tmp_path / "nothing.hr").err
    assert "Traceback" in run("info", tmp_path / "nothing.hr", "-v").err


def test_a_reader_that_goes_away_is_no_error(program, packed_photos, tmp_path):
    import os

    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = program("ls", packed_photos, stdout=write_end, capture_output=False, stderr=-1)
    os.close(write_end)
    assert ended.returncode == 0
    assert ended.stderr == b""


def test_version(run):
    assert run("version").out.startswith(f"headrace {hr.__version__}\n")
    data = run("version", "--json").document
    assert data["headrace"] == hr.__version__
    assert data["native_build"] in ("Release", "Debug", "RelWithDebInfo")


def test_every_command_has_help_and_json(run):
    from headrace.cli.app import app

    names = [c.callback.__name__ for c in app.registered_commands]
    assert names
    for name in names:
        ended = run(name.replace("_", "-"), "--help")
        assert ended.code == 0
        # Where stdout is a program's, the document goes into a file.
        document = "--report" if name in ("run", "record", "launch") else "--json"
        assert document in ended.out, name


def test_our_own_mistake_is_reported_as_one(run, packed_photos, monkeypatch):
    import headrace.store.summary

    monkeypatch.setattr(headrace.store.summary, "summarise", lambda _: 1 / 0)
    ended = run("info", packed_photos, "--json")
    assert ended.code == 4
    assert json.loads(ended.out)["error"]["type"] == "ZeroDivisionError"
    assert "Traceback" in ended.err


def test_read_says_one_figure_of_waiting_for_data(run, packed_photos):
    ended = run("read", packed_photos, "--batch-size", "4", "--step-ms", "30")
    waited = re.findall(r"waited (.+?) for data", ended.out)  # "12 ms", "850 us", "1:23"
    assert waited
    assert len(set(waited)) == 1


def test_read_reads_a_mixture(run, packed_photos, photos):
    both = ("--mix", f"packed={packed_photos}:3", "--mix", f"files={photos}:1")
    ended = run("read", *both, "--batch-size", "4", "--json")
    assert ended.code == 0
    assert ended.document["read"]["samples"] == 48  # the packed ones are exhausted first
    for wrong in (("read",), ("read", packed_photos, *both), ("read", "--mix", "packed=3")):
        refused = run(*wrong)
        assert refused.code == 2
        assert "--mix" in refused.err

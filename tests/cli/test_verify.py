import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace as hr


def damage(store_path, names):
    """Flips a bit of each named sample."""
    with hr.open(store_path) as store:
        places = [store.segments[0].extents(store.find(name))[0] for name in names]
        paths = store.segments[0].volumes.paths
    for place in places:
        with Path(paths[place.volume]).open("r+b") as f:
            f.seek(place.offset)
            byte = f.read(1)[0]
            f.seek(place.offset)
            f.write(bytes([byte ^ 4]))


def test_a_good_store(run, packed_photos):
    ended = run("verify", packed_photos)
    assert ended.code == 0
    assert "checked 36 of 36 samples" in ended.out
    assert "all good" in ended.out


def test_every_bad_sample_is_named(run, own_store):
    damage(own_store, ["cats/3.png", "owls/11.png"])
    ended = run("verify", own_store)
    assert ended.code == 1
    for expected in ("cats/3.png", "owls/11.png", "checksum", "2 bad samples"):
        assert expected in ended.out
    assert f"next: headrace repair {own_store}" in ended.err


def test_as_json(run, own_store):
    damage(own_store, ["cats/3.png"])
    ended = run("verify", own_store, "--json")
    assert ended.code == 1
    assert ended.document["ok"] is False
    (bad,) = ended.document["report"]["bad_samples"]
    assert (bad["name"], bad["kind"]) == ("cats/3.png", "checksum")
    assert bad["found"] != bad["expected"]


def test_many_bad_samples_are_shown_in_part_and_listed_by_json(run, own_store):
    names = [f"{c}/{i}.png" for c in ("cats", "dogs") for i in range(12)]
    damage(own_store, names)
    ended = run("verify", own_store)
    assert sum(name in ended.out for name in names) == 20
    assert "and 4 more; --json lists all" in ended.err
    assert len(run("verify", own_store, "--json").document["report"]["bad_samples"]) == 24
    assert all(name in run("verify", own_store, "-v").out for name in names)


def test_pictures_are_decoded_where_that_is_asked_for(run, tmp_path):
    """Bytes whose checksum is right may still be no picture, or half of one."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 48, 3), np.uint8)).save(
        buffer, "JPEG"
    )
    whole = buffer.getvalue()
    bad = {3: whole[: len(whole) // 2], 70: b"", 71: b"<html>404</html>"}
    items = [{"name": f"{i:03}", "data": bad.get(i, whole)} for i in range(100)]
    store = tmp_path / "s.hr"
    hr.pack(items, store)
    damage(store, ["050"])
    first = run("verify", store)
    assert first.out.splitlines()[-1] == "1 bad samples, 0 other problems"
    ended = run("verify", store, "--decode", "--json")
    assert ended.code == 1
    kinds = {b["index"]: b["kind"] for b in ended.document["report"]["bad_samples"]}
    assert kinds == {3: "picture", 50: "checksum", 70: "picture", 71: "picture"}
    assert ended.document["decoded_samples"] == 96
    with hr.open(store) as opened:
        for b in ended.document["report"]["bad_samples"]:
            if b["kind"] == "picture":
                with Path(b["path"]).open("rb") as f:
                    f.seek(b["offset_bytes"])
                    assert f.read(b["length"]) == bytes(opened.read(b["index"]))
    shown = run("verify", store, "--decode")
    assert "decoded 96 pictures" in shown.out
    assert "4 bad samples" in shown.out

    folder = tmp_path / "files"
    folder.mkdir()
    for name, data in (("a.jpg", whole), ("b.jpg", bad[3])):
        (folder / name).write_bytes(data)
    hr.index(folder, tmp_path / "in place.hr")
    ended = run("verify", tmp_path / "in place.hr", "--decode", "--json")
    (half,) = ended.document["report"]["bad_samples"]
    assert (half["path"], half["kind"]) == (str(folder / "b.jpg"), "picture")

    hr.pack([{"name": "a", "data": {"jpg": whole, "png": b"x"}}], tmp_path / "parts.hr")
    assert run("verify", tmp_path / "parts.hr", "--decode").code == 2
    good = run("verify", tmp_path / "parts.hr", "--decode", "--part", "jpg")
    assert (good.code, "all good" in good.out) == (0, True)
    wrong = run("verify", tmp_path / "parts.hr", "--decode", "--part", "png")
    assert wrong.code == 1
    assert "repair" not in wrong.err


def test_a_damaged_store_is_not_decoded(run, own_store):
    (own_store / "segment-0000-0000.hrv").unlink()
    ended = run("verify", own_store, "--decode")
    assert ended.code == 1
    assert "no picture was decoded: the store itself is damaged" in ended.out


def test_repair_fetches_from_the_source(run, own_store):
    damage(own_store, ["cats/3.png"])
    ended = run("repair", own_store)
    assert ended.code == 0
    assert "repaired 1 samples, 0 problems left" in ended.out
    assert run("verify", own_store).code == 0
    assert "nothing to repair" in run("repair", own_store).out


def test_what_cannot_be_repaired_is_a_finding(run, tmp_path):
    hr.pack([{"name": "a", "data": b"1234"}], tmp_path / "s.hr")
    damage(tmp_path / "s.hr", ["a"])
    ended = run("repair", tmp_path / "s.hr")
    assert ended.code == 1
    assert "left as it is" in ended.out
    assert run("repair", tmp_path / "s.hr", "--json").document["ok"] is False


@pytest.mark.parametrize("damaged", ["store.json", "segment-0000.hrd"])
def test_a_damaged_store_is_an_error_or_a_finding_and_never_a_traceback(run, own_store, damaged):
    content = bytearray((own_store / damaged).read_bytes())
    content[20] ^= 1
    (own_store / damaged).write_bytes(content)
    for command in ("info", "ls", "verify"):
        ended = run(command, own_store)
        assert ended.code in (1, 3), command
        assert "Traceback" not in ended.err


def test_what_holds_no_pictures_is_said_in_plain_words(run, tmp_path):
    hr.pack([("a.txt", b"no picture"), ("b.txt", b"nor this")], tmp_path / "texts.hr")
    ended = run("verify", tmp_path / "texts.hr", "--decode")
    assert ended.code == 1
    assert "none of the samples is a picture; --part names the part that is" in ended.out
    assert "Pillow: no format that it knows" in ended.out
    assert "object at 0x" not in ended.out + ended.err
    assert "on_error" not in ended.err

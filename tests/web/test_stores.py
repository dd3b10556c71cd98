"""The store browser: find a sample, see where it lies; pictures only as pictures."""

import os
from pathlib import Path

import pytest

import headrace as hr
from headrace.web.stores import ROWS, image_type
from tests_shared import png

EVIL = '<img src=x onerror=alert(1)>&"\u202e.png'
HTML = b"<html><script>alert(1)</script>"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    samples = [{"name": f"cats/{i:03d}.png", "data": png(i), "label": 0} for i in range(120)]
    samples += [{"name": f"dogs/{i}.png", "data": png(i), "label": 1} for i in range(3)]
    samples += [{"name": EVIL, "data": png(7), "label": 1}, {"name": "page.png", "data": HTML, "label": 1},
                {"name": "drawing.png", "data": SVG, "label": 1}, {"name": "empty", "data": b"", "label": 0},
                {"name": "both.gif", "data": b"GIF89a" + HTML, "label": 0}]  # fmt: skip
    hr.pack(samples, folder / "s.hr")
    return folder / "s.hr"


@pytest.fixture
def web(serve, store):
    return serve(stores=[str(store)])


def test_only_named_stores_are_there(web, store, serve):
    [listed] = web.ask("/api/stores").document["stores"]
    assert (listed["path"], listed["samples"]) == (str(store), 128)
    for path in (
        "/api/stores/1/samples",
        "/api/stores/99/image?index=0",
        "/api/stores/1/sample?index=0",
    ):
        assert web.ask(path).status == 404
    assert serve().ask("/api/stores").document["stores"] == []


def test_samples_are_found_by_the_beginning_of_their_names(web):
    page = web.ask("/api/stores/0/samples?prefix=dogs/").document
    assert [s["name"] for s in page["samples"]] == ["dogs/0.png", "dogs/1.png", "dogs/2.png"]
    assert page["next"] == ""
    assert web.ask("/api/stores/0/samples?prefix=owls").document["samples"] == []


def test_pages_of_samples_are_all_of_them(web):
    for query in ("prefix=cats/", "index=0", ""):
        names, after = [], ""
        while True:
            page = web.ask(f"/api/stores/0/samples?{query}&after={after}").document
            assert len(page["samples"]) <= ROWS
            names += [s["index"] for s in page["samples"]]
            after = page["next"]
            if not after:
                break
        assert sorted(set(names)) == list(range(120 if "prefix" in query else 128))
        assert len(names) == len(set(names))


def test_samples_are_found_by_index(web):
    samples = web.ask("/api/stores/0/samples?index=121").document["samples"]
    assert (samples[0]["index"], samples[0]["name"]) == (121, "dogs/1.png")
    assert web.ask("/api/stores/0/samples?index=128").status == 404
    for wrong in ("-1", "x", "1e3", "\u0661".encode().hex(), "9" * 30):
        assert web.ask(f"/api/stores/0/samples?index={wrong}").status in (400, 404)


def test_a_sample_tells_where_it_lies(web, store):
    sample = web.ask("/api/stores/0/sample?index=2").document
    [part] = sample["parts"]
    with Path(part["volume"]).open("rb") as volume:
        volume.seek(part["offset"])
        assert volume.read(part["length"]) == png(2)
    assert part["volume"].startswith(str(store))
    assert len(part["crc32c"]) == 8
    assert 0 <= part["resident"] <= part["length"]
    assert part["image"] == "image/png"


def test_residency_follows_the_page_cache(web, store, tmp_path):
    [part] = web.ask("/api/stores/0/sample?index=2").document["parts"]
    assert part["resident"] == part["length"], "it was read a moment ago"


def test_a_picture_is_shown_as_a_picture_and_nothing_else(web):
    answer = web.ask("/api/stores/0/image?index=5")
    assert (answer.status, answer.headers["content-type"], answer.body) == (
        200,
        "image/png",
        png(5),
    )
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("name", ["page.png", "drawing.png", "empty"])
def test_what_is_no_picture_is_not_served_as_one(web, name):
    [row] = web.ask(f"/api/stores/0/samples?prefix={name}").document["samples"]
    answer = web.ask(f"/api/stores/0/image?index={row['index']}")
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert "no PNG" in answer.message
    [part] = web.ask(f"/api/stores/0/sample?index={row['index']}").document["parts"]
    assert part["image"] is None


def test_bytes_that_are_a_picture_and_a_page_are_a_picture(web):
    [row] = web.ask("/api/stores/0/samples?prefix=both").document["samples"]
    answer = web.ask(f"/api/stores/0/image?index={row['index']}")
    assert answer.headers["content-type"] == "image/gif"


def test_hostile_names_come_as_text(web):
    [row] = web.ask("/api/stores/0/samples?prefix=%3Cimg").document["samples"]
    assert row["name"] == EVIL.replace("\u202e", "\\u202e")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x89PNG\r\n\x1a\nx", "image/png"), (b"\xff\xd8\xff\xe0", "image/jpeg"), (b"GIF87a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"), (b"RIFF\0\0\0\0WAVE", None), (b"", None), (SVG, None),
        (b"BM", None), (b"\x89PN", None),
    ],
)  # fmt: skip
def test_pictures_by_their_first_bytes(data, kind):
    assert image_type(data) == kind


def test_a_damaged_sample_is_told_and_not_shown(serve, tmp_path):
    hr.pack([{"name": "a.png", "data": png(1)}], tmp_path / "s.hr")
    web = serve(stores=[str(tmp_path / "s.hr")])
    [part] = web.ask("/api/stores/0/sample?index=0").document["parts"]
    with Path(part["volume"]).open("r+b") as volume:
        volume.seek(part["offset"] + 9)
        volume.write(b"\xff\xff")
    [part] = web.ask("/api/stores/0/sample?index=0").document["parts"]
    assert "checksum" in part["trouble"]
    assert web.ask("/api/stores/0/image?index=0").status == 502


def test_a_folder_of_files_is_browsed_where_it_lies(serve, tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.png").write_bytes(png(1))
    web = serve(stores=[str(tmp_path)])
    [part] = web.ask("/api/stores/0/sample?index=0").document["parts"]
    assert part["volume"] == os.fspath(tmp_path / "cats" / "1.png")
    assert part["kind"] == "tree"
    assert web.ask("/api/stores/0/image?index=0").body == png(1)

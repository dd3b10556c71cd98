"""`headrace doctor`: text for people, JSON for programs, on a terminal and off, and in a bare environment."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from .test_terminal import in_terminal

QUICK = ("--seconds", "1")


def test_text(run, photos):
    ended = run("doctor", photos, *QUICK, "--batch", "12", "--step-ms", "50", "--workers", "2")
    assert ended.code == 0
    for word in ("36 png files in 3 classes", "one at a time", "headrace.torch.DataLoader",
                 "your model, 12 in 50 ms", "verdict", "do first"):  # fmt: skip
        assert word in ended.out, word
    assert "looking at the data set ..." in ended.err
    for line in ended.out.replace(str(photos), "photos").splitlines():
        assert len(line) <= 80 or line.strip().startswith("$"), line


def test_ext_chooses_files_as_pack_does(run, photos, tmp_path):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for number, picture in enumerate(sorted(photos.rglob("*.png"))[:4]):
        (mixed / f"{number}.{'PNG' if number else 'png'}").write_bytes(picture.read_bytes())
        (mixed / f"{number}.wav").write_bytes(b"RIFF" + bytes(100))
    chosen = run("doctor", mixed, *QUICK, "--ext", "png,gif", "--json").document
    assert chosen["findings"]["data"]["samples"] == 4
    packed = run("pack", mixed, tmp_path / "p.hr", "--ext", "png,gif", "--json").document
    assert packed["report"]["samples"] == 4
    none = run("doctor", mixed, *QUICK, "--ext", "tiff")
    assert none.code == 3
    assert "no files that end in .tiff" in none.err
    assert run("doctor", mixed / "0.wav", *QUICK, "--ext", "wav").code == 2
    of_url = run("doctor", "s3://me:secret@bucket/photos", *QUICK, "--ext", "png")
    assert of_url.code == 2
    assert "s3://bucket/photos is a URL: --ext" in of_url.err
    assert "secret" not in of_url.out + of_url.err


def test_quiet(run, photos):
    assert run("doctor", photos, *QUICK, "-q").err == ""


def test_json(run, photos):
    ended = run("doctor", photos, *QUICK, "--json", "--workers", "3", "--step-ms", "10")
    told = ended.document
    assert told["findings"]["data"]["samples"] == 36
    assert told["findings"]["data"]["kind"] == "folder"
    assert told["workers"] == 3
    assert told["wanted_per_s"] == 25_600
    assert told["cause"]
    assert told["verdict"]
    assert {"do", "because", "gain", "command", "key"} <= set(told["advice"][0])
    for each in told["expected"]:
        assert 0 < each["low_per_s"] <= each["per_s"] <= each["high_per_s"]
        assert 0 <= each["stall"] <= 1
    assert ended.err == ""


def test_a_page(run, photos, tmp_path):
    page = tmp_path / "doctor.html"
    ended = run("doctor", photos, *QUICK, "--html", page)
    assert (ended.code, ended.out) == (0, "")
    assert f"wrote {page}" in ended.err
    assert "How fast the storage answers" in page.read_text()


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    run, photos, tmp_path
):
    ended = run("doctor", photos, *QUICK, "--html", tmp_path / "nowhere" / "doctor.html")
    assert ended.code == 2
    assert "there is no folder" in ended.err
    assert "looking at" not in ended.err


def test_a_store(run, packed_photos):
    ended = run("doctor", packed_photos, *QUICK)
    assert ended.code == 0
    assert "36 png samples in 3 classes" in ended.out


def test_simulated_figures_are_labelled(run, photos):
    ended = run("doctor", photos, *QUICK, "--simulate", "nfs")
    assert "simulated nfs (no real storage: --simulate)" in ended.out


def test_it_looks_here_if_nothing_is_named(run, photos, monkeypatch):
    monkeypatch.chdir(photos)
    assert run("doctor", *QUICK, "--json").document["findings"]["data"]["path"] == str(photos)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["nothing"], 3, "no such file, folder or store"),
        (["--batch", "0"], 2, "batch"),
        (["--seconds", "0"], 2, "seconds"),
        (["--step-ms", "-1"], 2, "step-ms"),
        (["--simulate", "moon"], 2, "moon"),
    ],
)
def test_mistakes(run, tmp_path, monkeypatch, arguments, code, word):
    monkeypatch.chdir(tmp_path)
    ended = run("doctor", *arguments)
    assert ended.code == code
    assert word in ended.err
    assert "Traceback" not in ended.err


def test_an_empty_folder_is_an_error_with_advice(run, tmp_path):
    ended = run("doctor", tmp_path, "--json")
    assert ended.code == 3
    assert ended.document["error"]["next_step"]


def test_hostile_names_cannot_move_the_cursor(run, tmp_path):
    evil = tmp_path / "\x1b[2J\x1b[1;1Hpwned"
    evil.mkdir()
    (evil / "\x1b[31m\n.bin").write_bytes(b"x" * 5000)
    (evil / "gone\x1b[5m").symlink_to("\x1b[7mnowhere")
    ended = run("doctor", evil, *QUICK)
    assert ended.code == 0
    assert "\x1b" not in ended.out + ended.err
    assert r"gone\x1b[5m" in ended.out


def test_on_a_terminal(photos):
    code, shown = in_terminal(["doctor", photos, *QUICK], {"COLUMNS": "80"})
    assert code == 0
    assert "━" in shown  # the bar
    assert "verdict" in shown


def test_ctrl_c_prints_what_is_known(photos):
    child = subprocess.Popen(
        [sys.executable, "-c", "from headrace.cli import main; main()", "doctor", photos,
         "--seconds", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in child.stderr:
        if "reading at random" in line:
            break
    begun = time.monotonic()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert time.monotonic() - begun < 20
    assert child.returncode == 130, err
    assert "36 png files" in out
    assert "interrupted after" in out
    assert "Traceback" not in err
    assert "error" not in err  # what is known was printed: nothing failed


BARE = """
    import sys
    REFUSED = ("torch", "psutil", "msgspec", "yaml", "pynvml", "h5py", "pyarrow",
               "obstore", "fsspec", "starlette", "prometheus_client", "datasets")
    class Bare:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in REFUSED:
                raise ImportError(f"{name} is not installed")
    sys.meta_path.insert(0, Bare())
    from headrace.cli import main
    try:
        main()
    finally:
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded & set(REFUSED), loaded
"""


def test_numpy_typer_rich_and_pillow_are_enough(photos):
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BARE), "doctor", photos, *QUICK, "--json"],
        check=False, capture_output=True, text=True, timeout=60,
        env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["findings"]["storage"]["points"]
    assert told["findings"]["decode"]["decoder"].startswith("Pillow")
    assert told["expected"]

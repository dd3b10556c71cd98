"""What a newcomer mistypes: one message that says what was found and what to do next, and no traceback."""

import pytest


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("pack photos", 2, "Missing argument 'SOURCE... TARGET'"),
        ("read photos --batch-size x", 2, "'--batch-size' / '-b': 'x', expected a whole number"),
        ("read photos --batch-size 0", 2, "0, expected a whole number, at least 1"),
        ("read photos --step-ms inf", 2, "inf, expected a number"),
        ("doctor photos --seconds nan", 2, "nan, expected a number, 0.2 to 3600"),
        ("doctor photos --workers 2000", 2, "2000, expected a whole number, 0 to 1024"),
        ("pak photos new.hr", 2, "No such command 'pak'. Did you mean 'pack'?"),
        ("compare-runs a b c", 2, "of `headrace launch`), B (Another run's)."),
        ("explain", 2, "No such command 'explain'. `headrace top` says"),
        ("launch nothere.py", 3, "next: Check the path: headrace launch SCRIPT.py"),
        ("export nothere", 3, "next: Check the path"),
        ("policy apply nothere.yaml", 3, "next: Check the path"),
        ("grafana export -o nothere/x.json", 3, "next: Check the path"),
        ("grafana export -o .", 3, "next: Name a file: this is a folder."),
        ("pack photos /proc/new.hr", 3, "next: Choose a target on a disk"),
    ],
)
def test_a_mistake_is_told_in_one_message(program, photos, words, code, said):
    ended = program(*words.split(), cwd=photos.parent)
    assert ended.returncode == code
    assert said in ended.stderr.decode()
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("launch train.py", "torch"),
        ("demo", "torch"),
        ("pack s3://bucket/photos new.hr", "objects"),
    ],
)
def test_a_missing_package_is_one_line_with_its_pip_command(program, tmp_path, words, extra):
    """Each process of the command meets a Python without them."""
    (tmp_path / "train.py").touch()
    without = "import sys\nsys.modules.update(torch=None, obstore=None, fsspec=None)\n"
    (tmp_path / "sitecustomize.py").write_text(without)
    ended = program(*words.split(), cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    said = ended.stderr.decode()
    assert ended.returncode
    assert f"pip install 'headrace[{extra}]'" in said
    assert "Traceback" not in said
    assert "Check the URL" not in said

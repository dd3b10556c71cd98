"""`headrace init`: a project is made whole, from the one source, and never over anything."""

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import headrace as package
from headrace.cluster.recipes import RECIPES, make_project, recipe_named, recipes_folder
from headrace.errors import ClusterError, ClusterRequestError
from tests_shared import write_real_images

NAMES = [recipe.name for recipe in RECIPES]
FILES = ["README.md", "job.sh", "prepare.py", "train.py"]


def headrace(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", *arguments],
        cwd=cwd, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_the_folder_of_recipes_is_the_one_source(root):
    assert recipes_folder() == root / "recipes"
    folders = {path.name for path in (root / "recipes").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(NAMES)
    said = (root / "CMakeLists.txt").read_text()
    assert "install(DIRECTORY recipes DESTINATION headrace/cluster/recipes/files" in said


def test_the_package_lies_in_folders_of_its_own(root):
    """Whoever walks it, as linters do, must not walk the machine."""
    assert {Path(folder).name for folder in package.__path__} == {"headrace"}


@pytest.mark.parametrize("name", NAMES)
def test_a_project_is_the_recipe_byte_for_byte(name, tmp_path):
    project = make_project(recipe_named(name), tmp_path / "deep" / "mine")
    assert sorted(path.name for path in project.iterdir()) == FILES
    for file in FILES:
        source = recipes_folder() / name / file
        source = source if source.exists() else recipes_folder() / file
        assert (project / file).read_bytes() == source.read_bytes()
    assert os.access(project / "job.sh", os.X_OK)
    assert not os.access(project / "train.py", os.X_OK) or os.geteuid() == 0
    assert [path.name for path in project.parent.iterdir()] == ["mine"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("my own")
    (tmp_path / "file").write_text("my own")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "file", "link"):
        with pytest.raises(ClusterError, match="is not overwritten"):
            make_project(recipe_named("ddp"), tmp_path / name)
    assert (tmp_path / "mine" / "train.py").read_text() == "my own"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "mine"]


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "mine").mkdir()
    make_project(recipe_named("jax"), tmp_path / "mine")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == FILES


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(ClusterError, match="No space left on device"):
        make_project(recipe_named("ddp"), tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ClusterRequestError, match="Did you mean fsdp"):
        recipe_named("fsd")


def test_the_command_makes_and_lists(tmp_path):
    made = headrace("init", "mine", "--recipe", "mpi", "--json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    assert (told["recipe"], told["files"]) == ("mpi", FILES)
    again = headrace("init", "mine", "--json", cwd=tmp_path)
    assert again.returncode == 3
    assert json.loads(again.stdout)["error"]["type"] == "ClusterError"
    listed = headrace("init", "--list", cwd=tmp_path)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == NAMES
    assert headrace("init", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("name", NAMES)
def test_scripts_are_scripts(name):
    folder = recipes_folder() / name
    assert subprocess.run(["bash", "-n", folder / "job.sh"], check=False).returncode == 0
    compile((folder / "train.py").read_text(), "train.py", "exec")
    readme = (folder / "README.md").read_text()
    assert "headrace launch" in readme
    assert "prepare.py" in readme


def test_images_that_would_end_the_training_are_named_and_left_out(tmp_path):
    """Empty, cut off, and of more pixels than Pillow takes; the stores hold all others."""
    images = write_real_images(tmp_path / "images", per_class=24)
    first, second, third = sorted(images.rglob("*.*"))[:3]
    header = b"IHDR" + struct.pack(">II5B", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-50])
    third.write_bytes(third.read_bytes()[:8] + chunk + third.read_bytes()[8 + len(chunk) :])
    command = [sys.executable, recipes_folder() / "prepare.py", tmp_path / "data"]
    command += ["--images", images]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    for path, why in (
        (first, "Unidentified"),
        (second, "OSError: "),
        (third, "DecompressionBombError"),
    ):
        assert f"{path}: left out, since it cannot be decoded: {why}" in done.stdout
    packed = [
        name
        for store in ("train.hr", "held-out.hr")
        for name in package.open(tmp_path / "data" / store).names
    ]
    assert len(packed) == 3 * 24 - 3
    assert not {str(path.relative_to(images)) for path in (first, second, third)} & set(packed)

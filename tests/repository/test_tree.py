"""The tree itself: versions, layers, the stub, and what must not be in any file."""

import ast
import difflib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import headrace


def test_one_version_everywhere(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    citation = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {project["version"], citation[1], newest[1]} == {headrace.__version__}


def test_no_file_names_a_machine_or_a_registry(tracked, root):
    # Put together here, so that this file does not name them either.
    places = ["/" + "work/", "/" + "root/", "pypi" + ".org", "python" + "hosted", "npm" + "js",
              "deb.deb" + "ian", "/home/" + "user"]  # fmt: skip
    pattern = re.compile("|".join(map(re.escape, places)))
    found = []
    for path in tracked:
        text = path.read_bytes().decode("utf-8", "replace")
        if match := pattern.search(text):
            found.append(f"{path.relative_to(root)}: {match[0]}")
    assert found == []


def test_no_class_has_a_name_that_the_glossary_has_replaced(root):
    glossary = (
        (root / "docs/architecture.md").read_text().split("| say | not |")[1].split("\n\n")[0]
    )
    replaced = {
        word
        for row in glossary.splitlines()[2:]
        for word in row.split("|")[2].replace(",", " ").split()
    }
    assert {"Shelf", "Told"} <= replaced
    classes = [
        (path, node.name)
        for path in sorted((root / "src/headrace").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 500
    assert [f"{path}: {name}" for path, name in classes if name.strip("_") in replaced] == []


def test_import_layers_hold(root):
    pytest.importorskip("importlinter")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=root, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr


def test_the_native_stub_is_fresh(root, tmp_path):
    pytest.importorskip("nanobind")
    fresh = tmp_path / "_native.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-p", "native/bindings/stub.pat",
         "-m", "headrace._native", "-o", fresh],
        cwd=root, check=True,
    )  # fmt: skip
    committed = (root / "src/headrace/_native.pyi").read_text().splitlines()
    difference = difflib.unified_diff(committed, fresh.read_text().splitlines(), lineterm="", n=1)
    assert "\n".join(difference) == "", "run `make stub`"


def test_a_debug_build_warns():
    code = (
        "import importlib, headrace, headrace._native as native\n"
        "native.build_type = 'Debug'; importlib.reload(headrace)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "debug build" in ended.stderr


def test_a_commit_is_checked_with_the_tools_of_make_check(root):
    found = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())
    check = (root / "Makefile").read_text().partition("\ncheck: ")[2].partition("\n\n")[0]
    entries = [hook["entry"] for repo in found["repos"] for hook in repo["hooks"]]
    assert len(entries) > 3
    for entry in entries:
        tool, _, options = entry.removeprefix(".venv/bin/").partition(" ")
        command = f"{tool} {options}".replace(" --force-exclude", "").strip()
        assert command in check.replace("$(BIN)/", ""), entry


def test_debian_packages_are_known_by_purpose(root):
    ended = subprocess.run(
        [root / "tools/debian-packages", "no-such-purpose"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 2
    purposes = re.findall(r"^\[(\w+)\]$", (root / "debian-packages.txt").read_text(), re.MULTILINE)
    used = set(
        re.findall(r"debian-(build|test|demo|check|fuzz)\b", (root / "Makefile").read_text())
    )
    assert used <= set(purposes)


def test_only_bindings_know_python(tracked, root):
    for path in tracked:
        parts = path.relative_to(root).parts
        if parts[:1] == ("native",) and parts[1] != "bindings" and path.suffix in (".cc", ".h"):
            text = path.read_text()
            assert "nanobind" not in text, path
            assert "Python.h" not in text, path


def test_one_module_reads_what_launchers_say(tracked, root):
    """`cluster` writes their variables, and reads Slurm's facts of an allocation."""
    launchers = re.compile(
        r"SLURM_|OMPI_|MV2_COMM|JSM_NAMESPACE|\bPMI_|WORLD_SIZE|LOCAL_RANK|GROUP_RANK|TORCHELASTIC|[\"']RANK[\"']"
    )
    readers = set()
    for path in tracked:
        parts = path.relative_to(root).parts
        if parts[:2] == ("src", "headrace") and launchers.search(path.read_text(errors="replace")):
            readers.add("/".join(parts[2:3] if parts[2] == "cluster" else parts[2:]))
    assert readers == {"base/job.py", "cluster"}


def test_what_is_tested_is_what_is_installed_for_the_tests(root):
    """The table of support names the versions that the tests pin, in the order of their names."""
    groups = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]
    pinned = dict(
        re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?==(\S+)", each).groups()
        for group in groups.values()
        for each in group
        if "==" in each and ";" not in each
    )
    pinned["torch"] = re.search(r"torch==([\d.]+)", (root / "Makefile").read_text())[1]
    rows = [line.split("|") for line in (root / "docs/support.md").read_text().splitlines()]
    tested = {row[1].strip(): row[2] for row in rows if len(row) == 6}
    for name, packages in {
        "torch": ("torch",),
        "Pillow, whose pixels ours are": ("pillow",),
        "TensorFlow": ("tensorflow-cpu",),
        "JAX, Grain": ("jax", "grain"),
        "torchdata, Accelerate, Lightning": ("torchdata", "accelerate", "lightning"),
        "Ray Train, Transformers, DeepSpeed": ("ray", "transformers", "deepspeed"),
        "pyarrow, h5py, Zarr, LMDB, Lance": ("pyarrow", "h5py", "zarr", "lmdb", "pylance"),
        "datasets, tokenizers": ("datasets", "tokenizers"),
        "S3 and the like": ("moto",),
    }.items():
        versions = re.findall(r"\d+\.\d[\d.]*", tested[name])
        assert versions == [pinned[package] for package in packages], name

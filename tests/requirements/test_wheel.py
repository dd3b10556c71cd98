"""The wheel, as people install it: built from the source archive, into an environment that has nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from documents.blocks import blocks_of
from documents.running import Reader
from tests_shared import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has the wheel and what it depends on, from a package index."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (wheel,) = (built / "repaired").glob("*.whl")
    fresh = str(folder / "bin/python")
    subprocess.run([fresh, "-m", "pip", "-q", "install", wheel], check=True, timeout=600)
    return fresh


def test_the_wheel_has_its_libraries_inside_and_the_archive_no_results(built):
    (wheel,) = (built / "repaired").glob("*.whl")
    assert "manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for library in ("libjpeg", "libdeflate", "libwebp"):
        assert any(name.startswith(f"headrace.libs/{library}") for name in names), library
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if "/.ci" in name or "/results/" in name]


def test_the_front_page_runs_with_the_wheel_alone(python, tmp_path):
    page = ROOT / "README.md"
    with Reader(page, tmp_path, python=python) as reader:
        for block in blocks_of(page):
            if "headrace.torch" in block.text:
                assert "not run" not in block.remarks
                with pytest.raises(AssertionError, match=r"pip install 'headrace\[torch\]'"):
                    reader.take(block)
            else:
                reader.take(block)
        assert reader.ran >= 4


def test_doctor_bench_and_the_node_daemon_need_no_extra(python, tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(8):
        (tmp_path / f"photos/{number}.bin").write_bytes(bytes(1000))
    for words in (
        ["doctor", "photos", "--seconds", "0.3"],
        ["bench", "workloads"],
        ["node", "status"],
        ["cluster", "queue", "--executor", "local"],
    ):
        headrace = str(Path(python).with_name("headrace"))
        ended = subprocess.run(
            [headrace, *words], check=False, capture_output=True, text=True, cwd=tmp_path,
            env={"HEADRACE_RUNTIME_DIR": str(tmp_path / "run"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )  # fmt: skip
        assert "needs the package" not in ended.stderr, ended.stderr
        assert ended.returncode in (0, 1, 3), ended.stderr

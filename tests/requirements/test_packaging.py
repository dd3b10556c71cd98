"""What `packaging` holds: a container image, Apptainer's definition and conda's recipe do what they say."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests_shared import ROOT

PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_condas_recipe_says_what_the_project_says():
    recipe = yaml.safe_load((PACKAGING / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == PROJECT["version"]
    python, *others = recipe["requirements"]["run"]
    assert python == f"python {PROJECT['requires-python']}"
    assert [word.replace(" ", "") for word in others] == PROJECT["dependencies"]
    named = dict(entry.split(" = ") for entry in recipe["build"]["python"]["entry_points"])
    assert named == PROJECT["scripts"]
    rattler = pytest.importorskip("rattler_build", reason="pip install py-rattler-build")
    (variant,) = rattler.Stage0Recipe.from_file(str(PACKAGING / "recipe.yaml")).render(
        rattler.VariantConfig()
    )
    assert (variant.recipe.to_dict()["package"]["version"]) == PROJECT["version"]


# -- images -----------------------------------------------------------------------------------------


def buildah(*words: str, **given) -> str:
    # Without a daemon, and inside containers, too.
    words = (
        (words[0], "--isolation", "chroot", *words[1:]) if words[0] in {"build", "run"} else words
    )
    ended = subprocess.run(
        ["buildah", *words], check=False, capture_output=True, text=True, timeout=900, **given
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.strip()


@pytest.fixture(scope="module")
def wheels(built: Path, tmp_path_factory) -> Path:
    """A folder with our wheel and those that it depends on: an image has no other index."""
    folder = tmp_path_factory.mktemp("wheels")
    (wheel,) = (built / "repaired").glob("*.whl")
    words = ["-m", "pip", "-q", "download", "-d", str(folder), f"{wheel}[objects,tokens,web]"]
    subprocess.run([sys.executable, *words], check=True, timeout=900)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """An image of Debian 12 with its own Python, from Debian's packages; removed in the end."""
    if os.geteuid() != 0 or not (shutil.which("buildah") and shutil.which("debootstrap")):
        pytest.skip("needs root, and Debian's buildah and debootstrap")
    name, root = f"localhost/headrace-test-{os.getpid()}", tmp_path_factory.mktemp("image") / "root"
    packages = "python3,python3-venv,ca-certificates"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root), *mirror()],
        check=True, capture_output=True, timeout=900,
    )  # fmt: skip
    (root / "etc/pip.conf").write_text("[global]\nfind-links = /wheels\nno-index = true\n")
    container = buildah("from", "scratch")
    # Devices cannot be copied (some have no end): a container has its own.
    devices = str(root / "dev")
    shutil.copytree(
        root, buildah("mount", container), symlinks=True, dirs_exist_ok=True,
        ignore=lambda folder, names: names if folder == devices else [],
    )  # fmt: skip
    buildah("commit", "-q", container, name)
    buildah("rm", container)
    yield name
    buildah("rmi", name)


def mirror() -> list[str]:
    """Where this machine has its Debian packages from, if it says so."""
    lists = [*Path("/etc/apt/sources.list.d").glob("debian.sources"), Path("/etc/apt/sources.list")]
    lines = [line for path in lists if path.exists() for line in path.read_text().splitlines()]
    said = [word for line in lines if not line.startswith("#") for word in line.split()]
    return [word for word in said if word.startswith("http") and "security" not in word][:1]


@pytest.fixture
def container(base):
    name = buildah("from", base)
    yield name
    buildah("rm", name)


def works(container: str) -> None:
    """headrace looks at a folder, in the image."""
    said = buildah(
        "run", container, "--", "sh", "-c",
        "PATH=/opt/headrace/bin:$PATH; mkdir /tmp/p && cp /etc/*.conf /tmp/p && headrace --version "
        "&& headrace doctor /tmp/p --seconds 0.3",
    )  # fmt: skip
    assert PROJECT["version"] in said
    assert "random reads of whole samples" in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_is_built_and_works(built, wheels, base):
    image, folder = f"{base}-whole", built / "repaired"
    file = PACKAGING / "Dockerfile"
    buildah(
        "build", "-q", "-f", str(file), "--build-arg", f"BASE={base}", "--volume", f"{wheels}:/wheels:ro",
        "-t", image, str(folder),
    )  # fmt: skip
    container = buildah("from", image)
    try:
        works(container)
    finally:
        buildah("rm", container)
        buildah("rmi", image)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_apptainers_definition_runs_works(built, wheels, container):
    """Debian 12 has no Apptainer: its `%post` runs in an image that buildah made."""
    sections: dict[str, list[str]] = {}
    for line in (PACKAGING / "headrace.def").read_text().splitlines():
        if line.startswith("%"):
            sections[line.strip("% ")] = []
        elif sections:
            sections[next(reversed(sections))].append(line.strip())
    given = dict(line.split("=", 1) for line in sections["arguments"] if line)
    post = "\n".join(sections["post"])
    for name, value in given.items():
        post = post.replace("{{ " + name + " }}", value)
    assert "{{" not in post
    (source, target) = sections["files"][0].split()
    assert source == "dist/headrace-*.whl"
    (wheel,) = (built / "repaired").glob("*.whl")
    buildah("copy", container, str(wheel), f"{target}{wheel.name}")
    buildah("run", "--volume", f"{wheels}:/wheels:ro", container, "--", "sh", "-c", post)
    works(container)

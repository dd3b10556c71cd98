"""Images are found, and `srun` is led into them, whatever its options look like."""

import subprocess

import pytest

from headrace.cluster.containers import Container, find_container, has_steps
from headrace.cluster.site import Site
from headrace.errors import ClusterRequestError


def found(asked, site=None, gpus="nv", **env):
    return find_container(asked, site or Site(), gpus=gpus, environment=env)


@pytest.fixture
def images(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("torch.sif", "sub/deep.sif", "jax.sqsh", "bare"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file", "runtime"),
    [
        ("torch", "torch.sif", "apptainer"), ("torch.sif", "torch.sif", "apptainer"),
        ("deep", "sub/deep.sif", "apptainer"),
        ("jax", "jax.sqsh", "pyxis"), ("bare", "bare", "apptainer"),
    ],
)  # fmt: skip
def test_by_name_in_the_registry(images, name, file, runtime):
    for container in (
        found(name, HAL_CONTAINER_REGISTRY=str(images)),
        found(name, Site(containers_registry=f"/nowhere:{images}")),
    ):
        assert (container.image, container.runtime) == (str(images / file), runtime)


def test_by_path(images, monkeypatch):
    monkeypatch.chdir(images)
    assert found("./torch.sif").image == found("torch.sif").image == str(images / "torch.sif")


def test_our_variable_wins_over_hals(images, tmp_path):
    env = {"HEADRACE_CONTAINER_REGISTRY": str(images), "HAL_CONTAINER_REGISTRY": "/nowhere"}
    assert found("torch", **env).image == str(images / "torch.sif")


@pytest.mark.parametrize(
    ("url", "image"),
    [
        ("docker://ubuntu:24.04", "ubuntu:24.04"),
        ("docker://nvcr.io/nvidia/pytorch:25.01", "nvcr.io#nvidia/pytorch:25.01"),
        ("docker://host:5000/a/b", "host:5000#a/b"),
        ("docker://library/ubuntu", "library/ubuntu"),
    ],
)
def test_urls_as_each_runtime_takes_them(url, image):
    assert found(url, Site(containers_runtime="pyxis")).image == image
    assert found(url).image == url


@pytest.mark.parametrize(
    ("asked", "site", "env", "says"),
    [
        ("none", Site(), {}, "no registry to look in"),
        ("none", Site(containers_registry="/nowhere"), {}, "no container 'none' in /nowhere"),
        ("/no/such.sif", Site(), {}, "no container image /no/such.sif"),
        ("oras://x/y", Site(containers_runtime="pyxis"), {}, "cannot be started by pyxis"),
        ("docker://x", Site(containers_runtime="enroot"), {}, "enroot import"),
    ],
)
def test_what_is_not_there(asked, site, env, says):
    with pytest.raises(ClusterRequestError) as e:
        found(asked, site, **env)
    assert says in str(e.value)


def test_how_each_runtime_is_called():
    mounts = ("/data", "/a:/b:ro")
    command = ["python", "x"]
    assert Container("apptainer", "i.sif", mounts, "nv").around(command) == [
        "apptainer", "exec", "--nv", "--bind", "/data", "--bind", "/a:/b:ro", "i.sif", "python", "x",
    ]  # fmt: skip
    assert Container("apptainer", "i.sif", gpus="rocm").words() == [
        "apptainer",
        "exec",
        "--rocm",
        "i.sif",
    ]
    assert Container("enroot", "i.sqsh", mounts).around(command) == [
        "enroot", "start", "--mount", "/data:/data", "--mount", "/a:/b:ro", "i.sqsh", "python", "x",
    ]  # fmt: skip
    pyxis = Container("pyxis", "i.sqsh", mounts)
    assert pyxis.around(command) == command
    assert pyxis.srun_options() == [
        "--container-image=i.sqsh",
        "--container-mounts=/data:/data,/a:/b:ro",
    ]


@pytest.fixture
def shell(tmp_path):
    """Runs shell lines where `srun` and `apptainer` print their words."""
    for name in ("srun", "apptainer"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nprintf "{name}"; printf "|%s" "$@"; echo\n')
        program.chmod(0o755)

    def run(lines, interpreter="sh"):
        text = "\n".join(lines) + "\n"
        ended = subprocess.run(
            [interpreter, "-eu"], input=text, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


INSIDE = "apptainer|exec|--nv|--bind|/my data|i.sif"


@pytest.mark.parametrize("interpreter", ["sh", "bash"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun hostname", f"srun|{INSIDE}|hostname"),
        ("srun -N 2 -n4 python 'a b' --flag -n 3", f"srun|-N|2|-n4|{INSIDE}|python|a b|--flag|-n|3"),
        ("srun --nodes=2 --ntasks 4 --label x", f"srun|--nodes=2|--ntasks|4|--label|{INSIDE}|x"),
        ("srun -l -u --pty --overlap bash", f"srun|-l|-u|--pty|--overlap|{INSIDE}|bash"),
        ("srun --export=ALL,A='b c' x ''", f"srun|--export=ALL,A=b c|{INSIDE}|x|"),
        ("srun --exclusive --gres gpu:1 x", f"srun|--exclusive|--gres|gpu:1|{INSIDE}|x"),
        ("srun -K -l x & wait", f"srun|-K|-l|{INSIDE}|x"),
        ("A=1 srun x", f"srun|{INSIDE}|x"),
        ("srun --version", "srun|--version"),
        ("srun", "srun|"),
    ],
)  # fmt: skip
def test_each_srun_runs_inside(shell, interpreter, line, expected):
    container = Container("apptainer", "i.sif", ("/my data",), "nv")
    assert shell([*container.step_lines(), line], interpreter) == expected + "\n"


def test_with_pyxis_srun_sees_to_it(shell):
    lines = Container("pyxis", "i.sqsh", ("/my data",)).step_lines()
    said = shell([*lines, "srun -N 2 x"])
    assert said == "srun|--container-image=i.sqsh|--container-mounts=/my data:/my data|-N|2|x\n"


def test_the_launcher_is_told_of_the_container(shell):
    container = Container("apptainer", "i.sif", ("/my data",))
    lines = [*container.step_lines(), 'eval "set -- $HEADRACE_CONTAINER"; printf "%s|" "$@"']
    assert shell(lines) == "apptainer|exec|--bind|/my data|i.sif|"


def test_a_whole_script_goes_on_inside_once(tmp_path):
    """With a container that only runs its command, the body runs once, with the arguments."""
    (tmp_path / "apptainer").write_text(
        '#!/bin/sh\nwhile [ "$1" != i.sif ]; do shift; done; shift; exec "$@"\n'
    )
    (tmp_path / "apptainer").chmod(0o755)
    lines = Container("apptainer", "i.sif", gpus="nv").script_lines(["/bin/sh", "-e"])
    script = tmp_path / "s"
    script.write_text("\n".join(["#!/bin/sh", *lines, 'echo "body $1"', ""]))
    script.chmod(0o755)
    ended = subprocess.run(
        [script, "a b"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "body a b\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"srun x", True), (b"  time srun x", True), (b"headrace launch t.py", True), (b"# srun x", False),
        (b"echo x # srun", False), (b"mysrun x", False), (b"torchrun x", False),
    ],
)  # fmt: skip
def test_whether_a_script_has_steps(line, expected):
    assert has_steps(b"#!/bin/sh\n" + line + b"\n") is expected

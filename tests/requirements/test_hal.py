"""HAL's weaknesses turned round: each test bears the number of the requirement it holds (H1 to H8, H10).

H9 and H11 belong to the launcher, H12 to the recipes. Nothing here needs a cluster: commands are asked to print
what they would submit, on a cluster like HAL (16 nodes of 4 V100) or a mixed one, from a saved snapshot.
"""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.clusters import busy, hal, mixed
from headrace.cluster.request import JOB_OPTIONS
from headrace.cluster.snapshot import save_snapshot

ROOT = Path(__file__).resolve().parents[2]


class Ended:
    """How a command of HAL's ended."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def options(self):
        """What Slurm is asked for: of the command, or of the script's directives that it reads."""
        lines = re.findall(r"^#SBATCH (.*)$", self.out, re.MULTILINE) or [self.out]
        return dict(re.findall(r"--([a-z-]+)=(\S+)", " ".join(lines)))


@pytest.fixture
def sw(monkeypatch, tmp_path, capsysbinary):
    """Runs swrun, swbatch or swqueue in this process, on a saved snapshot; nothing is submitted."""
    from headrace.cli import sw as module

    for name in ("HAL_CONTAINER_REGISTRY", "HEADRACE_CONTAINER_REGISTRY", "HEADRACE_SITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hal.yaml").write_text(
        'cpu_partition: cpu\ncpus_per_gpu: 16\ntime_max: "72:00:00"\n'
    )

    def run(name, *words, snapshot=hal, dry=True):
        save_snapshot(snapshot(), tmp_path / "snapshot.json")
        more = [] if name == "swqueue" else ["--site", str(tmp_path / "hal.yaml")]
        more += ["-d"] if dry and name != "swqueue" else []
        given = [*more, "--from", str(tmp_path / "snapshot.json"), *map(str, words)]
        monkeypatch.setattr(sys, "argv", [name, *given])
        with pytest.raises(SystemExit) as ended:
            getattr(module, name)()
        said = capsysbinary.readouterr()
        return Ended(ended.value.code or 0, said.out.decode(), said.err.decode())

    return run


def script(tmp_path, text):
    path = tmp_path / "run.swb"
    path.write_text(text)
    return path


# -- each line of the options table ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-p", "gpux1"], {"nodes": "1", "gres": "gpu:1", "cpus-per-task": "16", "partition": "gpu"}),
        (["-p", "gpux4", "-c", "40"], {"gres": "gpu:4", "cpus-per-task": "40"}),
        (["-p", "gpux1", "--cpu_per_gpu", "20"], {"cpus-per-task": "20"}),
        (["-p", "gpux1", "-t", "3"], {"time": "03:00:00"}),
        (["-p", "gpux1", "-t", "01:30:00"], {"time": "01:30:00"}),
        (["-p", "gpux1", "-r", "course"], {"reservation": "course"}),
        (["-p", "gpux1", "-n", "ppc64le"], {"partition": "gpu"}),
        (["-p", "cpun2"], {"nodes": "2", "partition": "cpu", "cpus-per-task": "160"}),
        (["-p", "cpu_mini"], {"nodes": "1", "partition": "cpu", "cpus-per-task": "8"}),
    ],
    ids=" ".join,
)  # fmt: skip
def test_each_option_of_swrun(sw, words, expected):
    ended = sw("swrun", *words)
    assert ended.code == 0, ended.err
    assert expected.items() <= ended.options.items()
    assert ended.out.startswith("salloc ")
    assert ended.out.endswith(" srun --interactive --preserve-env --pty bash -i\n")


def test_swrun_s_takes_a_container_of_the_registry(sw, monkeypatch, tmp_path):
    (tmp_path / "images/old").mkdir(parents=True)
    (tmp_path / "images/old/dummy.sif").touch()
    monkeypatch.setenv("HAL_CONTAINER_REGISTRY", str(tmp_path / "images"))
    ended = sw("swrun", "-p", "gpux1", "-s", "dummy")
    assert f"--pty apptainer exec --nv {tmp_path}/images/old/dummy.sif bash -i" in ended.out
    ended = sw("swrun", "-p", "cpun1", "-s", "dumy")
    assert ended.code == 3
    assert "there is no container 'dumy'" in ended.err
    assert "Did you mean dummy?" in ended.err


@pytest.mark.parametrize("name", ["swrun", "swbatch", "swqueue"])
@pytest.mark.parametrize("option", ["-v", "-h"])
def test_versions_and_help(sw, name, option):
    ended = sw(name, option)
    assert ended.code == 0
    assert f"{name} of headrace" in ended.out if option == "-v" else f"usage: {name}" in ended.out


def test_swrun_needs_a_size(sw):
    ended = sw("swrun")
    assert ended.code == 2
    assert "-p is missing" in ended.err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--partition=gpux2", {"gres": "gpu:2"}),
        ("--partition=gpux2 --cpu_per_gpu=24", {"cpus-per-task": "24"}),
        ("--partition=gpux2 --time=24", {"time": "1-00:00:00"}),
        ("--partition=gpux2 --time=04:00:00", {"time": "04:00:00"}),
        ("--partition=gpux2 --reservation=course", {"reservation": "course"}),
        ("--partition=gpux2 --job_name=mine", {"job-name": "mine"}),
        ("--partition=gpux2 --output_file=o --error_file=e", {"output": "o", "error": "e"}),
        ("-p gpux2 -t 5", {"gres": "gpu:2", "time": "05:00:00"}),
    ],
)
def test_each_directive_of_swbatch(sw, tmp_path, line, expected):
    ended = sw("swbatch", script(tmp_path, f"#!/bin/bash\n\n#SBATCH {line}\n\nsrun hostname\n"))
    assert ended.code == 0, ended.err
    assert expected.items() <= ended.options.items()


def test_swbatch_with_a_container(sw, monkeypatch, tmp_path):
    (tmp_path / "dummy.sif").touch()
    monkeypatch.setenv("HAL_CONTAINER_REGISTRY", str(tmp_path))
    path = script(
        tmp_path,
        "#!/bin/bash\n#SBATCH --partition=gpux1\n#SBATCH --singularity=dummy\nsrun hostname\n",
    )
    ended = sw("swbatch", path)
    assert "\n##SBATCH --singularity=dummy\n" in ended.out
    assert f"apptainer exec --nv {tmp_path}/dummy.sif" in ended.out


@pytest.mark.parametrize(
    ("words", "there", "away"),
    [
        ([], ["gpu0", "gpu3", "resnet", "sweep"], []),
        (["-s"], ["gpu0", "gpu3", "resnet", "sweep"], []),
        (["-u", "ann"], ["resnet", "sweep"], ["eval"]),
        (["-u", "ann", "eve"], ["resnet", "eval"], ["llm-pretrain"]),
        (["--fpuser", "bob"], ["llm-pretrain", "gpu1"], ["resnet", "gpu2"]),
        (["-n", "gpu1"], ["gpu1", "llm-pretrain"], ["gpu2", "sweep"]),
        (["-n", "gpu[0-1]", "gpu3"], ["gpu1", "disk fails"], ["gpu2"]),
    ],
)
def test_each_option_of_swqueue(sw, words, there, away):
    ended = sw("swqueue", *words, snapshot=busy)
    assert ended.code == 0, ended.err
    assert [text for text in there if text not in ended.out] == []
    assert [text for text in away if text in ended.out] == []


def test_swqueue_m_looks_again_every_t_seconds(sw, monkeypatch):

    waited = []

    class Over:
        def wait(self, seconds):
            waited.append(seconds)
            return len(waited) == 3

    monkeypatch.setattr("headrace.cli.printing.interrupt", lambda: contextlib.nullcontext(Over()))
    ended = sw("swqueue", "-m", "-t", "90", snapshot=busy)
    assert waited == [90.0] * 3
    assert ended.out.count("llm-pretrain") == 3
    assert sw("swqueue", "-m", "-t", "59").code == 2


# -- the requirements -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "gpus", "cpus", "time"),
    [
        # The README's examples, and its text's: a full node for three days; a CPU node in a container.
        (["swrun", "-p", "gpux4", "-c", "40", "-t", "72"], "gpu:4", "40", "1-00:00:00"),
        (["swrun", "-p", "gpux1"], "gpu:1", "16", None),
        (["swrun", "-p", "gpux16", "-n", "ppc64le"], "gpu:4", "16", None),
    ],
    ids=lambda w: " ".join(w) if isinstance(w, list) else "",
)  # fmt: skip
def test_h1_documented_examples_print_what_they_would_start(sw, words, gpus, cpus, time):
    """v1.1 printed always and started never; here printing is a flag (`-d`), and each example is a test."""
    ended = sw(*words)
    assert ended.code == 0, ended.err
    asked = ended.options
    assert (asked["gres"], asked["cpus-per-task"], asked.get("time")) == (gpus, cpus, time)


def test_h1_without_the_flag_it_is_started(sw, monkeypatch):
    import os

    started = []
    monkeypatch.setattr(os, "execvp", lambda program, words: started.append((program, words)) or 0)
    assert sw("swrun", "-p", "gpux1", dry=False).code == 0
    assert started[0][0] == "salloc"
    assert "--gres=gpu:1" in started[0][1]


@pytest.mark.parametrize(
    ("text", "slurm"),
    [
        ("4", "04:00:00"), ("04:00:00", "04:00:00"), ("90:00", "01:30:00"), ("1-0", "1-00:00:00"),
        ("0-12:30", "12:30:00"), ("0-1:2:3", "01:03:00"), ("36h", "1-00:00:00"), ("72", "1-00:00:00"),
    ],
)  # fmt: skip
def test_h2_every_time_form_is_accepted(sw, tmp_path, text, slurm):
    """Also the README's example, on which v1.1 failed. What is too long is cut, with a warning."""
    assert sw("swrun", "-p", "gpux1", "-t", text).options["time"] == slurm
    path = script(
        tmp_path, f"#!/bin/bash\n#SBATCH --partition=gpux1\n#SBATCH --time={text}\nsrun hostname\n"
    )
    ended = sw("swbatch", path)
    assert re.findall(r"--time=(\S+)", ended.out)[-1] == slurm
    assert ("is cut to" in ended.err) is (text in ("36h", "72"))


def test_h2_the_readme_example(sw, monkeypatch, tmp_path):
    (tmp_path / "dummy.sif").touch()
    monkeypatch.setenv("HAL_CONTAINER_REGISTRY", str(tmp_path))
    path = script(
        tmp_path,
        '#!/bin/bash\n\n#SBATCH --job_name="demo"\n#SBATCH --output="demo.%j.%N.out"\n'
        '#SBATCH --error="demo.%j.%N.err"\n'
        "#SBATCH --partition=gpux1\n#SBATCH --time=42\n#SBATCH --singularity=dummy\n\nsrun hostname\n",
    )
    ended = sw("swbatch", path)
    assert ended.code == 0, ended.err
    assert ended.options["job-name"] == "demo"
    assert ended.options["output"] == '"demo.%j.%N.out"'


def test_h3_help_documentation_and_checks_come_from_one_table(sw, run_help):
    page = (ROOT / "docs/howto/cluster.md").read_text()
    swrun = re.sub(r"\s+", " ", sw("swrun", "-h").out)
    batch = re.sub(r"\s+", " ", run_help("cluster", "batch"))
    for ask in JOB_OPTIONS:
        assert f"| `{ask.flag}" in page
        assert ask.flag in batch
        assert ask.help in batch
        if ask.hal:
            assert f"-{ask.hal}" in swrun
            assert ask.flag in swrun


@pytest.fixture
def run_help(monkeypatch):
    from typer.testing import CliRunner

    from headrace.cli.app import app

    monkeypatch.setenv("COLUMNS", "300")
    return lambda *words: CliRunner().invoke(app, [*words, "--help"]).stdout


@pytest.mark.parametrize(
    ("words", "snapshot", "expected"),
    [
        (["-p", "gpux5"], hal, {"nodes": "2", "ntasks": "5"}),
        (["-p", "gpux6"], hal, {"nodes": "2", "gres": "gpu:3"}),
        (["-p", "gpux7"], mixed, {"nodes": "1", "gres": "gpu:7"}),
        (["-p", "gpux8"], hal, {"nodes": "2", "gres": "gpu:4"}),
        (["-p", "gpux8"], mixed, {"nodes": "1", "gres": "gpu:8"}),  # v1.1 asked for two nodes
        (["-p", "gpux4", "-n", "arm"], mixed, {"nodes": "2", "gres": "gpu:2", "partition": "arm"}),
        (["-p", "gpux64"], hal, {"nodes": "16", "gres": "gpu:4"}),
    ],
)
def test_h4_any_number_of_gpus_is_laid_out_on_the_real_nodes(sw, words, snapshot, expected):
    ended = sw("swrun", *words, snapshot=snapshot)
    assert expected.items() <= ended.options.items()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-p", "gpux65"], "up to 4 each"),
        (["-p", "gpux4", "-c", "41"], "4 GPUs on a node leave 40 for each"),
        (["-p", "gpux0"], "asks for none"),
        (["-p", "cpun17"], "17 nodes are asked for"),
        (["-p", "gpuxx"], "there is no partition 'gpuxx'"),
        (["-p", "gpux1", "-n", "arm"], "no node has type arm; found: ppc64le"),
    ],
)
def test_h4_the_impossible_is_refused_with_the_reason(sw, words, says):
    ended = sw("swrun", *words)
    assert ended.code == 3
    assert says in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    ("word", "snapshot", "node_type", "cpus"),
    [
        ("cpun1", hal, "ppc64le", "160"), ("cpun16", hal, "ppc64le", "160"), ("cpu_mini", hal, "ppc64le", "8"),
        ("cpun4", mixed, "x86", "64"), ("cpux4", mixed, "x86", "64"), ("cpu_mini", mixed, "arm", "8"),
        ("cpun2", mixed, "arm", "80"),
    ],
)  # fmt: skip
def test_h5_cpu_jobs_work_on_every_node_type(sw, word, snapshot, node_type, cpus):
    ended = sw("swrun", "-p", word, "-n", node_type, "-c", "9", snapshot=snapshot)
    assert ended.code == 0, ended.err
    assert ended.options["cpus-per-task"] == cpus
    assert ended.options["nodes"] == (re.search(r"\d+$", word) or ["1"])[0]
    assert "gres" not in ended.options
    assert "9 CPUs per GPU are ignored" in ended.err


def test_h6_what_a_cluster_has_is_read_from_it(sw):
    """The same words on two clusters, and no table of either."""
    here, there = (sw("swrun", "-p", "gpux4", snapshot=which).options for which in (hal, mixed))
    assert (here["partition"], here["mem"]) == ("gpu", "243200M")
    assert (there["partition"], there["mem"]) == ("main", "475000M")


@pytest.mark.parametrize(
    ("line", "gpus"),
    [("--partition=gpux8", True), ("--partition=cpun4", False), ("-p debug --gpus=4", True)],
)
def test_h7_containers_run_on_many_nodes_with_gpus_wherever_there_are_any(sw, tmp_path, line, gpus):
    """Each `srun` of the script runs inside, on each node; a partition's name says nothing of GPUs."""
    (tmp_path / "image.sif").touch()
    path = script(
        tmp_path,
        f"#!/bin/sh\n#SBATCH {line}\nsrun -l -N 2 --ntasks 2 python 'a b.py' --x\necho outside\n",
    )
    ended = sw("swbatch", "--container", "./image.sif", path)
    assert ended.code == 0, ended.err
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text('#!/bin/sh\nprintf "<%s>" "$@"; echo\n')
    (programs / "srun").chmod(0o755)
    done = subprocess.run(
        ["sh"],
        input=ended.out,
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    flag = "<--nv>" if gpus else ""
    assert done.stdout.splitlines() == [
        f"<-l><-N><2><--ntasks><2><apptainer><exec>{flag}<{tmp_path}/image.sif><python><a b.py><--x>",
        "outside",
    ]


HARD = """#!/bin/bash -l
#SBATCH -p gpux1   -t  3
#SBATCH\t--output "o p.txt"

if true; then
\tcat <<'EOF'
    kept   as it is: "quotes", 'these', `too`, $HOME, \\, ünïcode →
EOF


fi
"""


def test_h8_a_script_reaches_slurm_byte_for_byte_with_our_directives(sw, tmp_path):
    ended = sw("swbatch", script(tmp_path, HARD))
    names = "partition|nodes|ntasks-per-node|gres|cpus-per-task|mem|time|job-name"
    ours = re.findall(rf"^#SBATCH --(?:{names})=.*\n", ended.out, re.MULTILINE)
    assert len(ours) == 8
    rest = ended.out
    for line in ours:
        rest = rest.replace(line, "", 1)
    assert rest == HARD
    assert ended.options["time"] == "03:00:00"


@pytest.mark.parametrize(
    "first", ["#!/usr/bin/env python3", "#!/bin/tcsh", "#!/usr/bin/Rscript --vanilla"]
)
def test_h8_other_shebangs_stay(sw, tmp_path, first):
    ended = sw("swbatch", script(tmp_path, f"{first}\n#SBATCH -p gpux1\nx = 1\n"))
    assert ended.out.startswith(f"{first}\n#SBATCH -p gpux1\n#SBATCH --partition=gpu\n")
    assert ended.out.endswith("\nx = 1\n")


@pytest.mark.parametrize(
    "line", ["-p gpux2", "-pgpux2", "--partition gpux2", "  -p   gpux2 # why", "--part='gpux2'"]
)
def test_h8_short_options_and_odd_spacing_are_understood(sw, tmp_path, line):
    ended = sw("swbatch", script(tmp_path, f"#!/bin/sh\n#SBATCH {line}\ntrue\n"))
    assert ended.options["gres"] == "gpu:2"


def test_h10_the_queue_shows_real_nodes_and_gpu_numbers_from_recorded_input(sw):
    ended = sw("swqueue", snapshot=busy)
    row = next(line for line in ended.out.splitlines() if line.startswith("gpu0"))
    assert "0·2·" in row  # not the first two cells
    assert "bob 102[0]" in row
    assert "ann 101[2]" in row
    # A job's GPUs are counted where they are: five in all, one here and four there.
    assert re.search(r"102 +bob +llm-pretrain +5 .* gpu0\[0\] gpu1\[0-3\]", ended.out)
    data = json.loads(sw("swqueue", "--json", snapshot=busy).out)
    assert data["nodes"][0]["gpu_jobs"] == ["102", None, "101", None]
    assert data["running"][0]["gpu_indices"] == {"gpu0": [0], "gpu1": [0, 1, 2, 3]}
    assert (data["totals"]["gpus_used"], data["totals"]["gpus"]) == (6, 16)

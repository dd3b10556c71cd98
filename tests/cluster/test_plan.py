"""What is submitted, whole: each case's text is compared with a kept file in `expected/`.

`python -m cluster.test_plan` (in tests/) prints what each case makes now, to be read and kept by hand.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.clusters import hal, mixed
from headrace.cluster.plan import Cluster, plan_batch, plan_run
from headrace.cluster.request import read_request
from headrace.cluster.site import PartitionSite, Site
from headrace.errors import ClusterRequestError

EXPECTED = Path(__file__).parent / "expected"

TRAIN = b"""#!/bin/bash
#SBATCH --job-name=train
#SBATCH -t 2:00:00

set -eu
    srun python train.py \\
        --data "$DATA"    # indented, continued, quoted
cat <<'EOF'
#SBATCH --nodes=99
EOF
"""
PLAIN = b"#!/bin/bash\nsrun hostname\n"
SLURMS_OWN = b"""#!/bin/bash -l
#SBATCH -N 2 --ntasks-per-node=4 --gres=gpu:4 -c 8
#SBATCH --mem 100G
#SBATCH -p main
srun hostname
"""
IN_GPUS = b"#!/bin/sh\n#SBATCH --gpus=12 --mail-type=END\n#SBATCH -A ml\nsrun hostname\n"
HALS = b"""#!/bin/bash

#SBATCH --job_name="demo"
#SBATCH --output="demo.%j.%N.out"
#SBATCH --error="demo.%j.%N.err"
#SBATCH --partition=gpux1
#SBATCH --time=42
#SBATCH --cpu_per_gpu=20 --comment="two words"

srun hostname
"""
OURS = b"""#!/bin/bash
#HEADRACE --gpus=16 --module=cuda/12.6 --module=nccl
#HEADRACE --conda=torch
#SBATCH --time=1-0
srun python train.py
"""
PYTHON = b"""#!/usr/bin/env python3
#SBATCH --output=py.%j.out
print("HEADRACE_SCRIPT", "\xc3\xbc")"""
STEPLESS = b"#!/bin/bash -l\ntorchrun --standalone train.py\n"
IMAGE = "docker://nvcr.io/nvidia/pytorch:25.01-py3"

SITE = Site(
    account="lab", everywhere=PartitionSite(time=240), containers_mounts=("/data", "/scratch:/tmp"),
    modules_setup=("/etc/profile.d/modules.sh",), modules_load=("slurm",),
    conda_setup="/opt/conda/etc/profile.d/conda.sh",
)  # fmt: skip
PYXIS = dataclasses.replace(SITE, containers_runtime="pyxis")

CASES = {
    "one-gpu": (mixed, Site(), PLAIN, {"gpus": "1"}),
    "two-nodes": (mixed, Site(), TRAIN, {"gpus": "16"}),
    "uneven": (mixed, Site(), TRAIN, {"gpus": "9"}),
    "everything": (
        mixed, SITE, PLAIN,
        {
            "gpus": "h100:12", "nodes": "3", "cpus_per_gpu": "8", "memory_per_gpu": "64G", "partition": "main",
            "time": "9-0", "reservation": "maint day", "qos": "high", "constraint": "ib", "nodelist": "h[0-2]",
            "exclude": "h3", "exclusive": True, "array": "0-15%4", "dependency": "afterok:17",
            "name": "big one",
            "output": "%x.out", "error": "%x.err", "directory": "/tmp", "requeue": True, "signal": "B:USR1@120",
        },
    ),
    "slurms-own": (mixed, Site(), SLURMS_OWN, {}),
    "slurms-own-shorter": (mixed, Site(), SLURMS_OWN, {"time": "30m", "name": "short"}),
    "slurms-own-resized": (mixed, Site(), SLURMS_OWN, {"gpus": "32"}),
    "in-gpus": (mixed, Site(), IN_GPUS, {}),
    "nothing-asked": (mixed, Site(), PLAIN, {}),
    "cpus": (mixed, Site(), PLAIN, {"nodes": "2", "cpus": "16", "memory": "0"}),
    "hal-demo": (hal, Site(), HALS, {}),
    "ours": (mixed, SITE, OURS, {}),
    "venv": (mixed, Site(), PLAIN, {"gpus": "2", "venv": "/home/ann/my env"}),
    "python-modules": (mixed, SITE, PYTHON, {"gpus": "2", "modules": ["python/3.12"]}),
    "apptainer-steps": (mixed, SITE, TRAIN, {"gpus": "16", "container": IMAGE}),
    "apptainer-script": (mixed, SITE, STEPLESS, {"gpus": "4", "container": IMAGE}),
    "apptainer-cpus": (mixed, SITE, PLAIN, {"partition": "cpun2", "container": IMAGE}),
    "pyxis-steps": (mixed, PYXIS, TRAIN, {"gpus": "16", "container": IMAGE}),
    "pyxis-script": (mixed, PYXIS, STEPLESS, {"gpus": "4", "container": IMAGE}),
}  # fmt: skip


def planned(name, environment=None, **more):
    where, site, script, values = CASES[name]
    cluster = Cluster(where(), site, environment=environment or {})
    return plan_batch(script, "train.sh", read_request(values | more, "test"), cluster)


@pytest.mark.parametrize("name", CASES)
def test_the_whole_text_is_as_it_was_kept(name):
    assert planned(name).submission.script == (EXPECTED / f"{name}.sbatch").read_bytes()


def test_no_kept_file_is_without_a_case():
    assert {p.stem for p in EXPECTED.glob("*.sbatch")} == set(CASES)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("python")])
def test_each_text_is_a_shells(name):
    script = planned(name).submission.script
    assert subprocess.run(["bash", "-n"], input=script, check=False).returncode == 0


@pytest.mark.parametrize("name", CASES)
def test_the_users_lines_are_all_there_in_order(name):
    """Byte for byte but for the `#` before directives that Slurm must not read."""
    where = planned(name).submission.script
    rest = where
    for line in CASES[name][2].splitlines(keepends=True):
        found = rest.find(line.rstrip(b"\n"))
        assert found >= 0, line
        assert rest[found - 1 : found] in (b"\n", b"#", b""), line
        rest = rest[found + len(line.rstrip(b"\n")) :]


def test_the_command():
    assert planned("one-gpu").command == ["sbatch", "--parsable"]
    plan = planned("one-gpu", slurm=["--mail-type=END", "-k"])
    assert plan.command == ["sbatch", "--parsable", "--mail-type=END", "--no-kill"]
    with pytest.raises(ClusterRequestError, match="--slurm is 'END', expected an option"):
        planned("one-gpu", slurm=["END"])


def test_variables_of_the_environment_win_over_the_script_and_give_way_to_the_command_line():
    """sbatch takes its variables before a script's directives: what is said here goes onto its command line."""
    env = {"SBATCH_PARTITION": "old", "SBATCH_TIMELIMIT": "30", "SBATCH_ACCOUNT": "env"}
    plan = planned("in-gpus", env, gpus="2")
    assert plan.layout.partition == "old"
    assert set(plan.submission.options) == {"--partition=old", "--time=00:30:00", "--account=env"}
    plan = planned("in-gpus", env, gpus="2", partition="main", account="mine")
    assert set(plan.submission.options) == {"--partition=main", "--time=00:30:00", "--account=mine"}


def test_gpus_on_the_command_line_win_over_a_short_word_in_the_script():
    plan = planned("hal-demo", gpus="6")
    assert plan.layout.gpus == 6


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("apptainer-script", {"gpus": "16"}, "would run in the container on the first of 2 nodes"),
        ("python-modules", {"container": IMAGE}, "python3 cannot be put into a container"),
        ("hal-demo", {"partition": "gpux4", "gpus": "5"}, "stands for 4 GPUs, --gpus asks for 5"),
        ("slurms-own", {"partition": "mian"}, "no partition 'mian'"),
        ("one-gpu", {"container": "not-there"}, "there is no registry"),
        ("one-gpu", {"container": "./not-there.sif"}, "there is no container image"),
    ],
)
def test_what_cannot_be(name, more, says):
    with pytest.raises(ClusterRequestError, match=says):
        planned(name, **more)


def test_a_job_of_several_parts_is_left_alone():
    script = b"#!/bin/sh\n#SBATCH --gpus=1\n#SBATCH hetjob\n#SBATCH --gpus=2\ntrue\n"
    plan = plan_batch(script, "x", read_request({}, "t"), Cluster(mixed(), Site(), environment={}))
    assert plan.layout is None


# -- in the foreground ----------------------------------------------------------------------------------


def run_plan(command=(), site=None, *, terminal=True, **values):
    cluster = Cluster(mixed(), site or Site(), environment={})
    return plan_run(read_request(values, "test"), command, cluster, terminal=terminal)


def test_a_shell():
    assert " ".join(run_plan(gpus="4", time="1h").command) == (
        "salloc --partition=main --nodes=1 --ntasks-per-node=4 --gres=gpu:4 --cpus-per-task=16 --mem=475000M "
        "--time=01:00:00 --job-name=interactive srun --interactive --preserve-env --pty bash -i"
    )


def test_a_command_without_a_terminal():
    plan = run_plan(["python", "a b.py"], terminal=False, gpus="1")
    assert plan.command[-5:] == ("srun", "--interactive", "--preserve-env", "python", "a b.py")
    assert "--job-name=python" in plan.command


def test_in_containers():
    plan = run_plan(["nvidia-smi"], SITE, gpus="1", container=IMAGE)
    assert plan.command[-8:] == (
        "apptainer", "exec", "--nv", "--bind", "/data", "--bind", "/scratch:/tmp", IMAGE, "nvidia-smi"
    )[-8:]  # fmt: skip
    plan = run_plan(["nvidia-smi"], PYXIS, gpus="1", container=IMAGE)
    assert plan.command[-4:] == (
        "--pty", "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
        "--container-mounts=/data:/data,/scratch:/tmp", "nvidia-smi",
    )  # fmt: skip
    assert "--nv" not in run_plan(["ls"], SITE, nodes="1", container=IMAGE).command


def test_with_modules():
    plan = run_plan(["python", "x"], SITE, gpus="1", modules=["cuda"])
    *_, bash, option, text, name, program, argument = plan.command
    assert (bash, option, name, program, argument) == ("bash", "-c", "bash", "python", "x")
    assert text.endswith('exec "$@"')
    assert "module load slurm cuda" in text


@pytest.mark.parametrize(
    "values", [{"array": "0-3"}, {"output": "x"}, {"error": "x"}, {"requeue": True}]
)
def test_what_makes_no_sense_in_the_foreground(values):
    with pytest.raises(ClusterRequestError, match="in the foreground"):
        run_plan(["ls"], gpus="1", **values)


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        sys.stdout.buffer.write(b"=== %s\n" % case.encode() + planned(case).submission.script)
        print("--- ", *planned(case).remarks, sep="\n    ")

"""Files for a site: modulefiles and Open OnDemand apps, generated from a cluster, and run as far as can be."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headrace.cluster.site_files import (
    modulefiles,
    ondemand_files,
    site_facts,
    write_files,
)
from headrace.cluster.slurm.scontrol import read_snapshot
from headrace.cluster.snapshot import ClusterSnapshot, Node, Partition
from headrace.errors import ClusterError, ClusterRequestError

NASTY = Path("/opt/a \"quoted\" $HOME [exit 9] {x} \\ 'dir'")


def lua(facts):
    return modulefiles(facts)[f"headrace/{facts.version}.lua"]


def tcl(facts):
    return modulefiles(facts)[f"headrace/{facts.version}"]


def node(name, gpus, states=("idle",)):
    return Node(name, states, 64, 256000, gpus=gpus, gpu_type="h100" if gpus else "")


def cluster(partitions=None, name="hal"):
    nodes = (node("g1", 4), node("g2", 4), node("g3", 8, ("down", "drain")), node("c1", 0))
    given = partitions or (
        Partition("gpu", ("g1", "g2", "g3"), is_default=True, max_minutes=24 * 60),
        Partition("cpu", ("c1",)),
        Partition("old", ("c1",), state="down"),
    )
    return ClusterSnapshot(name, "22.05.8", 0.0, nodes, given, ())


@pytest.fixture
def facts():
    return site_facts(cluster(), prefix=NASTY, site_file=Path("/etc/headrace/site.yaml"))


def test_facts_are_the_clusters_own(facts):
    gpu, cpu = facts.partitions
    # The node with eight GPUs is down.
    assert (gpu.own.name, gpu.nodes, gpu.gpus_per_node, gpu.gpus_max) == ("gpu", 2, 4, 8)
    assert (gpu.own.max_minutes, gpu.kinds) == (24 * 60, ((4, 64, 256000, 2),))
    assert (cpu.own.name, cpu.gpus_per_node, cpu.own.max_minutes) == ("cpu", 0, None)
    assert facts.default_partition is gpu


@pytest.mark.parametrize("name", ["", "a b", "../x", "a\nb"])
def test_a_cluster_whose_name_is_no_name_is_refused(name):
    with pytest.raises(ClusterRequestError, match="name"):
        site_facts(cluster(name=name))


def test_a_cluster_without_a_partition_that_is_up_is_refused():
    with pytest.raises(ClusterRequestError, match="no partition"):
        site_facts(cluster((Partition("old", ("c1",), state="down"),)))


# -- modulefiles ---------------------------------------------------------------------------------------

LMOD = r"""
local said = {}
local function say(kind) return function(a, b) said[#said + 1] = kind .. "|" .. a .. "|" .. (b or "") end end
help, whatis, family = say("help"), say("whatis"), say("family")
prepend_path, setenv = say("prepend"), say("setenv")
function pathJoin(a, b) return a .. "/" .. b end
dofile(arg[1])
for _, line in ipairs(said) do print(line) end
"""
MODULES = r"""
proc module-whatis {text} { puts "whatis|$text|" }
proc conflict {name} { puts "conflict|$name|" }
proc prepend-path {name value} { puts "prepend|$name|$value" }
proc setenv {name value} { puts "setenv|$name|$value" }
source [lindex $argv 0]
ModulesHelp
"""


def run_module(interpreter, shell, text, tmp_path):
    program = shutil.which(interpreter)
    if program is None:
        pytest.skip(f"{interpreter} is not installed")
    (tmp_path / "modulecmd").write_text(shell)
    (tmp_path / "headrace").write_text(text)
    ended = subprocess.run(
        [program, tmp_path / "modulecmd", tmp_path / "headrace"],
        check=False, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended


EXPECTED = [f"prepend|PATH|{NASTY}/bin", f"setenv|HEADRACE_ROOT|{NASTY}",
            "setenv|HEADRACE_SITE|/etc/headrace/site.yaml"]  # fmt: skip


def test_lmod_gets_what_was_meant(facts, tmp_path):
    ended = run_module("lua5.4", LMOD, lua(facts), tmp_path)
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith(("prepend", "setenv"))] == EXPECTED
    assert "family|headrace|" in lines
    assert "swrun, swbatch, swqueue" in ended.stdout


def test_environment_modules_get_what_was_meant(facts, tmp_path):
    ended = run_module("tclsh", MODULES, tcl(facts), tmp_path)
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith(("prepend", "setenv"))] == EXPECTED
    assert "conflict|headrace|" in lines
    assert "swrun, swbatch, swqueue" in ended.stderr


def test_both_lie_where_module_load_looks(facts):
    names = list(modulefiles(facts))
    assert names == [f"headrace/{facts.version}.lua", f"headrace/{facts.version}"]
    assert tcl(facts).startswith("#%Module1.0\n")  # else it is no modulefile
    assert "HEADRACE_SITE" not in lua(site_facts(cluster(), prefix=NASTY))


# -- Open OnDemand --------------------------------------------------------------------------------------

APPS = {"headrace_train", "headrace_jupyter"}
PARTS = {"manifest.yml", "form.yml", "submit.yml.erb", "view.html.erb",
         "template/before.sh.erb", "template/script.sh.erb"}  # fmt: skip

# As the portal does it: answers are methods of submit.yml's and of the page's binding, and of `context`.
RENDER = r"""
require "erb"; require "json"; require "ostruct"
text, answers = File.read(ARGV[0]), OpenStruct.new(JSON.parse(ARGV[1]))
answers.context = answers
answers.instance_eval { print ERB.new(text, trim_mode: "-").result(binding) }
"""


def rendered(text, tmp_path, *, fails=False, **answers):
    ruby = shutil.which("ruby")
    if ruby is None:
        pytest.skip("ruby is not installed")
    (tmp_path / "page.erb").write_text(text)
    ended = subprocess.run(
        [ruby, "-e", RENDER, tmp_path / "page.erb", json.dumps(answers)],
        check=False, capture_output=True, text=True, timeout=20, env=os.environ | {"HOME": "/home/ada"},
    )  # fmt: skip
    assert (ended.returncode != 0) == fails, ended.stderr
    return ended.stderr if fails else ended.stdout


def test_each_app_has_what_the_portal_wants(facts):
    files = ondemand_files(facts)
    assert set(files) == {"README.md"} | {f"{app}/{part}" for app in APPS for part in PARTS}
    for app in APPS:
        manifest = yaml.safe_load(files[f"{app}/manifest.yml"])
        assert manifest["role"] == "batch_connect"
        form = yaml.safe_load(files[f"{app}/form.yml"])
        assert form["cluster"] == "hal"
        assert form["form"] == list(form["attributes"])
        assert [one[1] for one in form["attributes"]["partition"]["options"]] == ["gpu", "cpu"]
        options = form["attributes"]["partition"]["options"]
        most = 8 if app == "headrace_train" else 4  # a notebook has one node
        assert form["attributes"]["gpus"]["max"] == options[0][2]["data-max-gpus"] == most
        assert options[0][0] == "gpu (2 nodes, 4 GPUs a node, up to 24 h)"
        assert options[0][2]["data-max-minutes"] == 24 * 60
        for name, text in files.items():
            if name.startswith(app) and name.endswith(".erb"):
                assert text.count("<%") == text.count("%>"), name


def test_every_answer_that_is_used_is_asked_for(facts):
    files = ondemand_files(facts)
    for app in APPS:
        asked = set(yaml.safe_load(files[f"{app}/form.yml"])["form"])
        used = set(re.findall(r"\bcontext\.(\w+)", files[f"{app}/template/script.sh.erb"]))
        assert used
        assert used <= asked


def many_kinds():
    """Nodes of 4 and of 8 GPUs, and a partition of two minutes."""
    nodes = (*(node(f"a{i}", 4) for i in range(2)), *(node(f"b{i}", 8) for i in range(2)))
    names = tuple(each.name for each in nodes)
    partitions = (
        Partition("all", names, is_default=True),
        Partition("two", names, max_nodes=2, max_minutes=2, max_memory_per_cpu_mib=1000),
    )
    return site_facts(ClusterSnapshot("hal", "22.05.8", 0.0, nodes, partitions, ()), prefix=NASTY)


def test_the_form_offers_what_a_partition_gives():
    form = yaml.safe_load(ondemand_files(many_kinds())["headrace_train/form.yml"])
    texts = [option[0] for option in form["attributes"]["partition"]["options"]]
    assert texts == ["all (4 nodes, 8 GPUs a node)", "two (4 nodes, 8 GPUs a node, up to 2 min)"]
    # 24 there are, but not as many on each node.
    most = [option[2]["data-max-gpus"] for option in form["attributes"]["partition"]["options"]]
    assert most == [16, 16]


@pytest.mark.parametrize(
    ("app", "partition", "gpus", "expected"),
    [  # nodes, tasks a node, CPUs a task, MiB and GPUs a node
        ("train", "gpu", "1", (1, 1, 16, 64000, 1)),
        ("train", "gpu", "4", (1, 4, 16, 256000, 4)),
        ("train", "gpu", "6", (2, 3, 16, 192000, 3)),
        ("train", "gpu", "8", (2, 4, 16, 256000, 4)),
        ("train", "cpu", "3", (1, 1, 64, 256000, 0)),
        ("train", "gpu", "0", (1, 1, 16, 64000, 0)),
        ("jupyter", "gpu", "4", (1, 1, 64, 256000, 4)),
        ("train", "all", "1", (1, 1, 8, 32000, 1)),
        ("train", "all", "16", (2, 8, 8, 256000, 8)),
        ("train", "all", "12", (2, 6, 8, 192000, 6)),
        ("train", "two", "2", (1, 2, 8, 16000, 2)),
    ],
)
def test_gpus_become_nodes_tasks_and_memory(facts, tmp_path, app, partition, gpus, expected):
    its = many_kinds() if partition in ("all", "two") else facts
    text = ondemand_files(its)[f"headrace_{app}/submit.yml.erb"]
    answers = {"partition": partition, "gpus": gpus, "minutes": "2", "account": ""}
    script = yaml.safe_load(rendered(text, tmp_path, **answers))["script"]
    nodes, tasks, cpus, mib, per_node = expected
    assert script["native"] == [
        f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}", f"--mem={mib}M",
        *([f"--gpus-per-node={per_node}"] if per_node else []),
    ]  # fmt: skip
    assert (script["queue_name"], script["wall_time"]) == (partition, 120)
    assert "accounting_id" not in script


@pytest.mark.parametrize(
    ("app", "answers", "why"),
    [
        ("train", {"partition": "two", "minutes": "60"}, "gives at most 2 minutes; 60 were asked"),
        ("train", {"gpus": "16", "partition": "gpu"}, "no nodes for 16 GPUs"),
        ("train", {"gpus": "24"}, "no nodes for 24 GPUs in equal parts"),
        ("train", {"gpus": "7", "partition": "gpu"}, "no nodes for 7 GPUs"),
        ("jupyter", {"gpus": "16"}, "no nodes for 16 GPUs in equal parts (on one node)"),
        ("train", {"partition": "none"}, "none is no partition"),
    ],
)
def test_what_a_partition_does_not_give_is_refused(facts, tmp_path, app, answers, why):
    its = facts if answers.get("partition") == "gpu" else many_kinds()
    text = ondemand_files(its)[f"headrace_{app}/submit.yml.erb"]
    given = {"partition": "all", "gpus": "1", "minutes": "2", "account": "", **answers}
    assert why in " ".join(rendered(text, tmp_path, fails=True, **given).split())


def test_what_a_form_asks_for_a_real_slurm_gives(slurm, tmp_path):
    """Each form submitted as the portal does; one GPU leaves the node's other to somebody else."""
    files = ondemand_files(site_facts(read_snapshot(), prefix=NASTY))
    form = yaml.safe_load(files["headrace_train/form.yml"])
    options = {option[1]: option for option in form["attributes"]["partition"]["options"]}
    assert "up to 24 h" in options["main"][0]
    assert options["debug"][2] == {"data-max-gpus": 2, "data-max-minutes": 30}
    jobs = []
    for app, gpus, partition in (
        ("train", "1", "debug"), ("jupyter", "1", "debug"), ("train", "4", "main"), ("jupyter", "2", "main"),
    ):  # fmt: skip
        answers = {"partition": partition, "gpus": gpus, "minutes": "10", "account": ""}
        text = rendered(files[f"headrace_{app}/submit.yml.erb"], tmp_path, **answers)
        script = yaml.safe_load(text)["script"]
        minutes = script["wall_time"] // 60
        job = slurm.sbatch(
            "#!/bin/sh\nsleep 60\n", f"--job-name={script['job_name']}", f"--time={minutes}",
            f"--partition={script['queue_name']}", *script["native"],
        )  # fmt: skip
        slurm.wait_for_job(job, "RUNNING")
        jobs.append(job)
    running = {job.job_id: job for job in read_snapshot().jobs}
    given = [[(a.gpu_count or len(a.gpus), a.cpus, a.memory_mib) for a in running[job].allocations]
             for job in jobs]  # fmt: skip
    half, whole = (1, 4, 8000), (2, 8, 16000)
    assert given == [[half], [half], [whole, whole], [whole]]
    tasks = [
        re.search(r"NumTasks=(\d+)", slurm.command("scontrol", "show", "job", job))[1]
        for job in jobs
    ]
    assert tasks == ["1", "1", "4", "1"]


def test_what_a_user_types_stays_what_it_is(facts, tmp_path):
    files = ondemand_files(facts)
    account = 'a"b: c\n  native: ["--uid=0"]'
    answers = {"partition": "gpu", "gpus": "1", "minutes": "1", "account": account}
    submit = yaml.safe_load(rendered(files["headrace_jupyter/submit.yml.erb"], tmp_path, **answers))
    assert submit["script"]["accounting_id"] == account
    assert submit["script"]["native"][0] == "--nodes=1"

    project = tmp_path / "my $(touch oops) 'project'"
    project.mkdir()
    (project / "job.sh").write_text('printf "%s\\n" "$PWD" "$@"\n')
    script = rendered(
        files["headrace_train/template/script.sh.erb"], tmp_path, project=str(project), batch_script="job.sh",
        script_arguments="--epochs 9 --name 'a b' $(touch oops) ;touch oops",
    )  # fmt: skip
    assert script.startswith("#!/usr/bin/env bash\n")
    (tmp_path / "script.sh").write_text(script)
    log = tmp_path / "log"
    subprocess.run(
        ["bash", tmp_path / "script.sh"], cwd=tmp_path, check=True, timeout=20,
        env=os.environ | {"log_file": str(log)},
    )  # fmt: skip
    assert log.read_text().splitlines() == [
        str(project), "--epochs", "9", "--name", "a b", "$(touch", "oops)", ";touch", "oops",
    ]  # fmt: skip
    assert not list(tmp_path.rglob("oops"))


def test_shell_templates_are_shell(facts, tmp_path):
    files = ondemand_files(facts)
    answers = {"folder": "~", "project": "/p", "batch_script": "job.sh", "script_arguments": ""}
    for name, text in files.items():
        if name.endswith(".sh.erb"):
            (tmp_path / "x.sh").write_text(rendered(text, tmp_path, **answers))
            checked = subprocess.run(
                ["bash", "-n", tmp_path / "x.sh"], check=False, capture_output=True
            )
            assert checked.returncode == 0, f"{name}: {checked.stderr.decode()}"


def test_pages_escape_what_a_job_tells(facts, tmp_path):
    page = rendered(
        ondemand_files(facts)["headrace_train/view.html.erb"], tmp_path, host="<b>", port="1", password="x",
        log_file='/home/ada/a b"/train.log',
    )  # fmt: skip
    assert "<strong>&lt;b&gt;</strong>" in page
    assert 'href="/pun/sys/dashboard/files/fs/home/ada/a%20b%22/train.log"' in page


# -- writing --------------------------------------------------------------------------------------------


def test_files_are_written_and_foreign_ones_stay(facts, tmp_path):
    files = modulefiles(facts)
    written = write_files(tmp_path / "modules", files)
    assert [path.read_text() for path in written] == list(files.values())
    write_files(tmp_path / "modules", files)  # the same again is no harm
    written[1].write_text("my own")
    with pytest.raises(ClusterError, match="other content"):
        write_files(tmp_path / "modules", {name: text + "#\n" for name, text in files.items()})
    assert written[0].read_text() == next(iter(files.values()))
    write_files(tmp_path / "modules", files, overwrite=True)
    assert written[1].read_text() == files[f"headrace/{facts.version}"]
    apps = write_files(tmp_path / "apps", ondemand_files(facts))
    assert all(os.access(path, os.X_OK) for path in apps if path.name.endswith(".sh.erb"))


def test_a_folder_that_cannot_be_written_is_told(facts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="cannot be written"):
        write_files(tmp_path / "file", modulefiles(facts))


def test_cluster_init_writes_both_from_what_the_executor_says(tmp_path):
    command = [
        sys.executable, "-c", "from headrace.cli import main; main()", "cluster", "init",
        "--executor", "local", "--module", tmp_path / "m", "--ondemand", tmp_path / "apps", "--json",
    ]  # fmt: skip
    environment = os.environ | {"HEADRACE_JOBS_DIR": str(tmp_path / "jobs"), "HOME": str(tmp_path)}
    for _ in range(2):  # the same again is no harm
        ended = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=60, env=environment
        )
        assert ended.returncode == 0, ended.stderr
    written = json.loads(ended.stdout)["files"]
    assert len(written) == 15
    assert all(Path(path).is_file() for path in written)
    assert not (tmp_path / ".config").exists()  # nothing else was asked for
    form = yaml.safe_load((tmp_path / "apps/headrace_train/form.yml").read_text())
    assert form["attributes"]["partition"]["options"]

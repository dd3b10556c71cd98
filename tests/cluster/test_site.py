"""A site's file: strict, written from the cluster, and read back as it was meant."""

import re

import pytest
import yaml

from cluster.clusters import busy, cluster, hal, mixed
from headrace.cluster.layout import lay_out
from headrace.cluster.request import read_request
from headrace.cluster.site import (
    KEYS,
    PARTITION_KEYS,
    NodeType,
    PartitionSite,
    Site,
    find_site,
    read_site,
    site_text,
)
from headrace.cluster.snapshot import Partition
from headrace.errors import ClusterRequestError

WHOLE = """
version: 1
cluster: hal
gpu_partition: gpu
cpu_partition: cpu
short_partition: debug
short_time: 4h
cpus_per_gpu: 16
cpus_per_gpu_max: 40
memory_per_gpu: 60G
time: "4:00:00"
time_max: 1-0
gpus_max: 64
mini_cpus: 4
account: abc
qos: normal
containers:
  runtime: pyxis
  registry: /images
  mounts: [/data, "/a:/b:ro"]
modules:
  setup: [/etc/m.sh]
  load: [slurm]
conda:
  setup: /opt/conda.sh
partitions:
  debug: {time: 30m, cpus_per_gpu: 8}
node_types:
  fat: {constraint: bigmem}
  grace: {partition: gh200}
"""


def read(tmp_path, text):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return read_site(path)


def test_every_key_is_read(tmp_path):
    site = read(tmp_path, WHOLE)
    assert site == Site(
        path=tmp_path / "site.yaml", cluster="hal", gpu_partition="gpu", cpu_partition="cpu",
        short_partition="debug",
        short_time=240, everywhere=PartitionSite(16, 40, 61440, 240, 1440),
        partitions={"debug": PartitionSite(cpus_per_gpu=8, time=30)},
        node_types={"fat": NodeType(constraint="bigmem"), "grace": NodeType(partition="gh200")}, gpus_max=64,
        mini_cpus=4, account="abc", qos="normal", containers_runtime="pyxis", containers_registry="/images",
        containers_mounts=("/data", "/a:/b:ro"), modules_setup=("/etc/m.sh",), modules_load=("slurm",),
        conda_setup="/opt/conda.sh",
    )  # fmt: skip
    assert site.of("debug") == PartitionSite(8, 40, 61440, 30, 1440)
    assert site.of("gpu") == site.everywhere
    written = set(re.findall(r"^ {0,2}(\w+):", WHOLE, re.MULTILINE))
    assert {key.path.rpartition(".")[2] for key in KEYS} <= written


def test_an_empty_file_and_none_say_nothing(tmp_path):
    assert read(tmp_path, "") == Site(path=tmp_path / "site.yaml")
    assert read_site(None) == Site()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cpu_per_gpu: 16", "cpu_per_gpu is no key; did you mean cpus_per_gpu?"),
        ("partition: {}", "partition is no key; did you mean partitions?"),
        ("partitions: {gpu: {cpus_gpu: 4}}", "gpu.cpus_gpu is no key; did you mean partitions.gpu.cpus_per"),
        ("containers: {runtim: pyxis}", "containers.runtim is no key; did you mean containers.runtime?"),
        ("containers: {runtime: docker}", "runtime is 'docker': expected apptainer, pyxis or enroot"),
        ("cpus_per_gpu: many", "cpus_per_gpu is 'many': expected a number"),
        ("cpus_per_gpu: true", "cpus_per_gpu is True"),
        ("cpus_per_gpu: 0", "expected a number from 1"),
        ("time: 24:00:00", "time is 86400: expected a time in quotes"),
        ("time: soon", "'soon' is no time limit"),
        ("time: '0'", "at least a minute"),
        ("memory_per_gpu: lots", "'lots' is no size"),
        ("modules: {load: slurm}", "expected a list"),
        ("containers: [a]", "containers is list, expected keys and values"),
        ("- a", "the file is list"),
        ("version: 2", "version is 2: expected 1"),
        ("a: [", "line 1"),
        ("a: 'x\ny: [}", "line"),
        ("!!python/object:os.system {}", "line 1"),
        ('account: "a\\nb"', "one line of text"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(tmp_path, text, says):
    with pytest.raises(ClusterRequestError) as e:
        read(tmp_path, text)
    assert says in str(e.value)
    assert "site.yaml" in str(e.value)


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path):
    with pytest.raises(ClusterRequestError, match="No such file"):
        read_site(tmp_path / "none.yaml")
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ClusterRequestError, match=r"bin\.yaml"):
        read_site(tmp_path / "bin.yaml")


def test_where_it_is_looked_for(tmp_path):
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_site(env) is None or find_site(env).parts[1] == "etc"
    own = tmp_path / "headrace/site.yaml"
    own.parent.mkdir()
    own.touch()
    assert find_site(env) == own
    assert find_site({**env, "HEADRACE_SITE": "/x.yaml"}).name == "x.yaml"


@pytest.mark.parametrize("which", [hal, mixed, busy], ids=lambda f: f.__name__)
def test_what_init_writes_is_read_back_and_changes_nothing_but_partitions(tmp_path, which):
    site = read(tmp_path, site_text(which()))
    assert site.cluster == which().cluster
    request = read_request({"gpus": "2"}, "test")
    assert lay_out(request, which(), site) == lay_out(request, which(), Site())


def test_each_example_that_init_writes_is_good(tmp_path):
    """Every commented key, with its comment sign taken away, is read."""
    text = site_text(hal())
    start = text.index("version: 1")
    bare = re.sub(r"^# ((?: {2})*[a-z_]+:(?: |$))", r"\1", text[start:], flags=re.MULTILINE)
    site = read(tmp_path, bare)
    assert site.short_partition == "debug"
    assert site.containers_runtime == "apptainer"
    assert site.partitions.keys() == {"gpu"}
    assert site.node_types.keys() == {"fat", "grace"}
    data = yaml.safe_load(bare)
    assert {key.path for key in PARTITION_KEYS} == set(data["partitions"]["gpu"])


@pytest.mark.parametrize("name", ["1e3", "no", "on", "null", "0x1", "a: b", "# x", "ü", "-"])
def test_any_cluster_and_partition_name_is_written_as_text(tmp_path, name):
    partition = Partition(name, (), is_default=True)
    where = cluster([], [partition], name=name)
    assert read(tmp_path, site_text(where)).cluster == name


def test_hals_cpu_partition_is_found_by_its_name():
    assert "cpu_partition: cpu" in site_text(hal())

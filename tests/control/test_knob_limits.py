"""Limits: what the job may use, read from trees as kernels lay them out."""

import resource

import pytest

from headrace.control.history import Knobs
from headrace.control.knob_limits import BUFFER_BYTES_MAX, Bounds, Limits, read_limits

MIB = 1 << 20


def lay_out(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def limits_of(root, **options):
    return read_limits(root, **({"environment": {}, "rlimits": {}, "cpus": 64} | options))


V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    "sys/fs/cgroup/job/memory.max": 800 * MIB,
    "sys/fs/cgroup/job/memory.current": 400 * MIB,
    "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {100 * MIB}\nactive_file 0\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": 300 * MIB,
    "sys/fs/cgroup/job/cpu.max": "300000 100000\n",
}

V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n0::/\n",
    "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": 800 * MIB,
    "sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes": 400 * MIB,
    "sys/fs/cgroup/memory/slurm/job_7/memory.stat": f"total_inactive_file {100 * MIB}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
    "sys/fs/cgroup/memory/memory.usage_in_bytes": 5,
    "sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": 300000,
    "sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": 100000,
}


@pytest.mark.parametrize("files", [V1, V2], ids=["v1", "v2"])
def test_a_quarter_of_the_cgroup_is_for_buffers(tmp_path, files):
    limits = limits_of(lay_out(tmp_path, files))
    assert limits.buffer_bytes.high == 200 * MIB
    assert "cgroup v" in limits.origins["buffer_bytes"]
    assert limits.decode_threads.high == 3
    assert limits.origins["decode_threads"] == "cgroup: 3 CPUs"


@pytest.mark.parametrize(
    ("files", "usage"),
    [
        (V1, "sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes"),
        (V2, "sys/fs/cgroup/job/memory.current"),
    ],
    ids=["v1", "v2"],
)
def test_memory_pressure_shrinks_the_budget(tmp_path, files, usage):
    root = lay_out(tmp_path, files | {usage: 880 * MIB})  # 100 MiB of it are page cache
    assert limits_of(root).buffer_bytes.high == 10 * MIB
    assert "20 MiB free" in limits_of(root).origins["buffer_bytes"]
    # What our own buffers hold is not pressure.
    assert limits_of(root, held_bytes=100 * MIB).buffer_bytes.high == 60 * MIB


def test_a_group_that_is_passed_already_leaves_the_least_there_is(tmp_path):
    root = lay_out(tmp_path, V2 | {"sys/fs/cgroup/job/memory.current": 1200 * MIB})
    limits = limits_of(root)
    assert limits.buffer_bytes == Bounds(1, 1)
    assert limits.clamped(Knobs(8, 64 * MIB)).buffer_bytes == 1


def test_inside_a_container_the_mount_is_the_group(tmp_path):
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../docker/abc\n",
            "sys/fs/cgroup/cgroup.controllers": "memory",
            "sys/fs/cgroup/memory.max": 400 * MIB,
            "sys/fs/cgroup/memory.current": 0,
        },
    )
    assert limits_of(root).buffer_bytes.high == 100 * MIB


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "nonsense\n:::\n0::\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "many", "proc/meminfo": "x"},
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cgroup.controllers": "",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    ],
)
def test_what_cannot_be_read_limits_nothing(tmp_path, files):
    limits = limits_of(lay_out(tmp_path, files))
    assert limits.buffer_bytes.high == BUFFER_BYTES_MAX
    assert limits.decode_threads.high == 64


def test_rlimits_bind(tmp_path):
    root = lay_out(tmp_path, {"proc/self/status": "VmSize:\t 102400 kB\nVmData:\t 10240 kB\n"})
    for number in range(10):
        lay_out(root, {f"proc/self/fd/{number}": ""})
    address = limits_of(root, rlimits={resource.RLIMIT_AS: 300 * MIB})
    assert address.buffer_bytes.high == 100 * MIB
    assert "RLIMIT_AS" in address.origins["buffer_bytes"]
    data = limits_of(root, rlimits={resource.RLIMIT_DATA: 110 * MIB})
    assert data.buffer_bytes.high == 50 * MIB
    files = limits_of(root, rlimits={resource.RLIMIT_NOFILE: 64})
    assert files.reads_in_flight == Bounds(1, 27)
    assert "54 of 64" in files.origins["reads_in_flight"]
    full = limits_of(root, rlimits={resource.RLIMIT_NOFILE: 10})
    assert full.reads_in_flight == Bounds(1, 1)


def test_the_operators_word_counts_but_not_beyond_what_is_free(tmp_path):
    root = lay_out(tmp_path, V2)
    assert limits_of(root, memory_bytes=64 * MIB).buffer_bytes.high == 64 * MIB
    assert limits_of(root, memory_bytes=64 * MIB).origins["buffer_bytes"] == "memory_bytes="
    limits = limits_of(root, environment={"HEADRACE_MEMORY_BYTES": str(32 * MIB)})
    assert limits.buffer_bytes.high == 32 * MIB
    assert limits_of(root, memory_bytes=1).buffer_bytes.high == 1
    assert limits_of(root, memory_bytes=700 * MIB).buffer_bytes.high == 250 * MIB
    for wrong in ("0", "-1", "2G", ""):
        with pytest.raises(ValueError, match="HEADRACE_MEMORY_BYTES"):
            limits_of(root, environment={"HEADRACE_MEMORY_BYTES": wrong})
    with pytest.raises(ValueError, match="memory_bytes"):
        limits_of(root, memory_bytes=0)


def test_the_real_machine_has_limits():
    limits = read_limits()
    assert limits.buffer_bytes.high >= 1
    assert set(limits.origins) == {"buffer_bytes", "reads_in_flight", "decode_threads"}


def test_frozen_knobs_cannot_move_and_planes_share():
    limits = Limits(buffer_bytes=Bounds(MIB, 90 * MIB))
    held = limits.frozen(Knobs(7, 5 * MIB, 2), ["reads_in_flight"])
    assert held.clamped(Knobs(100, 100 * MIB, 2)) == Knobs(7, 90 * MIB, 2)
    assert held.origins["reads_in_flight"] == "set explicitly"
    assert limits.shared(3).buffer_bytes.high == 30 * MIB
    assert limits.shared(1000).buffer_bytes == Bounds(MIB, MIB)

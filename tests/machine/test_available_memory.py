"""How much memory is left, as the machine and the control groups say."""

import pytest

from headrace.machine.host import available_memory, fits_in_free_memory


def test_memory_of_the_cgroup_counts(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 1000000 kB\n")
    assert available_memory(tmp_path) == 1_024_000_000
    assert fits_in_free_memory(512_000_000, tmp_path)
    assert not fits_in_free_memory(512_000_001, tmp_path)
    write("proc/self/cgroup", "0::/job/step\n")
    write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    write("sys/fs/cgroup/job/memory.max", "500000000\n")
    write("sys/fs/cgroup/job/memory.current", "300000000\n")
    write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 100000000\n")
    write("sys/fs/cgroup/job/step/memory.max", "max\n")
    write("sys/fs/cgroup/job/step/memory.current", "1\n")
    assert available_memory(tmp_path) == 300_000_000
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").unlink()
    write("proc/self/cgroup", "4:memory:/job\n0::/\n")
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "200000000\n")
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "250000000\n")
    assert available_memory(tmp_path) == 0


@pytest.mark.parametrize("meminfo", ["", "MemAvailable:\n", "MemAvailable: much kB\n"])
def test_a_machine_that_does_not_tell_promises_nothing(tmp_path, meminfo):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(meminfo)
    assert available_memory(tmp_path) == 1 << 60
    assert not fits_in_free_memory(1, tmp_path)

"""Sensors read what kernels and file systems write, whole, cut off, wrapped, hostile or not there."""

import random

import pytest

from headrace.machine.sensors import Sensor, all_sensors

DISK = "   8       0 sda {reads} 0 {sectors} {read_ms} 10 0 80 5 0 {busy_ms} 0 0 0 0 0 0 0\n"

NFS_MOUNT = """\
device server:/export/data mounted on /mnt/da\\040ta with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576,wsize=1048576,proto=tcp
\tage:\t1000
\tbytes:\t1 2 0 0 {read} {written} 300 0
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 0 0 1 0 0 10 10 0 10 0 2 0 0
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: {reads} {reads} 0 16000 104857600 10 4000 {read_ms} 0
\t       WRITE: 5 5 0 500000 800 0 30 40 0
\t      COMMIT: 1 1 0 100 100 0 5 6 0
\t        OPEN: 20 20 0 4000 6000 1 60 {open_ms} 0
\t     GETATTR: 10 10 0 2000 2400 0 10 20 0
"""

LUSTRE = """\
snapshot_time             1700000000.123456789 secs.nsecs
start_time                1690000000.000000000 secs.nsecs
read_bytes                {reads} samples [bytes] 4096 4194304 {read_bytes} 999999999
write_bytes               12 samples [bytes] 10 4096 20000 4000
read                      {reads} samples [usecs] 1 900 {read_us} 88888
open                      40 samples [usecs] 3 900 {open_us} 7777
close                     40 samples [usecs] 3 90 400 77
getattr                   9 samples [usecs] 1 2 30 4
mystery                   9 samples [furlongs] 1 2 3
"""


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_disks_tell_bytes_and_seconds_and_survive_a_wrap_of_milliseconds(tmp_path):
    disks = Sensor("disk", tmp_path)
    almost = (1 << 32) - 100
    put(tmp_path, "sys/block/sda/stat", "")
    put(tmp_path, "proc/diskstats",
        DISK.format(reads=1, sectors=100, read_ms=almost, busy_ms=almost)
        + "   8       1 sda1 1 0 1 1 1 0 1 1 0 1 1\n"
        + "   7       0 loop0 1 0 1 1 1 0 1 1 0 1 1\n")  # fmt: skip
    first = disks.read()
    assert {device for _, device in first.grown} == {"sda"}
    assert set(first.grown.values()) == {0.0}
    put(tmp_path, "proc/diskstats", DISK.format(reads=3, sectors=300, read_ms=900, busy_ms=0))
    grown = disks.read().grown
    assert grown["disk_read_bytes", "sda"] == 200 * 512
    assert grown["disk_reads", "sda"] == 2
    assert grown["disk_read_s", "sda"] == pytest.approx(1.0)
    assert grown["disk_busy_s", "sda"] == pytest.approx(0.1)


def test_a_disk_that_vanishes_and_comes_back_is_new(tmp_path):
    disks = Sensor("disk", tmp_path)
    line = DISK.format(reads=5, sectors=100, read_ms=1, busy_ms=1)
    put(tmp_path, "proc/diskstats", line)
    disks.read()
    put(tmp_path, "proc/diskstats", "")
    assert disks.read().grown == {}
    assert "no disk" in disks.why
    put(tmp_path, "proc/diskstats", line)
    assert set(disks.read().grown.values()) == {0.0}


def test_cpu_memory_and_pressure(tmp_path):
    put(tmp_path, "proc/stat", "cpu  100 0 100 1000 50 0 0 0 0 0\ncpu0 1 1 1 1\n")
    put(tmp_path, "proc/meminfo", "MemTotal:  1000 kB\nMemFree: 5 kB\nMemAvailable:  600 kB\n")
    put(tmp_path, "proc/pressure/io",
        "some avg10=0.00 avg60=0.12 total=1000000\nfull avg10=0.00 total=500000\n")  # fmt: skip
    cpu, memory, pressure = (
        Sensor("cpu", tmp_path),
        Sensor("memory", tmp_path),
        Sensor("psi", tmp_path),
    )
    cpu.read(), pressure.read()
    assert memory.read().gauges == {
        ("memory_bytes", ""): 1024000, ("memory_available_bytes", ""): 614400,
    }  # fmt: skip
    put(tmp_path, "proc/stat", "cpu  200 0 200 1100 150 0 0 0 0 0\n")
    put(tmp_path, "proc/pressure/io", "some avg10=0.00 total=3000000\nfull total=500000\n")
    grown = cpu.read().grown
    assert grown["cpu_busy_s", ""] == pytest.approx(grown["cpu_s", ""] / 2)
    assert pressure.read().grown == {
        ("io_pressure_s", "some"): 2.0, ("io_pressure_s", "full"): 0.0,
    }  # fmt: skip


def test_nfs_mounts_tell_wire_bytes_operations_and_waiting(tmp_path):
    nfs = Sensor("nfs", tmp_path)
    begin = "device tmpfs mounted on /tmp with fstype tmpfs\ndevice x mounted on /proc with fstype proc\n"
    now = {"read": 1000, "written": 50, "reads": 100, "read_ms": 4000, "open_ms": 70}
    put(tmp_path, "proc/self/mountstats", begin + NFS_MOUNT.format(**now))
    nfs.read()
    now = {"read": 9000, "written": 50, "reads": 150, "read_ms": 9000, "open_ms": 1070}
    put(tmp_path, "proc/self/mountstats", begin + NFS_MOUNT.format(**now))
    grown = nfs.read().grown
    mount = "/mnt/da ta"
    assert {mount for _, mount in grown} == {mount}
    assert grown["fs_read_bytes", mount] == 8000
    assert grown["fs_read_operations", mount] == 50
    assert grown["fs_read_s", mount] == 5.0
    assert grown["fs_metadata_s", mount] == 1.0
    assert grown["fs_write_operations", mount] == 0


@pytest.mark.parametrize("folder", ["proc/fs/lustre/llite", "sys/kernel/debug/lustre/llite"])
def test_lustre_clients_tell_bytes_operations_and_waiting(tmp_path, folder):
    lustre, file = Sensor("lustre", tmp_path), f"{folder}/scratch-ffff8800/stats"
    put(tmp_path, file, LUSTRE.format(reads=10, read_bytes=1000, read_us=500, open_us=900))
    lustre.read()
    put(
        tmp_path,
        file,
        LUSTRE.format(reads=30, read_bytes=5000, read_us=2_000_500, open_us=1_000_900),
    )
    grown = lustre.read().grown
    assert grown["fs_read_bytes", "scratch"] == 4000
    assert grown["fs_read_operations", "scratch"] == 20
    assert grown["fs_read_s", "scratch"] == pytest.approx(2.0)
    assert grown["fs_metadata_s", "scratch"] == pytest.approx(1.0)
    assert "mystery" not in str(grown)


def test_beegfs_is_named_though_it_counts_nothing(tmp_path):
    assert Sensor("beegfs", tmp_path).read().gauges == {}
    put(tmp_path, "proc/fs/beegfs/AB-1234-node7/status", "")
    beegfs = Sensor("beegfs", tmp_path)
    assert beegfs.read().gauges == {("fs_mounted", "AB-1234-node7"): 1.0}
    assert "keeps no counters" in beegfs.why


def test_network_counts_wires_and_rdma_ports_and_not_bridges(tmp_path):
    head = "Inter-|   Receive\n face |bytes\n"
    line = "{}: {} 0 0 0 0 0 0 0 {} 0 0 0 0 0 0 0\n"
    counters = "sys/class/infiniband/mlx5_0/ports/1/counters"
    network = Sensor("network", tmp_path)
    for received in (100, 350):
        put(tmp_path, "proc/net/dev",
            head + line.format("eth0", received, 7) + line.format("veth1", received, 9)
            + line.format("lo", 5, 5))  # fmt: skip
        put(tmp_path, f"{counters}/port_rcv_data", f"{received}\n")
        grown = network.read().grown
    assert grown == {
        ("network_received_bytes", "eth0"): 250, ("network_sent_bytes", "eth0"): 0,
        ("network_received_bytes", "mlx5_0/1"): 1000,
    }  # fmt: skip


def test_nothing_there_is_no_error_and_is_said(tmp_path):
    for sensor in all_sensors(tmp_path):
        reading = sensor.read()
        assert (reading.grown, reading.gauges) == ({}, {})
        assert sensor.why, sensor.name


FILES = ("proc/stat", "proc/meminfo", "proc/pressure/io", "proc/diskstats", "proc/net/dev",
         "proc/self/mountstats", "proc/fs/lustre/llite/a-1/stats")  # fmt: skip


def test_whatever_files_hold_no_sensor_raises(tmp_path):
    """Figures cut off anywhere, other numbers, binary noise: left out, never an exception or a leap."""
    good = {
        "proc/stat": "cpu  100 0 100 1000 50 0 0 0 0 0\n",
        "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:  600 kB\n",
        "proc/pressure/io": "some avg10=0.00 total=1000000\nfull total=500000\n",
        "proc/diskstats": DISK.format(reads=1, sectors=2, read_ms=3, busy_ms=4),
        "proc/net/dev": "a\nb\neth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n",
        "proc/self/mountstats": NFS_MOUNT.format(read=1, written=2, reads=3, read_ms=4, open_ms=5),
        "proc/fs/lustre/llite/a-1/stats": LUSTRE.format(
            reads=1, read_bytes=2, read_us=3, open_us=4
        ),
    }
    noise = random.Random(7)
    sensors = all_sensors(tmp_path)
    for _ in range(150):
        for path in FILES:
            text = bytearray(good[path].encode())
            for _ in range(noise.randrange(4)):
                at = noise.randrange(len(text))
                text[at : at + noise.randrange(3)] = noise.randbytes(noise.randrange(6))
            put(tmp_path, path, bytes(text[: noise.randrange(len(text) + 1)]))
        for sensor in sensors:
            reading = sensor.read()
            assert all(value >= 0.0 for value in reading.grown.values())
            assert all(label.isprintable() for _, label in reading.grown)

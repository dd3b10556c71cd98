"""Which mount a path lies on, and whether its bytes come from another machine."""

import pytest

from headrace.machine.host import Mount, is_network, mount_of

TABLE = [
    Mount("/", "ext4", "/dev/vda1", "8:1"),
    Mount("/data", "nfs4", "server:/export", "0:40"),
    Mount("/data/fast", "xfs", "/dev/nvme0n1", "259:0"),
    Mount("/data/fast", "fuse.juicefs", "JuiceFS:fast", "0:51"),
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data", "nfs4"), ("/data/a/b", "nfs4"), ("/data/fast/x", "fuse.juicefs"),
        ("/database", "ext4"), ("/", "ext4"),
    ],
)  # fmt: skip
def test_the_deepest_mount_counts_and_of_two_the_one_on_top(path, kind):
    assert mount_of(path, TABLE).kind == kind


def test_where_no_mount_is_seen_there_is_none():
    assert mount_of("/data", []) is None


@pytest.mark.parametrize(
    ("kind", "source", "network"),
    [
        ("nfs4", "server:/export", True), ("lustre", "mgs@tcp:/scratch", True), ("ext4", "/dev/vda1", False),
        ("tmpfs", "tmpfs", False), ("fuse.juicefs", "JuiceFS:x", True), ("fuse", "gcsfuse", True),
        ("fuse.ntfs", "/dev/sdb1", False), ("overlay", "overlay", False),
    ],
)  # fmt: skip
def test_file_systems_of_other_machines_are_known(kind, source, network):
    assert is_network(kind, source) is network

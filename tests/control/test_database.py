"""The database: epochs fence controllers, policies and leases survive them."""

import os
import sqlite3
import subprocess
import sys

import pytest

from control.service import fill_up
from headrace.control.service.database import Database, Fenced
from headrace.errors import ControlError
from tests_shared import opened_to_others


def test_each_controller_has_a_larger_epoch_of_the_same_reign(tmp_path):
    seen = []
    for _ in range(3):
        database = Database(tmp_path / "c.db")
        seen.append((database.reign, database.epoch))
        database.close()
    assert [epoch for _, epoch in seen] == [1, 2, 3]
    assert len({reign for reign, _ in seen}) == 1


def test_two_controllers_cannot_have_one_database(tmp_path):
    database = Database(tmp_path / "c.db")
    with pytest.raises(ControlError, match=f"another controller rules.*{os.getpid()}"):
        Database(tmp_path / "c.db")
    assert database.epoch == 1
    database.save_leases([])
    database.close()


def test_where_locks_do_not_hold_the_epoch_does(tmp_path):
    first = Database(tmp_path / "c.db", lock=False)
    first.save_policy({"lease_s": 5}, "me", "now")
    second = Database(tmp_path / "c.db", lock=False)
    for write in (
        lambda: first.save_leases([]),
        lambda: first.save_policy({"lease_s": 6}, "me", "now"),
    ):
        with pytest.raises(Fenced, match="another controller rules by now, its epoch is 2"):
            write()
    assert second.policy() == (1, {"lease_s": 5})
    second.save_leases([{"name": "n"}])
    assert second.leases() == [{"name": "n"}]
    first.close()
    second.close()


def test_the_last_policy_and_its_version_survive(tmp_path):
    database = Database(tmp_path / "c.db")
    assert database.policy() == (0, {})
    for lease_s in (5, 6, 7):
        version = database.save_policy({"lease_s": lease_s}, "me", "now")
    database.close()
    database = Database(tmp_path / "c.db")
    assert database.policy() == (version, {"lease_s": 7}) == (3, {"lease_s": 7})
    database.close()


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path):
    (tmp_path / "c.db").write_bytes(b"not a database, but long enough to look at" * 100)
    before = (tmp_path / "c.db").read_bytes()
    with pytest.raises(ControlError, match="cannot be used: file is not a database"):
        Database(tmp_path / "c.db")
    assert (tmp_path / "c.db").read_bytes() == before


def test_a_database_of_another_schema_is_left_alone(tmp_path):
    Database(tmp_path / "c.db").close()
    with sqlite3.connect(tmp_path / "c.db") as connection:
        connection.execute("UPDATE about SET value = '99' WHERE key = 'schema'")
    connection.close()
    with pytest.raises(ControlError, match="schema 99, expected 1"):
        Database(tmp_path / "c.db")


def test_a_database_that_cannot_be_written_cannot_fence_so_nobody_rules(tmp_path):
    (tmp_path / "folder").mkdir()
    Database(tmp_path / "folder" / "c.db").close()
    code = (
        "import os, sys; from pathlib import Path\n"
        "from headrace.control.service.database import Database\n"
        "from headrace.errors import ControlError\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: Database(Path(sys.argv[1]))\n"
        "except ControlError as e: print(e)\n"
    )
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody who may only read")
    with opened_to_others(tmp_path / "folder/c.db", tmp_path / "folder/c.db-lock"):
        ended = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "folder/c.db"],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
    assert "the controller's database cannot be used" in ended.stdout, ended.stderr
    assert "--db FILE" in ended.stdout


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=False
    )
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_refuses_a_policy_and_keeps_the_one_before(small_disk):
    database = Database(small_disk / "c.db")
    database.save_policy({"lease_s": 5}, "me", "now")
    fill_up(small_disk / "filler")
    with pytest.raises(ControlError, match=r"cannot be written: .*full"):
        database.save_policy({"jobs": {str(i): {"weight": 2} for i in range(5000)}}, "me", "now")
    assert database.policy() == (1, {"lease_s": 5})
    (small_disk / "filler").unlink()
    assert database.save_policy({"lease_s": 6}, "me", "now") == 2
    database.close()

"""Whatever the moment of a kill, the newest whole checkpoint loads and is what was saved."""

import pytest

from checkpoint.killing import kill_and_load


def kill_often(tmp_path, kills, world_size=1, local=False):
    """Kills until so many came in the middle of a save; the others, between two saves, do not count.

    Returns what was seen, for a report.
    """
    folder = str(tmp_path / "target")
    near = str(tmp_path / "local") if local else None
    seen = []
    while sum(kill.saving for kill in seen) < kills and len(seen) < 3 * kills:
        number = len(seen)
        seen.append(kill_and_load(folder, near, number, number, world_size))
        assert seen[-1].newest >= (seen[-2].newest if number else 0)
    in_the_middle = sum(kill.saving for kill in seen)
    assert in_the_middle == kills
    # Steps went on between the kills, and some of what they met was cut off half-written.
    assert seen[-1].newest > 0
    assert any(kill.half for kill in seen)
    return {
        "kills": len(seen), "while saving": in_the_middle, "newest step": seen[-1].newest,
        "left half-written": sum(kill.half for kill in seen),
    }  # fmt: skip


def test_ten_kills_of_one_rank(tmp_path):
    kill_often(tmp_path, 10)


def test_five_kills_with_a_local_folder(tmp_path):
    kill_often(tmp_path, 5, local=True)


def test_five_kills_of_two_ranks(tmp_path):
    kill_often(tmp_path, 5, world_size=2)


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    """All of them while something is saved: by one rank, over a local folder, by two ranks."""
    print(kill_often(tmp_path / "one", 100))
    print(kill_often(tmp_path / "near", 50, local=True))
    print(kill_often(tmp_path / "two", 50, world_size=2))

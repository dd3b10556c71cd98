"""Whatever the moment of a kill, the newest whole checkpoint loads and is what was saved."""

import pytest

from checkpoint.killing import kill_and_load


def kill_often(tmp_path, kills, world_size=1, local=False):
    folder = str(tmp_path / "target")
    near = str(tmp_path / "local") if local else None
    steps, half = [0], 0
    for number in range(5 * kills):
        # Where the machine is busy, more kills until some have met a save.
        if number >= kills and steps[-1] >= kills / 4 and half >= kills / 10:
            break
        step, left = kill_and_load(folder, near, number, number, world_size)
        assert step >= steps[-1]
        steps.append(step)
        half += left
    # The kills must have met saves: steps went on, and some were cut off in the middle.
    assert steps[-1] >= kills / 4
    assert half >= kills / 10
    return steps[-1], half


def test_ten_kills_of_one_rank(tmp_path):
    kill_often(tmp_path, 10)


def test_five_kills_with_a_local_folder(tmp_path):
    kill_often(tmp_path, 5, local=True)


def test_five_kills_of_two_ranks(tmp_path):
    kill_often(tmp_path, 5, world_size=2)


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    print(kill_often(tmp_path / "one", 100))
    print(kill_often(tmp_path / "near", 50, local=True))
    print(kill_often(tmp_path / "two", 50, world_size=2))

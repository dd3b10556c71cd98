"""Order: what comes next is said right, found again, and never insisted on. Pure, no clock."""

import numpy as np
import pytest

from headrace.node.files.order import (
    NEVER,
    Epochs,
    Foresight,
    OrderFollower,
    given_order,
    read_order_file,
)
from headrace.order import Shuffled

FILES = 1000


def shuffled(seed, files=FILES):
    return np.random.default_rng(seed).permutation(files)


def interleaved(order, workers=4, batch=32, seed=1):
    """How workers of a loader open what one order gives them: a batch each, side by side."""
    rng = np.random.default_rng(seed)
    opened, batches = [], [list(order[at : at + batch]) for at in range(0, len(order), batch)]
    for at in range(0, len(batches), workers):
        group = batches[at : at + workers]
        while any(group):
            one = group[rng.integers(len(group))]
            if one:
                opened.append(one.pop(0))
    return np.array(opened)


def foreseen(foresight, opened, ahead=256, step=7):
    """Go through an epoch; the share of files that were said to come within the last opens."""
    predicted, hits = set(), 0
    for at in range(0, len(opened), step):
        predicted |= set(foresight.coming(ahead).tolist())
        now = opened[at : at + step]
        hits += sum(file in predicted for file in now.tolist())
        predicted -= set(now.tolist())
        foresight.note(now)
    return hits / len(opened)


def test_the_first_epochs_order_is_that_of_the_next_ones():
    foresight, order = Foresight(FILES), shuffled(1)
    assert foreseen(foresight, order) < 0.1
    assert foreseen(foresight, order) > 0.95
    assert foreseen(foresight, order) == 1.0
    assert (foresight.order, foresight.epochs, foresight.divergences) == ("learned", 2, 0)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_workers_that_open_side_by_side_do_not_disturb_it(workers):
    foresight, order = Foresight(FILES), shuffled(2)
    for epoch in range(4):
        share = foreseen(foresight, interleaved(order, workers, 16, epoch))
        assert epoch == 0 or share > 0.95
    assert foresight.divergences == 0


def test_files_opened_again_and_again_end_no_epoch():
    """An index that each sample opens, and each sample twice."""
    epochs, order = Epochs(FILES), shuffled(3)
    others = order[order != 7].tolist()
    ended = [epochs.note(np.array([7, file, file])) for file in 3 * others]
    epochs = [one for one in ended if one is not None]
    assert len(epochs) == 2
    for one in epochs:
        assert one[one != 7].tolist() == order[order != 7].tolist()


def test_another_order_each_epoch_is_noticed_soon_and_said():
    foresight = Foresight(FILES)
    for epoch in range(4):
        assert foreseen(foresight, shuffled(10 + epoch), ahead=32) < 0.1
    assert foresight.order == ""
    assert foresight.divergences == 3


def test_a_program_that_leaves_the_order_is_found_where_it_goes_on():
    order = shuffled(4)
    follower = OrderFollower(FILES, lambda _: order, following=True)
    follower.note(order[:100])
    follower.note(np.array([order[(k * 379) % FILES] for k in range(200, 240)]))
    assert not follower.following
    follower.note(order[600:620])
    assert follower.following
    assert follower.head == 620
    assert follower.coming(5).tolist() == order[620:625].tolist()


def test_an_epoch_that_is_broken_off_begins_anew():
    order = shuffled(5)
    follower = OrderFollower(FILES, lambda _: order, following=True)
    follower.note(order[:500])
    for at in range(0, 60, 5):
        follower.note(order[at : at + 5])
    assert follower.following
    assert follower.head == 60


def test_a_seed_foresees_all_epochs():
    foresight = Foresight(FILES, given_order(FILES, seed=9))
    truth = Shuffled(FILES, seed=9)
    for epoch in range(3):
        assert foreseen(foresight, interleaved(truth.indices(epoch, 0, FILES))) > 0.95
    assert (foresight.order, foresight.divergences) == ("seed", 0)


def test_sorted_opens_are_recognised_in_the_first_epoch():
    foresight = Foresight(FILES)
    assert foreseen(foresight, np.arange(FILES)) > 0.9
    assert foresight.order == "sorted"


def test_a_wrong_order_is_given_up_for_what_was_learned():
    foresight = Foresight(FILES, given_order(FILES, (shuffled(6),)))
    order = shuffled(7)
    foreseen(foresight, order)
    assert foresight.divergences == 1
    assert foreseen(foresight, order) > 0.95
    assert foresight.order == "learned"


def test_an_earlier_runs_order_serves_the_first_epoch():
    order = shuffled(8)
    foresight = Foresight(FILES, earlier=order)
    assert foreseen(foresight, order) > 0.9
    assert foresight.order == "earlier run"


def test_how_soon_a_file_is_needed_again():
    order = shuffled(9)
    follower = OrderFollower(FILES - 1, lambda _: order[order < FILES - 2], following=True)
    order = order[order < FILES - 2]
    for at in range(0, 300, 10):
        follower.note(order[at : at + 10])
    files = np.array([order[310], order[290], order[0], FILES - 2])
    assert follower.until(files).tolist() == [10, len(order) - 10, len(order) - 300, NEVER]
    assert follower.until(files, grace=20).tolist()[1:3] == [0, len(order) - 300]


def test_files_that_are_in_no_order_are_left_alone():
    follower = OrderFollower(FILES, lambda _: np.arange(10), following=True)
    follower.note(np.arange(500, 600))
    assert not follower.following
    assert follower.until(np.array([5, 999])).tolist() == [5, NEVER]
    assert Foresight(0).coming(5).tolist() == []


def test_an_order_file_has_epochs_and_unknown_lines(tmp_path):
    names = [b"/data/a", b"/data/b/c", b"/data/d"]
    lines = [b"/data/d", b"a", b"nothing", b"", b"b//c", b"/link/a", b"/link/d\r", b"x" * 10000]
    path = tmp_path / "order"
    path.write_bytes(b"\n".join(lines))
    roots = [(b"/data", b"/data"), (b"/link", b"/data")]
    order_file = read_order_file(
        bytes(path), roots, lambda name: names.index(name) if name in names else -1, 3
    )
    assert [epoch.tolist() for epoch in order_file.epochs] == [[2, 0, 1], [0, 2]]
    assert (order_file.unknown, order_file.first_unknown) == (2, b"nothing")

"""The accuracy benchmark: its orders deliver every sample, its statistics are what they say."""

import numpy as np
import pytest
from benchmarks.accuracy import BATCH, OPTIMISERS, PAIR, orders, packed, ranks, spearman, summary


@pytest.mark.parametrize("n", [257, 1438])
def test_every_order_delivers_each_sample_once(n):
    given = orders(n, 7)
    assert set(PAIR) <= given.keys()
    for _, order in given.values():
        for epoch in range(5):
            assert np.array_equal(np.sort(order.indices(epoch, 0, n)), np.arange(n))
    same = given["opportunistic, same part always"][1]
    firsts = [set(same.indices(epoch, 0, n // 2)) for epoch in range(3)]
    assert firsts == [set(range(n // 2))] * 3
    assert len({tuple(same.indices(epoch, 0, n)) for epoch in range(3)}) == 3


def test_both_packs_hold_the_same_samples_and_one_is_mixed(tmp_path):
    labels = np.arange(640) % 10
    pictures = np.stack([labels, np.arange(640)], axis=1).astype(np.float32)
    packs = packed(tmp_path, (pictures, labels), 5)
    for pack in packs.values():
        assert np.array_equal(pack.samples[:, 0], pack.labels)
        assert np.array_equal(np.sort(pack.samples[:, 1]), np.arange(640))
    assert np.array_equal(packs["sorted"].labels, np.sort(labels))
    blocked = orders(640, 1)["blocked 32 x 4"][1]
    mixes = {name: blocked.label_mix(each.labels, BATCH).distance for name, each in packs.items()}
    assert mixes["sorted"] > 0.3
    assert abs(mixes["shuffled"]) < 0.1


def test_correlations_and_pairs():
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [2.5, 0, 2.5, 1]
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)
    titles = list(orders(64, 1))
    runs = [
        {"set": "s", "optimiser": optimiser, "order": title, "seed": seed,
         "accuracy": 0.9 - mix / 20 + seed / 1000, "label_mix": mix, "entropy_share": 1 - mix / 20,
         "level": 1.0 - mix / 30}
        for optimiser in OPTIMISERS for seed in (1, 2) for mix, title in enumerate(titles)
    ]  # fmt: skip
    pairs = [{**run, "seed": 3} for run in runs if run["seed"] == 1 and run["order"] in PAIR]
    results = summary(runs, pairs)
    for correlations in results["spearman"].values():
        assert correlations["label_mix"] == pytest.approx(1)
    (cell, _) = results["shuffled_pack"].values()
    assert cell["seeds"] == 3
    assert cell["points"] == pytest.approx(-5 * titles.index(PAIR[1]))

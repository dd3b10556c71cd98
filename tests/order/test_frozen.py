"""Sequences stay what they are: states that older versions saved go on in the same order."""

import numpy as np
import pytest

from headrace.order import (
    Balanced,
    Blocked,
    Opportunistic,
    Sequential,
    Shuffled,
    combine_hashes,
    order_hash,
)

EPOCHS = (0, 1, 2, 3, 2**32 - 1)
NEAR = tuple((start, start + 1_700) for start in range(900, 100_000, 20_000))

# Order hashes of these epochs, as version 0.1 made them in numpy.
FROZEN = [
    (Sequential(97), "a92c4f1f373a78db"),
    (Shuffled(97, seed=5), "b2d3f97cda2fa7f8"),
    (Shuffled(100_003, seed=2**64 - 1), "def2b769448ae321"),
    (Blocked(1, 1, 1), "5694b012005633a8"),
    (Blocked(97, 8, 3, seed=5), "705f321ca3e0ab68"),
    (Blocked(1_000, 10, 10_000, seed=1), "3fac94126b918f8f"),
    (Blocked(5_003, 1, 1, seed=3), "f9cc20ad0276f5b7"),
    (Blocked(20_011, 4_999, 2, seed=4), "6c80cc9aed9b5387"),
    (Blocked(100_003, 64, 5, seed=2**64 - 1), "daf00eae48654484"),
    (Opportunistic(1, ((0, 1),)), "5694b012005633a8"),
    (Opportunistic(97, (), seed=5, epochs=3), "b2d3f97cda2fa7f8"),
    (Opportunistic(97, ((3, 10), (10, 12), (60, 97)), seed=5), "2b8e77e1b2804672"),
    (Opportunistic(97, ((3, 10), (60, 71)), seed=5, epochs=9), "effdbf0150e1b6b7"),
    (Opportunistic(100_003, NEAR, seed=2**64 - 1, epochs=4), "c96711f88ed0fff3"),
    (Balanced([7]), "5694b012005633a8"),
    (Balanced(np.arange(97) % 7 - 1, seed=5), "62ada9ced715ae41"),
    (Balanced([5, -1, -7, 5, 2], seed=1, epoch_length=31), "b4163f5ad166fcb2"),
    (Balanced(np.arange(30_011) ** 2 % 5_003, seed=6), "d6ffa62d2d248872"),
    (Balanced(np.arange(50_021) % 6 // 5, seed=2**64 - 1), "1ca411859925b845"),
]


@pytest.mark.parametrize(("order", "frozen"), FROZEN, ids=lambda each: str(each)[:60])
def test_an_order_gives_what_it_always_gave(order, frozen):
    epochs = [order.indices(epoch, 0, order.length) for epoch in EPOCHS]
    hashes = [order_hash(i * order.length, epoch) for i, epoch in enumerate(epochs)]
    assert f"{combine_hashes(*hashes):016x}" == frozen


@pytest.mark.parametrize(
    ("order", "frozen"),
    [
        (Blocked(2**48 - 5, 1 << 10, 1 << 30, seed=2), "657765821cb10f6c"),
        (Blocked(2**48, 2**48, 2**48, seed=2), "ae4fab553de11870"),
        (Opportunistic(2**48 - 5, ((2**40, 2**46),), seed=2, epochs=3), "e37b170509dcc137"),
    ],
    ids=str,
)
def test_the_largest_data_have_the_sequences_that_they_always_had(order, frozen):
    starts = (0, 2**46 - 5_000, 2**47, order.length - 10_000)
    pieces = [(start, order.indices(1, start, start + 10_000)) for start in starts]
    assert f"{combine_hashes(*(order_hash(*piece) for piece in pieces)):016x}" == frozen

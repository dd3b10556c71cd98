"""Loaders that go wrong in one way each: the harness must notice every one of them."""

from benchmarks.loaders.openread import OpenRead


class Duplicates(OpenRead):
    """Delivers one sample twice, in different batches."""

    def batches(self, seed):
        first = None
        for batch in super().batches(seed):
            first = first or batch[0]
            yield [first, *batch[1:]]


class DuplicateInBatch(OpenRead):
    """Delivers one sample twice in one batch."""

    def batches(self, seed):
        for batch in super().batches(seed):
            yield [batch[1], *batch[1:]]


class Truncates(OpenRead):
    """Loses the last byte of one sample."""

    def batches(self, seed):
        for batch in super().batches(seed):
            yield [batch[0][:-1], *batch[1:]]


class Swaps(OpenRead):
    """Delivers the head of one sample with the rest of another."""

    def batches(self, seed):
        for batch in super().batches(seed):
            yield [batch[0][:8] + batch[1][8:], *batch[1:]]


class Empties(OpenRead):
    """Delivers an empty sample."""

    def batches(self, seed):
        for batch in super().batches(seed):
            yield [b"", *batch[1:]]


class EndsEarly(OpenRead):
    """Ends the epoch after one batch."""

    def batches(self, seed):
        yield next(iter(super().batches(seed)))


class Dies(OpenRead):
    """Raises in mid-epoch."""

    def batches(self, seed):
        yield next(iter(super().batches(seed)))
        raise RuntimeError("the reader is gone")

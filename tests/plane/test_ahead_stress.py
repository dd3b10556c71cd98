"""Read-aheads that are opened, turned and closed while reads are pending end, and lose nothing."""

import builtins
import random
import threading

import pytest

from headrace.io.replaced import real_open
from headrace.plane.read_ahead import ReadAhead, ReadAheadOptions
from headrace.testing import Simulation, simulated_files
from plane.ahead_files import Listed, content, make_files

COUNT = 60
SLOW = Simulation(name="uneven", latency_s=3e-4, latency_p99_s=5e-3, open_s=2e-4, open_p99_s=5e-3)


@pytest.fixture
def paths(tmp_path):
    return make_files(tmp_path / "files", COUNT)


def run(paths: list[str], seed: int) -> int:
    """A few read-aheads in random states; returns how many were closed with reads pending."""
    chance = random.Random(seed)
    dataset, pending = Listed(paths), 0
    for _ in range(8):
        options = ReadAheadOptions(
            reads_in_flight=chance.randint(1, 24),
            buffer_bytes=chance.choice([64 << 10, 256 << 10, 4 << 20]),
            bypass=chance.random() < 0.5,
        )
        ahead = ReadAhead.for_dataset(dataset, options)
        order = chance.choices(range(COUNT), k=chance.randint(1, 2 * COUNT))
        ahead.coming(order)
        for i in order[: chance.randint(0, len(order))]:
            if chance.random() < 0.05:
                ahead.turn({"reads_in_flight": chance.randint(1, 24)})
            with ahead.sample(i):
                assert dataset[i] == content(i)
        pending += bool(ahead.planned)
        assert ahead.close(20)
        assert ahead.coming(order) == 0
        assert dataset[3] == content(3)
    return pending


@pytest.mark.parametrize("simulated", [False, True], ids=["real", "simulated"])
def test_closing_in_any_state_ends(paths, tmp_path, simulated):
    def work(seed):
        try:
            counts.append(run(paths, seed))
        except BaseException as error:
            errors.append(error)
            raise

    counts: list[int] = []
    errors: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    if simulated:
        with simulated_files(SLOW, tmp_path / "files") as slow:
            join(threads)
            assert slow.stats()["requests"] > 0
    else:
        join(threads)
    assert not errors
    assert sum(counts) > 3, "hardly a read-ahead was closed with reads pending"
    assert builtins.open is real_open


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()

"""Files on a simulated storage are read ahead at its pace, and answer as the real ones do."""

import builtins
import io
import os

import pytest

from headrace.io.replaced import real_open
from headrace.plane.read_ahead import ReadAhead, ReadAheadOptions
from headrace.testing import Simulation, SlowVolume, simulated_files
from plane.ahead_files import Listed, content, make_files, serve

COUNT = 40
QUICK = Simulation(name="quick", latency_s=1e-4, open_s=1e-4)


@pytest.fixture
def paths(tmp_path):
    return make_files(tmp_path / "files", COUNT)


def test_reading_ahead_pays_a_look_an_open_and_the_reads_of_each_file(paths, tmp_path):
    dataset, slow = Listed(paths), SlowVolume(QUICK)
    with simulated_files(slow, tmp_path / "files"):
        simulated = builtins.open
        with ReadAhead.for_dataset(dataset) as ahead:
            assert serve(ahead, dataset, range(COUNT)) == [content(i) for i in range(COUNT)]
            assert ahead.figures.served == COUNT
            stats = ahead.stats()
            assert stats.simulation == "simulated quick"
            assert not ahead.bypassed
        assert builtins.open is io.open is simulated
    assert builtins.open is io.open is real_open
    assert stats.bytes_by_tier == {"page_cache": 0, "source": stats.bytes}
    assert slow.stats()["requests"] == 3 * COUNT
    assert slow.stats()["bytes"] == stats.bytes
    # 200 us lie in bucket 15 (181 to 256 us): no read is faster than its open and its first byte.
    assert sum(stats.latency_us[:15]) == 0


def test_other_folders_and_later_readers_are_as_fast_as_they_are(paths, tmp_path):
    (tmp_path / "other").mkdir()
    slow = SlowVolume(QUICK)
    plain = ReadAheadOptions(bypass=False)
    dataset = Listed(paths)
    with simulated_files(slow, tmp_path / "other"), ReadAhead.for_dataset(dataset, plain) as ahead:
        serve(ahead, dataset, range(COUNT))
        assert ahead.figures.served == COUNT
    with ReadAhead.for_dataset(dataset, plain) as ahead:
        serve(ahead, Listed(paths), range(COUNT))
        assert ahead.figures.served == COUNT
        assert not ahead.stats().simulation
    assert slow.stats()["requests"] == 0


def test_a_file_that_is_not_planned_takes_its_time_too(paths, tmp_path):
    slow = SlowVolume(QUICK)
    with simulated_files(slow, tmp_path / "files"), ReadAhead.for_dataset(Listed(paths)) as ahead:
        serve(ahead, Listed(paths), [0])
        before = slow.stats()["requests"]
        assert Listed(paths)[1] == content(1)
        assert slow.stats()["requests"] == before + 2


def test_a_simulated_error_is_left_to_the_datasets_own_open(paths, tmp_path):
    broken = Simulation(name="broken", latency_s=1e-4, error_rate=1.0)
    with simulated_files(broken, tmp_path / "files") as slow:
        with ReadAhead.for_dataset(Listed(paths), ReadAheadOptions(learn=False)) as ahead:
            with pytest.raises(OSError, match="simulated broken"):
                serve(ahead, Listed(paths), [3])
            assert ahead.figures.changed == 1
        assert slow.stats()["errors"] >= 2


def test_a_link_into_a_slow_folder_is_slow(paths, tmp_path):
    os.symlink(paths[5], tmp_path / "link")
    with simulated_files(QUICK, tmp_path / "files") as slow:
        with ReadAhead.for_dataset(Listed([str(tmp_path / "link")])) as ahead:
            assert serve(ahead, Listed([str(tmp_path / "link")]), [0]) == [content(5)]
        assert slow.stats()["requests"] == 3

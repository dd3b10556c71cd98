"""Knobs of the native reader are turned while it reads, and its statistics add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import headrace as hr
from headrace.config import EngineName, ReaderOptions, reader_options
from headrace.order import Shuffled
from headrace.plane.pipeline import Pipeline
from plane.ahead_files import drop_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SAMPLES = 300
BYTES = 3000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hr.Store]:
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(SAMPLES):
        (folder / f"{i:04}").write_bytes(i.to_bytes(4, "little") * (BYTES // 4))
    hr.pack(folder, tmp_path / "packed")
    with hr.open(tmp_path / "packed") as opened:
        yield opened


def deliver(reader: Pipeline, store: hr.Store, size: int = 10) -> list[int]:
    order = Shuffled(len(store), seed=3)
    spans = [(at, at + size) for at in range(0, len(store), size)]
    return [int(i) for fetched in reader.stream(order, 0, spans) for i in fetched.batch.indices]


def test_statistics_count_what_was_read_and_delivered(store: hr.Store) -> None:
    reader = Pipeline(store, ReaderOptions(engine="threads", direct="never"))
    assert reader.native_stats() == {}
    assert sorted(deliver(reader, store)) == list(range(SAMPLES))
    stats = reader.native_stats()
    assert stats["delivered_samples"] == SAMPLES
    assert stats["delivered_bytes"] == SAMPLES * BYTES
    assert stats["reads"] == sum(stats["latency_us"]) > 0
    assert len(stats["latency_us"]) == 64
    assert stats["bytes_by_tier"] == {"page_cache": 0, "source": stats["read_bytes"]}
    assert stats["read_bytes"] >= SAMPLES * BYTES
    assert stats["in_flight_s"] > 0
    assert stats["busy_s"] > 0
    assert (stats["in_flight"], stats["buffered_bytes"], stats["ready_bytes"]) == (0, 0, 0)
    reader.close()


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_files_of_a_folder_are_told_to_lie_in_the_page_cache(
    store: hr.Store, tmp_path: Path, engine: EngineName
) -> None:
    """`store` has read them all."""
    with hr.open(tmp_path / "files") as files:
        reader = Pipeline(files, ReaderOptions(engine=engine))
        deliver(reader, files)
        assert reader.native_stats()["bytes_by_tier"] == {"page_cache": files.nbytes, "source": 0}
        reader.close()
        for path in (tmp_path / "files").iterdir():
            drop_pages(str(path))
        reader = Pipeline(files, ReaderOptions(engine=engine))
        deliver(reader, files)
        tiers = reader.native_stats()["bytes_by_tier"]
        reader.close()
    assert tiers["source"] > 0.9 * files.nbytes  # but for what the kernel could not drop


def test_turned_knobs_outlive_the_reader_that_had_them(store: hr.Store) -> None:
    reader = Pipeline(store, ReaderOptions(engine="threads", direct="never"))
    reader.turn({"reads_in_flight": 10})  # before there is one
    assert sorted(deliver(reader, store, size=1)) == list(range(SAMPLES))
    stats = reader.native_stats()
    # A batch of one read: four of them under way for each read in flight, and one more.
    assert (stats["reads_in_flight"], stats["workers"]) == (10, 41)
    reader.turn({"buffer_bytes": 1 << 20})
    reader.close()
    assert sorted(deliver(reader, store)) == list(range(SAMPLES))
    stats = reader.native_stats()
    assert (stats["reads_in_flight"], stats["buffer_bytes"]) == (10, 1 << 20)
    with pytest.raises(ValueError, match="reads_in_flight is 0"):
        reader.turn({"reads_in_flight": 0})
    reader.close()


def test_reads_never_outnumber_the_knob(store: hr.Store) -> None:
    options, origins = reader_options({}, {"HEADRACE_READS_IN_FLIGHT": "3"})
    assert origins["reads_in_flight"] == "environment"
    reader = Pipeline(store, options)
    reader.fetch(np.arange(SAMPLES))
    assert reader.native_stats()["in_flight_most"] <= 3
    reader.close()
    with pytest.raises(ValueError, match="reads_in_flight is 0"):
        ReaderOptions(reads_in_flight=0)

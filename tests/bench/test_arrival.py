"""When a batch was there, as the native engines say it: not when somebody looked; and who read it."""

import time
from types import SimpleNamespace

import pytest

from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.dataset_files import find_files, generate
from headrace.bench.engines import EngineContext, make_engine
from headrace.bench.run import SessionOptions, plans_of, run_epochs
from tests_shared import until


def data_set(folder, samples_per_file):
    """A workload of eight files, and them."""
    loaded = load_workload(parse_command_line([
        "workload=unet3d_h100", "++workload.dataset.num_files_train=8", "++workload.reader.batch_size=4",
        f"++workload.dataset.num_samples_per_file={samples_per_file}",
        "++workload.dataset.record_length_bytes=4096", "++workload.dataset.record_length_bytes_stdev=0",
        f"++workload.dataset.data_folder={folder}", "++workload.dataset.format=npy",
    ]))  # fmt: skip
    generate(loaded.workload.dataset)
    time.sleep(0.03)  # files of the clock's last tick are read again
    return loaded, {"train": find_files(loaded.workload.dataset, "train")}


def engine_of(loaded, files, accelerators):
    plans = plans_of(loaded, accelerators)
    return make_engine("headrace", EngineContext(loaded.workload, plans, files, accelerators))


def test_accelerators_of_a_process_read_as_ranks_do(tmp_path):
    """Each by itself: a file that opens slowly holds up the batches of one."""
    engine = engine_of(*data_set(tmp_path, 1), 2)
    try:
        sources = [engine.open("train", 1, accelerator) for accelerator in range(2)]
        assert sources[0].ask()
        until(lambda: sources[0]._pending[0][0].done)
        assert [reader.stats()["reads"] for reader in engine._readers] == [4, 0]
        assert sources[1].next().nbytes > 4 * 4096
        figures = engine.figures()
        assert (figures["reads"], sum(figures["latency_us"])) == (8, 8)
        assert figures["bytes"] == sum(figures["bytes_by_tier"].values()) > 8 * 4096
        for source in sources:
            source.close()
    finally:
        engine.close()


def test_a_simulated_storage_delays_each_rank_by_itself(tmp_path, monkeypatch):
    seeds = []

    def stop(_, context):
        seeds.append(context.simulate.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.bench.run.make_engine", stop)
    loaded, files = data_set(tmp_path, 1)
    for rank in range(2):
        group = SimpleNamespace(place=SimpleNamespace(rank=rank, world_size=2))
        with pytest.raises(KeyboardInterrupt):
            run_epochs(loaded, SessionOptions(simulate="lustre@7"), group, files)
    assert seeds == [7, 8]


@pytest.mark.parametrize("samples_per_file", [1, 4])
def test_a_batch_was_there_before_it_was_looked_for(tmp_path, samples_per_file):
    engine = engine_of(*data_set(tmp_path, samples_per_file), 1)
    try:
        source = engine.open("train", 1, 0)
        began = time.perf_counter()
        assert source.ask()
        until(lambda: source._pending[0][0].done)
        seen = time.perf_counter()
        time.sleep(0.005)
        assert began < source.next().at_s <= seen
        source.close()
    finally:
        engine.close()

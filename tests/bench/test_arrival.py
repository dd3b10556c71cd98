"""When a batch was there, as the native engines say it: not when somebody looked."""

import time

import pytest

from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.dataset_files import find_files, generate
from headrace.bench.engines import EngineContext, make_engine
from headrace.bench.run import plans_of
from tests_shared import until


@pytest.mark.parametrize("samples_per_file", [1, 4])
def test_a_batch_was_there_before_it_was_looked_for(tmp_path, samples_per_file):
    loaded = load_workload(parse_command_line([
        "workload=unet3d_h100", "++workload.dataset.num_files_train=8", "++workload.reader.batch_size=4",
        f"++workload.dataset.num_samples_per_file={samples_per_file}",
        "++workload.dataset.record_length_bytes=4096", "++workload.dataset.record_length_bytes_stdev=0",
        f"++workload.dataset.data_folder={tmp_path}", "++workload.dataset.format=npy",
    ]))  # fmt: skip
    generate(loaded.workload.dataset)
    time.sleep(0.03)  # files of the clock's last tick are read again
    files = {"train": find_files(loaded.workload.dataset, "train")}
    context = EngineContext(loaded.workload, plans_of(loaded, 1), files, 1)
    engine = make_engine("headrace", context)
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

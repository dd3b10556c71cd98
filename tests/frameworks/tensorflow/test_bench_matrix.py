"""Every shipped workload, scaled down, runs with the engine tensorflow in every format. See tests/bench."""

import pytest

from bench.scaled import (
    EPOCHS,
    FILES,
    SAMPLE_BYTES,
    DataSets,
    check_run,
    matrix,
    samples_per_file,
    workload_of,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return DataSets(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(("workload", "form"), matrix())
def test_tensorflow_runs_it(data, tmp_path, workload, form):
    nbytes = check_run(workload, form, "tensorflow", data.folder(workload, form), tmp_path)
    samples = FILES * samples_per_file(workload, form) * EPOCHS
    columns = workload_of(workload).dataset.parquet.columns
    if form == "synthetic" or (form == "parquet" and columns):
        assert nbytes > 0  # a file's number; the columns that are read
    elif workload_of(workload).workflow.evaluation:  # two samples, after each epoch
        assert nbytes == (samples + 2 * EPOCHS) * SAMPLE_BYTES
    else:
        assert nbytes == samples * SAMPLE_BYTES

"""Every shipped workload, scaled down, runs end to end with every engine in every format, or is refused.

TensorFlow's part is in tests/frameworks/tensorflow/test_bench_matrix.py, where TensorFlow is.
"""

import numpy as np
import pytest

from headrace.bench import engines
from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.dataset_files import find_files
from headrace.bench.formats import format_of
from headrace.bench.run import SessionOptions
from headrace.bench.session import run_session
from headrace.errors import BenchError, WorkloadError

from .scaled import (
    BATCH,
    EPOCHS,
    FAMILIES,
    FILES,
    FORMATS,
    GENERATE,
    SAMPLE_BYTES,
    DataSets,
    WholeFiles,
    check_run,
    matrix,
    samples_per_file,
    scaled,
    training_workloads,
    workload_of,
)
from .test_mlpstorage import TINY

CUSTOM = f"custom:{WholeFiles.__module__}:{WholeFiles.__name__}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return DataSets(tmp_path_factory.mktemp("matrix"))


def test_every_family_is_shipped_and_every_format_is_some_workloads_or_tried():
    assert set(FAMILIES) <= set(training_workloads())
    assert {form for _, form in matrix()} == set(FORMATS)


@pytest.mark.parametrize(("workload", "form"), matrix())
def test_headrace_runs_it(data, tmp_path, workload, form):
    nbytes = check_run(workload, form, "headrace", data.folder(workload, form), tmp_path)
    columns = workload_of(workload).dataset.parquet.columns
    if form == "synthetic" or (form == "parquet" and columns):
        assert nbytes > 0  # a file's number; the columns that are read
    elif form not in ("csv", "jpeg", "png"):
        samples = FILES * samples_per_file(workload, form) * EPOCHS
        assert nbytes >= samples * SAMPLE_BYTES


@pytest.mark.parametrize(("workload", "form"), matrix())
def test_torch_runs_it(data, tmp_path, workload, form, monkeypatch):
    pytest.importorskip("torch")
    asked = []
    real = engines.DecodedSamples.__getitem__
    monkeypatch.setattr(
        engines.DecodedSamples,
        "__getitem__",
        lambda s, i: (asked.append(int(i)), real(s, i))[1],
    )
    check_run(workload, form, "torch", data.folder(workload, form), tmp_path)
    samples = FILES * samples_per_file(workload, form)
    if workload_of(workload).workflow.evaluation:  # of two samples, too
        asked = [i for epoch in range(EPOCHS) for i in asked[epoch * (samples + 2) :][:samples]]
    assert sorted(asked) == sorted([*range(samples // BATCH * BATCH)] * EPOCHS)


@pytest.mark.parametrize(("workload", "form"), matrix())
def test_a_custom_engine_runs_it(data, tmp_path, workload, form):
    folder = data.folder(workload, form)
    check_run(workload, form, CUSTOM, folder, tmp_path)
    written = {path.name for path in (folder / "data/train").rglob(f"*.{form}")}
    assert len(written) == FILES
    assert written <= WholeFiles.seen


@pytest.mark.parametrize(
    ("generating", "training"),
    [("unet3d_datagen", "unet3d_h100"), ("resnet50_datagen", "resnet50_h100"),
     ("cosmoflow_datagen", "cosmoflow_h100"), ("retinanet_datagen", "retinanet_b200"),
     ("flux_datagen", "flux_b200"), ("dlrm_datagen", "dlrm_b200")],
)  # fmt: skip
def test_generating_workloads_write_what_the_others_read(tmp_path, generating, training):
    form = workload_of(generating).dataset.format
    words = scaled(generating, form, tmp_path, tmp_path / "out", *GENERATE)
    assert run_session(words).summary is None
    check_run(training, form, "headrace", tmp_path, tmp_path / "run")


@pytest.mark.parametrize("form", ["jpeg", "png"])
@pytest.mark.parametrize("engine", ["headrace", "torch", "tensorflow", CUSTOM])
def test_images_hold_one_sample(tmp_path, form, engine):
    words = scaled("resnet50_h100", form, tmp_path, tmp_path / "out", *GENERATE,
                   f"++workload.reader.engine={engine}",
                   "++workload.dataset.num_samples_per_file=3")  # fmt: skip
    with pytest.raises(WorkloadError, match=f"num_samples_per_file=3: .*a {form} is one sample"):
        run_session(words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ["torch", "tensorflow", "null"])
def test_a_storage_is_simulated_for_none_that_reads_by_itself(data, tmp_path, engine):
    """It would be called simulated, and nothing would be slower."""
    folder = data.folder("default", "npz")
    words = scaled("default", "npz", folder, tmp_path, f"++workload.reader.engine={engine}")
    with pytest.raises(BenchError, match=f"cannot be simulated for the engine {engine}"):
        run_session(words, SessionOptions(simulate="nfs"))


@pytest.mark.parametrize(
    ("form", "more", "message"),
    [
        ("jpeg", ["dataset.record_dims=[4,5,6]"], "jpeg format does not support more than 2 dimensions"),
        ("npy", ["dataset.compression=zip"], "expected one of none"),
        ("tfrecord", ["dataset.compression=gzip"], "expected one of none"),
        ("hdf5", ["dataset.hdf5.num_dset_per_record=3"], r"expected a divisor of record_dims\[0\]"),
        ("npz", ["dataset.record_dims=[4]", "dataset.record_length_bytes_stdev=3"],
         "expected 0 with record_dims"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold_is_refused(tmp_path, form, more, message):
    given = [f"++workload.{word}" for word in more]
    with pytest.raises(WorkloadError, match=message):
        run_session(scaled("default", form, tmp_path, tmp_path / "out", *given))


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "synthetic"])
def test_what_is_read_is_what_was_generated(data, form):
    """No sample twice, none of another's bytes: the decoded samples of all files differ."""
    folder = data.folder("default", form)
    words = scaled("default", form, folder, folder / "generated")
    spec = load_workload(parse_command_line(words)).workload.dataset
    seen = []
    for path in find_files(spec, "train"):
        samples = (
            format_of(spec).read_sample(path, spec, i) for i in range(spec.num_samples_per_file)
        )
        seen += [np.asarray(sample).tobytes() for sample in samples]
    assert len(set(seen)) == len(seen) == FILES
    assert {len(each) for each in seen} == {SAMPLE_BYTES}


@pytest.mark.parametrize("engine", ["torch", "tensorflow", CUSTOM])
def test_checkpoints_alone_need_no_engine_and_say_so(tmp_path, engine):
    report = run_session([
        "workload=llama_7b", *TINY, f"++workload.reader.engine={engine}",
        "++workload.dataset.format=npz", "++workload.checkpoint.num_checkpoints_write=1",
        "++workload.checkpoint.num_checkpoints_read=1", "++workload.checkpoint.time_between_checkpoints=0",
        f"++hydra.run.dir={tmp_path / 'out'}",
        f"++workload.checkpoint.checkpoint_folder={tmp_path / 'checkpoints'}",
    ])  # fmt: skip
    assert report.summary["metric"]["load_checkpoint_duration_mean_seconds"] > 0
    assert [note.split("workload.")[1].split("=")[0] for note in report.notes] == [
        "reader.engine", "dataset.format"
    ]  # fmt: skip
    assert all("has no effect: no data set is read" in note for note in report.notes)

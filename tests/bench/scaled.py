"""The shipped workloads, scaled down by overrides: tiny data, no computation; for every engine and format."""

import functools
import json
import os
from pathlib import Path

import numpy as np

from headrace.bench.config import load_workload, parse_command_line, shipped_workloads
from headrace.bench.dataset import DatasetSpec
from headrace.bench.session import run_session
from headrace.bench.values import build, keys_of

FORMATS = (
    "npz", "npy", "hdf5", "tfrecord", "jpeg", "png", "csv", "indexed_binary", "mmap_indexed_binary",
    "parquet", "synthetic",
)  # fmt: skip

FAMILIES = (
    "unet3d_h100", "resnet50_h100", "cosmoflow_h100", "bert_v100", "dlrm", "dlrm_b200",
    "megatron_deepspeed_LLNL", "retinanet_b200", "flux_b200", "default",
)  # fmt: skip
"""One of those that differ only in what scaling down overrides: batch, step time, epochs."""

FILES, BATCH, EPOCHS, SAMPLE_BYTES = 6, 2, 2, 900


def spec_of(section):
    """The data set of a section `dataset`; ValueError as in a workload, KeyError for unknown keys."""
    flat, keys = dict(section), keys_of(DatasetSpec)
    for name in {"hdf5", "parquet"} & flat.keys():
        flat |= {f"{name}.{key}": value for key, value in flat.pop(name).items()}
    seed = {"seed": flat.pop("seed")} if "seed" in flat else {}
    return build(DatasetSpec, {k: keys[k].value(f"dataset.{k}", v) for k, v in flat.items()} | seed)


@functools.cache
def workload_of(name):
    return load_workload(parse_command_line([f"workload={name}"])).workload


def training_workloads():
    """Those that read data; the others generate some, or write checkpoints."""
    return [name for name in shipped_workloads() if workload_of(name).workflow.train]


def matrix():
    """(workload, format): every family in every format, every other workload in its own."""
    return [
        (name, form)
        for name in training_workloads()
        for form in (FORMATS if name in FAMILIES else (workload_of(name).dataset.format,))
    ]


def samples_per_file(workload, form):
    """Several where the workload has several and the format can hold them."""
    many = workload_of(workload).dataset.num_samples_per_file > 1
    return 3 if many and form not in ("jpeg", "png") else 1


def scaled(workload, form, folder, out, *more):
    """The command line of a scaled down run: data in `folder`, results in `out`."""
    words = {
        "dataset.format": form, "dataset.num_files_train": FILES, "dataset.num_files_eval": 2,
        "dataset.num_samples_per_file": samples_per_file(workload, form),
        "dataset.record_length_bytes": SAMPLE_BYTES, "dataset.record_length_bytes_stdev": 0,
        "dataset.record_length_bytes_resize": 400, "dataset.data_folder": folder / "data",
        "reader.batch_size": BATCH, "reader.batch_size_eval": 1, "reader.read_threads": 0,
        "train.computation_time": 0, "train.epochs": EPOCHS, "train.total_training_steps": -1,
        "evaluation.eval_time": 0, "workflow.checkpoint": False,
        "storage.storage_type": "local_fs", "storage.storage_root": ".",
    }  # fmt: skip
    if workload.startswith("flux"):  # a row of the real one has two megabytes
        columns = "[{name: t5, dtype: float32, size: 90}, {name: step, dtype: float32, size: 7}]"
        words["dataset.parquet.columns"] = columns
    data = workload_of(workload).dataset
    if data.record_dims:  # also 900 bytes of its elements
        words["dataset.record_dims"] = (
            f"[{SAMPLE_BYTES // np.dtype(data.record_element_type).itemsize}]"
        )
    if form == "hdf5" and data.hdf5.chunk_dims:
        words["dataset.hdf5.chunk_dims"] = "[1, 15, 15]"
    given = [f"++workload.{key}={value}" for key, value in words.items()]
    return [f"workload={workload}", *given, f"++hydra.run.dir={out}", *more]


GENERATE = [
    f"++workload.workflow.{word}" for word in ("generate_data=True", "train=False", "evaluation=False")
]  # fmt: skip


class DataSets:
    """Generated once for all engines."""

    def __init__(self, folder):
        self._folder = folder

    def folder(self, workload, form):
        folder = self._folder / f"{workload}-{form}"
        if not folder.exists():
            run_session(scaled(workload, form, folder, folder / "generated", *GENERATE))
        return folder


def check_run(workload, form, engine, folder, out):
    """Runs a workload; sees that every step of every epoch was done, and what DLIO says of it is written."""
    words = scaled(workload, form, folder, out, f"++workload.reader.engine={engine}")
    summary = run_session(words).summary
    assert summary["headrace"]["engine"] == engine
    rates = summary["metric"]["train_throughput_samples_per_second"]
    assert len(rates) == EPOCHS
    assert min(rates) > 0
    evaluates = workload_of(workload).workflow.evaluation
    assert ("eval_au_percentage" in summary["metric"]) == evaluates
    output = json.loads((out / "0_output.json").read_text())
    steps = FILES * samples_per_file(workload, form) // BATCH
    for epoch in range(1, EPOCHS + 1):
        assert len(output[str(epoch)]["load"]["block1"]) == steps
    return summary["headrace"]["bytes"]


class WholeFiles:
    """A custom engine: reads each batch's files, and notes their names."""

    seen = set()  # noqa: RUF012 - of all its objects: the test reads it

    def __init__(self, context):
        self.context = context
        self.seen.clear()

    def open(self, split, epoch, accelerator):
        plan = self.context.plans[split]
        for step in range(plan.steps):
            paths = self.context.paths(split, plan.indices(epoch, accelerator, step))
            self.seen.update(Path(os.fsdecode(path)).name for path in paths)
            yield np.concatenate([np.fromfile(path, np.uint8) for path in paths])

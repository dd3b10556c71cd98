"""Every key that DLIO documents, upstream's and MLCommons': honoured, told to have no effect, or refused.

The table is DLIO's, not ours: what stands in it and not in `KEYS` fails here.
"""

import dataclasses
import re
from pathlib import Path

import pytest

import headrace.bench
from headrace.base.text import redacted
from headrace.bench import schema
from headrace.bench.config import load_workload, parse_command_line, queried
from headrace.bench.schema import ALIASES, KEYS
from headrace.bench.session import check_supported, notes_of
from headrace.errors import WorkloadError

# key: a value that is not its default, and its fate: what the error or the note says; "" for honoured.
DOCUMENTED = {
    "model.name": ("mine", ""),
    "model.type": ("transformer", ""),
    "model.model_size_bytes": (99, ""),
    "model.model_datatype": ("bf16", ""),
    "model.optimizer_datatype": ("fp16", ""),
    "model.optimization_groups": ("[1009,865]", ""),
    "model.num_layers": (4, ""),
    "model.layer_parameters": ("[10,20]", ""),
    "model.parallelism.tensor": (2, ""),
    "model.parallelism.pipeline": (2, ""),
    "model.parallelism.data": (2, ""),
    "model.parallelism.zero_stage": (3, ""),
    "model.transformer.vocab_size": (99, ""),
    "model.transformer.hidden_size": (64, ""),
    "model.transformer.ffn_hidden_size": (64, ""),
    "model.transformer.num_attention_heads": (4, ""),
    "model.transformer.num_kv_heads": (4, ""),
    "framework": ("pytorch", ""),
    "workflow.generate_data": (True, ""),
    "workflow.train": (False, ""),
    "workflow.evaluation": (True, ""),
    "workflow.checkpoint": (True, ""),
    "workflow.profiling": (True, ""),
    "workflow.evaluate": (False, "reads workflow.evaluation"),
    "workflow.query": ("dataset.format", "`dlio_benchmark_query` alone has it"),
    "workflow.debug": (True, "does nothing with it"),
    "debug": (True, "does nothing with it"),
    "storage.storage_type": ("s3", ""),
    "storage.storage_root": ("/mnt/x", ""),
    **{
        f"storage.storage_options.{name}": (value, "mounted file systems are read")
        for name, value in {
            "access_key_id": "a", "secret_access_key": "b", "endpoint_url": "http://c", "region": "eu",
            "s3_force_path_style": "True", "s3_max_attempts": 3, "storage_library": "minio",
            "uri_scheme": "file", "prefetch_window": 4, "simulate_io": True,
        }.items()
    },
    "storage.storage_library": ("s3dlio", "mounted file systems are read"),
    "storage.post_generation_settle_seconds": (1, ""),
    "dataset.record_length_bytes": (99.5, ""),
    "dataset.record_length_bytes_stdev": (9, ""),
    "dataset.record_length_bytes_resize": (9, "no tensor is made"),
    "dataset.num_files_train": (9, ""),
    "dataset.num_files_eval": (9, ""),
    "dataset.num_samples_per_file": (9, ""),
    "dataset.data_folder": ("/data", ""),
    "dataset.num_subfolders_train": (3, ""),
    "dataset.num_subfolders_eval": (3, ""),
    "dataset.file_prefix": ("part", ""),
    "dataset.format": ("hdf5_opt", "neither writes nor reads it"),
    "dataset.compression": ("gzip", ""),
    "dataset.compression_level": (9, ""),
    "dataset.enable_chunking": (True, "does nothing with it; set hdf5.chunk_dims"),
    "dataset.chunk_size": (9, "does nothing with it; set hdf5.chunk_dims"),
    "dataset.keep_files": (False, "data sets are never deleted"),
    "dataset.generation_buffer_size": (9, "streamed from small buffers"),
    "dataset.record_dims": ("[4,4]", ""),
    "dataset.record_element_type": ("float32", ""),
    "dataset.record_element_bytes": (8, "set that one"),
    "dataset.hdf5.chunk_dims": ("[1,4]", ""),
    "dataset.hdf5.num_dset_per_record": (1, ""),
    "dataset.hdf5.max_shape": ("[8,8]", ""),
    "dataset.data_gen_method": ("numpy", "own generator"),
    "dataset.skip_listing": (True, ""),
    "dataset.listing_validation_interval": (9, "without dataset.skip_listing"),
    "dataset.num_files_generated": (9, "set num_files_train"),
    "dataset.parquet.columns": ("[{name: a, dtype: int8}]", ""),
    "dataset.parquet.row_group_size": (9, ""),
    "dataset.parquet.partition_by": ("a", "files would be named anew"),
    "dataset.parquet.generation_batch_size": (9, ""),
    "dataset.parquet.read_mode": ("column", "expected one of row_group"),
    "dataset.parquet.use_s3dlio_gen": (True, "s3dlio is not used"),
    "reader.data_loader": ("synthetic", ""),
    "reader.data_loader_classname": ("a.B", "reader.engine=custom:MODULE:CLASS"),
    "reader.data_loader_sampler": ("iterative", "read by their index"),
    "reader.reader_classname": ("a.B", "reader.engine=custom:MODULE:CLASS"),
    "reader.multiprocessing_context": ("spawn", "there are no worker processes"),
    "reader.batch_size": (3, ""),
    "reader.batch_size_eval": (3, ""),
    "reader.read_threads": (3, ""),
    "reader.write_threads": (3, "nothing is generated"),
    "reader.computation_threads": (3, "nothing is computed upon samples"),
    "reader.prefetch_size": (3, ""),
    "reader.file_shuffle": ("seed", ""),
    "reader.sample_shuffle": ("random", ""),
    "reader.shuffle_size": (3, "over the whole data set"),
    "reader.read_type": ("memory", "says nothing about storage"),
    "reader.file_access": ("collective", "does nothing with it"),
    "reader.transfer_size": (4096, "read as a whole"),
    "reader.preprocess_time": (0.1, ""),
    "reader.preprocess_time_stdev": (0.1, "reader.preprocess_time is missing beside it"),
    "reader.pin_memory": (False, "memory is not pinned"),
    "reader.odirect": (True, ""),
    "reader.dont_use_mmap": (True, "to DALI's readers alone"),
    "reader.transformed_record_dims": ("[4,4]", "no tensor is made"),
    "reader.transformed_record_element_type": ("float32", "no tensor is made"),
    "train.epochs": (3, ""),
    "train.computation_time": (0.1, ""),
    "train.computation_time_stdev": (0.1, "train.computation_time is missing beside it"),
    "train.total_training_steps": (3, ""),
    "train.seed": (3, ""),
    "train.seed_change_epoch": (False, ""),
    "evaluation.eval_time": (0.1, ""),
    "evaluation.eval_time_stdev": (0.1, "evaluation.eval_time is missing beside it"),
    "evaluation.eval_after_epoch": (3, ""),
    "evaluation.epochs_between_evals": (3, ""),
    "checkpoint.checkpoint_folder": ("/c", ""),
    "checkpoint.checkpoint_after_epoch": (3, ""),
    "checkpoint.epochs_between_checkpoints": (3, ""),
    "checkpoint.steps_between_checkpoints": (3, ""),
    "checkpoint.type": ("all_ranks", "follows from model.parallelism"),
    "checkpoint.mode": ("subset", ""),
    "checkpoint.checkpoint_mechanism_classname": ("a.B", "leave it out"),
    "checkpoint.fsync": (True, ""),
    "checkpoint.time_between_checkpoints": (3, ""),
    "checkpoint.num_checkpoints_write": (3, ""),
    "checkpoint.num_checkpoints_read": (3, ""),
    "checkpoint.recovery_rank_shift": (True, ""),
    "checkpoint.rank_sync": (True, ""),
    "checkpoint.randomize_tensor": (False, ""),
    **{
        f"checkpoint.ksm.{name}": (value, "there is no memory to merge")
        for name, value in {
            "madv_mergeable_id": 12, "high_ram_trigger": 30.0, "low_ram_exit": 15.0, "await_time": 9,
        }.items()
    },
    "output.folder": ("/o", ""),
    "output.log_file": ("a.log", ""),
    "output.metric.exclude_start_steps": (3, ""),
    "output.metric.exclude_end_steps": (3, ""),
    "profiling.profiler": ("darshan", "without workflow.profiling"),
    "profiling.iostat_devices": ("[sda]", "without workflow.profiling"),
    "metric.au": (0.5, ""),
}  # fmt: skip

OURS = {"reader.engine", "checkpoint.writer", "checkpoint.local_folder", "dataset.requests"}
"""Keys that DLIO does not have."""

NEEDED = {
    "storage.storage_type": "storage.storage_root=bucket",
    "dataset.compression": "dataset.format=csv",
    "dataset.compression_level": "dataset.format=hdf5",
    "dataset.hdf5.num_dset_per_record": "dataset.record_dims=[4,4]",
}
"""What a key makes sense with."""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "w.yaml").write_text("train: {epochs: 1}\n")

    def from_words(*overrides):
        given = [f"++workload.{word}" for word in overrides if word]
        return load_workload(parse_command_line([f"workload={tmp_path}/w.yaml", *given]))

    return from_words


def test_no_key_of_ours_is_missing_in_the_table():
    parents = {name.rpartition(".")[0] for name in DOCUMENTED}
    assert set(KEYS) - OURS - set(DOCUMENTED) - parents == set()
    assert {name for name, _ in ALIASES.values()} <= set(DOCUMENTED)


def refusal(load, *words):
    """What is said when a workload with these words is to be run; None if it would be."""
    try:
        check_supported(load(*words), 1)
    except WorkloadError as e:
        return str(e)
    return None


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_key_has_its_fate(load, name):
    value, message = DOCUMENTED[name]
    word, needed = f"{name}={value}", NEEDED.get(name)
    reported = redacted(f"command line: ++workload.{word}")
    refused = refusal(load, needed, word) if message else None
    if refused is not None:
        assert reported in refused
        assert name.split(".ksm")[0].removesuffix("_stdev") in refused
        assert message in refused
        return
    before, loaded = load(needed), load(needed, word)
    notes = [note for note in notes_of(loaded) if reported in note]
    if message:
        assert len(notes) == 1
        assert message in notes[0]
        return
    assert notes == []
    changed = loaded.workload != before.workload or loaded.listing_interval is not None
    assert (
        changed or name == "dataset.hdf5.num_dset_per_record"
    )  # whose default alone fits any data


def test_honoured_keys_are_looked_at_by_a_run():
    """A field that nobody reads would be a key without effect."""
    folder = Path(headrace.bench.__file__).parent
    text = "".join(
        path.read_text()
        for path in folder.rglob("*.py")
        if path.name not in {"config.py", "schema.py"}
    )
    for section in dataclasses.fields(schema.Workload):
        kind = getattr(schema, f"{section.name.capitalize()}Section", None)
        if kind is None or section.name in ("storage", "profiling"):
            continue
        for field in dataclasses.fields(kind):
            prefix = f"{section.name}.{field.name}"
            key = field.metadata["key"]
            if key.only is not None or (key.unused and not key.engines):
                continue
            assert re.search(rf"\.{field.name}\b|\"{field.name}\"", text), prefix


def test_a_query_is_answered_with_what_is_given_or_the_default(load, tmp_path):
    def ask(name, *overrides):
        given = [f"++workload.{word}" for word in (*overrides, f"workflow.query={name}")]
        return queried(parse_command_line(["workload=unet3d_h100", *given]))

    assert ask("dataset.num_files_train") == 168
    assert ask("dataset.num_files_train", "dataset.num_files_train=9") == 9
    assert ask("train.computation_time") == 0.323
    assert ask("evaluation.eval_time") == 0
    assert ask("framework") == "pytorch"
    assert ask("model.parallelism.zero_stage") == 0
    assert ask("dataset.hdf5.chunk_dims") == ()
    assert ask("storage.storage_type") == "local_fs"
    assert queried(parse_command_line(["workload=unet3d_h100"])) is None
    for wrong in ("dataset.num_files_trian", "reader", "nothing.at.all"):
        with pytest.raises(WorkloadError, match=rf"query={wrong}: {wrong} is not known"):
            ask(wrong)
    for name in DOCUMENTED:
        if not DOCUMENTED[name][1] and name != "dataset.skip_listing":
            assert ask(name) is not None or name in ("model.type", "output.folder")

"""The workloads that are shipped have the parameters that DLIO and MLPerf Storage publish."""

import pytest

from headrace.bench.config import load_workload, parse_command_line, shipped_workloads


def workload_of(name, *overrides):
    return load_workload(parse_command_line([f"workload={name}", *overrides])).workload


UNET, RESNET, COSMO = (
    "npz 168 1 146600628",
    "tfrecord 1024 1251 114660.07",
    "tfrecord 524288 1 2828486",
)
RETINA, FLUX, DLRM = "jpeg 1170301 1 322957", "parquet 4296 288 2164832", "parquet 1024 4718592 761"

# name: framework, "format files samples bytes", stdev, resize, batch, threads, epochs, step s, au
TRAINING = {
    "unet3d_v100": ("pytorch", UNET, 68341808, 2097152, 4, 4, 5, 1.3604, 0.9),
    "unet3d_a100": ("pytorch", UNET, 68341808, 2097152, 7, 4, 5, 0.636, 0.9),
    "unet3d_h100": ("pytorch", UNET, 68341808, 2097152, 7, 4, 5, 0.323, 0.9),
    "unet3d_b200": ("pytorch", UNET, 68341808, 2097152, 7, 4, 5, 0.162, 0.9),
    "unet3d_a100_s3": ("pytorch", UNET, 0, 2097152, 7, 4, 5, 0.636, 0.9),
    "unet3d_h100_s3": ("pytorch", UNET, 0, 2097152, 7, 4, 7, 0.323, 0.9),
    "unet3d_v100_s3": ("pytorch", UNET.replace("npz", "npy"), 0, 2097152, 4, 4, 5, 1.3604, 0.9),
    "resnet50_v100": ("tensorflow", RESNET, 0, 150528, 64, 8, 5, 0.195, 0.9),
    "resnet50_a100": ("tensorflow", RESNET, 0, 150528, 400, 8, 5, 0.435, 0.9),
    "resnet50_h100": ("tensorflow", RESNET, 0, 150528, 400, 8, 5, 0.224, 0.9),
    "resnet50_tf": ("tensorflow", RESNET, 0, 150528, 64, 8, 1, 0.098, 0.9),
    "cosmoflow_v100": ("tensorflow", COSMO, 71311, 0, 1, 4, 5, 0.00936, 0.9),
    "cosmoflow_a100": ("tensorflow", COSMO, 71311, 0, 1, 4, 5, 0.00551, 0.7),
    "cosmoflow_h100": ("tensorflow", COSMO, 71311, 0, 1, 4, 5, 0.00350, 0.7),
    "bert_v100": ("tensorflow", "tfrecord 500 313532 2500", 0, 0, 48, 1, 1, 0.968, 0.9),
    "dlrm": ("pytorch", "indexed_binary 1 1024 671088640", 0, 0, 1, 1, 1, 0.064296, 0.9),
    "megatron_deepspeed_LLNL": (
        "pytorch", "mmap_indexed_binary 1 277203535 2048", 0, 0, 16, 1, 3, 2.44, 0.9),
    "cosmic_tagger": ("tensorflow", "hdf5 1 43000 40960", 0, 0, 32, 1, 1, 6.0, 0.9),
    "ffn": ("tensorflow", "hdf5 1 43008 32768", 0, 0, 1, 1, 1, 1.0, 0.9),
    "candle_nt3": ("tensorflow", "csv 1 1120 65536", 0, 0, 20, 1, 60, 6.61, 0.9),
    "frnn": ("tensorflow", "npz 28000 1024 2048", 0, 0, 1, 1, 1, 0.0, 0.9),
    "l2hmc": ("tensorflow", "synthetic 4800 1 4096", 0, 0, 32, 1, 1, 0.0, 0.9),
    "deepcam": ("pytorch", "hdf5 121266 1 56623104", 0, 0, 1, 4, 1, 1.0, 0.9),
    "default": ("pytorch", "npz 64 1 4096", 0, 0, 4, 1, 10, 1.0, 0.9),
    **{f"retinanet_{a}": ("pytorch", RETINA, 0, 0, 24, 8, 8, 0.04755, 0.85)
       for a in ("a100", "h100", "b200", "mi355")},
    **{f"flux_{a}": ("pytorch", FLUX, 0, 0, 48, 8, 1, 1.35, 0.9) for a in ("b200", "mi355")},
    **{f"dlrm_{a}": ("pytorch", DLRM, 0, 0, 16384, 4, 1, 0.000375, 0.7) for a in ("b200", "mi355")},
}  # fmt: skip

# vocabulary, hidden, ffn, layers, heads, kv heads
DIMENSIONS = {
    "7b": (32000, 4096, 11008, 32, 32, 32),
    "8b": (128256, 4096, 14336, 32, 32, 8),
    "70b": (128256, 8192, 28672, 80, 128, 8),
    "405b": (128256, 16384, 53248, 126, 128, 8),
    "1t": (128256, 25872, 98304, 128, 192, 32),
}
# tensor, pipeline, data, zero stage
CHECKPOINTS = {
    "llama_7b": (1, 1, -1, 1), "llama_7b_zero3": (1, 1, -1, 3), "llama_8b_zero3": (1, 1, -1, 3),
    "llama_70b": (8, 4, -1, 1), "llama_70b_zero3": (8, 1, -1, 3), "llama_405b": (8, 32, -1, 1),
    "llama_1t": (8, 64, -1, 1), "llama3_8b": (1, 1, 8, 3), "llama3_70b": (8, 1, 8, 3),
    "llama3_405b": (8, 32, 2, 1), "llama3_1t": (8, 64, 2, 1),
}  # fmt: skip
DATAGEN = {
    f"{name}_datagen": of
    for name, of in {
        "unet3d": UNET, "resnet50": RESNET, "cosmoflow": COSMO, "retinanet": RETINA, "flux": FLUX,
        "dlrm": DLRM,
    }.items()
}  # fmt: skip


def test_every_workload_is_in_one_of_the_tables():
    assert set(shipped_workloads()) == {*TRAINING, *CHECKPOINTS, *DATAGEN}


def files_of(workload):
    data = workload.dataset
    return f"{data.format} {data.num_files_train} {data.num_samples_per_file} {data.record_length_bytes:.10g}"


@pytest.mark.parametrize("name", TRAINING)
def test_training_workload(name):
    workload = workload_of(name)
    data, reader = workload.dataset, workload.reader
    assert (
        workload.framework, files_of(workload), data.record_length_bytes_stdev,
        data.record_length_bytes_resize, reader.batch_size, reader.read_threads,
        workload.train.epochs, workload.train.computation_time.mean_s, workload.metric.au,
    ) == TRAINING[name]  # fmt: skip
    assert workload.workflow.train
    assert not workload.workflow.generate_data


@pytest.mark.parametrize("name", DATAGEN)
def test_datagen_workload(name):
    workload = workload_of(name)
    assert files_of(workload) == DATAGEN[name]
    assert workload.workflow.generate_data
    assert not workload.workflow.train
    training = workload_of(name.replace("datagen", "b200") if name != "resnet50_datagen" and
                           name != "cosmoflow_datagen" else name.replace("datagen", "h100"))  # fmt: skip
    assert workload.dataset == training.dataset


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_workload(name):
    workload = workload_of(name)
    model, checkpoint = workload.model, workload.checkpoint
    assert (
        model.parallelism_tensor, model.parallelism_pipeline, model.parallelism_data,
        model.parallelism_zero_stage,
    ) == CHECKPOINTS[name]  # fmt: skip
    assert (
        model.transformer_vocab_size, model.transformer_hidden_size,
        model.transformer_ffn_hidden_size, model.num_layers,
        model.transformer_num_attention_heads, model.transformer_num_kv_heads,
    ) == DIMENSIONS[name.split("_")[1]]  # fmt: skip
    assert (checkpoint.fsync, checkpoint.time_between_checkpoints) == (True, 5)
    assert (checkpoint.num_checkpoints_write, checkpoint.num_checkpoints_read) == (10, 10)
    assert (workload.workflow.train, workload.workflow.checkpoint) == (False, True)


def test_what_the_tables_have_no_column_for():
    bert, unet = workload_of("bert_v100"), workload_of("unet3d_h100")
    assert bert.reader.transfer_size == 262144
    assert (bert.train.total_training_steps, bert.checkpoint.steps_between_checkpoints) == (
        1000,
        250,
    )
    assert (bert.model.model_size_bytes, bert.dataset.file_prefix) == (4034713312, "part")
    assert unet.model.model_size_bytes == 499153191
    assert unet.checkpoint.checkpoint_after_epoch == 5
    assert unet.checkpoint.epochs_between_checkpoints == 2
    assert workload_of("resnet50_v100").reader.batch_size_eval == 128
    assert workload_of("resnet50_h100").reader.computation_threads == 8
    assert workload_of("cosmoflow_h100").reader.shuffle_size == 2
    megatron = workload_of("megatron_deepspeed_LLNL").model
    assert megatron.optimization_groups == (1009254400, 865075200, 793600)
    assert megatron.layer_parameters == (52583936, 209715200)
    assert (megatron.parallelism_pipeline, megatron.parallelism_tensor) == (8, 4)
    assert workload_of("candle_nt3").dataset.nominal_bytes == 60484 * 4
    chunks = [workload_of(name).dataset.hdf5.chunk_dims for name in ("cosmic_tagger", "ffn")]
    assert chunks == [(1, 45, 45), (1, 64, 64)]
    l2hmc = workload_of("l2hmc")
    assert l2hmc.model.model_size_bytes == 32 << 20
    assert l2hmc.checkpoint.steps_between_checkpoints == 50
    assert workload_of("deepcam").dataset.num_files_eval == 15158
    default = workload_of("default")
    assert (default.dataset.num_files_eval, default.dataset.num_subfolders_eval) == (8, 2)
    assert default.evaluation.eval_time.mean_s == 0.5


def test_dlrm_reads_forty_of_two_hundred_columns_of_761_bytes():
    columns = workload_of("dlrm_b200").dataset.parquet.columns
    sizes = {"int8": 1, "float16": 2, "float32": 4, "float64": 8}
    assert len(columns) == 200
    assert sum(c.read for c in columns) == 40
    assert sum(sizes[c.dtype] for c in columns) == 761

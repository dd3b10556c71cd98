"""Sizes of checkpoints, against the figures that MLPerf Storage states for its models."""

from dataclasses import replace

import pytest

from headrace.bench.model import ModelSpec
from headrace.bench.schema import KEYS, ModelSection

GIB = 1 << 30


def total_bytes(spec, ranks):
    """Of the whole checkpoint, over the ranks that write it."""
    return sum(spec.share(rank, ranks).nbytes for rank in range(ranks))


def bytes_of(states):
    """Of a rank's files of the model, or of the optimizer."""
    return sum(map(sum, states.values()))


def llama(vocab, hidden, ffn, layers, heads, kv, tensor=1, pipeline=1, zero=3):
    return ModelSpec(ModelSection(
        type="transformer", num_layers=layers, transformer_vocab_size=vocab,
        transformer_hidden_size=hidden, transformer_ffn_hidden_size=ffn,
        transformer_num_attention_heads=heads, transformer_num_kv_heads=kv,
        parallelism_tensor=tensor, parallelism_pipeline=pipeline, parallelism_zero_stage=zero,
    ))  # fmt: skip


LLAMAS = {
    "7b": llama(32000, 4096, 11008, 32, 32, 32, zero=1),
    "8b": llama(128256, 4096, 14336, 32, 32, 8),
    "70b": llama(128256, 8192, 28672, 80, 128, 8, tensor=8),
    "405b": llama(128256, 16384, 53248, 126, 128, 8, tensor=8, pipeline=32, zero=1),
    "1t": llama(128256, 25872, 98304, 128, 192, 32, tensor=8, pipeline=64, zero=1),
}


@pytest.mark.parametrize(("name", "parameters"), [
    ("7b", 6_738_415_616), ("8b", 8_030_261_248),
])  # fmt: skip
def test_parameters_are_the_models_own(name, parameters):
    """As Llama 2 7B and Llama 3 8B have them."""
    assert LLAMAS[name].parameters == parameters


@pytest.mark.parametrize(("name", "ranks", "gib"), [
    ("8b", 8, 105), ("70b", 64, 912), ("405b", 512, 5290),
])  # fmt: skip
def test_checkpoints_are_as_large_as_mlperf_says(name, ranks, gib):
    """105 GB, 912 GB and 5.29 TB of MLPerf Storage 2.0, which counts in GiB."""
    assert total_bytes(LLAMAS[name], ranks) / GIB == pytest.approx(gib, rel=0.003)


def test_the_largest_model_is_as_its_dimensions_say_and_not_as_large_as_mlperf_says():
    """MLPerf states 18 TB. Its own dimensions, with 32 heads for keys and values, make 16.6 TB, by hand:

    18 TB is what the same formula gives for as many of these as attention has: without grouped queries.
    """
    h, ffn, layers = 25872, 98304, 128
    for heads, terabytes in ((32, 16.56), (192, 18.54)):
        kv = h // 192 * heads
        layer = 2 * h + h * (h + 2 * kv) + h * h + 3 * h * ffn
        by_hand = 2 * 128256 * h + h + layers * layer
        spec = llama(128256, h, ffn, layers, 192, heads, tensor=8, pipeline=64, zero=1)
        assert spec.parameters == by_hand
        # Two bytes of a parameter, and three times four of the optimizer's.
        assert total_bytes(spec, 1024) == pytest.approx(14 * by_hand, rel=1e-3)
        assert total_bytes(spec, 1024) / 1e12 == pytest.approx(terabytes, abs=0.03)
    assert total_bytes(LLAMAS["1t"], 1024) / 1e12 == pytest.approx(16.56, abs=0.03)


def test_shares_add_up_whatever_the_parallelism():
    whole = LLAMAS["8b"].parameters * 2
    for tensor, pipeline, zero, ranks in [
        (1, 1, 0, 4),
        (4, 2, 1, 16),
        (8, 1, 3, 16),
        (2, 3, 2, 12),
    ]:
        spec = llama(128256, 4096, 14336, 32, 32, 8, tensor, pipeline, zero)
        shares = [spec.share(r, ranks) for r in range(ranks)]
        # The norms are written by each rank of a tensor group.
        norms = (tensor - 1) * 2 * (2 * 32 + 1) * 4096
        assert sum(bytes_of(s.model) for s in shares) == whole + norms
        optimizer = sum(bytes_of(s.optimizer) for s in shares)
        assert optimizer == pytest.approx(12 * spec.parameters, rel=1e-3)


def test_only_the_first_copy_writes_without_zero():
    spec = llama(1000, 64, 128, 4, 4, 4, zero=0)
    assert [spec.share(r, 3).nbytes > 0 for r in range(3)] == [True, False, False]
    assert bytes_of(spec.share(0, 3).model) == 2 * spec.parameters


def test_files_are_named_as_dlio_names_them():
    pipeline = llama(1000, 64, 128, 4, 4, 4, tensor=2, pipeline=2, zero=1)
    files = pipeline.share(2, 8).model
    assert list(files) == [f"layer_{i}-model_2_model_states.pt" for i in (3, 4, 5, 6)]
    assert list(pipeline.share(5, 8).optimizer) == ["zero_pp_rank_1_mp_rank_1_optim_states.pt"]
    assert not pipeline.share(5, 8).model
    third = llama(1000, 64, 128, 4, 4, 4, zero=3).share(1, 2)
    assert list(third.model) == ["zero_pp_rank_1_mp_rank_0_model_states.pt"]
    first = llama(1000, 64, 128, 4, 4, 4, zero=1).share(0, 2)
    assert list(first.model) == ["model_0_model_states.pt"]


def test_layers_are_shared_out_over_uneven_stages():
    spec = llama(1000, 64, 128, 7, 4, 4, pipeline=3, zero=0)
    result = [[int(n.split("-")[0][6:]) for n in spec.share(r, 3).model] for r in range(3)]
    assert result == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]


def test_an_opaque_model_is_one_file_of_rank_0():
    spec = ModelSpec(ModelSection(model_size_bytes=499153191))
    assert spec.share(0, 4).model == {"model_states-0.pt": [499153191]}
    assert total_bytes(spec, 4) == 499153191


def test_legacy_groups_and_layers_are_bytes():
    """Of megatron_deepspeed_LLNL: each group twice, and all of them together."""
    spec = ModelSpec(ModelSection(
        type="transformer", num_layers=40, optimization_groups=(1009254400, 865075200, 793600),
        layer_parameters=(52583936, 209715200),
        parallelism_tensor=4, parallelism_pipeline=8, parallelism_zero_stage=1,
    ))  # fmt: skip
    share = spec.share(0, 32)
    assert bytes_of(share.optimizer) == 3 * (1009254400 + 865075200 + 793600)
    assert len(share.model) == 5
    assert bytes_of(share.model) == 5 * (52583936 + 209715200) // 4


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("model_datatype", "fp8", "one of int8, uint8, fp16"),
    ("model_size_bytes", -1, "at least 0"),
    ("parallelism.tensor", 0, "at least 1"),
    ("parallelism.zero_stage", 4, "at most 3"),
    ("transformer.hidden_size", 0, "at least 1"),
])  # fmt: skip
def test_impossible_values_are_refused(key, value, expected):
    with pytest.raises(ValueError, match=expected):
        KEYS[f"model.{key}"].convert(value)


def test_impossible_ranks_are_refused():
    with pytest.raises(ValueError, match="ZeRO stage 3"):
        ModelSpec(ModelSection(parallelism_pipeline=2, parallelism_zero_stage=3))
    with pytest.raises(ValueError, match="num_layers is 2"):
        ModelSpec(ModelSection(num_layers=2, parallelism_pipeline=4))
    with pytest.raises(ValueError, match="data is 0, expected at least 1"):
        ModelSpec(ModelSection(parallelism_data=0))
    with pytest.raises(ValueError, match="6 ranks are no multiple"):
        LLAMAS["70b"].share(0, 6)
    with pytest.raises(ValueError, match="are more than"):
        ModelSpec(ModelSection(parallelism_data=2)).share(0, 3)


def test_a_subset_is_of_the_whole_jobs_shares():
    """Eight processes stand for the first eight of 64 data parallel ones."""
    spec = llama(128256, 4096, 14336, 32, 32, 8)
    subset = ModelSpec(replace(spec.model, parallelism_data=64))
    assert subset.share(0, 8) == spec.share(0, 64)
    assert total_bytes(subset, 8) == pytest.approx(total_bytes(spec, 64) / 8, rel=0.01)

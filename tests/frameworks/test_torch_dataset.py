"""Dataset: a store for torch's own loaders and samplers."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from torch.utils import data as torch_data

import headrace as hr
from headrace.errors import DecodeError, SourceChanged
from headrace.torch import Dataset

from .decoders import SAMPLES, content, fail_on_77, index_of, raw_collate, with_key


def test_items_are_decoded_samples_with_their_labels(path):
    dataset = Dataset(path, index_of)
    assert len(dataset) == SAMPLES
    assert dataset[5] == (5, 5)
    assert dataset[-1] == (SAMPLES - 1, (SAMPLES - 1) % 7)
    assert dataset.__getitems__([9, 3, 9]) == [(9, 2), (3, 3), (9, 2)]
    with pytest.raises(IndexError, match="211"):
        dataset[SAMPLES]


def test_without_decode_items_are_bytes(store):
    data, label = Dataset(store)[17]
    assert data.dtype == torch.uint8
    assert (data.numpy().tobytes(), label) == (content(17), 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_shuffles_it(path, workers):
    loader = torch_data.DataLoader(
        Dataset(path), 16, shuffle=True, num_workers=workers, collate_fn=raw_collate
    )
    for _ in range(2):
        found = {}
        for data, labels in loader:
            for one, label in zip(data, labels, strict=True):
                index = index_of(one)
                assert label == index % 7
                found[index] = one
        assert len(found) == SAMPLES


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_may_be_started_in_any_way(path, context):
    dataset = Dataset(path, index_of)
    assert dataset[0] == (0, 0)  # the parent has a reader of its own by now
    loader = torch_data.DataLoader(dataset, 50, num_workers=1, multiprocessing_context=context)
    indices = torch.cat([indices for indices, _ in loader])
    assert indices.tolist() == list(range(SAMPLES))


def test_it_is_pickled_as_path_and_fingerprint(path, tmp_path):
    copy = tmp_path / "copy.hr"
    shutil.copytree(path, copy)
    dataset = Dataset(copy, index_of, seed=3)
    sent = pickle.dumps(dataset)
    assert len(sent) < 2000
    again = pickle.loads(sent)
    assert (again[4], again.seed) == ((4, 4), 3)
    shutil.rmtree(copy)
    hr.pack([b"other", b"data"], copy)
    with pytest.raises(SourceChanged, match="fingerprint"):
        pickle.loads(sent)


def test_an_error_names_the_sample_and_skip_leaves_it_out(path):
    with pytest.raises(DecodeError, match=r"sample 77 \('00077'\).*ArithmeticError: sev") as caught:
        Dataset(path, fail_on_77).__getitems__([1, 77])
    assert (caught.value.index, caught.value.name) == (77, "00077")
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert pickle.loads(pickle.dumps(caught.value)).index == 77
    dataset = Dataset(path, fail_on_77, on_error="skip")
    assert dataset.__getitems__([76, 77, 78]) == [(76, 6), (78, 1)]
    assert [(s.index, s.name) for s in dataset.skipped] == [(77, "00077")]
    with pytest.raises(IndexError, match="left out"):
        dataset[77]


def test_random_keys_change_with_the_epoch_and_the_seed(path):
    dataset = Dataset(path, with_key, seed=1)
    first = dataset[3][0]
    dataset.set_epoch(1)
    assert dataset[3][0][3] == 1
    assert dataset[3][0][4] != first[4]
    assert Dataset(path, with_key, seed=2)[3][0][4] != first[4]
    assert Dataset(path, with_key, seed=1)[3][0].tolist() == first.tolist()


def test_wrong_arguments_are_refused_with_the_value(path):
    with pytest.raises(TypeError, match="'jpeg'"):
        Dataset(path, "jpeg")
    with pytest.raises(ValueError, match="unknown options"):
        Dataset(path, depth=3)
    with pytest.raises(ValueError, match="no part 'png'"):
        Dataset(path, parts=["png"])

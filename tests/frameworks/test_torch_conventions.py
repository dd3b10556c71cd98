"""DataLoader over a store: torch's names, meanings and defaults."""

import inspect

import numpy as np
import pytest
import torch
from tests.plane.test_images import KINDS, picture
from torch.utils import data as torch_data
from torch.utils.data._utils import worker as worker_loop

import headrace
import headrace as hr
from headrace.errors import SampleNotFound
from headrace.order import Shuffled
from headrace.torch import DataLoader, StoreLoader, TensorBatch

from .decoders import SAMPLES, content, index_of, with_key

STORED = list(range(SAMPLES))


def indices_of(loader):
    return [int(i) for batch in loader for i in batch.indices]


def rows(loader):
    return torch.cat([samples for samples, _ in loader]).tolist()


@pytest.fixture(scope="module")
def photo_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conventions") / "photos.hr"
    pictures = ((f"{i:02d}", KINDS["jpeg 4:2:0"](picture(90 + i, 70, i)), i % 5) for i in range(24))
    hr.pack(pictures, folder)
    return folder


def test_without_shuffle_samples_come_in_the_stored_order_as_torchs_do(path):
    assert indices_of(DataLoader(path, 16)) == STORED
    assert indices_of(DataLoader(path, 16, shuffle=False, seed=3)) == STORED
    assert [len(batch) for batch in DataLoader(path)] == [1] * SAMPLES
    shuffled = DataLoader(path, 16, True)
    assert indices_of(shuffled) == Shuffled(SAMPLES, seed=0).indices(0, 0, SAMPLES).tolist()
    assert indices_of(shuffled) == Shuffled(SAMPLES, seed=0).indices(1, 0, SAMPLES).tolist()


def test_a_seed_of_nothing_is_refused_since_it_once_meant_shuffled(path):
    with pytest.raises(
        ValueError, match="seed is 7, and nothing says whether samples are shuffled"
    ):
        DataLoader(path, 16, seed=7)


def test_drop_last_leaves_out_what_does_not_fill_a_batch(path):
    assert indices_of(DataLoader(path, 16, drop_last=True)) == STORED[: SAMPLES // 16 * 16]
    with pytest.raises(ValueError, match="drop_last is True and tail is 'pad'"):
        DataLoader(path, 16, drop_last=True, tail="pad")


def test_a_generator_seeds_the_order_of_one_rank(path):
    def order(number, **options):
        generator = torch.Generator().manual_seed(number)
        return indices_of(DataLoader(path, 16, shuffle=True, generator=generator, **options))

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == STORED
    with pytest.raises(ValueError, match="ranks whose generators differ would miss samples"):
        order(1, rank=0, world_size=2)
    with pytest.raises(ValueError, match="seed is 1 and generator is given"):
        order(1, seed=1)


def test_workers_options_are_torchs_with_workers(path):
    started = torch.zeros(4, dtype=torch.int64).share_memory_()
    loader = DataLoader(
        path, 16, shuffle=True, seed=5, decode=with_key, num_workers=2, prefetch_factor=1, timeout=60,
        persistent_workers=True, multiprocessing_context="fork",
        worker_init_fn=lambda number: started[number].add_(1),
    )  # fmt: skip
    with loader, DataLoader(path, 16, shuffle=True, seed=5, decode=with_key) as plain:
        for _ in range(2):
            assert rows(loader) == rows(plain)
    assert started.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_factor": 4}, "prefetch_factor is 4, which needs worker processes"),
        ({"persistent_workers": True}, "needs worker processes"),
        ({"multiprocessing_context": "fork"}, "needs worker processes"),
        ({"timeout": 5}, "needs worker processes"),
        ({"images": True, "num_workers": 2, "timeout": 4}, "no process is waited for"),
        ({"images": True, "num_workers": 2, "worker_init_fn": print}, "no process is started"),
        ({"images": True, "num_workers": 2, "timeout": 5}, "deadline_s"),
        ({"pin_memory_device": "cuda"}, "pin_memory_device is 'cuda'"),
    ],
)
def test_what_has_no_meaning_over_a_store_is_refused_with_the_reason(path, options, message):
    decode = hr.Images(size=8) if options.pop("images", False) else index_of
    with pytest.raises(ValueError, match=message):
        DataLoader(path, 16, decode=decode, **options)


def test_what_torch_itself_ignores_without_workers_is_ignored(path):
    loader = DataLoader(path, 16, decode=index_of, worker_init_fn=print, in_order=False)
    assert rows(loader) == STORED


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samplers_choose_as_torchs_own_loader_has_it(path, num_workers):
    def drawn():
        return torch_data.WeightedRandomSampler(
            torch.arange(SAMPLES).double(), 60, generator=torch.Generator().manual_seed(3)
        )

    chosen = list(drawn())
    bytewise = DataLoader(path, 16, sampler=drawn(), num_workers=num_workers)
    batches = list(bytewise)
    assert isinstance(batches[0], TensorBatch)
    assert indices_of(batches) == chosen
    assert bytes(batches[1][2].numpy()) == content(chosen[18])
    decoded = DataLoader(path, 16, sampler=drawn(), decode=index_of, num_workers=num_workers)
    assert rows(decoded) == chosen
    by_batches = DataLoader(
        path, batch_sampler=[[5, 1], [7], [2, 2, 2]], decode=index_of, num_workers=num_workers
    )
    assert [samples.tolist() for samples, _ in by_batches] == [[5, 1], [7], [2, 2, 2]]
    assert type(by_batches) is DataLoader


def test_without_batch_size_samples_come_singly(path):
    loader = DataLoader(path, None, decode=index_of)
    assert [sample for sample, _ in loader] == STORED
    data, label = next(iter(DataLoader(path, batch_size=None)))
    assert bytes(data.numpy()) == content(0)
    assert label == 0


def test_what_a_sampler_does_instead_is_refused(path):
    for options in ({"order": "blocked"}, {"rank": 0}, {"seed": 3}, {"tail": "pad"}):
        with pytest.raises(TypeError, match=f"{next(iter(options))} is given, and a sampler"):
            DataLoader(path, 16, sampler=STORED, **options)
    with pytest.raises(TypeError, match="did you mean 'on_error'"):
        DataLoader(path, 16, sampler=STORED, on_eror="skip")
    with pytest.raises(ValueError, match=r"headrace\.torch\.DataLoader takes it"):
        StoreLoader(path, 16, sampler=STORED)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pictures_that_a_sampler_chooses_are_cut_anew_in_each_epoch_by_torchs_seed(
    photo_store, num_workers
):
    def epochs(seed):
        torch.manual_seed(seed)
        loader = DataLoader(
            photo_store, 8, sampler=range(24), decode=hr.Images(size=16, flip=True),
            num_workers=num_workers,
        )  # fmt: skip
        return [torch.cat([pixels.clone() for pixels, _ in loader]) for _ in range(2)]

    first, second = epochs(1)
    assert first.shape == (24, 3, 16, 16)
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(epochs(1), (first, second), strict=True))
    centre = hr.Images(size=16, crop="center")
    chosen = DataLoader(photo_store, batch_sampler=[[3, 9]], decode=centre, num_workers=num_workers)
    ((pixels, labels),) = chosen
    (whole,) = hr.loader(photo_store, 24, order="sequential", decode=centre)
    assert np.array_equal(pixels.numpy(), whole.pixels[[3, 9]])
    assert labels.tolist() == [3, 4]


def test_collate_gets_pictures_and_labels(photo_store):
    images = hr.Images(size=8, crop="center")
    plain = [pixels.clone() for pixels, _ in DataLoader(photo_store, 8, decode=images)]
    for options in ({}, {"sampler": range(24)}):
        loader = DataLoader(
            photo_store, 8, decode=images, collate_fn=torch_data.default_collate, **options
        )
        for (pixels, labels), expected in zip(loader, plain, strict=True):
            assert torch.equal(pixels, expected)
            assert labels.dtype == torch.int64


def test_a_store_is_indexed_sliced_and_iterated(path, tmp_path):
    with hr.open(path) as store:
        assert (bytes(store[0]), bytes(store[-1])) == (content(0), content(SAMPLES - 1))
        assert bytes(store[np.int64(3)]) == content(3)
        assert [bytes(data) for data in store[4:10:2]] == [content(i) for i in (4, 6, 8)]
        assert store[5:2] == []
        assert [bytes(data) for data in store] == [content(i) for i in STORED]
        with pytest.raises(SampleNotFound, match=f"no sample {SAMPLES}"):
            store[SAMPLES]
        for wrong in ("name", 1.5):
            with pytest.raises(TypeError):
                store[wrong]
        with pytest.raises(TypeError, match="not a container"):
            store.names[0] in store  # noqa: B015 - which would read every sample
        with pytest.raises(hr.errors.SourceError, match="The source is Store"):
            hr.pack(store, tmp_path / "again.hr")  # its names and labels would be lost
    parts = ({"name": str(i), "data": {"txt": b"t%d" % i, "jpg": b"j"}} for i in range(3))
    hr.pack(parts, tmp_path / "parts.hr")
    with hr.open(tmp_path / "parts.hr") as store:
        assert {part: bytes(data) for part, data in store[1].items()} == {"jpg": b"j", "txt": b"t1"}


class Squares(torch_data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([index, index * index])


def test_workers_find_their_dataset_in_a_list_as_torch_2_14_hands_it_over(monkeypatch):
    plain = worker_loop._worker_loop
    names = list(inspect.signature(plain).parameters)
    names[names.index("dataset")] = "dataset_holder"

    def of_2_14(**given):
        dataset = given.pop("dataset_holder").pop()
        return plain(dataset=dataset, **given)

    of_2_14.__signature__ = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names
    )
    monkeypatch.setattr(worker_loop, "_worker_loop", of_2_14)
    batches = [[3, 1], [15, 2], [0, 7]]
    loader = DataLoader([Squares()], batch_sampler=batches, num_workers=2)
    assert [batch[:, 0].tolist() for batch in loader] == batches


def test_dir_shows_what_is_public_and_nothing_else():
    assert dir(headrace) == sorted(headrace.__all__)
    assert dir(headrace.torch) == sorted(headrace.torch.__all__)

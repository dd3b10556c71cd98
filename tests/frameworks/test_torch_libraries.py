"""Libraries around torch's loader take ours: Accelerate, torchdata, Lightning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

import headrace as hr
from headrace.torch import DataLoader, StoreLoader, TokenDataLoader, adopt

from .decoders import index_of
from .dropin_corpus import Nested, Stream
from .dropin_faults import Numbers


def firsts(batches):
    return [batch[:, 0].tolist() for batch in batches]


def test_a_loader_of_torchs_is_adopted_with_all_its_parts():
    for options in (
        {"batch_size": 3, "shuffle": True},
        {"batch_sampler": [[1, 2], [0]]},
        {"batch_size": None, "num_workers": 1, "persistent_workers": True, "prefetch_factor": 4},
        {"batch_size": 4, "drop_last": True, "sampler": [5, 4, 3, 2, 1]},
    ):
        theirs = torch_data.DataLoader(Numbers(), **options)
        ours = adopt(theirs)
        assert type(ours) is DataLoader
        torch.manual_seed(1)
        found = [batch.tolist() for batch in ours]
        torch.manual_seed(1)
        assert found == [batch.tolist() for batch in theirs]
        assert ours.prefetch_factor == theirs.prefetch_factor
    assert len(list(adopt(torch_data.DataLoader(Stream(), 4)))) == 8
    assert adopt(ours) is ours
    with pytest.raises(TypeError, match="StoreLoader, expected a torch DataLoader"):
        adopt(StoreLoader.__new__(StoreLoader))


def test_what_torchs_loader_sees_is_enough_to_make_it_again_with_another_sampler(monkeypatch):
    """As Lightning does, which watches torch's `__init__` alone where ours was imported later."""
    plain, seen = torch_data.DataLoader.__init__, {}

    def watched(self, *args, **options):
        assert not args
        seen.update(options)
        plain(self, **options)

    monkeypatch.setattr(torch_data.DataLoader, "__init__", watched)
    DataLoader(Numbers(), 2, True)
    again = DataLoader(**{**seen, "sampler": [3, 1], "shuffle": False})
    assert firsts(again) == [[3, 1]]


def test_accelerate_prepares_skips_and_resumes():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(3)
    plain = accelerator.prepare(torch_data.DataLoader(Numbers(), 2, shuffle=True))
    expected = firsts(plain)
    torch.manual_seed(3)
    loader = adopt(accelerator.prepare(DataLoader(Numbers(), 2, shuffle=True, num_workers=1)))
    assert type(loader.base_dataloader) is DataLoader
    assert firsts(loader) == expected

    sequential = accelerator.prepare(DataLoader(Numbers(), 2))
    skipped = adopt(accelerate.skip_first_batches(sequential, 7))
    assert type(skipped.base_dataloader) is DataLoader
    assert firsts(skipped) == [[14, 15], [16, 17], [18, 19]]

    adopted = adopt(accelerator.prepare(DataLoader(Numbers(), 2, num_workers=1)))
    batches = iter(adopted)
    assert firsts([next(batches), next(batches)]) == [[0, 1], [2, 3]]
    state = adopted.state_dict()
    resumed = adopt(accelerator.prepare(DataLoader(Numbers(), 2, num_workers=1)))
    resumed.load_state_dict(state)
    assert firsts(resumed) == firsts(batches)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
def test_it_does_what_torchdatas_stateful_loader_promises():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 2):
        for loader_class in (stateful.StatefulDataLoader, DataLoader):
            torch.manual_seed(5)
            loader = loader_class(Nested(), 4, shuffle=True, num_workers=workers)
            loader.state_dict()  # before anything was delivered
            batches = iter(loader)
            for _ in range(2):
                next(batches)
            state = loader.state_dict()
            rest = [batch["label"].tolist() for batch in batches]
            resumed = loader_class(Nested(), 4, shuffle=True, num_workers=workers)
            resumed.load_state_dict(state)  # before iter
            assert [batch["label"].tolist() for batch in resumed] == rest
            assert len(list(resumed)) == 6, "and then whole epochs again"


@pytest.fixture
def lightning_trainer(tmp_path):
    """Lightning's trainer, and a model that notes what it sees in each epoch."""
    try:
        import lightning.pytorch as lightning
    except Exception as e:  # noqa: BLE001 - its metrics import torchvision, even another torch's
        pytest.skip(f"Lightning cannot be imported: {e}")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = []

        def training_step(self, batch, _):
            batch = batch[0] if isinstance(batch, list) else getattr(batch, "tokens", batch)
            self.seen.append(batch[:, 0].tolist())
            return self.layer(batch[:, :1].float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    class Saving(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "stopped.ckpt")

        def on_train_epoch_end(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    def fit(loader, resumed=None, **options):
        model = Model()
        lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, enable_checkpointing=False, callbacks=[] if resumed else [Saving()],
            **options,
        ).fit(
            model, loader, ckpt_path=None if resumed is None else tmp_path / resumed, weights_only=False
        )  # fmt: skip
        return model.seen

    return fit


@pytest.mark.filterwarnings("ignore")  # Lightning's own, on many things
def test_lightning_saves_and_loads_its_state_and_gives_it_a_sampler(lightning_trainer):
    from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs

    def loader():
        return DataLoader(
            Numbers(), 2, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(4)
        )

    whole = lightning_trainer(loader(), max_epochs=1)
    assert lightning_trainer(loader(), "stopped.ckpt", max_epochs=1) == whole[4:]

    sampler = torch_data.distributed.DistributedSampler(Numbers(), num_replicas=2, rank=1)
    args, kwargs = _get_dataloader_init_args_and_kwargs(loader(), sampler)
    again = DataLoader(*args, **kwargs)
    assert (again.sampler, again.num_workers, len(again)) == (sampler, 1, 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [1.0, 5], ids=["whole epochs", "limited"])
def test_lightning_goes_on_over_a_store_where_it_stopped(lightning_trainer, path, limit):
    """At an epoch's end Lightning keeps no state of a loader: it says which epoch begins, after iter()."""

    def loader(**options):
        return DataLoader(path, 40, decode=lambda data: torch.tensor([index_of(data)]), **options)

    def shuffled():
        return loader(shuffle=True, seed=3)

    def fit(resumed=None):
        return lightning_trainer(shuffled(), resumed, max_epochs=3, limit_train_batches=limit)

    whole = fit()
    steps = len(whole) // 3
    epoch = [whole[:steps], whole[steps : 2 * steps], whole[2 * steps :]]
    assert len({str(one) for one in epoch}) == 3
    assert fit("stopped.ckpt") == whole[4:]
    assert fit("0.ckpt") == whole[steps:]
    assert fit("1.ckpt") == epoch[2]
    sampled = shuffled()
    assert list(sampled.sampler) == [i for batch, _ in sampled for i in batch[:, 0].tolist()]
    with pytest.raises(ValueError, match="needs to subclass"):  # which Lightning would not shuffle
        lightning_trainer(shuffled(), overfit_batches=2)
    stored = lightning_trainer(loader(), max_epochs=2, overfit_batches=2)
    assert stored[:2] == stored[2:]


@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_over_tokens_where_it_stopped(lightning_trainer, tmp_path):
    hr.pack(
        [np.arange(i * 50, i * 50 + 50, dtype=np.uint16).tobytes() for i in range(20)],
        tmp_path / "t.hr",
    )

    def loader(**options):
        return TokenDataLoader(tmp_path / "t.hr", 8, 5, seed=3, stored="uint16", **options)

    def fit(resumed=None):
        return lightning_trainer(loader(), resumed, max_epochs=3, limit_train_batches=6)

    whole = fit()
    assert fit("stopped.ckpt") == whole[4:]
    assert fit("0.ckpt") == whole[6:]
    assert fit("1.ckpt") == whole[12:]
    stored = lightning_trainer(loader(shuffle=False), max_epochs=2, overfit_batches=2)
    assert stored[:2] == stored[2:]

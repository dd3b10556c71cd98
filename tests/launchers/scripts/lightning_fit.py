"""Lightning: two ranks on CPUs, by whichever launcher it finds or is."""

import lightning
import torch
from consumed import arguments, loader_named, numbers_of, record


class Module(lightning.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.layer = torch.nn.Linear(1, 1)
        self.numbers = []

    def training_step(self, batch, _):
        self.numbers += numbers_of(batch)
        return self.layer(torch.ones(1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hooked(Module):
    def train_dataloader(self):
        return loader_named(self.args.loaders[0], self.args)


if __name__ == "__main__":
    args = arguments()
    (name,) = args.loaders
    trainer = lightning.Trainer(
        devices=2, strategy="ddp", accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Hooked(args) if args.hook else Module(args)
    trainer.fit(module, *([] if args.hook else [loader_named(name, args)]))
    record(args, name, module.numbers)

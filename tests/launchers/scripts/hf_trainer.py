"""Hugging Face's Trainer, whose loader is ours: the hook that it documents."""

import tempfile

import transformers
from consumed import arguments, loader_named, record
from torch_data import Model, as_dict


class Trainer(transformers.Trainer):
    def get_train_dataloader(self):
        loader = loader_named(args.loaders[0], args, as_dict)
        return self.accelerator.prepare(loader) if args.prepare else loader


if __name__ == "__main__":
    args = arguments()
    (name,) = args.loaders
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder, use_cpu=True, num_train_epochs=1, report_to="none", save_strategy="no",
            per_device_train_batch_size=args.batch_size, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        # It asks a data set for its length only; the loader is the hook's.
        Trainer(model, settings, train_dataset=range(600)).train()
    record(args, name, model.numbers)

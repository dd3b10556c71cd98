"""Accelerate, with or without handing it the loader."""

import accelerate
import torch
from consumed import arguments, loader_named, numbers_of, record
from torch_data import Model


def train(args):
    accelerator = accelerate.Accelerator(cpu=True)
    for name in args.loaders:
        model, loader = Model(), loader_named(name, args)
        if args.prepare:
            loader = accelerator.prepare(loader)
        for batch in loader:
            model(torch.tensor(numbers_of(batch)))["loss"].backward()
        record(args, name, model.numbers)
    accelerator.end_training()


if __name__ == "__main__":
    train(arguments())

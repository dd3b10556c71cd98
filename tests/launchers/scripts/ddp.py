"""PyTorch, as a script for torchrun is written: the group is made from the environment."""

import torch
from consumed import arguments, loader_named, numbers_of, record
from torch_data import Model

if __name__ == "__main__":
    args = arguments()
    early = {name: loader_named(name, args) for name in args.loaders} if args.early else {}
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Model())
    for name in args.loaders:
        loader = early.get(name) or loader_named(name, args)
        model.module.numbers.clear()
        for batch in loader:  # each step ends when all ranks have made it
            model(torch.tensor(numbers_of(batch)))["loss"].backward()
        record(args, name, model.module.numbers)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

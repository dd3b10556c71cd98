"""PyTorch without a launcher: the ranks are spawned by the script, which tells each its number."""

import sys

import torch
from consumed import arguments, consume, loader_named

RANKS = 2


def train(rank, words, port):
    args = arguments(words)
    early = {name: loader_named(name, args) for name in args.loaders} if args.early else {}
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    for name in args.loaders:
        consume(args, name, early.get(name))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    torch.multiprocessing.spawn(train, (sys.argv[1:], port), nprocs=RANKS)

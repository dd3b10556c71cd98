"""DeepSpeed: its launcher starts the ranks.

Its own call for the group would compile an operation first, for minutes.
"""

import argparse
import sys

import torch
from consumed import arguments, consume

if __name__ == "__main__":
    launched = argparse.ArgumentParser()
    launched.add_argument("--local_rank", type=int, default=0)
    _, words = launched.parse_known_args(sys.argv[1:])
    args = arguments(words)
    torch.distributed.init_process_group("gloo")
    for name in args.loaders:
        consume(args, name)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

"""DeepSpeed: its launcher starts the ranks, its own call makes the group."""

import argparse
import sys

import deepspeed
from consumed import arguments, consume

if __name__ == "__main__":
    launched = argparse.ArgumentParser()
    launched.add_argument("--local_rank", type=int, default=0)
    _, words = launched.parse_known_args(sys.argv[1:])
    args = arguments(words)
    deepspeed.init_distributed("gloo")
    for name in args.loaders:
        consume(args, name)
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()

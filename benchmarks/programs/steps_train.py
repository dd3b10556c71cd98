"""Trains as far as a loader can tell, and prints what each step took: torch's DataLoader over a folder.

    python steps_train.py ROOT --workers 2 --batch 16 --step-ms-per-sample 1 [--storage nfs] [--ranks 2]

Computing is a sleep, as on an accelerator. Decoding is a sleep, too, or with --decode busy a hash over
the sample. The storage is simulated in the process (headrace.testing); all ranks are
forked from it, share it, and meet at every step.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from headrace.testing import simulated_files


class Files(Dataset):
    def __init__(self, root, decode_s, busy):
        self.paths = sorted(str(p) for p in Path(root).rglob("*") if p.is_file())
        self.decode_s, self.busy = decode_s, busy

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb", buffering=0) as f:
            data = f.readall()
        if self.busy:
            until = time.process_time() + self.decode_s
            while time.process_time() < until:
                hashlib.sha256(data[:4096]).digest()
        elif self.decode_s:
            time.sleep(self.decode_s)
        return len(data)


def train(rank, options, barrier, results):
    torch.set_num_threads(1)
    data = Files(options.root, options.decode_ms / 1e3, options.decode == "busy")
    sampler = DistributedSampler(data, options.ranks, rank, shuffle=True, seed=1, drop_last=True)
    loader = DataLoader(
        data, batch_size=options.batch, sampler=sampler, num_workers=options.workers, drop_last=True
    )
    waits, steps = [], []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        begun = asked = time.perf_counter()
        for _ in loader:
            got = time.perf_counter()
            time.sleep(options.step_ms_per_sample * options.batch / 1e3)
            if barrier is not None:
                barrier.wait()
            now = time.perf_counter()
            waits.append(got - asked)
            steps.append(now - begun)
            begun = asked = now
            if len(steps) == options.steps:
                break
        if len(steps) == options.steps:
            break
    results.put((rank, steps, waits))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms-per-sample", type=float, default=1.0)
    parser.add_argument("--decode-ms", type=float, default=0.0)
    parser.add_argument("--decode", choices=["sleep", "busy"], default="sleep")
    parser.add_argument("--storage")
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    results = multiprocessing.get_context("fork").SimpleQueue()
    slow = (
        simulated_files(options.storage, options.root)
        if options.storage
        else contextlib.nullcontext()
    )
    with slow as volume:
        if volume is not None:
            volume.scale_latency(options.slower)
        if options.ranks == 1:
            train(0, options, None, results)
        else:
            barrier = multiprocessing.get_context("fork").Barrier(options.ranks)
            children = []
            for rank in range(options.ranks):
                child = os.fork()
                if child == 0:
                    train(rank, options, barrier, results)
                    os._exit(0)
                children.append(child)
        found = [results.get() for _ in range(options.ranks)]
        if options.ranks > 1:
            for child in children:
                os.waitpid(child, 0)
    print(json.dumps([{"rank": r, "step_s": s, "wait_s": w} for r, s, w in sorted(found)]))


if __name__ == "__main__":
    main()

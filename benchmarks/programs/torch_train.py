"""A PyTorch script that knows nothing of headrace: a data set of files, a DataLoader, a step of fixed time.

    python torch_train.py LIST WORKERS BATCH STEP_S EPOCHS

Epoch e goes through the files in the order of `random.Random(e).shuffle`. Prints a line of JSON.
"""

import json
import random
import sys
import time
import zlib

import torch.utils.data

paths = open(sys.argv[1]).read().split("\n")
workers, batch, step_s, epochs = (
    int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]),
)  # fmt: skip


class Files(torch.utils.data.Dataset):
    def __len__(self):
        return len(paths)

    def __getitem__(self, index):
        with open(paths[index], "rb") as f:
            return f.read()


class Shuffled(torch.utils.data.Sampler):
    epoch = 0

    def __len__(self):
        return len(paths)

    def __iter__(self):
        order = list(range(len(paths)))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


sampler = Shuffled()
loader = torch.utils.data.DataLoader(
    Files(), batch, sampler=sampler, num_workers=workers, collate_fn=list,
    persistent_workers=workers > 0,
)  # fmt: skip
seconds, crc, nbytes = [], 0, 0
for sampler.epoch in range(epochs):
    began = due = time.perf_counter()
    for samples in loader:
        nbytes += sum(map(len, samples))
        for sample in samples:
            crc = zlib.crc32(sample[:8], crc)
        due = max(due, time.perf_counter()) + step_s
        time.sleep(max(0.0, due - time.perf_counter()))
    seconds.append(time.perf_counter() - began)
print(json.dumps({"seconds": seconds, "bytes": nbytes, "crc": crc}))

"""The token benchmark: windows of 2,048 tokens in batches of 8, in random order, hot and cold.

    python -m benchmarks.tokens                 # median of 3
    python -m benchmarks.tokens --rounds 1 --tokens 20e6

Documents of random lengths are written in each engine's own format, uint16. Engines take turns, round after
round, each run in a fresh process that reads for some seconds; cold runs begin with the files out of the page
cache. Each delivers what a step needs: inputs and targets, int64 tensors where the engine makes tensors. An
engine whose package is not installed is left out, and that is said. `disk` reads the same bytes one behind the
other, past the page cache, in pieces of 4 MiB, eight at a time: no engine can be faster cold.
Writes raw runs to benchmarks/results/.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import numpy as np

from benchmarks import machine
from benchmarks.processes import leaving_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESULTS = ROOT / "benchmarks/results"
LENGTH, BATCH = 2048, 8
SECONDS = 3.0
"""Of one run, after its first batch."""


def _documents(tokens: float) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(1)
    left = int(tokens)
    while left > 0:
        size = min(left, int(rng.lognormal(6.2, 1.0)) + 1)
        yield rng.integers(0, 50_000, size).astype(np.uint16)
        left -= size


# -- formats: each writes the documents into a folder ------------------------------------------------


def _write_headrace(folder: Path, tokens: float) -> None:
    import headrace as hr

    hr.pack(lambda: (document.tobytes() for document in _documents(tokens)), folder / "store.hr")


def _write_flat(folder: Path, tokens: float) -> None:
    with (folder / "train.bin").open("wb") as f:
        for document in _documents(tokens):
            f.write(document.tobytes())


def _write_litdata(folder: Path, tokens: float) -> None:
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=64 << 20, item_loader=TokensLoader())
    for i, document in enumerate(_documents(tokens)):
        writer[i] = torch.from_numpy(document.astype(np.int32))
    writer.done()
    writer.merge()


def _write_megatron(folder: Path, tokens: float) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "train.bin"), dtype=np.uint16)
    for document in _documents(tokens):
        builder.add_document(torch.from_numpy(document.astype(np.int32)), [len(document)])
    builder.finalize(str(folder / "train.idx"))
    next(_megatron(folder))  # it keeps its shuffled index on disk


def _write_mds(folder: Path, tokens: float) -> None:
    from streaming import MDSWriter

    flat = np.concatenate(list(_documents(tokens)))
    columns = {"tokens": f"ndarray:uint16:{LENGTH + 1}"}
    with MDSWriter(out=str(folder / "mds"), columns=columns) as out:
        for start in range(0, len(flat) - LENGTH, LENGTH):
            out.write({"tokens": flat[start : start + LENGTH + 1]})


# -- engines: each yields batches of inputs and targets for ever ---------------------------------------


def _headrace(folder: Path) -> Iterator[Any]:
    import headrace as hr

    loader = hr.tokens(folder / "store.hr", LENGTH, BATCH, stored="uint16", seed=1)
    while True:
        for batch in loader:
            yield batch.inputs, batch.targets


def _headrace_torch(folder: Path) -> Iterator[Any]:
    from headrace.torch import TokenDataLoader

    loader = TokenDataLoader(folder / "store.hr", LENGTH, BATCH, stored="uint16", seed=1)
    while True:
        for batch in loader:
            yield batch.inputs, batch.targets


def _memmap(folder: Path) -> Iterator[Any]:
    """What nanoGPT does: random places of one mapped array, with replacement."""
    import torch

    while True:
        data = np.memmap(
            folder / "train.bin", np.uint16, mode="r"
        )  # anew, against its growing memory
        places = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()

        def rows(shift: int, data: Any = data, places: list[int] = places) -> Any:
            pieces = (data[p + shift : p + shift + LENGTH].astype(np.int64) for p in places)
            return torch.stack([torch.from_numpy(piece) for piece in pieces])

        yield rows(0), rows(1)


def _grain(folder: Path) -> Iterator[Any]:
    import grain

    class Windows:
        def __init__(self) -> None:
            self.data = np.memmap(folder / "train.bin", np.uint16, mode="r")

        def __len__(self) -> int:
            return (len(self.data) - 1) // LENGTH

        def __getitem__(self, i: int) -> np.ndarray:
            return self.data[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int32)

    windows = grain.MapDataset.source(Windows()).shuffle(seed=1).repeat().batch(BATCH)
    for batch in windows.to_iter_dataset():
        yield batch[:, :-1], batch[:, 1:]


def _litdata(folder: Path) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.item_loader import TokensLoader

    loader = TokensLoader(block_size=LENGTH + 1)
    dataset = StreamingDataset(str(folder), item_loader=loader, shuffle=True, seed=1)
    batches = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0)
    while True:
        for batch in batches:
            tokens = batch.long()
            yield tokens[:, :-1], tokens[:, 1:]


class _NoTokenizer:
    """What Megatron asks of a tokenizer where tokens are there already."""

    eod = pad = 0
    vocab_size = 50_000
    unique_identifiers: ClassVar = {"class": "none"}


def _megatron(folder: Path) -> Iterator[Any]:
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=1, sequence_length=LENGTH, blend=([str(folder / "train")], None), split="1",
        path_to_cache=str(folder / "cache"), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, tokenizer=_NoTokenizer(),
    )  # fmt: skip
    windows = (folder / "train.bin").stat().st_size // 2 // LENGTH
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [windows, 0, 0], lambda: True, config)
    dataset = builder.build()[0]
    while True:
        for batch in torch.utils.data.DataLoader(dataset, BATCH):
            yield batch["tokens"], batch["labels"]


def _disk(folder: Path) -> Iterator[Any]:
    """The disk's limit: a batch's worth of bytes after the other, of one file, again and again."""
    size, step = (folder / "train.bin").stat().st_size, 4 << 20
    fd = os.open(folder / "train.bin", os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, step) for _ in range(8)]
    per_batch = LENGTH * BATCH * 2
    row = np.zeros((BATCH, LENGTH), np.int64)
    with ThreadPoolExecutor(8) as pool:
        while True:
            for first in range(0, size // step * step, 8 * step):
                places = range(first, min(first + 8 * step, size // step * step), step)
                reads = [
                    pool.submit(os.preadv, fd, [b], at)
                    for b, at in zip(buffers, places, strict=False)
                ]
                for _ in range(sum(read.result() for read in reads) // per_batch):
                    yield row, row


def _mds(folder: Path) -> Iterator[Any]:
    import torch
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)

    def collate(samples: list[Any]) -> Any:
        return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))

    while True:
        for tokens in torch.utils.data.DataLoader(dataset, BATCH, collate_fn=collate):
            yield tokens[:, :-1], tokens[:, 1:]


ENGINES: dict[str, tuple[str, Callable[..., None], Callable[..., Iterator[Any]], str]] = {
    "headrace": ("store", _write_headrace, _headrace, "headrace"),
    "headrace, torch int64": ("store", _write_headrace, _headrace_torch, "torch"),
    "nanoGPT memmap": ("flat", _write_flat, _memmap, "torch"),
    "Grain over memmap": ("flat", _write_flat, _grain, "grain"),
    "LitData TokensLoader": ("litdata", _write_litdata, _litdata, "litdata"),
    "MosaicML Streaming": ("mds", _write_mds, _mds, "streaming"),
    "Megatron GPTDataset": ("megatron", _write_megatron, _megatron, "megatron.core"),
    "disk": ("flat", _write_flat, _disk, "mmap"),
}
"""By name: the folder of its data, what writes them, what reads them, the module that it takes."""


def _evict(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _warm(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def run(engine: str, folder: Path) -> dict[str, float]:
    """One run in this process: tokens a second, CPU s for a billion tokens, seconds to the first batch."""
    warnings.simplefilter("ignore")  # what others' packages miss is not measured
    begun = time.perf_counter()
    batches = ENGINES[engine][2](folder)
    total = int(next(batches)[0][0][0]) * 0
    first = time.perf_counter()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for step in count(1):
        inputs, targets = next(batches)
        total += inputs.shape[0] * inputs.shape[1]
        if step % 16 == 0 and (inputs[:, 1:] != targets[:, :-1]).any():
            raise ValueError(f"{engine}: targets are not what follows the inputs")
        if (seconds := time.perf_counter() - first) > SECONDS:
            break
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return {
        "tokens_per_s": total / seconds, "cpu_s_per_gtoken": cpu / total * 1e9, "first_batch_s": first - begun,
    }  # fmt: skip


def _available() -> list[str]:
    names = []
    for name, (_, _, _, module) in ENGINES.items():
        try:
            import_module(module)
        except ImportError as e:
            print(f"{name}: left out, {module} is not installed ({e})", file=sys.stderr)
        else:
            names.append(name)
    return names


@leaving_nothing()
def main() -> None:
    """Write the data, run the engines in turn, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=float, default=200e6)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--no-results", action="store_true")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one[0], Path(options.one[1]))), flush=True)
        os._exit(0)  # whatever threads and processes an engine has left
    engines = _available()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as base:
        for engine in engines:
            where, write, _, _ = ENGINES[engine]
            folder = Path(base) / where
            if not folder.exists():
                folder.mkdir()
                write(folder, options.tokens)
        for number in range(options.rounds):
            for temperature in ("hot", "cold"):
                for engine in engines:
                    folder = Path(base) / ENGINES[engine][0]
                    (_warm if temperature == "hot" else _evict)(folder)
                    command = [sys.executable, __file__, "--one", engine, str(folder)]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    row = {"engine": engine, "temperature": temperature, "round": number}
                    if done.returncode:
                        row["error"] = done.stderr.strip().splitlines()[-1][:300]
                    else:
                        row |= json.loads(done.stdout.strip().splitlines()[-1])
                    runs.append(row)
                    print(row, file=sys.stderr, flush=True)
    _show(engines, runs)
    if not options.no_results:
        today = dt.datetime.now(tz=dt.UTC).date()
        document = {"tokens": options.tokens, "machine": machine.describe(RESULTS), "runs": runs}
        (RESULTS / f"tokens-{today}.json").write_text(json.dumps(document, indent=1) + "\n")


def _show(engines: list[str], runs: list[dict[str, Any]]) -> None:
    print("| engine | hot, million tokens/s | cold | CPU s per billion tokens, hot | cold |")
    print("|---|---|---|---|---|")
    for engine in engines:
        cells = []
        for figure, scale in (("tokens_per_s", 1e-6), ("cpu_s_per_gtoken", 1.0)):
            for temperature in ("hot", "cold"):
                mine = [
                    r[figure] * scale for r in runs
                    if (r["engine"], r["temperature"]) == (engine, temperature) and figure in r
                ]  # fmt: skip
                cells.append(f"{statistics.median(mine):.1f}" if mine else "failed")
        print(f"| {engine} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

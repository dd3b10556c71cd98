"""PRISMA: small networks, and an emulated accelerator, on files; each way of loading them.

Data are set A's files (110 kB in the middle), nine parts for training and one for validation. `cold` is the
local disk, out of the page cache where an epoch begins, as if the set were larger than memory; `lustre` is
simulated. headrace may keep a quarter of the set in memory. Every way must deliver each sample once an
epoch, and all that take an order must have taken the same.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import datasets, forms
from benchmarks.paper_parts import ROOT, Options, train
from benchmarks.unmodified import HEADRACE, daemon

if TYPE_CHECKING:
    from collections.abc import Sequence

FRAMEWORKS = ROOT / ".venv-frameworks/bin/python"
STEP_S = {"light": 0.004, "heavy": 0.080}
"""Of 64 samples: about LeNet's or AlexNet's, and ResNet-50's, on one of today's accelerators."""

VALIDATION = 0.11
WARM_UP_S = 0.5
"""PRISMA's tuner looks on for 15 s first: in epochs of seconds that would be all of them."""


class Case(NamedTuple):
    """Where the files are, what is trained, and samples a batch."""

    storage: str
    model: str
    batch: int

    @property
    def title(self) -> str:
        """As the page says it."""
        where = "local disk, cold" if self.storage == "cold" else f"simulated {self.storage}"
        what = (
            f"emulated accelerator, {self.model}"
            if self.model in STEP_S
            else f"{self.model} on the CPU"
        )
        return f"{where}; {what}; batch {self.batch}"


class Way(NamedTuple):
    """Who loads, and with how many workers, or parallel calls of tf.data."""

    name: str
    workers: int = 0

    @property
    def title(self) -> str:
        """As the page says it."""
        if self.name == "store":
            return "packed store"
        titles = {
            "run": "headrace run",
            "run-order": "run --order",
            "dropin": "drop-in",
            "prisma": "PRISMA",
        }
        who = titles.get(self.name, self.name)
        return f"{who}, {'AUTOTUNE' if self.workers < 0 else self.workers}"


def cases(options: Options, framework: str) -> list[Case]:
    if options.tiny:
        return [Case("lustre", "light", 64)]
    if options.quick:
        few = [Case("cold", "lenet", 64), Case("lustre", "light", 64)]
        return [*few, Case("lustre", "light", 256)] if framework == "torch" else few
    return [
        Case(storage, model, batch)
        for storage, models in (("cold", ("lenet", "alexnet")), ("lustre", ("light", "heavy")))
        for model, batch in itertools.product(models, (64, 128, 256))
    ]


def ways(options: Options, framework: str) -> list[Way]:
    if framework == "tensorflow":
        own = [Way("tensorflow", n) for n in (0, 16, -1)]
        return [*own, Way("prisma"), Way("run-order"), Way("store")]
    workers: tuple[int, ...] = (0, 4) if options.quick else (0, 2, 4, 8)
    if options.tiny:
        workers = (2,)
    fewer = [n for n in workers if n != 2 or options.tiny]
    return [
        *(Way("torch", n) for n in workers), *(Way("prisma", n) for n in fewer), Way("run", workers[-1]),
        *(Way("run-order", n) for n in fewer[:2]), *(Way("dropin", n) for n in fewer), Way("store"),
    ]  # fmt: skip


class Files:
    """The data, as files and packed, with their lists."""

    def __init__(self, options: Options, epochs: int) -> None:
        count = 96 if options.tiny else 512 if options.quick else 1024
        held_out = round(count * VALIDATION)
        self.dir = options.dir
        data = [datasets.DataSet("A", n, 64) for n in (count, held_out)]
        folders = [forms.ensure(options.dir, each, "files") for each in data]
        self.stores = [forms.ensure(options.dir, each, "headrace") for each in data]
        paths = [sorted(str(p) for p in folder.rglob("*") if p.is_file()) for folder in folders]
        self.epochs, self.bytes = epochs, sum(each.total_bytes for each in data)
        self.samples = epochs * (count + held_out)
        self.all = [Path(p) for part in paths for p in part]
        self.packed = [p for store in self.stores for p in (store.rglob("*") if store.is_dir() else [store])
                       if p.is_file()]  # fmt: skip
        self.folders = folders
        order: list[str] = []
        for epoch in range(epochs):
            numbers = list(range(count))
            random.Random(epoch).shuffle(numbers)
            order += [*(paths[0][k] for k in numbers), *paths[1]]
        self.lists = [self._list("train", paths[0]), self._list("valid", paths[1])]
        self.order = self._list("order", order)

    def _list(self, name: str, lines: Sequence[str]) -> str:
        path = self.dir / f"paper-{name}"
        path.write_text("\n".join(lines))
        return str(path)


def measure(files: Files, framework: str, case: Case, way: Way) -> dict[str, Any]:
    """One way in one case."""
    simulate = None if case.storage == "cold" else case.storage
    own = {"run": framework, "run-order": framework}.get(way.name, way.name)
    with tempfile.TemporaryDirectory(prefix="hr-paper-") as folder:
        spec = {
            "way": own, "workers": way.workers, "batch": case.batch, "epochs": files.epochs,
            "model": "accelerator" if case.model in STEP_S else case.model,
            "step_s": STEP_S.get(case.model, 0.0) * case.batch / 64, "simulate": simulate,
            "lists": files.lists, "stores": [str(s) for s in files.stores],
            "ram_bytes": files.bytes // 4, "warm_up_s": WARM_UP_S, "socket": f"{folder}/prisma",
        }  # fmt: skip
        interpreter = sys.executable if framework == "torch" else str(FRAMEWORKS)
        program = [interpreter, "-m", f"benchmarks.programs.paper_{framework}", json.dumps(spec)]
        roots = [word for root in files.folders for word in ("--root", str(root))]
        slow = ["--simulate", simulate] if simulate else []
        cold = files.packed if own == "store" else files.all
        if way.name.startswith("run"):
            order = ["--order", files.order] if way.name == "run-order" else []
            with daemon("--ram", str(files.bytes // 4)) as environment:
                return train(
                    [HEADRACE, "run", *roots, *slow, *order, "-q", "--", *program],
                    environment,
                    cold,
                )
        if simulate and own not in ("store", "dropin"):
            program = [HEADRACE, "run", *roots, *slow, "--simulate-only", "-q", "--", *program]
        return train(program, os.environ, cold)


def run(options: Options, framework: str) -> dict[str, Any]:
    """Every way in every case; the wrong bytes, or another order, are an error."""
    if framework == "tensorflow" and not FRAMEWORKS.exists():
        raise RuntimeError(f"{FRAMEWORKS} is not there: make .venv/done/frameworks")
    files = Files(options, 2 if options.tiny else 3 if options.quick else 4)
    rows = []
    for case in cases(options, framework):
        orders = set()
        for way in ways(options, framework):
            began = time.monotonic()
            seen = measure(files, framework, case, way)
            if seen["samples"] != files.samples or seen["bytes"] != files.epochs * files.bytes:
                raise RuntimeError(
                    f"{case.title}, {way.title}: {seen['samples']} of {files.samples} samples"
                )
            if way.name != "store":
                orders.add(seen["crc"])
            seconds = statistics.median(
                map(sum, zip(seen["train_s"], seen["valid_s"], strict=True))
            )
            print(f"  {framework}; {case.title}; {way.title}: {seconds:.2f} s an epoch "
                  f"({time.monotonic() - began:.0f} s in all)", flush=True)  # fmt: skip
            rows.append({
                "storage": case.storage, "model": case.model, "batch": case.batch, "case": case.title,
                "way": way.name, "workers": way.workers, "seconds": seconds, **seen,
            })  # fmt: skip
        if len(orders) != 1:
            raise RuntimeError(f"{case.title}: ways delivered different orders: {orders}")
    return {"epochs": files.epochs, "files": len(files.all), "bytes": files.bytes, "rows": rows}

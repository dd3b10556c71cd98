"""A program that reads over the node daemon until it is told to end, and believes nothing.

    python -m soak.client '{"kind": "plain", "data": ..., "order": ..., "page": ..., ...}'

Every batch is compared with what the tester knows: indices with the order that was noted before
anything was killed, labels and bytes with `samples`. Some batches are kept for a while and looked at
again. What is wrong is written to stderr, and counted on the page.

Kinds: `plain` begins anew when it is killed, `resume` goes on where it was, `torch` reads in torch's
worker processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from soak.page import CALLS, Page
from soak.samples import SAMPLES, content, label

KEPT_MAX = 3
EPOCHS_PER_LOADER = 3


class Ended(Exception):
    """The driver wants it to end."""


class Client:
    """What all kinds share.

    Args:
        options: see the actors.
    """

    def __init__(self, options: dict[str, object]) -> None:
        self.options = options
        self.page = Page(Path(str(options["page"])))
        self.order = np.load(str(options["order"]))  # (epochs, samples)
        self.expected = [content(i) for i in range(SAMPLES)]
        self.batch_size = int(str(options["batch"]))
        self.pause_s = float(str(options["pause_s"]))
        self.kept: deque[object] = deque()
        self.random = random.Random(os.getpid())
        self.ended = False
        self.node_batches = self.direct_batches = 0
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        self.ended = True

    def timed(self, name: str, function, *arguments):
        """Do something within the sight of the watchdog."""
        page, number = self.page, CALLS.index(name)
        stopped = page.stopped_ns
        page.call, page.call_stopped_ns = number, stopped
        page.call_began_ns = time.monotonic_ns()
        try:
            return function(*arguments)
        finally:
            took = time.monotonic_ns() - page.call_began_ns - (page.stopped_ns - stopped)
            page.call_began_ns = 0
            if took > page.longest_ns:
                page.longest_ns, page.longest_call = took, number

    def wrong(self, what: str) -> None:
        self.page.wrong += 1
        print(f"WRONG: {what}", file=sys.stderr, flush=True)

    def check(self, batch) -> None:
        """Compare a batch with what it must be."""
        epoch, at = batch.epoch % len(self.order), batch.position
        indices = batch.indices.tolist()
        if indices != self.order[epoch, at : at + len(indices)].tolist():
            self.wrong(f"epoch {epoch} at {at}: {indices} are not the samples of this place")
        if batch.labels.tolist() != [label(i) for i in indices]:
            self.wrong(f"epoch {epoch} at {at}: labels {batch.labels.tolist()}")
        self.check_bytes(batch)

    def check_bytes(self, batch) -> None:
        for index, sample in zip(batch.indices.tolist(), batch, strict=True):
            if bytes(sample) != self.expected[index]:
                self.wrong(f"sample {index} has other bytes")
        self.page.samples += len(batch)

    def keep(self, batch) -> None:
        """Keep some batches, and look at them again when others have been read."""
        if self.random.random() < 0.2:
            self.kept.append(batch)
        if len(self.kept) > KEPT_MAX:
            self.check_bytes(self.kept.popleft())

    def note(self, loader) -> None:
        """Say how the loader fares with the daemon."""
        for stage in loader.stages:
            if stage.name == "node":
                report = stage.report()
                page = self.page
                page.attached = report.attached
                page.node_batches += report.node_batches - self.node_batches
                page.direct_batches += report.direct_batches - self.direct_batches
                self.node_batches, self.direct_batches = report.node_batches, report.direct_batches

    def pause(self) -> None:
        time.sleep(self.random.uniform(0, 2 * self.pause_s))
        if self.ended:
            raise Ended

    # -- kinds ------------------------------------------------------------------------------------

    def plain(self) -> None:
        """Epoch after epoch, a new loader now and then."""
        import headrace as hr

        state_file = Path(str(self.options["state"])) if self.options.get("state") else None
        resumed = None
        if state_file is not None and state_file.exists():
            resumed = json.loads(state_file.read_text())
        while True:
            store = self.timed("open", hr.open, str(self.options["data"]))
            loader = self.timed("loader", lambda store=store: self.loader(hr, store))
            self.node_batches = self.direct_batches = 0
            try:
                for _ in range(EPOCHS_PER_LOADER):
                    if resumed is not None:
                        loader.load_state_dict(resumed)
                        self.page.resumes += 1
                    elif loader.epoch >= len(self.order):
                        loader.set_epoch(0)
                    self.epoch(loader, state_file)
                    resumed = None
            finally:
                self.timed("close", loader.close)
                store.close()

    def loader(self, hr, store):
        return hr.loader(
            store, self.batch_size, seed=int(str(self.options["seed"])), plane="node",
            budget_bytes=1 << 20,
        )  # fmt: skip

    def epoch(self, loader, state_file) -> None:
        began = loader.position
        iterator = self.timed("iter", iter, loader)
        count = 0
        while (batch := self.timed("next", next, iterator, None)) is not None:
            if not count and batch.position != began:
                self.wrong(f"resumed at {batch.position} instead of {began}")
            count += len(batch)
            self.check(batch)
            self.keep(batch)
            del batch
            self.page.batches += 1
            self.note(loader)
            if state_file is not None:
                new = state_file.with_suffix(".new")
                new.write_text(json.dumps(loader.state_dict()))
                new.replace(state_file)
            self.pause()
        if began + count != SAMPLES:
            self.wrong(f"an epoch from {began} had {count} samples of {SAMPLES}")
        self.page.epochs += 1

    def torch(self) -> None:
        """In worker processes, some of which are killed."""
        from headrace.torch import DataLoader

        while True:
            loader = self.timed(
                "loader",
                lambda: DataLoader(
                    str(self.options["data"]), self.batch_size, shuffle=True,
                    seed=int(str(self.options["seed"])), plane="node", decode=self.decoded, num_workers=2,
                ),
            )  # fmt: skip
            for epoch in range(len(self.order)):
                loader.set_epoch(epoch)
                try:
                    self.torch_epoch(loader, epoch)
                except RuntimeError as e:
                    # A killed worker is torch's own error.
                    if "worker" not in str(e):
                        raise
                    self.page.worker_errors += 1

    def torch_epoch(self, loader, epoch: int) -> None:
        iterator = self.timed("iter", iter, loader)
        at = 0
        while (batch := self.timed("next", next, iterator, None)) is not None:
            indices = batch[0].tolist()
            if indices != self.order[epoch, at : at + len(indices)].tolist():
                self.wrong(f"epoch {epoch} at {at}: {indices} are not the samples of this place")
            if batch[1].tolist() != [label(i) for i in indices]:
                self.wrong(f"epoch {epoch} at {at}: labels {batch[1].tolist()}")
            at += len(indices)
            self.page.samples += len(indices)
            self.page.batches += 1
            self.pause()
        if at != SAMPLES:
            self.wrong(f"an epoch had {at} samples of {SAMPLES}")
        self.page.epochs += 1

    def decoded(self, data, sample) -> int:
        """Runs in a worker: the sample's number, if its bytes are right."""
        return sample.index if bytes(data) == self.expected[sample.index] else -1


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    options = json.loads(sys.argv[1])
    client = Client(options)
    kinds = {"plain": client.plain, "resume": client.plain, "torch": client.torch}
    with contextlib.suppress(Ended):
        kinds[options["kind"]]()
    while client.kept:
        client.check_bytes(client.kept.popleft())


if __name__ == "__main__":
    main()

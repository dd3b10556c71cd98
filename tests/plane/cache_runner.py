"""A training run that may be killed: run as a script, it reads epochs with a cache and says what it saw.

    python cache_runner.py SOURCE CACHE EPOCHS [STATE [told]]

Prints a line per batch, `position hash`, so that whoever reads along can kill it at any point. Saves
its state to STATE after each batch and goes on from there. Segments are published all the time. With `told`
it waits for a line before each line of its own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import headrace as hr
from headrace.plane import cache_writer

BATCH = 20


def digest(batch):
    """A batch in one line."""
    found = hashlib.sha256(batch.indices.tobytes() + batch.labels.tobytes())
    for sample in batch:
        found.update(sample)
    return found.hexdigest()[:16]


def main(source, cache, epochs, state=None, told=None):
    """Read `epochs` epochs."""
    cache_writer.publish_after_s = lambda _: 0.0  # every batch a segment: a kill can hit any step
    with hr.open(source) as store:
        loader = hr.loader(store, BATCH, seed=5, cache_dir=cache)
        if state is not None and Path(state).exists():
            loader.load_state_dict(json.loads(Path(state).read_text()))
        while loader.epoch < int(epochs):
            epoch = loader.epoch
            for batch in loader:
                if told is not None:
                    sys.stdin.readline()
                print(f"{epoch}:{loader.position} {digest(batch)}", flush=True)
                if state is not None:
                    Path(f"{state}.new").write_text(json.dumps(loader.state_dict()))
                    Path(f"{state}.new").replace(state)
        loader.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

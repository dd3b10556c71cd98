"""A training run over the node daemon that may be killed: prints what it saw, batch by batch.

    python node_runner.py STORE EPOCHS [PAUSE_S]

Each line is `epoch:position hash`; the last one says how the loader fared with the daemon.
"""

import hashlib
import json
import sys
import time
from dataclasses import asdict

import headrace as hr
from headrace.node import link, reads


def digest(batch):
    """A batch in one line."""
    digest = hashlib.sha256(batch.indices.tobytes() + batch.labels.tobytes())
    for sample in batch:
        digest.update(sample)
    return digest.hexdigest()[:16]


def main(store, epochs, pause_s=0.0, **options):
    """Read some epochs."""
    with hr.open(store) as opened:
        loader = hr.loader(opened, 20, seed=5, **options)
        for epoch in range(int(epochs)):
            for batch in loader:
                print(f"{epoch}:{loader.position} {digest(batch)}", flush=True)
                time.sleep(float(pause_s))
        for stage in loader.stages:
            if stage.name == "node":
                print(json.dumps(asdict(stage.report())), flush=True)
        loader.close()


if __name__ == "__main__":
    # A daemon that waits for a processor is not lost; one that is killed hangs up.
    link.ALIVE_S = reads.ALIVE_S = reads.FIRST_S = 60.0
    main(*sys.argv[1:4], plane="node")

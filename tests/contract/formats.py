"""What is written to disks and wires: files of version 0.1, kept for good, and what is written today.

`golden/` was made once by `python -m contract.formats golden` and is never written anew: these bytes must be
read for ever. `formats.txt` describes what today's writers make of the same input; it changes with them.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import headrace as hr
from contract.documents import keys
from headrace.base.job import JobIdentity
from headrace.cluster.manifest import write_manifest
from headrace.fabric.image import write_image
from headrace.job.meeting import JobDocument, NodeDocument
from headrace.node.wire import Hello, Note, encode
from headrace.telemetry.accounts import JobFacts, Ledger
from headrace.telemetry.writing import HistoryWriter, file_of
from tests_shared import write_photos
from traces.runs import made_run

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).with_name("golden")

MADE_S = 1_790_000_000.0
"""When the history's job ran."""

TREE = {"step": 7, "lr": 0.001, "weights": np.arange(6, dtype=np.float32).reshape(2, 3)}
RUN = {"run": {"job": "1", "nodes": ["a"]}, "versions": {"torch": "2.13.0"}, "order": {"seed": 7},
       "environment": {}, "result": {"wall_s": 1.0}}  # fmt: skip
NODE = {"session": "s", "node": 0, "host": "node0", "pid": 1, "address": "127.0.0.1:4420", "nqn": "nqn.x",
        "local": "/local", "state": "staged"}  # fmt: skip
JOB = {"session": "s", "job": "1", "generation": 1, "state": "staging", "nodes": 1, "fingerprint": "f",
       "source": "/data", "listing": "listing"}  # fmt: skip
MESSAGES = (Hello(2, "job"), Note(1.0, 0.5, 0.25, 2.0, 3, 12, 4096, 1))
"""Messages to a node daemon."""


def write_all(folder: Path) -> None:
    """One of each format, from the same input."""
    folder.mkdir(parents=True)
    photos = write_photos(folder.parent / "photos", per_class=2)
    hr.pack(photos, folder / "store.hr")
    write_image(folder / "store.hr", folder / "store.img")
    loader = hr.loader(folder / "store.hr", 2, seed=7)
    next(iter(loader))
    (folder / "loader.json").write_text(json.dumps(loader.state_dict()))
    loader.close()
    hr.checkpoint.save(TREE, folder / "checkpoints", 7)
    hr.checkpoint.wait()
    made_run(folder / "run", epochs=1, samples=64)
    write_manifest(folder / "manifest.json", RUN)
    (folder / "node-0.json").write_bytes(NodeDocument(**NODE).to_bytes())
    (folder / "job.json").write_bytes(JobDocument(**JOB).to_bytes())
    (folder / "messages.bin").write_bytes(b"".join(map(encode, MESSAGES)))
    ledger = Ledger()
    ledger.add("1", "seconds", 60.0, MADE_S)
    ledger.add("1", "stall_s", 20.0, MADE_S, "limit", "/scratch")
    ledger.add("1", "stall_s", 10.0, MADE_S, "storage", "/scratch")
    who = JobIdentity(job_id="1", name="resnet", account="physics")
    ledger.know("1", JobFacts(who, "ann", MADE_S, MADE_S + 60, measured=True))
    writer = HistoryWriter(file_of(folder / "history", "node0"), "node0")
    assert writer.write(ledger, now=True)
    writer.close()


def formats_text(folder: Path) -> str:
    """What today's writers make: names, keys of documents, and the bytes of what has no random part."""
    write_all(folder / "new")
    lines = []
    for path in sorted((folder / "new").rglob("*")):
        if path.is_file() and path.suffix != ".lock":
            lines.append(str(path.relative_to(folder / "new")))
            lines += [f"  {line}" for line in _described(path)]
    return "\n".join([*lines, ""])


def _described(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    if path.suffix == ".json":
        yield from sorted(set(keys(json.loads(data))))
        return
    if path.suffix == ".trace":
        head, _, _ = data.partition(b"\n")
        header = json.loads(head)
        layout = {name: header.pop(name) for name in ("phases", "step", "tiers")}
        yield from sorted(set(keys(header)))
        yield from (f"{name} = {value}" for name, value in layout.items())
        return
    if path.suffix == ".telemetry":
        import sqlite3

        with sqlite3.connect(path) as connection:
            found = connection.execute(
                "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY sql"
            )
            yield from (" ".join(sql.split()) for (sql,) in found)
        connection.close()
        return
    if path.suffix == ".img":  # it has the store's own uuid
        yield f"{len(data)} bytes, begins with {data[:8]!r}"
        return
    yield f"{len(data)} bytes, sha256 {sha256(data).hexdigest()}"


def golden_tree(path: Path) -> Any:
    """The tree of a golden checkpoint as plain values."""
    tree = dict(hr.checkpoint.load(path).tree)
    return tree | {"weights": np.asarray(tree["weights"]).tolist()}


if __name__ == "__main__":
    write_all(Path(sys.argv[1]).absolute())

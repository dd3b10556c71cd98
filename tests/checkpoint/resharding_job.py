"""A job whose model and optimizer are cut among its ranks, in several lives, each of another number of ranks.

    resharding_job.py STORE CHECKPOINTS REPORTS RANKS[:STEPS]...      no STEPS: to the end of the epoch

Each rank is a process, the ranks of a life are one gloo group. A rank writes REPORTS/LIFE-RANK.json: what
it was delivered, and checksums of the whole tensors as they were loaded and as they were saved.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import headrace as hr


class Trained:
    """What FSDP leaves of a model and its optimizer: DTensors, cut in two ways, and plain ones beside them.

    Without its modules, whose import takes ten seconds of CPU in each process.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.cuts = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
        self.state = {
            name: distribute_tensor(torch.rand(7, 5), self.mesh, [cut])
            for name, cut in self.cuts.items()
        }
        self.momentum: dict[str, Any] = {}
        self.steps = torch.zeros(())

    def step(self, gradient: float) -> None:
        for name, weights in self.state.items():
            if name not in self.momentum:  # as an optimizer, whose state begins with its first step
                self.momentum[name] = torch.zeros_like(weights)
            self.momentum[name].to_local().mul_(0.9).add_(weights.to_local() * gradient)
            weights.to_local().sub_(0.1 * self.momentum[name].to_local())
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        begun = self.momentum or {name: torch.zeros_like(w) for name, w in self.state.items()}
        return {"model": self.state, "momentum": begun, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.momentum, self.steps = state["model"], state["momentum"], state["steps"]
        for name, cut in self.cuts.items():
            assert self.state[name].placements == self.momentum[name].placements == (cut,)

    def checksums(self) -> list[int]:
        """Of the whole tensors."""
        tensors = [*self.state.values(), *self.state_dict()["momentum"].values()]
        wholes = [*(tensor.full_tensor() for tensor in tensors), self.steps]
        return [crc32(whole.contiguous().numpy().tobytes()) for whole in wholes]


def main() -> None:
    torch.set_num_threads(1)
    store, checkpoints, reports, *lives = sys.argv[1:]
    for life, words in enumerate(lives):
        ranks, _, steps = words.partition(":")
        pids = []
        for rank in range(int(ranks)):
            pid = os.fork()  # torch is imported once for all of them
            if not pid:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks,
                    "TORCHELASTIC_RUN_ID": f"life-{life}",
                }  # fmt: skip
                code = 1
                try:
                    meeting = f"{reports}/meeting-{life}"
                    dist.init_process_group(
                        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=int(ranks)
                    )
                    report = train(store, checkpoints, int(steps or 0))
                    Path(f"{reports}/{life}-{rank}.json").write_text(json.dumps(report))
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        ends = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(ends):
            sys.exit(f"life {life}: {ends}")


def train(path: str, checkpoints: str, steps: int) -> dict[str, Any]:
    """One rank's life."""
    with hr.open(path) as store:
        loader = hr.loader(store, 2, seed=3, tail="exact")
        trained = Trained()
        run = hr.cluster.resume(checkpoints, loader=loader, trained=trained)
        first = run.steps
        report: dict[str, Any] = {"steps": first, "loaded": trained.checksums(), "seen": []}
        for batch in loader:
            report["seen"] += batch.indices.tolist()
            trained.step(1 / (run.steps + 1))
            run.step()
            if run.steps - first == steps:
                break
        report["made"] = run.steps - first
        report["saved"] = trained.checksums()
        report["order_hash"] = loader.last_order_hash or loader.order_hash
        run.save()
        hr.checkpoint.wait()
        dist.barrier()
    return report


if __name__ == "__main__":
    main()

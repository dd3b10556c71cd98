"""Trains a small GPT with PyTorch DDP on any number of ranks, and goes on where it stopped.

    headrace launch train.py                     # all GPUs that there are, here or in an allocation
    sbatch job.sh                                # on a cluster

Each rank gets its part of one sequence of windows of tokens. Attention and loss stay inside a document.
Killed or asked to stop, the next start goes on with the very next batch after what was saved: the loss curve
is that of a run that never stopped.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.cluster import should_stop
from headrace.torch import TokenDataLoader, TokenTensors

VOCABULARY = 257


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: (windows, length, width); mask: (windows, 1, length, length), who sees whom."""
        parts = self.attention(self.norms[0](x)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class Gpt(nn.Module):
    """A decoder of a few blocks; positions are learned, and begin anew in each document."""

    def __init__(self, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, inputs: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """All (windows, length); returns scores, (windows, length, vocabulary)."""
        x = self.tokens(inputs) + self.places(positions)
        same = documents[:, :, None] == documents[:, None, :]
        mask = same.tril().unsqueeze(1)
        for block in self.blocks:
            x = block(x, mask)
        scores: Tensor = self.scores(self.norm(x))
        return scores


class Training:
    """A model and its data, and how far they are."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.loader = TokenDataLoader(
            options.data, options.length, options.batch_size, seed=options.seed, stored="uint16"
        )
        torch.manual_seed(options.seed)  # all ranks begin with the same weights
        model = Gpt(options.length, options.width, 4, options.blocks).to(device)
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate)
        self.steps = 0

    def save(self) -> None:
        """All of it is the same on all ranks: rank 0 saves, any number of ranks go on from it."""
        tree = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
        }
        if dist.get_rank() == 0:
            hr.checkpoint.save(tree, self.options.checkpoints, self.steps, rank=0, world_size=1)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        if hr.checkpoint.latest(self.options.checkpoints) is None:
            return
        saved = hr.checkpoint.load(self.options.checkpoints, rank=0, world_size=1)
        self.model.load_state_dict(saved.tree["model"])
        self.optimizer.load_state_dict(saved.tree["optimizer"])
        self.loader.load_state_dict(saved.tree["loader"])
        self.steps = saved.step

    def step(self, batch: TokenTensors) -> None:
        """Learn from one batch."""
        inputs, targets, positions, documents, counted = (
            each.to(self.device, non_blocking=True)
            for each in (
                batch.inputs, batch.targets, batch.positions, batch.documents, batch.loss_mask,
            )
        )  # fmt: skip
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            scores = self.model(inputs, positions, documents)
            loss = cross_entropy(scores[counted], targets[counted])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.options.show_every == 0:
            mean = loss.detach().double()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                line = {"step": self.steps, "loss": mean.item() / dist.get_world_size()}
                print(json.dumps(line), flush=True)

    def run(self) -> None:
        """Train to the last step, or until it is asked to stop."""
        while self.steps < self.options.steps:
            for batch in self.loader:
                self.step(batch)
                stopping = should_stop() or self.steps >= self.options.steps
                if stopping or self.steps % self.options.save_every == 0:
                    self.save()
                if stopping:
                    return


def main() -> None:
    """Train to the end, or until it is asked to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/train.hr", help="a store, or headrace://job")
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of each rank")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--show-every", type=int, default=20, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    if "RANK" not in os.environ:  # no launcher: one rank, on this machine
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    training = Training(options, device)
    training.resume()
    training.run()
    hr.checkpoint.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

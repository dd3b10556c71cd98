"""Model: how each job of the plan fared at any moment. A pure function of seed, job and time.

Nothing is remembered from look to look: stall, use and rates at a moment are computed from waves, bursts
on file systems and each job's own numbers, so that an hour of history costs no more than a look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.causes import Cause
from headrace.web.demo.words import CAUSES, FILE_SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.web.demo.schedule import DemoJob

__all__ = ["Model"]


_BURSTS: Final = ((660.0, 55.0, 1.2), (430.0, 30.0, 0.7), (910.0, 80.0, 0.5), (370.0, 20.0, 0.9))
"""Of each file system: how often it is overrun, for how long, and how much longer jobs wait then."""

_LEARNING_S: Final = 240.0
"""The tuner of a job that reads through headrace takes so long."""

_HUNGRY: Final = 0.42
"""Share of jobs that wait for data at all."""

_MEASURED: Final = 0.82


class Model:
    """What is known of each job, by its number.

    Args:
        seed: the same gives the same.
        jobs: of the plan, by number.
    """

    def __init__(self, seed: int, jobs: Sequence[DemoJob]) -> None:
        count = len(jobs)
        random = np.random.default_rng(seed + 1)
        names = [name for name, _, _ in CAUSES]
        cause = random.choice(len(names), count, p=_normal([p for _, p, _ in CAUSES]))
        stored = np.array([on for _, _, on in CAUSES])[cause]
        system = random.choice(len(FILE_SYSTEMS), count, p=_normal([p for _, p, _ in FILE_SYSTEMS]))
        hungry = random.random(count) < _HUNGRY
        self.base = np.where(
            hungry, np.clip(np.exp(random.normal(-1.75, 0.75, count)), 0.02, 0.85),
            random.beta(1.0, 60.0, count),
        )  # fmt: skip
        self.causes = [names[c] for c in cause]
        self.slow_rank = cause == names.index(Cause.SLOW_RANK)
        self.system = system  # what it reads from
        self.blames = np.where(stored, system, -1)  # what it waits for
        self.measured = random.random(count) < _MEASURED
        self.good = random.uniform(0.80, 0.99, count)
        self.phase = random.uniform(0.0, 2 * np.pi, (count, 2))
        self.wave_s = random.uniform(90.0, 700.0, count)
        self.tuned = self.measured & (random.random(count) < 0.5)
        self.began = np.array([job.began_s for job in jobs])
        self.gpus = np.array([job.gpus for job in jobs])
        # Bytes a second that each GPU's share of a batch takes: images more than text.
        self.rate = np.exp(random.normal(17.6, 0.9, count)) * self.gpus
        self.near = np.where(random.random(count) < 0.6, random.uniform(0.3, 0.95, count), 0.02)
        self.epoch_s = random.uniform(300.0, 3000.0, count)
        self._seed = seed
        self._uneven: dict[int, NDArray[np.float64]] = {}

    # -- a moment ---------------------------------------------------------------------------------

    def stall(
        self, jobs: NDArray[np.int64], at_s: NDArray[np.float64], *, smooth: bool = False
    ) -> NDArray[np.float64]:
        """[jobs, times] share of their time that steps wait; smooth over minutes, or as it is at once."""
        t = at_s[None, :]
        base = self.base[jobs][:, None]
        load = np.stack([_burst(at_s, *burst) for burst in _BURSTS])  # [systems, times]
        blamed = self.blames[jobs]
        felt = np.where((blamed >= 0)[:, None], load[blamed], 0.0)
        wave = np.sin(2 * np.pi * t / self.wave_s[jobs][:, None] + self.phase[jobs, :1])
        fast = 0.0 if smooth else np.sin(2 * np.pi * t / 17.0 + self.phase[jobs, 1:])
        age = np.maximum(0.0, t - self.began[jobs][:, None])
        learnt = np.where(self.tuned[jobs][:, None], 0.45 + 0.9 * np.exp(-age / _LEARNING_S), 1.0)
        found = base * learnt * (1.0 + 0.18 * wave + 0.07 * fast + felt)
        return np.clip(found, 0.0, 0.97)

    def use(self, jobs: NDArray[np.int64], stall: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of time in which GPUs work, as jobs that stall so."""
        good = self.good[jobs]
        return (1.0 - stall) * (good if stall.ndim == 1 else good[:, None])

    def on_ranks(self, job: int, stall: float) -> NDArray[np.float64]:
        """[ranks] the same, rank by rank: one may be slow, and the others wait for it."""
        uneven = self._uneven.get(job)
        if uneven is None:
            uneven = self._uneven[job] = self._ranks(job)
        return np.where(uneven < 0.0, 0.04, np.clip(stall * uneven, 0.0, 0.98))

    def _ranks(self, job: int) -> NDArray[np.float64]:
        """[ranks] how much longer than the mean each waits; below 0 is the one that all wait for."""
        random = np.random.default_rng((self._seed, job))
        count = int(self.gpus[job])
        found = random.normal(1.0, 0.07, count)
        if self.slow_rank[job] and count > 1:
            found[int(random.integers(count))] = -1.0
        return found

    def tiers(
        self, jobs: NDArray[np.int64], at_s: NDArray[np.float64], stall: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[tiers, jobs, times] bytes per second, by where they came from."""
        age = np.maximum(0.0, at_s[None, :] - self.began[jobs][:, None])
        far = 1.0 - self.near[jobs][:, None] * np.clip(age / self.epoch_s[jobs][:, None], 0.0, 1.0)
        flow = self.rate[jobs][:, None] * (1.0 - stall)
        near = flow * (1.0 - far)
        wide = (self.gpus[jobs] > 8)[:, None]  # only jobs of several nodes have peers
        disk, peer = np.where(wide, 0.33, 0.55), np.where(wide, 0.22, 0.0)
        return np.stack([near * 0.45, near * disk, near * peer, flow * far])

    def events(self, job: DemoJob) -> list[dict[str, Any]]:
        """What its tuner did, in seconds of the plan."""
        if not self.tuned[job.number]:
            return []
        random = np.random.default_rng((self._seed, job.number, 1))
        at, reads = job.began_s + 15.0, 8
        found: list[dict[str, Any]] = []
        while at < job.ended_s and len(found) < 9:
            kept = bool(random.random() < 0.75)
            if random.random() < 0.6:
                knob, before, after = "reads_in_flight", reads, min(512, reads * 2)
                why = "the storage answered more at a time"
            else:
                knob, before, after = "buffer_batches", len(found) + 2, len(found) + 3
                why = "the buffer ran empty before steps asked"
            reads = after if kept and knob == "reads_in_flight" else reads
            found.append(
                {
                    "at_s": at,
                    "knob": knob,
                    "before": before,
                    "after": after,
                    "why": why,
                    "kept": kept,
                }
            )
            at += float(random.uniform(25.0, 120.0) * 1.45 ** len(found))
        return found


def _burst(
    at_s: NDArray[np.float64], every_s: float, seconds: float, height: float
) -> NDArray[np.float64]:
    away = (at_s + every_s / 3) % every_s - every_s / 2
    return height * np.exp(-((away / seconds) ** 2))


def _normal(shares: list[float]) -> list[float]:
    total = sum(shares)
    return [share / total for share in shares]

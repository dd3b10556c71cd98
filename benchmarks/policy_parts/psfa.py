"""PSFA, the published fair sharing, written from its description: the baseline.

Proportional sharing without false allocation: each control cycle walks over the jobs in a map's order
and gives each its fair part of what is left, or a quarter of its missing demand more; what remains
goes to all in proportion to their use. Demand is declared; a job that declared none has -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

COLLECT_EVERY = 5
UNDECLARED = -1.0


@dataclass
class Psfa:
    """The controller's state.

    Args:
        limit: the system's maximum.
        collect_every: control cycles between two looks at what jobs use.
    """

    limit: float
    collect_every: int = COLLECT_EVERY
    cycle: int = 0
    usage: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def decide(self, used: dict[str, float], demand: dict[str, float]) -> dict[str, float]:
        """One control cycle.

        Args:
            used: what each job used, per second.
            demand: what each has declared.
        """
        if self.cycle % self.collect_every == 0 or set(used) != set(self.usage):
            self.usage = {job: max(1.0, value) for job, value in used.items()}
        self.cycle += 1
        left, n = self.limit, len(self.usage)
        rates: dict[str, float] = {}
        for job, usage in self.usage.items():
            fair, declared = left / n, demand[job]
            if usage <= 0.95 * declared:
                rates[job] = min(fair, usage + 0.25 * (declared - usage))
            else:
                rates[job] = min(fair, declared)
            left -= rates[job]
            n -= 1
        total = sum(self.usage.values())
        for job, usage in self.usage.items():
            rates[job] += left * usage // total
        self._keep(rates, total)
        return dict(self.rates)

    def _keep(self, rates: dict[str, float], total: float) -> None:
        """Old rates stay where they hardly differ; new ones are scaled to what is left."""
        light = total < 0.95 * self.limit
        kept, new = {}, {}
        for job, rate in rates.items():
            old = self.rates.get(job)
            change = abs(rate - old) / max(rate, 1e-9) if old is not None else 1.0
            same = set(rates) == set(self.rates) and (change < 0.01 or (light and change < 0.05))
            (kept if same else new)[job] = old if same and old is not None else rate
        if light and new and sum(kept.values()) + sum(new.values()) > self.limit:
            scale = (self.limit - sum(kept.values())) / max(sum(new.values()), 1e-9)
            new = {job: rate * scale for job, rate in new.items()}
        self.rates = {job: max(0.0, {**kept, **new}[job]) for job in rates}

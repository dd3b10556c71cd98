"""Policy: caps, guaranteed shares, weights and priorities, as typed values.

Everything is per file system: a cap of 1G on a job holds on each file system that it reads, unless
its `file_systems` says something else for one. What is not said is not limited, and weighs 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "OTHER",
    "PRIORITIES",
    "RESOURCES",
    "FileSystem",
    "JobRule",
    "Override",
    "Policy",
    "PolicyError",
    "Priority",
    "Rates",
    "Rule",
    "UserRule",
]

RESOURCES: Final = ("bytes_per_s", "reads_per_s", "metadata_per_s")
"""What is limited and shared: bytes that come from a file system, reads of data there (one per
sample), and metadata operations (open, stat, list)."""

OTHER: Final = "other"
"""The file system of all paths that belong to no other."""

Priority = Literal["high", "normal", "low"]
PRIORITIES: Final[Mapping[Priority, int]] = {"high": 1, "normal": 0, "low": -1}


class PolicyError(ValueError):
    """A policy is wrong.

    Attributes:
        problems: everything that is wrong with it, a sentence each that begins with the place.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = len(problems)
        text = problems[0] if count == 1 else f"{count} problems:\n  " + "\n  ".join(problems)
        super().__init__(f"the policy is wrong: {text}")

    def __reduce__(self) -> tuple[type[PolicyError], tuple[list[str]]]:
        return type(self), (self.problems,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Amounts per second; None: nothing is said."""

    bytes_per_s: float | None = None
    reads_per_s: float | None = None
    metadata_per_s: float | None = None

    def values(self, missing: float) -> tuple[float, float, float]:
        """In the order of `RESOURCES`, `missing` where nothing is said."""
        found = (self.bytes_per_s, self.reads_per_s, self.metadata_per_s)
        bytes_per_s, reads_per_s, metadata_per_s = (missing if v is None else v for v in found)
        return bytes_per_s, reads_per_s, metadata_per_s

    def over(self, below: Rates) -> Rates:
        """These, and what `below` says where these say nothing."""
        return Rates(
            **{
                name: getattr(self, name) if getattr(self, name) is not None else beneath
                for name in RESOURCES
                for beneath in (getattr(below, name),)
            }
        )


NO_RATES: Final = Rates()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """Storage that is shared."""

    paths: tuple[str, ...] = ()
    """Where it is mounted; the longest that fits a data set's path counts."""

    capacity: Rates = NO_RATES
    """What it can give, or what the planes together may take of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """What a rule says for one file system."""

    weight: float | None = None
    cap: Rates = NO_RATES
    guarantee: Rates = NO_RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one user or job may have of each file system."""

    weight: float = 1.0
    """Its share, in proportion to others of the same kind."""

    cap: Rates = NO_RATES
    """Never more, even if nobody else wants it."""

    guarantee: Rates = NO_RATES
    """Never less while it wants it, whatever others weigh."""

    file_systems: Mapping[str, Override] = field(default_factory=dict)
    """What differs on one file system."""

    def weight_on(self, file_system: str) -> float:
        """Its weight there."""
        override = self.file_systems.get(file_system)
        if override is None or override.weight is None:
            return self.weight
        return override.weight

    def cap_on(self, file_system: str) -> Rates:
        """Its cap there."""
        override = self.file_systems.get(file_system)
        return self.cap if override is None else override.cap.over(self.cap)

    def guarantee_on(self, file_system: str) -> Rates:
        """Its guarantee there."""
        override = self.file_systems.get(file_system)
        return self.guarantee if override is None else override.guarantee.over(self.guarantee)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRule(Rule):
    """What the jobs of one user may have together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRule(Rule):
    """What one job may have, all its planes together."""

    user: str | None = None
    """Whose job it is; None: the rule holds for a job of this name of any user."""

    priority: Priority = "normal"
    """Guarantees of all come first; then `high` before `normal` before `low`."""

    cache_bytes: int | None = None
    """Memory for its samples on each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that an operator wants. The empty one limits nothing."""

    lease_s: float = 10.0
    """How long planes go by what they were last told."""

    when_expired: Rates | None = None
    """What each job may have on a plane that has heard nothing for so long; None: it runs free."""

    file_systems: Mapping[str, FileSystem] = field(default_factory=dict)
    users: Mapping[str, UserRule] = field(default_factory=dict)
    """By name; `*` is for all others."""

    jobs: Mapping[str, JobRule] = field(default_factory=dict)
    """By name; `*` is for all others."""

    def user(self, name: str) -> UserRule:
        """The rule for a user."""
        return self.users.get(name) or self.users.get("*") or UserRule()

    def job(self, name: str, user: str) -> JobRule:
        """The rule for a job of a user."""
        rule = self.jobs.get(name)
        if rule is None or rule.user not in (None, user):
            rule = self.jobs.get("*")
        return rule or JobRule()

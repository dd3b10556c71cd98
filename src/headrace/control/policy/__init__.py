"""Policy: what an operator wants of the planes: caps, guaranteed shares, weights and priorities.

Everything is per file system: a cap of 1G on a job holds on each file system that it reads, unless
its `file_systems` says something else for one. What is not said is not limited, and weighs 1.
`headrace.control.policy.parse` reads documents and says what is wrong with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

_PATTERN: Final = re.compile(
    r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kKMGTP]?)(i?)[bB]?\s*(?:/\s*s)?\s*", re.ASCII
)
_POWERS: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_MAX: Final = 1e18


def amount(value: object) -> float:
    """Read a positive amount; raises ValueError, which says what was expected, if it is none."""
    expected = "expected an amount above 0, as 500M, 1.5G, 2Gi or 20k"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is no amount, {expected}")  # noqa: TRY004 - the document's mistake
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        if match is None or (match[3] and not match[2]):
            raise ValueError(f"{value!r} is no amount, {expected}")
        number = float(match[1]) * float((1024 if match[3] else 1000) ** _POWERS[match[2]])
    else:
        number = float(value)
    if not 0 < number <= _MAX:
        raise ValueError(f"{value!r} is out of bounds, {expected}")
    return number


def amount_text(value: float | None) -> str:
    """The shortest that `amount` reads back as the same; `-` for None."""
    if value is None:
        return "-"
    for unit in ("P", "T", "G", "M", "k"):
        scaled = value / 1000 ** _POWERS[unit]
        if scaled >= 1 and float(f"{scaled:.6g}") == scaled:
            return f"{scaled:.6g}{unit}"
    return f"{value:.17g}" if value != int(value) else str(int(value))


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
        rates = (self.bytes_per_s, self.reads_per_s, self.metadata_per_s)
        a, b, c = (missing if rate is None else rate for rate in rates)
        return a, b, c

    def over(self, below: Rates) -> Rates:
        """These, and what `below` says where these say nothing."""
        rates = {name: getattr(self, name) for name in RESOURCES}
        return replace(below, **{name: rate for name, rate in rates.items() if rate is not None})


NO_RATES: Final = Rates()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFileSystem:
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
    """What one job, or the jobs of one user together, may have of each file system."""

    weight: float = 1.0
    """Its share, in proportion to others of the same kind."""
    cap: Rates = NO_RATES
    """Never more, even if nobody else wants it."""
    guarantee: Rates = NO_RATES
    """Never less while it wants it, whatever others weigh."""
    file_systems: Mapping[str, Override] = field(default_factory=dict)
    """What differs on one file system."""

    def on(self, file_system: str) -> Self:
        """The rule as it holds there."""
        differs = self.file_systems.get(file_system)
        if differs is None:
            return self
        weight = self.weight if differs.weight is None else differs.weight
        cap, guarantee = differs.cap.over(self.cap), differs.guarantee.over(self.guarantee)
        return replace(self, weight=weight, cap=cap, guarantee=guarantee)


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
    file_systems: Mapping[str, SharedFileSystem] = field(default_factory=dict)
    users: Mapping[str, Rule] = field(default_factory=dict)
    """By name; `*` is for all others."""
    jobs: Mapping[str, JobRule] = field(default_factory=dict)
    """By name; `*` is for all others."""

    def user(self, name: str) -> Rule:
        """The rule for a user."""
        return self.users.get(name) or self.users.get("*") or Rule()

    def job(self, name: str, user: str) -> JobRule:
        """The rule for a job of a user."""
        rule = self.jobs.get(name)
        if rule is None or rule.user not in (None, user):
            rule = self.jobs.get("*")
        return rule or JobRule()


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One value that differs."""

    at: str  # where, as `jobs.train.cap.bytes_per_s`
    before: str | None  # its text; None: it was not there
    after: str | None  # its text; None: it is gone


def changes(before: Policy, after: Policy) -> list[PolicyChange]:
    """What differs, in the order of the places."""
    old, new = _flat(policy_document(before)), _flat(policy_document(after))
    return [
        PolicyChange(at, old.get(at), new.get(at))
        for at in sorted({*old, *new})
        if old.get(at) != new.get(at)
    ]


def policy_document(policy: Policy) -> dict[str, Any]:
    """The policy as plain values that `parse_document` reads back as the same; defaults left out."""
    document = _plain(policy)
    document["version"] = 1
    if policy.when_expired is None:
        document["when_expired"] = "run free"
    document["lease_s"] = policy.lease_s
    return document


def policy_yaml(document: dict[str, Any], *, ascii_only: bool = False) -> str:
    """A policy's document as YAML that people edit, and that `parse_policy` reads back as the same."""
    import yaml

    return str(yaml.safe_dump(_with_units(document), sort_keys=False, allow_unicode=not ascii_only))


def _with_units(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _with_units(inner, name) for name, inner in value.items()}
    return amount_text(value) if key in RESOURCES or key == "cache_bytes" else value


def _plain(value: Any) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for each in fields(value):
        inner = getattr(value, each.name)
        if inner is None or inner == each.default or inner in ((), {}):
            continue
        if is_dataclass(inner):
            document[each.name] = _plain(inner)
        elif hasattr(inner, "items"):
            document[each.name] = {name: _plain(each) for name, each in inner.items()}
        else:
            document[each.name] = list(inner) if isinstance(inner, tuple) else inner
    return document


def _flat(document: Mapping[str, Any], at: str = "") -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in document.items():
        place = f"{at}.{key}" if at else key
        if isinstance(value, dict):
            if not value:
                texts[place] = "declared"
            texts |= _flat(value, place)
        elif key in RESOURCES or key == "cache_bytes":
            texts[place] = amount_text(value)
        elif isinstance(value, list):
            texts[place] = ", ".join(map(str, value))
        else:
            texts[place] = f"{value:g}" if isinstance(value, float) else str(value)
    return texts

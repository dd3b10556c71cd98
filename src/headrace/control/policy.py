"""Policy: what an operator wants of the planes: caps, guaranteed shares, weights, priorities; its document.

Everything is per file system: a cap of 1G on a job holds on each file system that it reads, unless
its `file_systems` says something else for one. What is not said is not limited, and weighs 1.

A document is YAML, or JSON, which is YAML. A misspelt key must not be a rule that silently does not hold:
unknown keys are errors, with the key that was probably meant; so are keys that come twice. Documents come over
the network: they are bounded in size and depth, and may not refer to parts of themselves, which multiplies.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping


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

OTHER: Final = "other"  # the file system of all paths that belong to no other
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
    capacity: Rates = NO_RATES  # what it can give, or what the planes together may take of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """What a rule says for one file system."""

    weight: float | None = None
    cap: Rates = NO_RATES
    guarantee: Rates = NO_RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one job, or the jobs of one user together, may have of each file system."""

    weight: float = 1.0  # its share, in proportion to others of the same kind
    cap: Rates = NO_RATES  # never more, even if nobody else wants it
    guarantee: Rates = NO_RATES  # never less while it wants it, whatever others weigh
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
    cache_bytes: int | None = None  # memory for its samples on each node


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that an operator wants. The empty one limits nothing."""

    lease_s: float = 10.0  # how long planes go by what they were last told
    when_expired: Rates | None = None
    """What each job may have on a plane that has heard nothing for so long; None: it runs free."""
    file_systems: Mapping[str, SharedFileSystem] = field(default_factory=dict)
    users: Mapping[str, Rule] = field(default_factory=dict)  # by name; `*` is for all others
    jobs: Mapping[str, JobRule] = field(default_factory=dict)  # by name; `*` is for all others

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


_SLACK = 1 + 1e-9


def problems_of(policy: Policy) -> list[str]:
    """Everything that cannot hold at the same time, a sentence each; the names are in it."""
    other = policy.jobs.get("*")
    return [
        *_unknown_file_systems(policy),
        *_path_problems(policy),
        *([f"jobs.*: is for all other jobs, but has user {other.user!r}"]
          if other is not None and other.user is not None else []),
        *(problem for name in {OTHER: None, **policy.file_systems} for resource in RESOURCES
          for problem in _impossible_guarantees(policy, name, resource)),
    ]  # fmt: skip


def unknown_names(policy: Policy, users: Container[str], jobs: Container[str]) -> list[str]:
    """Users and jobs that rules speak of and no plane has reported; they may still come."""
    unknown = [
        f"users.{name}: nothing of this user reads now"
        for name in policy.users
        if name not in users
    ]
    unknown += [
        f"jobs.{name}: nothing of this job reads now" for name in policy.jobs if name not in jobs
    ]
    return sorted(text for text in unknown if ".*:" not in text)


def _unknown_file_systems(policy: Policy) -> Iterator[str]:
    known = {*policy.file_systems, OTHER}
    declared = ", ".join(sorted(known))
    for kind, rules in (("users", policy.users), ("jobs", policy.jobs)):
        for who, rule in rules.items():
            for name in sorted(rule.file_systems.keys() - known):
                yield (
                    f"{kind}.{who}.file_systems.{name}: file system {name!r} is not known; "
                    f"there are {declared}"
                )


def _path_problems(policy: Policy) -> Iterator[str]:
    owner: dict[str, str] = {}
    for name, system in policy.file_systems.items():
        if not system.paths and name != OTHER:
            yield f"file_systems.{name}: has no paths, so nothing lies on it"
        if system.paths and name == OTHER:
            yield f"file_systems.{OTHER}: has paths, but is for all that lies nowhere else"
        for path in system.paths:
            if path in owner:
                yield f"file_systems.{name}: {path} is a path of {owner[path]!r} too"
            owner[path] = name


def _impossible_guarantees(policy: Policy, name: str, resource: str) -> Iterator[str]:
    """Guarantees on a file system above a cap, or all together above what there is."""
    there = getattr(policy.file_systems.get(name, SharedFileSystem()).capacity, resource)
    of_users: dict[str, dict[str, float]] = {}
    for kind, rules in (("users", policy.users), ("jobs", policy.jobs)):
        all_wanted: dict[str, float] = {}
        for who, rule in rules.items():
            wanted = getattr(rule.on(name).guarantee, resource)
            if wanted is None:
                continue
            all_wanted[who] = wanted
            if isinstance(rule, JobRule) and rule.user is not None:
                of_users.setdefault(rule.user, {})[who] = wanted
            most = getattr(rule.on(name).cap, resource)
            if most is not None and wanted > most * _SLACK:
                yield (
                    f"{kind}.{who}: guarantee.{resource} of {amount_text(wanted)} contradicts its "
                    f"cap of {amount_text(most)} on {name!r}"
                )
            own = rule.file_systems.get(name, Override()).guarantee
            if there is None and getattr(own, resource):
                yield (
                    f"{kind}.{who}: guarantee.{resource} on {name!r} means nothing, because "
                    f"file_systems.{name} has no capacity.{resource}"
                )
        total = sum(all_wanted.values())
        if there is not None and total > there * _SLACK:
            yield (
                f"file_systems.{name}: capacity.{resource} of {amount_text(there)} is less than the "
                f"{amount_text(total)} guaranteed to {kind} {', '.join(sorted(all_wanted))}"
            )
    for user, jobs in of_users.items():
        most, total = getattr(policy.user(user).on(name).cap, resource), sum(jobs.values())
        if most is not None and total > most * _SLACK:
            yield (
                f"jobs {', '.join(sorted(jobs))}: {resource} of {amount_text(total)} guaranteed on "
                f"{name!r} contradicts users.{user}, whose cap is {amount_text(most)}"
            )


DOCUMENT_BYTES_MAX: Final = 1 << 20
DEPTH_MAX: Final = 12
NAMES_MAX: Final = 20_000
NAME_CHARACTERS_MAX: Final = 256
PROBLEMS_MAX: Final = 50
LEASE_S: Final = (1.0, 3600.0)
WEIGHT: Final = (1e-3, 1e6)


def parse_policy(text: str) -> Policy:
    """Read a policy; raises PolicyError if something is wrong with it."""
    return parse_document(_load(text))


def _load(text: str) -> Any:
    import yaml

    if len(text.encode(errors="replace")) > DOCUMENT_BYTES_MAX:
        raise PolicyError([f"the document is larger than {DOCUMENT_BYTES_MAX} bytes"])
    # libyaml's parser where PyYAML has it: a document of a megabyte takes the other one ten seconds.
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class UniqueKeys(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} stands there twice", key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    try:
        _expect_plain(yaml, text, base)
        return yaml.load(text, UniqueKeys)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as e:
        raise PolicyError([f"it is no YAML: {' '.join(str(e).split())}"]) from e


def _expect_plain(yaml: Any, text: str, loader: Any) -> None:
    """See that a document neither refers to parts of itself nor is nested deeply, before it is built."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = "references (*name) are not allowed"
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            problem = "it is nested too deeply" if depth > DEPTH_MAX else ""
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)


def parse_document(document: Any) -> Policy:
    """Read a policy from what YAML or JSON gave; raises PolicyError if something is wrong with it."""
    reading = _Reading()
    policy: Policy = reading.policy(document, "")
    problems = reading.problems or problems_of(policy)
    if problems:
        left = len(problems) - PROBLEMS_MAX
        raise PolicyError(problems[:PROBLEMS_MAX] + ([f"and {left} more"] if left > 0 else []))
    return policy


_Read = Callable[[Any, str], Any]
"""Gives the value of what stands at a place; where that is wrong, it says so and gives anything."""


class _Reading:
    """One pass over a document; goes on after a problem, so that all are told at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._rates = self._object(Rates, dict.fromkeys(RESOURCES, self._amount))
        weight = self._number(*WEIGHT)
        override = {"weight": weight, "cap": self._rates, "guarantee": self._rates}
        rule = {**override, "file_systems": self._named(self._object(Override, override))}
        job = {
            **rule,
            "user": self._checked("a user's name", lambda v: v is None or (isinstance(v, str) and v)),
            "priority": self._checked("high, normal or low", ("high", "normal", "low").__contains__),
            "cache_bytes": self._whole,
        }  # fmt: skip
        system = {"paths": self._paths, "capacity": self._rates}
        self.policy = self._object(
            lambda version=1, **values: Policy(**values),  # noqa: ARG005 - it was checked
            {
                "version": self._version,
                "lease_s": self._number(*LEASE_S),
                "when_expired": self._when_expired,
                "file_systems": self._named(self._object(SharedFileSystem, system)),
                "users": self._named(self._object(Rule, rule)),
                "jobs": self._named(self._object(JobRule, job)),
            },
        )

    # -- objects ----------------------------------------------------------------------------------

    def _object(self, make: Callable[..., Any], readers: Mapping[str, _Read]) -> _Read:
        """Reads keys with what each has to be."""
        known = ", ".join(readers)

        def read(value: Any, at: str) -> Any:
            if value is not None and not isinstance(value, dict):
                self._wrong(at, f"is {value!r}, expected some of: {known}")
                value = None
            for key in value or {}:
                if key not in readers:
                    close = difflib.get_close_matches(str(key), tuple(readers), 1)
                    meant = f"did you mean {close[0]!r}?" if close else f"expected {known}"
                    self._wrong(f"{at}.{key}" if at else str(key), f"is not known; {meant}")
            known_keys = [name for name in readers if name in (value or {})]
            return make(**{n: readers[n](value[n], f"{at}.{n}" if at else n) for n in known_keys})

        return read

    def _named(self, reader: _Read) -> _Read:
        """Reads what holds for each of some names."""

        def read(value: Any, at: str) -> dict[str, Any]:
            if value is None:
                return {}
            if not isinstance(value, dict):
                self._wrong(at, f"is {value!r}, expected names with what holds for them")
                return {}
            if len(value) > NAMES_MAX:
                self._wrong(at, f"has {len(value)} names, at most {NAMES_MAX} are taken")
                return {}
            names: dict[str, Any] = {}
            for key, inner in value.items():
                # A job's number is a number in YAML.
                text = str(key) if isinstance(key, int) and not isinstance(key, bool) else key
                if not isinstance(text, str) or not 0 < len(text) <= NAME_CHARACTERS_MAX:
                    self._wrong(at, f"{key!r} is no name")
                else:
                    names[text] = reader(inner, f"{at}.{text}")
            return names

        return read

    # -- values -----------------------------------------------------------------------------------

    def _number(self, low: float, high: float) -> _Read:
        def read(value: Any, at: str) -> float:
            good = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not good or not low <= value <= high:
                self._wrong(at, f"is {value!r}, expected {low:g} to {high:g}")
                return low
            return float(value)

        return read

    def _amount(self, value: Any, at: str) -> float | None:
        try:
            return None if value is None else amount(value)
        except ValueError as e:
            self._wrong(at, str(e))
            return None

    def _whole(self, value: Any, at: str) -> int | None:
        size = self._amount(value, at)
        return None if size is None else max(1, int(size))

    def _version(self, value: Any, at: str) -> None:
        if value != 1 or value is True:
            self._wrong(at, f"{value!r} is not known, expected 1")

    def _when_expired(self, value: Any, at: str) -> Rates | None:
        if value == "run free":
            return None
        if isinstance(value, str):
            self._wrong(at, f"is {value!r}, expected `run free` or rates to keep to")
            return None
        rates: Rates = self._rates(value, at)
        if rates == Rates() and not self.problems:
            self._wrong(at, "says no rate; expected `run free` or rates to keep to")
        return rates

    def _paths(self, value: Any, at: str) -> tuple[str, ...]:
        paths = [value] if isinstance(value, str) else value
        if not isinstance(paths, list):
            self._wrong(at, f"is {paths!r}, expected a list of paths")
            return ()
        for path in paths:
            if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
                self._wrong(at, f"{path!r} is no absolute path")
        return tuple(p.rstrip("/") or "/" for p in paths if isinstance(p, str))

    def _checked(self, expected: str, good: Callable[[Any], object]) -> _Read:
        def read(value: Any, at: str) -> Any:
            if not good(value):
                self._wrong(at, f"is {value!r}, expected {expected}")
            return value

        return read

    def _wrong(self, at: str, what: str) -> None:
        self.problems.append(f"{at}: {what}" if at else f"the document {what}")

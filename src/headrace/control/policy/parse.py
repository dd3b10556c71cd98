"""Parse: from YAML (or JSON, which is YAML) to a policy, or everything that is wrong with it.

A misspelt key must not be a rule that silently does not hold: unknown keys are errors, with the key
that was probably meant; so are keys that come twice. Documents come over the network: they are
bounded in size and depth, and may not refer to parts of themselves, which multiplies.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from headrace.control.policy import (
    OTHER,
    RESOURCES,
    JobRule,
    Override,
    Policy,
    PolicyError,
    Rates,
    Rule,
    SharedFileSystem,
    amount,
    amount_text,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping


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
    unknown = [f"users.{name}: no plane of this user" for name in policy.users if name not in users]
    unknown += [f"jobs.{name}: no plane reads for it" for name in policy.jobs if name not in jobs]
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

"""Check: what a policy says against itself, and about whom it speaks that nobody knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.control.policy.amounts import amount_text
from headrace.control.policy.document import OTHER, RESOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.control.policy.document import Policy, Rule

__all__ = ["problems_of", "unknown_names"]

_SLACK = 1 + 1e-9


def problems_of(policy: Policy) -> list[str]:
    """Everything that cannot hold at the same time, a sentence each; the names are in it."""
    return [
        *_unknown_file_systems(policy),
        *_paths(policy),
        *_users_without_rule(policy),
        *(p for at, rule in _rules(policy) for p in _own(policy, at, rule)),
        *_sums(policy),
        *_job_against_user(policy),
    ]


def unknown_names(
    policy: Policy, users: Mapping[str, object], jobs: Mapping[str, object]
) -> list[str]:
    """Users and jobs that rules speak of and no plane has reported; they may still come."""
    found = [f"users.{name}: no plane of this user" for name in policy.users if name not in users]
    found += [f"jobs.{name}: no plane reads for it" for name in policy.jobs if name not in jobs]
    return sorted(text for text in found if ".*:" not in text)


def _rules(policy: Policy) -> Iterator[tuple[str, Rule]]:
    for name, user in policy.users.items():
        yield f"users.{name}", user
    for name, job in policy.jobs.items():
        yield f"jobs.{name}", job


def _unknown_file_systems(policy: Policy) -> Iterator[str]:
    known = {*policy.file_systems, OTHER}
    for at, rule in _rules(policy):
        for name in rule.file_systems:
            if name not in known:
                declared = ", ".join(sorted(known))
                yield f"{at}.file_systems.{name}: file system {name!r} is not known; there are {declared}"


def _paths(policy: Policy) -> Iterator[str]:
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


def _users_without_rule(policy: Policy) -> Iterator[str]:
    for at, rule in policy.jobs.items():
        if at == "*" and rule.user is not None:
            yield f"jobs.*: is for all other jobs, but has user {rule.user!r}"


def _own(policy: Policy, at: str, rule: Rule) -> Iterator[str]:
    """A guarantee above its own cap, or above what there is."""
    for name in {OTHER, *policy.file_systems}:
        guarantee, cap = rule.guarantee_on(name), rule.cap_on(name)
        system = policy.file_systems.get(name)
        for resource in RESOURCES:
            wanted, most = getattr(guarantee, resource), getattr(cap, resource)
            if wanted is None:
                continue
            if most is not None and wanted > most * _SLACK:
                yield (
                    f"{at}: guarantee.{resource} of {amount_text(wanted)} contradicts its "
                    f"cap of {amount_text(most)} on {name!r}"
                )
            named = name in rule.file_systems and getattr(
                rule.file_systems[name].guarantee, resource
            )
            if named and (system is None or getattr(system.capacity, resource) is None):
                yield (
                    f"{at}: guarantee.{resource} on {name!r} means nothing, because "
                    f"file_systems.{name} has no capacity.{resource}"
                )


def _sums(policy: Policy) -> Iterator[str]:
    """More guaranteed than there is, by users or by jobs."""
    for name, system in policy.file_systems.items():
        for resource in RESOURCES:
            there = getattr(system.capacity, resource)
            if there is None:
                continue
            for kind, rules in (("users", policy.users), ("jobs", policy.jobs)):
                wanted = {
                    who: value
                    for who, rule in rules.items()
                    if (value := getattr(rule.guarantee_on(name), resource)) is not None
                }
                if sum(wanted.values()) > there * _SLACK:
                    who = ", ".join(sorted(wanted))
                    yield (
                        f"file_systems.{name}: capacity.{resource} of {amount_text(there)} is "
                        f"less than the {amount_text(sum(wanted.values()))} guaranteed to {kind} {who}"
                    )


def _job_against_user(policy: Policy) -> Iterator[str]:
    """Jobs that are guaranteed more than their user may have."""
    for name in {OTHER, *policy.file_systems}:
        for resource in RESOURCES:
            wanted: dict[str, dict[str, float]] = {}
            for job, rule in policy.jobs.items():
                value = getattr(rule.guarantee_on(name), resource)
                if rule.user is not None and value is not None:
                    wanted.setdefault(rule.user, {})[job] = value
            for user, jobs in wanted.items():
                most = getattr(policy.user(user).cap_on(name), resource)
                if most is not None and sum(jobs.values()) > most * _SLACK:
                    yield (
                        f"jobs {', '.join(sorted(jobs))}: {resource} of "
                        f"{amount_text(sum(jobs.values()))} guaranteed on {name!r} contradicts "
                        f"users.{user}, whose cap is {amount_text(most)}"
                    )

"""Difference: what changes from one policy to the next, a line for each value."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from headrace.control.policy.amounts import amount_text
from headrace.control.policy.document import RESOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.control.policy.document import Policy

__all__ = ["Change", "changes", "policy_document"]


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs.

    Attributes:
        at: where, as `jobs.train.cap.bytes_per_s`.
        before: its text; None: it was not there.
        after: its text; None: it is gone.
    """

    at: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.at}: {self.after}"
        if self.after is None:
            return f"- {self.at}: {self.before}"
        return f"~ {self.at}: {self.before} -> {self.after}"


def changes(before: Policy, after: Policy) -> list[Change]:
    """What differs, in the order of the places."""
    old, new = _flat(policy_document(before)), _flat(policy_document(after))
    return [
        Change(at, old.get(at), new.get(at))
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


def _plain(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(value):
        inner = getattr(value, field.name)
        if inner is None or inner == field.default or inner in ((), {}):
            continue
        if is_dataclass(inner):
            found[field.name] = _plain(inner)
        elif hasattr(inner, "items"):
            found[field.name] = {name: _plain(each) for name, each in inner.items()}
        else:
            found[field.name] = list(inner) if isinstance(inner, tuple) else inner
    return found


def _flat(document: Mapping[str, Any], at: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in document.items():
        place = f"{at}.{key}" if at else key
        if isinstance(value, dict):
            if not value:
                found[place] = "declared"
            found |= _flat(value, place)
        elif key in RESOURCES or key == "cache_bytes":
            found[place] = amount_text(value)
        elif isinstance(value, list):
            found[place] = ", ".join(map(str, value))
        else:
            found[place] = f"{value:g}" if isinstance(value, float) else str(value)
    return found

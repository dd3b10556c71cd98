"""Counts of faults injected and found, told at the session's end."""

from __future__ import annotations

from collections import Counter

INJECTED: Counter[str] = Counter()
FOUND: Counter[str] = Counter()


def count(kind: str, injected: int = 1, found: int = 1) -> None:
    """Counts faults of a kind, and prints them. A fault that did not happen is the test's failure."""
    assert injected > 0, f"no fault of kind {kind} happened"
    INJECTED[kind] += injected
    FOUND[kind] += found
    print(f"{kind}: injected {injected}, found {found}")


def lines() -> list[str]:
    """A line for each kind."""
    return [f"{kind}: injected {INJECTED[kind]}, found {FOUND[kind]}" for kind in sorted(INJECTED)]

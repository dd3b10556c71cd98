"""Policies: any text is a policy, or a list of what is wrong with it."""

from __future__ import annotations

from headrace.control.policy import PolicyError, parse_policy

SEEDS = (
    """
version: 1
lease_s: 10
when_expired: {bytes_per_s: 50M}
file_systems: {scratch: {paths: [/scratch], capacity: {bytes_per_s: 2G, reads_per_s: 9k}}, other: {}}
users: {ada: {weight: 2, file_systems: {scratch: {guarantee: {bytes_per_s: 1G}}}}}
jobs:
  train: {user: ada, priority: high, cache_bytes: 4Gi, cap: {bytes_per_s: 500M}}
  "*": {cap: {bytes_per_s: 5G}}
""",
    "version: 1\njobs: {a: {weight: 3}, b: {weight: 1}}\n",
    "version: 1  # with room for changes that mean nothing: a comment may say whatever it likes to\n",
)


def seeds() -> list[bytes]:
    return [text.encode() for text in SEEDS]


def one_input(data: bytes) -> str:
    try:
        policy = parse_policy(data.decode(errors="replace"))
    except PolicyError as e:
        return "refused" if e.problems else "refused without a word"
    assert policy == parse_policy(data.decode(errors="replace"))
    return "accepted"

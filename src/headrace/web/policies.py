"""Policies: what the controller wants, what an edit would change, and putting it in force.

A controller's, or in the demo nobody's. Whether somebody may apply is not decided here. Calls wait: they are
made off the loop.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.control.policy import changes, policy_document, policy_yaml
from headrace.control.policy.parse import parse_policy
from headrace.web.cluster import plain

if TYPE_CHECKING:
    from headrace.control.client import Client


class ControllerPolicies:
    """A controller's.

    Args:
        client: asks it; used by one thread at a time.

    Attributes:
        where: whose policy it is, for people.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.where = f"at {client.endpoint.url}"

    def current(self) -> dict[str, Any]:
        """`version` and `text`.

        Raises:
            ControlError: it cannot be had.
        """
        with self._lock:
            reply = self._client.document("GET", "/v1/policy")
        return {"version": reply["version"], "text": policy_yaml(reply["policy"], ascii_only=True)}

    def put(self, text: str, *, dry_run: bool) -> dict[str, Any]:
        """What a policy changes: `version`, `applied`, `changes` and `unknown`.

        Raises:
            PolicyError: something is wrong with it.
            Refusal: of the controller: likewise.
            ControlError: nobody answers.
        """
        path = "/v1/policy?dry_run=1" if dry_run else "/v1/policy"
        with self._lock:
            reply = self._client.document("PUT", path, text.encode())
        return _shown(reply["version"], reply["applied"], reply["changes"], reply["unknown"])

    def close(self) -> None:
        """Let go of the controller."""
        with self._lock:
            self._client.close()


_DEMO_POLICY = """\
version: 1
lease_s: 10
file_systems:
  scratch: {paths: [/scratch], capacity: {bytes_per_s: 240G, reads_per_s: 900k}}
  datasets: {paths: [/datasets], capacity: {bytes_per_s: 90G}}
users:
  "*": {weight: 1}
jobs:
  clip-pretrain: {weight: 4, guarantee: {bytes_per_s: 2G}}
  wav2vec2: {priority: low, cap: {bytes_per_s: 500M}}
"""


class DemoPolicies:
    """A policy that nobody goes by; asked as `ControllerPolicies` is."""

    where = "in the recorded demo"

    def __init__(self) -> None:
        self._policy = parse_policy(_DEMO_POLICY)
        self._version = 7
        self._lock = threading.Lock()

    def current(self) -> dict[str, Any]:
        """`version` and `text`."""
        with self._lock:
            return {
                "version": self._version,
                "text": policy_yaml(policy_document(self._policy), ascii_only=True),
            }

    def put(self, text: str, *, dry_run: bool) -> dict[str, Any]:
        """What a policy changes."""
        policy = parse_policy(text)
        with self._lock:
            differences = [asdict(change) for change in changes(self._policy, policy)]
            applied = bool(differences) and not dry_run
            if applied:
                self._policy, self._version = policy, self._version + 1
            return _shown(self._version, applied, differences, [])

    def close(self) -> None:
        """Nothing is held."""


Policies = ControllerPolicies | DemoPolicies


def _shown(
    version: int, applied: bool, differences: list[dict[str, Any]], unknown: list[str]
) -> dict[str, Any]:
    """As pages show it, names made safe."""
    return {
        "version": version,
        "applied": applied,
        "changes": [
            {key: value if value is None else plain(value) for key, value in change.items()}
            for change in differences
        ],
        "unknown": [plain(each) for each in unknown],
    }

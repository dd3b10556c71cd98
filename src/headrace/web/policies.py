"""Policies: what the controller wants, what an edit would change, and putting it in force.

A controller's, or in the demo nobody's. Whether somebody may apply is not decided here. Calls wait: they are
made off the loop.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.control.policy import changes, policy_document, policy_yaml
from headrace.control.policy.parse import parse_policy
from headrace.web.cluster import plainly

if TYPE_CHECKING:
    from headrace.control.client import Client


class ControllerPolicies:
    """A controller's.

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
        return {key: plainly(reply[key]) for key in ("version", "applied", "changes", "unknown")}

    def close(self) -> None:
        """Let go of the controller."""
        with self._lock:
            self._client.close()


_DEMO_POLICY: Final = Path(__file__).parent / "static/demo.yaml"


class DemoPolicies:
    """A policy that nobody goes by; asked as `ControllerPolicies` is."""

    where = "in the recorded demo"

    def __init__(self) -> None:
        self._policy = parse_policy(_DEMO_POLICY.read_text(encoding="utf-8"))
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
            return {
                "version": self._version, "applied": applied, "changes": plainly(differences),
                "unknown": [],
            }  # fmt: skip

    def close(self) -> None:
        """Nothing is held."""


Policies = ControllerPolicies | DemoPolicies

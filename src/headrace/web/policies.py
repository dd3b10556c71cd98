"""Policies: what the controller wants, what an edit would change, and putting it in force.

A policies speaks to a controller, or in the demo to nobody. Whether somebody may apply is not decided here.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from headrace.control.policy import amount_text, changes, policy_document
from headrace.control.policy.parse import parse_document, parse_policy
from headrace.errors import ControlError
from headrace.web.cluster import plain

if TYPE_CHECKING:
    from headrace.control.client import Client
    from headrace.control.policy import Policy


class Policies(Protocol):
    """Knows the policy. Its calls wait; call them off the loop."""

    where: str
    """Whose policy it is, for people."""

    def current(self) -> dict[str, Any]:
        """`version` and `text`.

        Raises:
            ControlError: it cannot be had.
        """
        ...

    def put(self, text: str, *, dry_run: bool) -> dict[str, Any]:
        """What a policy changes: `version`, `applied`, `changes` and `unknown`.

        Raises:
            PolicyError: something is wrong with it.
            Refusal: of the controller: likewise.
            ControlError: nobody answers.
        """
        ...

    def close(self) -> None:
        """Let go of the controller."""
        ...


def policy_text(policy: Policy) -> str:
    """As YAML that can be edited and put back."""
    import yaml

    shown = _readable(policy_document(policy))
    return str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=False))


def _readable(value: Any, key: str = "") -> Any:
    """Amounts as people write them."""
    if isinstance(value, dict):
        return {name: _readable(inner, name) for name, inner in value.items()}
    if key.endswith("_per_s") or key == "cache_bytes":
        return amount_text(value)
    return value


class ControllerPolicies:
    """A controller.

    Args:
        client: asks it; used by one thread at a time.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.where = f"at {client.endpoint.url}"

    def current(self) -> dict[str, Any]:
        """See `Policies`."""
        document = self._ask("GET", "/v1/policy")
        return {
            "version": document["version"],
            "text": policy_text(parse_document(document["policy"])),
        }

    def put(self, text: str, *, dry_run: bool) -> dict[str, Any]:
        """See `Policies`."""
        path = "/v1/policy?dry_run=1" if dry_run else "/v1/policy"
        return _shown(self._ask("PUT", path, text.encode()))

    def close(self) -> None:
        """See `Policies`."""
        with self._lock:
            self._client.close()

    def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        with self._lock:
            try:
                return self._client.document(method, path, body)
            except FileNotFoundError as e:
                raise ControlError(
                    f"no controller listens {self.where}.", path=self._client.endpoint.url,
                    next_step="Start it: headrace control start.",
                ) from e  # fmt: skip


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
    """A policy that nobody goes by."""

    where = "in the recorded demo"

    def __init__(self) -> None:
        self._policy = parse_policy(_DEMO_POLICY)
        self._version = 7
        self._lock = threading.Lock()

    def current(self) -> dict[str, Any]:
        """See `Policies`."""
        with self._lock:
            return {"version": self._version, "text": policy_text(self._policy)}

    def close(self) -> None:
        """See `Policies`."""

    def put(self, text: str, *, dry_run: bool) -> dict[str, Any]:
        """See `Policies`."""
        policy = parse_policy(text)
        with self._lock:
            differences = changes(self._policy, policy)
            applied = bool(differences) and not dry_run
            if applied:
                self._policy, self._version = policy, self._version + 1
            return _shown(
                {
                    "version": self._version,
                    "applied": applied,
                    "changes": [asdict(change) for change in differences],
                    "unknown": [],
                }
            )


def _shown(answer: dict[str, Any]) -> dict[str, Any]:
    def text(value: Any) -> str | None:
        return None if value is None else plain(value)

    return {
        "version": answer["version"],
        "applied": bool(answer["applied"]),
        "changes": [
            {"at": plain(c["at"]), "before": text(c["before"]), "after": text(c["after"])}
            for c in answer["changes"]
        ],
        "unknown": [plain(each) for each in answer["unknown"]],
    }

"""Kubectl: the API server, by the user's own client.

Whatever lets kubectl in (a token, a certificate, a cloud's plugin, a pod's service account) lets us in, and no
credentials pass through here. Objects go as they are (`--raw`): one request a call, no discovery. A refusal
becomes the most telling error; what was said is always in the message.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.cluster.executor import SchedulerUnavailable
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator

_POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SAID_MAX: Final = 1500


class NotThere(ClusterError):
    """There is no such object."""


class Conflict(ClusterError):
    """The object is there already, or was changed by somebody else meanwhile."""


_REFUSALS: Final[dict[str, tuple[type[ClusterError], str]]] = {
    "no configuration has been provided|localhost:8080|current-context|context .* (does not exist|not found)|"
    "invalid configuration|loading config|kubeconfig": (ClusterError,
        "Get a kubeconfig from whoever runs the cluster (~/.kube/config, KUBECONFIG); then: kubectl get pods."),
    r"\(Unauthorized\)|be logged in|provide credentials|getting credentials|token .*expired": (ClusterError,
        "The token or certificate has expired: log in again as your cluster wants it; then: kubectl get pods."),
    "exceeded quota|(maximum|minimum) .* usage per": (ClusterRequestError,
        "Ask for less, or wait until others end: kubectl describe quota."),
    'namespaces? "[^"]*" not found': (ClusterError,
        "Name one that there is: metadata.namespace in the pod's file, or the namespace of kubectl's context."),
    r"\(Forbidden\)|forbidden:": (ClusterError,
        "Ask for the role `headrace-user`, which `headrace cluster init --kubernetes DIR` writes."),
    r"\((AlreadyExists|Conflict)\)": (Conflict, ""),
    r"\(NotFound\)": (NotThere, ""),
    r"\((Invalid|BadRequest)\)|is invalid:|denied the request": (ClusterRequestError, ""),
    "timeout|timed out|deadline exceeded": (ClusterTimeout,
        "The API server is overloaded, or far away; see with `headrace cluster status` what was done."),
    "refused|no such host|unable to connect|unavailable|TooManyRequests|InternalError|EOF|reset by": (
        SchedulerUnavailable, "The API server is down or unreachable: kubectl cluster-info."),
}  # fmt: skip
"""What kubectl says, the error that it means, and what to do. The first one that fits holds."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """How kubectl is called."""

    deadline_s: float = 30.0

    def namespace(self) -> str:
        """Of the kubeconfig's context."""
        words = ("config", "view", "--minify", "--output", "jsonpath={..namespace}")
        with contextlib.suppress(ClusterError):
            return self._run(*words).decode().strip() or "default"
        # In a pod, with no kubeconfig, kubectl takes that of its service account.
        with contextlib.suppress(OSError):
            return _POD_NAMESPACE.read_text().strip()
        return "default"

    def get(self, path: str) -> dict[str, Any]:
        """An object, or a list of them.

        Raises:
            NotThere: it is not there.
            ClusterError: see the module; here and below.
        """
        return self._object("get", "--raw", path)

    def create(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """Post an object; Conflict if there is one of its name."""
        return self._object("create", "--raw", f"{path}?fieldValidation=Strict", document=document)

    def replace(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """Put an object in place of what it was read from; Conflict if somebody else did so before."""
        return self._object("replace", "--raw", path, document=document)

    def delete(self, path: str) -> None:
        """Delete an object, and what belongs to it."""
        policy = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        self._run("delete", "--raw", path, "-f", "-", stdin=json.dumps(policy).encode())

    def stream(self, path: str) -> Iterator[bytes]:
        """A text, piece by piece, as long as there is more."""
        command = ["kubectl", "get", "--raw", path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # noqa: S603
            try:
                while piece := process.stdout.read1(1 << 16):  # type: ignore[union-attr]
                    yield piece
                message = process.stderr.read(_SAID_MAX).decode(errors="replace")  # type: ignore[union-attr]
                if process.wait() != 0:
                    raise refusal(message)
            finally:
                process.kill()

    def _object(self, *words: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        more = () if document is None else ("-f", "-")
        stdin = b"" if document is None else json.dumps(document).encode()
        answer = self._run(*words, *more, stdin=stdin)
        try:
            value = json.loads(answer)
        except ValueError:
            value = None
        if not isinstance(value, dict) or "metadata" not in value:
            raise ClusterError(
                f"the API server answered {words[2]} with {answer[:80]!r}, expected an object of Kubernetes.",
                next_step="See whether the kubeconfig's server is one: kubectl cluster-info.",
            )
        return value

    def _run(self, *words: str, stdin: bytes = b"") -> bytes:
        command = ["kubectl", f"--request-timeout={self.deadline_s:g}s", *words]
        try:
            # kubectl ends by its own deadline, and says more.
            ended = subprocess.run(  # noqa: S603 - no shell
                command, input=stdin, capture_output=True, check=False, timeout=self.deadline_s + 5,
            )  # fmt: skip
        except FileNotFoundError as e:
            raise ClusterError(
                "kubectl is not installed here, or not on PATH.",
                next_step="Install it as https://kubernetes.io/docs/tasks/tools says.",
            ) from e
        except OSError as e:
            raise ClusterError(f"kubectl cannot be run: {e.strerror}.") from e
        except subprocess.TimeoutExpired as e:
            raise refusal(f"timeout: no answer within {self.deadline_s:g} s") from e
        if ended.returncode != 0:
            raise refusal(ended.stderr.decode(errors="replace"))
        return ended.stdout


def refusal(message: str) -> ClusterError:
    """What a failure means, from what kubectl said."""
    text = " ".join(line.strip() for line in message.splitlines())[:_SAID_MAX] or "it said nothing"
    for pattern, (error, next_step) in _REFUSALS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return error(f"kubectl: {text.rstrip('.')}.", next_step=next_step or None)
    return ClusterError(f"kubectl failed: {text.rstrip('.')}.")

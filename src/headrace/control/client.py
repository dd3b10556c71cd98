"""Client: asks a controller, over a UNIX socket or TCP, with a deadline for the whole exchange.

    unix:/run/headrace/control.sock
    http://10.0.0.1:9470             with a token
    https://head:9470                with a token, a certificate, or both

Keeps its connection; one that was closed meanwhile is opened again, once. Not thread-safe.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.errors import ControlError
from headrace.runtime import control_folder

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 5.0
ANSWER_BYTES_MAX = 64 << 20


class Refusal(ControlError):
    """The controller refuses.

    Attributes:
        status: as in HTTP.
        problems: what is wrong with a policy, a sentence each.
    """

    status: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a controller is, and how to show who asks.

    Attributes:
        url: see the module's text; `own` is this user's own controller, by its socket.
        token_file: holds the token, as a line `TOKEN`, `plane TOKEN` or `operator TOKEN`.
        ca: certificates to trust; None: those of the system.
        certificate, key: this side's own, for mutual TLS.
    """

    url: str
    token_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.url == "own":
            object.__setattr__(self, "url", f"unix:{control_folder().socket}")
        if self.url.startswith("unix:/"):
            return
        parts = urlsplit(self.url)
        try:
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port
        except ValueError:
            good = False
        if not good or parts.path not in ("", "/"):
            raise ValueError(
                f"controller is {self.url!r}, expected own, unix:/PATH, http://HOST:PORT or https://HOST:PORT"
            )

    def token(self) -> str | None:
        """The token, read anew, so that it can be exchanged."""
        if self.token_file is None:
            return None
        try:
            lines = self.token_file.read_text().splitlines()
        except OSError as e:
            raise ControlError(
                f"{self.token_file}: the token cannot be read: {e}.", path=str(self.token_file)
            ) from e
        tokens = [line.split() for line in lines if line.strip() and not line.startswith("#")]
        if not tokens:
            raise ControlError(f"{self.token_file}: no token.", path=str(self.token_file))
        return tokens[0][-1]


class Client:
    """Asks one controller."""

    def __init__(self, endpoint: Endpoint, deadline_s: float = DEADLINE_S) -> None:
        self.endpoint = endpoint
        self.deadline_s = deadline_s
        self._connection: _Connection | None = None

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Exchange a request for its answer.

        Raises:
            FileNotFoundError: nobody listens on the UNIX socket.
            Refusal: the controller says no.
            ControlError: it cannot be reached, or does not answer in time.
        """
        headers = {"Content-Type": "application/json"}
        token = self.endpoint.token()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        deadline = time.monotonic() + self.deadline_s
        kept = self._connection is not None
        try:
            try:
                status, answer = self._exchange(method, path, body, headers, deadline)
            except (ConnectionError, http.client.BadStatusLine):
                if not kept:
                    raise
                self.close()  # it was closed while idle
                status, answer = self._exchange(method, path, body, headers, deadline)
        except FileNotFoundError:
            self.close()
            raise
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.close()
            raise ControlError(
                f"{self.endpoint.url}: the controller does not answer: {e or type(e).__name__}.",
                path=self.endpoint.url,
                next_step="See whether it runs: headrace control status.",
            ) from e
        if status >= 300:
            raise _refusal(self.endpoint.url, status, answer)
        return answer

    def document(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        """Exchange a request for a JSON object.

        Raises:
            ControlError: as `ask`, or nobody listens.
        """
        url = self.endpoint.url
        try:
            document = json.loads(self.ask(method, path, body))
        except FileNotFoundError as e:
            raise ControlError(
                f"{url}: no controller listens.", path=url,
                next_step="Start it: headrace control start.",
            ) from e  # fmt: skip
        except (ValueError, RecursionError) as e:
            raise ControlError(f"{url}: the answer is no JSON: {e}.") from e
        if not isinstance(document, dict):
            raise ControlError(f"{url}: the answer is no JSON object.")
        return document

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        deadline: float,
    ) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = _Connection(self.endpoint)
        connection = self._connection
        connection.deadline = deadline
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        answer = response.read(ANSWER_BYTES_MAX + 1)
        if len(answer) > ANSWER_BYTES_MAX:
            raise ValueError(f"more than {ANSWER_BYTES_MAX} bytes")
        if response.will_close:
            self.close()
        return response.status, answer

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Connection(http.client.HTTPConnection):
    """A connection whose every wait ends at `deadline`, however slowly bytes drip in."""

    deadline = 0.0

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        parts = urlsplit(endpoint.url)
        unix = parts.scheme == "unix"
        super().__init__("localhost" if unix else str(parts.hostname), None if unix else parts.port)

    def connect(self) -> None:
        parts = urlsplit(self._endpoint.url)
        if parts.scheme == "unix":
            sock = _Deadlined(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.owner = self
            try:
                sock.settimeout(self.left_s())
                sock.connect(parts.path)
            except ConnectionRefusedError as e:
                sock.close()
                raise FileNotFoundError(e.errno, "nobody listens", parts.path) from e
            except BaseException:
                sock.close()
                raise
            self.sock = sock
            return
        plain = socket.create_connection((self.host, self.port), self.left_s())
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if parts.scheme == "https":
            self.sock = _tls(self._endpoint, plain, str(parts.hostname))
            self.sock.owner = self
        else:
            # The same descriptor, as one that keeps the deadline.
            kept = _Deadlined(plain.family, plain.type, plain.proto, fileno=plain.detach())
            kept.owner = self
            self.sock = kept

    def left_s(self) -> float:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        return left_s


class _KeepsDeadline:
    """Shortens a socket's every wait to what its connection has left."""

    owner: _Connection

    def recv_into(self, *given: Any, **named: Any) -> int:
        self.settimeout(self.owner.left_s())  # type: ignore[attr-defined]
        return super().recv_into(*given, **named)  # type: ignore[misc,no-any-return]

    def sendall(self, *given: Any, **named: Any) -> None:
        self.settimeout(self.owner.left_s())  # type: ignore[attr-defined]
        super().sendall(*given, **named)  # type: ignore[misc]


class _Deadlined(_KeepsDeadline, socket.socket):
    pass


class _DeadlinedTls(_KeepsDeadline, ssl.SSLSocket):
    pass


def _tls(endpoint: Endpoint, plain: socket.socket, host: str) -> Any:
    try:
        context = ssl.create_default_context(cafile=endpoint.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = _DeadlinedTls
        if endpoint.certificate is not None:
            context.load_cert_chain(endpoint.certificate, endpoint.key)
        return context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def _refusal(url: str, status: int, answer: bytes) -> Refusal:
    message = f"status {status}"
    problems: tuple[str, ...] = ()
    try:
        error = json.loads(answer)["error"]
        message, problems = str(error["message"]), tuple(map(str, error.get("problems", ())))
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    return Refusal(f"{url}: refused: {message}.".replace("..", "."), path=url,
                   status=status, problems=problems)  # fmt: skip

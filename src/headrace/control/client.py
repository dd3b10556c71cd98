"""Client: asks a controller, over a UNIX socket or TCP, with a deadline for the whole exchange.

    unix:/run/headrace/control.sock
    http://10.0.0.1:9470             with a token
    https://head:9470                with a token, a certificate, or both

Keeps its connection; one that was closed meanwhile is opened again, once. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
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
    """The controller refuses."""

    status: int = 0  # as in HTTP
    problems: tuple[str, ...] = ()  # what is wrong with a policy, a sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a controller is, and how to show who asks."""

    url: str  # see the module's text; `own` is this user's own controller, by its socket
    token_file: Path | None = None
    """Holds the token, as a line `TOKEN`, `plane TOKEN` or `operator TOKEN`."""
    ca: Path | None = None  # certificates to trust; None: those of the system
    certificate: Path | None = None  # this side's own, for mutual TLS, and its key
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
            late = time.monotonic() >= deadline
            reason = "it took too long" if late else e or type(e).__name__
            raise ControlError(
                f"{self.endpoint.url}: the controller does not answer: {reason}.",
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
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], deadline: float
    ) -> tuple[int, bytes]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        if self._connection is None:
            self._connection = _Connection(self.endpoint)
        connection = self._connection
        connection.timeout = left_s
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
        # A timeout bounds each wait; of bytes that drip there are many.
        timer = threading.Timer(left_s, connection.hang_up)
        timer.start()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = response.read(ANSWER_BYTES_MAX + 1)
        finally:
            timer.cancel()
        if time.monotonic() >= deadline:  # what came may be a part
            raise TimeoutError("it took too long")
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
    """A connection over a UNIX socket, TCP or TLS."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        parts = urlsplit(endpoint.url)
        unix = parts.scheme == "unix"
        super().__init__("localhost" if unix else str(parts.hostname), None if unix else parts.port)

    def connect(self) -> None:
        endpoint, parts = self._endpoint, urlsplit(self._endpoint.url)
        if parts.scheme == "unix":
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            try:
                self.sock.connect(parts.path)
            except ConnectionRefusedError as e:
                raise FileNotFoundError(e.errno, "nobody listens", parts.path) from e
            return
        super().connect()
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=endpoint.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if endpoint.certificate is not None:
                context.load_cert_chain(endpoint.certificate, endpoint.key)
            # The handshake, too, can be hung up on.
            self.sock = context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock.do_handshake()

    def hang_up(self) -> None:
        """End whatever waits for the other end. From any thread."""
        if (sock := self.sock) is not None:
            with contextlib.suppress(OSError):
                # Not the shutdown of TLS, which would wait in its turn.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _refusal(url: str, status: int, answer: bytes) -> Refusal:
    message = f"status {status}"
    problems: tuple[str, ...] = ()
    try:
        error = json.loads(answer)["error"]
        message, problems = str(error["message"]), tuple(map(str, error.get("problems", ())))
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    ended = message if message.endswith((".", "?")) else f"{message}."
    return Refusal(f"{url}: refused: {ended}", path=url, status=status, problems=problems)

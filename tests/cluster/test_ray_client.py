"""Ray's executor where no Ray is: which address is meant, and what answers there that is no jobs API."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.cluster.executor import Submission, executor, executor_name
from headrace.cluster.ray.executor import RayExecutor
from headrace.cluster.ray.job import RayJob
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_the_executor_is_chosen_by_name_or_by_an_address_and_never_guessed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("HEADRACE_EXECUTOR", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert executor_name() == "local"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # within a job: not the jobs API
    assert executor_name() == "local"
    with pytest.raises(ClusterRequestError, match="expected that of its dashboard"):
        executor("ray")
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    assert isinstance(executor(), RayExecutor)
    (tmp_path / "sbatch").touch(0o755)
    with pytest.raises(ClusterRequestError, match="which is meant"):
        executor()
    assert executor_name("slurm") == "slurm"
    monkeypatch.setenv("HEADRACE_EXECUTOR", "ray")
    assert executor_name() == "ray"


def test_where_nobody_answers_the_error_says_what_an_address_is():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        ex = RayExecutor(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ClusterError, match="no Ray cluster answers at") as e:
            ex.own()
    assert "8265" in e.value.next_step


@pytest.fixture
def answering() -> Iterator[tuple[RayExecutor, list[tuple[int, bytes]]]]:
    """An executor, and what the server that it asks says next."""
    answers: list[tuple[int, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = answers.pop(0)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield RayExecutor(f"http://127.0.0.1:{server.server_port}"), answers
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("code", "text", "message"),
    [
        (404, b"not here", "not as Ray's jobs API: 404"),
        (200, b"<html>", "is no JSON"),
        (200, b'{"detail": 1}', "expected a list"),
        (200, b"17", "is int"),
        (403, b"", "does not let this user in"),
        (500, b"Traceback\n  File x\nValueError: broken", "500 .*ValueError: broken"),
        (200, json.dumps([{"type": "SUBMISSION", "metadata": {"headrace": "eA=="}}]).encode(),
         "what stands for a job of ours"),
    ],
)  # fmt: skip
def test_what_is_no_jobs_api_is_named(answering, code, text, message):
    ex, answers = answering
    answers.append((code, text))
    with pytest.raises(ClusterError, match=message):
        ex.own()


def test_a_job_survives_the_way_to_the_cluster():
    asked = Submission(
        b"#!/bin/sh\n\xff\n", ("--nodes=2", "-Jn"), ("a b",), Path("/d"), {"A": "\n"}
    )
    job = RayJob("17_3", "u", asked, 1.5, 2)
    assert RayJob.decode(job.encode()) == job
    assert (job.request.nodes, job.name) == (2, "n")

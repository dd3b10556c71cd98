"""Servers to be tested."""

import pytest

from web.serving import Serving


@pytest.fixture
def serve(tmp_path):
    """Starts servers; all are ended after the test."""
    servers = []

    def start(**given):
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        servers.append(Serving(folder, **given))
        return servers[-1].__enter__()

    yield start
    for one in servers:
        one.__exit__()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One that a module's tests share, with tokens: they leave it as it was."""
    folder = tmp_path_factory.mktemp("served")
    with Serving(folder, tokens="operator {operator}\nreader {reader}\n") as one:
        yield one

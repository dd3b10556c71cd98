"""Runs that wrote a trace, as pages: a real one of a loader; cut off, damaged, and not there."""

import shutil

import pytest

from headrace.web.source import TracedRuns
from web.serving import traced_run

BATCHES = 9


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of a loader, whose steps take a while."""
    folder = tmp_path_factory.mktemp("runs")
    return traced_run(folder)


def test_a_run_is_its_report(runs, serve):
    web = serve(runs=(str(runs),))
    [run] = web.ask("/api/runs").document["runs"]
    page = web.ask(f"/run?id={run['id']}")
    assert page.status == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    shown = page.body.decode()
    assert "<h1>Run one</h1>" in shown
    assert f"{BATCHES}" in shown
    assert "36 samples" in shown


def test_a_run_is_named_by_its_folder_or_by_the_folder_above(runs):
    assert list(TracedRuns([str(runs / "one")]).by_id()) == ["run:one"]
    assert list(TracedRuns([str(runs), str(runs / "one")]).by_id()) == ["run:one", "run:one 2"]
    assert TracedRuns([]).by_id() == {}
    assert TracedRuns([str(runs)]).page("run:../one") is None


def test_a_run_that_was_cut_off_is_shown_up_to_there(runs, tmp_path):
    shutil.copytree(runs / "one", tmp_path / "cut")
    [trace] = (tmp_path / "cut").glob("rank-*")
    data = trace.read_bytes()
    trace.write_bytes(data[: len(data) - 7])
    page = TracedRuns([str(tmp_path / "cut")]).page("run:cut")
    assert "What the traces lack" in page
    assert "cut off" in page


def test_what_is_damaged_is_told(runs, tmp_path, serve):
    shutil.copytree(runs / "one", tmp_path / "bad")
    [trace] = (tmp_path / "bad").glob("rank-*")
    trace.write_bytes(b'{"<script>": 1}\n' + bytes(100))
    web = serve(runs=(str(tmp_path / "bad"), str(runs / "one"), str(tmp_path / "nothing")))
    ids = [run["id"] for run in web.ask("/api/runs").document["runs"]]
    assert ids == ["run:bad", "run:one", "run:nothing"]
    for name in ("run:bad", "run:nothing"):
        assert web.ask(f"/run?id={name}").status == 502
    assert web.ask("/run?id=run:one").status == 200
    missing = web.ask("/run?id=run:none")
    assert missing.status == 404
    assert b'href="/runs"' in missing.body
    assert b"there is no run" in missing.body
    assert b'<a href="/runs" aria-current=page>Runs</a>' in web.ask("/runs").body


def test_without_runs_there_is_no_such_page_in_the_menu(served):
    assert b">Runs</a>" not in served.ask("/runs").body
    assert served.ask("/api/runs").document == {"runs": []}

"""The papers' claims: the page is that of the results; a run goes on where it was, and leaves nothing."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.paper_parts import Options, page
from benchmarks.programs.prisma_stage import Prisma, Server

from benchmarks import paper

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


def test_the_page_and_its_pictures_are_those_of_the_committed_results():
    document = page.newest("paper")
    for path, text in page.files(document).items():
        assert (ROOT / path).read_text() == text, f"{path}: run `python -m benchmarks.paper --page`"
    assert set(document["parts"]) == set(paper.PARTS)


def test_every_claim_has_a_verdict_and_every_number_a_place_in_the_results():
    text = page.TEMPLATE.read_text()
    claims = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") > 4]
    claims = [line for line in claims if not line.startswith("| claim")]
    assert len(claims) == 17
    for claim in claims:
        assert re.search(r"\| (\{\w*verdict\}.*|better|reproduced) \|", claim), claim
    assert page.verdict(6.7, 6.7) == "reproduced"
    assert page.verdict(7.5, 6.7) == "better"
    assert page.verdict(6.0, 6.7) == "**not**"


def test_a_part_that_is_done_is_not_measured_again_and_one_that_failed_is(tmp_path, monkeypatch):
    calls = []

    def fails(_):
        calls.append("fails")
        if calls.count("fails") == 1:
            raise RuntimeError("the disk is full")
        return {"rows": [2]}

    def works(_):
        calls.append("works")
        return {"rows": [1]}

    monkeypatch.setattr(paper, "PARTS", {"one": fails, "two": works})
    options = Options(tmp_path, quick=True)
    assert paper.measure(options, ["one", "two"], tmp_path / "state") == ["one"]
    assert paper.measure(options, ["one", "two"], tmp_path / "state") == []
    assert calls == ["fails", "works", "fails"]
    assert json.loads((tmp_path / "state/one.json").read_text())["rows"] == [2]


def test_prismas_stage_delivers_what_it_was_given_in_any_order_of_asking(tmp_path):
    paths = []
    for number in range(40):
        paths.append(str(tmp_path / f"{number}"))
        Path(paths[-1]).write_bytes(bytes([number]) * (1 + 5_000 * number))
    prisma = Prisma(paths * 3, warm_up_s=0.0)
    # Neighbours may swap: the buffer holds ten files from the start.
    for at in range(0, 3 * len(paths), 2):
        for path in reversed((paths * 3)[at : at + 2]):
            assert prisma.read(path) == Path(path).read_bytes()
    server = Server(paths, 0.0, str(tmp_path / "socket"))
    try:
        assert [server.read(path) for path in paths] == [Path(p).read_bytes() for p in paths]
    finally:
        server.close()


def test_a_run_that_is_ended_leaves_no_process(tmp_path, mark):
    command = [
        sys.executable,
        "-m",
        "benchmarks.paper",
        "--tiny",
        "--only",
        "prisma-torch",
        "--dir",
        tmp_path,
    ]
    with subprocess.Popen(
        command, cwd=ROOT, env=mark.environment | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as run:  # fmt: skip
        until = time.monotonic() + TIMEOUT_S
        # The node daemon is no child of the run's: it is to be ended all the same.
        while not any(tmp_path.glob("hr-bench-*/rt/*")):
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        assert len(mark.living()) > 1
        run.terminate()
        assert run.wait(TIMEOUT_S) != 0
    assert mark.living() == set()
    assert list(tmp_path.glob("hr-*")) == []

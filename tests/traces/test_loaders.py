"""Real loaders traced, on several ranks, resumed and with workers; and proved to have delivered exactly."""

import gc
import json
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

import headrace as hr
from headrace.errors import TraceError
from headrace.insight.epoch_proof import same_order, verify_epochs
from headrace.insight.report.figures import run_figures
from headrace.trace import flush, read_run
from tests_shared import until

torch = pytest.importorskip("torch")
from headrace.torch import DataLoader  # noqa: E402


def closed(folder, traces):
    """Wait until so many files have ended."""
    gc.collect()

    def ended():
        with suppress(TraceError):  # the thread has not begun yet
            return sum(not trace.cut for trace in read_run(folder).ranks) == traces
        return False

    assert until(ended)
    return read_run(folder)


def looked_at(folder, rank):
    """Whether the stages of a rank's loader were looked at."""
    with suppress(TraceError):
        return any(t.of_kind("look") for t in read_run(folder).ranks if t.rank == rank)
    return False


def epochs(loader, count=1):
    for _ in range(count):
        for _ in loader:
            pass


def test_ranks_of_a_job_are_proved(packed_photos, tmp_path):
    for rank in range(3):
        loader = hr.loader(packed_photos, 4, seed=3, rank=rank, world_size=3, trace=tmp_path)
        epochs(loader, 2)
        assert loader.last_order_hash is not None
        assert until(lambda r=rank: looked_at(tmp_path, r))
        loader.close()
        del loader
    run = closed(tmp_path, 3)
    proof = verify_epochs(run)
    assert proof.holds, proof.document()
    assert [str(e.state) for e in proof.loaders[0].epochs] == ["whole", "whole"]
    assert proof.loaders[0].history.about.source == str(packed_photos)
    assert run.ranks[0].steps["bytes"].sum() > 0
    assert run.ranks[0].of_kind("evidence")


def test_an_opportunistic_run_and_its_resume_are_proved_as_one(
    packed_photos, tmp_path, monkeypatch
):
    """The resume has the order of the run that it goes on with, whatever the page cache holds then."""
    state = None
    for resident in (((0, 3),), ()):
        monkeypatch.setattr(hr.Store, "resident_ranges", lambda *_, now=resident: now)
        loader = hr.loader(packed_photos, 2, order="opportunistic", trace=tmp_path)
        if state is not None:
            loader.load_state_dict(state)
            epochs(loader)
        else:
            next(iter(loader))
            state = loader.state_dict()
        loader.close()
        del loader
    (proved,) = verify_epochs(closed(tmp_path, 2)).loaders
    assert proved.sound


def test_a_resumed_job_on_other_ranks_has_the_order_of_one_that_was_never_stopped(
    packed_photos, tmp_path
):
    states = []
    for rank in range(2):
        loader = hr.loader(packed_photos, 3, seed=3, rank=rank, world_size=2, trace=tmp_path / "a")
        for step, _ in enumerate(loader):
            if step == 2:
                states.append(loader.state_dict())
            if step == 4:
                break
        loader.close()
        del loader
    closed(tmp_path / "a", 2)
    for rank in range(3):
        loader = hr.loader(packed_photos, 2, seed=3, rank=rank, world_size=3, trace=tmp_path / "a")
        loader.load_state_dict(states[0])
        epochs(loader, 2)
        loader.close()
        del loader
    resumed = closed(tmp_path / "a", 5)
    proof = verify_epochs(resumed)
    assert proof.holds, proof.document()
    assert proof.loaders[0].epochs[0].resumed_at == (18,)
    assert proof.loaders[0].history.again == 4
    once = hr.loader(packed_photos, 5, seed=3, trace=tmp_path / "b")
    epochs(once, 2)
    once.close()
    del once
    same = same_order(resumed, closed(tmp_path / "b", 1))
    assert same.holds
    assert same.positions == 72


def test_two_ranks_that_were_told_the_same_place_are_found(packed_photos, tmp_path):
    for _ in range(2):
        loader = hr.loader(packed_photos, 4, seed=3, rank=0, world_size=2, trace=tmp_path)
        epochs(loader)
        loader.close()
        del loader
    (loader,) = verify_epochs(closed(tmp_path, 2)).loaders
    assert "no trace of rank 1" in loader.gaps[0]


@pytest.mark.parametrize(
    "options", [{}, {"decode": len}, {"decode": len, "num_workers": 2}], ids=str
)
def test_torchs_loader_of_a_store_is_traced_whichever_way_a_batch_takes(
    packed_photos, tmp_path, options
):
    loader = DataLoader(
        packed_photos, batch_size=5, shuffle=True, seed=1, trace=tmp_path, **options
    )
    epochs(loader, 2)
    loader.close()
    del loader
    run = closed(tmp_path, 1)
    assert verify_epochs(run).holds
    assert run.ranks[0].steps["samples"].sum() == 72


def test_the_drop_in_is_traced_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_TRACE", str(tmp_path))
    data = torch.utils.data.TensorDataset(torch.arange(40))
    for _ in range(2):
        torch.manual_seed(5)
        loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=0)
        epochs(loader)
        del loader
    run = closed(tmp_path, 2)
    assert [(t.framework, t.samples, len(t.steps)) for t in run.ranks] == [
        ("torch DataLoader", 40, 5)
    ] * 2
    assert not verify_epochs(run).holds


def test_no_trace_where_none_is_asked_for(packed_photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_TRACE", raising=False)
    epochs(hr.loader(packed_photos, 4))
    assert not list(tmp_path.iterdir())


SCRIPT = """
import os
import headrace as hr
from headrace.trace import writer
writer.END_S = 60.0  # the disk does not hang, and may be slow
for epoch in range(2):
    loader = hr.loader({store!r}, 4, seed=1, on_error="skip")
    loader.set_epoch(epoch)
    for batch in loader:
        pass
"""


def test_processes_of_a_job_are_traced_by_the_environment(packed_photos, tmp_path):
    """Each as the launcher started it, with a loader for each epoch."""
    for rank in range(2):
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(store=str(packed_photos))], check=True, timeout=60,
            env={"RANK": str(rank), "WORLD_SIZE": "2", "HEADRACE_TRACE": str(tmp_path), "PATH": ""},
        )  # fmt: skip
    proof = verify_epochs(read_run(tmp_path))
    assert proof.holds, proof.document()
    assert [str(e.state) for loader in proof.loaders for e in loader.epochs] == ["whole", "whole"]
    assert run_figures(str(tmp_path)).of("samples") == 2 * 40  # two ranks of 5 steps of 4


KILLED = """
import json, os, signal, sys
from pathlib import Path
import headrace as hr
from headrace.torch import DataLoader
from headrace.trace import writer

writer.END_S = 60.0  # the disk does not hang, and may be slow
store, kind, state = sys.argv[1:]
loader = hr.loader(store, 2, seed=3) if kind == "ours" else DataLoader(hr.open(store), 2)
if Path(state).exists():
    loader.load_state_dict(json.loads(Path(state).read_text()))
for step, batch in enumerate(loader):
    Path(state).write_text(json.dumps(loader.state_dict()))
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_what_a_state_says_is_written_however_soon_its_process_is_killed(
    packed_photos, tmp_path, monkeypatch, kind
):
    run, state = tmp_path / "run", tmp_path / "state"
    monkeypatch.setenv("HEADRACE_TRACE", str(run))
    words = [sys.executable, "-c", KILLED, str(packed_photos), kind, str(state)]
    for _ in range(2):
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert [len(trace.steps) for trace in read_run(run).ranks] == [3, 3]
    if kind == "ours":
        monkeypatch.delenv("HEADRACE_TRACE")
        loader = hr.loader(packed_photos, 2, seed=3, trace=run)
        loader.load_state_dict(json.loads(state.read_text()))
        epochs(loader)
        loader.close()
        del loader
        gc.collect()
        flush()
        proof = verify_epochs(read_run(run))
        assert proof.holds, proof.document()
        assert [str(e.state) for e in proof.loaders[0].epochs] == ["whole"]

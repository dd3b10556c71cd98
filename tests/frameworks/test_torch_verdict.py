"""Over files, too, the loader says what its training waited for: at each epoch's end, and in `explain()`."""

import os
import time
from pathlib import Path

import pytest
import torch

import headrace as hr
from headrace.control.stalls.live import evidence_of
from headrace.torch import DataLoader


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.tensor(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_line_at_the_end_of_each_epoch_on_request(monkeypatch, capsys, num_workers):
    loader = DataLoader(Slow(), batch_size=4, num_workers=num_workers)
    list(loader)
    assert "headrace: epoch" not in capsys.readouterr().err
    monkeypatch.setenv("HEADRACE_VERDICT", "1")
    for _ in range(2):
        list(loader)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("headrace:")]
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"headrace: epoch {epoch} of Slow", "8 samples"] for epoch in (1, 2)
    ]
    assert all("| stall " in line for line in lines)


class Sleepy(torch.utils.data.Dataset):
    """Whose samples sleep, and read `paths` by `read`, if there are any."""

    def __init__(self, paths=(), read=None):
        self.paths, self.read = list(map(str, paths)), read

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.paths:
            self.read(self.paths[index])
        time.sleep(0.015)  # longer than a busy machine lets it wait for a processor
        return torch.tensor(index)


def plainly(path):
    Path(path).read_bytes()


def past_python(path):
    """As C code does: `open` is not asked."""
    descriptor = os.open(path, os.O_RDONLY)
    os.read(descriptor, 1 << 20)
    os.close(descriptor)


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / f"{index}.bin" for index in range(64)]
    for path in paths:
        path.write_bytes(bytes(20_000))
    return paths


def explained(make, expected, epochs=1):
    """A loader that was iterated over, and the verdict on it.

    Another loader is made, some times, where that is none of those that are expected: the machine may have
    stood still for longer than a loader like this waits for anything.
    """
    for _ in range(4):
        loader = make()
        for _ in range(epochs):
            list(loader)
        verdict = hr.explain(loader)
        if verdict.main in expected and not verdict.pauses:
            break
    return loader, verdict


# Neither of the machine's own: starting a worker, waiting for a processor.
OF_SAMPLES = {"decode", "storage"}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_data_set_that_sleeps_is_not_said_to_wait_for_storage(num_workers):
    loader, verdict = explained(
        lambda: DataLoader(Sleepy(), batch_size=8, num_workers=num_workers), OF_SAMPLES
    )
    said = loader.explain()
    # Once for all workers of which it is true.
    assert said.count("watching what samples open: so far samples opened no files") == 1
    assert "files are read ahead" not in said
    assert verdict.main == "decode", str(verdict)
    assert "it slept, locked or waited for something" in verdict.evidence[0]
    assert verdict.action.startswith("profile dataset[i]")
    assert "pack" not in verdict.action


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_c_code_reads_may_have_been_waited_for(paths, num_workers):
    dataset = Sleepy(paths, past_python)
    dataset.paths = dict(enumerate(dataset.paths))  # nobody guesses them
    _, verdict = explained(
        lambda: DataLoader(dataset, batch_size=8, num_workers=num_workers), OF_SAMPLES
    )
    assert verdict.main == "storage", str(verdict)
    assert verdict.action.startswith("profile dataset[i]")
    assert "pack" in verdict.action


@pytest.mark.parametrize("num_workers", [0, 1])
def test_files_in_the_page_cache_are_not_said_to_be_waited_for(paths, num_workers):
    loader, verdict = explained(
        lambda: DataLoader(Sleepy(paths, plainly), batch_size=8, num_workers=num_workers),
        OF_SAMPLES,
    )
    if "because they lie in the page cache" not in loader.explain():
        pytest.skip("looking at files took long on this machine")
    assert verdict.main == "decode", str(verdict)
    assert "lay in the page cache" in verdict.evidence[0]
    list(loader)
    assert evidence_of(loader).without_storage  # as before: nobody had read them when it began


class Late(torch.utils.data.IterableDataset):
    """A worker has it late, and says nothing of itself before its first batch."""

    def __iter__(self):
        time.sleep(0.2)
        return iter(range(32))


@pytest.mark.parametrize(
    "parts",
    [
        {"dataset": Slow(), "worker_init_fn": lambda _: time.sleep(0.2)},  # `iter()` waits
        {"dataset": Late(), "batch_size": 4},  # the first batch does
    ],
    ids=["announced", "late"],
)
def test_the_start_of_workers_is_waited_for_and_is_not_the_loops_own_time(parts):
    loader, verdict = explained(lambda: DataLoader(**parts, num_workers=1), {"start"}, epochs=2)
    assert verdict.main == "start", str(verdict)
    assert verdict.causes[verdict.main] >= 0.4
    assert loader.stats.stall_s >= 0.4
    assert not verdict.pauses


def test_explain_says_what_was_waited_for(monkeypatch):
    loader = DataLoader(Slow(), batch_size=4)
    assert "waiting:" not in loader.explain()
    list(loader)
    assert "\nwaiting: stall " in f"\n{loader.explain()}"


def test_what_cannot_be_told_does_not_end_training(monkeypatch, caplog):
    import headrace.control.stalls.live as epochs

    monkeypatch.setenv("HEADRACE_VERDICT", "1")
    monkeypatch.setattr(epochs, "verdict_on", None)
    assert len(list(DataLoader(Slow(), batch_size=4))) == 2
    assert "nothing can be said of this epoch" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_makes_batches_in_the_training_process_may_wait_for_its_lock(num_workers):
    assert evidence_of(DataLoader(Slow(), num_workers=num_workers)).in_process is (not num_workers)


def test_the_verdict_of_a_process_that_is_alone_names_no_rank(packed_photos):
    loader = hr.loader(packed_photos, batch_size=4)
    assert "rank 0 of 1" in str(loader)
    assert not hr.explain(loader).rank
    loader = hr.loader(packed_photos, batch_size=4, rank=0, world_size=2)
    assert hr.explain(loader).rank == "rank 0 of 2 by arguments"

"""The drop-in over files that are read ahead, when things go wrong: torch's outcome, nothing left."""

from __future__ import annotations

import builtins
import gc
import os
import random
import re
from pathlib import Path

import pytest
from torch.utils import data as torch_data

import warm
from headrace.io.replaced import real_open
from headrace.plane.read_ahead import ReadAheadOptions
from headrace.torch import DataLoader
from tests_shared import STEADY_MALLOC, descriptors, python_threads, threads, until

from .dropin_faults import Files, Short, UnpicklableFiles, keep

pytestmark = pytest.mark.usefixtures("always_ahead")

COUNT = 120


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    Files.write(folder, COUNT)
    return folder


@pytest.fixture
def own(tmp_path):
    """Files that the test may change."""
    folder = tmp_path / "own"
    folder.mkdir()
    Files.write(folder, COUNT)
    return folder


def served(loader) -> int:
    """Files that came from memory, over all workers."""
    return loader._headrace.watcher._ahead.figures.served


def delivered(loader):
    return [i for batch in loader for i, data in batch if data == Files.content(i)]


def slowly(loader):
    """All batches; in this process, each when its files were read ahead."""
    batches = []
    for batch in loader:
        batches.append(batch)
        watcher = getattr(getattr(loader, "_headrace", None), "watcher", None)
        if watcher is not None and watcher._ahead is not None:
            settle(watcher._ahead)
    return batches


def settle(ahead):
    assert until(lambda: all(j.native.done for j in list(ahead._jobs) if j.native is not None))


WAYS = [0, 2]


@pytest.mark.parametrize("workers", WAYS)
@pytest.mark.parametrize(
    "sampler",
    [
        [3, 3, 3, 119, 3, *range(40, 60), 3],
        list(range(0, COUNT, 5)),
        list(range(COUNT, 0, -1))[1:],
        [7],
        [],
        Short([9, 8, *range(30, 70)], says=COUNT),
    ],
    ids=["repeats", "skips", "backwards", "stops early", "empty", "is exhausted early"],
)
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_whatever_a_sampler_does_each_sample_has_its_own_bytes(files, workers, sampler):
    found = []
    for loader_class in (torch_data.DataLoader, DataLoader):
        loader = loader_class(
            Files(files, COUNT), 4, sampler=sampler, num_workers=workers, collate_fn=keep
        )
        found.append([slowly(loader), slowly(loader)])
    assert found[0] == found[1]
    wanted = list(sampler)
    if not workers and wanted:
        # Only of a list of indices it is known what comes; another sampler may not be asked early.
        assert loader._headrace.watcher._ahead.figures.planned >= 2 * len(wanted)
        assert type(sampler) is not list or served(loader) >= 2 * len(wanted[4:60])
    assert delivered(loader) == wanted


@pytest.mark.parametrize("workers", WAYS)
def test_a_consumer_that_leaves_every_epoch_early_gets_the_right_bytes(files, workers):
    """What was read ahead for the rest of an epoch must neither pile up nor be taken for the next."""
    shuffled = random.Random(3).sample(range(COUNT), COUNT)
    loader = DataLoader(
        Files(files, COUNT), 4, sampler=shuffled, num_workers=workers, collate_fn=keep,
        persistent_workers=workers > 0,
    )  # fmt: skip
    for epoch in range(6):
        for taken, batch in enumerate(loader):
            assert [data for _, data in batch] == [Files.content(i) for i, _ in batch]
            if not workers:
                settle(loader._headrace.watcher._ahead)
            if taken == epoch:
                break
    assert delivered(loader) == shuffled
    if not workers:
        assert served(loader) > 0
        assert (
            loader._headrace.watcher._ahead.stats().buffered_bytes
            <= ReadAheadOptions().buffer_bytes
        )


def outcomes(loader, change):
    """What comes of each batch when the files change after the first was delivered."""
    batches = iter(loader)
    found = [next(batches)]
    change()
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found
        except Exception as e:  # noqa: BLE001 - that is what is compared
            found.append((type(e), re.sub(r"\d+", "#", str(e)).splitlines()[-1]))


CHANGES = {
    "vanishes": lambda path: path.unlink(),
    "is rewritten": lambda path: path.write_bytes(b"new" * 700),
    "is cut short": lambda path: os.truncate(path, 8),
    "grows": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "becomes a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in CHANGES), ("vanishes", 2), ("is rewritten", 2)]
)
def test_files_that_change_between_reading_ahead_and_use(own, workers, kind):
    """They are read ahead while the first batch is used; workers have not come to them by then."""
    changed = [60, 70, 80]
    loader = DataLoader(Files(own, COUNT), 4, num_workers=workers, collate_fn=keep)

    def change():
        if not workers:
            settle(loader._headrace.watcher._ahead)
            assert {str(own / f"{i:04}.bin") for i in changed} <= set(
                loader._headrace.watcher._ahead.planned
            )
        for i in changed:
            # Not through `open`: in this process a planned file would be served from memory.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("io.open", real_open)
                CHANGES[kind](own / f"{i:04}.bin")

    ours = outcomes(loader, change)
    theirs = outcomes(
        torch_data.DataLoader(Files(own, COUNT), 4, num_workers=workers, collate_fn=keep),
        lambda: None,
    )
    assert ours == theirs
    assert len(ours) >= 26
    if not workers:
        assert loader._headrace.watcher._ahead.figures.changed == len(changed)
        assert served(loader) > 0


@pytest.mark.parametrize("workers", WAYS)
def test_a_dataset_that_raises_in_the_middle_leaves_nothing(files, workers):
    found = []
    for loader_class in (torch_data.DataLoader, DataLoader):
        loader = loader_class(
            Files(files, COUNT, raises_at=50), 4, num_workers=workers, collate_fn=keep
        )
        found.append(outcomes(loader, lambda: None))
    assert found[0] == found[1]
    errors = [one for one in found[1] if isinstance(one, tuple)]
    assert errors == [
        (ArithmeticError, "ArithmeticError: in the middle" if workers else "in the middle")
    ]
    assert len(found[1]) == 30


def test_a_dropped_loader_gives_open_files_and_threads_back(files):
    before = descriptors(files), python_threads(), threads()
    for _ in range(3):
        loader = DataLoader(Files(files, COUNT), 4, shuffle=True, collate_fn=keep)
        next(iter(loader))
        assert builtins.open is not real_open, "nothing is read ahead: the test proves nothing"
        del loader
        gc.collect()
        assert builtins.open is real_open
    assert until(lambda: threads() <= before[2])
    assert until(lambda: python_threads() <= before[1])
    assert until(lambda: not descriptors(files) - before[0])


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_an_unpicklable_dataset_of_files_is_torchs_error(files):
    found = []
    for loader_class in (torch_data.DataLoader, DataLoader):
        loader = loader_class(
            UnpicklableFiles(files, 20), num_workers=1, multiprocessing_context="spawn"
        )
        with pytest.raises((AttributeError, TypeError)) as caught:
            iter(loader)
        found.append((caught.type, str(caught.value)))
        del loader, caught
        gc.collect()
    assert found[0] == found[1]
    # Nothing is pickled without workers.
    assert delivered(DataLoader(UnpicklableFiles(files, 20), 2, collate_fn=keep)) == list(range(20))


def run(code, *arguments, **environment):
    own = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    return warm.run(code, *arguments, warnings=["ignore"], env=own)


KILLED = """
import sys
from headrace.torch import DataLoader
from frameworks.dropin_faults import DyingFiles, keep
try:
    for batch in DataLoader(DyingFiles(sys.argv[1], 120), 4, num_workers=2, collate_fn=keep):
        assert all(data == DyingFiles.content(i) for i, data in batch)
except RuntimeError as e:
    print("raised", e)
"""


def test_a_killed_worker_that_read_ahead_is_torchs_error(files):
    ended = run(KILLED, files)
    assert re.search(
        r"raised DataLoader worker \(pid.*(exited unexpectedly|killed by signal: Killed)",
        ended.stdout,
    ), ended.stderr


FEW = """
import resource, sys
from headrace.torch import DataLoader
from frameworks.dropin_faults import Files, keep
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for workers in (0, 3):
    loader = DataLoader(Files(sys.argv[1], 120), 4, num_workers=workers, collate_fn=keep)
    for _ in range(2):
        print(sum(data == Files.content(i) for batch in loader for i, data in batch))
"""


def test_sixty_four_descriptors_are_enough_for_reading_ahead(files):
    ended = run(FEW, files)
    assert ended.stdout.split() == ["120"] * 4, ended.stderr


# Imported first and still used at the end, so that other modules are taken apart earlier.
KEPT = """
import multiprocessing
import sys
from headrace.torch import DataLoader
from frameworks.dropin_faults import Files, keep
loader = DataLoader(
    Files(sys.argv[1], 120), 8, num_workers=1, collate_fn=keep, persistent_workers=True,
)
print(sum(data == Files.content(i) for batch in loader for i, data in batch))
assert len(multiprocessing.active_children()) == 1
"""


def test_a_loader_that_a_script_keeps_to_its_end_says_nothing(files):
    ended = run(KEPT, files)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "120", "")


# In a process of its own: the pages of one that ran hundreds of tests are copied, long after a fork, as their
# objects are looked at.
FLAT = """
import functools, multiprocessing, os, sys
from headrace.frameworks.torch import dataloader
from headrace.plane.read_ahead import ReadAheadOptions
from headrace.torch import DataLoader
from frameworks.dropin_faults import Files, keep
from tests_shared import own_bytes
dataloader.ReadAheadOptions = functools.partial(ReadAheadOptions, bypass=False)  # they lie in the page cache
count, workers = int(sys.argv[2]), int(sys.argv[3])
loader = DataLoader(
    Files(sys.argv[1], count), 8, shuffle=True, num_workers=workers, collate_fn=keep,
    persistent_workers=workers > 0, memory_bytes=64 << 20,
)
for epoch in range(50):
    assert sum(data == Files.content(i) for batch in loader for i, data in batch) == count
    if epoch in (9, 49):
        print(own_bytes(os.getpid(), *(one.pid for one in multiprocessing.active_children())))
print(0 if workers else loader._headrace.watcher._ahead.figures.served)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_stays_flat_over_fifty_epochs_of_files(files, workers):
    ended = run(FLAT, files, COUNT, workers, **STEADY_MALLOC)
    assert ended.returncode == 0, ended.stderr
    early, late, from_memory = map(int, ended.stdout.split())
    assert late < early + (4 << 20), (early, late)
    assert workers or from_memory > 10 * COUNT


def test_an_error_that_is_kept_does_not_keep_open_watched(files):
    paths = dict(enumerate(sorted(files.iterdir())))

    class Raises(torch_data.Dataset):
        """No list of it names its files: what it opens is watched."""

        def __len__(self):
            return len(paths)

        def __getitem__(self, index):
            data = paths[index].read_bytes()
            if index == 5:
                raise ValueError(type(open).__name__)
            return len(data)

    with pytest.raises(ValueError, match="Replaced") as kept:  # it was watched
        list(DataLoader(Raises(), 4))
    assert open is real_open, kept

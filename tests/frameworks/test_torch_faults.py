"""What goes wrong goes wrong as in torch: promptly, with its words, and nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils import data as torch_data

import warm
from headrace.frameworks.torch.dropin.sending import Sender
from headrace.torch import DataLoader
from tests_shared import own_bytes, python_threads, until

from .dropin_faults import (
    BadBatch,
    Megabytes,
    Numbers,
    Raising,
    RaisingInit,
    RaisingSampler,
    Slow,
    Unpicklable,
    keep,
)


def firsts(batches):
    return [batch[:, 0].tolist() for batch in batches]


def until_it_fails(loader_class, dataset, **options):
    """The batches before the error, the error, and the batches after it."""
    batches = iter(loader_class(dataset, **options))
    before = []
    with pytest.raises(Exception) as caught:
        while True:
            before.append(next(batches)[:, 0].tolist())
    after = firsts(batches)
    return before, caught.value, after


ERRORS = [
    ValueError("nine"),
    KeyError("nine"),
    OSError(5, "nine"),
    UnicodeDecodeError("a", b"", 0, 1, "nine"),
]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_does_so_in_its_turn_as_in_torch(workers):
    for error in ERRORS[: 4 if workers == 0 else 2]:
        found = []
        for loader_class in (torch_data.DataLoader, DataLoader):
            before, raised, after = until_it_fails(
                loader_class, Raising(error), batch_size=2, num_workers=workers
            )
            # The traceback inside torch's message names torch's own lines only, like here.
            found.append((before, type(raised), str(raised), after))
        assert found[0] == found[1]
        assert len(found[0][0]) == 4
        assert len(found[0][3]) == 5


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_raises_does_so_as_in_torch(workers, after):
    found = []
    for loader_class in (torch_data.DataLoader, DataLoader):
        loader = loader_class(Numbers(), 1, sampler=RaisingSampler(after), num_workers=workers)
        seen = []
        with pytest.raises(ValueError, match="the sampler is broken"):
            seen.extend(batch[0, 0].item() for batch in loader)
        found.append(seen)
    assert found[0] == found[1]
    assert workers or loader.state_dict()["delivered"] == after


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_that_skip_repeat_and_stop_early_are_followed(workers):
    for sampler in ([3, 3, 3, 19, 3], [0], [], [5, 4]):
        loader = DataLoader(Numbers(), 2, sampler=sampler, num_workers=workers)
        assert [i for batch in firsts(loader) for i in batch] == sampler


def test_an_index_that_is_not_there_is_the_datasets_error():
    for workers in (0, 1):
        tensors = torch_data.TensorDataset(torch.arange(4))
        with pytest.raises(IndexError):
            list(DataLoader(tensors, 2, sampler=[0, 9], num_workers=workers))


def test_an_iterable_without_an_iterator_is_its_own_error():
    for workers in (0, 1):
        with pytest.raises(LookupError, match="no iterator"):
            next(iter(DataLoader(RaisingInit(), num_workers=workers)))


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_a_dataset_that_cannot_be_pickled_is_torchs_error():
    found = []
    for loader_class in (torch_data.DataLoader, DataLoader):
        loader = loader_class(Unpicklable(), num_workers=1, multiprocessing_context="spawn")
        with pytest.raises((AttributeError, TypeError)) as caught:
            iter(loader)
        found.append((caught.type, str(caught.value)))
        del loader, caught
        gc.collect()
    assert found[0] == found[1]
    assert memfds() == 0


def test_a_batch_that_cannot_be_pickled_is_an_error_where_torch_would_hang():
    loader = DataLoader(Numbers(), 2, num_workers=1, collate_fn=BadBatch, timeout=60)
    with pytest.raises(TypeError, match="stays where it is"):
        next(iter(loader))


def test_a_worker_that_takes_too_long_is_torchs_timeout():
    batches = iter(DataLoader(Slow(), 1, num_workers=1, timeout=0.3))
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.3 seconds"):
        next(batches)
    assert time.monotonic() - begun < 20


KILLED = """
import gc, os, sys, threading, time
from headrace.torch import DataLoader
from frameworks.dropin_faults import Dying
from tests_shared import until
begun = time.monotonic()
loader = DataLoader(Dying(), 2, num_workers=2, persistent_workers=True)
batch = None  # it may die before the first one has come
try:
    for batch in loader:
        pass
except RuntimeError as e:
    print("raised", e, flush=True)
print("prompt", time.monotonic() - begun < 30, flush=True)
del loader, batch
gc.collect()
until(lambda: threading.active_count() == 1)
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
         if os.path.islink(f"/proc/self/fd/{fd}")]
print("left", sum("memfd" in link for link in links), threading.active_count(), flush=True)
"""


def test_a_worker_that_is_killed_is_torchs_error_and_leaves_nothing():
    """In a process of its own: torch raises from a signal handler, again whenever a child ends."""
    ended = warm.run(KILLED, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    assert re.search(
        r"raised DataLoader worker \(pid.*(exited unexpectedly|killed by signal: Killed)",
        ended.stdout,
    ), ended.stderr
    assert "prompt True" in ended.stdout
    assert "left 0 1" in ended.stdout


FULL = """
import fcntl, os, signal, struct, termios, time
from headrace.torch import DataLoader
from frameworks.dropin_faults import Inline, keep
batches = iter(DataLoader(Inline(2000), 1, num_workers=2, prefetch_factor=60, collate_fn=keep))
next(batches)
pipe = batches._worker_result_queue._reader.fileno()
sizes = [0]
while sizes[-1] < 20_000 or len(set(sizes[-20:])) > 1:  # it is full when it does not grow any more
    time.sleep(0.01)
    sizes += struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
print(*(worker.pid for worker in batches._workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_whose_pipe_is_full_do_not_outlive_a_training_process_that_is_killed():
    """They hold the pipe's reading end themselves, so that no write of theirs ever fails."""
    ended = warm.run(FULL, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    workers = [int(pid) for pid in ended.stdout.split()]
    assert len(workers) == 2, ended.stderr
    left = not until(lambda: not any(map(is_running, workers)))
    for pid in filter(is_running, workers):
        os.kill(pid, signal.SIGKILL)
    assert not left


def memfds():
    """Anonymous shared memory that this process holds, as descriptors or as mappings."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except OSError:
            continue
    mapped = Path("/proc/self/maps").read_text()
    return sum("headrace" in link for link in links) + mapped.count("memfd:headrace")


def descriptors():
    """How many are open, but for what other threads look at for a moment."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(str(fd.readlink()))
    return sum(not link.startswith(("/proc/", "/sys/")) for link in links)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_is_dropped_leaves_nothing_behind(persistent):
    list(DataLoader(Numbers(), 2, num_workers=1))  # what the first one ever leaves in the process
    gc.collect()
    before = descriptors(), python_threads()
    loader = DataLoader(Megabytes(), 2, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    kept = next(batches)
    assert memfds() > 0
    assert len(multiprocessing.active_children()) == 2
    del batches, loader
    gc.collect()
    assert until(lambda: multiprocessing.active_children() == [])
    assert kept[1, -1] == 1, "a batch that is kept outlives its loader"
    del kept
    gc.collect()
    assert memfds() == 0
    assert until(lambda: python_threads() <= before[1])
    assert until(lambda: descriptors() <= before[0])


def test_leaving_every_epoch_early_leaves_nothing_behind():
    loader = DataLoader(Megabytes(), 2, num_workers=2, shuffle=True, persistent_workers=True)
    for _ in range(5):
        for batch in loader:
            assert batch.shape == (2, 1 << 20)
            break
        expected = descriptors()
    for _ in range(3):
        next(iter(loader))
    assert until(lambda: descriptors() == expected)
    assert sorted(i for batch in firsts(loader) for i in batch) == list(range(20))


FEW_DESCRIPTORS = """
import resource
import headrace.torch
from frameworks.dropin_faults import Megabytes, Numbers, keep
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for options in ({}, {"collate_fn": keep}):
    loader = headrace.torch.DataLoader(Megabytes(60), 10, num_workers=3, **options)
    kept = [batch for batch in loader for _ in range(1)][:2]
    assert sum(len(batch) for batch in loader) == 60
print(loader.explain())
"""


def test_sixty_four_descriptors_are_enough():
    """Torch needs one for each tensor of a list; the arena none."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = warm.run(FEW_DESCRIPTORS, warnings=["ignore"], env=environment)
    assert "6 came through headrace's shared memory" in ended.stdout, ended.stderr


def test_the_memory_budget_is_kept():
    """Eight megabytes a batch, four for all workers: torch's own way is taken, batch by batch."""
    loader = DataLoader(Megabytes(16), 8, num_workers=1, memory_bytes=8 << 20)
    assert sum(len(batch) for batch in loader) == 16
    assert "2 torch's own way" in loader.explain()
    loader = DataLoader(Megabytes(40), 4, num_workers=2, memory_bytes=64 << 20)
    for batch in loader:
        assert batch.shape == (4, 1 << 20)
        assert shared_bytes() <= 32 << 20
    assert "torch's own way" not in loader.explain()


def shared_bytes():
    """Memory of arenas that was ever touched, in bytes."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counts = "memfd:headrace-batches" in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_memory_stays_flat_over_fifty_epochs():
    loader = DataLoader(
        Megabytes(16), 4, num_workers=2, shuffle=True, persistent_workers=True, collate_fn=keep
    )
    sizes = []
    for epoch in range(50):
        assert sum(len(batch) for batch in loader) == 16
        if epoch in (9, 49):
            workers = [one.pid for one in multiprocessing.active_children()]
            sizes.append(own_bytes(os.getpid(), *workers))
    assert sizes[1] < sizes[0] + (8 << 20), sizes
    assert "torch's own way" not in loader.explain()


@pytest.mark.parametrize("kept", ["tensor", "array"])
def test_a_fork_of_the_consumer_does_not_give_its_batches_away(kept):
    loader = DataLoader(Megabytes(8), 2, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    batch = next(batches)
    if kept == "array":
        batch = batch.numpy()
    child = os.fork()
    if child == 0:
        right = int(batch[1, 5]) == 1
        del batch
        gc.collect()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    rest = [int(one[1, 5]) for one in batches]
    assert rest == [3, 5, 7]
    assert int(batch[1, 5]) == 1


@pytest.mark.parametrize("how", ["close", "__del__"])
def test_a_message_for_a_queue_that_was_closed_goes_nowhere_else(tmp_path, how):
    """The collector closes what a dropped iterator holds in any order; the number may be another file's."""
    queue = multiprocessing.get_context("fork").Queue()
    sender = Sender(queue)
    number = queue._writer.fileno()
    with (tmp_path / "other").open("wb") as other:
        getattr(queue._writer, how)()
        os.dup2(other.fileno(), number)
        try:
            sender.put("nobody reads this")
            sender.__del__()
            sender.put("nor this")
        finally:
            os.close(number)
            queue._writer._handle = None
    assert (tmp_path / "other").read_bytes() == b""
    queue._reader.close()


def test_a_program_that_nobody_waits_for_any_more_is_not_taken_for_the_next_one():
    """Of `warm`, which these tests run programs with."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            warm.run("import time; time.sleep(600)")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run("import time; time.sleep(600)", timeout=0.2)
    ended = warm.run("print(1); raise SystemExit(3)")
    assert (ended.returncode, ended.stdout) == (3, "1\n")

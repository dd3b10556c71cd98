"""The store's loader for torch, when things go wrong: whole batches, threads and workers alike."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import weakref
from pathlib import Path

import pytest

import headrace as hr
import warm
from headrace.errors import SourceChanged, VolumeError, VolumeTimeout
from headrace.testing import Simulation, SlowVolume
from headrace.torch import StoreLoader
from tests_shared import descriptors, own_bytes, threads, until

from .decoders import SAMPLES, content, index_of

WAYS = {
    "whole": {},
    "inline": {"decode": index_of, "threads": 0},
    "threads": {"decode": index_of, "threads": 2},
    "workers": {"decode": index_of, "num_workers": 2},
    "cached": {"decode": index_of, "threads": 2, "cache_dir": "cache"},
}
IN_THIS_PROCESS = ["whole", "inline", "threads", "cached"]


@pytest.fixture
def options(request, tmp_path):
    given = dict(WAYS[request.param])
    return {**given, **({"cache_dir": tmp_path / "cache"} if "cache_dir" in given else {})}


every_way = pytest.mark.parametrize("options", WAYS, indirect=True)
in_this_process = pytest.mark.parametrize("options", IN_THIS_PROCESS, indirect=True)


def indices(loader, options):
    """What a pass delivered; decoding checks every byte."""
    found = []
    for batch in loader:
        found += batch[0].tolist() if "decode" in options else batch.indices.tolist()
    return found


@every_way
def test_leaving_each_epoch_early_leaves_nothing_behind(path, options):
    gc.collect()
    before = descriptors(path), threads()
    loader = StoreLoader(path, 16, shuffle=True, **options)
    for _ in range(4):
        for _ in loader:
            break
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert until(lambda: (descriptors(path), threads()) <= before)
    assert multiprocessing.active_children() == []
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-decode")]


@every_way
def test_files_that_vanish_and_change_are_named_and_the_others_are_right(tmp_path, options):
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:03}.bin").write_bytes(content(i))
    with hr.open(folder) as store:
        (folder / "007.bin").unlink()
        (folder / "041.bin").write_bytes(content(40))
        loader = StoreLoader(store, 16, shuffle=True, on_error="skip", **options)
        assert sorted(indices(loader, options)) == [i for i in range(60) if i not in {7, 41}]
        assert sorted(s.name for s in loader.skipped) == ["007.bin", "041.bin"]
        loader.close()
        loader = StoreLoader(store, 16, shuffle=True, **options)
        with pytest.raises(SourceChanged, match=r"007\.bin|041\.bin"):
            indices(loader, options)
        loader.close()


@in_this_process
def test_reads_that_fail_once_always_or_never_return(path, options):
    now_and_then = SlowVolume(Simulation(name="failing", error_rate=0.05, seed=4))
    loader = StoreLoader(path, 16, shuffle=True, simulate=now_and_then, on_error="skip", **options)
    found = indices(loader, options) + [s.index for s in loader.skipped]
    assert sorted(found) == list(range(SAMPLES))
    assert now_and_then.stats()["errors"] > 2 * len(loader.skipped)
    loader.close()
    always = SlowVolume(Simulation(name="broken", error_rate=1))
    fresh = {**options, "cache_dir": None}
    loader = StoreLoader(path, 16, shuffle=True, simulate=always, **fresh)
    with pytest.raises(VolumeError, match=r"sample \d+ .*Input/output error"):
        indices(loader, options)
    assert always.stats()["errors"] > 0
    loader.close()
    never = SlowVolume(Simulation(name="silent", latency_s=3600.0))
    loader = StoreLoader(path, 16, shuffle=True, simulate=never, deadline_s=0.2, **fresh)
    with pytest.raises(VolumeTimeout, match=r"0\.2 s: it waits for"):
        indices(loader, options)
    assert never.stats()["requests"] > 0
    loader.close()


class Stubborn:
    """A decoder that cannot be pickled."""

    def __call__(self, data):
        return index_of(data)

    def __reduce__(self):
        raise TypeError("a decoder that stays where it is")


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_an_unpicklable_decoder_is_an_error_with_spawned_workers_and_none_in_threads(path):
    loader = StoreLoader(
        path, 16, decode=Stubborn(), num_workers=1, multiprocessing_context="spawn"
    )
    with pytest.raises(TypeError, match="stays where it is"):
        next(iter(loader))
    loader.close()
    loader = StoreLoader(path, 16, shuffle=True, decode=Stubborn(), threads=2)
    assert len(indices(loader, {"decode": ...})) == SAMPLES
    loader.close()


FEW = """
import resource, sys
from headrace.torch import StoreLoader
from frameworks.decoders import index_of
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for options in ({"threads": 4}, {"num_workers": 2}):
    with StoreLoader(sys.argv[1], 16, decode=index_of, **options) as loader:
        print(sum(len(samples) for samples, _ in loader))
"""


def test_sixty_four_descriptors_are_enough(path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = warm.run(FEW, path, warnings=["ignore"], env=environment)
    assert ended.stdout.split() == [str(SAMPLES)] * 2, ended.stderr


@every_way
def test_memory_stays_flat_over_fifty_epochs(path, options):
    loader = StoreLoader(path, 16, shuffle=True, budget_bytes=64 << 20, **options)
    sizes = []
    for epoch in range(50):
        assert len(indices(loader, options)) == SAMPLES
        if epoch in (9, 49):
            gc.collect()
            workers = [one.pid for one in multiprocessing.active_children()]
            sizes.append(own_bytes(os.getpid(), *workers))
    assert sizes[1] < sizes[0] + (4 << 20), sizes
    loader.close()

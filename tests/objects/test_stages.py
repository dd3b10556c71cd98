"""What the engine of objects did is told by the stage that reads through it, and its depth is a knob."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import headrace as hr
from tests_shared import until

if TYPE_CHECKING:
    from objects.faulty_proxy import FaultyProxy


def _read(store: hr.Store, **options: Any) -> hr.Loader:
    loader = hr.loader(store, batch_size=20, seed=3, **options)
    assert sum(len(batch.indices) for batch in loader) == len(store)
    return loader


def test_requests_retries_bytes_and_latencies_are_told_by_the_stage_and_by_explain(
    opened: hr.Store, proxy: FaultyProxy
) -> None:
    assert opened.objects is not None
    proxy.inject("status", pattern=r"\.hrv", times=2)
    opened.objects._tally.add("hedges", 3)
    opened.objects._tally.add("hedges_won", 2)
    loader = _read(opened)
    stage = loader.stats.stages["prefetch"]
    did = opened.objects.stats()
    remote = stage.remote
    assert remote is not None
    assert proxy.injected == {"503": 2}
    assert (remote.requests, remote.retries, remote.failures) == (did.requests, 2, 0)
    assert remote.requests == remote.reads + 2
    assert remote.bytes == did.bytes > stage.bytes
    assert remote.faults == {"status 503": 2}
    assert sum(remote.latency_us) == remote.reads
    # What the tuner looks at: the same reads, those before the loader began not counted.
    assert 0 < sum(stage.latency_us) == stage.reads < remote.reads

    until(lambda: _explained(loader).get("requests", 0) >= remote.requests)  # the controller looks
    shown = _explained(loader)
    assert shown["requests"] == remote.requests
    assert shown["retries"] == 2
    assert shown["latency_s_p99"] >= shown["latency_s_p50"] > 0
    told = str(hr.explain())
    assert f"asked remote volumes {remote.requests} times" in told
    assert "met status 503 (2)" in told
    assert "3 sent twice, 2 answered sooner for it" in told
    loader.close()


def _explained(loader: hr.Loader) -> dict[str, Any]:
    """What `explain` tells of the engine behind a loader: what the controller saw last, if it has looked."""
    plane: Any = loader.tuning
    planes = {found["name"]: found for found in hr.explain().as_dict()["planes"]}
    stages = {stage["name"]: stage for stage in planes[plane.name]["stages"]}
    return stages.get("prefetch", {}).get("remote") or {}


def test_the_depth_that_is_tuned_is_the_engines(opened: hr.Store) -> None:
    engine = opened.objects
    assert engine is not None
    loader = hr.loader(opened, batch_size=20, tune=False)
    (stage,) = loader.stages_now()
    assert stage.knobs()["reads_in_flight"] == engine.reads_in_flight == 16
    batches = iter(loader)
    next(batches)
    assert engine.reads_in_flight == 16
    stage.turn({"reads_in_flight": 5})
    assert engine.reads_in_flight == 5
    assert stage.knobs()["reads_in_flight"] == 5
    for _ in batches:
        pass
    loader.close()
    with hr.open(opened.path, storage_options=engine.storage_options) as again:
        _read(again, reads_in_flight=3).close()
        assert again.objects is not None
        assert again.objects.reads_in_flight == 3


def test_a_store_of_files_has_no_remote_engine(folder: Any, tmp_path: Any) -> None:
    hr.pack(folder, tmp_path / "x.hr")
    with hr.open(tmp_path / "x.hr") as store:
        assert _read(store).stats.stages["prefetch"].remote is None

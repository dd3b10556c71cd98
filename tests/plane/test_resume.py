"""Stopping at every batch of an epoch and going on elsewhere is never having stopped."""

from __future__ import annotations

import json

import pytest

import headrace as hr

BATCH = 32

WAYS = {
    "shuffled": {"order": "shuffled"},
    "blocked": {"order": "blocked"},
    "balanced": {"order": "balanced"},
    "memory": {"ram_bytes": 1 << 20},
    "cached": {"cache_dir": "cache"},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_batch_is_a_place_to_stop(store, tmp_path, way):
    options = {**WAYS[way]}
    if "cache_dir" in options:
        options["cache_dir"] = tmp_path / "cache"

    def new():
        return hr.loader(store, BATCH, seed=4, **options)

    whole, states, loader = [], [], new()
    states.append(loader.state_dict())
    for _ in range(2):
        for batch in loader:
            whole.append([(int(i), bytes(batch[k])) for k, i in enumerate(batch.indices)])
            states.append(json.loads(json.dumps(loader.state_dict())))
    loader.close()
    steps = len(loader)
    assert len(whole) == 2 * steps
    for at in range(steps + 1):
        resumed = new()
        resumed.load_state_dict(states[at])
        batches = iter(resumed)
        # A state after the last batch begins the next epoch.
        last = steps if at < steps else 2 * steps
        left = [
            [(int(i), bytes(batch[k])) for k, i in enumerate(batch.indices)] for batch in batches
        ]
        assert left == whole[at:last], at
        resumed.close()


def test_a_launched_job_says_where_its_first_rank_goes_on(store, monkeypatch, capsys):
    saved = hr.loader(store, BATCH, seed=4)
    next(iter(saved))
    for rank in (0, 1):
        loader = hr.loader(store, BATCH, seed=4, rank=rank, world_size=2)
        loader.load_state_dict(saved.state_dict())
        assert not capsys.readouterr().err
        monkeypatch.setenv("HEADRACE_LAUNCH", "a mark")
        loader.load_state_dict(saved.state_dict())
        monkeypatch.delenv("HEADRACE_LAUNCH")
        text = f"headrace: resumed from epoch 0, sample {BATCH} of {len(store):,}\n"
        assert capsys.readouterr().err == ("" if rank else text)
        monkeypatch.setenv("HEADRACE_LAUNCH", "a mark")
        fresh = hr.loader(store, BATCH, seed=4, rank=rank, world_size=2)
        fresh.load_state_dict(fresh.state_dict())
        fresh.close()
        monkeypatch.delenv("HEADRACE_LAUNCH")
        assert not capsys.readouterr().err, "it goes on nowhere"
        loader.close()
    saved.close()

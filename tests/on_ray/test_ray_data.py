"""Ray Data and Ray Train over a store, on a cluster of several nodes: each sample once, with its own bytes."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import warnings

import pytest

import headrace as hr
from tests_shared import write_photos


@pytest.fixture
def driver(ray_cluster, tmp_path):
    """This process is a driver of the cluster."""
    import ray

    paths = ":".join(path for path in sys.path if path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of its next versions
        env = {"env_vars": {"PYTHONPATH": paths}}
        ray.init(ray_cluster.gcs, log_to_driver=False, logging_level="ERROR", runtime_env=env)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        try:
            yield ray
        finally:
            ray.shutdown()


@pytest.fixture
def store(tmp_path):
    """Photos in three classes."""
    source = write_photos(tmp_path / "photos")
    hr.pack(source, tmp_path / "store")
    with hr.open(tmp_path / "store") as opened:
        yield opened


def test_a_data_set_has_each_sample_once_in_the_stored_order(driver, store):
    import headrace.ray

    ds = headrace.ray.read(store, blocks=7)
    assert ds.count() == len(store)
    names = {"index": "int64", "name": "string", "label": "int64", "data": "large_binary"}
    assert dict(zip(ds.schema().names, map(str, ds.schema().types), strict=True)) == names
    rows = ds.materialize()
    assert rows.num_blocks() == 7
    rows = rows.take_all()
    assert [row["index"] for row in rows] == list(range(len(store)))
    assert [row["data"] for row in rows] == [bytes(data) for data in store]
    assert [row["name"] for row in rows] == list(store.names)
    assert [row["label"] for row in rows] == store.labels.tolist()
    assert len(headrace.ray.read(store).take(5)) == 5
    seen = [
        row["index"]
        for row in headrace.ray.read(store.path, blocks=5).random_shuffle(seed=1).take_all()
    ]
    assert seen != list(range(len(store)))
    assert sorted(seen) == list(range(len(store)))


def test_parts_and_columns_are_columns_and_what_a_sample_lacks_is_null(driver, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    import headrace.ray

    with tarfile.open(tmp_path / "pairs.tar", "w") as tar:
        for i in range(9):
            for part, data in (("txt", f"text {i}".encode()), ("bin", bytes([i]))):
                if (i, part) != (4, "bin"):
                    member = tarfile.TarInfo(f"{i}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    hr.pack(tmp_path / "pairs.tar", tmp_path / "parts")
    rows = headrace.ray.read(tmp_path / "parts", blocks=2).take_all()
    assert [row["txt"] for row in rows] == [f"text {i}".encode() for i in range(9)]
    assert [row["bin"] for row in rows] == [None if i == 4 else bytes([i]) for i in range(9)]
    assert set(rows[0]) == {"index", "name", "bin", "txt"}
    only = headrace.ray.read(tmp_path / "parts", parts=["txt"]).take_all()
    assert set(only[0]) == {"index", "name", "data"}

    widths = [1.5 * i for i in range(10)]
    pq.write_table(pa.table({"image": [b"x"] * 10, "width": widths}), tmp_path / "t.parquet")
    hr.pack(tmp_path / "t.parquet", tmp_path / "table")
    rows = headrace.ray.read(tmp_path / "table", blocks=3).take_all()
    assert [row["width"] for row in rows] == widths


def test_a_store_that_changed_is_an_error_and_no_other_data(driver, store, tmp_path):
    import headrace.ray

    ds = headrace.ray.read(store.path, blocks=2)
    hr.pack(write_photos(tmp_path / "more", 5), tmp_path / "other")
    (tmp_path / "store").rename(tmp_path / "before")
    (tmp_path / "other").rename(tmp_path / "store")
    with pytest.raises(Exception, match="the data changed after the store was opened"):
        ds.take_all()


def test_what_is_no_store_for_ray_is_refused(driver, store, tmp_path):
    import headrace.ray

    with pytest.raises(ValueError, match="mixture"):
        headrace.ray.read(hr.mix({"a": store, "b": store}))
    with pytest.raises(ValueError, match="part"):
        headrace.ray.read(store, parts=["jpg"])


@pytest.mark.parametrize("kind", ["torch", "plain"])
def test_each_worker_of_ray_train_has_its_ranks_part(driver, store, tmp_path, kind):
    from ray.train import RunConfig, ScalingConfig

    path, out = store.path, tmp_path / "seen"
    out.mkdir()

    def train():
        import json
        from pathlib import Path

        import ray.train

        import headrace as hr

        if kind == "torch":
            from headrace.torch import StoreLoader

            with hr.open(path) as store, StoreLoader(
                store, 4, shuffle=True, seed=3, tail="exact", decode=lambda _, sample: sample.index
            ) as loader:  # fmt: skip
                seen = [int(i) for items, _ in loader for i in items]
        else:
            with hr.open(path) as store:
                loader = hr.loader(store, 4, seed=3, tail="exact")
                seen = [int(i) for batch in loader for i in batch.indices]
        rank = ray.train.get_context().get_world_rank()
        Path(out, f"{rank}.json").write_text(json.dumps(seen))

    if kind == "torch":
        from ray.train.torch import TorchTrainer as Trainer
    else:
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer as Trainer
    config = RunConfig(storage_path=str(tmp_path / "run"))
    Trainer(train, scaling_config=ScalingConfig(num_workers=3), run_config=config).fit()
    parts = [json.loads(p.read_text()) for p in sorted(out.iterdir())]
    assert len(parts) == 3
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(store)))

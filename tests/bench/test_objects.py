"""Workloads whose data and checkpoints are objects, against an S3 server on loopback."""

import dataclasses
import io
import json
import os

import numpy as np
import pytest

from headrace.base.text import redacted
from headrace.bench.config import load_workload, parse_command_line, queried
from headrace.bench.dataset_files import find_files, generate
from headrace.bench.objects import ObjectFolder, object_url, objects_of
from headrace.bench.run import SessionOptions
from headrace.bench.schema import StorageSection
from headrace.bench.session import run_session
from headrace.errors import (
    BenchError,
    CheckpointNotFound,
    CorruptCheckpoint,
    SourceError,
    VolumeError,
    WorkloadError,
)
from headrace.io.objects.listing import write
from objects.conftest import AUTHORIZATION, bucket, client_options, moto_port
from objects.faulty_proxy import FaultyProxy

__all__ = ["bucket", "moto_port"]

SECRET = "wJalrXUtnFEMI/K7MDENG"
GENERATE = "++workload.workflow.generate_data=True"
ALONE = "++workload.workflow.train=False"
CHECKPOINT = "++workload.workflow.checkpoint=True"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def endpoint(moto_port):
    return f"http://127.0.0.1:{moto_port}"


@pytest.fixture
def words(endpoint, bucket, tmp_path):
    """A command line of one of DLIO's workloads, scaled down, as DLIO's own tests of S3 give it."""

    def words(*more, workload="unet3d_h100_s3", to=endpoint, results="out"):
        name = bucket.removeprefix("s3://")
        settings = {
            "storage.storage_type": "s3", "storage.storage_root": name,
            "dataset.data_folder": f"s3://{name}",
            "storage.storage_options.access_key_id": "AKIDEXAMPLE",
            "storage.storage_options.secret_access_key": SECRET,
            "storage.storage_options.endpoint_url": to,
            "storage.storage_options.region": "us-east-1",
            "storage.storage_options.s3_force_path_style": "False",
            "dataset.num_files_train": 8, "dataset.num_files_eval": 2,
            "dataset.record_length_bytes": 4096, "dataset.record_length_bytes_stdev": 0,
            "reader.batch_size": 2, "train.epochs": 2, "train.computation_time": 0.001,
            "reader.read_threads": 2, "model.model_size_bytes": 3000,
            "checkpoint.checkpoint_folder": f"s3://{name}/checkpoints",
        }  # fmt: skip
        overrides = [f"++workload.{key}={value}" for key, value in settings.items()]
        run_dir = f"++hydra.run.dir={tmp_path / results}"
        return [f"workload={workload}", *overrides, run_dir, *more]

    return words


def put(url, data, endpoint):
    write(data, url, client_options(endpoint), create=False)


def folder_of(command):
    return objects_of(load_workload(parse_command_line(command)).workload)


@pytest.mark.parametrize("form", ["npz", "npy"])
def test_data_is_generated_and_read_as_objects(words, bucket, tmp_path, form):
    more = (f"++workload.dataset.format={form}", "++workload.workflow.evaluation=True")
    report = run_session(words(*more, GENERATE))
    folder = folder_of(words(*more))
    sizes = folder.sizes(bucket)
    train = [url for url in sizes if url.startswith(f"{bucket}/train/")]
    assert train == [f"{bucket}/train/img_{i}_of_8.{form}" for i in range(8)]
    assert sum(url.startswith(f"{bucket}/valid/") for url in sizes) == 2
    loaded = np.load(io.BytesIO(folder.read(train[3])))
    array = loaded["x"] if form == "npz" else loaded
    assert array.shape == (64, 64, 1)
    assert len(set(array.ravel().tolist())) > 100
    own = report.summary["headrace"]
    figures = own["provenance"]["engine"]
    assert figures["reads"] == 2 * (8 + 2)
    assert figures["bytes"] == 2 * sum(size for url, size in sizes.items() if url.endswith(form))
    assert (figures["bucket"], figures["failures"]) == (bucket, 0)
    assert len(list(tmp_path.glob("out/*_output.json"))) == 1


def test_files_are_the_same_bytes_in_a_bucket_as_in_a_folder(words, bucket, tmp_path):
    run_session(words(GENERATE, ALONE))
    local = (
        "++workload.storage.storage_type=local_fs", f"++workload.storage.storage_root={tmp_path}",
        "++workload.dataset.data_folder=data",
    )  # fmt: skip
    run_session(words(GENERATE, ALONE, *local))
    folder = folder_of(words())
    for path in (tmp_path / "data/train").iterdir():
        assert folder.read(f"{bucket}/train/{path.name}") == path.read_bytes()


def test_large_objects_are_read_in_ranges_and_written_in_parts(
    words, moto_port, bucket, monkeypatch
):
    monkeypatch.setattr("headrace.bench.engines.native.RANGE_BYTES", 1 << 16)
    monkeypatch.setattr("headrace.io.objects.listing.PART_BYTES", 5 << 20)
    size = 6 << 20
    with FaultyProxy(moto_port) as proxy:
        run_session(words(GENERATE, f"++workload.dataset.record_length_bytes={size}",
                          "++workload.dataset.num_files_train=2", "++workload.train.epochs=1",
                          to=proxy.url))  # fmt: skip
        lines = [line for line, _ in proxy.requests]
        ranges = {r for line, r in proxy.requests if "img_0_of_2" in line and "bytes=" in r}
    assert any("partNumber=2" in line for line in lines)
    assert len(ranges) >= size // (1 << 16)


def test_generation_goes_on_where_it_stopped_and_refuses_other_data(words, bucket, endpoint):
    assert run_session(words(GENERATE, ALONE)).generated_bytes > 0
    assert run_session(words(GENERATE, ALONE)).generated_bytes == 0
    folder = folder_of(words())
    folder.remove([f"{bucket}/train/img_5_of_8.npz"])
    with pytest.raises(
        SourceError, match="half-generated: by their names its files are 8, and 7 are"
    ):
        run_session(words())
    assert 0 < run_session(words(GENERATE, ALONE)).generated_bytes < 6000
    larger = "++workload.dataset.record_length_bytes=9000"
    with pytest.raises(SourceError, match=r"another data set: .* bytes instead of 9,"):
        run_session(words(GENERATE, ALONE, larger))
    replaced = run_session(words(GENERATE, ALONE, larger), SessionOptions(overwrite=True))
    assert replaced.generated_bytes > 8 * 8000
    put(f"{bucket}/train/img_0_of_8.npz", b"PK\3\4 but no more", endpoint)
    with pytest.raises(SourceError, match=r"img_0_of_8\.npz: the file's size is 16, expected 9,"):
        run_session(words(larger))


def test_dlios_default_workload_runs_on_part_of_what_was_generated(words, bucket):
    """As DLIO's own case: 64 files are generated, 8 of them read; every second step is saved."""
    everything = ("++workload.dataset.num_files_train=64", "++workload.dataset.num_files_eval=8")
    run_session(words(GENERATE, ALONE, *everything, workload="default"))
    times = ("++workload.evaluation.eval_time=0.005", "++workload.train.epochs=2")
    report = run_session(words(
        *times, CHECKPOINT, "++workload.checkpoint.steps_between_checkpoints=2",
        "++workload.dataset.num_files_eval=8", workload="default",
    ))  # fmt: skip
    assert report.summary["headrace"]["provenance"]["engine"]["reads"] == 2 * (8 + 8)
    saved = folder_of(words()).sizes(f"{bucket}/checkpoints")
    assert [url.split("/")[4] for url in saved] == [
        f"global_epoch{epoch}_step{step}" for epoch in (1, 2) for step in (2, 4)
    ]


class AIStoreLike(FaultyProxy):
    """Has its S3 interface below /s3, as AIStore has it."""

    async def _forward(self, head, body):
        assert b" /s3/" in head.split(b"\r\n")[0]
        return await super()._forward(head.replace(b" /s3/", b" /", 1), body)


def test_aistore_is_read_and_written_by_its_s3_interface_without_credentials(
    words, bucket, moto_port
):
    name = bucket.removeprefix("s3://")
    with AIStoreLike(moto_port, AUTHORIZATION) as proxy:
        command = words(
            GENERATE, CHECKPOINT, "++workload.storage.storage_type=aistore",
            f"++workload.dataset.data_folder=ais://{name}",
            f"++workload.checkpoint.checkpoint_folder=ais://{name}/saved",
            "~workload.storage.storage_options.access_key_id",
            "~workload.storage.storage_options.secret_access_key", to=proxy.url,
        )  # fmt: skip
        report = run_session(command)
        assert not any("X-Amz-Signature" in line for line, _ in proxy.requests)
    figures = report.summary["headrace"]["provenance"]["engine"]
    assert (figures["endpoint"], figures["reads"]) == (f"{proxy.url}/s3", 2 * 8)
    assert len(folder_of(words()).sizes(f"{bucket}/saved")) == 2


def test_ranks_generate_their_shares_and_nothing_else_is_in_the_bucket(words, bucket):
    loaded = load_workload(parse_command_line(words()))
    spec, folder = loaded.workload.dataset, objects_of(loaded.workload)
    smaller = dataclasses.replace(spec, record_length_bytes=1024)
    for rank in (0, 2):  # rank 1 never comes
        generate(smaller, rank=rank, world_size=3, objects=folder)
    reports = [
        generate(spec, rank=rank, world_size=3, objects=folder, overwrite=True) for rank in range(3)
    ]
    assert [report.files for report in reports] == [4, 3, 3]
    assert len(find_files(spec, "train", objects=folder)) == 8
    assert len(folder.sizes(bucket)) == 10


def test_objects_that_somebody_else_made_are_read_and_never_written_over(words, bucket, endpoint):
    command = words("++workload.dataset.data_folder=theirs", "++workload.dataset.num_files_train=4")
    for number in range(4):
        put(f"{bucket}/theirs/train/a{number}.npz", b"PK\3\4" + bytes(996), endpoint)
    assert run_session(command).summary["headrace"]["provenance"]["engine"]["bytes"] == 2 * 4000
    with pytest.raises(
        SourceError, match=f"holds files that headrace has not generated, as {bucket}"
    ):
        run_session([*command, GENERATE])
    put(f"{bucket}/theirs/train/a3.npz", b"no npz", endpoint)
    with pytest.raises(SourceError, match=r"a3\.npz: its beginning is b'no n'"):
        run_session(command)


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_checkpoints_are_written_and_read_as_objects(words, bucket, framework):
    report = run_session(words(
        CHECKPOINT, ALONE, f"++workload.framework={framework}", "++workload.checkpoint.fsync=True",
        "++workload.checkpoint.num_checkpoints_write=2", "++workload.checkpoint.num_checkpoints_read=2",
        "++workload.model.model_size_bytes=20000000", "++workload.model.optimization_groups=[1000,300]",
    ))  # fmt: skip
    sizes = folder_of(words()).sizes(f"{bucket}/checkpoints")
    steps = {url.split("/")[4] for url in sizes}
    assert steps == {"global_epoch1_step1", "global_epoch1_step2"}
    assert sum(sizes.values()) >= 2 * (20_000_000 + 3900)
    assert len(sizes) == 2 * (2 if framework == "pytorch" else 5)
    saved = report.summary["headrace"]["checkpoint"]
    assert len(saved["saves_s"]) == len(saved["loads_s"]) == 2
    assert saved["page_cache_share_before_loads"] is None


def test_checkpoints_lie_between_epochs_of_a_run_that_trains(words, bucket, tmp_path):
    run_session(words(GENERATE, CHECKPOINT, "++workload.checkpoint.epochs_between_checkpoints=1",
                      "++workload.checkpoint.checkpoint_after_epoch=1"))  # fmt: skip
    sizes = folder_of(words()).sizes(f"{bucket}/checkpoints")
    begin = f"{bucket}/checkpoints/global_epoch"
    assert list(sizes) == [f"{begin}{e}_step4/model_states-0.pt" for e in (1, 2)]
    assert set(sizes.values()) == {3000}
    assert not (tmp_path / "s3:").exists()


def test_a_checkpoint_that_is_missing_or_short_is_named(words, bucket, endpoint):
    read = words(CHECKPOINT, ALONE, "++workload.checkpoint.num_checkpoints_read=1")
    name = f"{bucket}/checkpoints/global_epoch1_step1"
    with pytest.raises(BenchError, match=f"{name}: there is no such checkpoint"):
        run_session(read)
    put(f"{name}/model_states-0.pt", bytes(2999), endpoint)
    with pytest.raises(CorruptCheckpoint, match=f"{name}/model_states-0.pt: has 2,999 bytes"):
        run_session(read)
    put(f"{name}/other", b"1", endpoint)
    folder_of(read).remove([f"{name}/model_states-0.pt"])
    with pytest.raises(
        CheckpointNotFound, match=f"{name}/model_states-0.pt: there is no such file"
    ):
        run_session(read)


@pytest.mark.parametrize("more", [
    [GENERATE, ALONE], [], [CHECKPOINT, ALONE, "++workload.checkpoint.num_checkpoints_write=1"],
])  # fmt: skip
def test_a_bucket_that_is_not_there_is_named_with_its_endpoint(words, endpoint, more):
    other = [
        "++workload.storage.storage_root=nowhere", "++workload.dataset.data_folder=data",
        "++workload.checkpoint.checkpoint_folder=saved",
    ]  # fmt: skip
    with pytest.raises(VolumeError, match=rf"{endpoint}: s3://nowhere.*(NoSuchBucket|404)"):
        run_session(words(*other, *more))


@pytest.mark.parametrize(("pattern", "more"), [
    ("PUT ", [GENERATE, ALONE]), ("GET /.*list-type", []), ("GET .*img_", []),
])  # fmt: skip
def test_a_wrong_secret_is_an_error_that_names_endpoint_and_bucket_and_no_secret(
    words, moto_port, bucket, pattern, more
):
    if not more:
        run_session(words(GENERATE, ALONE))
    body = b"<Error><Code>SignatureDoesNotMatch</Code></Error>"
    with FaultyProxy(moto_port) as proxy:
        proxy.inject("status", pattern=pattern, times=None, status=403, body=body)
        with pytest.raises((VolumeError, BenchError)) as caught:
            run_session(words(*more, to=proxy.url))
        assert proxy.injected["403"]
    message = str(caught.value)
    assert proxy.url in message
    assert bucket in message
    assert "SignatureDoesNotMatch" in message or "403" in message
    assert SECRET not in message


def test_an_object_that_is_replaced_during_a_run_is_never_taken_for_the_old_one(words, moto_port):
    run_session(words(GENERATE, ALONE))
    with FaultyProxy(moto_port) as proxy:
        proxy.inject("wrong_etag", pattern="GET .*img_3", times=None)
        with pytest.raises(BenchError, match=f"{proxy.url}: .*img_3_of_8.npz.* changed: its etag"):
            run_session(words(to=proxy.url))


def test_faults_that_pass_are_waited_out_so_many_times(words, moto_port):
    run_session(words(GENERATE, ALONE))
    with FaultyProxy(moto_port) as proxy:
        proxy.inject("status", pattern="GET .*img_4", times=2)
        run_session(words(to=proxy.url))
        proxy.clear()
        proxy.inject("status", pattern="GET .*img_4", times=None)
        twice = "++workload.storage.storage_options.s3_max_attempts=2"
        with pytest.raises(BenchError, match=r"status 503.*\(2 attempts in"):
            run_session(words(twice, to=proxy.url))


def test_no_secret_is_written_anywhere(words, tmp_path, monkeypatch):
    command = words(GENERATE)
    monkeypatch.setattr("sys.argv", ["headrace", "bench", "run", *command])
    report = run_session(command)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 5
    for path in written:
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in f"{report.notes} {report.lines} {json.dumps(report.summary)}"
    query = "++workload.workflow.query=storage.storage_options.secret_access_key"
    assert queried(parse_command_line([*command, query])) == "***"
    strange = words(f"++workload.storage.secret_token={SECRET}")
    for wrong in (strange, [f"++storage.secret_access_key={SECRET}"]):
        with pytest.raises(WorkloadError) as caught:
            run_session(wrong)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("given", "expected"), [
    ("++a.secret_access_key=x/y+z=", "++a.secret_access_key=***"),
    ("{access_key_id: a, secret_access_key: 'b, c', region: r}",
     "{access_key_id: ***, secret_access_key: ***, region: r}"),
    ({"a": {"session_token": "t", "region": "r"}}, {"a": {"session_token": "***", "region": "r"}}),
    (["x", "secret=1"], ["x", "secret=***"]),
    ({"secret_access_key": 12, "tokenizer": "x"}, {"secret_access_key": "***", "tokenizer": "x"}),
    ("++workload.tokenizer=x", "++workload.tokenizer=x"),
    *(("++a.secret_access_key=" + value, "++a.secret_access_key=***") for value in ("ab,cd", "ab}cd", "a b c")),
    (3, 3),
])  # fmt: skip
def test_secrets_are_left_out_of_words_and_mappings(given, expected):
    assert redacted(given) == expected


@pytest.mark.parametrize(("folder", "url"), [
    ("s3://b", "s3://b"), ("s3://b/", "s3://b"), ("ais://b/x/", "s3://b/x"), ("./data", "s3://b/data"),
    ("", "s3://b"), ("s3://b/./x", "s3://b/x"),
])  # fmt: skip
def test_folders_are_below_the_bucket(folder, url):
    assert object_url(StorageSection(storage_type="s3", storage_root="b"), folder, "key") == url


@pytest.mark.parametrize("folder", ["/data", "s3://c", "gs://b", "../x", "s3://b/../x"])
def test_folders_that_are_not_are_refused(folder):
    with pytest.raises(ValueError, match=r"key is .*, expected s3://b/\.\.\. or a name below"):
        object_url(StorageSection(storage_type="s3", storage_root="b"), folder, "key")


@pytest.mark.parametrize(("override", "message"), [
    ("dataset.format=tfrecord", "dataset.format: is of files, and s3 has objects: expected npy or npz"),
    ("reader.engine=torch", "reader.engine: is of files.*: expected headrace"),
    ("reader.odirect=True", "reader.odirect: is of files.*leave it out"),
    ("dataset.skip_listing=True", "dataset.skip_listing: is of files"),
    ("storage.storage_options.bucket=x", r"storage_options\.bucket: is not known for s3"),
    ("storage.storage_options.s3_max_attempts=none", "s3_max_attempts: expected a whole"),
    ("storage.storage_options.endpoint_url=http://me:pw@host", "expected http://HOST:PORT, or https"),
    ("storage.storage_options.s3_force_path_style=maybe", "expected True or False"),
    ("storage.storage_root=./", "storage.storage_root is './', expected a bucket's name"),
    ("storage.storage_type=direct_fs", "direct_fs is not read by the benchmark: mount it"),
])  # fmt: skip
def test_what_objects_cannot_be_read_with_is_refused_by_name(words, override, message):
    with pytest.raises(WorkloadError, match=message):
        run_session(words(f"++workload.{override}"))


@pytest.mark.parametrize("writer", ["direct", "headrace"])
def test_writers_of_files_write_no_objects(words, writer):
    with pytest.raises(WorkloadError, match=f"writer={writer}: checkpoint.writer: is of files"):
        run_session(words(CHECKPOINT, f"++workload.checkpoint.writer={writer}"))


@pytest.mark.parametrize("options", [{"cold": True}, {"stage": "/x"}, {"simulate": "nfs"}])
def test_options_about_files_are_refused(words, options):
    with pytest.raises(BenchError, match=f"--{next(iter(options))} is of files, and storage"):
        run_session(words(), SessionOptions(**options))


@pytest.mark.parametrize(("storage_type", "given", "endpoint", "asked"), [
    ("aistore", {}, "http://localhost:8080/s3", "http://localhost:8080/s3"),
    ("aistore", {"endpoint_url": "http://a:1/"}, "http://a:1/s3", "http://a:1/s3"),
    ("aistore", {"endpoint_url": "http://a:1/own"}, "http://a:1/own", "http://a:1/own"),
    ("s3", {"endpoint_url": "http://a:1", "s3_force_path_style": False}, "http://a:1", "http://a:1"),
    ("s3", {"endpoint_url": "https://s3.eu-west-1.amazonaws.com"},
     "https://s3.eu-west-1.amazonaws.com", "https://b.s3.eu-west-1.amazonaws.com"),
    ("s3", {"endpoint_url": "https://s3.eu-west-1.amazonaws.com", "s3_force_path_style": True},
     "https://s3.eu-west-1.amazonaws.com", "https://s3.eu-west-1.amazonaws.com"),
])  # fmt: skip
def test_endpoints_are_those_that_the_store_has(storage_type, given, endpoint, asked):
    storage = StorageSection(storage_type=storage_type, storage_root="b", storage_options=given)
    folder = ObjectFolder(storage)
    assert (folder.endpoint, folder.engine.client_options["endpoint"]) == (endpoint, asked)
    assert ("skip_signature" in folder.engine.client_options) == (storage_type == "aistore")
    folder.close()

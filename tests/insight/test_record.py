"""`headrace record`: what an unmodified program read is written as a workload, and replayed."""

from __future__ import annotations

import json
import sys
import tarfile

import numpy as np
import pytest
import yaml

from headrace.bench.config import load_workload, parse_command_line
from headrace.trace.recorded import read_recorded
from insight.recorded_runs import record, torch_command
from tests_shared import write_photos, write_real_images

PER_CLASS = 16
FILES = 3 * PER_CLASS


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_real_images(tmp_path_factory.mktemp("images") / "photos", PER_CLASS)


def _sizes(folder):
    return {
        str(p.relative_to(folder)): p.stat().st_size
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    """A torch script with two workers over real images, recorded."""
    folder = tmp_path_factory.mktemp("trained")
    command = torch_command(
        folder / "train.py", images, workers=2, batch=6, save=str(folder / "model.pt")
    )
    return record(folder, *command)


def test_a_torch_script_is_not_changed_and_described(trained, images):
    sizes = _sizes(images)
    assert trained.code == 0, trained.err
    assert int(trained.out) == 2 * sum(sizes.values())
    job = trained.job
    assert (job["files"], job["bytes"], job["reads"]) == (FILES, sum(sizes.values()), 2 * FILES)
    assert (job["batch"], job["workers"], job["epochs"], job["ranks"]) == (6, 2, 2, 1)
    assert job["batch_by"] == "messages"
    assert job["batch_fits"] > 0.9
    assert (job["format"], job["format_by"], job["framework"]) == ("png", "ending", "pytorch")
    assert (job["shuffle"], job["same_each_epoch"]) == ("samples", False)
    assert job["compute_s"] >= 0.01  # it sleeps so long
    assert job["recording"]["lost"] == 0
    assert 0 < job["recording"]["seconds"] < trained.report["wall_s"]


def test_the_sidecar_has_every_request(trained, images):
    recorded = read_recorded(trained.output.with_name("job.requests.npz"))
    assert dict(zip(recorded.names, recorded.file_bytes.tolist(), strict=True)) == _sizes(images)
    assert recorded.is_whole_files
    for epoch in range(2):
        assert sorted(recorded.epoch(epoch).tolist()) == list(range(FILES))
    assert recorded.epoch(0).tolist() != recorded.epoch(1).tolist()
    assert (recorded.batch, recorded.workers) == (6, 2)


def test_checkpoints_are_seen(trained):
    saves = trained.job["checkpoints"]
    assert saves["count"] == 2
    assert saves["bytes"] > 160_000


def test_the_workload_is_dlios_and_says_what_is_guessed(trained):
    text = trained.output.read_text()
    document = yaml.safe_load(text)
    sizes = np.array(list(read_recorded(trained.output.with_name("job.requests.npz")).file_bytes))
    data = document["dataset"]
    assert data["num_files_train"] == FILES
    assert data["record_length_bytes"] == pytest.approx(sizes.mean(), abs=0.01)
    assert data["record_length_bytes_stdev"] == pytest.approx(sizes.std(), abs=0.01)
    assert document["reader"]["batch_size"] == 6
    assert document["reader"]["read_threads"] == 2
    assert document["reader"]["prefetch_size"] in (3, 4)  # torch: two of each worker
    assert document["reader"]["sample_shuffle"] == "seed"
    assert "of the reads agree" in text
    loaded = load_workload(parse_command_line([f"workload={trained.output}"]))
    assert loaded.workload.dataset.num_files_train == FILES
    computing = loaded.workload.train.computation_time
    assert computing.mean_s == pytest.approx(trained.job["compute_s"], rel=1e-4)
    assert not loaded.notes
    # Without the exact requests it is a plain workload: of a normal distribution.
    plain = load_workload(
        parse_command_line([f"workload={trained.output}", "++workload.dataset.requests=null"])
    )
    assert plain.workload.dataset.requests is None


def test_what_is_said_fits_a_terminal(trained):
    lines = trained.err.splitlines()
    assert lines[0] == "headrace record:"
    at = {line.split()[0]: line for line in lines if line.strip()}
    assert f"{FILES} files" in at["data"]
    assert "2 workers" in at["batch"]
    assert "shuffled, new in each" in at["order"]
    for line in lines:
        if str(trained.output.parent) not in line and "/photos" not in line:
            assert len(line) <= 80, line


@pytest.mark.parametrize("data", ["generated", "original"])
def test_a_replay_reads_the_same_files_bytes_and_order(trained, images, tmp_path, data):
    """The replay is recorded, too: it is to look as what it replays."""
    folder = tmp_path / "there" if data == "generated" else images
    make = ["--generate"] if data == "generated" else []
    words = [
        "bench", "run", "--workload", trained.output, "--data-folder", folder, *make, "--json",
        "++workload.checkpoint.checkpoint_folder=" + str(tmp_path / "saves"),
        "++workload.reader.preprocess_time=0", f"++hydra.run.dir={tmp_path}/results",
        "++workload.reader.read_threads=1",  # of several reads in flight neighbours swap
    ]  # fmt: skip
    program = [sys.executable, "-c", "from headrace.cli import main; main()"]
    again = record(tmp_path, *program, *words, options=("--root", folder))
    assert again.code == 0, again.err
    summary = json.loads(again.out)["summary"]
    sizes = _sizes(images)
    assert summary["headrace"]["bytes"] == 2 * sum(sizes.values())
    assert {n: s for n, s in _sizes(folder).items() if n in sizes} == sizes
    assert again.job["files"] == FILES
    assert again.job["bytes"] == sum(sizes.values())
    assert (again.job["reads"], again.job["epochs"]) == (2 * FILES, 2)
    assert again.job["shuffle"] == "samples"
    here = read_recorded(trained.output.with_name("job.requests.npz"))
    there = read_recorded(again.output.with_name("job.requests.npz"))
    for epoch in range(2):
        places = [
            np.argsort([r.names[r.sample_file[s]] for s in r.epoch(epoch)]) for r in (here, there)
        ]
        assert np.array_equal(*places)


def test_a_script_without_workers_has_bursts(images, tmp_path):
    command = torch_command(tmp_path / "train.py", images, workers=0, batch=8, shuffle=False)
    found = record(tmp_path, *command)
    assert found.code == 0, found.err
    job = found.job
    assert (job["batch_by"], job["workers"]) == ("bursts", 0)
    assert job["batch"] == 8
    assert (job["shuffle"], job["same_each_epoch"]) == ("none", True)
    assert job["compute_s"] >= 0.008


def test_spawned_workers_are_told_from_other_programs(images, tmp_path):
    command = torch_command(
        tmp_path / "train.py", images, workers=1, batch=6, epochs=1, context="spawn"
    )
    found = record(tmp_path, *command)
    assert found.code == 0, found.err
    assert (found.job["workers"], found.job["ranks"], found.job["batch"]) == (1, 1, 6)


def test_evaluation_files_are_told_apart(tmp_path):
    for split, count in (("train", 6), ("val", 2)):
        write_photos(tmp_path / "data" / split, count)
    program = (
        "import sys, time, pathlib\n"
        "for epoch in range(2):\n"
        "  for split in ('train', 'val'):\n"
        "    for i, p in enumerate(sorted(pathlib.Path(sys.argv[1], split).rglob('*.png'))):\n"
        "      p.read_bytes()\n"
        "      if i % 3 == 2: time.sleep(0.005)\n"
    )
    found = record(tmp_path, sys.executable, "-c", program, tmp_path / "data")
    assert found.code == 0, found.err
    document = yaml.safe_load(found.output.read_text())
    assert (document["dataset"]["num_files_train"], document["dataset"]["num_files_eval"]) == (
        18,
        6,
    )
    assert document["workflow"]["evaluation"] is True
    recorded = read_recorded(found.output.with_name("job.requests.npz"))
    assert (len(recorded.order), len(recorded.valid_order)) == (36, 12)


def test_files_without_endings_are_known_by_their_bytes(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "0.npy").write_bytes(bytes(5000))  # one among them has an ending
    for name in "abcdef":
        (folder / name).write_bytes(b"\xff\xd8\xff" + bytes(5000))
    program = (
        "import sys, pathlib\n"
        "for p in sorted(pathlib.Path(sys.argv[1]).iterdir()): p.read_bytes()\n"
    )
    found = record(tmp_path, sys.executable, "-c", program, folder, options=("--root", folder))
    assert found.code == 0, found.err
    assert (found.job["format"], found.job["format_by"]) == ("jpeg", "magic")


def test_samples_in_shards_are_counted(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(5):
                for ending, nbytes in ((".jpg", 300_000), (".cls", 3)):
                    path = tmp_path / f"{shard}{i:03}{ending}"
                    path.write_bytes(bytes(nbytes))
                    archive.add(path, path.name)
    program = (
        "import sys, glob\n"
        "for p in sorted(glob.glob(sys.argv[1] + '/*.tar')):\n"
        "  with open(p, 'rb') as f:\n"
        "    while f.read(65536): pass\n"
    )
    found = record(tmp_path, sys.executable, "-c", program, folder)
    assert found.code == 0, found.err
    assert (found.job["files"], found.job["samples"]) == (2, 10)
    assert yaml.safe_load(found.output.read_text())["dataset"]["num_samples_per_file"] == 5


def test_random_reads_of_one_file_are_samples(tmp_path):
    big = tmp_path / "all.bin"
    big.write_bytes(bytes(64 * 4096))
    program = (
        "import os, sys, random, time\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "order = random.Random(3).sample(range(64), 64)\n"
        "for n, i in enumerate(order):\n"
        "  os.pread(fd, 4096, i * 4096)\n"
        "  if n % 16 == 15: time.sleep(0.01)\n"
    )
    found = record(tmp_path, sys.executable, "-c", program, big)
    assert found.code == 0, found.err
    # Two neighbours that are read one after the other are one range.
    assert 56 <= found.job["samples"] <= 64
    assert found.job["shuffle"] == "samples"
    recorded = read_recorded(found.output.with_name("job.requests.npz"))
    assert not recorded.is_whole_files


@pytest.mark.parametrize("named", [True, False])
def test_lines_of_text_are_the_data_set_and_not_their_index(tmp_path, named):
    """JSON beside images is no data; as most of what is read it is."""
    data = tmp_path / "text"
    data.mkdir()
    (data / "text.jsonl").write_bytes(b'{"text": "' + b"x" * 88 + b'"}\n')
    lines = 101 * 600
    (data / "text.jsonl").write_bytes((data / "text.jsonl").read_bytes() * 600)
    np.save(data / "offsets.npy", np.arange(0, lines, 101))
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time, numpy as np\n"
        "offsets = np.load(sys.argv[1] + '/offsets.npy')\n"
        "with open(sys.argv[1] + '/text.jsonl', 'rb', buffering=0) as f:\n"
        "    for i, at in enumerate(np.random.default_rng(3).permutation(offsets)[:96]):\n"
        "        f.seek(int(at))\n"
        "        f.read(101)\n"
        "        time.sleep(0.01 if i % 8 == 7 else 0)\n"
    )
    options = ("--root", data) if named else ()
    done = record(tmp_path, sys.executable, script, data, options=options)
    assert (done.job["files"], done.job["reads"]) == (1, 96), done.err
    assert done.job["bytes"] == (data / "text.jsonl").stat().st_size


def test_headraces_own_loader_tells_its_steps(images, tmp_path):
    program = (
        "import sys, time, headrace as hr\n"
        "with hr.open(sys.argv[1]) as store:\n"
        "  for epoch in range(2):\n"
        "    for batch in hr.loader(store, batch_size=5, seed=1):\n"
        "      time.sleep(0.01)\n"
    )
    found = record(tmp_path, sys.executable, "-c", program, images, options=("--root", images))
    assert found.code == 0, found.err
    assert (found.job["batch"], found.job["batch_by"]) == (5, "trace")
    assert found.job["compute_s"] >= 0.009
    assert found.job["files"] == FILES
    assert read_recorded(found.output.with_name("job.requests.npz")).traced == 1


def test_a_traced_run_can_be_asked_about(images, tmp_path):
    import time

    import headrace as hr

    with hr.open(images) as store:
        for _ in hr.loader(store, batch_size=6, seed=1, trace=tmp_path / "run"):
            time.sleep(0.005)
    from typer.testing import CliRunner

    from headrace.cli.app import app
    from headrace.trace import flush

    flush()  # the run is of this process

    words = ["whatif", tmp_path / "run", "--storage", "lustre", "--gpu-speed", "2x", "--json"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["recorded"]["batch"] == 6
    assert document["recorded"]["compute_s"] >= 0.004
    assert document["predictions"][-1]["loader"] == "headrace"

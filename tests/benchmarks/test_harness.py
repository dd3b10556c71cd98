"""The loader benchmark judges by its own figures: it must measure, count and refuse rightly."""

import itertools
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.check import Checker, FlatBatch, WrongDeliveryError
from benchmarks.engine_process import Caps, deliver
from benchmarks.processes import Memory, cpu_seconds_so_far, memory_of, tree
from benchmarks.results import Key, Results
from benchmarks.run_one import Run, RunSpec, numpy_baseline, run
from benchmarks.targets import directory_targets, judge

from benchmarks import cache, datasets, directory, forms, limits, loader, loaders, tables
from tests_shared import until

ROOT = Path(__file__).resolve().parents[2]
SEED = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Data set B with 60 samples in batches of 16, as files; and the work folder."""
    root = tmp_path_factory.mktemp("bench")
    data = datasets.DataSet("B", 60, 16)
    forms.ensure(root, data, "files")
    return data, root


def flat(payloads, labels=None):
    ends = np.cumsum([len(one) for one in payloads])
    starts = ends - [len(one) for one in payloads]
    return FlatBatch(np.frombuffer(b"".join(payloads), np.uint8), starts, ends, labels)


# ---- data sets and forms ----


def test_the_data_sets_are_what_the_issue_asks_for():
    a, b = datasets.data_set("A"), datasets.data_set("B")
    assert (a.samples, a.batch_size, b.samples, b.batch_size) == (50_000, 256, 1_000_000, 1024)
    assert 5.3e9 < a.total_bytes < 5.7e9
    assert 105_000 < datasets.sizes(a).mean() < 115_000
    assert datasets.sizes(a).min() >= 4_000
    assert datasets.sizes(a).max() <= 1_000_000
    assert datasets.sizes(b).min() == 512
    assert datasets.sizes(b).max() == 4096


def test_a_sample_is_deterministic_stamped_and_incompressible():
    import zlib

    data = datasets.data_set("A", 0.001)
    payload = datasets.payload(data, 7)
    assert payload == datasets.payload(data, 7)
    assert len(payload) == datasets.sizes(data)[7]
    assert int.from_bytes(payload[:8], "little") == 7
    assert int.from_bytes(payload[-8:], "little") == 7 ^ datasets.TAIL_MASK
    assert len(zlib.compress(payload)) >= len(payload)


def test_a_scale_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="leaves no sample"):
        datasets.data_set("A", 1e-9)


def test_the_packed_form_holds_every_sample_where_the_manifest_says(tmp_path):
    data = datasets.DataSet("B", 70, 16)
    path = forms.ensure(tmp_path, data, "packed")
    packed = (path / forms.PACKED).read_bytes()
    manifest = np.fromfile(path / forms.MANIFEST, "<u8").reshape(-1, 2).tolist()
    assert len(packed) % forms.PAGE_BYTES == 0
    assert [packed[at : at + n] for at, n in manifest] == [
        datasets.payload(data, index) for index in range(70)
    ]


def test_a_complete_form_is_left_alone_and_an_incomplete_one_begun_anew(tmp_path):
    data = datasets.DataSet("B", 5, 2)
    path = forms.ensure(tmp_path, data, "files")
    first = path / datasets.file_name(0)
    first.write_bytes(b"kept")
    forms.ensure(tmp_path, data, "files")
    assert first.read_bytes() == b"kept"
    (tmp_path / data.folder / "files.done").unlink()
    forms.ensure(tmp_path, data, "files")
    assert first.read_bytes() == datasets.payload(data, 0)


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(forms, "_RESERVE_BYTES", 1 << 60)
    data = datasets.DataSet("B", 5, 2)
    with pytest.raises(forms.NoSpaceError, match="Give another --dir"):
        forms.ensure(tmp_path, data, "files")
    assert not (tmp_path / data.folder).exists()


# ---- checking what is delivered ----


def test_lists_and_flat_batches_are_checked_alike():
    data = datasets.DataSet("B", 20, 10)
    payloads = [datasets.payload(data, index) for index in range(20)]
    for every in (1, 3):
        checker = Checker(20, every)
        assert checker.add(payloads[:10]) == 10
        assert checker.add(flat(payloads[10:], np.arange(10, 20))) == 10
        checker.finish(complete=True)
        assert checker.bytes == data.total_bytes


def test_a_thinned_check_still_sees_damage_where_it_looks_and_a_short_epoch():
    data = datasets.DataSet("B", 20, 10)
    payloads = [datasets.payload(data, index) for index in range(20)]
    with pytest.raises(WrongDeliveryError, match="begins as"):
        Checker(20, 3).add([payloads[0], payloads[1], payloads[2], bytes(600)])
    checker = Checker(20, 3)
    checker.add(payloads[:10])
    with pytest.raises(WrongDeliveryError, match="ended after 10"):
        checker.finish(complete=True)


def test_a_wrong_label_and_a_wrong_boundary_are_found():
    data = datasets.DataSet("B", 20, 10)
    payloads = [datasets.payload(data, index) for index in range(4)]
    with pytest.raises(WrongDeliveryError, match="came with label 9"):
        Checker(20).add(flat(payloads, np.array([0, 9, 2, 3])))
    batch = flat(payloads)
    shifted = FlatBatch(batch.data, batch.starts, batch.ends - 1)
    with pytest.raises(WrongDeliveryError, match="begins as"):
        Checker(20).add(shifted)
    with pytest.raises(WrongDeliveryError, match="in a data set of 3"):
        Checker(3).add(payloads)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Duplicates", "different ones"),
        ("DuplicateInBatch", "different ones"),
        ("Truncates", "begins as"),
        ("Swaps", "begins as"),
        ("Empties", "shorter than its stamp"),
        ("EndsEarly", "ended after 16 of 60"),
    ],
)
def test_a_wrong_loader_is_found(tiny, name, found):
    data, root = tiny
    path = forms.form_path(root, data, "files")
    engine = loaders.create(f"wrong_loaders:{name}")
    assert found in deliver(engine, data, path, SEED, Caps(1000, 60)).wrong


def test_a_right_loader_is_not(tiny):
    data, root = tiny
    path = forms.form_path(root, data, "files")
    result = deliver(loaders.create("openread"), data, path, SEED, Caps(1000, 60))
    assert result.wrong is None
    assert result.complete
    assert (result.samples, result.bytes) == (60, data.total_bytes)
    assert 0 < result.first_batch_s <= result.seconds
    assert deliver(loaders.create("openread"), data, path, SEED, Caps(20, 60)).samples == 32


# ---- runs in their own process ----


def spec(tiny, engine):
    data, root = tiny
    return RunSpec(engine, data, "hot", SEED, 1000, 20.0, root)


@pytest.fixture
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.usefixtures("in_repository")
def test_a_run_measures_a_fresh_process(tiny):
    result = run(spec(tiny, "openread"))
    assert result.usable
    assert result.samples == 60
    assert result.cpu_s_per_gb > 0
    assert 5 < result.private_mb < 500
    assert result.resident_before in (None, 1.0)


@pytest.mark.usefixtures("in_repository")
def test_a_wrong_or_dying_loader_gives_a_run_that_counts_nowhere(tiny):
    wrong = run(spec(tiny, "wrong_loaders:Duplicates"))
    dead = run(spec(tiny, "wrong_loaders:Dies"))
    missing = run(spec(tiny, "no_such_module:Loader"))
    assert "different ones" in wrong.wrong
    assert "the reader is gone" in dead.error
    assert "no_such_module" in missing.error
    results = Results([wrong, dead, missing])
    assert results.engines("B", "hot") == []
    assert any(line.startswith("WRONG") for line in tables.failures(results))


@pytest.mark.usefixtures("in_repository")
def test_run_one_prints_one_json_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks.run_one", "--engine", "openread"]
    command += ["--dataset", "B", "--cache", "hot", "--scale", "0.0001", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["samples"] == 100


def test_a_probe_that_is_not_built_is_an_error_in_the_run(tiny, monkeypatch):
    monkeypatch.setenv("HEADRACE_LIMIT_PROBE", "/nonexistent")
    assert "not built" in run(spec(tiny, "limit:pread:2")).error


# ---- measuring ----


def test_cpu_and_memory_of_workers_that_still_run_are_counted():
    script = "x = bytearray(80_000_000)\nfor _ in range(3_000_000): pass\n"
    script += "print(flush=True); input()"
    before = cpu_seconds_so_far()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        worker.stdout.readline()
        pids = tree(worker.pid)
        assert pids == [worker.pid]
        assert memory_of(pids).private_mb > 80
        assert cpu_seconds_so_far() - before > 0.02
        worker.communicate(b"\n")
    assert memory_of([worker.pid]) == Memory()


def test_orphans_and_those_that_ignore_a_signal_are_ended_too(mark):
    code = (
        "import signal, subprocess, sys; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "subprocess.Popen(['sleep', '600'], start_new_session=True); "
    )
    script = f"""
import subprocess, sys
from benchmarks import processes
processes._END_S = 0.2
with processes.leaving_nothing():
    subprocess.run([sys.executable, "-c", {code!r}])  # leaves an orphan that ignores SIGTERM
"""
    subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=mark.environment, check=True, timeout=60
    )
    assert mark.living() == set()


def test_importing_numpy_is_the_baseline():
    assert 5 < numpy_baseline().private_mb < 100


def test_warmed_files_are_resident(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(3_000_000))

    def warmed():
        """Once more if the system has let go of a page meanwhile."""
        cache.warm([path])
        return cache.resident_fraction([path]) in (None, 1.0)

    until(warmed)


def test_a_hot_run_over_many_files_warms_only_those_it_will_read(tiny):
    data, root = tiny
    path = forms.form_path(root, data, "files")
    warmed = cache.files_of_run(data, "files", path, SEED, 10)
    order = datasets.epoch_order(data, SEED)[:10]
    assert warmed == [path / datasets.file_name(int(index)) for index in order]


# ---- statistics and targets ----


def made(engine, speed, *, seed=1, dataset="A", temperature="hot", **more):
    return Run(
        engine, dataset, temperature, seed, samples=10, seconds=1.0, samples_per_s=speed, **more
    )


def test_ratios_are_formed_inside_a_round():
    runs = [made("headrace", 90.0, seed=1), made("headrace", 30.0, seed=2)]
    runs += [made("lmdb", 30.0, seed=1), made("lmdb", 10.0, seed=2), made("lmdb", 1.0, seed=3)]
    ratio = Results(runs).ratio(Key("A", "hot", "headrace"), Key("A", "hot", "lmdb"))
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (3.0, 3.0, 3.0, 2)


def test_failed_and_wrong_runs_count_nowhere():
    runs = [made("lmdb", 10.0), made("lmdb", 999.0, seed=2, wrong="duplicates")]
    runs.append(made("hf", 999.0, error="not installed"))
    results = Results(runs)
    assert results.median(Key("A", "hot", "lmdb"), "samples_per_s") == 10.0
    assert results.engines("A", "hot") == ["lmdb"]


def verdicts(runs, directory=None):
    rows = judge(Results(runs), Memory(30.0, 10.0), directory)
    return {row.name: row for row in rows}


def test_every_target_is_open_when_nothing_ran():
    rows = verdicts([])
    assert len(rows) == 16
    assert {row.verdict for row in rows.values()} == {"open"}


def full_runs(ours):
    """Runs of every engine that a target names; headrace at `ours` times what is required."""
    hot_a = [made("headrace", 130.0 * ours), made("lmdb", 100.0), made("torch2", 13.0)]
    hot_a += [made("limit:pread:2", 144.0)]
    cold_a = [made("headrace", 900.0 * ours, cpu_s_per_gb=0.1 / ours), made("spdl", 692.0)]
    cold_a += [made("limit:uring-direct:8", 10.0), made("limit:uring-direct:32", 1000.0)]
    hot_b = [made("headrace", 1500.0 * ours), made("limit:mmap:1", 1000.0), made("hf", 375.0)]
    cold_b = [made("headrace", 90.0 * ours), made("limit:uring-direct-4k:64", 100.0)]
    level = {"randomness_level": 0.97}
    cold_b += [made("headrace-blocked", 450.0 * ours * ours, facts=level)]
    cells = [("A", "hot", hot_a), ("A", "cold", cold_a), ("B", "hot", hot_b), ("B", "cold", cold_b)]
    for dataset, temperature, runs in cells:
        for one in runs:
            one.dataset, one.temperature = dataset, temperature
            one.private_mb, one.first_batch_s = 30 + 149 / ours, 0.049 / ours
    return [one for _, _, runs in cells for one in runs]


FIGURES = {
    "samples": 10_000_000,
    "open_ms": 1.0,
    "find_ns": 400.0,
    "bytes_a_sample": 20.0,
    "name_fraction": 0.4,
}


def test_targets_are_met_just_above_their_bounds():
    rows = verdicts(full_runs(1.001), FIGURES)
    assert {row.verdict for row in rows.values()} == {"met"}
    assert "lmdb" in rows["A hot / best peer"].note
    assert "uring-direct:32" in rows["A cold / io_uring limit"].note
    assert "0.970" in rows["B cold, blocked / exact order"].note


def test_targets_are_not_met_below_their_bounds():
    bad = {"samples": 10, "open_ms": 21, "find_ns": 501, "bytes_a_sample": 25, "name_fraction": 0.6}
    rows = verdicts(full_runs(0.95), bad)
    assert {row.verdict for row in rows.values()} == {"NOT MET"}


def test_a_directory_that_was_not_measured_is_open():
    assert {row.verdict for row in directory_targets(None)} == {"open"}


def test_tables_show_every_engine_and_dashes_for_what_is_missing():
    text = tables.loader_table(Results([made("lmdb", 12345.0)]), "A")
    assert "12,345" in text
    assert "-" in text.splitlines()[-1]


# ---- the plan ----


def test_the_plan_interleaves_engines_round_by_round():
    options = loader.parse(["--quick", "--repeats", "2", "--datasets", "A", "--only", "hot"])
    plan = [(one.seed, one.engine) for one in loader.plan(options)]
    half = len(plan) // 2
    assert [engine for _, engine in plan[:half]] == [engine for _, engine in plan[half:]]
    assert {seed for seed, _ in plan[:half]} == {1}
    assert {"limit:pread:2", "openread", "headrace", *loaders.PEERS} <= {e for _, e in plan}
    assert "headrace-blocked" not in {engine for _, engine in plan}


def test_what_is_given_beats_quick():
    options = loader.parse(["--quick", "--scale", "0.5"])
    assert (options.scale, options.repeats) == (0.5, 1)


def test_an_unknown_engine_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        loader.parse(["--engines", "tape"])
    assert "headrace" in capsys.readouterr().err


def test_probes_are_told_their_width_and_caps(tmp_path, monkeypatch):
    probe = tmp_path / "limit_probe"
    probe.touch(mode=0o755)
    monkeypatch.setenv("HEADRACE_LIMIT_PROBE", str(probe))
    data = datasets.data_set("B")
    words = limits.command("limit:uring-direct:64", tmp_path, data, 7, (1000, 2.0))
    assert words[0] == str(probe)
    told = dict(zip(words[1::2], words[2::2], strict=True))
    assert (told["--mode"], told["--depth"]) == ("uring-direct", "64")
    assert (told["--batch"], told["--samples"], told["--seconds"]) == ("1024", "1000", "2.0")
    words = limits.command("limit:pread:2", tmp_path, data, 7, (1000, 2.0))
    assert words[words.index("--threads") + 1] == "2"


def test_only_hot_runs_over_a_million_files_are_cut_short():
    data = datasets.data_set("B")
    assert loader.cap_samples(data, "openread", "hot") < data.samples
    assert loader.cap_samples(data, "openread", "cold") == data.samples
    assert loader.cap_samples(data, "lmdb", "hot") == data.samples
    assert loader.cap_samples(data, "limit:mmap:1", "hot") == data.samples


# ---- the directory benchmark ----


def test_directory_names_look_like_imagenet_and_every_one_is_different():
    names = directory.all_names(2500)
    starts, text = names.offsets.tolist(), names.blob.tobytes()
    listed = [text[a:b].decode() for a, b in itertools.pairwise(starts)]
    assert len(set(listed)) == len(listed) == 2500
    assert all(re.fullmatch(r"(n\d{8})/\1_\d+\.JPEG", name) for name in listed)
    assert names.labels.tolist() == sorted(names.labels.tolist())


@pytest.mark.parametrize(("samples", "wanted"), [(2500, 700), (2500, 2500), (40, 40)])
def test_random_directory_names_come_with_their_indices(samples, wanted):
    names = directory.all_names(samples)
    starts, text = names.offsets.tolist(), names.blob.tobytes()
    asked, expected = directory.random_names(samples, wanted)
    assert len(asked) == len(set(asked)) == wanted
    for name, index in zip(asked, expected.tolist(), strict=True):
        assert text[starts[index] : starts[index + 1]].decode() == name


def test_name_bytes_are_read_from_the_section_table(tmp_path):
    sections = [(1, 13, 8192, 1300, 100, 0), (8, 2, 9500, 14, 7, 0), (9, 0, 9600, 900, 100, 0)]
    table = b"".join(struct.pack("<IIQQQQ24x", *section) for section in sections)
    header = struct.pack("<40xI84x", len(sections)) + table
    path = tmp_path / "names.hrd"
    path.write_bytes(header.ljust(4096, b"\0"))
    assert directory.name_bytes(path) == 914

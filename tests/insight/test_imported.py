"""DFTracer's traces and Darshan's logs say of a job what headrace's own recording says, or that they cannot."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from headrace.errors import HeadraceError, RecordError
from headrace.insight.record.log import CallKind, Flag, read_log
from headrace.insight.record.recording import RecordOptions, import_recording
from headrace.trace.recorded import read_recorded
from insight.recorded_runs import record, torch_command
from tests_shared import write_real_images


def imported(path, folder, **options):
    """The record of traces, and what was written about it."""
    output = folder / "imported.yaml"
    done = import_recording([path], RecordOptions(output=output, overwrite=True, **options))
    document = yaml.safe_load(output.read_text())
    return done, read_recorded(done.sidecar), document


# -- DFTracer ----------------------------------------------------------------------------------------


def name(key, path):
    return {"name": "FH", "cat": "dftracer", "ph": 4, "args": {"name": path, "value": key}}


def call(what, pid, ts, dur=0.0, cat="POSIX", **args):
    return {
        "name": what,
        "cat": cat,
        "pid": pid,
        "tid": pid,
        "ts": ts,
        "dur": dur,
        "ph": 1,
        "args": args,
    }


def start(pid, parent):
    return call("start", pid, 0, cat="dftracer", ppid=parent, cmd_hash="c", cwd="w")


def lines_of(events):
    return b"".join(json.dumps(event).encode() + b"\n" for event in [*HEAD, *events])


HEAD = [
    name("w", "/work"),
    {"name": "SH", "ph": 4, "args": {"name": "python;train.py", "value": "c"}},
    {"name": "CM", "ph": 4, "args": {"name": "time_metric", "value": "US"}},
]


def as_dftracer(log):
    """What DFTracer would have written of a process, from headrace's own log of it."""
    paths, events = {}, [start(log.process, log.parent)]
    for number, slot in enumerate(log.slots.tolist()):
        kind, flags, _, _, begin_ns, offset, nbytes, seconds, fd = slot
        at = {"pid": log.process, "ts": begin_ns / 1000, "dur": seconds * 1e6}
        if kind == CallKind.OPEN and number in log.text_of:
            paths[fd] = log.text_of[number]
            events.append(name(paths[fd], paths[fd]))
            events.append(call("open64", flags=flags & Flag.FOR_WRITING, fhash=paths[fd], **at))
        elif fd in paths and kind == CallKind.CLOSE:
            events.append(call("close", fhash=paths.pop(fd), ret=0, **at))
        elif fd in paths and kind in (CallKind.READ, CallKind.WRITE):
            what = "read" if kind == CallKind.READ else "write"
            where = {"offset": offset} if offset >= 0 else {}
            events.append(
                call("p" * bool(where) + what, fhash=paths[fd], ret=nbytes, **where, **at)
            )
        elif fd in paths and kind == CallKind.SEEK:
            events.append(
                call("lseek64", fhash=paths[fd], ret=offset, whence=0, offset=offset, **at)
            )
    return lines_of(events)


@pytest.mark.parametrize("ending", [".pfw", ".pfw.gz"])
def test_a_trace_of_the_calls_has_the_requests_of_the_recording(tmp_path, ending):
    images = write_real_images(tmp_path / "photos", 8)
    command = torch_command(
        tmp_path / "train.py", images, workers=2, batch=6, save=str(tmp_path / "model.pt")
    )
    assert record(tmp_path, *command, options=("--keep",)).code == 0
    own = read_recorded(tmp_path / "job.requests.npz")
    (tmp_path / "traces").mkdir()
    for log in (tmp_path / "job.yaml.part").glob("log-*"):
        lines = as_dftracer(read_log(log))
        packed = gzip.compress(lines) if ending.endswith("gz") else lines
        (tmp_path / "traces" / f"{log.name}{ending}").write_bytes(packed)
    done, theirs, document = imported(tmp_path / "traces", tmp_path)
    assert dict(zip(theirs.names, theirs.file_bytes, strict=True)) == dict(
        zip(own.names, own.file_bytes, strict=True)
    )
    assert (theirs.epochs, theirs.workers, theirs.ranks) == (2, 2, 1)

    def begins(recorded):
        files = recorded.sample_file[recorded.order].tolist()
        return sorted(
            zip(recorded.begin_s.tolist(), [recorded.names[f] for f in files], strict=True)
        )

    ours, others = begins(own), begins(theirs)
    assert [path for _, path in ours] == [path for _, path in others]
    assert np.allclose([t for t, _ in ours], [t for t, _ in others], atol=2e-6)
    assert done.job.saves.count == 2
    # What only messages between processes would say is not guessed.
    assert (theirs.batch, len(theirs.compute_s), len(theirs.decode_s)) == (0, 0, 0)
    assert document["train"]["computation_time"] == 0
    assert "not known: set it" in (tmp_path / "imported.yaml").read_text()


SAMPLES, BATCH, EPOCHS, STEPS = 14, 4, 3, 4


def traced_training(workers):
    """Batches go to workers in turn; reads take 10 us, decoding 990 us; steps compute 20 ms and wait 2 ms."""
    readers = [2 + k for k in range(workers)] or [1]
    events = [start(1, 9), *(start(pid, 1) for pid in readers if pid != 1)]
    now, random = 1000.0, np.random.default_rng(3)
    for _ in range(EPOCHS):
        order = random.permutation(SAMPLES).tolist()
        events.append(call("epoch", 1, now, 1e5, cat="pipeline"))
        for step in range(STEPS):
            pid, at = readers[step % len(readers)], now
            for sample in order[step * BATCH : (step + 1) * BATCH]:
                key = f"s{sample}"
                events += [
                    name(key, f"data/{sample}.jpg"),
                    call("open64", pid, at, 2, fhash=key, flags=0),
                    call("read", pid, at + 3, 5, fhash=key, ret=1000 + sample, count=4096),
                    call("read", pid, at + 9, 1, fhash=key, ret=0, count=4096),
                    call("close", pid, at + 10, 1, fhash=key, ret=0),
                ]
                at += 1000
            fetch = 2000.0 if workers else at - now
            events.append(call("fetch.iter", 1, now, fetch, cat="dataloader", count=step + 1))
            now += fetch + 20_000
        evaluation = now + 10
        events.append(call("evaluate", 1, evaluation, 5000, cat="pipeline"))
        events.append(call("fetch.iter", 1, evaluation + 1, 4000, cat="dataloader", count=1))
        now += 50_000
    return events


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_say_batch_and_computing_time(tmp_path, workers):
    (tmp_path / "t.pfw").write_bytes(b"[\n" + lines_of(traced_training(workers)) + b"]\n")
    _, recorded, document = imported(tmp_path / "t.pfw", tmp_path)
    assert (recorded.batch, recorded.workers, recorded.epochs) == (BATCH, workers, EPOCHS)
    assert sorted(recorded.names) == sorted(f"{n}.jpg" for n in range(SAMPLES))
    assert len(recorded.compute_s) == EPOCHS * (STEPS - 1)
    assert np.allclose(recorded.compute_s, 0.02, rtol=1e-3)
    assert np.allclose(np.median(recorded.decode_s), 0.99e-3, rtol=0.02)
    assert document["reader"]["batch_size"] == BATCH
    assert document["dataset"]["data_folder"] == "./data/data"


HOSTILE = {
    "no JSON": b'{"name": "read", \n',
    "nested": b'{"name": "x", "args": ' + b"[" * 200_000 + b"\n",
    "a list": b"[1, 2]x\n",
    "no name": b'{"ph": 1, "args": {}}\n',
    "no object": b'{"name": "x", "ph": 1, "args": 7}\n',
    "negative": lines_of([call("x", 1, -5)]),
    "no number": lines_of([call("x", 1, float("nan"))]),
    "a huge number": b'{"name": "x", "ph": 1, "ts": 1' + b"0" * 400 + b"}\n",
    "after all time": lines_of([call("x", 1, 1e19)]),
    "a huge read": lines_of(
        [call("open64", 1, 1, fhash="a"), call("read", 1, 2, fhash="a", ret=1 << 60)]
    ),
    "a read at a huge place": lines_of(
        [call("open64", 1, 1, fhash="a"), call("pread", 1, 2, fhash="a", ret=1, offset=1 << 60)]
    ),
    "reads beyond all files": lines_of(
        [call("open64", 1, 1, fhash="a"), *[call("read", 1, 2, fhash="a", ret=1 << 47)] * 3]
    ),
    "a long name": lines_of([name("a", "x" * 5000)]),
    "another clock": lines_of(
        [{"name": "CM", "ph": 4, "args": {"name": "time_metric", "value": "NS"}}]
    ),
    "a long line": b'{"name": "' + b"x" * (1 << 20) + b'"}\n',
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_damaged_lines_are_errors(tmp_path, damage):
    whole = lines_of(traced_training(0))
    (tmp_path / "t.pfw").write_bytes(whole + damage + whole)
    with pytest.raises(RecordError, match=r"t\.pfw"):
        imported(tmp_path / "t.pfw", tmp_path)
    assert not (tmp_path / "imported.yaml").exists()


def test_a_trace_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    whole = lines_of(traced_training(2))
    packed = gzip.compress(whole)
    (tmp_path / "t.pfw.gz").write_bytes(packed[: len(packed) * 3 // 4])
    (tmp_path / "t.pfw").write_bytes(whole[: whole.rindex(b"open64")])
    for trace in ("t.pfw.gz", "t.pfw"):
        done, recorded, _ = imported(tmp_path / trace, tmp_path)
        assert any("cut off" in note for note in done.run.notes)
        assert SAMPLES < len(recorded.order) < EPOCHS * SAMPLES
    changed = bytearray(packed)
    changed[len(packed) // 2] ^= 255
    (tmp_path / "t.pfw.gz").write_bytes(changed)
    with pytest.raises(RecordError, match=r"t\.pfw\.gz"):
        imported(tmp_path / "t.pfw.gz", tmp_path)


def test_a_trace_without_sizes_or_reads_says_what_to_do(tmp_path):
    events = [dict(event, args={k: v for k, v in event["args"].items() if k != "ret"})
              for event in traced_training(0)]  # fmt: skip
    (tmp_path / "t.pfw").write_bytes(lines_of(events))
    with pytest.raises(RecordError, match="DFTRACER_INC_METADATA"):
        imported(tmp_path / "t.pfw", tmp_path)
    run = [
        sys.executable, "-c", "from headrace.cli.dlio import main; main()", "workload=default",
        "++workload.workflow.generate_data=True", "++workload.train.epochs=1",
        "++workload.train.computation_time=0.001", "++workload.evaluation.eval_time=0.001",
        f"++hydra.run.dir={tmp_path}/r",
    ]  # fmt: skip
    environment = os.environ | {"DFTRACER_ENABLE": "1"}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(RecordError, match="only steps"):
        imported(tmp_path / "r", tmp_path)


# -- Darshan -----------------------------------------------------------------------------------------

STAND_IN = """
import json, os, sys
import numpy as np

COUNTERS = ["OPENS", "BYTES_READ", "BYTES_WRITTEN", "MAX_BYTE_READ", "FSYNCS"]
TIMES = [f"F_{w}_{e}_TIMESTAMP" for w in ("OPEN", "READ", "WRITE") for e in ("START", "END")]
TIMES += ["F_READ_TIME", "F_WRITE_TIME"]

def log_open(path):
    document = json.load(open(path))
    if document.get("crash"):
        os.abort()
    for line in document.get("errors", ()):
        print(line, file=sys.stderr, flush=True)
    return {"handle": 1, "document": document, "at": {"POSIX": 0, "DXT_POSIX": 0}}

def log_get_job(log):
    return log["document"]["job"]

def log_get_exe(log):
    return "python train.py"

def log_get_modules(log):
    return {"POSIX": {"partial_flag": log["document"].get("partial", False)}}

def log_get_name_records(log):
    return {i: f["name"] for i, f in enumerate(log["document"]["files"])}

def counter_names(module):
    return [f"POSIX_{n}" for n in COUNTERS]

def fcounter_names(module):
    return [f"POSIX_{n}" for n in TIMES]

def _next(log, module):
    at = log["at"][module]
    log["at"][module] += 1
    files = log["document"]["files"]
    return (at, files[at]) if at < len(files) else (at, None)

def log_get_generic_record(log, module):
    at, file = _next(log, "POSIX")
    if file is None:
        return None
    return {"id": at, "rank": file.get("rank", 0), "counters": np.array([file.get(n, 0) for n in COUNTERS]),
            "fcounters": np.array([file.get(n, 0.0) for n in TIMES])}

def log_get_dxt_record(log, module):
    at, file = _next(log, "DXT_POSIX")
    while file is not None and "reads" not in file:
        at, file = _next(log, "DXT_POSIX")
    if file is None:
        return None
    keys = "start_time", "end_time", "offset", "length"
    reads = [dict(zip(keys, read)) for read in file["reads"]]
    return {"id": at, "rank": file.get("rank", 0), "read_segments": reads}
"""


@pytest.fixture
def pydarshan(tmp_path, monkeypatch):
    """Reads JSON where PyDarshan reads its binaries; here and in the process that does it."""
    backend = tmp_path / "stand-in" / "darshan" / "backend"
    backend.mkdir(parents=True)
    (backend.parent / "__init__.py").touch()
    (backend / "__init__.py").touch()
    (backend / "cffi_backend.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(backend.parents[1]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(backend.parents[1]), *sys.path]))
    yield
    for module in [m for m in sys.modules if m.partition(".")[0] == "darshan"]:
        del sys.modules[module]


def file(sample, opens=1, at=0.0, **more):
    """1,000 bytes and more that were read through at each open, the first at `at`."""
    nbytes = 1000 + sample
    return {
        "name": f"/data/{sample}.npz", "OPENS": opens, "BYTES_READ": opens * nbytes,
        "MAX_BYTE_READ": nbytes - 1, "F_OPEN_START_TIMESTAMP": at, "F_OPEN_END_TIMESTAMP": at + 0.001,
        "F_READ_START_TIMESTAMP": at + 0.002, "F_READ_END_TIMESTAMP": at + 0.006, "F_READ_TIME": 0.003,
    } | more  # fmt: skip


def write_log(folder, pid, listed, parent=None, **more):
    job = {
        "start_time_sec": 1_000 + pid, "start_time_nsec": 500, "end_time_sec": 2_000, "end_time_nsec": 0,
        "metadata": {} if parent is None else {"fork_parent": str(parent)},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    path = folder / f"u_python_id7-{pid}_1-2_1.darshan"
    path.write_text(json.dumps({"job": job, "files": listed, **more}))
    return path


@pytest.mark.usefixtures("pydarshan")
def test_files_that_were_opened_once_have_all_their_times(tmp_path):
    """Workers of two epochs, each of which lives for one."""
    logs = tmp_path / "logs"
    write_log(logs, 7, [file(0, name="/usr/lib/python3/x.py"), file(5, name="/data/m.pt", BYTES_READ=0,
                        BYTES_WRITTEN=40_000, FSYNCS=1, F_WRITE_END_TIMESTAMP=0.1,
                        F_WRITE_TIME=0.05)])  # fmt: skip
    for pid in (10, 11, 20, 21):
        write_log(logs, pid, [file(2 * k + pid % 10, at=0.01 * k) for k in (2, 0, 1)], parent=7)
    done, recorded, document = imported(logs, tmp_path)
    assert (recorded.workers, recorded.ranks, recorded.epochs, len(recorded.order)) == (2, 1, 2, 12)
    first = [recorded.names[recorded.sample_file[s]] for s in recorded.epoch(0)]
    assert sorted(first) == [f"{n}.npz" for n in range(6)]
    assert recorded.sample_bytes.tolist() == [1000 + int(n.split(".")[0]) for n in recorded.names]
    assert np.allclose(recorded.open_s, 0.001, atol=1e-6)
    assert np.allclose(recorded.read_s, 0.003, atol=1e-6)
    assert recorded.begin_s[-1] > 10  # the logs of each process begin when it does
    assert (recorded.batch, document["train"]["computation_time"]) == (0, 0)
    saves = done.job.saves
    assert (saves.nbytes, saves.synced) == (40_000, True)
    assert saves.seconds == pytest.approx(0.05)


@pytest.mark.usefixtures("pydarshan")
def test_of_files_that_were_opened_again_times_are_not_guessed(tmp_path):
    logs = [write_log(tmp_path / "l", 7, [file(n, opens=3, at=1 - 0.1 * n) for n in range(5)])]
    done, recorded, document = imported(logs[0], tmp_path)
    assert (recorded.epochs, len(recorded.order), document["train"]["epochs"]) == (3, 15, 3)
    names = [recorded.names[f] for f in recorded.sample_file[recorded.order]]
    assert names == [f"{n}.npz" for n in (4, 3, 2, 1, 0)] * 3
    assert [len(a) for a in (recorded.begin_s, recorded.open_s, recorded.read_s)] == [0, 0, 0]
    assert "seed_change_epoch" not in document["train"]
    assert any("first open's time alone" in note for note in done.job.notes)


@pytest.mark.usefixtures("pydarshan")
def test_dxt_has_the_reads_of_each_open(tmp_path):
    def traced(sample, at):
        reads = [(at + epoch + gap, at + epoch + gap + 0.001, 500 * part, 500 + sample * part)
                 for epoch in range(3) for part, gap in enumerate((0, 0.01))]  # fmt: skip
        return file(sample, opens=3, at=at, reads=reads)

    log = write_log(tmp_path / "l", 7, [traced(n, 0.1 * n) for n in range(4)])
    _, recorded, _ = imported(log, tmp_path)
    assert (recorded.epochs, len(recorded.order)) == (3, 12)
    assert recorded.sample_bytes.tolist() == [1000 + int(n[0]) for n in recorded.names]
    assert np.allclose(
        recorded.begin_s, [e + 0.1 * n for e in range(3) for n in range(4)], atol=1e-6
    )
    assert np.allclose(recorded.read_s, 0.002, atol=1e-6)
    assert len(recorded.open_s) == 0  # how long an open took, DXT does not say
    log = write_log(tmp_path / "l", 7, [file(9, MAX_BYTE_READ=10**6)])
    with pytest.raises(RecordError, match="at places that counters do not have") as error:
        imported(log, tmp_path)
    assert "DXT_ENABLE_IO_TRACE=1" in error.value.next_step


@pytest.mark.usefixtures("pydarshan")
@pytest.mark.parametrize("damage", [
    {"crash": True}, {"errors": ["Error: unable to inflate darshan log data."]},
    {"files": [file(1, OPENS=1 << 60)]}, {"files": [file(1, F_READ_TIME=float("nan"))]},
    {"files": [file(1, reads=[(5.0, 4.0, 0, 1001)])]}, {"job": {}},
])  # fmt: skip
def test_damaged_logs_are_errors_and_name_the_log(tmp_path, damage):
    write_log(tmp_path / "l", 7, [file(0)])
    write_log(tmp_path / "l", 8, [file(1)], **damage)
    with pytest.raises(RecordError, match="id7-8_"):
        imported(tmp_path / "l", tmp_path)


@pytest.mark.usefixtures("pydarshan")
def test_what_darshan_left_out_is_said(tmp_path):
    log = write_log(tmp_path / "l", 7, [file(0), file(1)], partial=True,
                    errors=["Error: Invalid DXT POSIX module version number (got 2)"])  # fmt: skip
    notes = " ".join(imported(log, tmp_path)[0].run.notes)
    assert "memory was full" in notes
    assert "too old for the DXT" in notes


def test_one_without_pydarshan_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "darshan", None)
    log = write_log(tmp_path / "l", 7, [])
    with pytest.raises(HeadraceError) as error:
        imported(log, tmp_path)
    assert "headrace[darshan]" in error.value.next_step


def test_what_are_no_traces_is_refused(tmp_path):
    write_log(tmp_path / "l", 7, [])
    (tmp_path / "l" / "t.pfw").touch()
    for path in (tmp_path, Path(__file__), tmp_path / "l"):
        with pytest.raises(RecordError, match="trace"):
            imported(path, tmp_path)

"""Recording what goes wrong: programs that fail, are no data's readers, or die; records that are damaged."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from headrace.errors import HeadraceError, RecordError, WorkloadError
from headrace.insight.record.job import job_of
from headrace.insight.record.log import read_log
from headrace.trace.recorded import read_recorded
from insight.recorded_runs import HEADRACE, record
from tests_shared import write_photos

READ_ALL = (
    "import sys, pathlib\n"
    "paths = sorted(pathlib.Path(sys.argv[1]).rglob('*.png'))\n"
    "print(sum(len(p.read_bytes()) for p in paths), flush=True)\n"
)
FOREVER = (
    "import sys, time, pathlib\n"
    "paths = sorted(pathlib.Path(sys.argv[1]).rglob('*.png'))\n"
    "for p in paths: p.read_bytes()\n"
    "print('read', flush=True)\n"
    "while True: time.sleep(0.05)\n"
)
WAIT_S = 30.0


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos", 4)


def _bytes(folder):
    return sum(p.stat().st_size for p in folder.rglob("*.png"))


def test_a_script_that_fails_is_described_until_then(photos, tmp_path):
    found = record(tmp_path, sys.executable, "-c", READ_ALL + "sys.exit(7)", photos)
    assert found.code == 7
    assert int(found.out) == _bytes(photos)
    assert "the command failed (exit status 7)" in found.err
    assert found.job["files"] == 12


def test_a_script_that_reads_nothing_is_told_so(tmp_path):
    found = record(tmp_path, sys.executable, "-c", "print('hello')")
    assert found.code == 3
    assert found.out == b"hello\n"
    assert "there is no data set to describe" in found.err
    assert "--root DIR" in found.err
    assert not found.output.exists()
    assert not (tmp_path / "job.yaml.part").exists()


def test_a_root_that_is_not_read_is_told_so(photos, tmp_path):
    (tmp_path / "other").mkdir()
    found = record(
        tmp_path, sys.executable, "-c", READ_ALL, photos, options=("--root", tmp_path / "other")
    )
    assert found.code == 3
    assert str(tmp_path / "other") in found.err


def test_a_program_that_is_not_there(tmp_path):
    found = record(tmp_path, tmp_path / "none")
    assert found.code == 127
    assert "no such file" in found.err
    assert not (tmp_path / "job.yaml.part").exists()


def test_programs_that_are_not_python_are_recorded(photos, tmp_path):
    found = record(tmp_path, "sh", "-c", 'cat "$0"/*/*.png | wc -c', photos)
    assert found.code == 0, found.err
    assert int(found.out) == _bytes(photos)
    assert (found.job["files"], found.job["bytes"]) == (12, _bytes(photos))


def test_forks_and_execs_are_followed(photos, tmp_path):
    program = (
        "import os, sys, pathlib, subprocess\n"
        "folders = sorted(pathlib.Path(sys.argv[1]).iterdir())\n"
        "inherited = os.open(sorted(folders[0].iterdir())[0], os.O_RDONLY)\n"
        "if os.fork() == 0:\n"
        "  os.read(inherited, 1 << 20)\n"
        "  for p in sorted(folders[0].iterdir())[1:]: p.read_bytes()\n"
        "  os._exit(0)\n"
        "os.wait()\n"
        "subprocess.run(['cat', *sorted(folders[1].iterdir())], stdout=subprocess.DEVNULL)\n"
        "for p in sorted(folders[2].iterdir()): os.posix_spawn('/bin/cat', ['cat', str(p)], os.environ,"
        " file_actions=[(os.POSIX_SPAWN_OPEN, 1, '/dev/null', os.O_WRONLY, 0)]); os.wait()\n"
    )
    found = record(tmp_path, sys.executable, "-c", program, photos)
    assert found.code == 0, found.err
    assert (found.job["files"], found.job["bytes"]) == (12, _bytes(photos))


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    (folder / "one.c").write_text("int main(void) { return 5; }\n")
    subprocess.run(["gcc", "-static", "-o", folder / "one", folder / "one.c"], check=True)
    return folder / "one"


def test_a_static_program_runs_and_is_told_apart(static, tmp_path):
    found = record(tmp_path, static)
    assert found.code == 5
    assert "linked statically" in found.err
    assert "linked statically" in found.report["unseen"]


def test_static_children_are_counted(static, photos, tmp_path):
    program = f"{static}; env -i /bin/true; cat {photos}/*/*.png | wc -c"
    found = record(tmp_path, "sh", "-c", program)
    assert int(found.out) == _bytes(photos)
    assert found.job["recording"]["blind"] == 2
    assert "2 started programs could not be seen" in found.err


def _started(tmp_path, photos, *options):
    words = [*HEADRACE, "record", "-o", tmp_path / "job.yaml", *options, "--", sys.executable, "-c"]
    process = subprocess.Popen(
        [*words, FOREVER, photos], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdout.readline() == b"read\n"
    return process


def _child(process):
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    return int(Path(children).read_text().split()[0])


def test_a_program_that_is_killed_leaves_what_it_read(photos, tmp_path):
    process = _started(tmp_path, photos)
    os.kill(_child(process), signal.SIGKILL)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    assert b"ended by signal 9" in err
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["dataset"]["num_files_train"] == 12


def test_a_recording_that_is_killed_can_be_finished(photos, tmp_path):
    process = _started(tmp_path, photos)
    child = _child(process)
    part = tmp_path / "job.yaml.part"
    finish = [*HEADRACE, "record", "--finish", part, "-o", tmp_path / "job.yaml"]
    busy = subprocess.run(finish, capture_output=True, check=False)
    assert busy.returncode == 3
    assert b"is still recording there" in busy.stderr
    os.kill(process.pid, signal.SIGKILL)
    process.wait(WAIT_S)
    os.kill(child, signal.SIGKILL)
    process.stdout.close()
    process.stderr.close()
    again = subprocess.run(
        [*HEADRACE, "record", "-o", tmp_path / "job.yaml", "--", "true"],
        capture_output=True,
        check=False,
    )
    assert again.returncode == 3
    assert b"--finish" in again.stderr
    done = subprocess.run(finish, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"cut off" in done.stderr
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["dataset"]["num_files_train"] == 12
    assert not part.exists()


def test_an_output_that_is_there_is_kept(photos, tmp_path):
    (tmp_path / "job.yaml").write_text("mine")
    words = [*HEADRACE, "record", "-o", tmp_path / "job.yaml", "--", "touch", tmp_path / "ran"]
    done = subprocess.run(words, capture_output=True, check=False)
    assert done.returncode == 3
    assert b"--overwrite" in done.stderr
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert not (tmp_path / "ran").exists()


def test_names_that_are_hostile_are_escaped_and_read_back(tmp_path):
    folder = tmp_path / "da\nta: [x]\x1b[2J"
    folder.mkdir()
    names = [b'a"b.png', b"new\nline.png", b"\xff\xfe.png", b"<script>.png", b"# c.png"]
    for i, name in enumerate(names):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(bytes(100 + i))
    program = (
        "import os, sys\nroot = os.fsencode(sys.argv[1])\n"
        "for n in sorted(os.listdir(root)): open(os.path.join(root, n), 'rb').read()\n"
    )
    found = record(tmp_path, sys.executable, "-c", program, folder)
    assert found.code == 0, found.err
    assert "\x1b" not in found.err
    text = found.output.read_text()
    assert "\x1b" not in text
    document = yaml.safe_load(text)
    assert set(document) <= {
        "framework", "model", "workflow", "dataset", "reader", "train", "evaluation", "checkpoint",
    }  # fmt: skip
    assert document["dataset"]["num_files_train"] == len(names)
    recorded = read_recorded(found.output.with_name("job.requests.npz"))
    assert sorted(map(os.fsencode, recorded.names)) == sorted(names)


def test_a_full_log_is_counted(photos, tmp_path):
    program = "import sys, os\nfor i in range(3000): os.stat(sys.argv[1])\n" + READ_ALL
    found = record(tmp_path, sys.executable, "-c", program, photos, options=("--limit", "40k"))
    assert int(found.out) == _bytes(photos)
    assert "logs were full" in found.err or "no data set" in found.err or found.code == 3


# -- damaged files ---------------------------------------------------------------------------------------


@pytest.fixture
def sidecar(photos, tmp_path):
    found = record(tmp_path, sys.executable, "-c", READ_ALL, photos)
    assert found.code == 0, found.err
    return found.output.with_name("job.requests.npz")


def test_damaged_sidecars_are_errors_or_whole(sidecar):
    whole = sidecar.read_bytes()
    draw = random.Random(1)
    damaged = [whole[:n] for n in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 8))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        damaged.append(bytes(data))
    failed = 0
    for data in damaged:
        sidecar.write_bytes(data)
        try:
            read_recorded(sidecar)
        except RecordError as e:
            failed += str(sidecar) in str(e)
    assert failed > 20


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name_ends": np.array([1 << 40], "<i8")}, "overlap"),
        ({"order": np.full(12, 99, "<i8")}, "order"),
        ({"sample_bytes": np.full(12, 1 << 40, "<i8")}, "ends behind its file"),
        ({"compute_s": np.array([np.nan], "<f4"), "wait_s": np.zeros(1, "<f4")}, "no time"),
        ({"version": np.array([9], "<u4")}, "version"),
        ({"order": np.array([[0]], "<i8")}, "order"),
        ({"facts": np.array([-1.0] * 7)}, "facts"),
    ],
)
def test_contradictions_are_refused(sidecar, change, said):
    with np.load(sidecar) as archive:
        arrays = {name: archive[name] for name in archive.files}
    np.savez(sidecar, **(arrays | change))
    with pytest.raises(RecordError, match=said):
        read_recorded(sidecar)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "a\0b", ""])
def test_names_that_lead_out_of_the_folder_are_refused(sidecar, name):
    with np.load(sidecar) as archive:
        arrays = {each: archive[each] for each in archive.files}
    text = np.frombuffer(name.encode(), np.uint8)
    ends = np.array([len(text)] + [len(text) + 1 + i for i in range(11)], "<i8")
    arrays |= {
        "names": np.concatenate([text, np.frombuffer(b"abcdefghijk", np.uint8)]),
        "name_ends": ends,
    }
    np.savez(sidecar, **arrays)
    with pytest.raises(RecordError, match="names the file"):
        read_recorded(sidecar)


def test_pickles_are_not_loaded(sidecar, tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        held = io.BytesIO()
        np.lib.format.write_array(held, np.array([print], object), allow_pickle=True)
        for name in ("version", "names"):
            archive.writestr(f"{name}.npy", held.getvalue())
    sidecar.write_bytes(out.getvalue())
    with pytest.raises(RecordError, match="cannot be read"):
        read_recorded(sidecar)


def test_a_workload_without_its_sidecar_says_where_it_belongs(sidecar, tmp_path):
    from headrace.bench.session import run_session

    sidecar.unlink()
    with pytest.raises(WorkloadError, match="keep the two together"):
        run_session([f"workload={tmp_path}/job.yaml", f"++hydra.run.dir={tmp_path}/r"])


def test_recorded_files_of_other_sizes_are_refused(sidecar, photos, tmp_path):
    from headrace.bench.session import run_session

    (photos / "cats" / "0.png").write_bytes(b"longer than it was " * 30)
    words = [
        f"workload={tmp_path}/job.yaml", f"++workload.dataset.data_folder={photos}",
        f"++hydra.run.dir={tmp_path}/r", "++workload.reader.batch_size=4",
    ]  # fmt: skip
    with pytest.raises(HeadraceError, match="the record says"):
        run_session(words)


@pytest.mark.parametrize("empty", [0, 3, None])
def test_generating_never_writes_into_the_recorded_folder(sidecar, photos, tmp_path, empty):
    from headrace.bench.session import run_session

    (photos / "cats" / "0.png").unlink()  # all but one: still no half-generated set
    for path in list(photos.rglob("*.png"))[:empty]:
        path.write_bytes(b"")
    before = {p: p.read_bytes() for p in photos.rglob("*.png")}
    words = [
        f"workload={tmp_path}/job.yaml", f"++workload.dataset.data_folder={photos}",
        f"++hydra.run.dir={tmp_path}/r", "++workload.workflow.generate_data=True",
    ]  # fmt: skip
    with pytest.raises(HeadraceError, match="has not generated"):
        run_session(words)
    assert {p: p.read_bytes() for p in photos.rglob("*") if p.is_file()} == before


def test_damaged_logs_are_left_out_and_said(photos, tmp_path):
    found = record(tmp_path, sys.executable, "-c", READ_ALL, photos, options=("--keep",))
    part = tmp_path / "job.yaml.part"
    log = max(part.glob("log-*"), key=lambda p: p.stat().st_size)
    whole = log.read_bytes()
    draw = random.Random(2)
    for _ in range(60):
        data = bytearray(whole[: draw.choice((len(whole), 64 << 10, (64 << 10) + 5000))])
        for _ in range(20):
            data[draw.randrange(min(len(data), 90_000))] = draw.randrange(256)
        log.write_bytes(bytes(data))
        with contextlib.suppress(RecordError):
            job_of([read_log(log)], command=["x"], cwd="/")
    log.write_bytes(b"not a log" * 10_000)
    again = subprocess.run(
        [*HEADRACE, "record", "--finish", part, "-o", tmp_path / "b.yaml"],
        capture_output=True,
        check=False,
    )
    assert again.returncode == 3
    assert b"a process's log is left out" in again.stderr
    assert found.code == 0


def test_what_is_no_recording_cannot_be_finished(tmp_path):
    for text in ("", "[]", '{"kind": "x"}', '{"kind": "headrace record", "version": 7}'):
        (tmp_path / "run.json").write_text(text)
        done = subprocess.run(
            [*HEADRACE, "record", "--finish", tmp_path, "-o", tmp_path / "a.yaml"],
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 3, done.stderr
        assert b"of what a recording left is" in done.stderr

"""`headrace ab`: a script with and without headrace; and the scripts that make trouble."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from headrace.errors import ProgramError
from headrace.insight.ab.comparison import COLUMNS, EndReason, report
from headrace.insight.ab.experiment import compare, prepare, recording_cost
from headrace.insight.ab.running import AbOptions, Agreement
from tests_shared import until, write_real_images

HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]

READ = """
import pathlib, random, sys
for epoch in range(2):
    files = sorted(pathlib.Path(sys.argv[1]).rglob("*.png"))
    random.Random(epoch).shuffle(files)
    print("epoch", epoch, "bytes", sum(len(f.read_bytes()) for f in files))
"""
SERVED = "import os; served = 'libheadrace_preload' in os.environ['LD_PRELOAD']\n"
"""In a script: whether headrace serves it."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    # Not on a file system that is memory: it cannot be made cold.
    return write_real_images(tmp_path_factory.mktemp("ab") / "photos", per_class=8)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Folders of a comparison are gone after each test."""
    place = tempfile.mkdtemp(prefix="hr-")
    monkeypatch.setenv("TMPDIR", place)
    monkeypatch.setattr(tempfile, "tempdir", place)
    yield
    assert list(Path(place).iterdir()) == []
    Path(place).rmdir()


@pytest.fixture
def script(tmp_path):
    def write(text, *arguments):
        path = tmp_path / "train.py"
        path.write_text(text)
        return [sys.executable, str(path), *map(str, arguments)]

    return write


def text_of(found):
    text = report(found)
    assert max(map(len, text.splitlines())) <= COLUMNS
    return text


# -- what it finds ------------------------------------------------------------------------------------


def test_a_script_is_compared_and_both_sides_did_the_same(script, photos):
    command = script(READ, photos)
    runs = []
    found = compare(command, AbOptions(pairs=1, compare="bytes"), runs.append)
    assert [run.number for run in runs] == [0, 1, 1]
    assert found.roots == [str(photos)]
    assert len(found.pairs) == 1
    for without, with_ in found.pairs:
        assert (without.side, with_.side) == ("without", "with")
        assert without.reading.opens[0][1] == found.learned.reading.opens[0][1]
        assert len(without.reading.opens) == 48
        assert without.before.share == with_.before.share == 0.0
        assert 0 < without.after_first_read_s < without.ran.wall_s
        assert with_.ran.cpu_s > without.ran.cpu_s > 0  # headrace's own work is counted
        assert without.ran.storage_bytes is None or without.ran.storage_bytes > 0
        assert without.ran.peak_bytes > 1 << 20
    assert found.order.sameness is Agreement.SAME
    assert found.own_order.in_order
    assert found.outcomes_agree
    assert found.same_work
    assert 0 <= found.recording_s < 1e-4
    assert found.left == []
    text = text_of(found)
    assert "48 opens of the same files in the same order" in text
    assert "2 lines of output that match 'bytes'" in text
    assert "24 files below" in text
    document = json.loads(json.dumps(found.document()))
    assert document["pairs"] == 1
    assert [run["opens"] for run in document["runs"]] == [48] * 2


def test_a_slow_storage_is_simulated_on_both_sides_and_headrace_serves_its_own(script, photos):
    options = AbOptions(pairs=1, simulate="lustre", roots=(str(photos),), with_order=True)
    found = compare(script(READ, photos), options)
    without, with_ = found.pairs[0]
    # How many are copies by then depends on how soon the daemon is there.
    assert without.ran.opens.get("copy", 0) == 0
    assert sum(with_.ran.opens.values()) >= 48
    assert found.order.sameness is Agreement.SAME
    assert without.reading.nbytes == with_.reading.nbytes > 0
    assert found.document()["simulated"] == "lustre"
    text = text_of(found)
    assert "on simulated lustre" in text.replace("\n", " ")
    assert "opens from memory" in text


def test_warm_files_are_read_into_memory_first(script, photos):
    prepare([os.fsencode(path) for path in photos.rglob("*.png")], cold=True)
    found = compare(script(READ, photos), AbOptions(pairs=1, cold=False))
    assert [run.before.share for run in found.pairs[0]] == [1.0, 1.0]
    assert "100 % of the files' bytes were in memory before each run" in text_of(found)


def test_time_that_is_over_ends_it_after_two_pairs(script, photos):
    found = compare(script(READ, photos), AbOptions(seconds=0.1))
    assert (len(found.pairs), found.ended) == (2, EndReason.SECONDS)


# -- what both sides did ------------------------------------------------------------------------------


def test_sides_that_print_something_else_cannot_be_compared(script, photos):
    found = compare(
        script(SERVED + READ + "print('loss', 1.5 + served)", photos),
        AbOptions(pairs=1, compare="loss"),
    )
    assert found.outcomes_agree is False
    assert not found.same_work
    text = text_of(found)
    assert "the two sides did not do the same" in text
    assert "'loss 1.5'" in text
    assert "'loss 2.5'" in text


def test_output_that_differs_by_itself_says_nothing(script, photos):
    text = READ + "import time; print('loss', time.time())"
    found = compare(script(text, photos), AbOptions(pairs=1, compare="loss"))
    assert found.outcomes_agree is None
    assert found.same_work
    assert "differs between runs without headrace already" in text_of(found).replace(
        "\n             ", " "
    )


def test_sides_that_read_other_files_are_found_out(script, photos):
    text = SERVED + READ + "open(files[0] if served else files[1]).close()"
    found = compare(script(text, photos), AbOptions(pairs=1))
    assert found.order.sameness is Agreement.OTHER_FILES
    assert not found.same_work
    assert "NO: not the same files were opened" in text_of(found)


def test_a_script_without_a_seed_is_told_so(script, photos):
    found = compare(
        script(READ.replace("random.Random(epoch)", "random"), photos), AbOptions(pairs=1)
    )
    assert found.order.sameness is Agreement.OTHER_ORDER
    assert not found.own_order.in_order
    assert found.same_work
    assert "it is not seeded" in text_of(found)


def test_a_file_that_is_written_is_compared_and_said_to_be_overwritten(script, photos, tmp_path):
    log = tmp_path / "train.log"
    text = SERVED + READ + f"open({str(log)!r}, 'w').write('served' if served else 'not')"
    found = compare(script(text, photos), AbOptions(pairs=1, compare_files=(str(log),)))
    assert found.outcomes_agree is False
    assert os.fsencode(log) in found.rewritten
    # A long path may be broken anywhere.
    said = "".join(text_of(found).split())
    assert f"{log}isnotthesame" in said
    assert "eachrunwritesthesamefiles" in said


# -- scripts that make trouble ------------------------------------------------------------------------


def test_a_script_that_fails_by_itself(script, photos):
    command = script(READ + "import sys; print('oh', file=sys.stderr); sys.exit(7)", photos)
    with pytest.raises(
        ProgramError, match="the first run, without headrace ended with status 7"
    ) as e:
        compare(command, AbOptions())
    assert "  | oh" in e.value.message
    assert "works by itself" in e.value.next_step


def test_a_script_that_is_killed(script, photos):
    command = script(READ + "import os; os.kill(os.getpid(), 11)", photos)
    with pytest.raises(ProgramError, match=r"by signal 11 \(SIGSEGV\)"):
        compare(command, AbOptions())


def test_a_script_that_fails_with_headrace_only(script, photos):
    command = script(SERVED + READ + "assert not served", photos)
    with pytest.raises(ProgramError, match="run 1 with headrace ended with status 1") as e:
        compare(command, AbOptions(pairs=1))
    assert "AssertionError" in e.value.message
    assert "Without headrace it ended well" in e.value.next_step


def test_a_script_that_reads_nothing(script):
    with pytest.raises(ProgramError, match="opened no data file"):
        compare(script("print(1)"), AbOptions())


def test_a_script_that_waits_for_its_input(script, photos):
    command = script(READ + "print('answer', input())", photos)
    with pytest.raises(ProgramError) as e:
        compare(command, AbOptions())
    assert "--stdin FILE" in e.value.next_step


def test_a_script_that_is_given_its_input_each_time(script, photos, tmp_path):
    (tmp_path / "answers").write_text("42\n")
    command = script(READ + "print('answer', input())", photos)
    found = compare(command, AbOptions(pairs=1, stdin=str(tmp_path / "answers"), compare="answer"))
    assert [run.outcome.lines for run in found.pairs[0]] == [("answer 42",)] * 2


def test_a_program_that_is_not_python_and_starts_others(photos):
    found = compare(["sh", "-c", f"cat {photos}/*/*.png | wc -c; ls {photos} > /dev/null"],
                    AbOptions(pairs=1, compare="."))  # fmt: skip
    assert len(found.pairs[0][0].reading.files) == 24
    assert found.order.in_order
    assert found.same_work


def test_the_loader_of_what_is_not_python_cannot_be_exchanged(photos):
    command = ["sh", "-c", f"cat {photos}/*/*.png | wc -c"]
    with pytest.raises(ProgramError, match="could not be exchanged: it does not import torch"):
        compare(command, AbOptions(pairs=1, drop_in=True))


LOADS = """
import pathlib, sys
{imported}
files = sorted(pathlib.Path(sys.argv[1]).rglob("*.png"))
print(DataLoader.__module__, sum(len(batch) for batch in DataLoader(range(len(files)), 8)))
print("bytes", sum(len(file.read_bytes()) for file in files))
"""


@pytest.mark.parametrize("module", ["torch.utils.data", "torch.utils.data.dataloader"])
def test_the_loader_is_exchanged_under_both_its_names(script, photos, module):
    pytest.importorskip("torch")
    text = LOADS.format(imported=f"from {module} import DataLoader")
    options = AbOptions(pairs=1, drop_in=True, compare=".")
    found = compare(script(text, photos), options)
    without, with_headrace = (run.outcome.lines for run in found.pairs[0])
    assert without[0] == "torch.utils.data.dataloader 24"
    assert with_headrace[0].startswith("headrace.")
    assert with_headrace[0].endswith(" 24")
    assert without[1] == with_headrace[1]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_a_program_that_cannot_be_seen(tmp_path):
    (tmp_path / "a.c").write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-static", "-o", tmp_path / "a", tmp_path / "a.c"], check=True)
    with pytest.raises(ProgramError, match="linked statically: what it reads cannot be seen"):
        compare([str(tmp_path / "a")], AbOptions())


def test_a_program_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        compare(["no-such-program"], AbOptions())


def _alive(marker):
    """Processes whose command names it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_processes_that_are_left_behind_are_ended_and_named(script, photos):
    marker = f"1000.{os.getpid()}"
    text = READ + (
        "import subprocess\n"
        f"for _ in range(2): subprocess.Popen(['sleep', '{marker}'], start_new_session=True)"
    )
    found = compare(script(text, photos), AbOptions(pairs=1))
    assert [run.ran.left for run in (found.learned, *found.pairs[0])] == [["sleep", "sleep"]] * 3
    assert "runs left processes behind, which were ended: sleep" in text_of(found)
    assert _alive(marker) == []


def test_a_run_that_takes_too_long_is_ended_whatever_it_ignores(script, photos):
    marker = f"1001.{os.getpid()}"
    text = (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"print('begun', flush=True); subprocess.call(['sleep', '{marker}'])"
    )
    for limit_s in (1, 4, 16):
        with pytest.raises(ProgramError, match=f"took longer than {limit_s} s") as e:
            compare(script(text, photos), AbOptions(limit_s=limit_s))
        assert _alive(marker) == []
        if "begun" in e.value.message:  # on a busy machine a script does not begin within a second
            break
    assert "  | begun" in e.value.message


def test_files_that_a_run_makes_for_itself_are_not_its_data(script, photos):
    text = READ + (
        "import os, tempfile; fd, name = tempfile.mkstemp(); os.close(fd)\n"
        "open(name, 'rb').close(); os.unlink(name)"
    )
    found = compare(script(text, photos), AbOptions(pairs=1))
    assert found.roots == [str(photos)]
    assert len(found.learned.reading.files) == 24
    assert found.order.in_order


def test_hostile_names_are_read_and_printed_harmlessly(script, tmp_path):
    root = tmp_path / "a\n\x1b[31m\x07 b"
    root.mkdir()
    for name in (b"\xff\xfe.png", b"new\nline.png", b"-n.png", b"$(x).png"):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(b"12345")
    found = compare(script(READ, root), AbOptions(pairs=1))
    assert found.roots == [str(root)]
    assert len(found.learned.reading.files) == 4
    assert found.same_work
    text = text_of(found)
    assert "\x1b" not in text
    assert "\x07" not in text
    json.dumps(found.document()).encode()


# -- ends ----------------------------------------------------------------------------------------------

SLOW = READ + "import time, pathlib; pathlib.Path(sys.argv[2]).write_text('x'); time.sleep({})"


def _start(script, photos, tmp_path, *options):
    """The command, in a run that will take long; returns it and what its processes are named by."""
    marker = str(tmp_path / "marker")
    text = SLOW.format("0 if pathlib.Path(sys.argv[3]).stat().st_size < 4 else 1000")
    text = text.replace("import pathlib, random, sys", "import pathlib, random, sys\n"
                        "open(sys.argv[3], 'a').write('x')", 1)  # fmt: skip
    command = [*HEADRACE, "ab", "-n", "6", *options, "--root", str(photos), "--"]
    process = subprocess.Popen(
        [*command, *script(text, photos, marker, tmp_path / "count")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    count = tmp_path / "count"
    try:
        assert until(lambda: count.exists() and count.stat().st_size >= 4, 60)
        assert until(lambda: len(_alive(marker)) > 0)
    except BaseException:
        process.kill()
        raise
    return process, marker


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_the_middle_it_says_what_is_known(script, photos, tmp_path, number):
    process, marker = _start(script, photos, tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "in the only pair" in out
    assert "interrupted" in out + err
    assert _alive(marker) == []


def test_killed_in_the_middle_its_runs_end_too(script, photos, tmp_path):
    process, marker = _start(script, photos, tmp_path)
    process.kill()
    process.communicate(timeout=30)
    assert until(lambda: _alive(marker) == [])
    assert until(lambda: not list(Path(tempfile.gettempdir()).iterdir()))


def test_what_recording_costs_is_measured(tmp_path):
    began = time.monotonic()
    assert 0 <= recording_cost(tmp_path) < 1e-4
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "wrong",
    [{"pairs": 0}, {"seconds": 0}, {"width": 0}, {"width": 1}, {"limit_s": 0},
     {"drop_in": True, "simulate": "nfs"}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected|by itself"):
        AbOptions(**wrong)


# -- the command ---------------------------------------------------------------------------------------


def _ab(*words):
    return subprocess.run([*HEADRACE, "ab", *map(str, words)], capture_output=True, text=True,
                          check=False, timeout=120)  # fmt: skip


def test_the_command_prints_the_result_or_one_document(script, photos):
    ended = _ab("-n", "1", "--json", "--", *script(READ, photos))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["pairs"] == 1
    assert "first run, to learn what it reads" in ended.stderr
    assert "2 more follow, about " in ended.stderr
    assert "pair 1 of 1, with" in ended.stderr


def test_the_command_says_what_failed(script):
    ended = _ab("--", *script("import sys; sys.exit('no data')"))
    assert ended.returncode == 3
    assert "ended with status 1" in ended.stderr
    assert "| no data" in ended.stderr
    ended = _ab("--json", "--", *script("print(1)"))
    assert json.loads(ended.stdout)["error"]["type"] == "ProgramError"


@pytest.mark.parametrize(
    "words",
    [
        ["--compare", "("],
        ["-n", "0"],
        ["--stdin", "/no/such"],
        ["--width", "0"],
        ["--root", "/no/x"],
    ],
)
def test_the_command_refuses_what_makes_no_sense(words, script, photos):
    ended = _ab(*words, "--", *script(READ, photos))
    assert ended.returncode == 2, ended.stderr
    assert words[0].removeprefix("-")[:4] in ended.stderr or "expected" in ended.stderr

"""What must never become a result: each happens for real, is named with file, key or rank, and ends the run."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench.dataset import DatasetSpec
from headrace.bench.dataset_files import find_files
from headrace.bench.session import run_session
from headrace.errors import BenchError, SourceError, VolumeError, WorkloadError
from tests_shared import opened_to_others

from .scaled import FILES, FORMATS, GENERATE, scaled

ROOT = os.geteuid() == 0


def no_result(folder):
    """No summary of a run is there, and nothing that could be taken for one."""
    return not list(Path(folder).rglob("summary.json"))


@pytest.fixture
def generated(tmp_path):
    """Generates a data set of a format; gives the command line of a run over it."""

    def make(form="npz", *more, workload="unet3d_h100"):
        run_session(scaled(workload, form, tmp_path, tmp_path / "generated", *GENERATE))
        return scaled(workload, form, tmp_path, tmp_path / "out", *more)

    return make


def files(tmp_path, form):
    return sorted((tmp_path / "data/train").glob(f"*.{form}"))


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "synthetic"])
@pytest.mark.parametrize("engine", ["headrace", "torch"])
def test_a_file_that_is_cut_short_is_named(generated, tmp_path, form, engine):
    words = generated(form, f"++workload.reader.engine={engine}")
    cut = files(tmp_path, form)[-1]
    os.truncate(cut, cut.stat().st_size - 7)
    with pytest.raises(SourceError, match=cut.name):
        run_session(words)
    assert no_result(tmp_path)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "synthetic"])
def test_files_of_another_format_under_the_right_name_are_found_out(generated, tmp_path, form):
    words = generated(form)
    for path in files(tmp_path, form):
        path.write_bytes(b"GIF89a" + bytes(3000))
        for index in path.parent.glob(path.name + ".*.idx"):
            index.write_bytes(b"1234")
    with pytest.raises(SourceError, match=rf"img_\d_of_{FILES}\.{form}"):
        run_session(words)
    assert no_result(tmp_path)


def test_a_name_without_a_file_is_an_error_of_ours(generated, tmp_path):
    words = generated()
    gone = files(tmp_path, "npz")[0]
    gone.unlink()
    gone.symlink_to("nothing")  # it is still listed
    with pytest.raises(SourceError, match=rf"{gone.name} cannot be read: No such file"):
        run_session(words)
    assert no_result(tmp_path)


def test_another_format_than_was_generated_is_named(generated, tmp_path):
    generated("npz")
    words = scaled("unet3d_h100", "npy", tmp_path, tmp_path / "out")
    with pytest.raises(
        SourceError, match=r"train: the data set has 0 files that end with \.npy of 6, as .*\.npz"
    ):
        run_session(words)
    assert no_result(tmp_path)


def test_a_half_generated_data_set_is_not_run(generated, tmp_path):
    words = generated()
    files(tmp_path, "npz")[2].unlink()
    for fewer in ([], [f"++workload.dataset.num_files_train={FILES - 2}"]):
        with pytest.raises(
            SourceError, match=f"half-generated: .* are {FILES}, and {FILES - 1} are"
        ):
            run_session([*words, *fewer])
    assert no_result(tmp_path)


def as_nobody(do):
    """Calls it without root's rights to everything."""
    os.seteuid(65534) if ROOT else None
    try:
        return do()
    finally:
        os.seteuid(0) if ROOT else None


def test_a_folder_that_may_not_be_read_is_named(generated, tmp_path):
    generated()
    folder = tmp_path / "data/train"
    folder.chmod(0)
    spec = DatasetSpec(data_folder=str(tmp_path / "data"), format="npz", num_files_train=FILES)
    try:
        with (
            opened_to_others(tmp_path),
            pytest.raises(SourceError, match="data/train: cannot be listed: Permission denied"),
        ):
            as_nobody(lambda: find_files(spec, "train"))
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_data_folder_that_is_none_is_named(tmp_path, kind):
    if kind == "file":
        (tmp_path / "data").write_text("x")
    with pytest.raises(SourceError, match=r"data/train: cannot be listed: N"):
        run_session(scaled("unet3d_h100", "npz", tmp_path, tmp_path / "out"))
    assert no_result(tmp_path)


def test_a_folder_for_results_that_cannot_be_made_is_named(generated, tmp_path):
    generated()
    (tmp_path / "busy").write_text("x")
    with pytest.raises(BenchError, match="busy/out cannot be made"):
        run_session(scaled("unet3d_h100", "npz", tmp_path, tmp_path / "busy/out"))


def test_a_data_set_too_small_for_the_ranks_is_refused_before_anybody_waits(
    generated, tmp_path, monkeypatch
):
    words = generated()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "64")
    with pytest.raises(
        WorkloadError, match=r"num_files_train: 6 files .* 0 steps of 64 accelerators"
    ):
        run_session(words)
    assert no_result(tmp_path)


def program(*words, limits="", environ=None, cwd=None):
    """`dlio_benchmark` as a process."""
    code = f"{limits}\nfrom headrace.cli.dlio import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | (environ or {}), cwd=cwd,
    )  # fmt: skip


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    if not ROOT or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system; the limit on a file's size is tried")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_full_while_data_is_generated_ends_it(small_disk, tmp_path):
    """Numbers as text take more than is known before, so that the disk does run full."""
    words = scaled("retinanet_b200", "csv", small_disk, tmp_path / "out", *GENERATE,
                   "++workload.dataset.record_length_bytes=200000",
                   "++workload.dataset.num_files_eval=0")  # fmt: skip
    ended = program(*words)
    _, message = ended.communicate(timeout=60)
    assert ended.returncode == 3
    assert f"_of_{FILES}.csv: the disk is full" in message
    left = list((small_disk / "data").rglob("*.csv*"))
    assert 0 < len(left) < FILES
    assert all(path.read_bytes()[-1:] == b"\n" for path in left)  # whole ones only
    with pytest.raises(SourceError, match="half-generated"):
        run_session(scaled("retinanet_b200", "csv", small_disk, tmp_path / "run",
                           "++workload.dataset.record_length_bytes=200000",
                           "++workload.dataset.num_files_eval=0"))  # fmt: skip
    assert no_result(tmp_path)


def test_what_does_not_fit_is_refused_before(small_disk, tmp_path):
    words = scaled("unet3d_h100", "npz", small_disk, tmp_path / "out", *GENERATE,
                   "++workload.dataset.record_length_bytes=1000000")  # fmt: skip
    with pytest.raises(VolumeError, match=r"small.*are needed"):
        run_session(words)
    assert not list(small_disk.rglob("*.npz"))


def test_a_disk_that_is_full_while_a_checkpoint_is_written_ends_the_run(
    small_disk, generated, tmp_path
):
    """What fits when it begins does not when others write, too."""
    words = generated("npz", "++workload.workflow.checkpoint=True", "++workload.model.model_size=2500000",
                 "++workload.train.epochs=3", "++workload.checkpoint.checkpoint_after_epoch=1",
                 f"++workload.checkpoint.checkpoint_folder={small_disk}")  # fmt: skip
    with pytest.raises(VolumeError, match=r"small.*(are needed|disk is full)"):
        run_session(words)
    assert len(list(small_disk.rglob("*.pt"))) == 1  # the first epoch's was whole
    assert no_result(tmp_path)


def test_a_limit_on_a_files_size_is_named(tmp_path):
    """As a quota: the system refuses in the middle of a file."""
    limits = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    )
    words = scaled("unet3d_h100", "npz", tmp_path, tmp_path / "out", *GENERATE,
                   "++workload.dataset.record_length_bytes=400000")  # fmt: skip
    ended = program(*words, limits=limits)
    _, message = ended.communicate(timeout=60)
    assert ended.returncode == 3, message
    assert f"_of_{FILES}.npz" in message
    assert "File too large" in message
    assert not [path for path in (tmp_path / "data").rglob("*.npz*") if path.is_file()]


class Dies:
    """An engine whose process is killed in the middle of the first epoch, if its rank is to die."""

    def __init__(self, context):
        self.context = context

    def open(self, split, *_):
        for step in range(self.context.plans[split].steps):
            if step == 1 and os.environ.get("DIES") == os.environ["OMPI_COMM_WORLD_RANK"]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield b""


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_dies_ends_the_others_and_is_named(generated, tmp_path, dead):
    words = generated(
        "npz", f"++workload.reader.engine=custom:{__name__}:Dies", "++workload.reader.batch_size=1"
    )
    environ = {
        "OMPI_COMM_WORLD_SIZE": "3", "DIES": str(dead),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]]),
    }  # fmt: skip
    ranks = [program(*words, environ=environ | {"OMPI_COMM_WORLD_RANK": str(n)}) for n in range(3)]
    # The deadline of a batch is minutes.
    message = [rank.communicate(timeout=60)[1] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    assert codes[dead] == -signal.SIGKILL
    assert [code for n, code in enumerate(codes) if n != dead] == [3, 3], message
    if dead:
        assert f"rank {dead} is gone" in message[0]
    else:
        assert "rank 0 is gone" in message[1] + message[2]
    assert no_result(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["++workload.reader.batch_size=four"], "reader.batch_size is 'four', expected a whole number"),
        (["~workload.reader.batch_sizes"], "reader.batch_sizes is not there"),
        (["++workload.train.computation_time={mean: x}"], "train.computation_time is"),
        (["++workload.dataset.num_files_train=-1"], "dataset.num_files_train is -1, expected"),
        (["++workload.dataset.record_length_bytes=1e400"], "dataset.record_length_bytes is"),
        (["++workload.reader.batch_size=[1,2]"], "reader.batch_size is [1, 2], expected a whole"),
        (["++workload.train={epochs: 0}"], "train.epochs is 0, expected a whole number of at least 1"),
        (["++workload.checkpoint.fsync=perhaps"], "checkpoint.fsync is 'perhaps', expected true or"),
        (["++workload.metric.au=90"], "metric.au is 90, expected a number of at least 0, at most 1"),
    ],
)  # fmt: skip
def test_wrong_values_are_named_by_key_and_place(tmp_path, overrides, message):
    words = [*scaled("unet3d_h100", "npz", tmp_path, tmp_path / "out"), *overrides]
    with pytest.raises(WorkloadError) as raised:
        run_session(words)
    assert f"command line: {overrides[0]}" in str(raised.value)
    assert message in str(raised.value)
    assert no_result(tmp_path)

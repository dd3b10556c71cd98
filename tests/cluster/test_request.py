"""One table: every row is an option, is read, and is written down where users look."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.notation import memory_mib
from headrace.cluster.request import (
    JOB_OPTIONS,
    WORDS_OF_OURS,
    JobRequest,
    OptionKind,
    read_request,
    request_of_words,
)
from headrace.cluster.script import Word
from headrace.errors import ClusterRequestError

ROOT = Path(__file__).resolve().parents[2]
VALUES = {
    OptionKind.TEXT: ("x", "x"), OptionKind.TEXTS: (["a", "b"], ("a", "b")), OptionKind.COUNT: ("3", 3),
    OptionKind.GPUS: ("3", 3), OptionKind.MEMORY: ("2G", 2048), OptionKind.FLAG: (True, True),
}  # fmt: skip


@pytest.mark.parametrize("ask", JOB_OPTIONS, ids=lambda a: a.field)
def test_each_row_is_read(ask):
    written, meant = VALUES[ask.kind]
    request = read_request({ask.field: written}, "test")
    assert getattr(request, ask.field) == meant
    assert request.said() == {ask.field}
    if ask.slurm:
        word = Word(ask.slurm, None if ask.kind is OptionKind.FLAG else str(written))
        assert getattr(request_of_words([word], "test"), ask.field) == meant


def test_rows_and_fields_are_the_same():
    assert [ask.field for ask in JOB_OPTIONS] == list(JobRequest.__slots__)
    flags = [flag for ask in JOB_OPTIONS for flag in ask.flags]
    assert len(flags) == len(set(flags))


def test_each_row_is_documented():
    page = (ROOT / "docs/howto/cluster.md").read_text()
    rows = dict(re.findall(r"^\| `(--[a-z-]+)`[^|]*\| ([^|]+) \|", page, re.MULTILINE))
    assert rows == {ask.flag: ask.help for ask in JOB_OPTIONS}


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("512", 512),
        ("512M", 512),
        ("32G", 32768),
        ("1t", 1 << 20),
        ("1500K", 2),
        ("64GB", 65536),
        ("64GiB", 65536),
        ("0", 0),
    ],
)
def test_memory(text, mib):
    assert memory_mib(text) == mib


@given(st.text())
def test_any_text_is_memory_or_an_error(text):
    try:
        assert memory_mib(text) >= 0
    except ValueError:
        return


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gpus": "0"}, "--gpus is '0', expected a number from 1"),
        ({"gpus": "-1"}, "--gpus"), ({"gpus": "two"}, "TYPE:NUMBER"), ({"gpus": "9" * 30}, "--gpus"),
        ({"gpus": "a100:4,h100:4"}, "more than one type"),
        ({"gpus": "a100:4", "gpu_type": "h100"}, "--gpus asks for a100, --gpu-type for h100"),
        ({"nodes": "2-4"}, "--nodes is '2-4'"), ({"nodes": "1e3"}, "--nodes"),
        ({"memory": "lots"}, "512M, 64G"),
        ({"name": "a\nb"}, "one line of printable text"),
        ({"output": "x\n#SBATCH --uid=0"}, "one line"),
        ({"modules": ["ok", "a\x1b[2J"]}, "one line"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(values, says):
    with pytest.raises(ClusterRequestError, match=re.escape(says)) as e:
        read_request(values, "line 7")
    assert "line 7" in str(e.value)


def test_zero_memory_is_said():
    assert read_request({"memory": "0"}, "x").said() == {"memory"}


def test_what_is_said_nearer_wins():
    near, far = JobRequest(gpus=4, name="a"), JobRequest(gpus=8, partition="p")
    assert near.over(far) == JobRequest(gpus=4, name="a", partition="p")


def test_the_last_directive_wins_and_others_words_are_passed_over():
    words = [Word("nodes", "1"), Word("mail-type", "END"), Word("nodes", "2")]
    assert request_of_words(words, "x") == JobRequest(nodes=2)


def test_hals_words_are_known():
    words = [Word(name, "3") for name in sorted(WORDS_OF_OURS - {"node-type", "cpu-per-gpu"})]
    request = request_of_words(words, "x")
    assert request == JobRequest(
        cpus_per_gpu=3, error="3", name="3", node_type="3", output="3", container="3"
    )


def test_what_slurm_reads_otherwise_is_left_to_it():
    """`sbatch` takes more than the table: ranges of nodes, several types of GPUs."""
    words = [Word("nodes", "2-4"), Word("gpus", "a100:2,h100:2"), Word("mem", "3.5G")]
    assert request_of_words(words, "x") == JobRequest()


def test_an_unknown_option_of_ours_is_an_error():
    with pytest.raises(
        ClusterRequestError, match=r"--gpu is no option of ours; did you mean --gpus"
    ):
        request_of_words([Word("gpu", "3")], "x", ours=True)

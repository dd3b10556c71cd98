"""A script is sent byte for byte, our lines stand where they belong, and what cannot run is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.script import Word, read_script
from headrace.errors import ClusterRequestError

OURS = [Word("nodes", "2")]


def added(data: bytes) -> bytes:
    return read_script(data, "job.sh").with_lines(OURS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"#!/bin/sh\nls\n", b"#!/bin/sh\n#SBATCH --nodes=2\nls\n"),
        (b"#!/bin/sh\n#SBATCH -N1\n\nls\n", b"#!/bin/sh\n#SBATCH -N1\n#SBATCH --nodes=2\n\nls\n"),
        # Comments and empty lines may lie between directives.
        (
            b"#!/bin/sh\n\n# a\n#SBATCH -N1\n  # b\n#SBATCH -n1\n# c\nls",
            b"#!/bin/sh\n\n# a\n#SBATCH -N1\n  # b\n#SBATCH -n1\n#SBATCH --nodes=2\n# c\nls",
        ),
        # After the first command nothing is a directive.
        (b"#!/bin/sh\nls\n#SBATCH -N9\n", b"#!/bin/sh\n#SBATCH --nodes=2\nls\n#SBATCH -N9\n"),
        # Not at the line's beginning, or commented out: no directive.
        (
            b"#!/bin/sh\n  #SBATCH -N1\n##SBATCH -N1\n",
            b"#!/bin/sh\n#SBATCH --nodes=2\n  #SBATCH -N1\n##SBATCH -N1\n",
        ),
        (b"#!/bin/sh", b"#!/bin/sh\n#SBATCH --nodes=2\n"),
        (b"#!/bin/sh\n#SBATCH -N1", b"#!/bin/sh\n#SBATCH -N1\n#SBATCH --nodes=2\n"),
    ],
)
def test_where_our_lines_go(text, expected):
    assert added(text) == expected


HARD = [
    b"#!/usr/bin/env python3\nprint('''\n#SBATCH no\n''')\n",
    b"#!/bin/bash -l\n#SBATCH -t 5\ncat <<'EOF'\n   #SBATCH\n\t$x `y` \\\nEOF\n",
    "#!/bin/zsh\n#SBATCH --comment='ünï → ☃'\necho 'é' \"\\\"\" \\'\n".encode(),
    b"#!/bin/bash\n#SBATCH --comment=\xff\xfe\necho \xff\n",
    b"#!/bin/bash\n\n\n   indented\n\n\n\n",
    b"#!/bin/bash\nprintf '50%%\rdone'\n",  # a lone CR is no line end
    b"#!/bin/bash\nlast line without an end",
    b"#! /bin/sh  \n\x0b\x0c\ntrue\n",
]


@pytest.mark.parametrize("data", HARD)
def test_all_other_bytes_stay(data):
    made = added(data)
    assert made.count(b"#SBATCH --nodes=2\n") == 1
    assert made.replace(b"#SBATCH --nodes=2\n", b"") == data
    assert read_script(data, "x").data == data


@given(st.binary(max_size=300).filter(lambda b: b"\0" not in b and b"\r\n" not in b))
def test_any_body_stays(body):
    data = b"#!/bin/sh\n" + body
    try:
        script = read_script(data, "x")
    except ClusterRequestError as e:
        if "never closed" in str(e):
            return
        raise
    made = script.with_lines(OURS)
    line = b"#SBATCH --nodes=2\n"
    at = made.index(line, sum(map(len, script.lines[: script.insert_at])))
    before, after = made[:at], made[at + len(line) :]
    assert (
        before.removesuffix(b"\n") + after in (data, data.removesuffix(b"\n"))
        or before + after == data
    )


def test_a_script_from_windows_is_converted_and_that_is_said():
    script = read_script(b"#!/bin/bash\r\n#SBATCH -N 2\r\nls\r\n", "w.sh")
    assert script.data == b"#!/bin/bash\n#SBATCH -N 2\nls\n"
    assert script.remarks == (
        "w.sh: lines end as on Windows (CR LF), which Slurm refuses; sent with LF.",
    )
    assert script.directives[0].words == (Word("nodes", "2"),)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"echo hello\n", "line 1 is 'echo hello', expected #!"),
        (b"\xef\xbb\xbf#!/bin/sh\n", "byte order mark"),
        (b"#!/bin/sh\nx\0y\n", "byte 11 is zero"),
        (b"\x7fELF\0", "zero"),
        (b"#!/bin/sh\r\na\nb\r\n", "line 2 with LF"),
        (b"#!/bin/sh\n#SBATCH --comment='x\n", "line 2: the quote ' is never closed"),
        (b"#!/bin/sh\n" + b"x" * (5 << 20), "has 5,242,890 bytes"),
        (b"#!/bin/sh\n#HEADRACE -g 8\n", "'-g' is no long option"),
    ],
)
def test_what_no_executor_could_run(data, says):
    with pytest.raises(ClusterRequestError) as e:
        read_script(data, "job.sh")
    assert says in str(e.value)
    assert "job.sh" in str(e.value)


def test_our_own_directives():
    script = read_script(b"#!/bin/sh\n#HEADRACE --gpus=8 --container torch --exclusive\nls\n", "x")
    directive = script.directives[0]
    assert directive.ours
    assert directive.words == (Word("gpus", "8"), Word("container", "torch"), Word("exclusive"))


@pytest.mark.parametrize(
    ("first", "is_shell"),
    [
        (b"#!/bin/bash", True), (b"#!/bin/sh -e", True), (b"#! /usr/bin/env bash", True),
        (b"#!/usr/bin/env -S bash -l", True), (b"#!/usr/bin/env python3", False),
        (b"#!/usr/bin/python3", False),
        (b"#!/bin/tcsh", False), (b"#!/usr/bin/env", False),
    ],
)  # fmt: skip
def test_which_scripts_are_a_shells(first, is_shell):
    assert read_script(first + b"\n", "x").is_shell is is_shell

"""Options are read as sbatch reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.script import LETTERS, Word, quoted, read_words, split


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--time=4 --nodes 2", ["--time=4", "--nodes", "2"]),
        ("  \t-N   2\t ", ["-N", "2"]),
        ("--job-name=\"my job\" -p 'a b'", ["--job-name=my job", "-p", "a b"]),
        ("--comment=it\\'s -n4", ["--comment=it's", "-n4"]),
        ("--mem=4G # the rest is a comment --nodes=9", ["--mem=4G"]),
        ('--comment="a # b"', ["--comment=a # b"]),
        ('--comment=""', ["--comment="]),
        ("", []),
        ("# all of it", []),
    ],
)
def test_split(text, words):
    assert split(text) == words


def test_a_quote_that_is_never_closed_is_an_error():
    with pytest.raises(ValueError, match="never closed"):
        split('--job-name="x')


@pytest.mark.parametrize(
    "text",
    [
        "--partition=gpu", "--partition gpu", "-p gpu", "-pgpu", "-p=gpu", "--part=gpu", "--partit gpu",
        "stray --partition=gpu stray",
    ],
)  # fmt: skip
def test_one_option_in_many_spellings(text):
    assert read_words(split(text)) == [Word("partition", "gpu")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-Hp gpu", [Word("hold"), Word("partition", "gpu")]),
        ("--exclusive -N 2", [Word("exclusive"), Word("nodes", "2")]),
        ("--exclusive=user", [Word("exclusive", "user")]),
        ("-k", [Word("no-kill")]),
        ("--requeue --no-requeue", [Word("requeue"), Word("no-requeue")]),
        ("--new-in-slurm-31=x", [Word("new-in-slurm-31", "x")]),
        ("--new-flag -N1", [Word("new-flag"), Word("nodes", "1")]),
        ("--mem 4G", [Word("mem", "4G")]),  # and not an abbreviation of mem-per-cpu
        (
            "--out=x --tim=3",
            [Word("output", "x"), Word("tim", "3")],
        ),  # time or time-min: sbatch asks, too
        ("-N 1 -- -p x", [Word("nodes", "1")]),
        ("-t", [Word("time", None)]),
    ],
)
def test_spellings(text, words):
    assert read_words(split(text), also={"output_file"}) == words


@pytest.mark.parametrize("letter", sorted(LETTERS))
def test_every_letter_is_its_long_option(letter):
    long = LETTERS[letter]
    assert read_words([f"-{letter}"])[0].name == long
    assert read_words([f"--{long}"])[0].name == long


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_what_is_quoted_is_read_back(value):
    word = Word("comment", value)
    assert read_words(split(quoted(word))) == [word]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_line_is_words_or_an_error(text):
    try:
        words = split(text)
    except ValueError:
        return
    read_words(words)

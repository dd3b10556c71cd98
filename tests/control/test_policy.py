"""Policies: what may stand there, what is wrong with them, how two of them differ."""

import contextlib
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.policy import (
    Policy,
    PolicyError,
    Rates,
    amount,
    amount_text,
    changes,
    parse_document,
    parse_policy,
    policy_document,
    unknown_names,
)

WHOLE = """
version: 1
lease_s: 5
when_expired: {bytes_per_s: 50M}
file_systems:
  scratch: {paths: [/scratch, /lustre/], capacity: {bytes_per_s: 2G, reads_per_s: 20k}}
  other: {capacity: {metadata_per_s: 500}}
users:
  alice: {weight: 2, cap: {bytes_per_s: 1G}}
jobs:
  train: {user: alice, weight: 3, priority: high, guarantee: {bytes_per_s: 500 MB/s}, cache_bytes: 10Gi,
          file_systems: {other: {weight: 1}}}
  1234: {file_systems: {scratch: {cap: {bytes_per_s: 10M}}}}
"""


def wrong(text):
    with pytest.raises(PolicyError) as caught:
        parse_policy(text)
    return str(caught.value)


def test_a_whole_policy_is_read_and_written_back_as_the_same():
    policy = parse_policy(WHOLE)
    job = policy.job("train", "alice")
    assert (job.weight, job.priority, job.cache_bytes) == (3.0, "high", 10 << 30)
    assert job.on("scratch").guarantee.bytes_per_s == 5e8
    assert policy.job("1234", "bob").on("scratch").cap == Rates(bytes_per_s=1e7)
    assert policy.job("1234", "bob").on("other").cap == Rates()
    assert policy.job("train", "bob").weight == 1.0  # another user's job of that name
    assert policy.when_expired == Rates(bytes_per_s=5e7)
    assert policy.file_systems["scratch"].paths == ("/scratch", "/lustre")
    assert parse_document(policy_document(policy)) == policy


@pytest.mark.parametrize("text", ["", "{}", "version: 1"])
def test_an_empty_policy_limits_nothing(text):
    assert parse_policy(text) == Policy()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("jbos: {}", "jbos: is not known; did you mean 'jobs'?"),
        ("jobs: {t: {waight: 2}}", "jobs.t.waight: is not known; did you mean 'weight'?"),
        (
            "jobs: {t: {cap: {bytes: 1}}}",
            "jobs.t.cap.bytes: is not known; did you mean 'bytes_per_s'",
        ),
        ("jobs: {t: {cap: {bytes_per_s: -1}}}", "jobs.t.cap.bytes_per_s: -1 is out of bounds"),
        ("jobs: {t: {cap: {bytes_per_s: fast}}}", "'fast' is no amount"),
        ("jobs: {t: {cap: {bytes_per_s: .nan}}}", "out of bounds"),
        ("jobs: {t: {cap: {bytes_per_s: yes}}}", "True is no amount"),
        ("jobs: {t: {weight: 0}}", "jobs.t.weight: is 0, expected 0.001 to 1e+06"),
        ("jobs: {t: {priority: urgent}}", "expected high, normal or low"),
        ("jobs: {t: {priority: [high]}}", "expected high, normal or low"),
        ("jobs: {t: {user: 7}}", "expected a user's name"),
        ("jobs: [t]", "jobs: is ['t'], expected names"),
        ("jobs: {'': {}}", "jobs: '' is no name"),
        ("jobs: {yes: {}}", "jobs: True is no name"),
        ("[1, 2]", "the document is [1, 2]"),
        ("version: 2", "version: 2 is not known, expected 1"),
        ("lease_s: 0.1", "lease_s: is 0.1, expected 1 to 3600"),
        ("when_expired: stop", "expected `run free` or rates"),
        ("when_expired: {}", "says no rate"),
        ("file_systems: {a: {paths: [scratch]}}", "'scratch' is no absolute path"),
        ("file_systems: {a: {capacity: {bytes_per_s: 1}}}", "file_systems.a: has no paths"),
        ("file_systems: {a: {paths: [/x]}, b: {paths: [/x/]}}", "/x is a path of 'a' too"),
        ("file_systems: {other: {paths: [/x]}}", "is for all that lies nowhere else"),
        ("jobs: {t: {file_systems: {fast: {weight: 2}}}}", "file system 'fast' is not known"),
        ("jobs: {'*': {user: eve}}", "is for all other jobs"),
        ("a: &x {b: 1}\nc: *x", "references (*name) are not allowed"),
        ("jobs: {}\njobs: {}", "'jobs' stands there twice"),
        ("{" * 50, "nested too deeply"),
        ("jobs: {t: !!python/object:os.system {}}", "no YAML"),
        ("\x00", "no YAML"),
        ("x" * (2 << 20), "larger than"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text, problem):
    assert problem in wrong(text)


SYSTEM = "file_systems: {fs: {paths: [/x], capacity: {bytes_per_s: 100M}}}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "jobs: {t: {cap: {bytes_per_s: 1M}, guarantee: {bytes_per_s: 2M}}}",
            "jobs.t: guarantee.bytes_per_s of 2M contradicts its cap of 1M",
        ),
        (
            SYSTEM
            + "jobs: {s: {guarantee: {bytes_per_s: 60M}}, t: {guarantee: {bytes_per_s: 60M}}}",
            "capacity.bytes_per_s of 100M is less than the 120M guaranteed to jobs s, t",
        ),
        (
            SYSTEM + "users: {u: {cap: {bytes_per_s: 5M}}}\n"
            "jobs: {t: {user: u, guarantee: {bytes_per_s: 6M}}}",
            "jobs t: bytes_per_s of 6M guaranteed on 'fs' contradicts users.u, whose cap is 5M",
        ),
        (
            SYSTEM + "jobs: {t: {file_systems: {fs: {guarantee: {reads_per_s: 5}}}}}",
            "guarantee.reads_per_s on 'fs' means nothing",
        ),
    ],
)
def test_rules_that_contradict_each_other_are_named(text, problem):
    assert problem in wrong(text)


def test_all_problems_are_told_at_once_and_survive_pickling():
    with pytest.raises(PolicyError) as caught:
        parse_policy("jbos: 1\nusres: 2\nlease_s: x")
    assert len(caught.value.problems) == 3
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_names_that_nobody_reported_are_told():
    policy = parse_policy("users: {u: {}, '*': {}}\njobs: {s: {}, t: {}}")
    assert unknown_names(policy, {}, {"t": 1}) == [
        "jobs.s: nothing of this job reads now",
        "users.u: nothing of this user reads now",
    ]


def test_a_difference_has_a_line_for_each_value():
    before = parse_policy("jobs: {a: {weight: 2, cap: {bytes_per_s: 1M}}, b: {}}")
    after = parse_policy("jobs: {a: {weight: 3}, c: {priority: low}}\nlease_s: 20")
    assert [(change.at, change.before, change.after) for change in changes(before, after)] == [
        ("jobs.a.cap.bytes_per_s", "1M", None),
        ("jobs.a.weight", "2", "3"),
        ("jobs.b", "declared", None),
        ("jobs.c.priority", None, "low"),
        ("lease_s", "10", "20"),
    ]
    assert changes(after, after) == []


@given(st.floats(1e-3, 1e17))
def test_an_amount_is_read_back_as_it_was_written(value):
    assert amount(amount_text(value)) == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=9) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["jobs", "users", "file_systems", "cap", "weight", "bytes_per_s", "on", "paths"]
                )
                | st.text(max_size=5),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_document_is_a_policy_or_an_error_of_policies(document):
    try:
        policy = parse_document(document)
    except PolicyError:
        return
    assert parse_document(policy_document(policy)) == policy


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
def test_any_text_is_a_policy_or_an_error_of_policies(text):
    with contextlib.suppress(PolicyError):
        parse_policy(text)


@pytest.mark.parametrize("page", ["examples/policy.yaml", "docs/howto/control.md"])
def test_the_policies_in_the_documentation_are_good(page):
    text = (Path(__file__).parents[2] / page).read_text()
    if page.endswith(".md"):
        text = text.split("```yaml\n")[1].split("```")[0]
    assert parse_policy(text).file_systems["scratch"].capacity.bytes_per_s

"""How memory is shared out: never more than there is, nobody more than it needs, order does not matter."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.node.datasets import Want, share_out

jobs = st.frozensets(st.sampled_from(["a", "b", "c"]), max_size=3)
wants = st.lists(
    st.builds(
        Want,
        needed_bytes=st.integers(0, 1000),
        held_bytes=st.integers(0, 1000),
        jobs=jobs,
        used_s=st.floats(0, 100),
    ),
    max_size=6,
)


@given(st.integers(0, 3000), st.none() | st.integers(0, 2000), wants)
def test_totals_and_jobs_keep_their_limits(total, job_bytes, wants):
    quotas = share_out(total, job_bytes, wants)
    assert sum(quotas) <= total
    for want, quota in zip(wants, quotas, strict=True):
        assert 0 <= quota <= (want.needed_bytes if want.jobs else want.held_bytes)
    if job_bytes is not None:
        used = {job for want in wants for job in want.jobs}
        both = sum(q for want, q in zip(wants, quotas, strict=True) if want.jobs)
        assert both <= job_bytes * len(used)
        for job in used:
            alone = [q for w, q in zip(wants, quotas, strict=True) if w.jobs == {job}]
            assert sum(alone) <= job_bytes


@given(st.integers(0, 3000), wants)
def test_nothing_is_left_over_while_somebody_in_use_needs_it(total, wants):
    quotas = share_out(total, None, wants)
    active = [(w, q) for w, q in zip(wants, quotas, strict=True) if w.jobs]
    if sum(q for _, q in active) < total - len(active):
        assert all(q == w.needed_bytes for w, q in active)


@given(st.integers(0, 3000), st.none() | st.integers(0, 2000), wants, st.randoms())
def test_the_order_of_data_sets_does_not_matter(total, job_bytes, wants, random):
    """F7, for memory: shares differ by the rounding of a division at most."""
    order = list(range(len(wants)))
    random.shuffle(order)
    quotas = share_out(total, job_bytes, wants)
    shuffled = share_out(total, job_bytes, [wants[i] for i in order])
    if len({w.used_s for w in wants}) == len(wants):
        for at, i in enumerate(order):
            assert abs(shuffled[at] - quotas[i]) <= len(wants)


def test_idle_data_keeps_what_is_left_the_last_used_first():
    wants = [
        Want(100, 60, frozenset(), 1.0),
        Want(100, 60, frozenset(), 2.0),
        Want(50, 0, frozenset({"a"}), 3.0),
    ]
    assert share_out(120, None, wants) == (10, 60, 50)
    assert share_out(1000, None, wants) == (60, 60, 50)

"""One vocabulary: whoever is stalled hears the same cause, and what helps against that one, everywhere."""

import inspect

import pytest
from tests.insight.steps import Run

from headrace.base import causes
from headrace.base.causes import Cause, cause_of
from headrace.control.publishing import divided
from headrace.control.stalls import Evidence, verdict_of
from headrace.insight.top import DaemonWatch
from headrace.node.jobs import CAUSES, JobTotals
from headrace.node.wire import Note
from headrace.telemetry.history import JobRecord
from headrace.telemetry.messages import parse_message
from headrace.telemetry.report import hint_of
from headrace.web.app import files
from telemetry.shared import accounts, message, now, processes, seen, totals


def hint(figures):
    """What a job is told whose steps waited so."""
    waits = {key: s for key, s in figures.items() if key[0] == "stall_s"}
    return hint_of(JobRecord(job_id="1", measured=True, figures=waits))


def small_buffer():
    """The verdict on a loader whose own buffer holds its reads back."""
    run = Run()
    for _ in range(20):
        run.add({"hold": 0.09}, quiet_reads=2, quiet_s=0.01, read_s=0.048, room_s=0.09)
    return verdict_of(run.steps(), Evidence(buffer_bytes=1 << 20))


def limited_job():
    """What the node daemon knows of a job that a policy holds back."""
    job = JobTotals()
    job.took(Cause.POLICY, 2.0)
    job.note(Note(2.0, 0.0, 0.0, 1.0, 3, 12, 4096, 0), Cause.POLICY)
    return job.as_dict()["stall_s"]


def test_a_job_that_its_own_buffer_stalls_is_told_to_raise_the_buffer():
    verdict = small_buffer()
    book, ledger = accounts()
    book.observe(seen(processes()), 5, now(0))
    stalls = {"/scratch": divided(8.0, verdict)}
    book.report(parse_message(message(stall=stalls, worked=1.0), 1, 1000), now(1))
    advice = hint(totals(ledger))
    for text in (advice, verdict.action):
        assert "budget_bytes" in text
        assert "operator" not in text
        assert "share" not in text


def test_a_job_that_the_controller_stalls_is_told_to_ask_for_a_larger_share():
    book, ledger = accounts()
    book.observe(seen(processes()), 5, now(0))
    book.report(
        parse_message(message(stall={"/scratch": {"node": 8.0}}, worked=1.0), 1, 1000), now(1)
    )
    book.explain_node({"4711": limited_job()}, now(2))
    advice = hint(totals(ledger))
    assert "ask the operator for a larger share" in advice
    assert "budget_bytes" not in advice


def test_what_0_1_called_limit_is_read_as_what_it_was():
    # A loader said it of itself, a node daemon of the controller.
    assert cause_of("limit") is Cause.PREFETCH
    assert cause_of("limit", by_node=True) is Cause.POLICY
    loader = parse_message(message(stall={"/scratch": {"limit": 2.0, "prefetch": 1.0}}), 1, 1000)
    assert loader.figures["stall_s", "prefetch", "/scratch"] == 3.0
    record = JobRecord(job_id="1", measured=True, figures={("stall_s", "limit", ""): 1.0})
    assert record.waited == {Cause.PREFETCH: 1.0}


@pytest.mark.parametrize("missing", ["phrase", "sentence", "remedy"])
def test_a_cause_without_one_of_its_texts_cannot_be_imported(missing):
    source = inspect.getsource(causes)
    exec(compile(source, "whole", "exec"), {"__name__": "whole"})
    text = repr(getattr(Cause.MEMORY, missing)).replace("'", '"')
    assert f"        {text},\n" in source
    for instead in ("", '        "",\n'):
        lacking = source.replace(f"        {text},\n", instead)
        with pytest.raises((TypeError, AssertionError)):
            exec(compile(lacking, "lacking", "exec"), {"__name__": "lacking"})


def test_pages_have_every_cause():
    script = files()["core.js"][0].decode()
    for cause in Cause:
        assert f'"{cause}": ["' in script
        assert cause.phrase in script


def test_top_says_what_is_waited_for_as_the_causes_do():
    watch = DaemonWatch()
    for at, stalled in enumerate((0.0, 4.0)):
        stall_s = dict.fromkeys(map(str, CAUSES), 0.0) | {"policy": stalled}
        board = watch.look(node_state(stall_s, worked_s=4.0 + at), 5.0 * at)
    assert f"({Cause.POLICY.phrase})" in board["answer"]


def node_state(stall_s, worked_s):
    job = JobTotals(worked_s=worked_s).as_dict() | {"stall_s": stall_s}
    return {
        "pid": 1, "folder": "", "uptime_s": 1.0, "ram_bytes": 1, "held_bytes": 0, "refused": 0,
        "protocol_errors": 0, "sessions": [{}], "datasets": [],
        "jobs": [{"name": "a", "sessions": 1, "leases": 0, "waiting": 0, "held_bytes": 0,
                  "window_bytes": 1, "totals": job}],
    }  # fmt: skip

"""Reports of runs: read back, compared, drawn and traced, with figures that are computed by hand."""

import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.compare import (
    MEASURES,
    ComparisonRow,
    compare,
    condition_of,
    judge,
    measure_named,
    measured,
    value_of,
)
from headrace.bench.metrics import Confidence
from headrace.bench.report import comparison_lines, comparison_page, report_page, with_confidence
from headrace.bench.results import load_run, load_runs, rank_blocks
from headrace.bench.timeline import phases_of, slowest_steps, trace_events, trace_text
from headrace.errors import BenchError
from headrace.pages.html import safe

HOSTILE = "</title><script>alert(1)</script>\" onload='x' \u202e\x1b[31m\udcff&amp;"

LOADS = {0: [0.5, 0.0, 0.1, 0.0], 1: [0.2, 0.3, 0.0, 0.0]}
"""Waits of two accelerators, each of whose steps compute 1 s."""


def write_run(folder, *, au=90.0, own=True, name="tiny", barrier="step", **more):
    """A finished run of two accelerators, one epoch and four steps, which took 5 s."""
    folder.mkdir(parents=True)
    summary = {
        "start": "2026-01-01T00:00:00.000000", "end": "2026-01-01T00:00:05.000000",
        "num_accelerators": 2, "num_hosts": 1, "hostname": "node",
        "metric": {
            "train_au_percentage": [au], "train_au_mean_percentage": au,
            "train_throughput_samples_per_second": [8.0],
            "train_throughput_mean_samples_per_second": 8.0,
            "train_io_mean_MB_per_second": 16.0,
        },
    }  # fmt: skip
    if own:
        summary["headrace"] = {
            "engine": "headrace", "bound": "storage", "bound_reason": "as it is",
            "time": {"total_s": 10.0, "compute_s": 8.0, "wait_s": 1.1, "harness_s": 0.0,
                     "barrier_s": 0.9},
            "wait_s": {"p50": 0.0, "p90": 0.4, "p99": 0.49, "p99.9": 0.499, "max": 0.5},
            "bytes": 1000, "device_bytes": 400, "page_cache_bytes": 600,
            "provenance": {"kernel": "6.1", "barrier": barrier, "command": ["bench", name]},
            "notes": [name],
        } | more  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / ".hydra").mkdir()
    config = {"workload": {"model": {"name": name}, "metric": {"au": 0.9}}}
    (folder / ".hydra/config.yaml").write_text(json.dumps(config))  # JSON is YAML
    for rank, loads in LOADS.items():
        output = {"hostname": "node", "1": {
            "load": {"block1": loads}, "compute": {"block1": [1.0] * 4}, "au": {"block1": au - rank},
        }}  # fmt: skip
        (folder / f"{rank}_output.json").write_text(json.dumps(output))
        times = {"start": summary["start"], "end": summary["end"]}
        (folder / f"{rank}_per_epoch_stats.json").write_text(json.dumps({"1": {"block1": times}}))
    return folder


class Page(HTMLParser):
    """What a browser would make of it: tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "path", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(folder):
    runs = load_runs(folder)
    return report_page(runs, rank_blocks(runs[-1]))


def test_the_page_has_a_table_behind_every_chart_and_needs_no_network(tmp_path):
    text = page_of(write_run(tmp_path / "run"))
    page = Page(text)
    assert page.open == []
    assert (
        page.tags.count("figure") == page.tags.count("svg") == page.tags.count("details") - 1 == 7
    )
    for figure in re.findall(r"<figure>.*?</figure>", text, re.DOTALL):
        assert "<table>" in figure
        assert 'role="img"' in figure
    reported = " ".join(page.words)
    for message in ("This is not an MLPerf result.", "90.00 %", "meets 90 %", "bound by storage: as",
                 "barrier", "train step 1", "asked for: 90 %", "6.1"):  # fmt: skip
        assert message in reported
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("href", "src")]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_hostile_names_stay_text(tmp_path):
    write_run(tmp_path / "run", name=HOSTILE, bound=HOSTILE, engine=HOSTILE)
    text = page_of(tmp_path / "run")
    text.encode()  # halves of characters are escaped
    page = Page(text)
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "alert(1)" in "".join(page.words)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_dlios_own_results_are_shown_too(tmp_path):
    page = Page(page_of(write_run(tmp_path / "run", own=False)))
    assert "90.00 %" in " ".join(page.words)
    assert page.tags.count("figure") == 4


def test_simulated_storage_is_named(tmp_path):
    write_run(tmp_path / "run", provenance={"simulated": "nfs"})
    assert "The storage was simulated (nfs)" in page_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({}, "no summary.json"),
        ({"summary.json": "{"}, "is not JSON"),
        ({"summary.json": "[1]"}, "expected an object"),
        ({"summary.json": "{}"}, "no object `metric`"),
        ({"summary.json": '{"metric": {}}', ".hydra/config.yaml": "a: [1"}, "config.yaml"),
        ({"summary.json": '{"metric": {}}', "0_output.json": '{"1": {"load": {"block1": ["x"]}}}'},
         "no list of seconds"),
        ({"summary.json": '{"metric": {}}', "0_output.json": "nothing"}, "0_output.json is not JSON"),
    ],
)  # fmt: skip
def test_broken_results_are_named(tmp_path, broken, message):
    for name, text in broken.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with pytest.raises(BenchError, match=re.escape(message)):
        page_of(tmp_path)


ANYTHING = st.sampled_from([None, True, -1, 0, 5e-324, 1e308, 10**400, math.nan, [], {}, "x", [1], HOSTILE,
                            "9999-12-31T23:59:59", [[1], 2], {"block1": [1e300]}])  # fmt: skip


def places(document, at=()):
    """The paths of everything in a document."""
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in inner:
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*at, key))


@pytest.mark.parametrize("name", ["summary.json", "0_output.json", "0_per_epoch_stats.json"])
def test_whatever_a_file_says_there_is_a_page_or_an_error(tmp_path, name):
    path = write_run(tmp_path / "run") / name
    whole = json.loads(path.read_text())

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(list(places(whole))), ANYTHING)
    def check(place, value):
        document = json.loads(json.dumps(whole))
        inside = document
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = value
        path.write_text(json.dumps(document))
        try:
            result = load_run(tmp_path / "run")
            assert Page(page_of(tmp_path / "run")).open == []
            trace_events(rank_blocks(result), 2)
        except BenchError:
            assert name != "0_per_epoch_stats.json"

    check()


@pytest.mark.parametrize("value", ["12", None, True, [1], math.nan, math.inf, {}, 10**400])
def test_what_is_no_number_is_left_out(value):
    summary = {"metric": {"train_au_mean_percentage": value}, "headrace": value}
    assert [m.name for m in MEASURES if value_of(summary, m) is not None] == []


def test_steps_are_placed_by_the_barrier(tmp_path):
    """With a barrier: 1.5, 1.3, 1.1 and 1.0 s, which lack 0.1 s to the 5 s that the epoch took."""
    blocks = rank_blocks(load_run(write_run(tmp_path / "run")))
    [phase] = phases_of(blocks)
    assert phase.end_s.tolist()[0] == pytest.approx([1.525, 2.85, 3.975, 5.0])
    assert phase.begin_s.tolist()[1] == pytest.approx([0, 1.525, 2.85, 3.975])
    slow = slowest_steps([phase], 2)
    assert [(s.step, s.rank, s.duration_s, s.wait_s) for s in slow] == [
        (0, 0, 1.5, 0.5), (1, 1, pytest.approx(1.3), 0.3)
    ]  # fmt: skip


def test_the_trace_has_the_slowest_steps_under_dftracers_names(tmp_path):
    result = load_run(write_run(tmp_path / "run"))
    events = trace_events(rank_blocks(result), 1)
    outcome = {(e["name"], e["cat"], e["pid"]): e for e in events if e["ph"] == "X"}
    assert {name for name, *_ in outcome} == {
        "epoch.block",
        "train",
        "fetch.iter",
        "compute",
        "barrier",
    }
    begin = outcome["epoch.block", "pipeline", 0]["ts"]
    for rank, (wait, rest) in enumerate([(0.5, 0.025), (0.2, 0.325)]):
        steps = [outcome[key] for key in (("fetch.iter", "dataloader", rank), ("compute", "compute", rank),
                                        ("barrier", "comm", rank))]  # fmt: skip
        assert [e["dur"] / 1e6 for e in steps] == pytest.approx([wait, 1.0, rest], abs=1e-5)
        assert [(e["ts"] - begin) / 1e6 for e in steps] == pytest.approx(
            [0, wait, wait + 1], abs=1e-5
        )
        assert {e["args"]["step"] for e in steps} == {0}
    assert json.loads(trace_text(events, lines=False))["traceEvents"] == events
    first, *lines, last = trace_text(events, lines=True).splitlines()
    assert (first, last) == ("[", "]")
    assert [json.loads(line) for line in lines] == events


@pytest.mark.parametrize(
    ("text", "changes", "sign", "bound", "change"),
    [("au < -2%", True, "<", -0.02, True), ("au<0.9", False, "<", 90, False),
     ("au<90%", False, "<", 90, False), ("au <= 90", True, "<=", 90, False),
     ("wait_p99 > +1e-3", True, ">", 0.001, False), ("throughput>=.5", False, ">=", 0.5, False)],
)  # fmt: skip
def test_conditions(text, changes, sign, bound, change):
    condition = condition_of(text, changes=changes)
    assert (condition.sign, condition.bound, condition.change) == (
        sign,
        pytest.approx(bound),
        change,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("au", "is no condition"), ("au < x", "is no condition"), ("au < 1 < 2", "is no condition"),
     ("trhoughput < 1", "did you mean throughput?"), ("wait_p99 < 3%", "is in s, not in %")],
)  # fmt: skip
def test_what_is_no_condition(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        condition_of(text, changes=False)


def both(tmp_path, **b):
    a = load_runs(write_run(tmp_path / "a"))
    return compare(a, load_runs(write_run(tmp_path / "b", **b)))


def rows_of(comparison):
    return {row.measure.name: row for row in comparison.rows}


def test_changes_are_relative_and_know_which_way_is_worse(tmp_path):
    comparison = both(tmp_path, au=81.0, wait_s={"p50": 0.1, "p99": 0.245}, bytes=2000)
    rows = rows_of(comparison)
    assert rows["au"].change == pytest.approx(-0.1)
    assert (rows["au"].worse, rows["wait_p99"].worse, rows["bytes"].worse) == (True, False, None)
    assert rows["wait_p50"].change is None  # from 0
    assert "wait_max" not in rows  # b has none
    reported = judge(comparison.values, [condition_of(text, changes=True)
                              for text in ("au < -2%", "au < -11%", "au < 85", "bytes > 1999")])  # fmt: skip
    assert [verdict.holds for verdict in reported] == [True, False, True, True]


def test_a_change_that_is_too_small_to_print_has_no_minus(tmp_path):
    lines = list(comparison_lines(both(tmp_path, au=89.99999)))
    assert not [line for line in lines if "-0.00%" in line]


def test_a_hundredth_that_was_measured_once_is_not_called_worse(tmp_path):
    words = {}
    for au in (89.5, 80.0):  # 90 in a
        lines = list(comparison_lines(both(tmp_path / str(au), au=au)))
        (words[au],) = ("worse" in line for line in lines if "AU" in line)
    assert words == {89.5: False, 80.0: True}


def test_megabytes_are_of_ten_to_the_six_wherever_they_are_shown(tmp_path):
    io = rows_of(both(tmp_path))["io"]
    assert (io.a.mean, io.measure.unit) == (pytest.approx(16 * 2**20 / 1e6), "MB/s")


def test_throughputs_by_other_formulas_are_computed_anew_or_left_out(tmp_path):
    """Upstream's formula makes less than nothing of a step, which was a change of millions of percent."""
    by_formula = {"upstream": 4.0, "mlcommons": 8.0}
    more = {"throughput_by_formula_samples_per_s": by_formula}
    a = load_runs(write_run(tmp_path / "a", throughput_formula="upstream", **more))
    b = load_runs(write_run(tmp_path / "b", throughput_formula="mlcommons", **more))
    rows = rows_of(compare(a, b))
    assert rows["throughput"].change == 0
    assert "MLCommons" in rows["throughput"].measure.title
    assert "io" not in rows
    dlios = load_runs(write_run(tmp_path / "dlio", own=False))
    assert not {"throughput", "io"} & set(rows_of(compare(dlios, b)))
    assert {"throughput", "io"} <= set(rows_of(compare(b, b)))


@pytest.mark.parametrize("text", ["wait_max < 1", "wait_p50 > 10%"])
def test_a_gate_that_cannot_be_told_is_an_error(tmp_path, text):
    comparison = both(tmp_path, wait_s={"p50": 0.1})
    with pytest.raises(BenchError, match="cannot be told"):
        judge(comparison.values, [condition_of(text, changes=True)])


def test_repeats_in_folders_give_confidence(tmp_path):
    """90 and 92: mean 91, deviation sqrt(2), Student's 12.706: 12.706 * sqrt(2) / sqrt(2)."""
    for number, au in enumerate((90.0, 92.0)):
        write_run(tmp_path / f"a/{number}", au=au)
        write_run(tmp_path / f"b/{number}", au=au + 20 * number)
    a, b = load_runs(tmp_path / "a"), load_runs(tmp_path / "b")
    au = measured(a, measure_named("au"))
    assert (au.mean, au.half_width, au.runs) == (91, pytest.approx(12.706), 2)
    row = rows_of(compare(a, b))["au"]
    assert row.change_half_width == pytest.approx(math.hypot(12.706, 11 * 12.706) / 91)
    assert row.clear is False
    assert with_confidence(au, "%").endswith("(95 %, 2 runs)")
    assert with_confidence(au, "%", brief=True).endswith("%")
    assert with_confidence(Confidence(983e3, 4.23e6, 3), "B", brief=True).endswith("kB ± more")
    assert "AU of each run" in page_of(tmp_path / "a")


def test_a_setting_has_no_interval_and_none_reaches_below_zero(tmp_path):
    for name in ("1", "2"):
        write_run(tmp_path / name, device_bytes=0 if name == "1" else 400)
    runs = [load_run(tmp_path / name) for name in ("1", "2")]
    assert with_confidence(measured(runs, measure_named("accelerators")), "") == "2"
    text = with_confidence(measured(runs, measure_named("device_bytes")), "B")
    assert text == "200 B ± more than that (95 %, 2 runs)"


def test_a_change_from_nothing_is_noise_where_its_interval_says_so():
    """0 to 0.39 +- 1.66 is no change for the worse, though no percentage can be told."""
    wait = MEASURES[0]
    nothing, some = Confidence(0.0, None, 1), Confidence(0.39, 1.66, 3)
    assert ComparisonRow(wait, nothing, some).clear is False
    assert ComparisonRow(wait, nothing, Confidence(3.9, 1.66, 3)).clear is None
    assert ComparisonRow(wait, Confidence(0.0, 0.1, 3), Confidence(3.9, 1.66, 3)).clear is True


def test_what_prints_the_same_is_not_worse():
    au = measure_named("au")
    assert (
        ComparisonRow(au, Confidence(100.0, 0.0, 3), Confidence(99.9999999, None, 1)).worse is None
    )
    assert ComparisonRow(au, Confidence(99.93, 0.01, 3), Confidence(99.85, None, 1)).worse


def test_a_bound_that_is_read_as_a_share_says_so():
    assert condition_of("au < 0.9", changes=True).reading == " (90 %)"
    assert condition_of("au < 90", changes=True).reading == ""
    assert condition_of("au < -2%", changes=True).reading == ""


def test_repeats_of_one_run_give_confidence_of_au(tmp_path):
    more = {"au_percent": {"mean": 80.0, "confidence_95": 0.5, "runs": 3}}
    comparison = both(tmp_path, **more)
    row = rows_of(comparison)["au"]
    assert (row.b.mean, row.b.half_width, row.a.half_width) == (80.0, 0.5, None)
    assert row.clear is None  # one side has no repeats
    assert row.change_half_width == pytest.approx(0.5 / 90)


def test_what_bound_each_run_is_told_and_a_condition_on_one_bound_by_its_host_is_in_doubt(tmp_path):
    write_run(tmp_path / "a", bound="page cache", bound_reason="in memory")
    for number, bound in enumerate(("storage", "harness", "harness")):
        write_run(tmp_path / f"b/{number}", bound=bound, bound_reason=f"as in {number}")
    a, b = load_runs(tmp_path / "a"), load_runs(tmp_path / "b")
    told = [
        "bound by harness (2 of 3 runs), the first of these: as in 1",
        "bound by storage (1 of 3 runs): as in 0",
    ]
    page = " ".join(Page(report_page(b, [])).words)
    assert all(line in page for line in told)
    lines = comparison_lines(compare(a, b))
    assert lines[-3:] == ["A: bound by page cache: in memory", *(f"B: {line}" for line in told)]
    page = " ".join(Page(comparison_page(compare(a, b), "AB")).words)
    assert all(line in page for line in lines[-3:])
    texts = ("au < 90.1", "au < -2%", "accelerators > 1")
    conditions = [condition_of(text, changes=True) for text in texts]
    doubt = "B was bound by harness (2 of 3 runs): that says nothing about the storage"
    assert [(e.holds, e.doubt) for e in compare(a, b).judge(conditions)] == [
        (True, doubt), (False, doubt), (True, None),
    ]  # fmt: skip
    back = compare(b, a).judge(conditions)
    assert [e.doubt for e in back] == [None, doubt.replace("B", "A", 1), None]
    assert back[1].document()["doubt"] == back[1].doubt


def test_a_run_that_kept_its_repeats_is_all_of_them(tmp_path):
    """As of three folders, but the workload is the run's; what an older run left is not read."""
    run = write_run(tmp_path / "run", repeats=3)
    for number, au in enumerate((90.0, 92.0, 94.0, 10.0), 1):
        write_run(run / f"repeats/{number}", au=au)
        shutil.rmtree(run / f"repeats/{number}/.hydra")
    runs = load_runs(run)
    assert [each.metric["train_au_mean_percentage"] for each in runs] == [90, 92, 94]
    assert {each.workload["model"]["name"] for each in runs} == {"tiny"}
    au = measured(runs, measure_named("au"))
    assert (au.mean, au.half_width, au.runs) == (92, pytest.approx(4.303 * 2 / math.sqrt(3)), 3)
    text = page_of(run)
    assert "AU of each run" in text
    assert "94.00 %" in text
    (run / "repeats/2/summary.json").unlink()
    assert len(load_runs(run)) == 1  # what is left of them is not all
    once = write_run(tmp_path / "once", repeats=1)
    write_run(once / "repeats/1")
    write_run(once / "repeats/2")
    assert len(load_runs(once)) == 1


def test_the_page_splits_the_time_to_solution(tmp_path):
    split = {"total_s": 40.0, "staging_s": 4.0, "training_s": 30.0, "evaluation_s": 0.0,
             "checkpointing_s": 5.0, "other_s": 1.0}  # fmt: skip
    text = page_of(write_run(tmp_path / "run", time_to_solution=split))
    reported = " ".join(Page(text).words)
    assert "Time to solution: 40 s" in reported
    for row in (("training", "75.0 %", "30.000"), ("staging", "10.0 %", "4.000"),
                ("checkpointing", "12.5 %", "5.000")):  # fmt: skip
        cells = f'<th scope="row">{row[0]}</th><td>{row[1]}</td><td>{row[2]}</td>'
        assert cells in text
    assert value_of(load_run(tmp_path / "run").summary, measure_named("staging")) == 4
    for broken in ({}, [], {"total_s": "x"}, {"total_s": 0.0, "training_s": 1.0}):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        assert "Time to solution" not in page_of(write_run(folder, time_to_solution=broken))


def test_runs_that_differ_are_no_repeats(tmp_path):
    for name in ("one", "other"):
        write_run(tmp_path / f"a/{name}", name=name)
    with pytest.raises(BenchError, match=r"not repeats: model\.name is one in .*one, other in"):
        load_runs(tmp_path / "a")


def test_blocks_between_checkpoints_are_placed_each_for_itself(tmp_path):
    folder = write_run(tmp_path / "run")
    output = json.loads((folder / "0_output.json").read_text())
    for kind in ("load", "compute"):
        output["1"][kind]["block2"] = [2.0]
    (folder / "0_output.json").write_text(json.dumps(output))
    phases = phases_of(rank_blocks(load_run(folder)))
    assert [(p.steps, len(p.blocks)) for p in phases] == [(4, 2), (1, 1)]


def test_what_was_run_otherwise_is_told(tmp_path):
    comparison = both(tmp_path, name="other", provenance={"kernel": "6.2", "barrier": "step"})
    assert comparison.differences == (("kernel", "6.1", "6.2"), ("model.name", "tiny", "other"))


def test_names_are_safe_in_html():
    assert safe("<a\x07>") == "&lt;a\\x07&gt;"

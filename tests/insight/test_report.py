"""The report of a run: figures add up, large runs stay small, hostile names stay names; how the page looks."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.test_report_page import LOOKS, TEXTS
from headrace.base.causes import Cause
from headrace.cli.app import app
from headrace.insight.epoch_proof import verify_epochs
from headrace.insight.report.figures import (
    CAUSES,
    COLUMNS,
    cause_colours,
    columns_of,
    phases_of,
    run_figures,
    stall_of,
    tiers_of,
)
from headrace.insight.report.page import report_document, report_lines, report_page
from headrace.pages.html import STYLE
from headrace.plane.batch_trace import PHASES, STEP
from headrace.plane.stage import TIERS, latency_bucket
from headrace.trace import read_run
from headrace.trace.format import TraceFile
from traces.runs import Loaders, about, made_run, steps_of

HOSTILE = '<script>alert(1)</script>"\u202e\x1b[2J\ud800&amp;'

TITLES = {
    "Stall by step", "Which ranks waited, and when", "Bytes by where they came from", "Latency of reads",
    "What the tuner did", "Epoch over epoch",
}  # fmt: skip

MB = 1 << 20


def full_run(folder, world=3, name="/scratch/train.hr", said="reads are too few", epochs=3):
    """A run with all that a page can show."""
    loaders = Loaders(folder, samples=2000, world=world, source=name)
    counts = {}
    for epoch in range(epochs):

        def change(rank, rows, epoch=epoch):
            rows["bytes"][:, TIERS.index(("source", "disk", "ram")[epoch % 3])] = 5_000_000
            rows["bytes"][:, TIERS.index("source")] += 100
            rows["waited_s"][rank::3] = 0
            rows["waited_s"][:, PHASES.index(("read", "decode", "open")[rank % 3])] += 0.01

        loaders.epoch(epoch, change=change)
        for rank in range(world):
            for at in range(10):
                bucket = latency_bucket(0.002 * (1 + at % 3))
                counts[bucket] = counts.get(bucket, 0) + 50
                loaders.files[rank].event({
                    "kind": "look", "at_s": loaders.at_s - 1.0 + at / 10, "consumer": {},
                    "stages": {said: {"reads": 50, "latency_us": {str(k): v for k, v in counts.items()}}},
                    "knobs": {"reads_in_flight": 16 << epoch, "buffer_bytes": (64 + epoch) * MB},
                })  # fmt: skip
        knobs = {"reads_in_flight": 16 << epoch, "buffer_bytes": 64 * MB, "decode_threads": 2}
        loaders.event(0, "decision", action="raise", before=knobs, reason=said, evidence=said,
                      after={**knobs, "reads_in_flight": 32 << epoch})  # fmt: skip
    loaders.event(1, "evidence", skipped=0, found={"file_system": said, "cpus": 8, "nonsense": [1]})
    return loaders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "run-17"
    full_run(path).close()
    return path


def test_what_was_waited_adds_up_over_ranks_epochs_time_and_steps(folder):
    run = run_figures(str(folder))
    waited = run.of("waited_s")
    assert waited == pytest.approx(3 * 3 * 42 * 0.01)
    assert sum(phases_of(run.total).values()) == pytest.approx(waited)
    assert sum(run.causes.values()) == pytest.approx(waited)
    assert sum(epoch.of("waited_s") for epoch in run.main.epochs()) == pytest.approx(waited)
    _, over_time = run.over_time(37)
    assert columns_of(over_time, "waited_s").sum() == pytest.approx(waited)
    _, by_step = run.main.by_step(31)
    assert columns_of(by_step, "waited_s").sum() == pytest.approx(waited)
    assert np.allclose(by_step.sum(axis=0), run.total)
    # Each wait of 10 ms is followed by work of 20 ms, but for a pass's last.
    assert stall_of(run.total) == pytest.approx(0.01 / (0.01 + 0.02 * 41 / 42), rel=1e-6)


def test_the_strip_says_why_each_stretch_waited(tmp_path):
    """Metadata in the first epoch and decoding in the second: two stretches, in the bar's colours."""
    run = Loaders(tmp_path / "run", world=2, samples=1600)
    for epoch, phase in enumerate(("open", "decode")):

        def change(rank, rows, phase=phase):
            rows["waited_s"] = 0
            rows["waited_s"][:, PHASES.index(phase)] = 0.01

        run.epoch(epoch, change=change)
    run.close()
    figures = run_figures(str(tmp_path / "run"))
    _, by_step = figures.main.by_step(10)
    opened, decoded = columns_of(by_step, CAUSES[Cause.METADATA], CAUSES[Cause.DECODE]).T
    assert opened == pytest.approx([0.2] * 5 + [0.0] * 5)
    assert decoded == pytest.approx([0.0] * 5 + [0.2] * 5)
    assert figures.causes == pytest.approx({Cause.METADATA: 1.0, Cause.DECODE: 1.0}, rel=0.01)
    page = report_page(figures)
    colours = re.findall(r'<i class="(c\d)"></i>(metadata|decode)', page)
    assert len(colours) == 4
    assert len(set(colours)) == 2
    strip = page[page.index("<figcaption>Stall by step") : page.index("<figcaption>Which ranks")]
    assert "steps 0: 100.0 % waited, metadata 100.0 %" in strip
    assert '<th scope="col">decode</th>' in strip


def test_a_slower_rank_is_called_by_its_number(tmp_path):
    """Rank 1 waits most, on even steps; on odd ones it has its batch and waits for rank 2."""
    run = Loaders(tmp_path / "run", world=3, samples=1600)

    def change(rank, rows):
        late = np.where(np.arange(len(rows)) % 2 == 0, 0.03 * (rank == 1), 0.02 * (rank == 2))
        rows["waited_s"] = 0
        rows["waited_s"][:, PHASES.index("read")] = 0.001 + late
        rows["asked_s"] = rows["asked_s"][0] + 0.1 * np.arange(len(rows))
        rows["delivered_s"] = rows["asked_s"] + 0.001 + late

    run.epoch(0, change=change).close()
    figures = run_figures(str(tmp_path / "run"))
    # What a rank waits for another comes after its batch: no part of the seconds that are divided.
    assert sum(figures.causes.values()) == pytest.approx(figures.of("waited_s"))
    assert figures.slower_s == pytest.approx(16.5 * 2 * (0.03 + 0.02), rel=0.05)
    text = " ".join("\n".join(report_lines(figures)).split())
    assert "for their own data; shares are of that. Waiting for slower ranks took about" in text
    told = [each for each in figures.verdict.evidence if "another still waited" in each]
    assert told
    assert told[0].endswith("(rank 2)")


def test_one_rank_that_all_others_wait_for_is_worth_naming(tmp_path):
    """It waits for 10 % of its time, all ranks together for 0.6 %; the others do for it."""
    run = Loaders(tmp_path / "run", world=16, samples=16 * 16 * 20)

    def change(rank, rows):
        late = 0.02 if rank == 3 else 0.0
        rows["waited_s"] = 0
        rows["waited_s"][:, PHASES.index("read")] = late
        rows["asked_s"] = rows["asked_s"][0] + 0.2 * np.arange(len(rows))
        rows["delivered_s"] = rows["asked_s"] + late

    run.epoch(0, change=change).close()
    figures = run_figures(str(tmp_path / "run"))
    text, page = "\n".join(report_lines(figures)), report_page(figures)
    assert "went to waiting for data, and about" in text.splitlines()[0]
    assert figures.slower == pytest.approx(0.1 * 15 / 16, rel=0.1)
    assert "What was waited for:" in text
    assert "Confidence" in page
    assert "No stall worth naming" not in text + page


def test_a_rank_is_not_compared_with_another_start_of_the_run(tmp_path):
    """Two starts count their steps from 0: both ranks wait in even steps of one, in odd steps of the other."""

    def change(odd):
        def rows_of(_, rows):
            late = np.where(np.arange(len(rows)) % 2 == odd, 0.05, 0.0)
            rows["waited_s"] = 0
            rows["waited_s"][:, PHASES.index("read")] = late
            rows["asked_s"] = rows["asked_s"][0] + 0.1 * np.arange(len(rows))
            rows["delivered_s"] = rows["asked_s"] + late

        return rows_of

    for start in range(2):
        made = Loaders(tmp_path / "run", samples=1600, began=1.8e9 + 60 * start)
        made.epoch(0, change=change(start)).close("")
    assert run_figures(str(tmp_path / "run")).slower_s == 0


@pytest.mark.parametrize("world", [2, 1], ids=["same ranks", "fewer ranks"])
def test_a_run_that_was_started_again_says_so(tmp_path, world):
    """Two ranks are killed after 20 steps of an epoch, and the run goes on from step 15, 12 s later."""
    first = Loaders(tmp_path / "run", samples=1600)
    first.epoch(0, stop=20).close("")
    lasted_s = first.at_s - 100.0
    again = Loaders(tmp_path / "run", samples=1600, world=world, began=1.8e9 + lasted_s + 12)
    again.epoch(0, begin=15 * 32).epoch(1).close()
    figures = run_figures(str(tmp_path / "run"))
    proof = verify_epochs(read_run(str(tmp_path / "run")))
    assert figures.again == proof.loaders[0].history.again == 10
    ((begin_s, end_s),) = figures.pauses
    assert end_s - begin_s == pytest.approx(12, abs=0.2)
    said = "s on. 10 steps of all ranks came again after that"
    for shown in (report_page(figures), next(report_lines(figures))):
        assert "The run was started again: no rank had a step for 1" in shown
        assert said in shown
    assert "The run was started again: start 2 at step 20." in report_page(figures)
    assert '"col">start</th><th scope="col">epoch' in report_page(figures)
    document = report_document(figures)
    assert document["steps_again"] == 10
    assert document["without_ranks_s"] == pytest.approx(12, abs=0.2)


def test_of_several_new_starts_the_time_without_a_step_is_given_in_all(tmp_path):
    for start in range(3):
        Loaders(tmp_path / "run", world=1, began=1.8e9 + 15 * start).epoch(start).close("")
    text = next(report_lines(run_figures(str(tmp_path / "run"))))
    assert "The run was started again 2 times: no rank had a step for 26.3 s in all" in text
    assert " s in all, the first time from 1.9 s on." in text


def test_bytes_that_other_nodes_served_are_not_those_of_storage(tmp_path):
    made = Loaders(tmp_path / "run", samples=160)
    made.epoch(0).event(0, "look", from_peers=1.0).event(1, "look", from_peers=0.25)
    made.event(0, "look").event(1, "look").close()  # the last one, when the reader is gone
    figures = run_figures(str(tmp_path / "run"))
    assert tiers_of(figures.total) == {"peer": 100_000, "source": 60_000}
    text = "\n".join(report_lines(figures))
    assert "Bytes delivered came from: other nodes 100 kB, storage 60 kB" in text


def test_loaders_one_after_the_other_are_no_new_start(tmp_path):
    made = Loaders(tmp_path / "run", samples=160)
    made.epoch(0)
    for rank, file in enumerate(made.files):
        file.close("end")
        header = {**about(made.order, made.slices[rank]), "began_unix_s": 1.8e9 + 60, "began_s": 160.0,
                  "process": f"{rank}"}  # fmt: skip
        later = [TraceFile(str(tmp_path / "run"), rank, header, 1 << 30) for _ in range(2)]
        for at, each in enumerate(later):
            each.steps(steps_of(made.order, made.slices[rank], 0, asked_s=160.0 + 60 * at))
            each.close("exit")
    figures = run_figures(str(tmp_path / "run"))
    assert len(figures.pauses) == 1  # another process went on, once
    assert figures.pauses[0][1] == 1.8e9 + 60


def test_a_stall_that_costs_nearly_nothing_has_no_cause_to_speak_of(tmp_path):
    def change(_, rows):
        rows["waited_s"] *= 0.01
        rows["delivered_s"] = rows["asked_s"] + 0.0001

    made = Loaders(tmp_path / "run", samples=1600)
    made.epoch(0, change=change).close()
    figures = run_figures(str(tmp_path / "run"))
    assert stall_of(figures.total) < 0.01
    page, text = report_page(figures), "\n".join(report_lines(figures))
    for shown in (page, text):
        assert (
            "No stall worth naming, and nothing to do: 10 ms of all ranks together, 0.3 %" in shown
        )
        assert "What to do" not in shown
    assert "What was waited for" not in page + text
    assert "Confidence" not in page


def test_colours_of_causes_are_their_own_as_far_as_there_are_colours():
    found = cause_colours([Cause.OTHER, *(cause for cause in Cause if cause is not Cause.OTHER)])
    assert len({found[cause] for cause in list(Cause)[:7]}) == 7
    assert found[Cause.OTHER] == found[Cause.SLOW_RANK] == "c4"


def test_legends_are_true_in_both_lights(folder):
    page = report_page(run_figures(str(folder)))
    assert "darker" not in page
    assert page.count("the stronger the colour, the more") == 2


def test_commands_in_advice_are_code(folder):
    page = report_page(run_figures(str(folder)))
    assert "<code>headrace pack</code>" in page
    assert "`" not in page


def test_a_wait_lies_where_it_was(tmp_path):
    run = Loaders(tmp_path / "run", world=1, samples=1600)
    run.epoch(0, waited_s=lambda step: 2.0 if step == 50 else 0.0).close()
    figures = run_figures(str(tmp_path / "run"))
    edges, sums = figures.over_time(100)
    waited = columns_of(sums, "waited_s")[0, :, 0]
    began, ended = edges[0] + 50 * 0.02, edges[0] + 50 * 0.02 + 2.0
    inside = (edges[1:] > began - 0.04) & (edges[:-1] < ended + 0.04)
    assert waited[inside].sum() == pytest.approx(2.0, rel=1e-6)
    assert figures.main.curves[0].slowest["step"][0] == 50


def test_the_text_says_what_was_waited_for_and_how_epochs_went(folder):
    text = "\n".join(report_lines(run_figures(str(folder))))
    assert text.startswith("33.9 % of the time went to waiting for data: as if 1.0 of 3 ranks")
    assert "What was waited for:" in text
    assert (
        "Storage was waited for, or a sleep, a lock, a network call" in text
    )  # no reads were seen
    assert "  epoch  took        waited   samples/s" in text
    assert "rank 2" in text
    assert "raise reads_in_flight 64 to 128: reads are too few" in text


def test_several_loaders_are_added_up_and_the_report_says_so(tmp_path):
    for source in ("train.hr", "held_out.hr"):
        loaders = Loaders(tmp_path / "run", source=source)
        loaders.epoch(0)
        loaders.close()
    figures = run_figures(str(tmp_path / "run"))
    waited = sum(columns_of(loader.total, "waited_s")[0] for loader in figures.loaders)
    assert figures.of("waited_s") == pytest.approx(waited)
    assert "This counts all 2 loaders, those of validation too" in next(iter(report_lines(figures)))


def test_the_document_is_json_and_has_the_verdict(folder):
    document = json.loads(json.dumps(report_document(run_figures(str(folder)))))
    assert document["steps"] == 3 * 3 * 42
    assert document["verdict"]["cause"]
    assert len(document["epochs"]) == 3


def test_a_run_that_was_cut_off_is_shown_as_far_as_it_went(tmp_path):
    full_run(tmp_path / "run").close("")
    path = tmp_path / "run" / "rank-00001.trace"
    path.write_bytes(path.read_bytes()[:-30])
    page = report_page(run_figures(str(tmp_path / "run")))
    assert "the process has not ended yet, or was killed: 2 of 3 traces" in page
    assert "it was cut off in the middle: 1 of 3 traces" in page


def test_a_run_without_a_step_is_no_error(tmp_path):
    Loaders(tmp_path / "run").close()
    run = run_figures(str(tmp_path / "run"))
    assert "No step was written" in report_page(run)
    assert list(report_lines(run)) == ["No step was written: there is nothing to tell."]


def test_nothing_of_a_hostile_run_acts_on_the_page(tmp_path):
    full_run(tmp_path / "run", name=HOSTILE, said=HOSTILE).close()
    page = report_page(run_figures(str(tmp_path / "run")))
    assert "<script" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page
    page.encode()
    assert not re.search(r"https?://", page)
    text = "\n".join(report_lines(run_figures(str(tmp_path / "run"))))
    assert "raise" in text


@pytest.mark.parametrize("size", ["many steps", "many ranks", "many epochs"])
def test_a_page_stays_small_whatever_the_run(tmp_path, size):
    if size == "many steps":
        run = Loaders(tmp_path / "run", samples=64, batch=1, world=2)
        rows = np.zeros(100_000, STEP)
        fill(rows)
        for file in run.files:
            file.steps(rows)
    elif size == "many ranks":
        run = full_run(tmp_path / "run", world=256, epochs=1)
    else:
        run = Loaders(tmp_path / "run", samples=32, world=2)
        for epoch in range(300):
            run.epoch(epoch)
    run.close()
    page = report_page(run_figures(str(tmp_path / "run")))
    assert 10_000 < len(page.encode()) < 2_000_000


def run_dtype():
    from headrace.plane.batch_trace import STEP

    return STEP


def fill(rows):
    count = len(rows)
    rng = np.random.default_rng(0)
    waited = rng.exponential(0.002, count)
    rows["step"] = np.arange(count)
    rows["asked_s"] = 100 + np.cumsum(np.concatenate([[0], waited[:-1] + 0.001]))
    rows["delivered_s"] = rows["asked_s"] + waited
    for phase in range(len(PHASES)):
        rows["waited_s"][:, phase] = waited / len(PHASES)
    rows["bytes"] = 1000
    rows["samples"] = 1


def test_sums_have_a_column_for_each_phase_and_tier():
    assert {*PHASES, *TIERS} < {*COLUMNS}


# -- the command ---------------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_the_command_writes_a_page_prints_text_or_json(folder, tmp_path):
    page = tmp_path / "out.html"
    done = command(folder, "--html", page)
    assert (done.exit_code, done.stdout) == (0, "")
    assert page.read_text().startswith("<!doctype html>")
    assert "of the time went to waiting for data" in command(folder).stdout
    assert json.loads(command(folder, "--json").stdout)["steps"] == 378


def test_the_command_refuses_what_is_no_run(tmp_path):
    made_run(tmp_path / "run")
    path = tmp_path / "run" / "rank-00000.trace"
    path.write_bytes(b"\x00" + path.read_bytes())
    for wrong in (tmp_path / "run", tmp_path / "nowhere", tmp_path):
        done = command(wrong)
        assert done.exit_code == 3
        assert "next:" in done.stderr


# -- how it looks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report_page(run_figures(str(folder))))
    return path


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_whole_and_legible(page, browser, tmp_path, look):
    browser.open(page, **LOOKS[look])
    titles = set(browser.texts("figcaption"))
    assert titles == TITLES
    assert not browser.too_wide()
    assert not browser.run(TEXTS)
    assert browser.said_and_asked() == ([], [])
    text_ratio, paper = browser.run(TEXT_CONTRAST)
    assert text_ratio >= 4.5
    assert (paper < 0.1) == bool(LOOKS[look].get("dark"))
    browser.screenshot(tmp_path / "page.png")


def test_a_table_stands_behind_every_picture(page, browser):
    browser.open(page)
    figures = browser.visible("figure")
    assert len(figures) == len(TITLES)
    for figure in figures:
        assert browser.run(
            "return arguments[0].querySelector('details table tbody').rows.length", figure
        )
    for summary in browser.visible("figure summary"):
        browser.run("arguments[0].click()", summary)
    assert len(browser.visible("figure table")) >= len(TITLES)
    browser.open(page, media="print", width=800)
    assert len(browser.visible("figure table")) >= len(TITLES)


DICHROMATS = {
    "all cones": np.eye(3),
    "no long": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ],
    "no middle": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881],
    ],
    "no short": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039],
    ],
}  # fmt: skip
"""Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB."""


def seen(colour, eyes):
    """A colour as these eyes see it, in CIE Lab."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(DICHROMATS[eyes]) @ linear, 0, 1)
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ linear
    )
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", DICHROMATS)
@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "paper"])
def test_colours_are_told_apart_by_all_eyes(eyes, scheme):
    colours = re.findall(r"--c[1-8]: (#[0-9a-f]{6})", STYLE)[8 * scheme : 8 * scheme + 8]
    assert len(colours) == 8
    found = [seen(colour, eyes) for colour in colours]
    for at, one in enumerate(found):
        for other in range(at):
            distance = np.linalg.norm(one - found[other])
            assert distance > 9, (colours[at], colours[other], distance)


@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "paper"])
def test_shades_go_one_way(scheme):
    shades = re.findall(r"--h[0-5]: (#[0-9a-f]{6})", STYLE)[6 * scheme : 6 * scheme + 6]
    for eyes in DICHROMATS:
        lightness = [seen(shade, eyes)[0] for shade in shades]
        steps = np.diff(lightness)
        assert np.all(steps < -5) or np.all(steps > 5), (eyes, lightness)


TEXT_CONTRAST = """
const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)
  .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
const paper = light(getComputedStyle(document.body).backgroundColor);
const of = (selector, property) => [...document.querySelectorAll(selector)]
  .map(e => ratio(paper, light(getComputedStyle(e)[property])));
return [Math.min(...of('h1, p, li, td, th, figcaption, summary', 'color'), ...of('svg text', 'fill')), paper];
"""

"""The report's page as a browser shows it: complete, legible, offline; light, dark, narrow and on paper."""

import json

import pytest

from headrace.bench.report import report_page
from headrace.bench.results import load_runs, rank_blocks
from headrace.bench.run import SessionOptions
from headrace.bench.session import run_session
from tests_shared import until

from .test_mlpstorage import TINY
from .test_report import HOSTILE, write_run

LOOKS = {
    "wide": {"width": 1280}, "dark": {"width": 1280, "dark": True}, "narrow": {"width": 400},
    "narrowest": {"width": 320, "dark": True}, "paper": {"width": 800, "media": "print"},
}  # fmt: skip

CHARTS = {
    "Where the accelerators' time went", "AU of each run", "AU of each epoch",
    "Throughput of each epoch, samples/s", "AU of each accelerator, lowest first",
    "How long steps waited", "Waits over the run", "Where the bytes came from",
    "Time to save each checkpoint",
}  # fmt: skip

TEXTS = """
const inside = (t, s) => t.left >= s.left - 1 && t.right <= s.right + 1
  && t.top >= s.top - 1 && t.bottom <= s.bottom + 1;
const found = [];
for (const svg of document.querySelectorAll('svg')) {
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].filter(t => t.checkVisibility());
  const boxes = texts.map(t => t.getBoundingClientRect());
  boxes.forEach((b, i) => {
    if (!inside(b, box)) found.push('cut off: ' + texts[i].textContent);
    boxes.slice(0, i).forEach((a, j) => {
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 1 && y > 4) found.push(texts[i].textContent + ' over ' + texts[j].textContent);
    });
  });
}
return found;
"""

CONTRAST = """
const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)
  .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
const paper = light(getComputedStyle(document.body).backgroundColor);
const of = (selector, property) => [...document.querySelectorAll(selector)]
  .map(e => ratio(paper, light(getComputedStyle(e)[property])));
return [Math.min(...of('h1, p, td, th, figcaption, summary', 'color'), ...of('svg text', 'fill')),
        Math.min(...of('svg rect', 'fill')), paper];
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of two repeats of a real run, so that every chart is there."""
    folder = tmp_path_factory.mktemp("page")
    for number in (1, 2):
        run_session([
            "workload=unet3d_h100", "++workload.workflow.generate_data=True",
            "++workload.dataset.num_files_train=24", "++workload.dataset.record_length_bytes=9000",
            "++workload.dataset.record_length_bytes_stdev=0", "++workload.reader.batch_size=1",
            "++workload.reader.read_threads=1", "++workload.train.epochs=5",
            "++workload.train.computation_time=0.002", "++workload.model.model_size_bytes=9999",
            f"++workload.dataset.data_folder={folder / 'data'}",
            f"++workload.checkpoint.checkpoint_folder={folder / 'checkpoints'}",
            f"++hydra.run.dir={folder / 'runs' / str(number)}",
        ], SessionOptions(accelerators=2))  # fmt: skip
    runs = load_runs(str(folder / "runs"))
    path = folder / "report.html"
    path.write_text(report_page(runs, rank_blocks(runs[-1])))
    return path


@pytest.mark.parametrize("look", LOOKS)
def test_everything_is_there_legible_and_within_the_window(browser, page, look):
    browser.open(page, **LOOKS[look])
    assert browser.said_and_asked() == ([], [])
    assert browser.driver.title == "Storage benchmark: unet3d"
    figures, charts = browser.visible("figure"), browser.visible("figure > svg")
    assert len(figures) == len(charts) == len(browser.visible("figure > details"))
    assert all(chart.size["width"] > 280 for chart in charts)
    assert set(browser.texts("figcaption")) >= CHARTS
    assert browser.texts(".not-mlperf") == ["This is not an MLPerf result."]
    assert len(browser.visible(".cards li")) >= 6
    assert browser.too_wide() == []
    assert browser.run(TEXTS) == []
    words, shapes, paper = browser.run(CONTRAST)
    assert words > 4.5  # as WCAG asks of text
    assert shapes > 1.8
    assert paper < 0.05 if LOOKS[look].get("dark") else paper > 0.95


def test_tables_behind_charts_open_and_are_printed(browser, page):
    browser.open(page, width=400)
    tables = "figure details table"
    assert browser.visible(tables) == []
    for summary in browser.visible("summary"):
        summary.click()
    assert len(browser.visible(tables)) == len(browser.visible("figure"))
    assert browser.too_wide() == []
    browser.open(page, media="print")
    assert len(browser.visible(tables)) == len(browser.visible("figure"))


def test_it_needs_no_script_and_asks_nobody(browser, page):
    browser.open(page)
    assert browser.run("return document.scripts.length + document.images.length") == 0
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A page of checkpoints alone."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_session([
        "workload=llama_7b_zero3", *TINY, f"++hydra.run.dir={folder / 'run'}",
        f"++workload.checkpoint.checkpoint_folder={folder / 'checkpoints'}",
        "++workload.checkpoint.time_between_checkpoints=0",
    ], SessionOptions(accelerators=2))  # fmt: skip
    runs = load_runs(str(folder / "run"))
    path = folder / "report.html"
    path.write_text(report_page(runs, rank_blocks(runs[-1])))
    return path


@pytest.mark.parametrize("look", LOOKS)
def test_checkpoints_have_their_charts_and_no_empty_headings(browser, checkpoints, look):
    browser.open(checkpoints, **LOOKS[look])
    assert browser.said_and_asked() == ([], [])
    headings = browser.texts("h2")
    assert headings == ["Checkpoints", "All figures", "Where and how it ran", "The workload"]
    captions = browser.texts("figcaption")
    assert captions == ["Time to save each checkpoint", "Time to read each back"]
    assert "checkpoints by fsync" in browser.texts(".soft")[0]
    assert browser.too_wide() == []
    assert browser.run(TEXTS) == []


@pytest.mark.parametrize("width", [1280, 400])
def test_hostile_and_endless_names_break_nothing(browser, tmp_path, width):
    name = HOSTILE + "w" * 3000
    folder = write_run(tmp_path / "run", name=name, bound=name, engine=name)
    summary = json.loads((folder / "summary.json").read_text())
    epochs = [10.0 * n for n in range(11)] * 20
    summary["metric"]["train_au_percentage"] = epochs
    summary["metric"]["train_throughput_samples_per_second"] = [1e9 * each for each in epochs]
    (folder / "summary.json").write_text(json.dumps(summary))
    runs = load_runs(str(folder))
    path = tmp_path / "report.html"
    path.write_text(report_page(runs, rank_blocks(runs[-1])), errors="replace")
    browser.open(path, width=width)
    assert browser.said_and_asked() == ([], [])
    assert browser.too_wide() == []
    assert browser.run(TEXTS) == []
    assert browser.run("return document.scripts.length") == 0


def test_what_the_browser_says_and_asks_is_seen(browser, tmp_path):
    """The checks above can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><body><p style='width: 3000px'>x</p><svg width=50><text x=40>long</text></svg>"
        "<img src='http://192.0.2.1/x.png'><script>console.error('oh')</script>"
    )
    browser.open(bad, width=400)
    said, asked = set(), set()

    def heard():  # the browser's log comes a moment later
        for kind, more in zip((said, asked), browser.said_and_asked(), strict=True):
            kind.update(more)
        return any("oh" in line for line in said) and asked

    until(heard)
    assert asked == {"http://192.0.2.1/x.png"}
    assert any(each.startswith("P ") for each in browser.too_wide())
    assert "cut off: long" in browser.run(TEXTS)

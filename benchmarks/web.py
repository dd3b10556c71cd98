"""The pages of `headrace web --demo`: 1,000 nodes, 8,000 GPUs, 10,000 jobs, in headless Chromium.

    python -m benchmarks.web            # a minute
    python -m benchmarks.web --quick    # twice each, and nothing is written

`paint` is from the navigation's beginning to the browser's first contentful paint, `data` to the frame that
has all GPUs on it. Also: what a look costs the server, what it sends, how long a key press takes in the
grid, and the server's CPU while several browsers watch. Raw figures go to benchmarks/results/web-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "tests"))

from benchmarks import machine, processes
from browser import Browser
from headrace.web.demo import DemoSource
from headrace.web.views import Wire

RESULTS = ROOT / "benchmarks/results"
PAGES = ("/", "/starving", "/storage", "/policies", "/stores")
WATCHED_S = 10.0


@processes.leaving_nothing()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="twice each, and nothing is written")
    given = parser.parse_args()
    times = 2 if given.quick else 9
    # Before anything of ours runs.
    found: dict[str, Any] = {"load": os.getloadavg()[0], "look": look_costs(), "pages": {}}
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "web", "--demo",
               "--listen", "127.0.0.1:0", "--json"]  # fmt: skip
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                text += server.stdout.readline()
            found["start_s"] = time.perf_counter() - began
            url = json.loads(text)["url"].rstrip("/")
            browser = Browser()
            try:
                for page in PAGES:
                    found["pages"][page] = paints(browser, url + page, times)
                browser.open(url + "/")
                wait_for(browser, 1)
                found["grid"] = grid_costs(browser)
                found["server_cpu_share"] = watched_cost(browser, server.pid)
            finally:
                browser.close()
        finally:
            server.terminate()
    show(found)
    if not given.quick:
        path = RESULTS / f"web-{dt.datetime.now(dt.UTC).date()}.json"
        path.write_text(json.dumps({"machine": machine.describe(ROOT), **found}, indent=1) + "\n")
        print(path)


def look_costs() -> dict[str, float]:
    """Seconds and bytes of a look, as the server makes them."""
    source, wire = DemoSource(), Wire("demo")
    looks, ticks = [], []
    for _ in range(7):
        began = time.perf_counter()
        said = json.dumps(wire.tick(source.cluster()))
        looks.append(time.perf_counter() - began)
        ticks.append(len(said))
    return {
        "look_s": statistics.median(looks),
        "first_bytes": len(json.dumps(wire.full())),
        "tick_bytes": statistics.median(ticks[1:]),
    }


def wait_for(browser: Browser, looks: int) -> None:
    while int(browser.run("return document.body.dataset.looks") or 0) < looks:
        time.sleep(0.02)


def paints(browser: Browser, url: str, times: int) -> dict[str, list[float]]:
    """Milliseconds to the first paint, and to the first with everything on it where the page says so."""
    first, data = [], []
    for _ in range(times):
        browser.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
        browser.open(url)
        wait_for(browser, 1)
        time.sleep(0.3)
        entries, painted = (mark(browser, name) for name in ("first-contentful-paint", "painted"))
        first.append(entries)
        if painted is not None:
            data.append(painted)
    return {"paint_ms": first, "data_ms": data}


def mark(browser: Browser, name: str) -> float | None:
    """When something was seen first, in milliseconds; None: it was not."""
    return browser.run("return performance.getEntriesByName(arguments[0])[0]?.startTime", name)


def grid_costs(browser: Browser) -> dict[str, float]:
    """Milliseconds that a key press in the grid takes, until the picture is drawn again."""
    took = browser.run(
        "const g = document.getElementById('grid'), took = []; g.focus();"
        "for (let i = 0; i < 40; i++) { const t = performance.now();"
        "const key = i % 3 ? 'ArrowRight' : 'ArrowDown';"
        "g.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));"
        "took.push(performance.now() - t); } return took"
    )
    return {"key_ms_median": statistics.median(took), "key_ms_most": max(took)}


def watched_cost(browser: Browser, pid: int) -> float:
    """Share of a core that the server takes while the browser watches."""
    wait_for(browser, 3)
    before = cpu_s(pid)
    time.sleep(WATCHED_S)
    return (cpu_s(pid) - before) / WATCHED_S


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(found: dict[str, Any]) -> None:
    print(f"load {found['load']:.1f}; the server serves after {found['start_s']:.2f} s")
    for page, figures in found["pages"].items():
        data = figures["data_ms"]
        more = (
            f", with all GPUs {statistics.median(data):.0f} (most {max(data):.0f})" if data else ""
        )
        first = figures["paint_ms"]
        print(
            f"{page:<10} first paint {statistics.median(first):.0f} ms (most {max(first):.0f}){more}"
        )
    print(json.dumps({k: found[k] for k in ("look", "grid", "server_cpu_share")}, indent=1))


if __name__ == "__main__":
    main()

"""A browser for tests that look at pages: headless Chromium, without a network, and what a test asks of it."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_OWN = ("data:", "chrome:", "about:")
_WIDE_LAYOUT = """
const width = document.documentElement.clientWidth, found = [];
const scrolls = (e) => { for (; e; e = e.parentElement)
  if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)) return true; return false; };
for (const e of document.body.querySelectorAll('*')) {
  const box = e.getBoundingClientRect();
  if (box.width && box.right > width + 1 && !scrolls(e.parentElement))
    found.push(e.tagName + ' ' + e.textContent.slice(0, 40));
}
if (document.documentElement.scrollWidth > width) found.push('page ' + document.documentElement.scrollWidth);
return found;
"""
_VISIBLE = """[...document.querySelectorAll(arguments[0])].filter(e => {
  const b = e.getBoundingClientRect(); return b.width > 0 && b.height > 0 && e.checkVisibility(); })
"""


def missing() -> str | None:
    """What is not installed; None when all is there."""
    if not any(map(shutil.which, CHROMIUM)):
        return "no chromium (Debian: chromium)"
    return None if shutil.which("chromedriver") else "no chromedriver (Debian: chromium-driver)"


class Browser:
    """One window. Everything but files and loopback is unreachable.

    Attributes:
        driver: selenium's, for what is not here.
    """

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="headrace-browser-")
        options = webdriver.ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--no-first-run", "--force-device-scale-factor=1",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
            f"--user-data-dir={self._profile}",
        ):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        self.driver.set_page_load_timeout(30)

    def open(
        self, page: str | Path, *, width: int = 1280, dark: bool = False, media: str = ""
    ) -> None:
        """Open a page.

        Args:
            page: a file or an address.
            width: of the window, in pixels.
            dark: whether the user wants dark pages.
            media: `print` for how it looks on paper; else the screen.
        """
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                 mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._do("Emulation.setEmulatedMedia", media=media, features=[scheme])
        # As in a window that somebody looks at: else the first key may go anywhere.
        self._do("Emulation.setFocusEmulationEnabled", enabled=True)
        self.driver.get("about:blank")
        self._logs()
        self.driver.get(page.resolve().as_uri() if isinstance(page, Path) else page)

    def _do(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def _logs(self) -> tuple[list[str], list[str]]:
        console = [f"{e['level']}: {e['message']}" for e in self.driver.get_log("browser")]
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events
                 if e["method"] == "Network.requestWillBeSent"]  # fmt: skip
        return console, asked

    def said_and_asked(self) -> tuple[list[str], list[str]]:
        """What the console says, and the addresses that were requested besides the page, since `open`."""
        console, asked = self._logs()
        page = self.driver.current_url
        return console, [url for url in asked if url != page and not url.startswith(_OWN)]

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def too_wide(self) -> list[str]:
        """What sticks out of the window's width, and is in nothing that scrolls."""
        found: list[str] = self.run(_WIDE_LAYOUT)
        return found

    def visible(self, selector: str) -> list[Any]:
        """The elements that have a size and are shown."""
        found: list[Any] = self.run(f"return {_VISIBLE}", selector)
        return found

    def texts(self, selector: str) -> list[str]:
        """What stands in the visible elements, read at once: a page that moves may replace them meanwhile."""
        found: list[str] = self.run(
            f"return {_VISIBLE}.map(e => (e.innerText ?? e.textContent).trim())", selector
        )
        return found

    def unroll(self) -> None:
        """Make the window as high as the page, so that nothing that stays at its edge lies over the page."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        taken = self._do("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """End it, and remove its profile."""
        self.driver.quit()
        shutil.rmtree(self._profile, ignore_errors=True)

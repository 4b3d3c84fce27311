"""Debian's chromium, in one window without a screen."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tools import go_without

PROGRAMS = ("chromium", "chromedriver")
PACKAGES = ("selenium", "axe_core_python")

# Root may not use the sandbox, and nothing of the browser's own shall be among the requests.
_OPTIONS = (
    "headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars", "lang=en",
)  # fmt: skip


class Browser:
    """One window, and what was seen in it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path | str, width: int = 1600, scheme: str = "light") -> None:
        """Opens a page, a file or an address, in a window of so many pixels, and forgets what was logged before."""
        self.resize(width)
        media = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(page if isinstance(page, str) else page.as_uri())

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def requests(self) -> list[str]:
        """The addresses that were asked for since a page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def press(self, key: str) -> None:
        """Types where the focus is."""
        self.driver.switch_to.active_element.send_keys(key)

    def shown(self, column: int = 1) -> list[str]:
        """The texts of a column of the ops that are shown."""
        rows = "[...document.querySelectorAll('#op-table tbody tr:not([hidden])')]"
        return self.run(f"return {rows}.map(row => row.cells[arguments[0]].innerText)", column)


def missing_programs() -> list[str]:
    """What must be installed before a browser can be opened."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return missing + [name for name in PACKAGES if importlib.util.find_spec(name) is None]


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser that keeps its files in an empty folder, and logs messages and requests."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    program, driver = map(shutil.which, PROGRAMS)
    options = ChromeOptions()
    options.binary_location = str(program)
    for option in (*_OPTIONS, f"user-data-dir={profile}"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = Chrome(options=options, service=Service(driver))
    window.set_script_timeout(600)  # seconds: a test has a limit of its own
    try:
        yield Browser(window)
    finally:
        window.quit()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests of a file."""
    if missing := missing_programs():
        go_without(f"no {', '.join(missing)}: apt install chromium chromium-driver; pip install -e '.[browser]'")
    with open_browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened

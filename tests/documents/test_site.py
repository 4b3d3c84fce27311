"""The site that is made of the documents: without a warning, on its own, on a telephone as on a desk."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import EnumType
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from clamp import amp, debugging
from tests.debug.browser import Browser, browser
from tests.documents.runner import ROOT, python_blocks
from tests.tools import go_without

__all__ = ["browser"]  # a fixture

MODULES = {"clamp.amp": amp, "clamp.debugging": debugging, "clamp.amp.optim": amp.optim}
NAMES = [
    (module, name) for module, of in MODULES.items() for name in of.__all__ if not inspect.ismodule(vars(of)[name])
]
WIDTHS = (360, 1600)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]:
        go_without(f"no {', '.join(missing)}: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    made = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "WARNING" not in made.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Of a server of the site: search needs one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def nothing_to_search(site: Path) -> Iterator[None]:
    """Each page reads the index of all, which takes as long as all else on it."""
    index = site / "search/search_index.json"
    whole = index.read_text("utf-8")
    index.write_text(json.dumps({**json.loads(whole), "docs": []}), "utf-8")
    yield
    index.write_text(whole, "utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_to_search")
def test_pages_are_quiet_alone_and_as_wide_as_their_window(site: Path, address: str, browser: Browser) -> None:
    pages = sorted(f"{file.parent.relative_to(site)}/" for file in site.rglob("index.html"))
    assert len(pages) == len(list((ROOT / "docs").glob("*.md"))) + 4  # README, CONTRIBUTING, CHANGELOG, SECURITY
    for page in pages:
        browser.open(address + page.removeprefix("./"))
        for width in WIDTHS:
            browser.resize(width)
            found = browser.run("return document.documentElement.scrollWidth")
            assert found == width, f"{page} is {found} pixels wide: {browser.run(WIDER, width)}"
        assert browser.driver.get_log("browser") == [], page
        requests = browser.requests()
        assert len(requests) > 2, page
        assert [url for url in requests if not url.startswith(address)] == [], page


#: what reaches beyond the window, and has nothing around it that scrolls
WIDER = """
const scrolls = x => x && x != document.documentElement
    && (getComputedStyle(x).overflowX != 'visible' || scrolls(x.parentElement));
return [...document.body.querySelectorAll('*')].filter(x => x.getBoundingClientRect().right > arguments[0]
    && !scrolls(x.parentElement)).slice(0, 5).map(x => x.outerHTML.slice(0, 120))
"""


@pytest.mark.slow
def test_a_search_finds_a_page(address: str, browser: Browser) -> None:
    browser.driver.execute_cdp_cmd("Network.clearBrowserCache", {})  # it may hold an index of nothing
    browser.open(address)
    browser.run("document.querySelector('#__search').click()")
    field = browser.one("input.md-search__input")
    field.send_keys("hysteresis")
    script = """
    const done = arguments[0], look = () => {
        const found = document.querySelector('.md-search-result__link');
        found ? done(found.href) : setTimeout(look, 20);
    };
    look()
    """
    browser.driver.set_script_timeout(30)
    assert browser.driver.execute_async_script(script).startswith(address)


def test_the_site_has_each_public_name(site: Path) -> None:
    page = (site / "reference/index.html").read_text("utf-8")
    assert [f"{module}.{name}" for module, name in NAMES if f'id="{module}.{name}"' not in page] == []


def test_a_public_name_is_in_the_reference_with_its_arguments_and_an_example() -> None:
    reference = (ROOT / "docs/reference.md").read_text("utf-8")
    documents = ["README.md", *(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))]
    examples = "\n".join(block for file in documents for _, block in python_blocks(file))
    for module, name in NAMES:
        assert f"\n::: {module}.{name}\n" in reference, name
        used = rf"\b{module.rpartition('.')[2]}\.{name}\b|\bimport .*\b{name}\b"
        assert re.search(used, examples), f"no example has {module}.{name}"
        public = vars(MODULES[module])[name]
        text = inspect.getdoc(public)
        assert text, name
        if isinstance(public, EnumType) or (isinstance(public, type) and issubclass(public, Exception)):
            continue
        taken = inspect.signature(public.__init__ if isinstance(public, type) else public).parameters
        named = {argument.name for argument in taken.values() if argument.kind not in VARIADIC} - {"self"}
        assert {argument for argument in named if not re.search(rf"\b{argument}\b", text)} == set(), name


def test_what_has_run_is_in_the_table_of_support() -> None:
    results = {file.name.removesuffix(".json") for file in (ROOT / "examples/benchmarks/results").iterdir()}
    text = (ROOT / "docs/support.md").read_text("utf-8")
    assert set(re.findall(r"`([\w-]+-\d{4}-\d\d-\d\d[\w-]*)`", text)) == results

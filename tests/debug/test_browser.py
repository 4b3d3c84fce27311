"""The page of a run in a browser, Debian's chromium: quiet, on its own, and of use with a keyboard."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

import pytest

from clamp.report import write_page
from tests.debug.browser import Browser, browser
from tests.debug.sample import empty_run, hostile_run, large_run, sample_run, short_run

__all__ = ["browser"]  # a fixture

RUNS = {
    "sample": sample_run,
    "short": short_run,
    "empty": empty_run,
    "hostile": lambda: hostile_run(short_run()),
    "large": large_run,
}
Page: TypeAlias = Callable[[str], Path]
PAGES = ("sample", "empty", "hostile", "large")
WIDTHS = (360, 800, 1600)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of one of `RUNS`, written when it is asked for: to draw one takes seconds."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def written(name: str) -> Path:
        write_page(RUNS[name](), folder / f"{name}.html")
        return folder / f"{name}.html"

    return written


@pytest.fixture
def sample(browser: Browser, page: Page) -> Browser:
    browser.open(page("sample"))
    return browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.long
def test_a_page_is_quiet_alone_and_as_wide_as_its_window(
    browser: Browser, page: Page, name: str, width: int, scheme: str
) -> None:
    browser.open(page(name), width, scheme)
    assert browser.run("return document.readyState") == "complete"
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run("return document.documentElement.className") == "scripted", "its script ran"
    assert browser.driver.get_log("browser") == []
    assert browser.requests() == [page(name).as_uri()]
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, background[4:-1].split(","))) < 64) == (scheme == "dark")
    form = "narrow" if width < 800 else "wide"
    assert {one.get_attribute("class") for one in browser.all(".picture svg") if one.is_displayed()} <= {form}


def test_the_log_would_have_shown_a_request_and_a_message(browser: Browser, tmp_path: Path) -> None:
    loud = tmp_path / "loud.html"
    loud.write_text('<script>console.log("hello")</script><img src="nothing.png">')
    browser.open(loud)
    assert any("hello" in entry["message"] for entry in browser.driver.get_log("browser"))
    assert any("nothing.png" in entry["message"] for entry in browser.driver.get_log("performance"))


def test_texts_of_a_run_never_run(browser: Browser, page: Page) -> None:
    browser.open(page("hostile"))
    assert len(browser.all("script, style, img, iframe")) == 2
    for script in ("x.textContent = 'window.hacked = 1'", "x.src = 'data:text/javascript,window.hacked = 1'"):
        browser.run(f"const x = document.createElement('script'); {script}; document.body.append(x)")
    assert browser.run("return window.hacked") is None, "the page's policy forbids it even to what slipped through"


def test_a_click_sorts_and_another_turns_it_round(sample: Browser) -> None:
    head, button = sample.all("#op-table thead th")[7], sample.all("#op-table thead button")[7]
    assert head.get_attribute("aria-sort") is None
    button.click()
    assert head.get_attribute("aria-sort") == "descending"
    milliseconds = [float(text.replace(",", "")) for text in sample.shown(7)]
    assert milliseconds == sorted(milliseconds, reverse=True)
    assert len(milliseconds) == 98
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(text.replace(",", "")) for text in sample.shown(7)] == milliseconds[::-1]
    assert "ms, ascending" in sample.one(".aloud").get_attribute("textContent")


def test_the_keyboard_sorts_texts_by_their_numbers(sample: Browser) -> None:
    head = sample.all("#op-table thead th")[2]
    sample.run("arguments[0].querySelector('button').focus()", head)
    sample.press("\n")
    assert head.get_attribute("aria-sort") == "ascending"
    modules = sample.shown(2)
    assert modules[0].strip() == "char_lm.py:112", "outside of any module"
    assert modules[-1].startswith("norm")
    assert [head.get_attribute("aria-sort") for head in sample.all("#op-table thead th")].count(None) == 10


def test_unknown_numbers_come_last(browser: Browser, tmp_path: Path) -> None:
    run = empty_run()
    run["ops"] = sample_run()["ops"][:3]
    for op, value in zip(run["ops"], (3.0, None, 20.0), strict=True):
        op["milliseconds"] = value
    write_page(run, tmp_path / "run.html")
    browser.open(tmp_path / "run.html")
    button = browser.all("#op-table thead button")[7]
    button.click()
    assert browser.shown(7) == ["20.000", "3.000", "—"]
    button.click()
    assert browser.shown(7) == ["3.000", "20.000", "—"]


def test_filters_narrow_the_table_and_are_taken_back(sample: Browser) -> None:
    output = sample.one("form.filters output")
    assert output.text == "98 ops"
    sample.one("input[type=search]").send_keys("MATMUL blocks.2")
    assert output.text == f"{len(sample.shown())} of 98 ops"
    assert len(sample.shown()) == 10
    sample.one("select[name=direction]").send_keys("backward")
    assert set(sample.shown(1)) == {"backward"}
    assert len(sample.shown()) == 5
    sample.one("select[name=policy]").send_keys("float")
    assert sample.shown() == []
    assert output.text == "0 of 98 ops"
    sample.one("button[type=reset]").click()
    sample.run("return new Promise(done => setTimeout(done, 50))")
    assert len(sample.shown()) == 98
    assert output.text == "98 ops"


def test_a_module_of_the_tree_shows_its_ops(sample: Browser) -> None:
    (lit,) = sample.all("#modules .lit")
    assert lit.text == "first inf: matmul_op, forward"
    assert lit.is_displayed()
    item = lit.find_element("xpath", "./ancestor::li[1]")
    item.find_element("css selector", "a").click()
    sample.run("return new Promise(done => setTimeout(done, 50))")
    assert {text.split()[0] for text in sample.shown(2)} == {"blocks.2.attention"}
    assert sample.one("form.filters output").text == "8 of 98 ops in blocks.2.attention"
    assert [row.get_attribute("class") for row in sample.all("#op-table tr:not([hidden])")].count("bad") == 1


def test_a_mark_says_why_a_step_was_skipped(sample: Browser) -> None:
    from selenium.webdriver import ActionChains, Keys

    output = sample.one(".pointed")
    marks = [mark for mark in sample.all(".marks use") if mark.is_displayed()]
    assert len(marks) == 12
    ActionChains(sample.driver).move_to_element(marks[1]).perform()
    assert output.text.startswith("step 2 skipped: inf in 96 elements of the gradients of head.weight; loss scale")
    sample.run("arguments[0].focus()", marks[0])
    assert output.text.startswith("step 1 skipped")
    right, left = Keys.ARROW_RIGHT, Keys.ARROW_LEFT
    for key, step in ((right, 2), (Keys.END, 216), (right, 216), (left, 215), (Keys.HOME, 1)):
        sample.press(key)
        assert output.text.startswith(f"step {step} skipped")
    assert [mark.get_attribute("tabindex") for mark in marks] == ["0", *["-1"] * 11]


@pytest.mark.slow
def test_tab_reaches_every_control_and_shows_where_it_is(sample: Browser) -> None:
    reached: list[str] = []
    for _ in range(200):
        sample.press("\t")
        reached.append(sample.run(
            """const e = document.activeElement, s = getComputedStyle(e);
            if (e === document.body) return 'end';
            if (e.closest('.marks')) return 'mark';
            return (s.outlineStyle === 'none' ? 'unmarked ' : '') + (e.id || e.className || e.name || e.textContent)"""
        ))  # fmt: skip
        if reached[-1] == "end":
            break
    assert (reached[0], reached[-1]) == ("skip", "end")
    assert not [name for name in reached if name.startswith("unmarked")]
    controls = {"Timeline", "copy", "mark", "12 skipped steps as a table", "Show all", "ms"}
    assert controls | {"words", "policy", "direction"} <= set(reached)


def test_everything_has_a_name_for_screen_readers(sample: Browser) -> None:
    tree = sample.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    found: dict[str, list[str]] = {}
    for node in tree:
        if not node["ignored"]:
            found.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert len(found["banner"]) == len(found["main"]) == len(found["contentinfo"]) == 1
    assert found["navigation"] == ["Sections"]
    assert found["heading"][0] == "matmul_op in blocks.2.attention overflows float16 in the forward"
    assert set(found["table"]) == {"What it read", "Updates of one step", "Ops"}  # others are in closed details
    assert found["search"] == ["Filter the ops"]
    for role in ("image", "region", "button", "link", "searchbox", "combobox", "table", "columnheader", "rowheader"):
        assert found[role], role
        assert all(name.strip() for name in found[role]), f"{role}: {found[role]}"
    assert sum(name.startswith("step ") for name in found["image"]) == 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("name", ["short", "empty", "hostile"])
@pytest.mark.long
def test_axe_finds_nothing_that_keeps_anybody_out(
    browser: Browser, page: Page, name: str, width: int, scheme: str
) -> None:
    browser.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})  # or the page would not let it in
    browser.open(page(name), width, scheme)
    browser.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
    browser.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    browser.run((files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    quick = "{resultTypes: ['violations']}"  # of rules that pass, one element each
    found = browser.driver.execute_async_script(f"axe.run({quick}).then(arguments[arguments.length - 1])")
    assert len(found["passes"]) > 20
    assert [f"{one['id']}: {one['nodes'][0]['html']}" for one in found["violations"]] == []


def test_the_cure_can_be_copied(sample: Browser) -> None:
    button = sample.one("button.copy")
    button.click()
    sample.run("return new Promise(done => setTimeout(done, 200))")
    assert button.text in ("Copied", "Selected")
    assert sample.run("return getSelection().toString()") == sample.one("#verdict pre code").text

"""The page of a run as HTML: all there, nothing that could run, small enough to mail."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import matplotlib
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from clamp.cli import main
from clamp.debug.memory_meter import KINDS
from clamp.debug.memory_report import Moment
from clamp.debug.page import sections
from clamp.debug.page.figures import HELD, _draw, memory_timeline
from clamp.debug.page.ranges import shifted
from clamp.debug.page.schema import BINS, Held
from clamp.debug.page.sections import number, percent
from clamp.debug.words import duration, size
from clamp.report import Run, page_of, write_page, write_run
from tests.debug.sample import BROKEN, empty_run, hostile_run, large_run, sample_run

SECTIONS = ("verdict", "facts", "first-bad", "modules", "timeline", "ranges", "updates", "ops", "memory")
NO_END = {"meta", "link", "input"}


class Outline(HTMLParser):
    """Elements in their order, ids, and text; checks that all are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in NO_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.elements)

    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.elements if "id" in attributes]


@pytest.fixture(scope="module", autouse=True)
def drawn_once() -> Iterator[Callable[[], None]]:
    """To draw takes a second a page: the same figure of the same numbers is kept from test to test, until this is
    called."""
    figures: dict[str, Any] = {}

    def drawn(draw: Callable[..., Any], *numbers: Any) -> Any:
        key = f"{draw.__name__} {numbers!r}"
        if key not in figures:
            figures[key] = draw(*numbers)
        return figures[key]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("timeline", "ranges", "memory_timeline"):
            patch.setattr(sections, name, partial(drawn, getattr(sections, name)))
        yield figures.clear


@pytest.fixture(scope="module")
def sample(drawn_once: Callable[[], None]) -> str:
    return page_of(sample_run())


def test_every_section_is_there(sample: str) -> None:
    page = Outline(sample)
    assert [one for one in page.ids() if one in SECTIONS] == list(SECTIONS)
    assert page.count("h1") == page.count("main") == page.count("header") == page.count("nav") == 1
    for words in (
        "overflows float16 in the forward",
        'handle = amp.init(custom_black_list=["netcl.autograd.matmul_op"])',
        "893 elements of its float16 result are inf.",
        "12 skipped steps as a table",
        "step 216 skipped: nan in 264192 elements",
        "gradients at the suggested loss scale, 524,288",
        "first inf: matmul_op, forward",
        "bfloat16 loses 41 % of the updates of blocks.2.attention, whose weights",
        "Adam's eps, 1e-08, is below",
        "98 ops",
        "Activations take 48 % less than in float32",
        "141 MiB",
        "At the peak 31.2 MiB are held, in cross_entropy (char_lm.py:112).",
        "Who holds the peak",
    ):
        assert words in page.text, words


def test_ids_are_unique_and_what_refers_to_one_finds_it(sample: str) -> None:
    ids = Outline(sample).ids()
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:href="#|url\(#|aria-labelledby=")([\w-]+)', sample)
    assert len(references) > 20
    assert set(references) <= set(ids)


def test_it_asks_for_nothing(sample: str) -> None:
    for element, attributes in Outline(sample).elements:
        assert element not in ("img", "iframe", "object", "embed", "base"), element
        assert "src" not in attributes
        assert all(value.startswith(("#", "data:")) for key, value in attributes.items() if "href" in key)
    assert not re.search(r"@import|url\((?!#)|https?://", sample)
    assert "default-src 'none'" in sample


def test_what_is_drawn_by_backgrounds_is_printed(sample: str) -> None:
    """Which browsers leave out."""
    printed = sample.partition("@media print {")[2].partition("\n}")[0]
    rule = next(line for line in printed.splitlines() if "print-color-adjust: exact" in line)
    assert all(drawn in rule for drawn in (".bars i", ".track", ".key"))


def test_of_a_large_model_only_the_branches_with_the_bad_op_are_open() -> None:
    run = sample_run()
    paths = ["", *(f"blocks.{block}{part}" for block in range(30) for part in ("", ".first", ".first.inner"))]
    run["modules"] = [{"path": path, "class": "Block", "parameters": 1} for path in paths]
    run["first_bad"]["module"] = "blocks.2.first.inner"
    opened = re.findall(r"<details open><summary>\s*<span><b>(\w+)</b>", page_of(run))
    assert opened == ["model", "blocks", "2", "first"]


def test_a_page_of_the_same_run_is_the_same_and_the_style_of_other_pictures_their_own(
    drawn_once: Callable[[], None], sample: str
) -> None:
    drawn_once()
    style = {"axes.grid": True, "lines.linewidth": 9.0, "text.usetex": True, "figure.facecolor": "red"}
    with matplotlib.rc_context(style):
        assert page_of(sample_run()) == sample
        assert {name: matplotlib.rcParams[name] for name in style} == style  # type: ignore[index]


def test_nothing_of_a_run_is_taken_for_markup() -> None:
    page = page_of(hostile_run(sample_run()))
    found = Outline(page)
    assert found.count("script") == found.count("style") == found.count("main") == 1
    assert "<script>alert" not in page
    assert "<img" not in page
    assert not [key for _, attributes in found.elements for key in attributes if key.startswith("on")]
    assert page.count("</script>") == page.count("</style>") == 1
    assert '<script>alert("1")</script>' in found.text, "and yet it can be read"


def test_a_page_of_nothing_says_so() -> None:
    page = Outline(page_of(empty_run()))
    # Where nothing went wrong there is no box for it, and no link to one.
    missing = {"first-bad", "updates"}
    assert [one for one in page.ids() if one in SECTIONS] == [one for one in SECTIONS if one not in missing]
    assert not missing & {(attributes.get("href") or "")[1:] for _, attributes in page.elements}
    assert page.count("svg") == page.count("table") == 0
    nothing = ("No step was recorded.", "No ranges were collected.", "No op was recorded.", "Memory was not measured.")
    for words in ("The modules are not known.", *nothing):
        assert words in page.text
    assert "Change this" not in page.text


@pytest.mark.parametrize("part", ["steps", "ops", "ranges", "modules", "first_bad", "suggested_scale"])
@pytest.mark.long
def test_each_part_may_be_missing(part: str) -> None:
    run: Any = sample_run()
    run[part] = empty_run()[part]  # type: ignore[literal-required]
    page = Outline(page_of(run))
    assert set(SECTIONS) - set(page.ids()) == ({"first-bad"} if part == "first_bad" else set())


def test_values_may_be_unknown_or_not_finite() -> None:
    run: Any = sample_run()
    for op in run["ops"]:
        op["milliseconds"] = op["function"] = None
    for step, value in zip(run["steps"], (float("nan"), float("inf"), -1.0, 0.0, None) * 50, strict=False):
        step["loss"] = step["gradient_norm"] = value
        step["scale"] = float("inf") if value is None else 0.0
    for one in run["ranges"]:
        one |= {"octaves": [0] * BINS, "smallest": float("inf"), "largest": float("-inf"), "underflow": float("nan")}
        one["scale"] = 0.0
    for one in run["first_bad"]["inputs"]:
        one |= {"smallest": 0.0, "largest": float("inf")}
    run["suggested_scale"], run["ranges"][1]["scale"] = 1e300, 1e-300
    run["steps"].reverse()
    run["memory"] |= {"float32_peak": 0, "float32_activations": None}
    page = Outline(page_of(run))
    assert set(SECTIONS) <= set(page.ids())
    assert not re.search(r"\bnan %|\binf %|\bNone\b", page.text)


@pytest.mark.parametrize("kind", ["healthy", "overflow", "not finite", "slow", "unknown"])
def test_a_verdict_of_every_kind_has_its_word_and_colour(kind: Any) -> None:
    run = empty_run()
    run["verdict"]["kind"] = kind
    page = page_of(run)
    assert kind.capitalize() in Outline(page).text
    assert f'class="card verdict {kind.replace(" ", "-")}"' in page
    assert f".{kind.replace(' ', '-')}" in (files("clamp.debug.page") / "page.css").read_text()


@pytest.mark.slow
def test_a_thousand_steps_and_three_hundred_ops_are_below_two_megabytes(tmp_path: Path) -> None:
    write_page(large_run(), tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size < 2_000_000


def test_the_first_bad_op_is_lit_where_it_is(sample: str) -> None:
    (row,) = re.findall(r'<tr class="bad".*?</tr>', sample, re.DOTALL)
    assert BROKEN in row
    assert "char_lm.py:74" in row
    assert ">forward<" in row
    assert "<strong>first inf</strong>" in row
    (item,) = re.findall(r'<li class="bad"><span>(.*?)</span><a ', sample)
    assert item.startswith("<b>attention</b>")


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_without_matplotlib_it_says_what_to_install(
    library: str, monkeypatch: pytest.MonkeyPatch, drawn_once: Callable[[], None]
) -> None:
    drawn_once()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {library}"):
        page_of(sample_run())
    if library == "matplotlib":
        assert page_of(empty_run()), "nothing is drawn"


@pytest.mark.slow
@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_whatever_a_run_holds_the_page_is_whole(data: st.DataObject) -> None:
    basic = {str: st.text(max_size=40), int: st.integers(0, 2**50), float: st.floats(width=32)}

    def any_of(kind: Any) -> st.SearchStrategy[Any]:
        if is_typeddict(kind):
            return st.fixed_dictionaries({key: any_of(hint) for key, hint in get_type_hints(kind).items()})
        if get_origin(kind) is list:
            return st.lists(any_of(get_args(kind)[0]), max_size=5)
        if get_origin(kind) is UnionType:
            return st.none() | any_of(get_args(kind)[0])
        return basic.get(kind, st.from_type(kind))

    run = data.draw(any_of(Run)) | {"version": 1}
    for one in run["ranges"]:
        one["octaves"] = data.draw(st.lists(st.integers(0, 10**6), min_size=BINS, max_size=BINS))
    page = Outline(page_of(run))
    assert page.count("main") == page.count("h1") == 1
    assert page.text.rstrip()


# ---------------------------------------------------------------------------------------------- pieces


def test_markup_escapes_what_is_not_markup() -> None:
    run = empty_run()
    run["verdict"]["headline"] = "`a<b` & `c"
    assert "<h1><code>a&lt;b</code> &amp; `c</h1>" in page_of(run)


@pytest.mark.parametrize(
    ("by", "places"),
    [
        (0, {0: 5, 1: 1, 20: 2, 40: 3, 41: 7}),
        (1, {0: 5, 2: 1, 21: 2, 41: 10}),
        (-1, {0: 6, 19: 2, 39: 3, 41: 7}),
        (99, {0: 5, 41: 13}),
    ],
)
def test_a_shifted_histogram_keeps_what_leaves_the_range(by: int, places: dict[int, int]) -> None:
    octaves = [0] * BINS
    for place, count in {0: 5, 1: 1, 20: 2, 40: 3, 41: 7}.items():
        octaves[place] = count
    assert {place: count for place, count in enumerate(shifted(octaves, by)) if count} == places


def test_numbers_in_words() -> None:
    sizes = (None, 0, 1023, 1536, 3 << 20, 5 << 30)
    assert [size(count) for count in sizes] == ["—", "0 bytes", "1,023 bytes", "1.5 KiB", "3 MiB", "5 GiB"]
    parts = (0.0, 1e-9, 0.0123, 1.0, float("nan"))
    assert [percent(x).shown for x in parts] == ["0 %", "< 0.01 %", "1.23 %", "100 %", "—"]
    spans = (0.0031, 1.24, 200.0, 7500.0, float("inf"), float("nan"))
    assert [duration(x) for x in spans] == ["3.1 ms", "1.24 s", "3 min 20 s", "2 h 5 min", "—", "—"]
    assert [number(x).shown for x in (None, 12345, 0.000123456)] == ["—", "12,345", "0.0001235"]


def test_loss_scale_and_norm_stand_over_the_same_steps() -> None:
    figure = Figure()
    _draw(figure, [{**step, "gradient_norm": None} for step in sample_run()["steps"]], [])
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_memory_is_drawn_op_by_op_to_its_peak() -> None:
    run = sample_run()
    assert set(Held.__annotations__) == set(KINDS)
    assert {kind for kinds, _ in HELD.values() for kind in kinds} == set(KINDS) - {"free"}
    moments = [Moment(**one) for one in run["memory"]["timeline"]]
    peak = size(max(moment.held for moment in moments))
    for timeline in (moments, moments * 10):  # of more moments than are drawn
        drawn = memory_timeline(timeline)
        assert f"the peak, {peak}, is in cross_entropy (char_lm.py:112)" in drawn
        for version in re.findall(r"<svg.*?</svg>", drawn, re.DOTALL):
            assert f"peak, {peak}" in version
            colours = set(re.findall(r"fill: var\(--(\w+)\)", version))
            assert colours >= {"parameter", "scale", "good", "gradient", "activation", "norm", "line"}
        assert len(drawn) < 400_000
    assert "peak, 0 bytes" in memory_timeline([moments[0]._replace(bytes=dict.fromkeys(KINDS, 0))])
    assert memory_timeline([]) == ""


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb", as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast(scheme: str) -> None:
    css = (files("clamp.debug.page") / "page.css").read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    colours = {name: dark if scheme == "dark" else light for name, light, dark in found}

    def contrast(one: str, other: str) -> float:
        darker, brighter = sorted((luminance(colours[one]), luminance(colours[other])))
        return (brighter + 0.05) / (darker + 0.05)

    texts = [(text, paper) for text in ("ink", "muted", "link", "bad") for paper in ("paper", "page", "well")]
    texts += [("ink", "lit"), ("muted", "lit"), ("bad", "lit"), ("good", "paper"), ("warn", "paper")]
    texts += [("muted", "normal"), ("muted", "subnormal"), ("ink", "normal"), ("bad", "normal")]
    assert {pair: contrast(*pair) for pair in texts if contrast(*pair) < 4.5} == {}
    drawn = ("loss", "scale", "norm", "activation", "gradient", "parameter", "amp", "float32", "edge", "bad", "good")
    assert {name: contrast(name, "paper") for name in drawn if contrast(name, "paper") < 3} == {}


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: str) -> None:
    file, page = tmp_path / "run.json", tmp_path / "page.html"
    write_run(sample_run(), file)
    assert main(["report", str(file), "-o", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert page.read_text("utf-8") == sample
    assert main(["report", str(file)]) == 0
    assert (tmp_path / "run.html").read_bytes() == page.read_bytes()


@pytest.mark.slow
def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, drawn_once: Callable[[], None]
) -> None:
    drawn_once()
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    file = tmp_path / "run.json"
    file.write_text('{"version": 7}')
    assert main(["report", str(file)]) == 2
    assert "version 7" in capsys.readouterr().err
    write_run(empty_run(), file)
    assert main(["report", str(file), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot write" in capsys.readouterr().err
    write_run(sample_run(), file)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(file)]) == 1
    assert capsys.readouterr().err.endswith("pip install matplotlib\n")
    assert not (tmp_path / "run.html").exists()

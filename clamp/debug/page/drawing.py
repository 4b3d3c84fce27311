"""matplotlib's pictures as part of a page: its SVG, in the page's colours and type, for people who listen, too."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from clamp.debug.page.markup import Markup, tag

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = {"wide": 1080, "narrow": 340}  # CSS pixels that a picture is drawn for; page.css shows one of them

_NAMES = (
    *("ink", "muted", "line", "bad", "loss", "scale", "norm", "activation", "gradient", "parameter"),
    *("normal", "subnormal", "amp", "float32"),
)
COLOUR = {name: f"#0101{number:02x}" for number, name in enumerate(_NAMES)}  # stands for --name of page.css
_NAME = {colour: name for name, colour in COLOUR.items()}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Draw = Callable[["Figure", bool], None]
Marks = Mapping[str, Sequence[str]]


def picture(name: str, label: str, draw: Draw, height: Callable[[bool], int], marks: Marks | None = None) -> Markup:
    """A picture, once for wide and once for narrow windows.

    Args:
        name: begins the ids of its parts, and its class in page.css.
        label: what is to be seen, for people who do not see it.
        draw: takes an empty figure, and whether it is narrow, and draws in colours of ``COLOUR``.
        height: of a narrow one, or not, in CSS pixels.
        marks: by the gid of a scatter, a sentence for each of its points, which then takes the keyboard's focus.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    versions = []
    for form, width in WIDTHS.items():
        with _figure(width, height(form == "narrow")) as figure:
            draw(figure, form == "narrow")
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        versions.append(_inlined(drawn.getvalue(), f"{name}-{form}", label, marks or {}))
    return tag("div", *versions, class_=f"picture {name}")


def plain_axes(axes: Axes) -> None:
    """Takes away what is not needed: the frame, and marks on the axes."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)


def power(base: int, exponent: float) -> str:
    """``power(2, -14)`` is "2⁻¹⁴"."""
    return f"{base}{f'{exponent:g}'.translate(_SUPERSCRIPTS)}"


def shortened(text: str, length: int) -> str:
    """The end of a long name: what is before it tells least."""
    return text if len(text) <= length else f"…{text[1 - length :]}"


@contextmanager
def _figure(width: int, height: int) -> Iterator[Figure]:
    """A figure of so many pixels, with settings under which names are drawn as they are."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the page of a run is drawn with matplotlib, which is not installed: pip install matplotlib",
            name=error.name,
        ) from error
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "clamp",  # the same bytes in every run
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 12,
        "text.color": COLOUR["ink"],
        "axes.labelcolor": COLOUR["ink"],
        "axes.edgecolor": COLOUR["line"],
        "xtick.color": COLOUR["muted"],
        "ytick.color": COLOUR["muted"],
        "grid.color": COLOUR["line"],
        "grid.linewidth": 1,
        "lines.linewidth": 1.6,
    }  # fmt: skip
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # whatever style the user's own pictures have
        matplotlib.rcParams.update(settings)
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # only measured in it; the reader's has them
        yield Figure(figsize=(width / 72, height / 72), layout="constrained")


def _inlined(drawn: str, name: str, label: str, marks: Marks) -> Markup:
    """The SVG as an element of the page."""
    root = ElementTree.fromstring(drawn)
    groups = {part.get("id"): part for part in root.iter(f"{_SVG}g")}
    parents = {part: parent for parent in root.iter() for part in parent}
    for part, parent in parents.items():
        if part.tag in (f"{_SVG}metadata", f"{_SVG}style"):  # styles would be those of the whole page
            parent.remove(part)
    for part in root.findall(f"{_SVG}g"):
        part.set("aria-hidden", "true")
    for gid, sentences in marks.items():
        parents[groups[gid]].remove(groups[gid])
        root.append(_focusable(groups[gid], sentences))
    used = set[str | None](re.findall(r'(?:url\(#|href="#)([\w-]+)', drawn))
    for part in root.iter():
        _adapt(part, name, used)
    form = name.rpartition("-")[2]
    root.attrib = {"viewBox": root.attrib["viewBox"], "class": form, "aria-label": label}
    root.set("role", "group" if marks else "img")
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _focusable(group: ElementTree.Element, sentences: Sequence[str]) -> ElementTree.Element:
    """A scatter as what assistive technology reads and the keyboard reaches; arrows move in it (page.js)."""
    group.attrib |= {"class": "marks", "role": "group", "aria-label": "marks"}
    for number, (point, sentence) in enumerate(zip(group.iter(f"{_SVG}use"), sentences, strict=True)):
        group.set("style", point.attrib.pop("style"))
        point.attrib |= {"tabindex": "-1" if number else "0", "role": "img"}
        ElementTree.SubElement(point, f"{_SVG}title").text = sentence
    return group


def _adapt(part: ElementTree.Element, name: str, used: Container[str | None]) -> None:
    """Makes ids the picture's own, colours and type the page's, and numbers short."""
    if (own := part.attrib.pop("id", None)) in used:
        part.set("id", f"{name}-{own}")
    if reference := part.attrib.pop(_LINK, None):
        part.set("href", f"#{name}-{reference[1:]}")
    if "clip-path" in part.attrib:
        part.set("clip-path", part.attrib["clip-path"].replace("url(#", f"url(#{name}-"))
    for key in {"d", "x", "y", "transform"} & part.attrib.keys():
        part.set(key, re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), 1):g}", part.attrib[key]))
    if style := part.get("style"):
        style = re.sub(r"#0101\w\w", lambda colour: f"var(--{_NAME[colour[0]]})", style)
        part.set("style", re.sub("'DejaVu Sans'[^;]*", "var(--type)", re.sub("font-family: [^;]*; ?", "", style)))
    if part.get("transform", "").startswith("rotate(-0 "):
        del part.attrib["transform"]
    part.tag = part.tag.removeprefix(_SVG)
    if part.tag not in ("text", "title"):
        part.text = None
    part.tail = None

"""The figures of a page: matplotlib's SVG, in the page's colours and type, for people who listen, too."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from clamp.debug.memory_report import Moment
from clamp.debug.page.schema import Step
from clamp.debug.words import placed, size
from clamp.interrupts import contextmanager, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTHS = {"wide": 1080, "narrow": 340}  # CSS pixels that a picture is drawn for; page.css shows one of them

_NAMES = (
    *("ink", "muted", "line", "bad", "loss", "scale", "norm", "activation", "gradient", "parameter"),
    *("normal", "subnormal", "good", "edge"),
)
COLOUR = {name: f"#0101{place:02x}" for place, name in enumerate(_NAMES)}  # stands for --name of page.css
_NAME = {colour: name for name, colour in COLOUR.items()}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Draw = Callable[["Figure", bool], None]
Marks = Mapping[str, Sequence[str]]


def picture(name: str, label: str, draw: Draw, heights: tuple[int, int], marks: Marks | None = None) -> str:
    """A picture as an element of HTML, once for wide and once for narrow windows.

    Args:
        name: begins the ids of its parts, and its class in page.css.
        label: what is to be seen, for people who do not see it.
        draw: takes an empty figure, and whether it is narrow, and draws in colours of ``COLOUR``.
        heights: of a wide one, and of a narrow one, in CSS pixels.
        marks: by the gid of a scatter, a sentence for each of its points, which then takes the keyboard's focus.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    versions = []
    missing = "the page of a run is drawn with matplotlib, which is not installed: pip install matplotlib"
    for (form, width), height in zip(WIDTHS.items(), heights, strict=True):
        with empty_figure(width, height, COLOUR, missing) as figure:
            draw(figure, form == "narrow")
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        versions.append(_inlined(drawn.getvalue(), f"{name}-{form}", label, marks or {}))
    return f'<div class="picture {name}">{"".join(versions)}</div>'


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
def empty_figure(width: int, height: int, colour: Mapping[str, str], missing: str) -> Iterator[Figure]:
    """A figure of so many pixels, with settings under which names are drawn as they are.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says what is ``missing``.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing, name=error.name) from error
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "clamp",  # the same bytes in every run
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 12,
        "text.color": colour["ink"],
        "axes.labelcolor": colour["ink"],
        "axes.edgecolor": colour["line"],
        "xtick.color": colour["muted"],
        "ytick.color": colour["muted"],
        "grid.color": colour["line"],
        "grid.linewidth": 1,
        "lines.linewidth": 1.6,
    }  # fmt: skip
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # whatever style the user's own pictures have
        matplotlib.rcParams.update(settings)
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # only measured in it; the reader's has them
        yield Figure(figsize=(width / 72, height / 72), layout="constrained")


def save(figure: Figure, path: str | PathLike[str], dpi: int) -> None:
    """Writes a picture as a whole, in the format that the path ends in; in PNG where it ends in none.

    Raises:
        ValueError: matplotlib has no such format.
        OSError: the file cannot be written.
    """
    path = Path(path)
    kind = path.suffix[1:].lower() or "png"
    with replacing(path if path.suffix else path.with_name(f"{path.name}.png"), "wb") as file:
        figure.savefig(file, format=kind, dpi=dpi)


def _inlined(drawn: str, name: str, label: str, marks: Marks) -> str:
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
    return ElementTree.tostring(root, encoding="unicode")


def _focusable(group: ElementTree.Element, sentences: Sequence[str]) -> ElementTree.Element:
    """A scatter as what assistive technology reads and the keyboard reaches; arrows move in it (page.js)."""
    group.attrib |= {"class": "marks", "role": "group", "aria-label": "marks"}
    for index, (point, sentence) in enumerate(zip(group.iter(f"{_SVG}use"), sentences, strict=True)):
        group.set("style", point.attrib.pop("style"))
        point.attrib |= {"tabindex": "-1" if index else "0", "role": "img"}
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


# ---------------------------------------------------------------------------------------------- the steps


_STEEP = 50.0  # a loss that changes by more than this factor is drawn on a logarithmic axis
_MARKS = "skipped"
_TICKS = 6  # at most, on a logarithmic axis


def timeline(steps: Sequence[Step], skipped: Sequence[Step]) -> str:
    """The picture, with marks at the skipped ones that can be pointed at; empty without steps."""
    if not steps:
        return ""
    steps = sorted(steps, key=lambda step: step["step"])
    label = (
        f"Loss, loss scale and gradient norm of steps {steps[0]['step']} to {steps[-1]['step']}; {len(skipped)} skipped"
    )

    def sentence(step: Step) -> str:
        before, after = step["scale_before"], step["scale"]
        moves = "" if before == after else f"; loss scale {before:g} → {after:g}"
        return f"step {step['step']} skipped: {step['reason']}{moves}"

    marks = {_MARKS: list(map(sentence, skipped))} if skipped else None
    return picture("timeline", label, lambda figure, narrow: _draw(figure, steps, skipped), (470, 430), marks)


def _draw(figure: Figure, steps: Sequence[Step], skipped: Sequence[Step]) -> None:
    loss, scale, norm = figure.subplots(3, 1, sharex=True, height_ratios=(5, 4, 4))
    numbers = [step["step"] for step in steps]
    for axes in (loss, scale, norm):
        plain_axes(axes)
        axes.grid(axis="y")
    if skipped:
        behind = figure.add_subplot(loss.get_gridspec()[:, 0], sharex=loss, zorder=-1, ylim=(0, 1))
        behind.axis("off")
        # Bands over them begin with a 1 and end with a 0: one shape for a thousand of them.
        edges = dict(edge for step in skipped for edge in ((step["step"] - 0.5, 1), (step["step"] + 0.5, 0)))
        style: Any = {"step": "post", "color": COLOUR["bad"], "alpha": 0.16, "linewidth": 0}
        behind.fill_between(list(edges), list(edges.values()), **style)
    _curve(loss, numbers, [step["loss"] for step in steps], "loss", steep=_STEEP)
    _curve(norm, numbers, [step["gradient_norm"] for step in steps], "norm", steep=1)
    _scales(scale, numbers, [step["scale"] for step in steps])
    for axes, title in ((loss, "Loss"), (scale, "Loss scale"), (norm, "Gradient norm")):
        axes.set_title(title, loc="left", fontsize=12.5, weight="bold", pad=10)
    if skipped:
        top = scale.get_ylim()[1]
        scale.scatter(
            [step["step"] for step in skipped], [top] * len(skipped), marker="v", s=60, color=COLOUR["bad"],
            clip_on=False, gid=_MARKS,
        )  # fmt: skip
        scale.set_ylim(top=top)
    norm.set_xlabel("step")
    norm.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    norm.locator_params("x", integer=True, nbins=6)


def _curve(axes: Axes, numbers: Sequence[int], values: Sequence[float | None], colour: str, *, steep: float) -> None:
    """A curve with gaps where nothing is known, and crosses on top where the value was inf or nan.

    The axis is logarithmic if all are positive and differ by more than a factor of ``steep``.
    """
    known = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    lost = [n for n, value in zip(numbers, values, strict=True) if value is not None and not math.isfinite(value)]
    finite = [value for value in known if not math.isnan(value)]
    axes.plot(numbers, known, color=COLOUR[colour], marker="o" if len(numbers) < 40 else "", markersize=3)
    ticks = _log_ticks(min(finite), max(finite)) if finite and 0 < steep * min(finite) < max(finite) else []
    if len(ticks) > 1:
        axes.set_yscale("log")
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    elif finite:
        axes.locator_params("y", nbins=5)
    inside: Any = {"transform": axes.get_xaxis_transform(), "color": COLOUR["bad"]}
    if lost:
        axes.plot(lost, [0.94] * len(lost), "x", **inside)
        axes.text(numbers[-1] + 0.5, 1.03, "x: inf or nan", fontsize=11, ha="right", va="bottom", **inside)
    if not finite:
        axes.set(yticks=[], ylim=(0, 1))
        words = "never finite" if lost else "not recorded"
        axes.text(0.5, 0.5, words, color=COLOUR["muted"], ha="center", va="center", transform=axes.transAxes)


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that lie between, or, of many, some of the powers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    ticks = [tick for tick in every if low <= tick <= high]
    if len(ticks) <= _TICKS:
        return ticks
    powers = [10.0**decade for decade in decades if low <= 10.0**decade <= high]
    return powers[:: math.ceil(len(powers) / _TICKS)]


def _scales(axes: Axes, numbers: Sequence[int], scales: Sequence[float]) -> None:
    """Powers of two, mostly: on the axis are their exponents."""
    exponents = [math.log2(scale) if math.isfinite(scale) and scale > 0 else math.nan for scale in scales]
    axes.step(numbers, exponents, where="mid", color=COLOUR["scale"])
    finite = [exponent for exponent in exponents if not math.isnan(exponent)] or [0.0]
    axes.set_ylim(min(finite) - 0.7, max(finite) + 1.3)
    axes.locator_params("y", integer=True, nbins=5)
    axes.yaxis.set_major_formatter(lambda exponent, _: power(2, exponent))


# ---------------------------------------------------------------------------------------------- memory, op by op

#: bytes of a moment, without what is free in a pool
held = attrgetter("held")
#: what the layers of the picture are of, from below, with their colours
HELD = {
    "weights, masters": (("weights", "masters"), "parameter"),
    "optimizer state": (("optimizer state",), "scale"),
    "16-bit copies of weights": (("copies",), "good"),
    "gradients": (("gradients",), "gradient"),
    "activations": (("activations",), "activation"),
    "workspaces": (("workspaces",), "norm"),
    "other tensors, recordings, rounding": (("other tensors", "recordings", "rounding"), "line"),
}
_MOMENTS = 160  # of more, as many stretches, of each the one when most was held


def memory_timeline(steps: Sequence[Moment]) -> str:
    """The picture: what was held in each op of a step, and the peak; empty without ops."""
    if not steps:
        return ""
    each = math.ceil(len(steps) / _MOMENTS)
    moments = [max(steps[begin : begin + each], key=held) for begin in range(0, len(steps), each)]
    peak = max(moments, key=held)
    where = placed(*peak[:3])

    def draw(figure: Figure, narrow: bool) -> None:
        _draw_held(figure.subplots(), moments, moments.index(peak), where, 24 if narrow else 80)

    label = f"Device memory in {len(steps)} moments of a step; the peak, {size(peak.held)}, is in {where}"
    return picture("held", label, draw, (360, 320))


def _draw_held(axes: Axes, moments: Sequence[Moment], peak: int, where: str, length: int) -> None:
    plain_axes(axes)
    axes.grid(axis="y")
    places = range(len(moments) + 1)  # an op's moment lasts until the next one's
    layers = [[sum(x.bytes[kind] for kind in kinds) for x in (*moments, moments[-1])] for kinds, _ in HELD.values()]
    colours = [COLOUR[colour] for _, colour in HELD.values()]
    axes.stackplot(places, *layers, colors=colours, step="post", linewidth=0)
    most = moments[peak].held or 1
    each = 2.0 ** math.ceil(math.log2(most / 5))  # bytes from one line to the next
    ticks = [each * number for number in range(int(most / each) + 1)]
    axes.set(xlim=(0, len(moments)), ylim=(0, 1.3 * most), xticks=[])
    axes.set_yticks(ticks, ["0", *map(size, ticks[1:])])
    axes.axvline(peak + 0.5, color=COLOUR["bad"], linewidth=1.2)
    is_left = peak < len(moments) / 2
    axes.annotate(
        f"peak, {size(most)}\n{shortened(where, length)}",
        (peak + 0.5, 1.28 * most), (6 if is_left else -6, 0), textcoords="offset points", color=COLOUR["bad"],
        ha="left" if is_left else "right", va="top", fontsize=11,
    )  # fmt: skip
    backward = next((place for place, moment in enumerate(moments) if moment.op.endswith(" backward")), None)
    if backward:
        axes.axvline(backward, color=COLOUR["edge"], linewidth=1, linestyle=":")
        axes.set_xticks([backward], ["backward begins"])
        axes.get_xticklabels()[0].set_horizontalalignment("left" if backward < len(moments) / 2 else "right")
    axes.set_xlabel("the ops of a step, in order")

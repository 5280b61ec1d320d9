"""The one style of all figures, and the two forms they leave in: a PNG file, and an SVG inside an HTML page.

    figure, axes = new_figure(6, 3.5)
    axes.plot(steps, loss, label="loss", **series(0))
    legend(axes)
    save(figure, epath.Path("loss.png"))

Figures are matplotlib's own objects without pyplot: nothing is kept between them, and whatever else a process plots
is left alone.
"""

import hashlib
import io
import re
import textwrap
from typing import Any
from xml.etree import ElementTree

import matplotlib
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nca_jax.files import is_bucket

# Each has a contrast of 3 or more to white and to the dark page (WCAG 2.2's floor for graphics), and every two of them
# are CIELAB 17 or more apart for readers with normal sight and with each kind of colour blindness.
COLOURS = ("#6281ff", "#d28100", "#3ca296", "#9a5102", "#306b84", "#8c8cd1", "#8b5852", "#a58f57")
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

# Nothing of a figure but its series is drawn in other colours than these two. In a page they become custom properties,
# so that the page says what they are, in light and in dark.
INK, GRID = "#1b1d1f", "#d8dbdf"
_PROPERTIES = {INK: f"var(--ink, {INK})", GRID: f"var(--grid, {GRID})"}

_DOTS_PER_INCH = 160
_LEGEND = {"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 2.6}
_LETTERS_PER_INCH = 13  # of a legend's text, at least
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "#ffffff",
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": GRID,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": GRID,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
}


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **subplots: Any) -> tuple[Figure, Any]:
    """An empty figure in the style.

    Args:
      width, height: inches.
      rows, columns: of the grid of axes.
      **subplots: for matplotlib's `Figure.subplots`, such as sharex=True.

    Returns:
      The figure, and its axes as `Figure.subplots` gives them: one, or an array where there are several.
    """
    # What the user has set for other plots does not change ours.
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **subplots)


def series(i: int) -> dict[str, Any]:
    """matplotlib's arguments of the line of series i: colour, marker and line style together tell it from others."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINE_STYLES[i // len(COLOURS) % len(LINE_STYLES)],
        "markersize": 4.0,
        "linewidth": 1.6,
    }


def title(axes: Axes, text: str) -> None:
    """What one of the axes shows, above it."""
    axes.set_title(text, loc="left", fontsize=9.5, color=INK)


def legend(axes: Axes, **arguments: Any) -> None:
    """A legend of the axes' labelled lines, inside them; with `arguments` for matplotlib."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**_LEGEND | arguments)


def legend_below(axes: Axes) -> None:
    """The same for a figure's only axes, below them, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    fits = int(_LETTERS_PER_INCH * axes.figure.get_figwidth())
    columns = 2 if len(labels) > 1 and max(map(len, labels)) <= fits // 2 - 4 else 1
    lines = [textwrap.fill(label, fits - 4) for label in labels]
    axes.figure.legend(handles, lines, loc="outside lower left", ncols=columns, **_LEGEND)


def save(figure: Figure, path: epath.Path) -> None:
    """A PNG on white, complete or not there at all."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=_DOTS_PER_INCH, facecolor="#ffffff", metadata={"Software": None})
    if is_bucket(path):
        path.write_bytes(image.getvalue())
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(image.getvalue())
    temporary.replace(path)


def inline_svg(figure: Figure, title: str) -> str:
    """An SVG element for an HTML page: as wide as its place, text as text, the same characters every time.

    It is drawn in the page's custom properties --ink and --grid where it has them, else in their light values. Several
    can be in one page: no two share an id, as long as they differ in anything.

    Args:
      title: what the figure shows, for those who hear the page.
    """
    text = io.StringIO()
    # The salt makes ids from what they name; text stays text, which can be searched, selected and read out.
    with matplotlib.rc_context({"svg.hashsalt": "nca_jax", "svg.fonttype": "none"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _as_element(text.getvalue(), title)


def _as_element(svg: str, title: str) -> str:
    """A file of matplotlib's SVG as an element of a page."""
    root = ElementTree.fromstring(svg)
    figure = ElementTree.Element("svg", {"viewBox": root.attrib["viewBox"], "width": "100%", "role": "img"})
    figure.attrib["style"] = "stroke-linejoin: round; stroke-linecap: butt"
    figure.extend(root)
    for parent in list(figure.iter()):
        for sheet in parent.findall("{*}style"):  # it would be one for the whole page
            parent.remove(sheet)
    mark = "f" + hashlib.sha256((title + svg).encode()).hexdigest()[:8]
    for element in figure.iter():
        # In HTML the element names alone say that they are SVG's, and xlink is out of use.
        element.tag = element.tag.rpartition("}")[2]
        if not (element.text or "").strip():
            element.text = None
        element.tail = None
        element.attrib = {
            name.rpartition("}")[2]: _rewritten(name.rpartition("}")[2], value, mark)
            for name, value in element.attrib.items()
        }
    name = ElementTree.Element("title", {"id": f"{mark}-title"})
    name.text = title
    figure.insert(0, name)
    figure.attrib["aria-labelledby"] = f"{mark}-title"
    return ElementTree.tostring(figure, encoding="unicode")


def _rewritten(name: str, value: str, mark: str) -> str:
    """The value of an attribute, with ids that are the figure's own and colours and fonts that are the page's."""
    if name == "id":
        return f"{mark}-{value}"
    if name == "href":
        return value.replace("#", f"#{mark}-")
    value = value.replace("url(#", f"url(#{mark}-")
    for colour, custom in _PROPERTIES.items():
        value = value.replace(colour, custom)
    return re.sub(r"font-family: [^;]*", "font-family: system-ui, sans-serif", value)

"""The style of figures: who can tell its lines apart, and the two forms in which they leave."""

import io
import re
import subprocess
import sys
from importlib import resources
from itertools import combinations
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from etils import epath
from PIL import Image

from nca_jax.plotting import COLOURS, inline_svg, legend, legend_below, new_figure, save, series, title

# Severity 1 of Machado, Oliveira and Fernandes 2009, on linear RGB, and the identity for normal sight.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def drawn(label="a & <b>", height=3.0):
    figure, axes = new_figure(4.0, height)
    axes.plot([0, 1, 2], [1, 3, 2], label=label, **series(0))
    axes.plot([0, 1, 2], [2, 1, 3], label="other", **series(1))
    title(axes, "what it shows")
    legend_below(axes)
    return figure


def linear(colour: str) -> np.ndarray:
    """Linear RGB of "#rrggbb", by the definition of sRGB."""
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2.2."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB, for the white of sRGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb / (to_xyz @ np.ones(3))
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def papers() -> list[str]:
    """The page's background in light and in dark."""
    return re.findall(r"--paper: (#\w+)", resources.files("nca_jax.page").joinpath("report.css").read_text())


@pytest.mark.parametrize("colour", COLOURS)
def test_every_colour_is_seen_on_a_white_and_on_a_dark_page(colour):
    light, dark = papers()
    assert contrast(light, "#ffffff") == 1.0 and contrast(dark, "#000000") < 1.5
    assert contrast(colour, light) >= 3 and contrast(colour, dark) >= 3


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_can_be_told_apart_with_every_kind_of_sight(sight):
    seen = [lab(np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1)) for colour in COLOURS]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) >= 17


def test_series_differ_by_more_than_their_colour():
    styles = [series(i) for i in range(24)]
    assert len({style["marker"] for style in styles[:8]}) == 8
    assert len({(style["color"], style["linestyle"]) for style in styles}) == 24


def png(figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def test_what_a_user_has_set_for_other_plots_changes_nothing():
    ours = png(drawn())
    theirs = {"axes.facecolor": "red", "font.size": 30, "axes.grid": False, "axes.linewidth": 9, "text.color": "blue"}
    with matplotlib.rc_context(theirs):
        before = dict(matplotlib.rcParams)
        figure = drawn()
        assert dict(matplotlib.rcParams) == before
    assert png(figure) == ours


def test_importing_it_leaves_pyplot_alone():
    code = "import sys, nca_jax.plotting, nca_jax.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_png_is_on_white_and_of_its_size(tmp_path):
    save(drawn(), epath.Path(tmp_path / "a.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    image = Image.open(tmp_path / "a.png").convert("RGB")
    assert image.size == (4 * 160, 3 * 160)
    assert image.getpixel((0, 0)) == (255, 255, 255)
    blue = tuple(int(COLOURS[0][i : i + 2], 16) for i in (1, 3, 5))
    assert blue in {colour for _, colour in image.getcolors(10**6)}


def test_a_png_goes_to_a_bucket(bucket):
    save(drawn(), epath.Path(bucket) / "a.png")
    assert Image.open(io.BytesIO((epath.Path(bucket) / "a.png").read_bytes())).size == (640, 480)


def test_an_svg_is_drawn_in_the_colours_of_its_page():
    svg = inline_svg(drawn(), "A & B < C")
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img" and root.attrib["width"] == "100%"
    name = root.find("title")
    assert name.text == "A & B < C" and root.attrib["aria-labelledby"] == name.attrib["id"]
    # Text as text, and as the page's own.
    texts = {element.text for element in root.iter("text")}
    assert {"what it shows", "a & <b>", "other"} <= texts
    assert all("system-ui" in element.attrib["style"] for element in root.iter("text"))
    # Every colour is a series' or one of the page's properties, and nothing is for the whole page.
    outside = re.sub(r"var\(--\w+, #\w+\)", "", svg)
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", outside)) == {COLOURS[0], COLOURS[1]}
    assert set(re.findall(r"var\((--\w+)", svg)) == {"--ink", "--grid"}
    assert "<style" not in svg and "xlink" not in svg and "<!DOCTYPE" not in svg


def test_svgs_of_one_page_share_no_id_and_lose_no_reference():
    svgs = [inline_svg(drawn(), "one"), inline_svg(drawn(), "two"), inline_svg(drawn(label="c"), "one")]
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in svgs]
    for svg, own in zip(svgs, ids, strict=True):
        used = set(re.findall(r"url\(#([^)]+)\)", svg)) | set(re.findall(r'href="#([^"]+)"', svg))
        assert len(used) >= 3 and used <= own
        assert len(re.findall(r'\bid="', svg)) == len(own)
    assert not any(one & other for one, other in combinations(ids, 2))


def test_an_svg_is_the_same_every_time():
    assert inline_svg(drawn(), "one") == inline_svg(drawn(), "one")


def test_a_legend_is_inside_or_below_and_only_where_there_are_labels():
    _, axes = new_figure(4, 3, 1, 2, sharex=True)
    axes[0].plot([1], [1], label="x")
    for one in axes:
        legend(one, loc="upper left")
    assert axes[0].get_legend() is not None and axes[1].get_legend() is None
    below = drawn(label="a name that is too long for two of its kind beside each other")
    assert below.axes[0].get_legend() is None and len(below.legends) == 1
    png(below)
    box = below.legends[0].get_window_extent()
    assert box.y1 < below.axes[0].get_window_extent().y0 and box.x1 <= below.bbox.x1
    empty = new_figure(4, 3)
    legend_below(empty[1])
    assert not empty[0].legends

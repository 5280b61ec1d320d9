"""The figures of a study draw what its results hold."""

import pytest
from matplotlib.colors import to_hex

from nca_jax.plotting import COLOURS
from nca_jax.study_figures import study_figures


def point(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def results(*methods):
    known = ("no_context", "with_context", "other_task", "divergence")
    curves = {name: [point(0.1), point(0.5, 0.4, 0.7)] for name in known}
    curves["harm"] = [point(None), point(0.25, 0.125, 0.5)]
    return {"tasks": {task: {"methods": {m: {"steps": [0, 5], "curves": curves} for m in methods}} for task in "ab"}}


@pytest.fixture
def harm():
    return dict(study_figures(results("opd", "gated", "dual")))["harm"]


def test_a_panel_for_each_task_and_a_line_for_each_main_method(harm):
    assert [axes.get_title(loc="left") for axes in harm.axes] == ["a", "b"]
    for axes in harm.axes:
        assert [(line.get_label(), line.get_color()) for line in axes.lines] == [
            ("opd", COLOURS[0]),
            ("gated", COLOURS[1]),
        ]
        # Before training there is no harm to draw; the lines are beside each other.
        assert [list(line.get_ydata()) for line in axes.lines] == [[0.25], [0.25]]
        assert [round(float(line.get_xdata()[0])) for line in axes.lines] == [5, 5]
        assert axes.lines[0].get_xdata()[0] < 5 < axes.lines[1].get_xdata()[0]
    (legend,) = harm.legends
    assert [text.get_text() for text in legend.get_texts()] == ["opd", "gated"]


def test_bars_are_the_intervals(harm):
    bars = harm.axes[0].collections[0]
    assert to_hex(bars.get_color()[0]) == COLOURS[0]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0.125, 0.5]]


def test_other_methods_have_figures_of_their_own():
    drawn = dict(study_figures(results("opd", "dual")))
    assert [line.get_label() for line in drawn["harm_others"].axes[0].lines] == ["dual"]
    assert [list(line.get_ydata()) for line in drawn["divergence"].axes[0].lines] == [[0.1, 0.5]]
    assert not [name for name in dict(study_figures(results("opd"))) if name.endswith("others")]
    assert list(dict(study_figures(results("dual")))) == ["harm_others", "with_context_others", "other_task_others"]

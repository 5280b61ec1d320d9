"""The figures of runs: what is drawn is what was counted by hand in report_runs.py."""

import dataclasses

import numpy as np
import pytest
from matplotlib.colors import to_hex
from report_runs import NCA, OPD, STEPS, lines

from nca_jax import figures
from nca_jax.figures import RunData, all_figures, evaluation_curves, last_views, step_curves
from nca_jax.plotting import COLOURS, MARKERS


def run(label, right, group=None, steps=()):
    evaluations = {step: [dataclasses.asdict(item) for item in lines(right, i)] for i, step in enumerate(STEPS)}
    return RunData(f"runs/{label}", label, group or label, label, steps, evaluations, {})


def by_name(drawn):
    names = [named.name for named in drawn]
    assert len(set(names)) == len(names)
    return {named.name: named.figure.axes[0] for named in drawn}


def course(line):
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def labelled(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


@pytest.fixture(scope="module")
def both():
    return [run("opd", OPD), run("nca", NCA)]


@pytest.fixture(scope="module")
def curves(both):
    return by_name(evaluation_curves(both))


def test_accuracies_by_run_and_view(curves):
    drawn = labelled(curves["accuracy"])
    assert list(drawn) == ["opd without", "nca without", "opd with", "nca with"]
    assert course(drawn["opd without"]) == {0: 0.0, 2: 10 / 24, 4: 20 / 24}
    assert course(drawn["opd with"]) == {0: 18 / 24, 2: 16 / 24, 4: 12 / 24}
    assert course(drawn["nca with"]) == {0: 18 / 24, 2: 4 / 24, 4: 22 / 24}
    # One colour and marker a run; without solid, with dashed.
    looks = {label: (line.get_color(), line.get_marker(), line.get_linestyle()) for label, line in drawn.items()}
    assert looks == {
        "opd without": (COLOURS[0], MARKERS[0], "-"),
        "nca without": (COLOURS[1], MARKERS[1], "-"),
        "opd with": (COLOURS[0], MARKERS[0], "--"),
        "nca with": (COLOURS[1], MARKERS[1], "--"),
    }


def test_harm_and_help_and_both(curves):
    # Before training nothing is right without the context: harm is not defined there.
    assert course(labelled(curves["harm"])["opd"]) == {2: 0.0, 4: 8 / 20}
    assert course(labelled(curves["harm"])["nca"]) == {2: 6 / 10, 4: 1 / 20}
    assert course(labelled(curves["help"])["opd"]) == {0: 18 / 24, 2: 6 / 14, 4: 0.0}
    assert course(labelled(curves["both"])["nca"]) == {0: 0.0, 2: 4 / 24, 4: 19 / 24}


def test_other_contexts_lengths_and_divergences(curves):
    assert course(labelled(curves["context_other_task"])["opd"]) == {0: 1.0, 2: 20 / 24, 4: 12 / 24}
    assert curves["context_other_task"].get_title(loc="left") == "accuracy: other task (context following)"
    assert course(labelled(curves["context_paraphrased"])["opd"]) == {0: 18 / 24, 2: 16 / 24, 4: 14 / 24}
    assert course(labelled(curves["length"])["opd with"]) == {0: 12.0, 2: 12.0, 4: 12.0}
    assert course(labelled(curves["length_change"])["opd"]) == pytest.approx({0: 0.2, 2: 0.2, 4: 0.2})
    assert course(labelled(curves["divergence_with_context"])["nca"]) == {0: 0.25, 2: 0.25, 4: 0.25}
    # The training context is in the figure of both accuracies; nothing was cut, and everything had an answer.
    assert not {"context_with_context", "truncated", "no_answer", "divergence_no_context"} & curves.keys()


def test_bands_are_the_intervals(curves):
    band = curves["accuracy"].collections[0]
    assert to_hex(band.get_facecolor()[0]) == COLOURS[0]
    corners = band.get_paths()[0].vertices
    # None of 24 right: Clopper-Pearson's upper bound is 1 - 0.025 ** (1 / 24).
    at_start = corners[corners[:, 0] == 0][:, 1]
    assert (at_start.min(), at_start.max()) == pytest.approx((0.0, 1 - 0.025 ** (1 / 24)))
    at_end = corners[corners[:, 0] == 4][:, 1]
    assert at_end.min() < 20 / 24 < at_end.max() <= 1


def test_all_figures_have_the_same_steps(curves):
    assert len({axes.get_xlim() for axes in curves.values()}) == 1


def test_seeds_of_a_method_are_thin_lines_and_their_mean():
    other = OPD | {"no_context": (*OPD["no_context"][:2], "1" * 14 + "0" * 10)}
    runs = [run("opd seed 0", OPD, "opd"), run("opd seed 1", other, "opd"), run("nca", NCA)]
    axes = by_name(evaluation_curves(runs))["accuracy"]
    ours = [line for line in axes.lines if line.get_color() == COLOURS[0] and line.get_linestyle() == "-"]
    assert [line.get_label().startswith("_") for line in ours] == [True, True, False]
    assert [course(line)[4] for line in ours] == [20 / 24, 14 / 24, 17 / 24]
    assert ours[2].get_label() == "opd, 2 seeds without"
    assert ours[0].get_linewidth() < 1 < ours[2].get_linewidth()
    # Only a single run has a band.
    assert {to_hex(band.get_facecolor()[0]) for band in axes.collections} == {COLOURS[1]}


def test_the_last_evaluation_is_points_with_bars(both):
    (named,) = last_views(both)
    (axes,) = named.figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        "no context",
        "with context",
        "paraphrased",
        "other task",
    ]
    assert list(labelled(axes)["nca"].get_xdata()) == [20 / 24, 22 / 24, 14 / 24, 12 / 24]
    bars = [bar for group in axes.collections for bar in group.get_segments()]
    assert len(bars) == 8 and all(bar[0, 0] < bar[1, 0] for bar in bars)


def test_a_single_evaluation_has_no_curve():
    evaluation = run("model", OPD)
    evaluation.evaluations = {4: evaluation.evaluations[4]}
    assert [named.name for named in all_figures([evaluation])] == ["views"]


def test_a_run_has_one_colour_in_all_figures():
    """Also beside a run that is not evaluated yet, and one that was evaluated once."""
    steps = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    begun, once, whole = run("begun", OPD, steps=steps), run("once", OPD), run("whole", NCA, steps=steps)
    begun.evaluations, once.evaluations = {}, {4: once.evaluations[4]}
    drawn = by_name(all_figures([begun, once, whole]))
    assert {"views", "accuracy", "loss"} <= drawn.keys()
    for axes in drawn.values():
        for label, line in labelled(axes).items():
            assert line.get_color() == COLOURS[["begun", "once", "whole"].index(label.split()[0])]
    assert list(labelled(drawn["views"])) == ["once", "whole"] and list(labelled(drawn["loss"])) == ["begun", "whole"]
    assert set(labelled(drawn["accuracy"])) == {"whole without", "whole with"}


def test_a_run_that_has_just_begun():
    steps = [{"step": 1, "loss": 1.0, "opd": 1.0, "nca": 0.0, "gate": 1.0, "grad_norm": 2.0}]
    begun = RunData("a", "a", "a", "opd", steps, {}, {})
    assert [named.name for named in all_figures([begun])] == ["loss", "opd", "grad_norm"]
    assert begun.last is None


def test_terms_that_are_off_are_not_drawn():
    on = [{"step": s, "loss": 1.0, "opd": 0.5, "nca": 0.5, "gate": 0.5, "grad_norm": 1.0} for s in (1, 2)]
    off = [record | {"nca": 0.0, "gate": 1.0} for record in on]
    drawn = by_name(step_curves([run("nca", NCA, steps=on), run("opd", OPD, steps=off)]))
    assert list(labelled(drawn["nca"])) == ["nca"] and list(labelled(drawn["gate"])) == ["nca"]
    assert list(labelled(drawn["loss"])) == ["nca", "opd"]
    assert "retention" not in drawn


def test_many_steps_become_means_of_neighbours():
    steps = [{"step": s, "loss": float(s)} for s in range(1, 1001)]
    (named,) = step_curves([run("opd", OPD, steps=steps)])
    (line,) = named.figure.axes[0].lines
    # 1000 points in groups of 3: 333 whole ones, and the last step alone.
    assert len(line.get_xdata()) == 334
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (3, 2.0)
    assert (line.get_xdata()[-1], line.get_ydata()[-1]) == (1000, 1000.0)
    assert named.note == "Each point is the mean of up to 3 steps."
    assert named.figure.axes[0].get_yscale() == "log"


@pytest.mark.parametrize(("last", "scale"), [(19.0, "linear"), (21.0, "log"), (-21.0, "linear")])
def test_a_scale_is_logarithmic_where_values_are_far_apart(last, scale):
    steps = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": last}]
    (named,) = step_curves([run("opd", OPD, steps=steps)])
    assert named.figure.axes[0].get_yscale() == scale


def test_a_view_of_any_name_has_a_file_of_its_own():
    odd = {"no_context": OPD["no_context"], "with_context": OPD["with_context"], "my file/ü": OPD["paraphrased"]}
    assert "context_my_file_ü" in by_name(evaluation_curves([run("opd", odd)]))


def test_an_evaluation_is_summed_up_once(monkeypatch):
    """A training loop adds one and draws again."""
    growing = run("opd", OPD)
    last = growing.evaluations.pop(4)
    evaluation_curves([growing])
    seen, original = [], figures.view_summary
    monkeypatch.setattr(figures, "view_summary", lambda lines, view: seen.append(view) or original(lines, view))
    growing.evaluations[4] = last
    drawn = by_name(evaluation_curves([growing]))
    assert seen == list(OPD)
    np.testing.assert_array_equal(labelled(drawn["accuracy"])["opd without"].get_xdata(), [0, 2, 4])

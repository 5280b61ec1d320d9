"""The figures of runs: what was lost, learned and kept over the steps. Data in, matplotlib figures out.

Each run, or all seeds of one method, has one colour and one marker in every figure; a solid line is the view without
the context, a dashed one the view with it. The training loop draws the same figures of its own run.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nca_jax.intervals import Estimate
from nca_jax.items import NO_CONTEXT, OTHER_TASK, WITH_CONTEXT
from nca_jax.metrics import Lines, pair_summary, view_summary
from nca_jax.plotting import legend_below, new_figure, series, title

_WIDTH, _HEIGHT = 4.6, 3.1  # inches: legible on a phone, and two beside each other on a desk
_MOST_POINTS = 400  # of a curve of steps that a figure can show
_MISHAPS = ("truncated", "no_answer")
_LOGARITHMIC = 20  # ratio of largest to smallest value from which a scale is logarithmic
_PER_CENT = PercentFormatter(1.0, symbol=" %")
# What a reader of any of the curves has to know.
BANDS = "Bands are 95 % intervals over items. Of several seeds each is a thin line, their mean a thick one."
# Name in metrics.jsonl -> title, and the value that says that it is off: a term is then 0 all along, the gate 1.
_OF_STEPS = {
    "loss": ("loss, nats a token", None),
    "opd": ("OPD term, nats a token", None),
    "nca": ("NCA term, nats a token", 0.0),
    "retention": ("retention term, nats a token", 0.0),
    "gate": ("mean gate of the anchor", 1.0),
    "grad_norm": ("gradient norm", None),
}


@dataclasses.dataclass
class RunData:
    """What one run, or one evaluation of a checkpoint, has left.

    Attributes:
      name: where it lies; unique.
      label: what it is called in figures and tables.
      group: what all runs are called that differ from it in the seed only; the label, where there is one.
      method: as `settings.method_name`.
      steps: step records of metrics.jsonl.
      evaluations: step -> item lines. More can be added while a run goes on.
      config: as in config.json.
    """

    name: str
    label: str
    group: str
    method: str
    steps: Sequence[Mapping[str, Any]]
    evaluations: dict[int, Lines]
    config: Mapping[str, Any]
    _points: dict[int, "Point"] = dataclasses.field(default_factory=dict, repr=False)

    def point(self, step: int) -> "Point":
        """What the evaluation at that step says; computed once."""
        if step not in self._points:
            lines = self.evaluations[step]
            names = view_names(lines)
            pair = pair_summary(lines) if {NO_CONTEXT, WITH_CONTEXT} <= set(names) else None
            self._points[step] = Point({view: view_summary(lines, view) for view in names}, pair)
        return self._points[step]

    @property
    def last(self) -> int | None:
        """The step of the last evaluation."""
        return max(self.evaluations, default=None)


class Point(NamedTuple):
    """One evaluation: view -> `metrics.view_summary`, and `metrics.pair_summary` of the training context."""

    views: dict[str, dict[str, Any]]
    pair: dict[str, Any] | None


class NamedFigure(NamedTuple):
    """A figure, the name of its file without an ending, its title, and what a reader has to know."""

    name: str
    title: str
    note: str
    figure: Figure


class _Line(NamedTuple):
    """A line of every run in a figure: what is read of an evaluation, what its label ends in, and its style."""

    read: Callable[[Point], Estimate | None]
    suffix: str = ""
    style: str = "-"


def view_names(lines: Lines) -> list[str]:
    """The views of item lines, in their order."""
    return list(dict.fromkeys(line["view"] for line in lines))


def shown(view: str) -> str:
    """A view's name as people read it."""
    return "other task (context following)" if view == OTHER_TASK else view.replace("_", " ")


def seed_groups(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Runs that differ in the seed only, together; in order of their first run."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return list(groups.values())


def group_label(group: Sequence[RunData]) -> str:
    """What the runs of a group are called together."""
    return group[0].label if len(group) == 1 else f"{group[0].group}, {len(group)} seeds"


def all_figures(runs: Sequence[RunData]) -> list[NamedFigure]:
    """Every figure for which the runs hold data."""
    return [*last_views(runs), *evaluation_curves(runs), *step_curves(runs)]


def last_views(runs: Sequence[RunData]) -> list[NamedFigure]:
    """Accuracy of every view in the last evaluation, as points with their intervals."""
    names = list(dict.fromkeys(view for run in runs if run.evaluations for view in run.point(run.last).views))
    if not names:
        return []
    groups = seed_groups(runs)
    figure, axes = new_figure(_WIDTH, 1.0 + 0.2 * len(names) * max(2, len(groups)))
    for i, group in enumerate(groups):
        style = series(i) | {"linestyle": "none", "markersize": 5.0}
        offset = 0.7 * (i - (len(groups) - 1) / 2) / max(len(groups), 2)
        label = group_label(group)
        for run in (run for run in group if run.evaluations):
            points = run.point(run.last).views
            known = [(row + offset, points[view]["accuracy"]) for row, view in enumerate(names) if view in points]
            rows, estimates = [row for row, _ in known], [estimate for _, estimate in known]
            axes.hlines(rows, [e.low for e in estimates], [e.high for e in estimates], color=style["color"], alpha=0.6)
            axes.plot([e.value for e in estimates], rows, label=label, **style)
            label = None
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(_PER_CENT)
    axes.set_xlim(-0.02, 1.02)
    note = "Last evaluation; bars are 95 % intervals over items. Of another task's context its own answers count."
    return [_finished("views", "accuracy in every view", note, figure, axes)]


def evaluation_curves(runs: Sequence[RunData]) -> list[NamedFigure]:
    """What evaluations say, over the steps. A run with a single evaluation has no curve."""

    def both_views(name: str) -> list[_Line]:
        return [_Line(_of_view(NO_CONTEXT, name), "without"), _Line(_of_view(WITH_CONTEXT, name), "with", "--")]

    points = [run.point(step) for run in runs if len(run.evaluations) > 1 for step in run.evaluations]
    probes = list(dict.fromkeys(view for point in points for view in point.views if view != NO_CONTEXT))
    nats = "KL(q_x || q_view), nats a token, on the response that was drawn without a context."
    drawn = [
        _over_steps(runs, "accuracy", "accuracy without and with the context", both_views("accuracy")),
        _over_steps(runs, "harm", "harm: wrong with, of those right without", [_Line(_of_pair("harm"))]),
        _over_steps(runs, "help", "help: right with, of those wrong without", [_Line(_of_pair("help"))]),
        _over_steps(runs, "both", "right without and with the context", [_Line(_of_pair("both"))]),
    ]
    for view in probes[probes.index(WITH_CONTEXT) + 1 :] if WITH_CONTEXT in probes else probes:
        drawn.append(
            _over_steps(runs, f"context_{view}", f"accuracy: {shown(view)}", [_Line(_of_view(view, "accuracy"))])
        )
    drawn += [
        _over_steps(runs, "length", "length of responses, tokens", both_views("length"), per_cent=False),
        _over_steps(runs, "length_change", "length with over without, change", [_Line(_of_pair("length_change"))]),
        _over_steps(runs, "truncated", "cut at the longest response", both_views("truncated")),
        _over_steps(runs, "no_answer", "not cut, and no answer", both_views("no_answer")),
    ]
    for view in probes:
        line = _Line(_of_view(view, "divergence"))
        drawn.append(
            _over_steps(
                runs,
                f"divergence_{view}",
                f"divergence: {view.replace('_', ' ')}",
                [line],
                per_cent=False,
                note=nats,
            )
        )
    return [figure for figure in drawn if figure is not None]


def step_curves(runs: Sequence[RunData]) -> list[NamedFigure]:
    """The loss, its terms, the anchor's gate and the gradient norm of every step."""
    drawn = []
    for name, (headline, off) in _OF_STEPS.items():
        figure, axes = new_figure(_WIDTH, _HEIGHT)
        everything, most = [], 1
        for i, group in enumerate(seed_groups(runs)):
            label = group_label(group)
            for run in group:
                steps, values, together = _thinned([(r["step"], r[name]) for r in run.steps if name in r])
                if not values or set(values) == {off}:
                    continue
                style = series(i) | {"marker": "none", "linewidth": 1.4 if len(group) == 1 else 0.9}
                axes.plot(steps, values, label=label, **style)
                label, most, everything = None, max(most, together), everything + values
        if not everything:
            continue
        note = f"Each point is the mean of up to {most} steps." if most > 1 else ""
        if min(everything) > 0 and max(everything) > _LOGARITHMIC * min(everything):
            axes.set_yscale("log")
        drawn.append(_finished(name, headline, note, figure, axes, over_steps=True))
    return drawn


def _over_steps(
    runs: Sequence[RunData], name: str, headline: str, lines: Sequence[_Line], per_cent: bool = True, note: str = ""
) -> NamedFigure | None:
    """A quantity of every group of seeds over the steps of evaluations.

    None where it is unknown, and where it is 0 throughout and that is nothing to look at: a share of mishaps.
    """
    figure, axes = new_figure(_WIDTH, _HEIGHT)
    values, steps = set(), set()
    for line in lines:
        for i, group in enumerate(seed_groups(runs)):
            style = series(i) | {"linestyle": line.style, "label": f"{group_label(group)} {line.suffix}".strip()}
            followed = [run for run in group if len(run.evaluations) > 1]
            steps.update(*(run.evaluations for run in followed))
            read = [{step: line.read(run.point(step)) for step in sorted(run.evaluations)} for run in followed]
            known = [{step: e for step, e in run.items() if e is not None and e.value is not None} for run in read]
            courses = [course for course in known if course]
            values |= {estimate.value for course in courses for estimate in course.values()}
            _draw_group(axes, courses, style)
    if not (values - {0.0} if name in _MISHAPS else values):
        return None
    if per_cent:
        axes.yaxis.set_major_formatter(_PER_CENT)
    margin = 0.03 * (max(steps) - min(steps))
    axes.set_xlim(min(steps) - margin, max(steps) + margin)  # the same in all figures
    if min(values) >= 0:
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    return _finished(name, headline, note, figure, axes, over_steps=True)


def _draw_group(axes: Axes, courses: Sequence[Mapping[int, Estimate]], style: Mapping[str, Any]) -> None:
    """One run with its band, or several as thin lines below their mean at the steps that all of them have."""
    if len(courses) == 1:
        (course,) = courses
        banded = {step: estimate for step, estimate in course.items() if estimate.low is not None}
        low, high = [e.low for e in banded.values()], [e.high for e in banded.values()]
        axes.fill_between(list(banded), low, high, color=style["color"], alpha=0.16, linewidth=0)
        axes.plot(list(course), [estimate.value for estimate in course.values()], **style)
    elif courses:
        for course in courses:
            thin = {**style, "linewidth": 0.7, "marker": "none", "alpha": 0.7, "label": None}
            axes.plot(list(course), [estimate.value for estimate in course.values()], **thin)
        common = sorted(set.intersection(*map(set, courses)))
        axes.plot(common, [sum(course[step].value for course in courses) / len(courses) for step in common], **style)


def _finished(name: str, headline: str, note: str, figure: Figure, axes: Axes, over_steps: bool = False) -> NamedFigure:
    """The figure with its title, its legend below it, and a name that a file can have."""
    title(axes, headline)
    if over_steps:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    legend_below(axes)
    return NamedFigure(re.sub(r"[^\w.-]", "_", name), headline, note, figure)


def _of_view(view: str, name: str) -> Callable[[Point], Estimate | None]:
    return lambda point: point.views[view][name] if view in point.views else None


def _of_pair(name: str) -> Callable[[Point], Estimate | None]:
    return lambda point: point.pair[name] if point.pair else None


def _thinned(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float], int]:
    """Steps, values, and how many neighbours each is the mean of, so that few enough are left."""
    together = -(-len(points) // _MOST_POINTS) or 1
    parts = [points[start : start + together] for start in range(0, len(points), together)]
    return [part[-1][0] for part in parts], [sum(value for _, value in part) / len(part) for part in parts], together

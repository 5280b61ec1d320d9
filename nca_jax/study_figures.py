"""The figures of a study: what happens over the steps, a panel for each task, a line for each method."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nca_jax.plotting import legend_below, new_figure, series, title

_HEIGHT, _PANEL = 3.4, 3.1  # inches
# Two figures of each quantity: the methods that answer the study's questions, and how their settings matter.
MAIN = ("opd", "nca_0.5", "warmup", "gated", "opd_retention", "gated_retention_0.5")
_OF_MAIN = {
    "no_context": "accuracy without the context",
    "with_context": "accuracy with the context",
    "harm": "harm: wrong with, of those right without",
    "other_task": "irrelevant context: followed",
    "divergence": "KL(q_x || q_c), nats a token",
}
_OF_OTHERS = ("harm", "with_context", "other_task")


def study_figures(found: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Names and figures.

    Args:
      found: from `study_tables.results`.
    """
    methods = list(dict.fromkeys(method for task in found["tasks"].values() for method in task["methods"]))
    main, others = [method for method in MAIN if method in methods], [m for m in methods if m not in MAIN]
    for name in _OF_MAIN if main else ():
        yield name, _figure(found["tasks"], name, main)
    for name in _OF_OTHERS if others else ():
        yield f"{name}_others", _figure(found["tasks"], name, others)


def _figure(tasks: Mapping[str, Any], name: str, methods: Sequence[str]) -> Figure:
    """The means over the seeds at each evaluation, with bars of their intervals. A value that is not defined, such as
    harm where nothing is right without the context, is a gap."""
    figure, panels = new_figure(_PANEL * len(tasks) + 0.4, _HEIGHT, 1, len(tasks), sharey=True, squeeze=False)
    for axes, (task, of_task) in zip(panels[0], tasks.items(), strict=True):
        for i, method in enumerate(methods):
            if method not in of_task["methods"]:
                continue
            steps, points = (of_task["methods"][method][key] for key in ("steps", "curves"))
            known = [(step, p) for step, p in zip(steps, points[name], strict=True) if p["value"] is not None]
            # Beside each other, or the bars of several methods could not be told apart.
            shift = 0.025 * steps[-1] * (i - (len(methods) - 1) / 2) / len(methods)
            style = series(i)
            axes.plot([step + shift for step, _ in known], [p["value"] for _, p in known], label=method, **style)
            barred = [(step + shift, p) for step, p in known if p["low"] is not None]
            low, high = [p["low"] for _, p in barred], [p["high"] for _, p in barred]
            axes.vlines([at for at, _ in barred], low, high, color=style["color"], linewidth=0.8, alpha=0.6)
        title(axes, task)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if name != "divergence":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    panels[0, 0].set_ylabel(_OF_MAIN[name])
    legend_below(max(panels[0], key=lambda axes: len(axes.lines)))
    return figure

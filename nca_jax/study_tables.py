"""The command that says what a study has found: tables, paired tests and figures, all from its item lines.

    python -m nca_jax.study_tables runs/study                          # into runs/study/tables
    python -m nca_jax.study_tables --items=benchmarks/results/study_items.npz --output=DIR
    python -m nca_jax.study_tables runs/here runs/there --items=FILE --output=DIR   # a grid that was run in parts
    python -m nca_jax.study_tables --items=FILE --only='*seed=1' --output=DIR       # some of its runs

It reads the item lines of all runs that are finished and keeps them in DIR/study_items.npz, from which alone everything
can be computed again. Of a run that is in several places the first counts, workdirs before files. `--page=FILE` puts
the tables into a page, between two marks.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from nca_jax.command import set_up_logging
from nca_jax.errors import UserError
from nca_jax.files import write_text
from nca_jax.items import NO_CONTEXT, OTHER_TASK, WITH_CONTEXT
from nca_jax.plotting import save as save_figure
from nca_jax.study import part
from nca_jax.study_figures import MAIN, study_figures
from nca_jax.study_items import StudyRun, collect, load, merged, save
from nca_jax.study_statistics import Comparison, Course, compare, curves, draw, holm, quantities

# Fixed before the grid was run: method a, method b. The first two pairs in these quantities are what is tested; p of
# them is adjusted for being several. Everything else is description.
PRIMARY = (("nca_0.5", "gated"), ("opd", "gated"))
PRIMARY_QUANTITIES = ("steps_to_0.9_of_context", "harm", "peak_harm", "other_task")
FURTHER = (
    ("opd", "nca_0.5"),
    ("nca_0.5", "warmup"),
    ("gated", "gated_retention_0.5"),
    ("opd", "gated_retention_0.5"),
    ("opd", "opd_retention"),
    ("gated_retention_0.5", "gated_retention_0.5_three"),
    ("gated", "gated_1.0"),
    ("nca_0.5", "dual"),
    ("nca_0.5", "symmetric"),
)
_FURTHER_QUANTITIES = (*PRIMARY_QUANTITIES, "no_context", "with_context", "lowest_with_context", "both")

_VIEWS = (NO_CONTEXT, WITH_CONTEXT, "paraphrased", "shortened", OTHER_TASK)
# Column -> its heading; shares are in per cent, the rest as it is.
_MAIN = {
    "steps_to_0.9_of_context": "steps to 0.9",
    "no_context": "without",
    "with_context": "with",
    "lowest_with_context": "lowest with",
    "harm": "harm",
    "peak_harm": "peak harm",
    "both": "both",
    "other_task": "irrelevant followed",
}
_MORE = {
    "steps_to_0.9": "steps to 90 %",
    "paraphrased": "paraphrased",
    "shortened": "shortened",
    "lowest_other_task": "lowest irrelevant",
    "beyond": "right and more",
    "length_change": "length change",
    "divergence": "divergence",
}
_PLAIN = {"steps_to_0.9_of_context": 1, "steps_to_0.9": 1, "divergence": 3}  # digits
_MARKS = ("<!-- tables of nca_jax.study_tables: begin -->", "<!-- tables of nca_jax.study_tables: end -->")


def courses(runs: Sequence[StudyRun]) -> dict[str, dict[str, Course]]:
    """Task -> method -> its runs, those that the figures show together first. A run is left out if the evaluation
    before training is in no run of its task and seed.

    Raises:
      UserError: runs of a task are not evaluated on the same items at the same steps, or a view is missing.
    """
    for run in runs:
        if missing := [view for view in _VIEWS if view not in run.views]:
            raise UserError(f"runs of {run.task}, {run.method} have no view {missing[0]}; see evaluation.contexts.")
    before = {(run.task, run.seed): run for run in runs if 0 in run.steps}
    found: dict[str, dict[str, list[StudyRun]]] = {}
    order = {method: i for i, method in enumerate(MAIN)}
    for run in sorted(runs, key=lambda run: (run.task, order.get(run.method, len(order)), run.method, run.seed)):
        if (run.task, run.seed) in before:
            found.setdefault(run.task, {}).setdefault(run.method, []).append(run)
    if not found:
        raise UserError("no run of the study has an evaluation before training; finish one with evaluation.at_start.")
    try:
        return {
            task: {
                method: Course(several, {seed: run for (t, seed), run in before.items() if t == task})
                for method, several in methods.items()
            }
            for task, methods in found.items()
        }
    except ValueError as error:
        raise UserError(f"{error}; give runs of one grid.") from error


def results(runs: Sequence[StudyRun]) -> dict[str, Any]:
    """Everything that the runs say, as JSON takes it: "tasks" -> methods -> "end", "curves", "tokens" and "seconds";
    "comparisons"; "primary", those that are tested, with adjusted p."""
    by_task = courses(runs)
    tasks = {}
    for stream, (task, methods) in enumerate(by_task.items()):
        tasks[task] = {"items": next(iter(methods.values())).items, "methods": {}}
        for method, course in methods.items():
            draws = draw(course.items, len(course.runs), stream)
            theirs = course.runs.values()
            tasks[task]["methods"][method] = {
                "seeds": list(course.runs),
                "steps": course.steps_T.tolist(),
                "end": {name: found._asdict() for name, found in quantities(course, draws).items()},
                "curves": {name: [f._asdict() for f in found] for name, found in curves(course, draws).items()},
                "tokens": _mean([sum(run.tokens) for run in theirs]),
                "seconds": _mean([run.seconds for run in theirs]),
                "seconds_a_step": _mean([_middle(run.step_seconds) for run in theirs]),
            }
    primary = _compared(by_task, PRIMARY, PRIMARY_QUANTITIES)
    tested = [row for row in primary if row["p"] is not None]
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = adjusted
    return {
        "runs": len(runs),
        "hours": sum(run.seconds for run in runs) / 3600,
        "tasks": tasks,
        "primary": primary,
        "comparisons": _compared(by_task, FURTHER, _FURTHER_QUANTITIES),
    }


def _compared(
    by_task: Mapping[str, Mapping[str, Course]], pairs: Sequence[tuple[str, str]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each pair and quantity, of the pairs that have runs in common."""
    rows = []
    for a, b in pairs:
        of_a, of_b = ({task: methods[m] for task, methods in by_task.items() if m in methods} for m in (a, b))
        if not any(of_a[task].runs.keys() & of_b[task].runs.keys() for task in of_a.keys() & of_b.keys()):
            continue
        for name, found in compare(of_a, of_b, names).items():
            rows.append({"a": a, "b": b, "quantity": name, **_plain(found)})
    return rows


def _plain(found: Comparison) -> dict[str, Any]:
    return found._asdict() | {"tasks": {task: interval._asdict() for task, interval in found.tasks.items()}}


def as_markdown(found: Mapping[str, Any], figures: Sequence[str] = ()) -> str:
    """The tables for people.

    Args:
      found: from `results`.
      figures: paths of the figures, as a page has to name them.
    """
    parts = [f"{found['runs']} runs, {found['hours']:.1f} hours.\n"]
    for task, of_task in found["tasks"].items():
        methods = of_task["methods"]
        parts.append(f"### `{task}`, {of_task['items']} items\n")
        first = next(iter(methods.values()))["curves"]
        start = ", ".join(f"{name.replace('_', ' ')} {_shown(name, first[name][0], interval=False)}" for name in _VIEWS)
        parts.append(f"Before training: {start} (%).\n")
        for columns in (_MAIN, _MORE):
            rows = [[f"`{m}`", *(_shown(n, of["end"][n]) for n in columns)] for m, of in methods.items()]
            parts.append(_table(["method", *columns.values()], rows))
        rows = []
        for m, of in methods.items():
            spent = [f"{of['tokens']:.0f}", f"{of['seconds_a_step']:.1f}", f"{of['seconds']:.0f}"]
            rows.append([f"`{m}`", ", ".join(map(str, of["seeds"])), *spent])
        parts.append(_table(["method", "seeds", "tokens trained on", "s a step", "s in all"], rows))
    headings = ["b minus a", "quantity", *found["tasks"], "all tasks", "pairs", "p"]
    for title, rows, adjusted in (("tested", found["primary"], True), ("further", found["comparisons"], False)):
        if rows:
            parts.append(f"### Methods compared: {title}\n")
            lines = [_comparison_row(row, list(found["tasks"]), adjusted) for row in rows]
            parts.append(_table([*headings, *(["p, Holm"] if adjusted else [])], lines))
    parts += [f"![{os.path.basename(path).removesuffix('.png')}]({path})\n" for path in figures]
    return "\n".join(parts)


def _comparison_row(row: Mapping[str, Any], tasks: Sequence[str], adjusted: bool) -> list[str]:
    name = row["quantity"]
    cells = [f"`{row['b']}` - `{row['a']}`", ({**_MAIN, **_MORE})[name]]
    cells += [_shown(name, row["tasks"][task], sign=True) if task in row["tasks"] else "" for task in tasks]
    cells += [_shown(name, row, sign=True), str(row["runs"])]
    cells += ["" if row[key] is None else f"{row[key]:.3f}" for key in ("p", *(["p_holm"] if adjusted else []))]
    return cells


def _shown(name: str, found: Mapping[str, Any], interval: bool = True, sign: bool = False) -> str:
    """ "84.2 (78.0 to 90.1)": per cent, or as it is."""
    digits, factor = (_PLAIN[name], 1) if name in _PLAIN else (1, 100)
    plus = "+" if sign else ""

    def number(key: str) -> str:
        return f"{factor * found[key]:{plus}.{digits}f}"

    if found["value"] is None:
        return "-"
    if not interval or found["low"] is None:
        return number("value")
    return f"{number('value')} ({number('low')} to {number('high')})"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def put_into_page(page: epath.Path, tables: str) -> None:
    """Replaces what stands between the marks.

    Raises:
      UserError: the page does not have both marks, in their order.
    """
    text = page.read_text()
    begin, end = (text.find(mark) for mark in _MARKS)
    if not 0 <= begin < end:
        raise UserError(f"{page} has no place for the tables: it needs the lines {_MARKS[0]} and {_MARKS[1]}.")
    write_text(page, f"{text[: begin + len(_MARKS[0])]}\n\n{tables}\n{text[end:]}")


def _rounded(found: Any) -> Any:
    """The same with numbers of 6 digits, more than resamples can say."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _output(options: argparse.Namespace) -> epath.Path:
    """Where everything goes: as said, or, of one source, beside it."""
    if options.output:
        return epath.Path(options.output)
    if len(options.workdirs) + len(options.items) != 1:
        raise UserError("give a study's workdir or --items=FILE; where there are several, --output=DIR too.")
    return epath.Path(options.items[0]).parent if options.items else epath.Path(options.workdirs[0]) / "tables"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.study_tables", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("workdirs", nargs="*", metavar="workdir", help="of nca_jax.study")
    parser.add_argument("--items", action="append", default=[], metavar="FILE", help="study_items.npz of other runs")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="those runs whose names match, such as *seed=0"
    )
    parser.add_argument("--output", metavar="DIR", help="default: tables in the workdir, or where the items are")
    parser.add_argument("--page", metavar="FILE", help="a Markdown page that gets the tables")
    options = parser.parse_args(arguments)
    try:
        output = _output(options)
        kept = output / "study_items.npz"
        files = [epath.Path(path) for path in options.items]
        if options.only and kept in files:
            raise UserError(f"{kept} would keep nothing but those of --only; give another --output.")
        if options.workdirs or files != [kept]:
            workdirs = [collect(epath.Path(path)) for path in options.workdirs]
            save(part(merged([*workdirs, *map(load, files)]), options.only), kept)
        runs = load(kept)  # what others will compute from
        found = results(runs)
        output.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, figure in study_figures(found):
            paths.append(output / f"study_{name}.png")
            save_figure(figure, paths[-1])
        write_text(output / "study.json", json.dumps(_rounded(found)) + "\n")
        write_text(output / "study.md", as_markdown(found, [path.name for path in paths]))
        if options.page:
            page = epath.Path(options.page)
            beside = [os.path.relpath(path, page.parent) for path in paths]
            put_into_page(page, as_markdown(found, beside))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{found['runs']} runs: study_items.npz, study.json, study.md and {len(paths)} figures in {output}")
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main(sys.argv[1:]))

"""The tables of the report, ready to be set."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nca_jax.figures import shown
from nca_jax.items import NO_CONTEXT, WITH_CONTEXT
from nca_jax.metrics import compare, over_seeds
from nca_jax.page.findings import Finding, groups_of, label_of, pooled
from nca_jax.page.numbers import UNKNOWN, Cell, amount, change, probability, share

# What is said of several runs or of the change between two.
_QUANTITIES = {
    "no_context": "Accuracy without",
    "with_context": "Accuracy with",
    "difference": "Difference, points",
    "harm": "Harm",
    "help": "Help",
    "both": "Right in both",
    "length_change": "Length change",
}


class Column(NamedTuple):
    """A heading, and whether there are numbers below it."""

    heading: str
    is_number: bool = True


class Table(NamedTuple):
    """What a table shows, its columns, its rows of one cell a column, and what a reader has to know."""

    caption: str
    columns: list[Column]
    rows: list[list[Cell]]
    note: str = ""


def views_table(findings: Sequence[Finding]) -> Table:
    """Every view of every run."""
    columns = [Column("Run", False), Column("View", False)]
    headings = ("Accuracy", "At first", "Length, tokens", "Cut", "No answer", "Divergence, nats a token", "Items")
    columns += [Column(heading) for heading in headings]
    rows = []
    for finding in findings:
        run = finding.source.run
        first = run.point(min(run.evaluations)).views if len(run.evaluations) > 1 else {}
        for view, found in finding.summary["views"].items():
            samples = f" × {found['samples']}" if found["samples"] > 1 else ""
            before = first[view]["accuracy"].value if view in first else None
            rows.append(
                [
                    Cell(run.label),
                    Cell(shown(view)),
                    share(found["accuracy"]),
                    Cell(UNKNOWN if before is None else f"{100 * before:.1f} %"),
                    amount(found["length"], 1),
                    share(found["truncated"]),
                    share(found["no_answer"]),
                    amount(found["divergence"], 3),
                    Cell(f"{found['items']}{samples}"),
                ]
            )
    note = (
        "At first: accuracy in the run's first evaluation, before training where that is step 0. Cut: at the longest "
        "response. No answer: not cut, and no answer in it. Divergence: KL(q_x || q_view) on the response that was "
        "drawn without a context."
    )
    return _without_empty_columns(Table("Every view", columns, rows, note))


def pairs_table(findings: Sequence[Finding]) -> Table:
    """What each context changes, of the views whose right answers are those without a context."""
    columns = [Column("Run", False), Column("View", False), Column("Regime", False)]
    headings = ("Difference, points", "Harm", "Help", "Right in both", "Length change, %", "p")
    columns += [Column(heading) for heading in headings]
    rows, tests = [], []
    for finding in findings:
        for view, found in finding.pairs.items():
            counts = found["counts"]
            right, wrong = counts["harmed"] + counts["both"], counts["helped"] + counts["neither"]
            tests.append(found["test"])
            rows.append(
                [
                    Cell(finding.source.run.label),
                    Cell(shown(view)),
                    Cell(found["regime"]["letter"]),
                    change(found["difference"]),
                    _counted(found["harm"], counts["harmed"], right),
                    _counted(found["help"], counts["helped"], wrong),
                    share(found["both"]),
                    change(found["length_change"]),
                    Cell(probability(found["p"])),
                ]
            )
    note = (
        "Difference: accuracy in the view minus that without a context. Harm: wrong in the view, of those right "
        "without. Help: right in the view, of those wrong without; counts are of responses. p: of no difference "
        f"({', '.join(dict.fromkeys(tests))}); not corrected for the number of rows."
    )
    return Table("What each context changes", columns, rows, note)


def seeds_table(parts: Sequence[Sequence[Finding]]) -> Table | None:
    """Every method of which there are several seeds; None where there is none."""
    rows = []
    for part in parts:
        for group in groups_of(part):
            if len(group) < 2:
                continue
            label = label_of(group)
            for name, found in over_seeds([finding.source.lines for finding in group]).items():
                signed = name in ("difference", "length_change")
                text = change if signed else share
                seeds = {"value": found["value"], "low": found["seed_low"], "high": found["seed_high"]}
                each = ", ".join(text({"value": value, "low": None}).text for value in found["runs"])
                rows.append([Cell(label), Cell(_QUANTITIES[name]), text(found), Cell(text(seeds).interval), Cell(each)])
    columns = [Column("Method", False), Column("", False), Column("Mean"), Column("Over seeds"), Column("Each seed")]
    note = (
        "Below each mean its interval over items, each resampled with its responses of all seeds: what other items "
        "could give. Over seeds: Student's t interval over the runs: what other seeds could give."
    )
    return Table("Over seeds", columns, rows, note) if rows else None


def compared_table(reference: Sequence[Finding], others: Sequence[Sequence[Finding]]) -> Table:
    """The change from a reference to each other group of seeds, on the same items."""
    names = [NO_CONTEXT, WITH_CONTEXT, "harm", "help", "both"]
    columns = [Column("Run", False), *(Column(_QUANTITIES[name]) for name in names)]
    rows = []
    for other in others:
        changes = compare(pooled(reference), pooled(other))
        label = label_of(other)
        rows.append([Cell(label), *(change(changes[name]._asdict()) for name in names)])
    label = label_of(reference)
    return Table(f"Beside {label}: change in points", columns, rows, "Paired: the same items in both.")


def breakdown_table(findings: Sequence[Finding], by: str) -> Table | None:
    """Without and with the training context by the items' classes; None where there are none."""
    rows: dict[str, list[list[Cell]]] = {}
    for finding in findings:
        for row in finding.summary["breakdown"].get(WITH_CONTEXT, {}).get(by, []):
            shares = [row[NO_CONTEXT], row[WITH_CONTEXT], row["harm"], row["both"]]
            cells = [Cell(UNKNOWN if value is None else f"{100 * value:.1f} %") for value in shares]
            label = finding.source.run.label
            rows.setdefault(row["value"], []).append([Cell(row["value"]), Cell(label), Cell(str(row["items"])), *cells])
    if not rows:
        return None
    what = {"expected": "Right answer", "group": "Group"}[by]
    columns = [Column(what, False), Column("Run", False), Column("Items")]
    columns += [Column(heading) for heading in ("Accuracy without", "Accuracy with", "Harm", "Right in both")]
    return Table(f"By {what.lower()}", columns, [row for value in sorted(rows) for row in rows[value]])


def answers_table(findings: Sequence[Finding]) -> Table | None:
    """How often each answer was given; None where answers are free text, of which there are too many."""
    rows = []
    for finding in findings:
        answers = finding.summary["answers"]
        without, given = answers.get(NO_CONTEXT, {}), answers.get(WITH_CONTEXT, {})
        if "(other)" in without or "(other)" in given:
            continue
        nothing = {"given": 0, "expected": 0}
        is_known = any(counts["expected"] for counts in without.values())
        for answer in dict.fromkeys([*without, *given]):
            x, c = without.get(answer, nothing), given.get(answer, nothing)
            right = str(x["expected"]) if is_known else UNKNOWN
            counts = [right, str(x["given"]), str(c["given"])]
            rows.append([Cell(finding.source.run.label), Cell(answer), *map(Cell, counts)])
    columns = [Column("Run", False), Column("Answer", False), Column("Right"), Column("Given without")]
    table = Table("Answers", [*columns, Column("Given with")], rows)
    return _without_empty_columns(table) if rows else None


def _counted(estimate: Mapping[str, Any], count: int, total: int) -> Cell:
    """A share with what it was counted from."""
    cell = share(estimate)
    return cell._replace(interval=f"{count}/{total}, {cell.interval}") if total else cell


def _without_empty_columns(table: Table) -> Table:
    """The table without columns of which nothing is known."""
    known = [any(row[i].text != UNKNOWN for row in table.rows) for i in range(len(table.columns))]

    def keep(cells: Sequence[Any]) -> list[Any]:
        return [cell for cell, is_known in zip(cells, known, strict=True) if is_known]

    return table._replace(columns=keep(table.columns), rows=[keep(row) for row in table.rows])

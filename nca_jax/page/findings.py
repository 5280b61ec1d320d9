"""What the runs say, in words: the regime of each, what the anchor did to harm, and which runs can be compared."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from nca_jax.errors import UserError
from nca_jax.figures import group_label, seed_groups
from nca_jax.intervals import Estimate
from nca_jax.items import NO_CONTEXT, OTHER_TASK, WITH_CONTEXT
from nca_jax.metrics import Lines, compare, over_seeds, regime, summary
from nca_jax.page.numbers import change, share
from nca_jax.page.sources import Source

_VERDICTS = {
    "A": "giving the context back hurts",
    "B": "giving the context back helps",
    "C": "no difference shown",
}


class Finding(NamedTuple):
    """A source, and `metrics.summary` of its last evaluation."""

    source: Source
    summary: dict[str, Any]

    @property
    def pairs(self) -> dict[str, dict[str, Any]]:
        """What each context changes; another task's, which has answers of its own, is not among them."""
        return {view: found for view, found in self.summary["pairs"].items() if view != OTHER_TASK}


class Statement(NamedTuple):
    """Whom a sentence is about, the verdict in a few words, and the numbers behind it."""

    label: str
    verdict: str
    text: str


def find(source: Source) -> Finding:
    """What a source's evaluations say.

    Raises:
      UserError: an item is not in all views, or lacks a field.
    """
    try:
        for step in source.run.evaluations:
            source.run.point(step)
        return Finding(source, summary(source.lines))
    except (ValueError, KeyError) as error:
        raise UserError(f"the item lines in {source.path} are incomplete ({error}); evaluate again.") from error


def comparable(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings on the same items of the same domain, together."""
    parts: dict[Any, list[Finding]] = {}
    for finding in findings:
        items = frozenset(
            (line["id"], line.get("prompt"), line.get("expected"))
            for line in finding.source.lines
            if line["view"] == NO_CONTEXT
        )
        parts.setdefault((finding.source.run.config["domain"]["name"], items), []).append(finding)
    return list(parts.values())


def groups_of(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of runs that differ in the seed only, together."""
    by_name = {finding.source.run.name: finding for finding in findings}
    return [[by_name[run.name] for run in group] for group in seed_groups([f.source.run for f in findings])]


def label_of(group: Sequence[Finding]) -> str:
    """What a group of seeds is called."""
    return group_label([finding.source.run for finding in group])


def pooled(group: Sequence[Finding]) -> Lines:
    """The lines of all seeds, as further samples of the same items."""
    lines, first = [], 0
    for finding in group:
        ours = finding.source.lines
        lines += [line | {"sample": first + line.get("sample", 0)} for line in ours]
        first = 1 + max(line["sample"] for line in lines)
    return lines


def reference_and_others(groups: Sequence[list[Finding]]) -> tuple[list[Finding], list[list[Finding]]]:
    """The group that the others are compared with: plain OPD, else one without an anchor, else the first."""
    plain = [group for group in groups if group[0].source.run.method == "opd"]
    free = [group for group in groups if not is_anchored(group)]
    reference = (plain or free or groups)[0]
    return reference, [group for group in groups if group is not reference]


def is_anchored(group: Sequence[Finding]) -> bool:
    """Whether it is known to be trained with an anchor."""
    source = group[0].source
    return source.is_trained and bool(source.run.config["anchor"]["beta"])


def of_group(group: Sequence[Finding]) -> Statement | None:
    """The regime of one method, with harm and help; None where the training context was not tried."""
    if not all(WITH_CONTEXT in finding.pairs for finding in group):
        return None
    if len(group) > 1:
        found = over_seeds([finding.source.lines for finding in group])
        judged = regime(Estimate(*(found["difference"][name] for name in Estimate._fields)))
        each = ", ".join(share({"value": value, "low": None}).text for value in found["harm"]["runs"])
        text = f"{judged.sentence} Harm: {share(found['harm']).in_words()}, the mean over the seeds ({each})."
        return Statement(label_of(group), _verdict(judged.letter), text)
    found = group[0].pairs[WITH_CONTEXT]
    counts = found["counts"]
    pairs = sum(counts[kind] for kind in ("both", "harmed", "helped", "neither"))
    what = "items" if pairs == counts["items"] else "responses"
    text = found["regime"]["sentence"]
    for name, count, other, before, after in (
        ("Harm", "harmed", "both", "right", "wrong"),
        ("Help", "helped", "neither", "wrong", "right"),
    ):
        total = counts[count] + counts[other]
        measured = (
            f"{counts[count]} of the {total} {what} {before} without it are {after} with it, "
            f"{share(found[name.lower()]).in_words()}"
        )
        text += f" {name}: {measured if total else f'not defined, no response is {before} without it'}."
    return Statement(label_of(group), _verdict(found["regime"]["letter"]), text)


def of_comparison(reference: Sequence[Finding], other: Sequence[Finding]) -> Statement:
    """Whether harm is lower than in the reference, by the paired interval."""
    changes = {name: found._asdict() for name, found in compare(pooled(reference), pooled(other)).items()}
    harm, label = changes["harm"], f"{label_of(other)} beside {label_of(reference)}"
    if harm["value"] is None:
        return Statement(label, "harm cannot be compared", "In one of them nothing is right without the context.")
    adds_anchor = is_anchored(other) and not is_anchored(reference)
    includes_0 = harm["low"] <= 0 <= harm["high"]
    if includes_0:
        verdict = "no effect of the anchor on harm shown" if adds_anchor else "no difference in harm shown"
    else:
        direction = ("lowered", "lower") if harm["high"] < 0 else ("raised", "higher")
        verdict = f"the anchor {direction[0]} harm" if adds_anchor else f"harm is {direction[1]}"
    without, given = (change(changes[view]) for view in (NO_CONTEXT, WITH_CONTEXT))
    text = (
        f"Harm changes by {change(harm).text} points (paired 95 % interval {change(harm).interval}, which "
        f"{'includes' if includes_0 else 'excludes'} 0). Accuracy changes by {without.text} points without the context "
        f"({without.interval}) and by {given.text} points with it ({given.interval})."
    )
    return Statement(label, verdict, text)


def _verdict(letter: str) -> str:
    return f"regime {letter}, {_VERDICTS[letter]}"

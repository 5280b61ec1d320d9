"""What a paired evaluation says. Pure functions of lists and of item lines; no jax, no model.

Item lines are those of `items.read_items`. A line without `sample` is sample 0; without `expected`, `group` or
`divergence` these are not known. Intervals are over items (intervals.py). N: items, S: responses of an item in a view.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nca_jax.intervals import Estimate, Ratio, average, difference, estimates, mean, paired_test, seed_interval

Lines = Sequence[Mapping[str, Any]]

_NO_CONTEXT, _WITH_CONTEXT = "no_context", "with_context"
_MOST_VALUES = 25  # of a field that is broken down or counted; more of them are not classes but free text
_NOT_GIVEN = "(none)"


def accuracy(correct: Sequence[bool]) -> float:
    """Share of right answers over all items given."""
    return sum(correct) / len(correct)


def paired_metrics(
    without: Sequence[bool], with_context: Sequence[bool], without_length: Sequence[int], with_length: Sequence[int]
) -> dict[str, float]:
    """Metrics of the same items answered without and with the context.

    Args:
      without, with_context: whether each item was answered right; same order.
      without_length, with_length: tokens of each response.

    Returns:
      "no_context", "with_context": accuracies. "both": share right in both views. "harm": P(wrong with the context |
      right without it), 0 where nothing is right without it; "harmed" of "right_without" items are its numerator and
      denominator. "help": P(right with | wrong without). "length_change": mean length with the context over mean
      length without it, minus 1.
    """
    if not len(without) == len(with_context) == len(without_length) == len(with_length) > 0:
        raise ValueError("paired metrics need the same, non-zero number of items in both views")
    pairs = list(zip(without, with_context, strict=True))
    right_without = sum(x for x, _ in pairs)
    harmed = sum(x and not c for x, c in pairs)
    helped = sum(c and not x for x, c in pairs)
    wrong_without = len(pairs) - right_without
    return {
        "no_context": accuracy(without),
        "with_context": accuracy(with_context),
        "both": sum(x and c for x, c in pairs) / len(pairs),
        "harm": harmed / right_without if right_without else 0.0,
        "help": helped / wrong_without if wrong_without else 0.0,
        "harmed": harmed,
        "right_without": right_without,
        "length_change": sum(with_length) / sum(without_length) - 1.0 if sum(without_length) else 0.0,
    }


class Regime(NamedTuple):
    """What giving the context back does: A it hurts, B it still helps, C no difference is shown."""

    letter: str
    rule: str
    sentence: str


def view_summary(lines: Lines, view: str) -> dict[str, Any]:
    """One view alone.

    Returns:
      "items", and "samples" of each; estimates of "accuracy", of the mean "length" in tokens, of the shares "truncated"
      (cut) and "no_answer" (not cut, and no answer in it), and of the mean "divergence" in nats a token, None where no
      line has it.

    Raises:
      ValueError: no line is of this view, one is there twice, or items have different samples.
    """
    responses = _Responses.of(lines, view)
    return _view_figures(responses, estimates(responses.ratios()))


def pair_summary(lines: Lines, view: str = _WITH_CONTEXT) -> dict[str, Any]:
    """The same items and samples in a view with a context and without one.

    Returns:
      Estimates: "difference", accuracy of the view minus that without a context; "harm", P(wrong with | right without);
      "help", P(right with | wrong without); "both", right in both; "length_change", mean length with over mean length
      without it, minus 1; "length_change_per_item", the mean of each item's own change, over items that have a length
      without it. "counts": of pairs of responses that are "both" right, "harmed", "helped" and "neither", and of
      "items". "p" and "test": of no difference. "regime": a Regime.

    Raises:
      ValueError: as `view_summary`, or an item or sample is in one of the views only.
    """
    without, other = _pair(lines, view)
    return _pair_figures(without, other, view, estimates(_pair_ratios(without, other)))


def regime(change: Estimate, view: str = _WITH_CONTEXT) -> Regime:
    """Which of the paper's three regimes a difference of accuracies is.

    Thresholds are not published; this rule, on which side of 0 the whole 95 % interval lies, is ours.
    """
    context = "the context" if view == _WITH_CONTEXT else f"the {view} context"
    low, high = 100 * change.low, 100 * change.high
    numbers = f"accuracy changes by {100 * change.value:+.1f} points (95 % interval {low:+.1f} to {high:+.1f})"
    if high < 0:
        letter, sentence = "A", f"Giving {context} hurts: {numbers}."
    elif low > 0:
        letter, sentence = "B", f"Giving {context} still helps: {numbers}."
    else:
        letter = "C"
        sentence = (
            f"Giving {context} makes no difference that these items show: {numbers}, so that a loss of up to "
            f"{abs(low):.1f} points or a gain of up to {high:.1f} is possible."
        )
    rule = (
        f"95 % interval of the accuracy with {context} minus that without it: below 0 is A (hurts), above 0 is B "
        "(helps), else C (no difference shown)"
    )
    return Regime(letter, rule, sentence)


def breakdown(lines: Lines, by: str, view: str = _WITH_CONTEXT) -> list[dict[str, Any]]:
    """Accuracies, harm and both-right by the right answer or by the group of an item, as its line without a context
    says.

    Args:
      by: "expected" or "group".

    Returns:
      A row for each value: "value", "items", "no_context", the view's name, "harm" (None where nothing is right
      without a context) and "both". [] where the field is not known, or has more than 25 values or only one.

    Raises:
      ValueError: as `pair_summary`.
    """
    without, other = _pair(lines, view)
    value_N = np.array([line.get(by) or _NOT_GIVEN for line in without.first_lines()])
    values = sorted(set(value_N.tolist()))
    if not 2 <= len(values) <= _MOST_VALUES:
        return []
    rows = []
    for value in values:
        x_MxS, c_MxS = without.correct_NxS[value_N == value], other.correct_NxS[value_N == value]
        rows.append(
            {
                "value": value,
                "items": len(x_MxS),
                _NO_CONTEXT: float(x_MxS.mean()),
                view: float(c_MxS.mean()),
                "harm": float((x_MxS & ~c_MxS).sum() / x_MxS.sum()) if x_MxS.any() else None,
                "both": float((x_MxS & c_MxS).mean()),
            }
        )
    return rows


def answer_histogram(lines: Lines, view: str) -> dict[str, dict[str, int]]:
    """Answer -> how often it was "given" and "expected" in a view, the most frequent first.

    At most 25 answers; the rest are "(other)", and responses that hold none, or are expected to be nothing known,
    "(none)". Both are last, and only there if they count something.
    """
    given, expected = collections.Counter(), collections.Counter()
    for line in lines:
        if line["view"] == view:
            given[_NOT_GIVEN if line["answer"] is None else line["answer"]] += 1
            expected[line.get("expected") or _NOT_GIVEN] += 1
    if expected.keys() == {_NOT_GIVEN}:  # not known of any
        expected.clear()
    total = given + expected
    ranked = sorted(total.keys() - {_NOT_GIVEN}, key=lambda answer: (-total[answer], answer))
    rest = ranked[_MOST_VALUES:]
    histogram = {answer: {"given": given[answer], "expected": expected[answer]} for answer in ranked[:_MOST_VALUES]}
    if rest:
        histogram["(other)"] = {"given": sum(given[a] for a in rest), "expected": sum(expected[a] for a in rest)}
    if total[_NOT_GIVEN]:
        histogram[_NOT_GIVEN] = {"given": given[_NOT_GIVEN], "expected": expected[_NOT_GIVEN]}
    return histogram


def summary(lines: Lines) -> dict[str, Any]:
    """All of the above for all views, as JSON takes it.

    Returns:
      "views": view -> `view_summary`; "pairs": view -> `pair_summary`, of the views whose right answers are those
      without a context; "breakdown": view -> {"expected": rows, "group": rows}, of the same; "answers": view ->
      `answer_histogram`. Estimates and regimes are dictionaries of their fields.

    Raises:
      ValueError: as `pair_summary`, or views have different items or samples.
    """
    if not lines:
        raise ValueError("there is no line")
    responses = {view: _Responses.of(lines, view) for view in dict.fromkeys(line["view"] for line in lines)}
    first = next(iter(responses))
    for view, theirs in responses.items():
        _check_same(responses[first].ids, theirs.ids, "item", first, view)
        _check_same(responses[first].samples, theirs.samples, "sample", first, view)
    without = responses.get(_NO_CONTEXT)
    paired = [view for view in responses if without and view != _NO_CONTEXT and _same_answers(lines, view)]
    ratios = {("view", view): theirs.ratios() for view, theirs in responses.items()}
    ratios |= {("pair", view): _pair_ratios(without, responses[view]) for view in paired}
    # All at once: drawing the resamples takes most of the time.
    flat = estimates({(key, name): ratio for key, named in ratios.items() for name, ratio in named.items()})
    found = {key: {name: flat[key, name] for name in named} for key, named in ratios.items()}
    views = {view: _view_figures(theirs, found["view", view]) for view, theirs in responses.items()}
    pairs = {view: _pair_figures(without, responses[view], view, found["pair", view]) for view in paired}
    return {
        "views": {view: _plain(figures) for view, figures in views.items()},
        "pairs": {view: _plain(figures) for view, figures in pairs.items()},
        "breakdown": {view: {by: breakdown(lines, by, view) for by in ("expected", "group")} for view in paired},
        "answers": {view: answer_histogram(lines, view) for view in responses},
    }


def over_seeds(runs: Sequence[Lines]) -> dict[str, Any]:
    """Runs that differ in nothing but their seed, evaluated on the same items.

    Returns:
      For "no_context" and "with_context" (accuracies), "difference", "harm", "help", "both" and "length_change": the
      "value", its mean over the runs in which it is defined; "low", "high" and "method" of its interval over items, an
      item resampled with its responses of all runs; "runs", the value of each; "seed_low" and "seed_high", Student's t
      interval over the runs, None for a single one. The first says how far other items, the second how far other seeds
      could be.

    Raises:
      ValueError: as `pair_summary`, or the runs have different items.
    """
    by_run = []
    for without, other in _same_items(runs, _WITH_CONTEXT):
        accuracies = {_NO_CONTEXT: without.ratios()["accuracy"], _WITH_CONTEXT: other.ratios()["accuracy"]}
        by_run.append(accuracies | _pair_ratios(without, other))
    names = (_NO_CONTEXT, _WITH_CONTEXT, "difference", "harm", "help", "both", "length_change")
    defined = {name: [run[name] for run in by_run if run[name].denominator_N.any()] for name in names}
    # What is defined in no run stays one undefined ratio.
    pooled = estimates({name: average(defined[name] or [by_run[0][name]]) for name in names})
    found = {}
    for name in names:
        values = [_value(run[name]) for run in by_run]
        seed_low, seed_high = seed_interval([value for value in values if value is not None])
        found[name] = pooled[name]._asdict() | {"runs": values, "seed_low": seed_low, "seed_high": seed_high}
    return found


def compare(lines_a: Lines, lines_b: Lines, view: str = _WITH_CONTEXT) -> dict[str, Estimate]:
    """Run b minus run a on the same items, such as NCA minus OPD.

    Returns:
      Estimates of the change of "no_context" and of the view (accuracies), of "harm", "help" and "both". Items are
      resampled with what both runs made of them, so the interval is that of the paired difference.

    Raises:
      ValueError: as `pair_summary`, or the runs have different items.
    """
    a, b = _same_items([lines_a, lines_b], view)
    ratios_a, ratios_b = _pair_ratios(*a), _pair_ratios(*b)
    changes = {}
    for name, i in ((_NO_CONTEXT, 0), (view, 1)):
        # Of one ratio and not of two: where nothing changes, its exact interval knows that the items are the same.
        changes[name] = mean(b[i].correct_NxS.mean(axis=1) - a[i].correct_NxS.mean(axis=1), "difference")
    changes |= {name: difference(ratios_b[name], ratios_a[name]) for name in ("harm", "help", "both")}
    return estimates(changes)


class _Responses(NamedTuple):
    """One view's responses as arrays, items by their ids and samples by their numbers."""

    ids: list[str]
    samples: list[int]
    lines: list[Mapping[str, Any]]  # item by item
    correct_NxS: np.ndarray
    length_NxS: np.ndarray

    @classmethod
    def of(cls, lines: Lines, view: str) -> "_Responses":
        by_key: dict[tuple[str, int], Mapping[str, Any]] = {}
        for line in lines:
            if line["view"] == view:
                key = (line["id"], line.get("sample", 0))
                if key in by_key:
                    raise ValueError(f"item {key[0]!r}, sample {key[1]}, is there twice in view {view}")
                by_key[key] = line
        if not by_key:
            raise ValueError(f"there is no line of view {view}")
        ids, samples = sorted({item for item, _ in by_key}), sorted({sample for _, sample in by_key})
        for key in ((item, sample) for item in ids for sample in samples):
            if key not in by_key:
                raise ValueError(f"item {key[0]!r} has no sample {key[1]} in view {view}, as other items have")
        ordered = [by_key[key] for key in sorted(by_key)]
        shape = (len(ids), len(samples))
        correct_NxS = np.array([line["correct"] for line in ordered], bool).reshape(shape)
        length_NxS = np.array([line["length"] for line in ordered], float).reshape(shape)
        return cls(ids, samples, ordered, correct_NxS, length_NxS)

    def first_lines(self) -> list[Mapping[str, Any]]:
        """One line of each item."""
        return self.lines[:: len(self.samples)]

    def ratios(self) -> dict[str, Ratio]:
        """What `view_summary` estimates; "divergence" only where a line has it."""
        every_N = np.full(len(self.ids), float(len(self.samples)))

        def share(of_line: Sequence[bool]) -> Ratio:
            return Ratio(np.array(of_line, float).reshape(self.correct_NxS.shape).sum(axis=1), every_N)

        found = {
            "accuracy": share(self.correct_NxS),
            "length": Ratio(self.length_NxS.sum(axis=1), every_N, "amount"),
            "truncated": share([line["truncated"] for line in self.lines]),
            "no_answer": share([line["answer"] is None and not line["truncated"] for line in self.lines]),
        }
        nats = np.array([line.get("divergence") for line in self.lines], float)  # None becomes nan
        divergence_NxS = nats.reshape(self.correct_NxS.shape)
        measured_NxS = ~np.isnan(divergence_NxS)
        if measured_NxS.any():
            found["divergence"] = Ratio(np.nansum(divergence_NxS, axis=1), measured_NxS.sum(axis=1), "amount")
        return found


def _pair(lines: Lines, view: str) -> tuple[_Responses, _Responses]:
    """The responses without a context and in a view, item by item and sample by sample."""
    without, other = _Responses.of(lines, _NO_CONTEXT), _Responses.of(lines, view)
    _check_same(without.ids, other.ids, "item", _NO_CONTEXT, view)
    _check_same(without.samples, other.samples, "sample", _NO_CONTEXT, view)
    return without, other


def _same_items(runs: Sequence[Lines], view: str) -> list[tuple[_Responses, _Responses]]:
    pairs = [_pair(lines, view) for lines in runs]
    for number, (without, _) in enumerate(pairs[1:], 2):
        _check_same(pairs[0][0].ids, without.ids, "item", "run 1", f"run {number}")
    return pairs


def _check_same(ours: Sequence, theirs: Sequence, what: str, here: str, there: str) -> None:
    for some, others, place in ((ours, theirs, here), (theirs, ours, there)):
        if alone := sorted(set(some) - set(others)):
            raise ValueError(
                f"{here} and {there} need the same {what}s; in {place} only: {len(alone)}, such as {alone[0]!r}"
            )


def _pair_ratios(without: _Responses, other: _Responses) -> dict[str, Ratio]:
    """What `pair_summary` estimates."""
    x_NxS, c_NxS = without.correct_NxS, other.correct_NxS
    every_N = np.full(len(x_NxS), float(x_NxS.shape[1]))
    right_N, both_N, helped_N = x_NxS.sum(axis=1), (x_NxS & c_NxS).sum(axis=1), (~x_NxS & c_NxS).sum(axis=1)
    before_N, change_N = without.length_NxS.sum(axis=1), (other.length_NxS - without.length_NxS).sum(axis=1)
    own_change_N = np.divide(change_N, before_N, out=np.full(len(x_NxS), np.nan), where=before_N > 0)
    return {
        "difference": Ratio(c_NxS.sum(axis=1) - right_N, every_N, "difference"),
        "harm": Ratio(right_N - both_N, right_N),
        "help": Ratio(helped_N, every_N - right_N),
        "both": Ratio(both_N, every_N),
        "length_change": Ratio(change_N, before_N, "amount"),
        "length_change_per_item": mean(own_change_N),
    }


def _view_figures(responses: _Responses, found: Mapping[str, Estimate]) -> dict[str, Any]:
    counts = {"items": len(responses.ids), "samples": len(responses.samples)}
    return {**counts, **found, "divergence": found.get("divergence")}


def _pair_figures(without: _Responses, other: _Responses, view: str, found: Mapping[str, Estimate]) -> dict[str, Any]:
    x_NxS, c_NxS = without.correct_NxS, other.correct_NxS
    outcomes = {"both": x_NxS & c_NxS, "harmed": x_NxS & ~c_NxS, "helped": ~x_NxS & c_NxS, "neither": ~x_NxS & ~c_NxS}
    test = paired_test(x_NxS, c_NxS)
    return {
        **found,
        "counts": {name: int(is_NxS.sum()) for name, is_NxS in outcomes.items()} | {"items": len(without.ids)},
        "p": test.p,
        "test": test.method,
        "regime": regime(found["difference"], view),
    }


def _value(ratio: Ratio) -> float | None:
    total = ratio.denominator_N.sum()
    return float(ratio.numerator_N.sum() / total) if total else None


def _same_answers(lines: Lines, view: str) -> bool:
    """Whether a view's right answers are those without a context, as far as they are known.

    Under the context of another task they are not, and a right answer that turns into that task's is no harm.
    """
    expected = {line["id"]: line.get("expected") for line in lines if line["view"] == _NO_CONTEXT}
    theirs = [(line["id"], line.get("expected")) for line in lines if line["view"] == view]
    return all(answer == expected.get(item) for item, answer in theirs if answer and expected.get(item))


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Estimates and regimes as dictionaries."""
    return {name: value._asdict() if isinstance(value, Estimate | Regime) else value for name, value in found.items()}

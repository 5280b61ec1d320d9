"""Paired metrics and summaries of item lines, counted by hand."""

import json

import pytest

from nca_jax.intervals import BOOTSTRAP, EXACT, UNDEFINED, Estimate
from nca_jax.metrics import (
    accuracy,
    answer_histogram,
    breakdown,
    compare,
    over_seeds,
    pair_summary,
    paired_metrics,
    regime,
    summary,
    view_summary,
)

ONES = [1, 1, 1, 1]


def test_pair_of_known_outcomes():
    """with [1,1,0,0], without [1,0,1,0]: one item of each of the four kinds."""
    assert paired_metrics([1, 0, 1, 0], [1, 1, 0, 0], ONES, ONES) == {
        "no_context": 0.5,
        "with_context": 0.5,
        "both": 0.25,
        "harm": 0.5,
        "help": 0.5,
        "harmed": 1,
        "right_without": 2,
        "length_change": 0.0,
    }


def test_harm_and_help_have_their_own_denominators():
    metrics = paired_metrics([1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1] * 5, [1] * 5)
    assert metrics["harm"] == pytest.approx(1 / 3)
    assert metrics["help"] == 1.0
    assert (metrics["harmed"], metrics["right_without"]) == (1, 3)
    assert (metrics["no_context"], metrics["with_context"], metrics["both"]) == pytest.approx((0.6, 0.8, 0.4))


def test_nothing_right_without_the_context_is_no_harm():
    metrics = paired_metrics([0, 0, 0, 0], [0, 1, 1, 1], ONES, ONES)
    assert (metrics["harm"], metrics["harmed"], metrics["right_without"]) == (0.0, 0, 0)
    assert metrics["help"] == 0.75


def test_everything_right_without_the_context_leaves_nothing_to_help():
    metrics = paired_metrics([1, 1, 1, 1], [0, 1, 1, 1], ONES, ONES)
    assert (metrics["help"], metrics["harm"]) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("without", "with_context", "change"), [([2, 6], [1, 3], -0.5), ([1, 3], [4, 4], 1.0), ([0, 0], [1, 1], 0.0)]
)
def test_length_change_is_relative_to_the_mean_length_without_the_context(without, with_context, change):
    assert paired_metrics([1, 1], [1, 1], without, with_context)["length_change"] == change


@pytest.mark.parametrize("lengths", [(3, 4, 4, 4), (4, 3, 4, 4), (4, 4, 3, 4), (4, 4, 4, 3), (0, 0, 0, 0)])
def test_lists_of_unequal_or_no_length_are_refused(lengths):
    with pytest.raises(ValueError, match="same, non-zero number"):
        paired_metrics(*([1] * n for n in lengths))


def test_accuracy_is_over_all_items():
    assert accuracy([True, False, False, False, True, True, True]) == 4 / 7


# Item lines: five items with one response each in three views, counted by hand.
#
#            without  with  other task
#   a  right   yes     yes     yes        group anatomy
#   b  right   yes     no      yes        group anatomy
#   c  right   no      yes     no         group anatomy
#   d  right   yes     yes     no         group surgery
#   e  right   no      no      no         group surgery, cut with the context
#
# accuracy 3/5, 3/5, 2/5; both a, d: 2/5; harm b of a, b, d: 1/3; help c of c, e: 1/2.
# length  a 2 -> 3, b 4 -> 4, c 4 -> 2, d 5 -> 10, e 5 -> 8: means 4 and 5.4, +.35; own +.5, 0, -.5, +1, +.6: mean .32.
OUTCOMES = {  # item: (right without, with, under the other task; tokens without, with; group)
    "a": (True, True, True, 2, 3, "anatomy"),
    "b": (True, False, True, 4, 4, "anatomy"),
    "c": (False, True, False, 4, 2, "anatomy"),
    "d": (True, True, False, 5, 10, "surgery"),
    "e": (False, False, False, 5, 8, "surgery"),
}


def line(item, view="no_context", correct=True, length=1, **more):
    """An item line without what older runs do not have."""
    defaults = {"prompt": "?", "response": "", "answer": "A" if correct else "B", "truncated": False}
    return {"id": item, "view": view, "correct": correct, "length": length, **defaults, **more}


def five_items() -> list[dict]:
    lines = []
    for item, (x, c, other, short, long, group) in OUTCOMES.items():
        known = {"sample": 0, "group": group}
        lines.append(line(item, "no_context", x, short, expected="A", divergence=None, **known))
        cut = {"truncated": True, "answer": None} if item == "e" else {}
        with_context = {"expected": "A", "divergence": 0.5 if item in "ab" else 0.2, **known, **cut}
        lines.append(line(item, "with_context", c, long, **with_context))
        lines.append(line(item, "other_task", other, 1, expected="Z", divergence=None, **known))
    return lines


def pairs(outcomes: str, view: str = "with_context", sample: int = 0) -> list[dict]:
    """Items i0, i1, … of one response in both views: b right in both, h harmed, p helped, n in neither."""
    lines = []
    for i, outcome in enumerate(outcomes):
        lines.append(line(f"i{i}", "no_context", outcome in "bh", sample=sample))
        lines.append(line(f"i{i}", view, outcome in "bp", sample=sample))
    return lines


def test_a_view_has_its_shares_and_means():
    found = view_summary(five_items(), "with_context")
    assert (found["items"], found["samples"]) == (5, 1)
    values = {name: found[name].value for name in ("accuracy", "length", "truncated", "no_answer", "divergence")}
    assert values == pytest.approx(
        {"accuracy": 0.6, "length": 5.4, "truncated": 0.2, "no_answer": 0.0, "divergence": (2 * 0.5 + 3 * 0.2) / 5}
    )
    for name in ("accuracy", "length", "divergence"):
        assert found[name].low < found[name].value < found[name].high
    # None of five: exact, (1 - u)^5 = 0.025.
    assert found["no_answer"] == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 5), EXACT))


def test_no_answer_is_not_cut_and_without_one():
    lines = [line("a", answer=None), line("b", answer=None, truncated=True), line("c"), line("d")]
    found = view_summary(lines, "no_context")
    assert (found["no_answer"].value, found["truncated"].value) == (0.25, 0.25)


def test_divergence_is_over_the_lines_that_have_it():
    assert view_summary(five_items(), "no_context")["divergence"] is None
    lines = [line("a", divergence=0.25), line("b", divergence=None), line("c", divergence=0.75), line("d")]
    assert view_summary(lines, "no_context")["divergence"].value == 0.5


def test_a_pair_of_views_counted_by_hand():
    found = pair_summary(five_items())
    names = ("difference", "harm", "help", "both", "length_change", "length_change_per_item")
    assert {name: found[name].value for name in names} == pytest.approx(
        {
            "difference": 0,
            "harm": 1 / 3,
            "help": 1 / 2,
            "both": 2 / 5,
            "length_change": 0.35,
            "length_change_per_item": 0.32,
        }
    )
    assert found["counts"] == {"both": 2, "harmed": 1, "helped": 1, "neither": 1, "items": 5}
    # One harmed and one helped: two-sided binomial of 1 in 2.
    assert (found["p"], found["test"]) == (1.0, "McNemar, exact")


def test_the_known_pair():
    """with [1,1,0,0], without [1,0,1,0]."""
    lines = pairs("bphn")
    assert [view_summary(lines, view)["accuracy"].value for view in ("no_context", "with_context")] == [0.5, 0.5]
    assert (pair_summary(lines)["both"].value, pair_summary(lines)["harm"].value) == (0.25, 0.5)


def test_pair_estimates_agree_with_the_training_loop():
    """Both count the same lines, by different code."""
    lines = five_items()
    by_view = {view: [x for x in lines if x["view"] == view] for view in ("no_context", "with_context")}
    columns = [[x[name] for x in by_view[view]] for name in ("correct", "length") for view in by_view]
    logged, found = paired_metrics(*columns), pair_summary(lines)
    for name in ("harm", "help", "both", "length_change"):
        assert found[name].value == pytest.approx(logged[name])
    assert (found["counts"]["harmed"], logged["right_without"]) == (logged["harmed"], 3)


def test_harm_of_nothing_is_no_number():
    found = pair_summary(pairs("npnp"))
    assert found["harm"] == Estimate(None, None, None, UNDEFINED)
    assert found["help"].value == 0.5


def test_lengths_of_nothing_are_no_number():
    lines = [line("a", length=0), line("a", "with_context", length=3), line("b", length=0)]
    lines.append(line("b", "with_context", length=3))
    found = pair_summary(lines)
    assert found["length_change"].value is None
    assert found["length_change_per_item"].value is None


def test_samples_are_paired_by_number_whatever_the_order_of_lines():
    """Item i0: harmed in sample 0, both right in sample 1; paired otherwise it would be harmed and helped."""
    lines = pairs("hn", sample=0) + pairs("bn", sample=1)
    found = pair_summary(lines[::-1])
    assert found["counts"] == {"both": 1, "harmed": 1, "helped": 0, "neither": 2, "items": 2}
    assert found["harm"].value == 0.5
    assert view_summary(lines, "no_context")["samples"] == 2
    assert "sign flips" in found["test"]


def test_responses_of_one_item_are_not_items_of_their_own():
    """Twelve items whose four responses agree, beside the same 48 pairs as if they were of 48 items."""
    outcomes = "bbbbbhhhpnnn"
    samples = [x for sample in range(4) for x in pairs(outcomes, sample=sample)]
    by_item, as_items = pair_summary(samples), pair_summary(pairs(outcomes * 4))
    assert by_item["counts"] == as_items["counts"] | {"items": 12}
    for name in ("difference", "harm", "both"):
        assert by_item[name].value == as_items[name].value
        width, naive = (found[name].high - found[name].low for found in (by_item, as_items))
        assert width > 1.5 * naive
    # Signs of 4 items, of which 3 against 1: 10 of 16 sums are as far from 0. Of 16 pairs, 12 against 4: p = .077.
    assert by_item["p"] == pytest.approx(10 / 16)
    assert as_items["p"] == pytest.approx(2 * sum((1820, 560, 120, 16, 1)) / 2**16)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (pairs("bh")[:-1], "same items; in no_context only: 1, such as 'i1'"),
        (pairs("bh")[1:], "same items; in with_context only: 1, such as 'i0'"),
        (pairs("b") + pairs("b", sample=1)[:1], "same samples; in no_context only: 1, such as 1"),
        (pairs("bb") + pairs("b", sample=1), "'i1' has no sample 1 in view no_context"),
        (pairs("b") + pairs("b"), "'i0', sample 0, is there twice in view no_context"),
        (pairs("b", view="empty"), "no line of view with_context"),
    ],
)
def test_lines_that_do_not_pair_are_refused(lines, message):
    with pytest.raises(ValueError, match=message):
        pair_summary(lines)


@pytest.mark.parametrize(
    ("outcomes", "letter"), [("h" * 12 + "b" * 8, "A"), ("p" * 12 + "b" * 8, "B"), ("hp" + "b" * 18, "C")]
)
def test_the_regime_is_where_the_interval_lies(outcomes, letter):
    found = pair_summary(pairs(outcomes))
    assert found["regime"].letter == letter
    low, high = found["difference"].low, found["difference"].high
    assert {"A": high < 0, "B": low > 0, "C": low <= 0 <= high}[letter]


def test_a_regime_says_its_numbers_and_what_stays_possible():
    sentences = [regime(Estimate(*numbers, "")).sentence for numbers in ((-0.095, -0.141, -0.049), (0.01, -0.02, 0.04))]
    assert "hurts" in sentences[0] and "-9.5 points (95 % interval -14.1 to -4.9)" in sentences[0]
    assert "a loss of up to 2.0 points or a gain of up to 4.0" in sentences[1]
    assert "below 0 is A" in regime(Estimate(0.1, 0.0, 0.2, "")).rule
    assert regime(Estimate(0.1, 0.0, 0.2, "")).letter == "C"  # 0 is still possible
    assert "the shuffled context" in regime(Estimate(0.1, 0.05, 0.2, ""), "shuffled").sentence


def test_no_item_that_changes_leaves_a_small_difference_possible():
    """Of 20 items none is harmed or helped: with (1 - u)^20 = 0.025, u = 0.168."""
    found = pair_summary(pairs("b" * 10 + "n" * 10))
    assert found["difference"].value == 0
    assert (found["difference"].low, found["difference"].high) == pytest.approx((-0.168, 0.168), abs=1e-3)
    assert (found["regime"].letter, found["p"]) == ("C", 1.0)


def test_breakdown_by_group():
    """Anatomy: a, b, c; surgery: d, e."""
    rows = breakdown(five_items(), "group")
    assert rows == [
        pytest.approx(
            {"value": "anatomy", "items": 3, "no_context": 2 / 3, "with_context": 2 / 3, "harm": 1 / 2, "both": 1 / 3}
        ),
        {"value": "surgery", "items": 2, "no_context": 0.5, "with_context": 0.5, "harm": 0.0, "both": 0.5},
    ]
    assert breakdown(five_items(), "group", "other_task")[0]["other_task"] == pytest.approx(2 / 3)


def test_breakdown_of_a_value_with_nothing_right_has_no_harm():
    lines = [x | {"expected": "yes" if x["id"] == "i0" else "no"} for x in pairs("nb")]
    assert [(row["value"], row["harm"]) for row in breakdown(lines, "expected")] == [("no", 0.0), ("yes", None)]


def test_breakdown_counts_items_that_have_no_value_too():
    lines = [x | ({"group": "x"} if x["id"] == "i0" else {}) for x in pairs("bhb")]
    assert [(row["value"], row["items"]) for row in breakdown(lines, "group")] == [("(none)", 2), ("x", 1)]


@pytest.mark.parametrize(("values", "rows"), [(0, 0), (1, 0), (2, 2), (25, 25), (26, 0)])
def test_breakdown_needs_a_few_different_values(values, rows):
    lines = pairs("b" * 26)
    if values:
        lines = [x | {"group": f"group {int(x['id'][1:]) % values}"} for x in lines]
    assert len(breakdown(lines, "group")) == rows


def test_answers_are_counted_beside_those_expected():
    lines = [line(str(i), answer=answer, expected="B" if i < 4 else "A") for i, answer in enumerate("AABAA")]
    lines += [line("5", answer=None, expected="A"), line("5", "with_context", answer="C", expected="A")]
    histogram = answer_histogram(lines, "no_context")
    assert histogram == {
        "A": {"given": 4, "expected": 2},
        "B": {"given": 1, "expected": 4},
        "(none)": {"given": 1, "expected": 0},
    }
    assert list(histogram) == ["A", "B", "(none)"]


def test_rare_answers_are_counted_together():
    """27 answers, the first three twice: 25 are shown, and the last two, in alphabetical order, are the others."""
    answers = [f"answer {i:02d}" for i in range(27)]
    lines = [line(str(i), answer=answer) for i, answer in enumerate(answers + answers[:3])]
    histogram = answer_histogram(lines, "no_context")
    assert len(histogram) == 26
    assert histogram["answer 00"] == {"given": 2, "expected": 0}
    assert histogram["(other)"] == {"given": 2, "expected": 0}
    assert "answer 25" not in histogram and "answer 24" in histogram


def test_summary_has_everything_and_is_json():
    found = summary(five_items())
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert list(found["views"]) == ["no_context", "with_context", "other_task"]
    assert found["views"]["other_task"]["accuracy"]["value"] == 0.4
    assert found["views"]["with_context"]["accuracy"].keys() == {"value", "low", "high", "method"}
    assert found["pairs"]["with_context"]["harm"]["value"] == pytest.approx(1 / 3)
    assert found["pairs"]["with_context"]["regime"]["letter"] == "C"
    assert [row["value"] for row in found["breakdown"]["with_context"]["group"]] == ["anatomy", "surgery"]
    assert found["breakdown"]["with_context"]["expected"] == []
    assert found["answers"]["other_task"] == {
        "Z": {"given": 0, "expected": 5},
        "B": {"given": 3, "expected": 0},
        "A": {"given": 2, "expected": 0},
    }


def test_summary_pairs_only_views_that_ask_for_the_same_answers():
    """Under another task's context other answers are right, so a change of what is right is no harm."""
    assert list(summary(five_items())["pairs"]) == ["with_context"]
    assert list(summary(pairs("bh") + pairs("bh", view="shuffled")[1::2])["pairs"]) == ["with_context", "shuffled"]
    alone = summary([x for x in five_items() if x["view"] == "with_context"])
    assert (list(alone["views"]), alone["pairs"]) == (["with_context"], {})


def test_summary_is_what_its_parts_are():
    """Estimated all at once, and each alone."""
    lines = five_items()
    found = summary(lines)
    for view in found["views"]:
        assert_same_estimates(found["views"][view], view_summary(lines, view))
    assert_same_estimates(found["pairs"]["with_context"], pair_summary(lines))


def assert_same_estimates(dictionaries, summarised):
    assert dictionaries.keys() == summarised.keys()
    for name, value in summarised.items():
        expected = value._asdict() if isinstance(value, Estimate) else value
        if name != "regime" and expected is not None:
            assert dictionaries[name] == (expected if isinstance(expected, str) else pytest.approx(expected)), name


def test_summary_of_views_on_different_items_or_of_nothing_is_refused():
    with pytest.raises(ValueError, match="same items; in no_context only: 1, such as 'e'"):
        summary([x for x in five_items() if (x["id"], x["view"]) != ("e", "other_task")])
    with pytest.raises(ValueError, match="no line"):
        summary([])


def test_seeds_are_pooled_by_item():
    """Two runs of four items. Harm 1/2 and 0/3; accuracies without 2/4 and 3/4, with 2/4 and 3/4, difference 0.

    Harm: mean 1/4; over runs the half width is t(0.975, 1) = 12.7062 times the standard error, .25.
    """
    found = over_seeds([pairs("bhpn"), pairs("bbbn")])
    values = {name: row["value"] for name, row in found.items()}
    assert values == pytest.approx(
        {
            "no_context": 5 / 8,
            "with_context": 5 / 8,
            "difference": 0.0,
            "harm": 1 / 4,
            "help": 1 / 4,
            "both": 1 / 2,
            "length_change": 0.0,
        }
    )
    assert found["harm"]["runs"] == [0.5, 0.0]
    assert (found["harm"]["seed_low"], found["harm"]["seed_high"]) == pytest.approx((0.25 - 3.17655, 0.25 + 3.17655))


def test_the_same_run_twice_is_no_more_items():
    """An item is resampled with its responses of all runs: the interval is that of one run."""
    lines = pairs("bbbbbhhpnn")
    once, twice = over_seeds([lines]), over_seeds([lines, lines])
    for name in once:
        for key in ("value", "low", "high"):
            assert twice[name][key] == (None if once[name][key] is None else pytest.approx(once[name][key]))
    assert (once["harm"]["runs"], once["harm"]["seed_low"], once["harm"]["seed_high"]) == (
        [pytest.approx(2 / 7)],
        None,
        None,
    )
    one = pair_summary(lines)["harm"]
    assert (once["harm"]["low"], once["harm"]["high"]) == pytest.approx((one.low, one.high))


def test_a_run_in_which_harm_is_undefined_is_left_out_of_its_mean():
    found = over_seeds([pairs("bhbn"), pairs("nnpp")])["harm"]
    assert (found["value"], found["runs"]) == (pytest.approx(1 / 3), [pytest.approx(1 / 3), None])
    assert found["seed_low"] is None
    assert over_seeds([pairs("nn"), pairs("np")])["harm"]["value"] is None


def test_comparison_of_two_runs_counted_by_hand():
    """a: harm 2/4, both 2/6, accuracies 4/6 and 3/6; b: harm 1/4, both 3/6, accuracies 4/6 and 5/6."""
    found = compare(pairs("bbhhpn"), pairs("bbbhpp"))
    assert {name: estimate.value for name, estimate in found.items()} == pytest.approx(
        {"no_context": 0.0, "with_context": 2 / 6, "harm": -1 / 4, "help": 1 / 2, "both": 1 / 6}
    )


def test_comparison_is_paired_by_item():
    """Two runs alike but for one item in 40. Resampled apart their difference would be anything; together it is one
    item, more or less: at most 5 of 40 in 97.5 % of resamples, by the Poisson distribution of mean 1 at most 3."""
    found = compare(pairs("bh" * 20), pairs("bb" + "bh" * 19))
    assert found["both"].value == pytest.approx(1 / 40)
    assert (found["both"].low, found["both"].high) == pytest.approx((0, 3 / 40))
    assert found["with_context"] == pytest.approx((*found["both"][:3], BOOTSTRAP))
    # Nothing changed without a context: at most u of the items gained or lost, (1 - u)^40 = 0.025.
    u = 1 - 0.025 ** (1 / 40)
    assert found["no_context"] == pytest.approx((0.0, -u, u, EXACT))


@pytest.mark.parametrize("function", [compare, lambda a, b: over_seeds([a, b])])
def test_runs_on_other_items_are_refused(function):
    with pytest.raises(ValueError, match="same items; in run 2 only: 2, such as 'i2'"):
        function(pairs("bh"), pairs("bhbh"))

"""Intervals over items and the paired test, against scipy called directly, statsmodels and counts by hand."""

import numpy as np
import pytest
import scipy.stats

from nca_jax import intervals
from nca_jax.intervals import Estimate, Ratio, average, difference, estimates, mean, paired_test, seed_interval

# Twelve items with two responses each: how many were right without the context, and how many of these were harmed.
RIGHT = np.array([2, 2, 1, 2, 0, 1, 2, 2, 2, 1, 2, 2])
HARMED = np.array([0, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0, 1])


def direct(statistic, *columns, paired=True):
    """scipy's own interval of a function of item columns, with random numbers of its own."""
    result = scipy.stats.bootstrap(
        columns, statistic, paired=paired, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    )
    return result.confidence_interval


def ratio(numerator, denominator, axis):
    return numerator.sum(axis) / denominator.sum(axis)


def test_a_ratio_of_sums_is_resampled_by_item():
    found = estimates({"harm": Ratio(HARMED, RIGHT)})["harm"]
    expected = direct(ratio, HARMED, RIGHT)
    assert found.value == 5 / 19
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    assert found.method == intervals.BOOTSTRAP


def test_the_same_resamples_as_scipy_draws_with_the_same_seed():
    """The same seed and the same batches: what is computed from counts of items is what gathering them gives."""
    found = estimates({"harm": Ratio(HARMED, RIGHT)})["harm"]
    columns = (HARMED, RIGHT)
    rng = np.random.default_rng(0)
    expected = scipy.stats.bootstrap(columns, ratio, paired=True, n_resamples=10_000, method="percentile", rng=rng)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval), rel=1e-12)


def test_many_quantities_together_are_what_each_is_alone_and_every_time():
    harm, values = Ratio(HARMED, RIGHT), mean(np.arange(12.0))
    together = estimates({"harm": harm, "mean": values})
    assert (
        together
        == {**estimates({"harm": harm}), **estimates({"mean": values})}
        == estimates({"harm": harm, "mean": values})
    )


def test_batches_do_not_matter(monkeypatch):
    """Batches of 1000 resamples, as many items have."""
    whole = estimates({"harm": Ratio(HARMED, RIGHT)})
    monkeypatch.setattr(intervals, "_BATCH_BYTES", 8 * 12 * 1000)
    assert estimates({"harm": Ratio(HARMED, RIGHT)}) == whole


def test_a_mean_leaves_out_items_without_a_value():
    values = np.array([1.0, 4.0, np.nan, 2.0, 9.0, 5.0])
    found = estimates({"mean": mean(values)})["mean"]
    assert found.value == 21 / 5
    expected = direct(np.nanmean, values)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.1)


def test_a_difference_of_means_is_paired():
    a, b = np.array([1.0, 2, 3, 4, 5, 6]), np.array([1.0, 2, 4, 4, 6, 7])
    found = estimates({"change": difference(mean(b), mean(a))})["change"]
    expected = direct(np.mean, b - a)
    assert found.value == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    unpaired = direct(lambda x, y, axis: x.mean(axis) - y.mean(axis), b, a, paired=False)
    assert found.high - found.low < 0.5 * (unpaired.high - unpaired.low)


def test_a_mean_of_ratios_is_resampled_as_one():
    other = np.array([0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1])
    found = estimates({"mean": average([Ratio(HARMED, RIGHT), Ratio(other, RIGHT)])})["mean"]
    expected = direct(lambda h, o, r, axis: (ratio(h, r, axis) + ratio(o, r, axis)) / 2, HARMED, other, RIGHT)
    assert found.value == (5 / 19 + 4 / 19) / 2
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)


def test_resamples_without_a_denominator_are_left_out():
    """Two of ten items are right without the context, one of them harmed: (8/10)^10 = 11 % of resamples miss both."""
    right, harmed = np.array([1, 1] + [0] * 8), np.array([1] + [0] * 9)
    found = estimates({"harm": Ratio(harmed, right)})["harm"]
    assert found == Estimate(0.5, 0.0, 1.0, intervals.BOOTSTRAP)
    halved = average([Ratio(harmed, right), Ratio(np.zeros(10), np.ones(10))])
    assert estimates({"mean": halved})["mean"] == Estimate(0.25, 0.0, 0.5, intervals.BOOTSTRAP)


def test_nothing_to_count_is_no_estimate():
    none = np.zeros(3)
    found = estimates({"harm": Ratio(none, none), "change": difference(Ratio(none, none), Ratio(none, np.ones(3)))})
    assert set(found.values()) == {Estimate(None, None, None, intervals.UNDEFINED)}


@pytest.mark.parametrize(("right", "items"), [(0, 54), (54, 54), (0, 1), (1, 1)])
def test_items_that_are_all_alike_have_the_exact_interval(right, items):
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    found = estimates({"share": Ratio(np.full(items, right // items), np.ones(items))})["share"]
    low, high = proportion.proportion_confint(right, items, method="beta")
    assert (found.value, found.method) == (right // items, intervals.EXACT)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


def test_the_exact_interval_counts_items_that_count_and_not_their_responses():
    """Three of five items are right without the context, in 4 responses each, and none is harmed: 0 of 3 trials, whose
    upper bound u solves (1 - u)^3 = 0.025."""
    found = estimates({"harm": Ratio(np.zeros(5), np.array([4, 4, 0, 4, 0]))})["harm"]
    assert found == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 3), intervals.EXACT))


def test_items_that_are_all_half_right_are_not_certain():
    """One of two responses of each of 3 items: 1.5 successes of 3, rounded outwards: P(X >= 1 | low) = 0.025 and, by
    symmetry, high = 1 - low."""
    found = estimates({"share": Ratio(np.ones(3), np.full(3, 2))})["share"]
    low = 1 - 0.975 ** (1 / 3)
    assert found[:3] == pytest.approx((0.5, low, 1 - low))


def test_a_difference_that_no_item_shows_is_as_wide_as_the_items_allow():
    """No item of 20 changes: neither a gain nor a loss above u is likely, (1 - u)^20 = 0.025. All 20 lost: at most
    1 - u of gain by the upper bounds of both shares, which is 2u - 1."""
    u, every = 1 - 0.025 ** (1 / 20), np.ones(20)
    found = estimates({"none": Ratio(0 * every, every, "difference"), "all": Ratio(-every, every, "difference")})
    assert found["none"][:3] == pytest.approx((0, -u, u))
    assert found["all"][:3] == pytest.approx((-1, -1, 2 * u - 1))


def test_a_difference_of_two_shares_that_are_both_none_is_as_wide_as_each_allows():
    """0 of 3 and 0 of 6."""
    three, six = np.array([1, 1, 1, 0, 0, 0]), np.ones(6)
    found = estimates({"d": difference(Ratio(np.zeros(6), three), Ratio(np.zeros(6), six))})["d"]
    assert found[:3] == pytest.approx((0, -(1 - 0.025 ** (1 / 6)), 1 - 0.025 ** (1 / 3)))


def test_amounts_that_are_all_alike_have_a_value_and_no_interval():
    assert estimates({"length": mean(np.full(5, 8.0))})["length"] == (8.0, None, None, intervals.ALL_ALIKE)
    assert estimates({"length": mean(np.array([8.0]))})["length"] == (8.0, None, None, intervals.ALL_ALIKE)


def test_no_items_are_refused():
    with pytest.raises(ValueError, match="no items"):
        estimates({"mean": mean(np.zeros(0))})


def test_responses_that_agree_within_an_item_do_not_make_the_interval_narrower():
    """30 items, each with four equal responses; counted as 120 items the interval would be half as wide."""
    right_N = np.array([1, 1, 0] * 10)
    by_item = estimates({"a": Ratio(4 * right_N, np.full(30, 4))})["a"]
    as_items = estimates({"a": Ratio(np.repeat(right_N, 4), np.ones(120))})["a"]
    once = estimates({"a": Ratio(right_N, np.ones(30))})["a"]
    assert by_item == once
    assert by_item.high - by_item.low == pytest.approx(2 * (as_items.high - as_items.low), rel=0.1)


@pytest.mark.parametrize(("harmed", "helped"), [(7, 2), (0, 6), (5, 5), (1, 0), (0, 0)])
def test_one_response_an_item_is_tested_by_mcnemar(harmed, helped):
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    without = [1] * harmed + [0] * helped + [1] * 9 + [0] * 4
    with_context = [0] * harmed + [1] * helped + [1] * 9 + [0] * 4
    test = paired_test(np.array(without)[:, None], np.array(with_context)[:, None])
    expected = contingency.mcnemar([[9, harmed], [helped, 4]], exact=True).pvalue
    assert test.p == pytest.approx(1.0 if harmed + helped == 0 else expected)
    assert test.method == "McNemar, exact"


def test_pairs_of_one_item_are_flipped_together():
    """Six items, each harmed in all of 3 responses, one helped in all: of 2^7 signs, those with a sum of 5 items or
    more on one side are 1 + 7 each: p = 16 / 128. As 21 independent pairs p would be 0.0015."""
    without = np.array([[1, 1, 1]] * 6 + [[0, 0, 0]] + [[1, 0, 1]] * 5)
    with_context = np.array([[0, 0, 0]] * 6 + [[1, 1, 1]] + [[0, 1, 1]] * 5)
    test = paired_test(without, with_context)
    assert test.p == pytest.approx(16 / 128)
    assert "sign flips" in test.method


def test_signs_of_many_items_are_drawn():
    """40 items of which 26 are harmed: binomial two-sided p = 0.081 (of 2^40 signs, 10,000 are drawn)."""
    harmed = np.array([1] * 26 + [0] * 14)
    test = paired_test(np.stack([harmed, harmed], 1), 1 - np.stack([harmed, harmed], 1))
    assert test.p == pytest.approx(scipy.stats.binomtest(26, 40).pvalue, abs=0.015)


def test_no_item_that_differs_is_no_evidence_and_one_is_none_either():
    assert paired_test(np.ones((4, 2)), np.ones((4, 2))).p == 1.0
    assert paired_test(np.ones((4, 2)), np.array([[1, 1], [0, 0], [1, 1], [1, 1]])).p == 1.0


def test_seeds_have_students_interval():
    """Of .1, .2, .3: sd .1, standard error .057735, t(0.975, 2) = 4.302653."""
    assert seed_interval([0.1, 0.2, 0.3]) == pytest.approx((0.2 - 0.248414, 0.2 + 0.248414), abs=1e-6)
    assert seed_interval([0.1]) == (None, None) == seed_interval([])

"""Estimates with 95 % intervals over items, and a paired test. Pure functions of arrays.

Items are what a benchmark drew from its domain; several responses to one item are not independent. So whole items are
resampled, each with everything that was measured of it (a cluster bootstrap). N: items, S: responses of an item.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

RESAMPLES = 10_000
_SEED = 0  # the same items give the same figures, wherever and whenever they are computed
_BATCH_BYTES = 2**25  # of one array of a batch of resamples

BOOTSTRAP = "bootstrap over items"
EXACT = "Clopper-Pearson"
ALL_ALIKE = "none, all items are alike"
UNDEFINED = "none, nothing to count"


class Estimate(NamedTuple):
    """A value with its 95 % interval.

    Attributes:
      value: None where there is nothing to estimate, such as harm with no item right without the context.
      low, high: None without a value, and where all items have the same amount, which tells nothing of other items.
      method: how the interval was made: BOOTSTRAP, EXACT, or why there is none.
    """

    value: float | None
    low: float | None
    high: float | None
    method: str


class Ratio(NamedTuple):
    """weight * sum(numerator_N) / sum(denominator_N), of what was counted in each item.

    Attributes:
      kind: "share": each numerator is between 0 and its denominator; "difference": between minus and plus its
        denominator, such as a difference of two shares of the same item; "amount": anything else.
      weight: in a sum of several ratios.
    """

    numerator_N: np.ndarray
    denominator_N: np.ndarray
    kind: str = "share"
    weight: float = 1.0


class PairedTest(NamedTuple):
    """Two-sided p of "the context changes nothing", and the test's name."""

    p: float
    method: str


def mean(values_N: np.ndarray, kind: str = "amount") -> Ratio:
    """The mean over the items that have a value; nan: the item has none."""
    has_value_N = ~np.isnan(values_N)
    return Ratio(np.where(has_value_N, values_N, 0.0), has_value_N.astype(float), kind)


def difference(one: Ratio, other: Ratio) -> list[Ratio]:
    """`one` minus `other`, of the same items."""
    return [one, other._replace(weight=-other.weight)]


def average(ratios: Sequence[Ratio]) -> list[Ratio]:
    """The mean of several ratios of the same items."""
    return [ratio._replace(weight=ratio.weight / len(ratios)) for ratio in ratios]


def estimates(quantities: Mapping[Hashable, Ratio | Sequence[Ratio]]) -> dict[Hashable, Estimate]:
    """Values and intervals of ratios, or of sums of ratios, all over the same items in the same order, by their
    names.

    Intervals are percentiles of `scipy.stats.bootstrap`; resamples in which a denominator is 0 are left out. Percentile
    and not BCa, which leaves out each item in turn and is undefined where a ratio rests on one item, as harm may. Where
    all resamples are equal (no item harmed at all), a bootstrap would claim certainty: shares then have exact binomial
    intervals in which an item is one trial however many responses it has, and sums of shares the sums of those bounds.

    Raises:
      ValueError: there is no item.
    """
    terms = {name: [q] if isinstance(q, Ratio) else list(q) for name, q in quantities.items()}
    ratios = [ratio for several in terms.values() for ratio in several]
    columns_NxC = np.stack([c for ratio in ratios for c in (ratio.numerator_N, ratio.denominator_N)], axis=1)
    if not len(columns_NxC):
        raise ValueError("there are no items to estimate from")
    columns_NxC = columns_NxC.astype(float)
    sums_CxR = _resampled_sums(columns_NxC)
    sums_C = columns_NxC.sum(axis=0)
    found, first = {}, 0
    for name, several in terms.items():
        ours = slice(first, first := first + 2 * len(several))
        found[name] = _estimate(several, sums_C[ours], sums_CxR[ours])
    return found


def paired_test(without_NxS: np.ndarray, with_NxS: np.ndarray) -> PairedTest:
    """Whether the same items are right equally often in two views.

    With one response an item, McNemar's exact test, which is a binomial test of the pairs that differ. The pairs of one
    item are not independent: with several, the signs of the items' differences are flipped, all ways or 10,000 random
    ones.
    """
    difference_NxS = np.asarray(with_NxS, float) - np.asarray(without_NxS, float)
    if difference_NxS.shape[1] == 1:
        helped, harmed = int((difference_NxS > 0).sum()), int((difference_NxS < 0).sum())
        p = scipy.stats.binomtest(helped, helped + harmed).pvalue if helped + harmed else 1.0
        return PairedTest(float(p), "McNemar, exact")
    difference_N = difference_NxS.sum(axis=1)
    difference_N = difference_N[difference_N != 0]  # a 0 has no sign
    method = "sign flips of items"
    if len(difference_N) < 2:  # either sign is as far from 0
        return PairedTest(1.0, method)
    test = scipy.stats.permutation_test(
        (difference_N,),
        np.sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=_batch(len(difference_N)),
        rng=np.random.default_rng(_SEED),
    )
    return PairedTest(float(test.pvalue), method)


def seed_interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Student's t interval of the mean over runs that differ in their seed; None for fewer than two."""
    if len(values) < 2:
        return None, None
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    half = float(scipy.stats.t.ppf(0.975, len(values) - 1) * error)
    middle = float(np.mean(values))
    return middle - half, middle + half


def _batch(items: int) -> int:
    return max(1, _BATCH_BYTES // (8 * items))


def _resampled_sums(columns_NxC: np.ndarray) -> np.ndarray:
    """Sums [C, R] of each column over R resamples of the items. One item cannot be resampled: R is 1."""
    items = len(columns_NxC)
    if items < 2:
        return columns_NxC.sum(axis=0)[:, None]

    def sums(drawn_RxN: np.ndarray, axis: int) -> np.ndarray:
        # How often each item was drawn, times its columns: far less work than gathering every column.
        resamples = len(drawn_RxN)
        cell_RxN = drawn_RxN + items * np.arange(resamples)[:, None]
        times_RxN = np.bincount(cell_RxN.ravel(), minlength=resamples * items).reshape(resamples, items)
        return (times_RxN.astype(float) @ columns_NxC).T

    result = scipy.stats.bootstrap(
        (np.arange(items),),
        sums,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=_batch(items),
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    return result.bootstrap_distribution


def _estimate(terms: Sequence[Ratio], sums_C: np.ndarray, sums_CxR: np.ndarray) -> Estimate:
    """A weighted sum of ratios; C: numerator and denominator of each in turn."""
    if not sums_C[1::2].all():
        return Estimate(None, None, None, UNDEFINED)
    weight_T = np.array([ratio.weight for ratio in terms])
    value = float(weight_T @ (sums_C[::2] / sums_C[1::2]))
    numerator_TxR, denominator_TxR = sums_CxR[::2], sums_CxR[1::2]
    defined_R = denominator_TxR.all(axis=0)
    values_R = weight_T @ (numerator_TxR[:, defined_R] / denominator_TxR[:, defined_R])
    if np.ptp(values_R) > 1e-12:  # more than rounding
        low, high = np.quantile(values_R, (0.025, 0.975))
        return Estimate(value, float(low), float(high), BOOTSTRAP)
    if any(ratio.kind == "amount" for ratio in terms):
        return Estimate(value, None, None, ALL_ALIKE)
    bounds_Tx2 = np.array([_exact_bounds(ratio) for ratio in terms]) * weight_T[:, None]
    return Estimate(value, float(bounds_Tx2.min(axis=1).sum()), float(bounds_Tx2.max(axis=1).sum()), EXACT)


def _exact_bounds(ratio: Ratio) -> tuple[float, float]:
    """Of a share; of a difference, those of the share that it gains less those of the share that it loses."""
    gain_low, gain_high = _clopper_pearson(np.maximum(ratio.numerator_N, 0), ratio.denominator_N)
    if ratio.kind == "share":
        return gain_low, gain_high
    loss_low, loss_high = _clopper_pearson(np.maximum(-ratio.numerator_N, 0), ratio.denominator_N)
    return gain_low - loss_high, gain_high - loss_low


def _clopper_pearson(numerator_N: np.ndarray, denominator_N: np.ndarray) -> tuple[float, float]:
    """With an item as one trial. Where all items are half right, their number of successes is rounded outwards."""
    trials = int((denominator_N > 0).sum())
    successes = round(float(trials * numerator_N.sum() / denominator_N.sum()), 9)
    low = scipy.stats.binomtest(math.floor(successes), trials).proportion_ci(0.95, "exact").low
    high = scipy.stats.binomtest(math.ceil(successes), trials).proportion_ci(0.95, "exact").high
    return float(low), float(high)

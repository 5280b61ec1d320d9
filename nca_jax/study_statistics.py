"""What the runs of a study say together: means over seeds and items, their intervals, and paired tests of methods.

Every quantity is computed run by run and averaged over the seeds. Intervals are 95 %, of a bootstrap over both: each
resample draws seeds and, independently, items, and an item counts in all runs of the resample as often as it was drawn
(a crossed or pigeonhole bootstrap, Owen 2007, doi:10.1214/07-AOAS122, which errs to the wide side). Methods are
compared on the same draws.

Axes: S seeds, T evaluations, N items, R resamples, of which the first is what was measured.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

from nca_jax.items import NO_CONTEXT, WITH_CONTEXT
from nca_jax.study_items import StudyRun

RESAMPLES = 4000
_SEED = 0  # the same runs give the same figures
_FEWEST_RIGHT = 0.1  # of the items, right without the context: below, harm is a ratio of a few items and no peak
_TARGET = 0.9
_NO_SHARES = ("steps_to_0.9_of_context", "steps_to_0.9", "length_change", "divergence")


class Interval(NamedTuple):
    """A mean over seeds with its 95 % interval over seeds and items, and the value of each run.

    None: undefined; and no interval where all resamples are alike, which tells nothing of other seeds and items. A
    share of 0 or 1 then gets the exact binomial one (Clopper-Pearson), in which an item is one trial.
    """

    value: float | None
    low: float | None
    high: float | None
    runs: dict[int, float | None]


class Course:
    """All runs of one method on one task, evaluated on the same items at the same steps.

    Args:
      runs: that differ in their seed.
      before: seed -> the run that holds the evaluation before training, which is the same for all methods.

    Raises:
      ValueError: items, views or steps differ.
    """

    def __init__(self, runs: Sequence[StudyRun], before: Mapping[int, StudyRun]):
        first = runs[0]
        self.task, self.method, self.views = first.task, first.method, first.views
        self.runs = {run.seed: run for run in sorted(runs, key=lambda run: run.seed)}
        self.steps_T = np.array(sorted({0, *first.steps}))
        for run in [*runs, *(before[seed] for seed in self.runs)]:
            if (run.ids, run.views) != (first.ids, first.views) or {0, *run.steps} != set(self.steps_T.tolist()):
                raise ValueError(f"{first.task}: runs of {first.method} and {run.method} are not evaluated alike")
        self._before = before
        self.items = len(first.ids)

    def read(self, name: str, view: str) -> np.ndarray:
        """An array [S, T, N] of a view: "correct", "length", "truncated", "divergence" or "answer"."""
        v = self.views.index(view)
        rows = []
        for seed, run in self.runs.items():
            of_step = dict(zip(run.steps, getattr(run, f"{name}_TxVxN")[:, v], strict=True))
            if 0 not in of_step:
                start = self._before[seed]
                of_step[0] = getattr(start, f"{name}_TxVxN")[start.steps.index(0), v]
            rows.append([of_step[step] for step in self.steps_T.tolist()])
        return np.array(rows)


class Draws(NamedTuple):
    """How often each item and each seed is in each resample; the first row is one of each."""

    item_RxN: np.ndarray
    seed_RxS: np.ndarray


def draw(items: int, seeds: int, stream: int = 0) -> Draws:
    """Independent draws of items and of seeds; another stream gives others."""
    generator = np.random.default_rng([_SEED, stream])

    def counts(n: int) -> np.ndarray:
        drawn = generator.multinomial(n, np.full(n, 1 / n), RESAMPLES)
        return np.concatenate([np.ones((1, n)), drawn]).astype(float)

    return Draws(counts(items), counts(seeds))


class Shares:
    """The shares and means of a course in every resample: arrays [R, S, T]."""

    def __init__(self, course: Course, item_RxN: np.ndarray):
        self.steps_T, self._course, self._item_RxN = course.steps_T, course, item_RxN

    def mean(self, value_SxTxN: np.ndarray) -> np.ndarray:
        """The mean over the items that have a value; nan where there is none."""
        has_value = ~np.isnan(value_SxTxN)
        return _ratio(self._sum(np.where(has_value, value_SxTxN, 0.0)), self._sum(has_value))

    def accuracy(self, view: str) -> np.ndarray:
        return self.mean(self._course.read("correct", view).astype(float))

    def both(self) -> np.ndarray:
        x, c = (self._course.read("correct", view) for view in (NO_CONTEXT, WITH_CONTEXT))
        return self.mean((x & c).astype(float))

    def harm(self) -> np.ndarray:
        """P(wrong with the context | right without it)."""
        x, c = (self._course.read("correct", view) for view in (NO_CONTEXT, WITH_CONTEXT))
        return _ratio(self._sum(x & ~c), self._sum(x))

    def length_change(self) -> np.ndarray:
        x, c = (self._course.read("length", view).astype(float) for view in (NO_CONTEXT, WITH_CONTEXT))
        return _ratio(self._sum(c), self._sum(x)) - 1

    def divergence(self) -> np.ndarray:
        return self.mean(self._course.read("divergence", WITH_CONTEXT).astype(float))

    def beyond(self) -> np.ndarray:
        """Share of the answers with the context that are the right one and more: what was to be done once is done
        again."""
        answers = self._course.read("answer", WITH_CONTEXT)
        run = next(iter(self._course.runs.values()))
        expected_N = run.expected_VxN[run.views.index(WITH_CONTEXT)]
        goes_on = np.frompyfunc(lambda a, e: a is not None and a != e and a.startswith(e), 2, 1)
        return self.mean(goes_on(answers, expected_N).astype(float))

    def _sum(self, value_SxTxN: np.ndarray) -> np.ndarray:
        S, T, N = value_SxTxN.shape
        flat_STxN = value_SxTxN.reshape(S * T, N).astype(float)
        return (self._item_RxN @ flat_STxN.T).reshape(-1, S, T)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator > 0)


def steps_until(share_RxSxT: np.ndarray, target_RxS: np.ndarray, steps_T: np.ndarray) -> np.ndarray:
    """The step at which a share reaches its target, on the straight line between two evaluations; the last step where
    it does not (a restricted mean, as of survival times)."""
    reached_RxSxT = share_RxSxT >= target_RxS[..., None] - 1e-12
    t_RxS = reached_RxSxT.argmax(axis=-1)
    before_RxS = np.maximum(t_RxS - 1, 0)

    def at(values_RxSxT: np.ndarray, index_RxS: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values_RxSxT, index_RxS[..., None], axis=-1)[..., 0]

    low, high = at(share_RxSxT, before_RxS), at(share_RxSxT, t_RxS)
    part = np.divide(target_RxS - low, high - low, out=np.ones(low.shape), where=t_RxS > 0)
    between = steps_T[before_RxS] + part * (steps_T[t_RxS] - steps_T[before_RxS])
    return np.where(reached_RxSxT.any(axis=-1), between, steps_T[-1])


def _until_of_context(shares: Shares) -> np.ndarray:
    without, before = shares.accuracy(NO_CONTEXT), shares.accuracy(WITH_CONTEXT)[..., 0]
    return steps_until(without, _TARGET * before, shares.steps_T)


def _until_absolute(shares: Shares) -> np.ndarray:
    without = shares.accuracy(NO_CONTEXT)
    return steps_until(without, np.full(without.shape[:2], _TARGET), shares.steps_T)


def _peak_harm(shares: Shares) -> np.ndarray:
    """The largest over the evaluations after step 0 at which enough items were right without the context."""
    harm = shares.harm()
    counted = (shares.accuracy(NO_CONTEXT)[:1] >= _FEWEST_RIGHT) & (shares.steps_T > 0) & ~np.isnan(harm)
    peak = np.where(counted, harm, -np.inf).max(axis=-1)
    return np.where(np.isfinite(peak), peak, np.nan)


def _at_end(share: Callable[[Shares], np.ndarray]) -> Callable[[Shares], np.ndarray]:
    return lambda shares: share(shares)[..., -1]


def _of_view(view: str) -> Callable[[Shares], np.ndarray]:
    return lambda shares: shares.accuracy(view)


# Name -> [R, S] of the shares of a course.
QUANTITIES: Mapping[str, Callable[[Shares], np.ndarray]] = {
    "steps_to_0.9_of_context": _until_of_context,
    "steps_to_0.9": _until_absolute,
    "no_context": _at_end(_of_view(NO_CONTEXT)),
    "with_context": _at_end(_of_view(WITH_CONTEXT)),
    "lowest_with_context": lambda shares: shares.accuracy(WITH_CONTEXT)[..., 1:].min(axis=-1),
    "paraphrased": _at_end(_of_view("paraphrased")),
    "shortened": _at_end(_of_view("shortened")),
    "other_task": _at_end(_of_view("other_task")),
    "lowest_other_task": lambda shares: shares.accuracy("other_task")[..., 1:].min(axis=-1),
    "both": _at_end(Shares.both),
    "harm": _at_end(Shares.harm),
    "peak_harm": _peak_harm,
    "beyond": _at_end(Shares.beyond),
    "length_change": _at_end(Shares.length_change),
    "divergence": _at_end(Shares.divergence),
}
# Name -> [R, S, T]: what is drawn over the steps.
CURVES: Mapping[str, Callable[[Shares], np.ndarray]] = {
    "no_context": _of_view(NO_CONTEXT),
    "with_context": _of_view(WITH_CONTEXT),
    "paraphrased": _of_view("paraphrased"),
    "shortened": _of_view("shortened"),
    "other_task": _of_view("other_task"),
    "harm": Shares.harm,
    "both": Shares.both,
    "length_change": Shares.length_change,
    "divergence": Shares.divergence,
}


def over_seeds(value_RxS: np.ndarray, seed_RxS: np.ndarray, seeds: Sequence[int], trials: int = 0) -> Interval:
    """The mean over the drawn seeds whose value is defined, and the percentiles of the resamples.

    Args:
      trials: of a share, the items that are counted, for the exact interval.
    """
    value, low, high = _summary(_seed_mean(value_RxS, seed_RxS))
    if trials and low is None and value in (0.0, 1.0):
        exact = scipy.stats.binomtest(round(value * trials), trials).proportion_ci(0.95, "exact")
        low, high = float(exact.low), float(exact.high)
    runs = {seed: _number(value) for seed, value in zip(seeds, value_RxS[0], strict=True)}
    return Interval(value, low, high, runs)


def quantities(course: Course, draws: Draws) -> dict[str, Interval]:
    """All QUANTITIES of a method on a task."""
    shares, seeds = Shares(course, draws.item_RxN), list(course.runs)
    return {
        name: over_seeds(of(shares), draws.seed_RxS, seeds, int(_trials(course, name)[-1]))
        for name, of in QUANTITIES.items()
    }


def curves(course: Course, draws: Draws) -> dict[str, list[Interval]]:
    """All CURVES of a method on a task, an interval for each of `course.steps_T`."""
    shares, seeds = Shares(course, draws.item_RxN), list(course.runs)
    found = {}
    for name, of in CURVES.items():
        value_RxSxT = of(shares)
        trials_T = _trials(course, name)
        found[name] = [
            over_seeds(value_RxSxT[..., t], draws.seed_RxS, seeds, int(trials_T[t]))
            for t in range(value_RxSxT.shape[-1])
        ]
    return found


def _trials(course: Course, name: str) -> np.ndarray:
    """How many items a share counts at each evaluation, for its exact interval: all; for harm those that are right
    without the context in any run. 0 [T] for what is no share."""
    if name in ("harm", "peak_harm"):
        return course.read("correct", NO_CONTEXT).any(axis=0).sum(axis=-1)
    return np.full(len(course.steps_T), 0 if name in _NO_SHARES else course.items)


class Comparison(NamedTuple):
    """Method b minus method a in one quantity.

    Attributes:
      tasks: task -> the difference on the seeds that both have.
      value, low, high: of the mean over the tasks.
      runs: pairs of runs, of all tasks.
      p: two-sided, of no difference: exact, by all changes of sign of the pairs' differences; None without a pair.
    """

    tasks: dict[str, Interval]
    value: float | None
    low: float | None
    high: float | None
    runs: int
    p: float | None


def compare(a: Mapping[str, Course], b: Mapping[str, Course], names: Sequence[str]) -> dict[str, Comparison]:
    """Method b minus method a, for each of the named QUANTITIES.

    Args:
      a, b: task -> course; the tasks that both have are compared.

    Raises:
      ValueError: they have no task and seed in common.
    """
    tasks = [task for task in a if task in b and a[task].runs.keys() & b[task].runs.keys()]
    if not tasks:
        raise ValueError("there is no task and seed of both methods")
    differences: dict[str, dict[str, tuple]] = {name: {} for name in names}
    for stream, task in enumerate(tasks):
        seeds = sorted(a[task].runs.keys() & b[task].runs.keys())
        draws = draw(a[task].items, len(seeds), stream)
        # On the same items and seeds, drawn alike.
        ours, theirs = (Shares(_only(c[task], seeds), draws.item_RxN) for c in (a, b))
        for name in names:
            difference_RxS = QUANTITIES[name](theirs) - QUANTITIES[name](ours)
            interval = over_seeds(difference_RxS, draws.seed_RxS, seeds)
            differences[name][task] = interval, _seed_mean(difference_RxS, draws.seed_RxS)
    found = {}
    for name, of_task in differences.items():
        mean_R = np.mean([value_R for _, value_R in of_task.values()], axis=0)
        pairs = [d for interval, _ in of_task.values() for d in interval.runs.values() if d is not None]
        intervals = {task: interval for task, (interval, _) in of_task.items()}
        found[name] = Comparison(intervals, *_summary(mean_R), len(pairs), sign_flip_p(pairs))
    return found


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of a mean of 0, by all changes of sign; the smallest it can be is 2 / 2^n."""
    if not differences:
        return None
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return float((np.abs(sums) >= abs(sum(differences)) - 1e-12).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """p adjusted for how many there are, by Holm's method (1979), in their order."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _only(course: Course, seeds: Sequence[int]) -> Course:
    return Course([course.runs[seed] for seed in seeds], course._before)


def _seed_mean(value_RxS: np.ndarray, seed_RxS: np.ndarray) -> np.ndarray:
    defined_RxS = ~np.isnan(value_RxS)
    return _ratio((seed_RxS * np.where(defined_RxS, value_RxS, 0.0)).sum(axis=1), (seed_RxS * defined_RxS).sum(axis=1))


def _summary(value_R: np.ndarray) -> tuple[float | None, float | None, float | None]:
    drawn = value_R[1:][~np.isnan(value_R[1:])]
    alike = not len(drawn) or np.ptp(drawn) < 1e-12  # no more than rounding
    low, high = (np.nan, np.nan) if alike else np.quantile(drawn, (0.025, 0.975))
    return _number(value_R[0]), _number(low), _number(high)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)

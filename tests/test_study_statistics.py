"""Quantities of a study counted by hand, and its intervals and tests against closed forms and other libraries."""

import numpy as np
import pytest
import scipy.stats
from etils import epath
from study_runs import write_run

from nca_jax import study_statistics
from nca_jax.study_items import collect
from nca_jax.study_statistics import (
    Course,
    compare,
    curves,
    draw,
    holm,
    over_seeds,
    quantities,
    sign_flip_p,
    steps_until,
)

BEFORE = {"no_context": "0" * 10, "with_context": "1" * 8 + "00"}
# Right without the context: 0, 2, 6, 9 of 10 at steps 0, 5, 10, 15; harm 0, 1/2, 1/6, 2/9.
OPD = {
    0: BEFORE,
    5: {"no_context": "1100000000", "with_context": "0111000000", "other_task": "1" * 6 + "0" * 4},
    10: {"no_context": "1111110000", "with_context": "0111111100", "other_task": "1" * 2 + "0" * 8},
    15: {"no_context": "1111111110", "with_context": "0+11111110", "other_task": "1" * 5 + "0" * 5},
}
SECOND = OPD | {15: {"no_context": "1111111000", "with_context": "1111111000", "other_task": "0" * 10}}
GATED = {step: right for step, right in OPD.items() if step} | {
    15: {"no_context": "1111111100", "with_context": "1111111110", "other_task": "1" * 9 + "0"}
}


@pytest.fixture
def course(tmp_path):
    """task, method, {seed: {step: right}} of several methods -> method -> course."""

    def make(by_method: dict[str, dict[int, dict]], task: str = "t") -> dict[str, Course]:
        for method, by_seed in by_method.items():
            for seed, by_step in by_seed.items():
                write_run(tmp_path / task, task, method, seed, by_step)
        runs = collect(epath.Path(tmp_path / task))
        before = {run.seed: run for run in runs if 0 in run.steps}
        return {m: Course([run for run in runs if run.method == m], before) for m in by_method}

    return make


def test_quantities_of_one_run(course):
    opd = course({"opd": {0: OPD}})["opd"]
    found = {name: interval.value for name, interval in quantities(opd, draw(10, 1)).items()}
    assert found == pytest.approx(
        {
            # 0.9 of 0.8 is 0.72, between 0.6 at step 10 and 0.9 at step 15; 0.9 itself at step 15.
            "steps_to_0.9_of_context": 12.0,
            "steps_to_0.9": 15.0,
            "no_context": 0.9,
            "with_context": 0.7,
            "lowest_with_context": 0.3,
            "paraphrased": 0.7,
            "shortened": 0.7,
            "other_task": 0.5,
            "lowest_other_task": 0.2,
            "both": 0.7,
            "harm": 2 / 9,
            "peak_harm": 0.5,
            "beyond": 0.1,
            "length_change": -0.25,
            "divergence": 0.5,
        }
    )


def test_harm_of_too_few_items_is_no_peak(course, monkeypatch):
    monkeypatch.setattr(study_statistics, "_FEWEST_RIGHT", 0.3)
    opd = course({"opd": {0: OPD}})["opd"]
    assert quantities(opd, draw(10, 1))["peak_harm"].value == pytest.approx(2 / 9)


def test_curves_begin_with_the_evaluation_that_another_run_has_made(course):
    by_method = course({"opd": {0: OPD}, "gated": {0: GATED}})
    found = curves(by_method["gated"], draw(10, 1))
    assert by_method["gated"].steps_T.tolist() == [0, 5, 10, 15]
    assert [point.value for point in found["no_context"]] == pytest.approx([0.0, 0.2, 0.6, 0.8])
    assert [point.value for point in found["with_context"]] == pytest.approx([0.8, 0.3, 0.7, 0.9])
    assert [point.value for point in found["harm"]] == [None, 0.5, pytest.approx(1 / 6), 0.0]


def test_a_mean_over_seeds_is_that_of_the_runs(course):
    opd = course({"opd": {0: OPD, 3: SECOND}})["opd"]
    found = quantities(opd, draw(10, 2))
    assert found["no_context"].value == pytest.approx(0.8) and found["no_context"].runs == {0: 0.9, 3: 0.7}
    assert found["harm"].value == pytest.approx(1 / 9) and found["harm"].runs == pytest.approx({0: 2 / 9, 3: 0.0})
    # The second run never comes to 0.72: it counts with the last step.
    assert found["steps_to_0.9_of_context"].runs == {0: pytest.approx(12.0), 3: 15.0}
    assert found["no_context"].low < 0.8 < found["no_context"].high


def test_a_share_of_nothing_has_the_exact_interval(course):
    # No item of 8 that were right without the context is harmed: Clopper-Pearson's bound is 1 - 0.025 ** (1 / 8).
    gated = course({"opd": {0: OPD}, "gated": {0: GATED}})["gated"]
    harm = quantities(gated, draw(10, 1))["harm"]
    assert harm[:3] == (0.0, 0.0, pytest.approx(1 - 0.025 ** (1 / 8)))
    # A mean of amounts that are all alike has none.
    assert quantities(gated, draw(10, 1))["divergence"][:3] == (0.5, None, None)


def test_one_seed_is_the_bootstrap_over_items():
    generator = np.random.default_rng(5)
    right_N = generator.random(60) < 0.7
    draws = draw(60, 1)
    ours = over_seeds((draws.item_RxN @ right_N / 60)[:, None], draws.seed_RxS, [0])
    theirs = scipy.stats.bootstrap((right_N.astype(float),), np.mean, method="percentile", rng=generator)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.02)


def test_seeds_and_items_are_both_drawn():
    # Values that depend on the seed only, and on the item only: the variance of the mean of n values drawn from them
    # is their variance / n.
    seed_S, item_N = np.array([0.0, 1.0, 5.0]), np.arange(40.0)
    draws = draw(40, 3)
    value_RxS = draws.item_RxN @ item_N[:, None] / 40 + seed_S
    means_R = (value_RxS * draws.seed_RxS).sum(axis=1) / draws.seed_RxS.sum(axis=1)
    assert means_R[0] == pytest.approx(19.5 + 2.0)
    assert means_R[1:].var() == pytest.approx(seed_S.var() / 3 + item_N.var() / 40, rel=0.1)


def test_steps_until_a_target():
    share_SxT = np.array([[0.0, 0.5, 1.0], [0.8, 0.2, 0.9], [0.0, 0.1, 0.2]])
    found = steps_until(share_SxT[None], np.full((1, 3), 0.75), np.array([0, 10, 20]))
    assert found.tolist() == [[15.0, 0.0, 20.0]]


def test_a_comparison_takes_the_pairs_that_both_methods_have(course):
    methods = course({"opd": {0: OPD, 1: OPD, 2: SECOND}, "gated": {0: GATED, 2: GATED}})
    found = compare({"t": methods["opd"]}, {"t": methods["gated"]}, ["no_context", "harm", "other_task"])
    assert found["no_context"].tasks["t"].runs == pytest.approx({0: -0.1, 2: 0.1})
    assert found["no_context"].value == pytest.approx(0.0, abs=1e-12) and found["no_context"].p == 1.0
    assert found["harm"].value == pytest.approx(-1 / 9)
    # Both differences are up, 0.4 and 0.9: of the four changes of sign two are as far from 0.
    assert (found["other_task"].runs, found["other_task"].p) == (2, 0.5)
    assert found["other_task"].low < found["other_task"].value == pytest.approx(0.65)


def test_a_comparison_of_a_method_with_itself_is_nothing(course):
    opd = course({"opd": {0: OPD, 1: SECOND}})["opd"]
    found = compare({"t": opd}, {"t": opd}, ["harm"])["harm"]
    assert (found.value, found.low, found.high, found.p) == (0.0, None, None, 1.0)


def test_methods_without_a_run_in_common_cannot_be_compared(course):
    one, other = course({"opd": {0: OPD}}, "a")["opd"], course({"opd": {0: OPD}}, "b")["opd"]
    with pytest.raises(ValueError, match="no task and seed"):
        compare({"a": one}, {"b": other}, ["harm"])


def test_sign_flips_are_scipys_permutation_test():
    differences = [0.3, -0.1, 0.25, 0.4, 0.05, 0.2, 0.1, -0.05, 0.3]
    test = scipy.stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(differences) == pytest.approx(test.pvalue)
    assert sign_flip_p([0.1] * 9) == 2 / 2**9 and sign_flip_p([]) is None


def test_holm():
    # 4 x 0.01; 3 x 0.02; 2 x 0.03 is as large; the last is not below the one before.
    assert holm([0.03, 0.01, 0.05, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_runs_that_are_evaluated_at_other_steps_are_refused(course):
    with pytest.raises(ValueError, match="not evaluated alike"):
        course({"opd": {0: OPD, 1: {step: OPD[step] for step in (0, 5, 10)}}})

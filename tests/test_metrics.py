"""Paired metrics, by hand."""

import pytest

from nca_jax.metrics import accuracy, paired_metrics

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

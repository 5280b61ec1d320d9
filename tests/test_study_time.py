"""How long what is left of a study takes, counted by hand."""

import pytest

from nca_jax.study_time import as_time, remaining, remaining_words

ASSUMED = {"a0": ("a", 10.0), "a1": ("a", 10.0), "b0": ("b", 30.0), "b1": ("b", 30.0)}


def test_before_anything_is_finished_what_is_assumed_counts():
    assert remaining(ASSUMED, {}) == (80.0, 0)


def test_the_same_point_with_another_seed_tells_and_scales_the_others():
    # a took twice what was assumed: a1 takes 20 as a0 did, and both b 60.
    assert remaining(ASSUMED, {"a0": 20.0}) == (pytest.approx(20 + 2 * 60), 1)
    # 20 + 90 were taken of 10 + 30 assumed.
    assert remaining(ASSUMED, {"a0": 20.0, "b0": 90.0}) == (pytest.approx(20 + 90), 2)
    assert remaining(ASSUMED, {"a0": 20.0, "a1": 24.0, "b0": 66.0}) == (pytest.approx(66), 1)


def test_without_assumptions_the_mean_of_the_others_and_nothing_before_the_first():
    points = {name: (point, None) for name, (point, _) in ASSUMED.items()}
    assert remaining(points, {}) is None
    assert remaining(points, {"a0": 12.0}) == (36.0, 1)
    # Finished by another command: its time is not known.
    assert remaining(points, {"a0": None}) is None
    assert remaining(ASSUMED, {"a0": None}) == (70.0, 0)


def test_words():
    assert remaining_words((9000.0, 3), 12, 2) == (
        "2 of 12 runs are finished; the others take about 2 h 30 min (3 of 10 by their other seeds)"
    )
    assert remaining_words((0.0, 0), 12, 12) == "12 of 12 runs are finished"
    assert "when the first is" in remaining_words(None, 12, 0)
    assert [as_time(s) for s in (40, 300, 3600, 3659, 24000)] == [
        "40 s",
        "5 min",
        "1 h 00 min",
        "1 h 01 min",
        "6 h 40 min",
    ]

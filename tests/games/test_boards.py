"""The three splits: disjoint, of the sizes asked for or in their proportion, and always the same."""

import itertools

import pytest

from nca_jax.errors import UserError
from nca_jax.games.boards import SPLITS, drawn_boards, split_boards
from nca_jax.games.frozenlake import FrozenLake, frozenlake_boards
from nca_jax.games.sokoban import Sokoban, sokoban_boards


def corridors(count):
    """Distinct boards."""
    return [FrozenLake(("S" + "F" * length + "G",), 0) for length in range(count)]


def sizes(train, validation, test):
    return {"train": train, "validation": validation, "test": test}


def lengths(splits):
    assert tuple(splits) == SPLITS
    return tuple(len(boards) for boards in splits.values())


def test_splits_are_disjoint_and_of_the_sizes_asked_for():
    splits = split_boards(sokoban_boards(6, 6, 1, 5, seed=0), sizes(200, 30, 20))
    assert lengths(splits) == (200, 30, 20)
    assert len({board.render() for boards in splits.values() for board in boards}) == 250
    assert splits == split_boards(sokoban_boards(6, 6, 1, 5, seed=0), sizes(200, 30, 20))
    assert splits != split_boards(sokoban_boards(6, 6, 1, 5, seed=1), sizes(200, 30, 20))


def test_no_more_is_read_than_needed():
    stream = iter(corridors(100))
    split_boards(stream, sizes(5, 2, 1))
    assert next(stream) == corridors(100)[8]


def test_more_training_boards_leave_the_others_as_they_are():
    few, many = (split_boards(iter(corridors(100)), sizes(train, 5, 4)) for train in (10, 50))
    assert few["test"] == many["test"] and few["validation"] == many["validation"]
    assert few["train"] == many["train"][:10]


def test_boards_are_the_same_if_their_texts_are():
    # The player stands on the one goal or the other, which the text does not show.
    alike = [Sokoban.from_rows(("#####", row, "#####")) for row in ("#@$.#", "#+$.#")]
    splits = split_boards(iter([*alike, *corridors(5)]), sizes(2, 2, 2))
    assert alike[1] not in itertools.chain(*splits.values()) and lengths(splits) == (2, 2, 2)


@pytest.mark.parametrize(
    ("available", "asked", "expected"),
    [
        # One each; the others by 999 : 99 : 99, that is 13.35 : 1.32 : 1.32 of 16, and the one left over to the first.
        (19, (1000, 100, 100), (15, 2, 2)),
        (3, (1000, 100, 100), (1, 1, 1)),
        (4, (1, 1, 50), (1, 1, 2)),
        # 49 : 29 : 19 of 7 are 3.54 : 2.09 : 1.37.
        (10, (50, 30, 20), (5, 3, 2)),
        # Of 96 they are 48.49 : 28.70 : 18.80, and two are left over.
        (99, (50, 30, 20), (49, 30, 20)),
    ],
)
def test_too_few_boards_are_divided_in_proportion(available, asked, expected):
    splits = split_boards(iter(corridors(available)), sizes(*asked))
    assert lengths(splits) == expected
    assert len(set(itertools.chain(*splits.values()))) == available


def test_the_19_boards_of_3x3():
    splits = split_boards(frozenlake_boards(3, 2, 5, seed=0), sizes(10_000, 100, 100))
    assert sum(lengths(splits)) == 19 and min(lengths(splits)) >= 1


@pytest.mark.parametrize("wrong", [sizes(5, 0, 1), {"train": 5, "test": 2}, sizes(5, 1, 1) | {"dev": 3}])
def test_sizes_that_are_refused(wrong):
    with pytest.raises(UserError, match="give at least 1 for each of train, validation, test"):
        split_boards(iter(corridors(50)), wrong)


def test_fewer_boards_than_splits():
    with pytest.raises(UserError, match="there are only 2 boards of this kind"):
        split_boards(iter(corridors(2)), sizes(5, 1, 1))


def test_drawn_boards_come_once_and_end():
    draws = iter([None, *corridors(3), *corridors(3)])
    boards = drawn_boards(lambda: next(draws, None), "board")
    assert list(boards) == corridors(3)
    # The draws without a new board are counted in a row, not in all.
    draws = itertools.chain.from_iterable([*[None] * 6000, board] for board in corridors(3))
    assert list(drawn_boards(lambda: next(draws, None), "board")) == corridors(3)
    with pytest.raises(UserError, match="10,000 draws brought no green board"):
        list(drawn_boards(lambda: None, "green board"))

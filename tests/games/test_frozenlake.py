"""FrozenLake: its text, its moves, and which boards are drawn. Distances are scipy's, over the cells without holes."""

import itertools
import random

import numpy as np
import pytest
from scipy.sparse.csgraph import shortest_path

from nca_jax.errors import UserError
from nca_jax.games.frozenlake import FrozenLake, frozenlake_boards
from nca_jax.games.rules import DIRECTIONS, Status

LAKE = FrozenLake.from_rows(("P H", "   ", "H G"))


def steps_needed(lake: FrozenLake) -> float:
    """Fewest steps from the player to the goal, infinity if there is no way."""
    size = len(lake.desc)
    cells = np.array([list(row) for row in lake.desc]).ravel()
    graph = np.zeros((size * size, size * size))
    for one, other in itertools.combinations(range(size * size), 2):
        beside = abs(one // size - other // size) + abs(one % size - other % size) == 1
        graph[one, other] = beside and "H" not in (cells[one], cells[other])
    distances = shortest_path(graph, directed=False, unweighted=True, indices=lake.position)
    return distances[list(cells).index("G")]


def after(game, *directions):
    for direction in directions:
        game, possible = game.step(direction)
        assert possible
    return game


def test_text():
    assert LAKE.render() == (
        "+-----+-----+-----+\n"
        "|  P  |     |  H  |\n"
        "+-----+-----+-----+\n"
        "|     |     |     |\n"
        "+-----+-----+-----+\n"
        "|  H  |     |  G  |\n"
        "+-----+-----+-----+"
    )
    assert after(LAKE, "right", "down", "down", "right").render().splitlines()[5] == "|  H  |     | P/G |"
    assert after(LAKE, "right", "right").render().splitlines()[1] == "|     |     |  P  |"


def test_right_is_always_right():
    for _ in range(100):
        lake, possible = LAKE.step("right")
        assert possible and lake.position == 1 and lake.status is Status.PLAYING
    assert LAKE.position == 0


def test_nothing_moves_at_the_edge_in_a_hole_and_on_the_goal():
    assert LAKE.step("up") == (LAKE, False) and LAKE.step("left") == (LAKE, False)
    hole, goal = after(LAKE, "down", "down"), after(LAKE, "down", "right", "right", "down")
    assert (hole.status, goal.status) == (Status.LOST, Status.WON)
    for lake, direction in itertools.product((hole, goal), DIRECTIONS):
        assert lake.step(direction) == (lake, False)


def test_there_are_19_boards_of_3x3_with_2_holes():
    # Two holes in seven free cells are 21 placements. Four moves are the fewest there can be, right or down only, by
    # way of one of two cells beside the start, one of three on the diagonal, and one of two beside the goal. Two holes
    # are in the way of all of these only if they are both cells beside the start, or both beside the goal.
    boards = list(frozenlake_boards(3, 2, 5, seed=0))
    holes = {tuple(np.flatnonzero([cell == "H" for cell in "".join(lake.desc)])) for lake in boards}
    assert len(boards) == 19
    assert holes == set(itertools.combinations(range(1, 8), 2)) - {(1, 3), (5, 7)}
    assert {lake.shortest_win(5) for lake in boards} == {4}
    assert {lake.position for lake in boards} == {0}


@pytest.mark.parametrize(("size", "holes", "turns"), [(4, 3, 6), (4, 3, 7), (4, 6, 8), (5, 3, 8)])
def test_all_boards_that_can_be_crossed_in_time(size, holes, turns):
    expected = set()
    for placement in itertools.combinations(range(1, size * size - 1), holes):
        cells = np.full(size * size, "F")
        cells[0], cells[-1], cells[list(placement)] = "S", "G", "H"
        lake = FrozenLake(tuple(map("".join, cells.reshape(size, size))), 0)
        if steps_needed(lake) <= turns:
            expected.add(lake)
    boards = list(frozenlake_boards(size, holes, turns, seed=3))
    assert len(boards) == len(set(boards)) and set(boards) == expected
    assert len({board.render() for board in boards}) == len(boards)


def test_many_placements_are_drawn_without_end_and_without_repeats():
    boards = list(itertools.islice(frozenlake_boards(6, 12, 12, seed=1), 200))
    assert len({board.render() for board in boards}) == 200
    holes = [np.flatnonzero([cell == "H" for cell in "".join(board.desc)]) for board in boards]
    assert {len(cells) for cells in holes} == {12} and set(np.concatenate(holes)) == set(range(1, 35))
    needed = [steps_needed(board) for board in boards]
    assert set(needed) == {10, 12} and needed == [board.shortest_win(12) for board in boards]


def test_shortest_win_from_every_cell():
    for board in itertools.islice(frozenlake_boards(5, 9, 16, seed=2), 30):
        for position in [index for index, cell in enumerate("".join(board.desc)) if cell != "H"]:
            lake = FrozenLake(board.desc, position)
            needed = steps_needed(lake)
            assert lake.shortest_win(30) == (None if needed == np.inf else needed)
            if 0 < needed < np.inf:
                assert lake.shortest_win(int(needed) - 1) is None


def test_seeds_give_streams_of_their_own():
    def texts(boards):
        return [board.render() for board in boards]

    states = random.getstate(), np.random.get_state()
    for arguments in ((4, 3, 6), (6, 8, 12)):  # listed, and drawn
        alone = {seed: texts(itertools.islice(frozenlake_boards(*arguments, seed), 50)) for seed in (0, 1)}
        assert alone[0] != alone[1]
        streams = [frozenlake_boards(*arguments, seed) for seed in (0, 1)]
        interleaved = []
        for _ in range(50):
            random.random(), np.random.rand()
            interleaved.append(texts(map(next, streams)))
        assert [alone[0], alone[1]] == list(map(list, zip(*interleaved, strict=True)))
    random.setstate(states[0]), np.random.set_state(states[1])
    list(frozenlake_boards(3, 2, 5, seed=0))
    assert random.getstate() == states[0]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1][1])
    assert np.random.get_state()[2] == states[1][2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1, 0, 5), "a lake of 1x1 cannot have 0 holes"),
        ((3, 8, 5), "a lake of 3x3 cannot have 8 holes"),
        ((3, -1, 5), "cannot have -1 holes"),
        ((3, 7, 5), "there is no 3x3 lake with 7 holes that can be crossed in 5 moves; use fewer holes"),
        ((4, 3, 5), "at least 6 are needed"),
    ],
)
def test_impossible_boards(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        next(frozenlake_boards(*arguments, seed=0))

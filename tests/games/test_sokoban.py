"""Sokoban: its text, its moves, the search, and which boards are drawn. Counts are by hand or by blind search."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from nca_jax.errors import UserError
from nca_jax.games.rules import DIRECTIONS, SearchLimit, Status
from nca_jax.games.sokoban import Sokoban, sokoban_boards

BOARD = Sokoban.from_rows(("######", "#    #", "# @$.#", "#    #", "#    #", "######"))


def blind_search(game: Sokoban, limit: int) -> int | None:
    """The fewest moves that win, by trying all of them."""
    seen, newest = {game}, [game]
    for moves in range(limit + 1):
        if any(position.status is Status.WON for position in newest):
            return moves
        reached = {position.step(direction)[0] for position in newest for direction in DIRECTIONS}
        newest = [position for position in reached if position not in seen]
        seen |= reached
    return None


def random_boards(count: int, boxes: int) -> list[Sokoban]:
    """Boards of all kinds: boxes on goals, hopeless ones, and the player anywhere."""
    boards = []
    for seed in range(count):
        rng = random.Random(seed)
        inside = [(r, c) for r in range(1, 5) for c in range(1, 6)]
        rng.shuffle(inside)
        floor = inside[: rng.randint(12, 20)]
        room = [["#"] * 7 for _ in range(6)]
        for r, c in floor:
            room[r][c] = "_"
        *goals, player = rng.sample(floor, boxes + 1)
        for r, c in goals:
            room[r][c] = "O"
        box_cells = goals if seed % 20 == 0 else rng.sample([cell for cell in floor if cell != player], boxes)
        boards.append(Sokoban(tuple(map("".join, room)), frozenset(box_cells), player))
    return boards


def test_text():
    board = Sokoban.from_rows(("  ####", "### .#", "#*  $#", "#--@_#", "######"))
    assert board.render() == "_ _ # # # #\n# # # _ O #\n# √ _ _ X #\n# _ _ P _ #\n# # # # # #"
    on_goal = Sokoban.from_rows(("#####", "#+$ #", "#####"))
    assert on_goal.render() == "# # # # #\n# P X _ #\n# # # # #"
    assert on_goal.step("right")[0].render() == "# # # # #\n# O P X #\n# # # # #"


def test_moves():
    for direction, line in zip(DIRECTIONS, (1, 3, 2, 2), strict=True):
        moved, possible = BOARD.step(direction)
        assert possible and "P" in moved.render().splitlines()[line]
    won = BOARD.step("right")[0]
    assert won.render().splitlines()[2] == "# _ _ P √ #" and won.status is Status.WON
    assert BOARD.render().splitlines()[2] == "# _ P X O #" and BOARD.status is Status.PLAYING
    assert {BOARD.step("left")[0].step("right")[0]} == {BOARD}  # the same position is equal and hashes alike


def test_moves_that_are_not_possible():
    won = BOARD.step("right")[0]
    against_wall = Sokoban.from_rows(("######", "#.$  #", "#  @$#", "######"))
    two_boxes = Sokoban.from_rows(("#######", "#@$$ .#", "#.    #", "#######"))
    at_the_edge = Sokoban.from_rows(("@$.",))
    for board, direction in (
        *((won, direction) for direction in DIRECTIONS),
        (against_wall, "right"),
        (against_wall, "down"),
        (two_boxes, "right"),
        (two_boxes, "up"),
        (at_the_edge, "left"),
        (at_the_edge, "up"),
        (at_the_edge, "down"),
    ):
        assert board.step(direction) == (board, False)


def test_a_board_is_won_when_all_boxes_are_on_goals():
    board = Sokoban.from_rows(("######", "#@$. #", "# $. #", "######"))
    once = board.step("right")[0]
    assert once.status is Status.PLAYING
    twice = once.step("left")[0].step("down")[0].step("right")[0]
    assert twice.status is Status.WON and board.shortest_win(10) == 4


@pytest.mark.parametrize("boxes", [1, 2])
def test_shortest_win_is_what_blind_search_finds(boxes):
    found = Counter()
    for board in random_boards(200, boxes):
        expected = blind_search(board, 12)
        assert board.shortest_win(12) == expected
        if expected:
            assert board.shortest_win(expected) == expected and board.shortest_win(expected - 1) is None
        found["none" if expected is None else "won" if expected == 0 else "some"] += 1
    assert min(found["none"], found["won"], found["some"]) >= 5


def test_a_box_that_cannot_reach_a_goal_is_known_at_once():
    cornered = Sokoban.from_rows(("#######", "#$    #", "#   . #", "#  @  #", "#######"))
    along_the_wall = Sokoban.from_rows(("#######", "# $   #", "#   . #", "#  @  #", "#######"))
    assert cornered.shortest_win(100, max_states=0) is None
    assert along_the_wall.shortest_win(100, max_states=0) is None


def test_giving_up_is_not_the_same_as_no_solution():
    with pytest.raises(SearchLimit, match="no answer after 5 positions"):
        Sokoban.from_rows(("#######", "#     #", "# $   #", "#    .#", "#@    #", "#######")).shortest_win(
            50, max_states=5
        )
    # Too far for the limit: nothing has to be looked at.
    assert Sokoban.from_rows(("########", "#@$   .#", "########")).shortest_win(3, max_states=0) is None
    assert Sokoban.from_rows(("########", "#@$   .#", "########")).shortest_win(4) == 4


def test_drawn_boards_are_what_they_should_be():
    boards = list(itertools.islice(sokoban_boards(6, 6, 1, 5, seed=0), 1000))
    assert len({board.render() for board in boards}) == 1000
    for board in boards:
        symbols = board.render().replace(" ", "").splitlines()
        assert [len(row) for row in symbols] == [6] * 6
        border = symbols[0] + symbols[-1] + "".join(row[0] + row[-1] for row in symbols)
        assert set(border) == {"#"}
        assert Counter("".join(symbols)) & Counter("OXP√") == Counter("OXP")
    # All over the range, and none trivial.
    needed = Counter(blind_search(board, 5) for board in boards)
    assert set(needed) == {2, 3, 4, 5} and min(needed.values()) > 100
    floors = Counter(36 - board.render().count("#") for board in boards)
    assert set(floors) == set(range(8, 17))


def test_the_floor_is_connected():
    for board in itertools.islice(sokoban_boards(7, 8, 2, 12, seed=5), 100):
        cells = {(r, c) for r, row in enumerate(board.room) for c, symbol in enumerate(row) if symbol != "#"}
        known, waiting = set(), [board.player]
        while waiting:
            r, c = waiting.pop()
            if (r, c) in cells - known:
                known.add((r, c))
                waiting += [(r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)]
        assert known == cells


def test_few_boards_are_all_found_and_the_stream_ends():
    # 2 x 3 cells inside: every floor, goal, box and player there is, by trying all.
    inside = [(r, c) for r in (1, 2) for c in (1, 2, 3)]
    expected = set()
    for count in (3, 4, 5, 6):
        for floor in itertools.combinations(inside, count):
            for goal, box, player in itertools.permutations(floor, 3):
                rows = [["#"] * 5 for _ in range(4)]
                for r, c in floor:
                    rows[r][c] = "_"
                rows[goal[0]][goal[1]] = "O"
                board = Sokoban(tuple(map("".join, rows)), frozenset({box}), player)
                walked = {board.player}
                for _ in range(6):
                    walked |= {(r + d, c + e) for r, c in walked for d, e in ((0, 1), (1, 0), (0, -1), (-1, 0))}
                    walked &= set(floor)
                if walked == set(floor) and (blind_search(board, 9) or 0) >= 2:
                    expected.add(board)
    boards = list(sokoban_boards(4, 5, 1, 9, seed=0))
    assert len(boards) == len(expected) > 10 and set(boards) == expected


def test_larger_boards():
    boards = list(itertools.islice(sokoban_boards(8, 8, 2, 20, seed=0), 20))
    assert len(set(boards)) == 20 and all(len(board.boxes) == 2 for board in boards)
    assert max(board.shortest_win(20) for board in boards) > 12


def test_seeds_give_streams_of_their_own():
    def take(count, stream):
        return [board.render() for board in itertools.islice(stream, count)]

    states = random.getstate(), np.random.get_state()
    alone = [take(50, sokoban_boards(6, 6, 1, 5, seed)) for seed in (0, 1)]
    assert random.getstate() == states[0]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1][1])
    assert np.random.get_state()[2] == states[1][2]
    assert alone[0] != alone[1]
    streams = [sokoban_boards(6, 6, 1, 5, seed) for seed in (0, 1)]
    interleaved = []
    for _ in range(50):
        random.random(), np.random.rand()
        interleaved.append([next(stream).render() for stream in streams])
    assert alone == list(map(list, zip(*interleaved, strict=True)))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((2, 6, 1, 5), "a 2x6 Sokoban board, border included, cannot have a player, boxes [(]1[)]"),
        ((6, 6, 0, 5), "boxes [(]0[)]"),
        ((4, 4, 2, 5), "boxes [(]2[)]"),
        ((3, 5, 1, 5), "10,000 draws brought no 3x5 Sokoban board [(]boxes: 1[)] that takes 2 to 5 moves"),
        ((6, 6, 1, 1), "10,000 draws brought no 6x6"),
    ],
)
def test_impossible_boards(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        next(sokoban_boards(*arguments, seed=0))

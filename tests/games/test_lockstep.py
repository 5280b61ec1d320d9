"""5,000 games in lock step with textarena's FrozenLake and Sokoban, and on the ice with gymnasium's as well.

The others make the boards; ours are built from their state. Both get the same response each turn, and after each the
board's text, whether the move was possible, whether the game is over, and how, have to be equal.

textarena has limits of its own, which are kept out of reach here and ours are tested in test_episode.py: an invalid
move uses no turn, and the turn limit is looked at before the turn is counted and, in Sokoban, only after a move that
was possible. It takes the first direction in brackets and we the last, so each response has one.
"""

import copy
import random
from collections import Counter

import gymnasium
import numpy as np
import pytest

from nca_jax.games.episode import Episode
from nca_jax.games.frozenlake import FrozenLake
from nca_jax.games.rules import DIRECTIONS, Game
from nca_jax.games.sokoban import Sokoban

pytest.importorskip("textarena")

from textarena.envs.FrozenLake.env import FrozenLakeEnv
from textarena.envs.Sokoban.env import SokobanEnv

MOVES = 14
OUT_OF_REACH = 100

WORDS = {"up": "[up]", "down": "[Down]", "left": "I think\n[left]", "right": "[RIGHT], then I see."}
KEYS = {"up": "[w]", "down": "so [s]", "left": "[A]", "right": "[d]."}
SPACED = {"up": "[ up]", "down": "[down ]", "left": "[ A ]", "right": "[\nright\n]"}
NOTHING = ("", "up", "(down)", "[north]", "[left", "right]", "[]", "[up,down]", "[1]")

GYM_ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
SYMBOLS = {0: "#", 1: "_", 2: "O", 3: "√", 4: "X", 5: "P"}


@pytest.fixture(autouse=True)
def keep_global_randomness():
    # textarena seeds Python's global generator and draws its lakes from it.
    state = random.getstate()
    yield
    random.setstate(state)


def draw_response(
    rng: random.Random, ways: tuple[dict[str, str], ...], game: Game, after_invalid: bool
) -> tuple[str, str | None]:
    """A response and the direction in it; mostly a possible move after an invalid one, or games would end at once."""
    directions = list(DIRECTIONS)
    if after_invalid and rng.random() < 0.8:
        directions = [direction for direction in DIRECTIONS if game.step(direction)[1]] or directions
    elif rng.random() < 0.12:
        return rng.choice(NOTHING), None
    direction = rng.choice(directions)
    return rng.choice(ways)[direction], direction


def assert_same_turn(turn, episode, env):
    """textarena's state after a response against our turn."""
    state = env.state
    assert turn.valid == (state.error_count == 0 and not state.game_info[0]["invalid_move"])
    assert episode.over == state.done
    if state.done:
        reason = state.game_info[0]["reason"]
        theirs = {"Congratulations": "won", "You fell into": "lost", "Invalid Move:": "invalid"}
        assert episode.ending == next(ending for start, ending in theirs.items() if reason.startswith(start))


def test_frozen_lake():
    endings = Counter()
    for game_number in range(2500):
        rng = random.Random(game_number)
        size = rng.choice((2, 3, 3, 4, 5))
        env = FrozenLakeEnv(
            size=size,
            num_holes=rng.randint(0, size * size // 3),
            randomize_start_goal=game_number % 2 == 1,  # to other corners
        )
        env.reset(num_players=1, seed=game_number)
        grid, (row, column) = env.state.game_state["grid"], env.state.game_state["player_pos"]
        rows = ["".join("P" if (r, c) == (row, column) else grid[r][c] for c in range(size)) for r in range(size)]
        lake = FrozenLake.from_rows(rows)
        assert lake.render() == env._render_board()

        desc = [line.replace("P", "S").replace(" ", "F") for line in rows]
        other = gymnasium.make("FrozenLake-v1", desc=desc, is_slippery=False)
        position, _ = other.reset(seed=game_number)
        reward, terminated = 0, False

        episode = Episode(lake, OUT_OF_REACH, "Play.")
        turn = None
        for _ in range(MOVES):
            response, direction = draw_response(rng, (WORDS, KEYS, SPACED), lake, bool(turn and not turn.valid))
            turn = episode.act(response)
            env.step(response)
            assert turn.action == direction
            assert turn.board_after == env._render_board()
            assert_same_turn(turn, episode, env)
            if direction:
                lake, _ = lake.step(direction)
                position, reward, terminated, *_ = other.step(GYM_ACTIONS[direction])
            assert (lake.position, lake.render()) == (position, turn.board_after)
            assert terminated == (episode.ending in ("won", "lost")) and reward == episode.won
            if episode.over:
                break
        endings[episode.ending] += 1
        other.close()
    assert min(endings[ending] for ending in ("won", "lost", "invalid", "")) > 100, endings


def test_sokoban():
    endings = Counter()
    box_on_or_off_goal = 0
    kinds = (((6, 6), 1), ((6, 6), 2), ((5, 7), 1), ((7, 6), 2))
    for board_number in range(500):
        dimensions, boxes = kinds[board_number % len(kinds)]
        made = SokobanEnv(dim_room=dimensions, num_boxes=boxes)
        made.reset(num_players=1, seed=board_number)
        # A box that its generator left on its goal is a box beside all goals to textarena, until it is moved.
        made.room_state[(made.room_state == 4) & (made.room_fixed == 2)] = 3
        game = Sokoban(
            tuple("".join(SYMBOLS[cell] for cell in row) for row in made.room_fixed.tolist()),
            frozenset(map(tuple, np.argwhere(np.isin(made.room_state, (3, 4))).tolist())),
            tuple(made.player_position.tolist()),
        )
        for game_number in range(5):
            rng = random.Random(f"{board_number} {game_number}")
            env = copy.deepcopy(made)
            episode = Episode(game, OUT_OF_REACH, "Play.")
            assert game.render() + "\n" == env.create_board_str(env.room_state)
            off_goal = game.render().count("X")
            position, turn = game, None
            for _ in range(MOVES):
                # Its Sokoban takes no spaces in brackets.
                response, direction = draw_response(rng, (WORDS, KEYS), position, bool(turn and not turn.valid))
                turn = episode.act(response)
                position = position.step(direction)[0] if direction else position
                env.step(response)
                assert turn.action == direction
                assert turn.board_after + "\n" == env.create_board_str(env.room_state)
                assert_same_turn(turn, episode, env)
                if episode.over:
                    break
            box_on_or_off_goal += turn.board_after.count("X") != off_goal
            endings[episode.ending] += 1
    assert min(endings[ending] for ending in ("won", "invalid", "")) > 20, endings
    assert box_on_or_off_goal > 50

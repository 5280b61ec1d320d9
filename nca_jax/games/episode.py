"""A game played by a model that is not told the rules: what it is shown, how its answer is read, when it is over."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from nca_jax.games.rules import Game, Status

_ONE_STEP = (
    "You take one step at a time and see the board after it. Answer with the direction of your next step in square "
    "brackets: one of up, down, left and right (or w, s, a and d), for example [up]."
)
# By game. They do not tell the rules, nor what the symbols mean: that is to be found out.
INSTRUCTIONS = {
    "frozenlake": f"You are P on the board below. Reach the goal in as few steps as you can. {_ONE_STEP}",
    "sokoban": f"You are P on the board below. Reach the goal of the puzzle in as few steps as you can. {_ONE_STEP}",
}

_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
_ACTION = re.compile(r"\[\s*(up|down|left|right|[wasd])\s*\]", re.IGNORECASE)
_KEYS = {"w": "up", "a": "left", "s": "down", "d": "right"}


def read_action(response: str) -> str | None:
    """The last direction in square brackets outside of thinking, None if there is none.

    Thinking is what stands between <think> and </think>. Where a chat template opened it, the response has the end
    only; where it was cut off, it has the beginning only, and no action.
    """
    text = _THINKING.sub("", response)
    if "<think>" in text:
        return None
    actions = _ACTION.findall(text.rpartition("</think>")[2])
    if not actions:
        return None
    action = actions[-1].lower()
    return _KEYS.get(action, action)


@dataclasses.dataclass
class Turn:
    """One turn that was played.

    Attributes:
      number: from 1.
      observation: the user message.
      response: the answer to it.
      action: the direction read from it, None if there was none.
      valid: whether the move was possible.
      board_after: the board's text after it.
    """

    number: int
    observation: str
    response: str
    action: str | None
    valid: bool
    board_after: str


class Episode:
    """One game that is being played.

    It is won on the goal and lost in a hole, after two moves in a row that are no direction or not possible, and when
    the turns are used up. A turn without a possible move is used all the same.

    Args:
      game: the first position, neither won nor lost.
      max_turns: at least 1.
      instruction: what every user message starts with.
    """

    def __init__(self, game: Game, max_turns: int, instruction: str):
        if game.status is not Status.PLAYING or max_turns < 1:
            raise ValueError(f"an episode needs a position to play from and turns, not {game} and {max_turns}")
        self.turns: list[Turn] = []
        self.ending = ""  # "won", "lost" (hole), "invalid" (two in a row), "turns" (used up); "" while playing
        self._game = game
        self._max_turns = max_turns
        self._told = f"{instruction}\n\n{game.render()}"

    @property
    def over(self) -> bool:
        return self.ending != ""

    @property
    def won(self) -> bool:
        return self.ending == "won"

    def observation(self) -> str:
        """The user message of the next turn: instruction, first board, and each turn's move and board so far."""
        return self._told

    def act(self, response: str) -> Turn:
        """Plays the next turn by a response's text, special tokens removed."""
        if self.over:
            raise ValueError(f"the episode is over: {self.ending}")
        action = read_action(response)
        valid = False
        if action is None:
            event = "No direction in square brackets was found."
        else:
            self._game, valid = self._game.step(action)
            event = f"You moved {action}." if valid else f"You could not move {action}."
        board = self._game.render()
        turn = Turn(len(self.turns) + 1, self._told, response, action, valid, board)
        self.turns.append(turn)
        self._told += f"\n\n{event}\n\n{board}"
        if self._game.status is not Status.PLAYING:
            self.ending = self._game.status.value
        elif [turn.valid for turn in self.turns[-2:]] == [False, False]:
            self.ending = "invalid"
        elif len(self.turns) == self._max_turns:
            self.ending = "turns"
        return turn


def play(episodes: Sequence[Episode], respond: Callable[[int, Sequence[int]], Sequence[str]]) -> None:
    """Plays episodes side by side, turn by turn, until all are over.

    Args:
      episodes: none of them begun, so that all are at the same turn.
      respond: gives, for a turn's number and the indices of the episodes that still play, one response each. Their
        user messages are `episodes[index].observation()`.
    """
    number = 1
    while playing := [index for index, episode in enumerate(episodes) if not episode.over]:
        for index, response in zip(playing, respond(number, playing), strict=True):
            episodes[index].act(response)
        number += 1

"""FrozenLake and Sokoban: the context is experience, items the model wrote after playing. The rules are never told."""

import hashlib
import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence

from nca_jax.data.chat import Context, Message
from nca_jax.domains.answers import after_thinking
from nca_jax.domains.base import Domain, Example, Probe, Score, system_context
from nca_jax.errors import UserError
from nca_jax.games.boards import split_boards
from nca_jax.games.episode import INSTRUCTIONS, Episode
from nca_jax.games.frozenlake import frozenlake_boards
from nca_jax.games.levels import read_levels, solvable_levels
from nca_jax.games.rules import DIRECTIONS, Game, Status
from nca_jax.games.sokoban import sokoban_boards

_log = logging.getLogger(__name__)

_EXPERIENCE_HEADING = "What earlier games have taught:"
# Written by people, in the form the model's own items have, so that a config runs before any experience is gathered.
_EXAMPLE_ITEMS = {
    "frozenlake": (
        "A cell marked H ends the game at once as a loss. Plan a way to G that enters no H.",
        "The first row is the top. down goes to the next row, right to the next column.",
        "A move that would leave the board changes nothing and uses up a turn; two such turns in a row end the game.",
        "With few turns, move only down and right unless an H is in the way.",
    ),
    "sokoban": (
        "X is a box and O is where it has to be. A box is pushed by moving into it, and goes one cell further.",
        "To push a box right, stand on its left side first; to push it up, stand below it.",
        "A box cannot be pulled. In a corner it is stuck for ever, so never push it there.",
        "# is a wall. Moving into one changes nothing and uses up a turn; two such turns in a row end the game.",
    ),
}

# The same advice in other words and another order.
_PARAPHRASED_ITEMS = {
    "frozenlake": (
        "You win on G. H is a hole: step on it and all is over, so look where every step ends before you take it.",
        "Do not walk against the edge. Nothing happens, the turn is gone, and after two of these in a row you lose.",
        "left and right change the column, up and down the row; up leads towards the top line.",
        "The way is short: mostly right and down, with a detour only round an H.",
    ),
    "sokoban": (
        "The aim is X on O. Walk against X and it slides one cell away from you, if the cell behind it is free.",
        "You can only push. Against a wall, and worst of all in a corner, a box may never come back.",
        "Go round to the far side first: to move a box left you must be on its right, to move it down, above it.",
        "Running into # costs a turn and moves nothing; do it twice in a row and the game is lost.",
    ),
}
_OTHER_TASK = system_context(
    "You are only watching. Do not choose a direction. Reply with the word watch in square brackets and nothing else."
)

# Another context, for retention: how to answer, and nothing about what.
_BRIEF = system_context("Answer with the direction in brackets and nothing else.")


def experience_context(items: Sequence[str]) -> Context:
    """The context that experience items make: a system message with one line each."""
    lines = "\n".join(f"- EXPERIENCE ITEM: {item}" for item in items)
    return system_context(f"{_EXPERIENCE_HEADING}\n{lines}")


class BoardGame(Domain):
    """Games on boards of which no two splits share one.

    Args:
      name: "frozenlake" or "sokoban".
      boards: distinct boards that can be won within `max_turns`.
      max_turns: answers a game may take; a move that is not possible takes one too.
      sizes: how many boards each split should have. Where there are fewer, training goes round its own; the held-out
        splits repeat theirs up to the size, each game with its own random numbers.
    """

    is_multi_turn = True

    def __init__(self, name: str, boards: Iterator[Game], max_turns: int, sizes: dict[str, int]):
        self.name, self.max_turns, self._sizes = name, max_turns, sizes
        self._boards = split_boards(boards, sizes)
        self.context = experience_context(_EXAMPLE_ITEMS[name])
        counts = {split: len(found) for split, found in self._boards.items()}
        if counts != sizes:
            _log.warning("%s: only %d boards fit the settings, split into %s", name, sum(counts.values()), counts)
        self._games = {game.render(): game for games in self._boards.values() for game in games}

    def examples(self, split: str) -> Sequence[Example]:
        """One for each game: its prompt is the board, its answer is to win."""
        boards = self._boards[split]
        count = len(boards) if split == "train" else self._sizes[split]
        examples = []
        for i, game in enumerate(itertools.islice(itertools.cycle(boards), count)):
            text = game.render()
            again = f"-{i // len(boards)}" if i >= len(boards) else ""
            examples.append(Example(hashlib.sha256(text.encode()).hexdigest()[:12] + again, text, "won"))
        return examples

    def episode(self, example: Example) -> Episode:
        """The example's game, before its first turn."""
        return Episode(self._games[example.prompt], self.max_turns, INSTRUCTIONS[self.name])

    def messages(self, example: Example) -> list[Message]:
        """The prompt of the first turn."""
        return turn_messages(self.episode(example))

    def named_contexts(self) -> Mapping[str, Context]:
        return {"brief": _BRIEF}

    def probes(self) -> Sequence[Probe]:
        def score_watching(_: Example, response_text: str) -> Score:
            words = re.findall(r"\[\s*(\w+)\s*\]", after_thinking(response_text) or "")
            return Score(words == ["watch"], words[-1] if words else None)

        return (
            Probe("paraphrased", experience_context(_PARAPHRASED_ITEMS[self.name]), self.score),
            Probe("other_task", _OTHER_TASK, score_watching, lambda _: "watch", plays=False),
        )

    def last_messages(self, example: Example) -> list[Message]:
        """The prompt of a last turn, after long moves and missing ones: over many boards, the longest there is."""
        episode, game = self.episode(example), self._games[example.prompt]
        for number in range(1, self.max_turns):
            moves = {direction: game.step(direction) for direction in DIRECTIONS}
            quiet = [d for d, (after, possible) in moves.items() if possible and after.status is Status.PLAYING]
            # Two answers without a move in a row would end the game.
            if number % 2 and quiet:
                longest = max(quiet, key=len)
                episode.act(f"[{longest}]")
                game = moves[longest][0]
            elif not episode.over:
                episode.act("")
            if episode.over:
                break
        return turn_messages(episode)

    def score(self, example: Example, response_text: str) -> Score:
        """Of a game that ends with its first answer."""
        episode = self.episode(example)
        turn = episode.act(response_text)
        return Score(episode.won, turn.action)


def turn_messages(episode: Episode) -> list[Message]:
    """The prompt of the next turn: one user message with all that was seen so far."""
    return [{"role": "user", "content": episode.observation()}]


class Frozenlake(BoardGame):
    """FrozenLake on a square board, not slippery; start top left, goal bottom right.

    Args:
      max_turns: see BoardGame.
      size: rows and columns.
      holes: their number, exactly.
      train_boards, validation_boards, test_boards: see `sizes` of BoardGame.
      board_seed: of the boards' order and so of the split.
    """

    def __init__(
        self,
        *,
        max_turns: int,
        size: int = 3,
        holes: int = 2,
        train_boards: int = 1000,
        validation_boards: int = 128,
        test_boards: int = 128,
        board_seed: int = 0,
    ):
        sizes = {"train": train_boards, "validation": validation_boards, "test": test_boards}
        super().__init__("frozenlake", frozenlake_boards(size, holes, max_turns, board_seed), max_turns, sizes)


class Sokoban(BoardGame):
    """Sokoban on random boards, or on those of a level file.

    Args:
      max_turns: see BoardGame.
      height, width, boxes: of random boards, walls included.
      levels: a file of levels in the standard format instead, such as Boxoban's.
      train_boards, validation_boards, test_boards, board_seed: as in Frozenlake.
    """

    def __init__(
        self,
        *,
        max_turns: int,
        height: int = 6,
        width: int = 6,
        boxes: int = 1,
        levels: str | None = None,
        train_boards: int = 1000,
        validation_boards: int = 128,
        test_boards: int = 128,
        board_seed: int = 0,
    ):
        sizes = {"train": train_boards, "validation": validation_boards, "test": test_boards}
        if levels is None:
            boards = sokoban_boards(height, width, boxes, max_turns, board_seed)
        else:
            kept, left_out = solvable_levels(read_levels(levels), max_turns)
            for name, reason in left_out:
                _log.warning("level %s of %s is left out: %s", name, levels, reason)
            if not kept:
                raise UserError(f"no level of {levels} can be won within {max_turns} turns; raise domain max_turns.")
            boards = iter([level.board for level in kept])
        super().__init__("sokoban", boards, max_turns, sizes)

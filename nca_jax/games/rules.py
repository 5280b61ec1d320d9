"""What a game is: an immutable position that can be shown, moved and searched."""

import abc
import enum

DIRECTIONS = ("up", "down", "left", "right")


class Status(enum.Enum):
    """Of a position by the rules alone; turn limits are an episode's affair."""

    PLAYING = "playing"
    WON = "won"
    LOST = "lost"


class SearchLimit(Exception):
    """A search gave up before it knew; nothing is said about whether the position can be won."""


class Game(abc.ABC):
    """A position. Subclasses are frozen dataclasses: a move makes a new position and leaves this one as it is."""

    @abc.abstractmethod
    def render(self) -> str:
        """The board's text, without a newline at the end."""

    @abc.abstractmethod
    def step(self, direction: str) -> tuple["Game", bool]:
        """The position after a move, and whether the move was possible; if not, it is the same position.

        Args:
          direction: one of DIRECTIONS. No move is possible in a position that is won or lost.
        """

    @property
    @abc.abstractmethod
    def status(self) -> Status:
        """Won, lost, or neither yet."""

    def shortest_win(self, limit: int) -> int | None:
        """The fewest moves that win, None where that takes more than `limit` or cannot be done.

        A plain breadth-first search, exact; games with many positions bring one of their own.
        """
        newest: set[Game] = {self}
        seen = set(newest)
        for moves in range(limit + 1):
            if any(position.status is Status.WON for position in newest):
                return moves
            reached = {position.step(direction)[0] for position in newest for direction in DIRECTIONS}
            newest = reached - seen
            seen |= newest
        return None

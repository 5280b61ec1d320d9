"""FrozenLake: over the ice to the goal, around the holes; gymnasium's dynamics, not slippery."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from gymnasium.envs.toy_text import FrozenLakeEnv

from nca_jax.errors import UserError
from nca_jax.games.boards import drawn_boards
from nca_jax.games.rules import Game, Status

# gymnasium's numbers of the actions.
_ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}

# Up to so many placements of the holes are listed and shuffled; more are drawn one by one.
_LISTED = 20_000


@dataclasses.dataclass(frozen=True)
class FrozenLake(Game):
    """A position on a lake.

    Attributes:
      desc: the map as gymnasium writes it, a string per row: S start, F ice, H hole, G goal.
      position: the player's cell, counted row by row.
    """

    desc: tuple[str, ...]
    position: int

    @classmethod
    def from_rows(cls, rows: Sequence[str]) -> "FrozenLake":
        """A lake as its board shows it, a character per cell: P (where the player starts), H, G, or a space."""
        desc = tuple(row.replace(" ", "F").replace("P", "S") for row in rows)
        return cls(desc, "".join(desc).index("S"))

    def render(self) -> str:
        width = len(self.desc[0])
        cells = [cell if cell in "HG" else " " for cell in "".join(self.desc)]
        cells[self.position] = "P/G" if cells[self.position] == "G" else "P"
        line = "+" + "-----+" * width
        rows = [cells[start : start + width] for start in range(0, len(cells), width)]
        return "\n".join([line, *(f"|{'|'.join(f' {cell:^3} ' for cell in row)}|\n{line}" for row in rows)])

    def step(self, direction: str) -> tuple["FrozenLake", bool]:
        reached = _transitions(self.desc)[self.position][_ACTIONS[direction]]
        # What is at a wall, in a hole or on the goal stays where it is.
        return FrozenLake(self.desc, reached), reached != self.position

    @property
    def status(self) -> Status:
        cell = self.desc[self.position // len(self.desc[0])][self.position % len(self.desc[0])]
        return {"G": Status.WON, "H": Status.LOST}.get(cell, Status.PLAYING)


@functools.lru_cache(maxsize=1024)
def _transitions(desc: tuple[str, ...]) -> list[list[int]]:
    """The cell reached from each cell by each action."""
    table = FrozenLakeEnv(desc=list(desc), is_slippery=False).P
    return [[table[cell][action][0][1] for action in sorted(table[cell])] for cell in sorted(table)]


def frozenlake_boards(size: int, holes: int, max_turns: int, seed: int) -> Iterator[FrozenLake]:
    """Lakes with the start top left, the goal bottom right and the holes anywhere else, in random order, none twice.

    Where there are few ways to place the holes, all are gone through and the stream ends; else it goes on.

    Args:
      size: of a side, in cells.
      holes: how many.
      max_turns: boards that need more moves are left out.

    Raises:
      UserError, with the first board: no board can be like that.
    """
    free = size * size - 2
    if size < 2 or not 0 <= holes <= free:
        raise UserError(
            f"a lake of {size}x{size} cannot have {holes} holes; give size 2 or more and at most size*size-2 holes."
        )
    kind = f"{size}x{size} lake with {holes} holes that can be crossed in {max_turns} moves"
    if 2 * (size - 1) > max_turns:
        raise UserError(f"there is no {kind}; at least {2 * (size - 1)} are needed.")
    rng = np.random.default_rng([seed, size, holes])
    if math.comb(free, holes) > _LISTED:
        yield from drawn_boards(lambda: _lake(size, rng.choice(free, holes, replace=False) + 1, max_turns), kind)
        return
    placements = list(itertools.combinations(range(1, free + 1), holes))
    found = False
    for index in rng.permutation(len(placements)):
        if lake := _lake(size, placements[index], max_turns):
            found = True
            yield lake
    if not found:
        raise UserError(f"there is no {kind}; use fewer holes or more turns.")


def _lake(size: int, holes: Collection[int], max_turns: int) -> FrozenLake | None:
    """The lake with holes at these cells, None if it cannot be crossed in time."""
    cells = ["S", *"F" * (size * size - 2), "G"]
    for hole in holes:
        cells[hole] = "H"
    lake = FrozenLake(tuple("".join(cells[row * size : (row + 1) * size]) for row in range(size)), 0)
    return None if lake.shortest_win(max_turns) is None else lake

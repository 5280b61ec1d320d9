"""Sokoban: a player pushes every box onto a goal; its rules, an exact search, and boards drawn at random."""

import dataclasses
import functools
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from nca_jax.errors import UserError
from nca_jax.games.boards import drawn_boards
from nca_jax.games.rules import DIRECTIONS, Game, SearchLimit, Status

Cell = tuple[int, int]  # row and column

_CHANGES = dict(zip(DIRECTIONS, ((-1, 0), (1, 0), (0, -1), (0, 1)), strict=True))

# A board that takes a longer search than this is not drawn; the usual ones take some hundreds.
_DRAWN_STATES = 20_000


@dataclasses.dataclass(frozen=True)
class Sokoban(Game):
    """A position in a room.

    Attributes:
      room: what does not move, a string per row: # wall, _ floor, O goal. All outside counts as wall.
      boxes: their cells.
      player: its cell.
    """

    room: tuple[str, ...]
    boxes: frozenset[Cell]
    player: Cell

    @classmethod
    def from_rows(cls, rows: Sequence[str]) -> "Sokoban":
        """A position as level files write it: # wall, space - or _ floor, $ box, . goal, @ player, * and + on goals.

        All rows are of one length, and there is one player; `nca_jax.games.levels` checks what a file has.
        """
        cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
        return cls(
            tuple("".join("#" if s == "#" else "O" if s in ".*+" else "_" for s in row) for row in rows),
            frozenset(cell for cell, symbol in cells.items() if symbol in "$*"),
            next(cell for cell, symbol in cells.items() if symbol in "@+"),
        )

    def render(self) -> str:
        rows = [list(row) for row in self.room]
        for r, c in self.boxes:
            rows[r][c] = "√" if rows[r][c] == "O" else "X"
        rows[self.player[0]][self.player[1]] = "P"
        return "\n".join(map(" ".join, rows))

    def step(self, direction: str) -> tuple["Sokoban", bool]:
        if self.status is Status.WON:
            return self, False
        down, right = _CHANGES[direction]
        ahead = (self.player[0] + down, self.player[1] + right)
        beyond = (ahead[0] + down, ahead[1] + right)
        if self._is_wall(ahead):
            return self, False
        if ahead not in self.boxes:
            return dataclasses.replace(self, player=ahead), True
        if self._is_wall(beyond) or beyond in self.boxes:
            return self, False
        return Sokoban(self.room, self.boxes - {ahead} | {beyond}, ahead), True

    def _is_wall(self, cell: Cell) -> bool:
        r, c = cell
        return not (0 <= r < len(self.room) and 0 <= c < len(self.room[0])) or self.room[r][c] == "#"

    @property
    def status(self) -> Status:
        return Status.WON if all(self.room[r][c] == "O" for r, c in self.boxes) else Status.PLAYING

    def shortest_win(self, limit: int, max_states: int = 1_000_000) -> int | None:
        """The fewest moves that win, None where that takes more than `limit` or cannot be done; by A*, exact.

        A position is estimated by the pushes that each box needs to its nearest goal if it were alone, which is never
        too much; a box that could not get there even alone rules its position out.

        Args:
          limit: in moves.
          max_states: positions looked at before giving up; a million take some seconds and 250 MB.

        Raises:
          SearchLimit: it gave up.
        """
        maze = _maze(self.room)
        player, boxes = maze.number[self.player], sum(1 << maze.number[box] for box in self.boxes)
        pushes = [maze.pushes[maze.number[box]] for box in self.boxes]
        # Positions to look at, by moves made plus estimate, which never falls along a path: the first way in which a
        # position comes out is a shortest one.
        waiting: list[list[tuple[int, int, int, int]]] = [[] for _ in range(limit + 1)]
        if None not in pushes and sum(pushes) <= limit:
            waiting[sum(pushes)].append((player, boxes, 0, sum(pushes)))
        looked_at = set()
        for total in range(limit + 1):
            while waiting[total]:
                player, boxes, moves, estimate = waiting[total].pop()
                if estimate == 0:
                    return moves
                if (player, boxes) in looked_at:
                    continue
                if len(looked_at) == max_states:
                    raise SearchLimit(f"no answer after {max_states:,} positions")
                looked_at.add((player, boxes))
                for neighbours in maze.neighbours:
                    ahead = neighbours[player]
                    if ahead is None:
                        continue
                    boxes_after, estimate_after = boxes, estimate
                    if boxes >> ahead & 1:
                        beyond = neighbours[ahead]
                        if beyond is None or boxes >> beyond & 1 or maze.pushes[beyond] is None:
                            continue
                        boxes_after = boxes ^ (1 << ahead | 1 << beyond)
                        estimate_after += maze.pushes[beyond] - maze.pushes[ahead]
                    total_after = moves + 1 + estimate_after
                    if total_after <= limit and (ahead, boxes_after) not in looked_at:
                        waiting[total_after].append((ahead, boxes_after, moves + 1, estimate_after))
        return None


@dataclasses.dataclass(frozen=True)
class _Maze:
    """A room for the search: its floor cells are numbered, so that boxes are the bits of an integer.

    Attributes:
      number: of each floor cell.
      neighbours: for each direction, the number of the next floor cell from each, None at a wall.
      pushes: that bring a lone box from each cell to the nearest goal, None where no pushes do.
    """

    number: dict[Cell, int]
    neighbours: tuple[list[int | None], ...]
    pushes: list[int | None]


@functools.lru_cache(maxsize=64)
def _maze(room: tuple[str, ...]) -> _Maze:
    cells = [(r, c) for r, row in enumerate(room) for c, symbol in enumerate(row) if symbol != "#"]
    number = {cell: index for index, cell in enumerate(cells)}
    neighbours = tuple(
        [number.get((r + down, c + right)) for r, c in cells] for down, right in (_CHANGES[d] for d in DIRECTIONS)
    )
    pushes: list[int | None] = [0 if room[r][c] == "O" else None for r, c in cells]
    reached = [index for index, count in enumerate(pushes) if count == 0]
    for box in reached:  # grows while it is gone through: backwards from the goals, nearest first
        for neighbours_back in neighbours:
            before = neighbours_back[box]
            # The push came from `before`, with the player one further back.
            if before is not None and pushes[before] is None and neighbours_back[before] is not None:
                pushes[before] = pushes[box] + 1
                reached.append(before)
    return _Maze(number, neighbours, pushes)


def sokoban_boards(height: int, width: int, boxes: int, max_turns: int, seed: int) -> Iterator[Sokoban]:
    """Rooms within a border of walls, with boxes, goals and player on a connected floor of random shape, none twice.

    No box starts on a goal, the player neither, and the shortest win takes from 2 to `max_turns` moves. The stream goes
    on until nothing new turns up.

    Args:
      height, width: of the board with its border, in cells.
      boxes: how many, and goals as many.
      max_turns: boards that need more moves are left out.

    Raises:
      UserError, with the first board: no board can be like that.
    """
    inside = (height - 2) * (width - 2)
    if min(height, width) < 3 or boxes < 1 or 2 * boxes + 1 > inside:
        raise UserError(
            f"a {height}x{width} Sokoban board, border included, cannot have a player, boxes ({boxes}) and as many "
            "goals; give at least 1 box, or a larger board."
        )
    rng = np.random.default_rng([seed, height, width, boxes])
    smallest_floor = max(2 * boxes + 1, inside // 2)

    def draw() -> Sokoban | None:
        floor = _connected_floor(rng, height, width, int(rng.integers(smallest_floor, inside + 1)))
        player, *things = (floor[index] for index in rng.permutation(len(floor))[: 2 * boxes + 1])
        symbols = dict.fromkeys(floor, "_") | dict.fromkeys(things[:boxes], "O")
        room = tuple("".join(symbols.get((r, c), "#") for c in range(width)) for r in range(height))
        board = Sokoban(room, frozenset(things[boxes:]), player)
        try:
            moves = board.shortest_win(max_turns, _DRAWN_STATES)
        except SearchLimit:
            return None
        return board if moves is not None and moves >= 2 else None

    what = f"{height}x{width} Sokoban board (boxes: {boxes}) that takes 2 to {max_turns} moves"
    yield from drawn_boards(draw, what)


def _connected_floor(rng: np.random.Generator, height: int, width: int, cells: int) -> list[Cell]:
    """So many connected cells inside the border: they grow from one, at the neighbour with the lowest random number."""
    order = rng.random((height, width)).tolist()
    start = (int(rng.integers(1, height - 1)), int(rng.integers(1, width - 1)))
    border = [(0.0, start)]
    met = {start}
    floor = []
    while len(floor) < cells:
        _, (r, c) = heapq.heappop(border)
        floor.append((r, c))
        for down, right in _CHANGES.values():
            cell = (r + down, c + right)
            if 1 <= cell[0] < height - 1 and 1 <= cell[1] < width - 1 and cell not in met:
                met.add(cell)
                heapq.heappush(border, (order[cell[0]][cell[1]], cell))
    return floor

"""Sokoban level files in the standard text form (XSB), as of Boxoban and most collections."""

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from etils import epath

from nca_jax.errors import UserError
from nca_jax.games.rules import SearchLimit
from nca_jax.games.sokoban import Sokoban

_FLOOR = " -_"
_SYMBOLS = "#$.@*+" + _FLOOR


class Level(NamedTuple):
    """A board, and a name of it that is its own: file name without ending, and the level's title or number."""

    id: str
    board: Sokoban


class _Block(NamedTuple):
    """Lines of a file that are a level: the number of the first in the file, from 1, and the last comment before."""

    line: int
    title: str
    rows: list[str]


def read_levels(path: str | os.PathLike) -> list[Level]:
    """All levels of a file, in order.

    # is a wall, $ a box, . a goal, @ the player, * a box on a goal, + the player on a goal; space, - and _ are floor.
    Levels are separated by whatever does not look like a row: blank lines, comments that start with ;, titles. A level
    is named by the comment above it if every level of the file has one of its own, else by its number.

    Raises:
      UserError: with file and line, for a symbol that is none of these, no player or several, boxes and goals that are
        not equal in number, no box, or walls with a gap; and for a file that cannot be read or has no level.
    """
    path = epath.Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a text file of Sokoban levels ({error}).") from error
    blocks = _blocks(path, text.splitlines())
    if not blocks:
        raise UserError(f"{path} has no Sokoban level; a level's rows start with a wall, #.")
    titles = {block.title for block in blocks}  # a level without a comment has that of the level before
    if "" in titles or len(titles) < len(blocks):
        blocks = [block._replace(title=str(number)) for number, block in enumerate(blocks, start=1)]
    return [Level(f"{path.stem}:{block.title}", _board(path, block)) for block in blocks]


def solvable_levels(levels: Iterable[Level], max_turns: int) -> tuple[list[Level], list[tuple[str, str]]]:
    """The levels that can be won in time, and of the others their id and why they are left out."""
    kept, left_out = [], []
    for level in levels:
        try:
            moves = level.board.shortest_win(max_turns)
        except SearchLimit as error:
            left_out.append((level.id, f"search gave up: {error}"))
            continue
        if moves is None:
            left_out.append((level.id, f"cannot be solved in {max_turns} moves"))
        elif moves == 0:
            left_out.append((level.id, "is solved from the start"))
        else:
            kept.append(level)
    return kept, left_out


def _blocks(path: epath.Path, lines: Sequence[str]) -> list[_Block]:
    blocks = []
    rows: list[str] = []
    title = ""
    for number, line in enumerate([*lines, ""], start=1):  # the blank line ends the last level
        line = line.rstrip()
        is_row = line.lstrip(_FLOOR).startswith("#") or (line.strip(_FLOOR) and not set(line) - set(_SYMBOLS))
        if is_row:
            if unknown := set(line) - set(_SYMBOLS):
                symbols = ", ".join(map(repr, sorted(unknown)))
                raise UserError(f"{path}, line {number}: unknown symbol {symbols}; a level has only {_SYMBOLS!r}.")
            rows.append(line)
            continue
        if rows:
            rows_without_indent = textwrap.dedent("\n".join(rows)).split("\n")
            blocks.append(_Block(number - len(rows), title, rows_without_indent))
            rows = []
        if line.startswith(";"):
            title = line[1:].strip()
    return blocks


def _board(path: epath.Path, block: _Block) -> Sokoban:
    where = f"{path}, line {block.line}"
    symbols = "".join(block.rows)
    players, boxes, goals = (sum(map(symbols.count, kind)) for kind in ("@+", "$*", ".*+"))
    if players != 1:
        raise UserError(f"{where}: the level has {players} players (@ or +); it must have one.")
    if boxes < 1 or boxes != goals:
        raise UserError(f"{where}: the level has {boxes} boxes and {goals} goals; give as many, at least one.")
    # A frame of floor around the rows: what it is connected with is outside.
    width = max(map(len, block.rows))
    framed = [" " * (width + 2), *(f" {row.ljust(width)} " for row in block.rows), " " * (width + 2)]
    outside = {(0, 0)}
    border = [(0, 0)]
    while border:
        r, c = border.pop()
        for cell in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
            inside_frame = 0 <= cell[0] < len(framed) and 0 <= cell[1] < width + 2
            if inside_frame and cell not in outside and framed[cell[0]][cell[1]] != "#":
                outside.add(cell)
                border.append(cell)
    for r, c in sorted(outside):
        if framed[r][c] not in _FLOOR:
            line = block.line + r - 1
            raise UserError(f"{path}, line {line}: {framed[r][c]} is not enclosed by walls; close the gap.")
    rows = ["".join("#" if (r, c) in outside else cell for c, cell in enumerate(row)) for r, row in enumerate(framed)]
    return Sokoban.from_rows([row[1:-1] for row in rows[1:-1]])

"""Streams of boards without repeats, and their division into training, validation and test boards."""

import itertools
from collections.abc import Callable, Iterator, Mapping

from nca_jax.errors import UserError
from nca_jax.games.rules import Game

SPLITS = ("train", "validation", "test")

# A stream ends after so many draws in a row that brought no new board: a few seconds.
_FRUITLESS_DRAWS = 10_000


def drawn_boards(draw: Callable[[], Game | None], what: str) -> Iterator[Game]:
    """The boards that `draw` brings, each once, until it seems to bring no more.

    Args:
      draw: draws a board at random, or None where what it drew is of no use.
      what: names the boards in the error.

    Raises:
      UserError: there was none at all.
    """
    seen = set()
    fruitless = 0
    while fruitless < _FRUITLESS_DRAWS:
        board = draw()
        if board is None or board in seen:
            fruitless += 1
            continue
        seen.add(board)
        fruitless = 0
        yield board
    if not seen:
        raise UserError(f"{_FRUITLESS_DRAWS:,} draws brought no {what}; allow more turns, or change size or number.")


def split_boards(boards: Iterator[Game], sizes: Mapping[str, int]) -> dict[str, list[Game]]:
    """Distinct boards, each in one split only; two boards are the same if their texts are.

    Test boards are taken from the stream first and training boards last, so that more training boards leave the others
    as they are. A stream with fewer boards than asked for is divided in about the same proportions, at least one board
    for each split: look at the lengths of what you get.

    Args:
      boards: where they come from; it is read no further than needed.
      sizes: how many boards each of SPLITS is to have.

    Raises:
      UserError: a size is less than 1, or there are fewer boards than splits.
    """
    if set(sizes) != set(SPLITS) or min(sizes.values()) < 1:
        raise UserError(f"the numbers of boards are {dict(sizes)}; give at least 1 for each of {', '.join(SPLITS)}.")
    by_text = {}
    total = sum(sizes.values())
    for board in boards:
        by_text.setdefault(board.render(), board)
        if len(by_text) == total:
            break
    if len(by_text) < len(SPLITS):
        raise UserError(f"there are only {len(by_text)} boards of this kind, and three splits; change size or number.")
    counts = sizes if len(by_text) == total else _in_proportion(len(by_text), sizes)
    distinct = iter(by_text.values())
    taken = {split: list(itertools.islice(distinct, counts[split])) for split in reversed(SPLITS)}
    return {split: taken[split] for split in SPLITS}


def _in_proportion(available: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """One for each, and the rest by largest remainder over what is asked beyond one."""
    rest = available - len(sizes)
    asked = sum(sizes.values()) - len(sizes)
    counts = {split: 1 + rest * (size - 1) // asked for split, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda split: rest * (sizes[split] - 1) % asked, reverse=True)
    for split in by_remainder[: available - sum(counts.values())]:
        counts[split] += 1
    return counts

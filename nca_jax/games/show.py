"""The command that prints a game as it was played in an evaluation of a run.

    python -m nca_jax.games.show WORKDIR                                       # the first game of the last evaluation
    python -m nca_jax.games.show WORKDIR --step=10 --game=3 --view=no_context  # by position, or by id

A game is printed in both views unless one is named; `--list` prints a line for each game instead.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from etils import epath

from nca_jax.errors import UserError


def read_games(run: str, step: int | None) -> tuple[epath.Path, list[dict[str, Any]]]:
    """The games of an evaluation, all views; the last evaluation unless a step is named.

    Raises:
      UserError: there is no such evaluation, or it is not of a game.
    """
    directory = epath.Path(run) / "evaluations"
    found = sorted(directory.glob("step_*.jsonl")) if directory.exists() else []
    if step is not None:
        found = [path for path in found if path.name == f"step_{step:08d}.jsonl"]
    if not found:
        raise UserError(f"{directory} has no evaluation{'' if step is None else f' of step {step}'}; check the run.")
    games = [json.loads(line) for line in found[-1].read_text().split("\n") if line]
    if "turns" not in games[0]:
        raise UserError(f"{found[-1]} is not of a game; its items are one line each and can be read as they are.")
    return found[-1], games


def chosen(games: Sequence[dict[str, Any]], which: str, view: str | None) -> list[dict[str, Any]]:
    """One game, by id or by position, in each view or in the one that is named.

    Raises:
      UserError: there is no such game or view.
    """
    views = list(dict.fromkeys(game["view"] for game in games))
    if view and view not in views:
        raise UserError(f"there is no view {view!r}; there are {', '.join(views)}.")
    first = [game for game in games if game["view"] == views[0]]
    ids = [game["id"] for game in first]
    if which not in ids:
        if not which.isdigit() or int(which) >= len(ids):
            raise UserError(
                f"there is no game {which!r}; give a position from 0 to {len(ids) - 1}, or an id of --list."
            )
        which = ids[int(which)]
    return [game for game in games if game["id"] == which and view in (None, game["view"])]


def render(game: dict[str, Any]) -> str:
    """A game as text: each board, and the answer that led to the next."""
    lines = [f"game {game['id']}, {game['view']}: {game['answer']}, {len(game['turns'])} turns", "", game["prompt"]]
    for turn in game["turns"]:
        move = turn["action"] or "no direction"
        lines += ["", f"turn {turn['number']}: {move}{'' if turn['valid'] else ' (not possible)'}"]
        lines += [f"  > {line}" for line in turn["response"].splitlines()] + ["", turn["board"]]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(prog="python -m nca_jax.games.show", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="workdir of a run")
    parser.add_argument("--step", type=int, help="of the evaluation; default: the last one")
    parser.add_argument("--game", default="0", help="position or id; default: the first")
    parser.add_argument("--view", help="no_context or with_context; default: both")
    parser.add_argument("--list", action="store_true", help="a line for each game")
    options = parser.parse_args(arguments)
    try:
        path, games = read_games(options.run, options.step)
        if options.list:
            for game in games:
                print(f"{game['id']}  {game['view']:12}  {game['answer']:8}  {len(game['turns'])} turns")
            return 0
        print(path)
        print("\n\n".join(render(game) for game in chosen(games, options.game, options.view)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)

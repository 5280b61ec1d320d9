"""Level files: what is read, named and refused, and which levels are kept."""

import pytest
from conftest import SHARED

from nca_jax.errors import UserError
from nca_jax.games import levels
from nca_jax.games.levels import read_levels, solvable_levels
from nca_jax.games.rules import SearchLimit
from nca_jax.games.sokoban import Sokoban

BOXOBAN = SHARED / "data/sokoban/boxoban_unfiltered_test_000_first100.txt"

TWO = """; first
#####
#@$.#
#####

; second
  ####
###  #
#.*$@#
######
"""


def read(tmp_path, text):
    path = tmp_path / "some.txt"
    path.write_text(text, encoding="utf-8")
    return read_levels(path)


def test_levels_are_read_and_named(tmp_path):
    first, second = read(tmp_path, TWO)
    assert (first.id, second.id) == ("some:first", "some:second")
    assert first.board.render() == "# # # # #\n# P X O #\n# # # # #"
    # What lies outside the walls is wall, and rows are of one length.
    assert second.board.render() == "# # # # # #\n# # # _ _ #\n# O √ X P #\n# # # # # #"


@pytest.mark.parametrize(
    "text",
    [
        "#####\n#@$.#\n#####\n\n\n#####\n#.$@#\n#####",
        "Two levels\n#####\n#@$.#\n#####\nAuthor: me\n\n#####\n#.$@#\n#####\nEnd",
        "; same\n#####\r\n#@$.#\r\n#####\r\n; same\n#####\n#.$@#\n#####\n",
        "; one\n#####\n#@$.#\n#####\n\n#####\n#.$@#\n#####\n",
        "#####\n#@$.#\n#####\n\n; two\n#####\n#.$@#\n#####\n",
    ],
    ids=["blank lines", "titles", "the same comment", "no second comment", "no first comment"],
)
def test_levels_without_names_of_their_own_are_numbered(text, tmp_path):
    assert [(level.id, level.board.player) for level in read(tmp_path, text)] == [
        ("some:1", (1, 1)),
        ("some:2", (1, 3)),
    ]


def test_all_ways_of_writing(tmp_path):
    (level,) = read(tmp_path, "\ufeff#######\n#+$-_ #\n#*    #\n#######\n")
    assert level.board == Sokoban(("#######", "#O____#", "#O____#", "#######"), frozenset({(1, 2), (2, 1)}), (1, 1))
    # Spaces around all rows are no part of the board.
    (level,) = read(tmp_path, "  #####  \n  #@$.#   \n  #####\n")
    assert level.board.room == ("#####", "#__O#", "#####")
    # A room within walls that the player cannot reach stays as it is.
    (level,) = read(tmp_path, "######\n#@$.##\n######\n#    #\n######\n")
    assert level.board.room == ("######", "#__O##", "######", "#____#", "######")


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("; 0\n#####\n#@x.#\n#####\n", 3, "unknown symbol 'x'"),
        ("#####\n#@$.#\n#####\n\n#####\n# $.#\n#####\n", 5, "the level has 0 players"),
        ("######\n#@$.@#\n######\n", 1, "the level has 2 players"),
        ("######\n#@$.+#\n######\n", 1, "the level has 2 players"),
        ("######\n#@$..#\n######\n", 1, "the level has 1 boxes and 2 goals"),
        ("######\n#@   #\n######\n", 1, "the level has 0 boxes and 0 goals"),
        ("#####\n#@$.#\n## ##\n", 2, "@ is not enclosed by walls"),
        ("#####\n#@$.\n#####\n", 2, "@ is not enclosed by walls"),
        ("#####\n@$. #\n#####\n", 2, "@ is not enclosed by walls"),
        ("#####\n#@  #\n#####\n# $.\n####\n", 4, "[$] is not enclosed by walls"),
    ],
)
def test_faults_are_refused_with_their_line(text, line, sentence, tmp_path):
    with pytest.raises(UserError, match=rf"some\.txt, line {line}: {sentence}"):
        read(tmp_path, text)


def test_files_without_levels(tmp_path):
    with pytest.raises(UserError, match="has no Sokoban level"):
        read(tmp_path, "; 0\nnothing here\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_levels(tmp_path / "missing.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe#")
    with pytest.raises(UserError, match="cannot be read"):
        read_levels(tmp_path / "binary.txt")


def test_levels_are_left_out_with_a_reason(tmp_path, monkeypatch):
    text = "".join(
        f"; {name}\n######\n{row}\n######\n"
        for name, row in {"near": "#@$. #", "far": "#@$ .#", "done": "#@ * #"}.items()
    )
    given = read(tmp_path, text)
    kept, left_out = solvable_levels(given, 1)
    assert kept == given[:1]
    assert left_out == [("some:far", "cannot be solved in 1 moves"), ("some:done", "is solved from the start")]
    assert solvable_levels(given, 2)[0] == given[:2]

    def give_up(self, limit):
        raise SearchLimit("no answer after 7 positions")

    monkeypatch.setattr(levels.Sokoban, "shortest_win", give_up)
    assert solvable_levels(given[:1], 1) == ([], [("some:near", "search gave up: no answer after 7 positions")])


@pytest.mark.skipif(not BOXOBAN.exists(), reason="the Boxoban levels are not here")
def test_boxoban():
    found = read_levels(BOXOBAN)
    assert [level.id for level in found] == [f"{BOXOBAN.stem}:{number}" for number in range(100)]
    for level, text in zip(found, BOXOBAN.read_text().strip().split("\n\n"), strict=True):
        rows = text.splitlines()[1:]
        assert level.board.render().replace(" ", "") == "\n".join(rows).translate(str.maketrans(" .$@", "_OXP"))
        assert (len(level.board.boxes), len(level.board.room)) == (4, 10)
    # What a blind breadth-first search found, by a program of its own, in up to 1.3 million positions.
    shortest = [23, 44, 21, 30, 28, 49, 29, 31, 32, 22]
    assert [level.board.shortest_win(60) for level in found[:10]] == shortest
    kept, left_out = solvable_levels(found[:10], 29)
    assert kept == [level for level, moves in zip(found, shortest, strict=False) if moves <= 29]
    assert left_out == [(found[index].id, "cannot be solved in 29 moves") for index in (1, 3, 5, 7, 8)]

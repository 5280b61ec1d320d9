"""Episodes: what is shown, how answers are read, when a game is over, and who is asked in which order."""

import pytest

from nca_jax.games.episode import INSTRUCTIONS, Episode, Turn, play, read_action
from nca_jax.games.frozenlake import FrozenLake
from nca_jax.games.sokoban import Sokoban

LAKE = FrozenLake.from_rows(("P H", "   ", "H G"))
ROOM = Sokoban.from_rows(("######", "#@ $.#", "#    #", "######"))


def played(game, *responses, max_turns=5):
    episode = Episode(game, max_turns, "Play.")
    for response in responses:
        assert not episode.over
        episode.act(response)
    return episode


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("[up]", "up"),
        ("[ Right ]", "right"),
        ("[\tLEFT\n]", "left"),
        ("[w][a]", "left"),
        ("[w]", "up"),
        ("[a]", "left"),
        ("[s]", "down"),
        ("I go [D].", "right"),
        ("First [up], then [down] and [north].", "down"),
        ("[[down]]", "down"),
        ("[up", None),
        ("up", None),
        ("(up)", None),
        ("[up down]", None),
        ("[upward]", None),
        ("[u p]", None),
        ("[]", None),
        ("", None),
        ("<think>[up]</think>[down]", "down"),
        ("<think>[up]</think>", None),
        ("[down]<think>[up]</think>", "down"),
        ("<think>\n[up]\n</think>\n\n<think>[left]</think> [right]", "right"),
        ("<think>shall I go [up]", None),
        ("[down] <think>or [up]", None),
        ("<think>[up]</think>[down]<think>", None),
        # The chat template had opened the thinking.
        ("perhaps [up]</think>[down]", "down"),
        ("perhaps [up]</think>", None),
    ],
)
def test_reading_an_action(response, action):
    assert read_action(response) == action


def test_the_instruction_says_what_to_do_and_not_the_rules():
    for instruction in INSTRUCTIONS.values():
        assert read_action(instruction) == "up"
        assert all(word in instruction for word in ("You are P", "up", "down", "left", "right", "(or w, s, a and d)"))
        told = instruction.lower()
        assert not any(word in told for word in ("hole", "box", "wall", "push", "ice", "frozen", "#", "lose"))


def test_a_user_message_has_all_that_was_seen():
    episode = Episode(ROOM, 5, "Play.")
    start = "# # # # # #\n# P _ X O #\n# _ _ _ _ #\n# # # # # #"
    moved = "# # # # # #\n# _ P X O #\n# _ _ _ _ #\n# # # # # #"
    assert episode.observation() == f"Play.\n\n{start}"
    first = episode.act("I go [up].")
    second = episode.act("[d]")
    third = episode.act("hm")
    parts = (
        f"Play.\n\n{start}",
        f"\n\nYou could not move up.\n\n{start}",
        f"\n\nYou moved right.\n\n{moved}",
        f"\n\nNo direction in square brackets was found.\n\n{moved}",
    )
    assert episode.observation() == "".join(parts)
    assert episode.turns == [
        Turn(1, parts[0], "I go [up].", "up", False, start),
        Turn(2, "".join(parts[:2]), "[d]", "right", True, moved),
        Turn(3, "".join(parts[:3]), "hm", None, False, moved),
    ]
    assert episode.turns == [first, second, third] and not episode.over


@pytest.mark.parametrize(
    ("game", "responses", "ending"),
    [
        (LAKE, ["[right]", "[down]", "[right]", "[down]"], "won"),
        (LAKE, ["[up]", "[right]", "[down]", "[right]", "[down]"], "won"),  # on the last turn, after an invalid move
        (ROOM, ["[right]", "[right]"], "won"),
        (LAKE, ["[right]", "[right]"], "lost"),
        (LAKE, ["[up]", "[down]", "[up]", "[right]", "[right]"], "lost"),  # on the last turn
        (LAKE, ["[up]", "[left]"], "invalid"),
        (LAKE, ["nothing", "[left]"], "invalid"),
        (LAKE, ["[right]", "", "<think>[down]"], "invalid"),
        (ROOM, ["[up]", "[right]", "[up]", "[left]", "[left]"], "turns"),
        (LAKE, ["[right]", "[left]", "[right]", "[left]", "[right]"], "turns"),
        (LAKE, ["[right]", "[left]", "[right]", "[up]", "[up]"], "invalid"),
        (ROOM, ["[up]", "[down]", "", "[up]"], ""),
    ],
)
def test_endings(game, responses, ending):
    episode = played(game, *responses)
    assert (episode.ending, episode.over, episode.won) == (ending, ending != "", ending == "won")
    assert [turn.number for turn in episode.turns] == list(range(1, len(responses) + 1))
    if episode.over:
        with pytest.raises(ValueError, match="the episode is over"):
            episode.act("[up]")


def test_the_turn_limit_is_the_one_given():
    assert played(LAKE, "[right]", max_turns=1).ending == "turns"
    assert not played(LAKE, *["[right]", "[left]"] * 4, max_turns=9).over


def test_an_episode_needs_something_to_play():
    for game, turns in ((LAKE, 0), (Sokoban.from_rows(("####", "#@*#", "####")), 5)):
        with pytest.raises(ValueError, match="an episode needs"):
            Episode(game, turns, "Play.")


def test_a_finished_episode_is_never_asked_again():
    # Each plays its own script to its end: won in 4, lost in 2, invalid in 2, turns used up in 5.
    scripts = (
        ["[down]", "[right]", "[right]", "[down]"],
        ["[right]", "[right]"],
        ["?", "?"],
        ["[right]", "[left]", "[up]", "[right]", "[left]"],
    )
    episodes = [Episode(LAKE, 5, "Play.") for _ in scripts]
    asked = []

    def respond(number, indices):
        asked.append((number, list(indices)))
        assert all(episodes[index].observation().count("\n\n") == 2 * number - 1 for index in indices)
        return [scripts[index][number - 1] for index in indices]

    play(episodes, respond)
    assert asked == [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [0, 3]), (4, [0, 3]), (5, [3])]
    assert [episode.ending for episode in episodes] == ["won", "lost", "invalid", "turns"]
    for episode, script in zip(episodes, scripts, strict=True):
        assert [turn.response for turn in episode.turns] == script


def test_side_by_side_is_as_alone():
    def respond(_, indices):
        return [moves[index].pop(0) for index in indices]

    scripts = [["[d]", "[s]", "oh", "[d]", "[s]"], ["[s]", "[d]", "[d]", "[w]", "[a]"]]
    games = (LAKE, ROOM)
    moves = [list(script) for script in scripts]
    together = [Episode(game, 5, "Play.") for game in games]
    play(together, respond)
    for index, game in enumerate(games):
        assert together[index].turns == played(game, *scripts[index][: len(together[index].turns)]).turns
    assert [episode.ending for episode in together] == ["won", "turns"]


def test_a_response_for_each_is_needed():
    with pytest.raises(ValueError, match="shorter"):
        play([Episode(LAKE, 5, "Play."), Episode(ROOM, 5, "Play.")], lambda number, indices: ["[down]"])


def test_nobody_to_play():
    play([], lambda number, indices: pytest.fail("nobody is there to be asked"))

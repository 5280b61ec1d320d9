"""The two games as domains: boards, splits, prompts, experience."""

import logging

import pytest
from conftest import SHARED

from nca_jax.domains import make_domain
from nca_jax.domains.base import find_context
from nca_jax.domains.games import experience_context, turn_messages
from nca_jax.errors import UserError

SMALL = {"train_boards": 12, "validation_boards": 6, "test_boards": 6}
KINDS = {
    "frozenlake": {"size": 4, "holes": 3, "max_turns": 8},
    "sokoban": {"max_turns": 5},
}
LEVELS = SHARED / "data/sokoban/boxoban_unfiltered_test_000_first100.txt"


@pytest.mark.parametrize("name", KINDS)
def test_no_board_is_in_two_splits_and_all_can_be_won_in_time(name):
    domain = make_domain(name, **KINDS[name], **SMALL)
    boards = {split: {e.prompt for e in domain.examples(split)} for split in ("train", "validation", "test")}
    assert {split: len(found) for split, found in boards.items()} == {"train": 12, "validation": 6, "test": 6}
    assert len(set.union(*boards.values())) == 24
    for example in domain.examples("train"):
        assert domain._games[example.prompt].shortest_win(domain.max_turns) is not None
    assert len({e.id for split in boards for e in domain.examples(split)}) == 24
    again = make_domain(name, **KINDS[name], **SMALL)
    assert again.examples("test") == domain.examples("test")
    other = make_domain(name, **KINDS[name], **SMALL, board_seed=1)
    assert other.examples("test") != domain.examples("test")


def test_the_reference_boards_are_nineteen_and_held_out_games_repeat_theirs(caplog):
    with caplog.at_level(logging.WARNING):
        domain = make_domain("frozenlake", max_turns=5)
    assert "only 19 boards" in caplog.text
    boards = {split: [e.prompt for e in domain.examples(split)] for split in ("train", "validation", "test")}
    assert sum(len(set(found)) for found in boards.values()) == 19
    assert len(boards["train"]) == len(set(boards["train"]))
    assert len(boards["validation"]) == len(boards["test"]) == 128
    assert len({e.id for e in domain.examples("validation")}) == 128


def test_the_first_prompt_is_a_user_message_with_the_board_and_no_rule():
    domain = make_domain("frozenlake", **KINDS["frozenlake"], **SMALL)
    example = domain.examples("train")[0]
    (message,) = domain.messages(example)
    assert message["role"] == "user"
    assert message["content"].endswith(example.prompt)
    assert "hole" not in message["content"].lower() and "H" not in message["content"].removesuffix(example.prompt)


@pytest.mark.parametrize("name", KINDS)
def test_a_last_prompt_holds_nearly_all_turns(name):
    domain = make_domain(name, **KINDS[name], **SMALL)
    for example in domain.examples("train"):
        (message,) = domain.last_messages(example)
        first = domain.messages(example)[0]["content"]
        boards = (len(message["content"]) - len(first)) / len(example.prompt)
        assert message["content"].startswith(first)
        assert domain.max_turns - 1 <= boards + 0.01 < domain.max_turns + 2


def test_a_score_is_that_of_a_game_of_one_answer():
    domain = make_domain("sokoban", **KINDS["sokoban"], **SMALL)
    example = domain.examples("train")[0]
    assert domain.score(example, "I go [nowhere]") == (False, None)
    assert domain.score(example, "[UP]").answer == "up"


def test_experience_is_one_system_message():
    (message,) = experience_context(["one", "two"]).messages
    assert message["role"] == "system"
    assert message["content"].split("\n")[1:] == ["- EXPERIENCE ITEM: one", "- EXPERIENCE ITEM: two"]
    for name in KINDS:
        domain = make_domain(name, **KINDS[name], **SMALL)
        assert domain.context.messages[0]["content"].count("- EXPERIENCE ITEM: ") == 4
        assert find_context(domain, "brief") != domain.context


def test_an_episode_goes_on_with_what_was_seen():
    domain = make_domain("frozenlake", **KINDS["frozenlake"], **SMALL)
    example = domain.examples("train")[0]
    episode = domain.episode(example)
    assert turn_messages(episode) == domain.messages(example)
    episode.act("no idea")
    (message,) = turn_messages(episode)
    assert message["content"].startswith(domain.messages(example)[0]["content"])
    assert domain.episode(example).observation() == domain.messages(example)[0]["content"]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("frozenlake", {}, "max_turns"),
        ("frozenlake", {"max_turns": 3}, "in 3 moves"),
        ("frozenlake", {"max_turns": 5, "holes": 9}, "holes"),
        ("frozenlake", {"max_turns": 5, "board_seed": -1}, "settings"),
        ("sokoban", {"max_turns": 5, "size": 3}, "size"),
        ("sokoban", {"max_turns": 5, "train_boards": 0}, "boards"),
        ("sokoban", {"max_turns": 5, "levels": "absent.txt"}, "absent.txt"),
    ],
)
def test_settings_that_cannot_work_are_refused(name, settings, reason):
    with pytest.raises(UserError, match=reason):
        make_domain(name, **settings)


@pytest.mark.skipif(not LEVELS.exists(), reason="the sample levels are not here")
def test_boards_of_a_level_file(caplog):
    with caplog.at_level(logging.WARNING):
        sizes = {"train_boards": 50, "validation_boards": 20, "test_boards": 20}
        domain = make_domain("sokoban", levels=str(LEVELS), max_turns=40, **sizes)
    left_out = [r for r in caplog.records if "is left out" in r.message]
    used = {e.prompt for split in ("train", "validation", "test") for e in domain.examples(split)}
    assert left_out and len(left_out) + len(used) == 100
    with pytest.raises(UserError, match="no level of"):
        make_domain("sokoban", levels=str(LEVELS), max_turns=3, **sizes)

"""Games in every view: the same keys, divergence over all turns of a game, and contexts that do not play."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import take_devices

from nca_jax.data.chat import Context
from nca_jax.domains.base import Example, Probe, Score
from nca_jax.evaluate import main
from nca_jax.game_evaluator import GameEvaluator
from nca_jax.items import GameResult
from nca_jax.multi_turn import TurnTokens
from nca_jax.rollout import example_keys
from nca_jax.view_divergence import ViewDivergence

R = 3
EXAMPLES = [Example(f"game {i}", f"board {i}", "won") for i in range(3)]


def turn_tokens(game: int, number: int, tokens: int) -> TurnTokens:
    messages = [{"role": "user", "content": f"{game}.{number}"}]
    return TurnTokens(game, number, messages, np.full(R, 10 * game + number), np.arange(R) < tokens, tokens == R)


class FakePlayer:
    """Game i lasts i + 1 turns, of 1, 2, … tokens; with the context it is won."""

    def __init__(self, prefix: int, wins: bool):
        self.prefix, self.length_multiple, self.wins, self.keys = (prefix,), 4, wins, []

    def play(self, params, examples, keys):
        self.keys.append(np.asarray(jax.random.key_data(keys)))
        games = [int(example.id.split()[1]) for example in examples]
        turns = [turn_tokens(i, n + 1, n + 1) for i, game in enumerate(games) for n in range(game + 1)]
        made = [SimpleNamespace(number=1, response="[up]", action="up", valid=True, board_after="b")]
        return [SimpleNamespace(turns=made, won=self.wins, ending="turns") for _ in examples], turns

    def prompt_tokens(self, messages, example):
        return tuple(map(int, messages[0]["content"].split(".")))

    def encoded(self, params):
        return list(self.prefix)

    def batches(self, count):
        for start in range(0, count, 2):
            row = np.arange(start, start + 2)
            yield np.minimum(row, count - 1), row < count

    def decode(self, ids):
        return "".join(map(str, ids))

    def sample_rows(self, params, prefix, prompts, key_N):
        self.asked = (prefix, prompts, np.asarray(jax.random.key_data(key_N)))
        return [(np.array([7, 8, 9]), np.array([True, True, False]), False) for _ in prompts]


def hidden(params, view, prefix, response_BxR):
    """(prefix, game and turn as the prompt says)."""
    turn_B = 10 * view.prompt_BxP[:, 0] + view.prompt_BxP[:, 1]
    np.testing.assert_array_equal(response_BxR[:, 0], turn_B)
    assert view.prefix_C.tolist() == prefix
    return prefix[0], turn_B


def compare(params, x, c, mask_BxR):
    """Digits that say what was compared: the context's prefix, game, turn, and position in the response."""
    np.testing.assert_array_equal(x[1], c[1])
    assert x[0] == 1
    return np.where(mask_BxR, 100 * c[0] + c[1][:, None] + np.arange(R) / 10, np.nan)


def evaluator(batch_size: int):
    domain = SimpleNamespace(messages=lambda example: [{"role": "user", "content": f"{example.id.split()[1]}.1"}])
    asked = Probe("other_task", Context(), lambda e, text: Score(text == "78", text), lambda e: "78", plays=False)
    probes = {"no_context": None, "with_context": Probe("with_context", Context(), None), "other_task": asked}
    players = {name: FakePlayer(i + 1, i == 1) for i, name in enumerate(probes)}
    built = GameEvaluator(
        players=players,
        divergence=ViewDivergence(hidden, compare),
        compared=["with_context"],
        domain=domain,
        examples=EXAMPLES,
        probes=probes,
        batch_size=batch_size,
        samples=2,
        seed=5,
    )
    return built, players


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_results_do_not_depend_on_the_batches(batch_size):
    built, players = evaluator(batch_size)
    results = built({})
    assert [(r.id, r.sample) for r in results["with_context"]] == [(f"game {i}", s) for s in (0, 1) for i in range(3)]
    keys = np.concatenate(players["with_context"].keys)
    expected = [jax.random.key_data(example_keys(5, sample, np.arange(3))) for sample in (0, 1)]
    np.testing.assert_array_equal(keys, np.concatenate(expected))
    np.testing.assert_array_equal(keys, np.concatenate(players["no_context"].keys))
    assert [r.correct for r in results["no_context"] + results["with_context"]] == [False] * 6 + [True] * 6
    assert [r.length for r in results["no_context"]][:3] == [1, 1 + 2, 1 + 2 + 3]
    assert [r.truncated for r in results["no_context"]][:3] == [False, False, True]


def test_divergence_is_the_mean_over_the_tokens_of_all_turns():
    results = evaluator(3)[0]({})
    assert {r.divergence for r in results["no_context"]} == {None}
    expected = [
        201.0,  # turn 1 of game 0: one token
        (211.0 + 212.0 + 212.1) / 3,
        (221.0 + 222.0 + 222.1 + 223.0 + 223.1 + 223.2) / 6,
    ]
    np.testing.assert_allclose([r.divergence for r in results["with_context"]], expected * 2)


def test_a_context_that_does_not_play_is_asked_once_and_scores_by_itself():
    built, players = evaluator(3)
    results = built({}, ["other_task"])["other_task"]
    assert results[1] == GameResult(
        "game 1", "other_task", "board 1", "78", "78", True, 2, False, sample=0, expected="78", turns=[]
    )
    prefix, prompts, keys = players["other_task"].asked
    assert (prefix, prompts) == ([3], [(0, 1), (1, 1), (2, 1)])
    # The keys of the games' first turns.
    first = jax.vmap(jax.random.fold_in, (0, None))(example_keys(5, 1, np.arange(3)), 1)
    np.testing.assert_array_equal(keys, jax.random.key_data(first))


def test_the_command_plays_games_in_all_views(tmp_path, monkeypatch):
    take_devices(monkeypatch, 1)
    flags = {
        "data.length_multiple": 512,
        "domain.settings.max_turns": 2,
        "accumulation": 1,
        "domain.settings.train_boards": 4,
        "domain.settings.validation_boards": 3,
        "domain.settings.test_boards": 3,
        "rollout.max_new_tokens": 3,
        "evaluation.max_items": 3,
        "evaluation.divergence": "all",
    }
    arguments = ["--checkpoint=tiny_llama3", "--config=configs/sokoban.py:tiny", f"--output={tmp_path}"]
    arguments += ["--contexts=paraphrased,other_task", *[f"--config.{k}={v}" for k, v in flags.items()]]
    assert main(arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().split("\n") if line]
    assert len(lines) == 4 * 3
    for line in lines:
        assert bool(line["turns"]) == (line["view"] != "other_task")
        assert line["expected"] == ("watch" if line["view"] == "other_task" else "won")
        assert (line["divergence"] is not None) == (line["view"] in ("with_context", "paraphrased"))
        assert line["divergence"] is None or line["divergence"] > 0

"""Training on games: the whole job on a tiny model whose answers are read as moves."""

import json

import jax
import numpy as np
import pytest
from conftest import records, take_devices

from configs import sokoban
from nca_jax import settings
from nca_jax import train as train_module
from nca_jax.domains import games
from nca_jax.errors import UserError
from nca_jax.game_batches import GameBatches
from nca_jax.games import show
from nca_jax.train import train

OVERRIDES = {
    "steps": 4,
    "batch_size": 4,
    "data.max_prompt_tokens": 700,
    "data.length_multiple": 256,
    "domain.settings.max_turns": 3,
    "domain.settings.train_boards": 16,
    "domain.settings.validation_boards": 6,
    "domain.settings.test_boards": 4,
    "accumulation": 3,
    "rollout.max_new_tokens": 3,
    "optimizer.learning_rate": 3e-3,
    "optimizer.schedule": "constant",
    "evaluation.every": 2,
    "evaluation.max_items": 6,
    "evaluation.batch_size": 4,
    "checkpoint.every": 2,
    "log.samples_every": 2,
    "log.samples": 2,
    "log.figures": False,
    "mesh.data": 1,
    "mesh.fsdp": 1,
}
# A token is a byte, so what a game says is kept short.
SHORT = {"sokoban": "Move P: [up], [down], [left] or [right]."}


def game_config(**overrides):
    config = sokoban.get_config("tiny")
    config.model.preset = None
    config.update_from_flattened_dict(OVERRIDES | overrides)
    return config


def moves(model, chat, ids) -> str:
    """By the response's first token a direction, and now and then none."""
    return ["[right]", "[down]", "[left]", "[up]", "hm"][int(ids[0]) % 5]


@pytest.fixture(scope="module", autouse=True)
def model(tiny_model):
    OVERRIDES["model.source"] = str(tiny_model)


@pytest.fixture(autouse=True)
def one_device_and_readable_moves(monkeypatch):
    take_devices(monkeypatch, 1)
    monkeypatch.setattr(train_module, "judged_text", moves)
    monkeypatch.setattr(games, "INSTRUCTIONS", SHORT)
    monkeypatch.setattr(games, "_EXAMPLE_ITEMS", {"sokoban": ("Push X onto O.", "# is a wall.")})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nobody interrupted, and the batches it was fed."""
    workdir, fed = tmp_path_factory.mktemp("finished"), []
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        patch.setattr(train_module, "judged_text", moves)
        patch.setattr(games, "INSTRUCTIONS", SHORT)
        patch.setattr(games, "_EXAMPLE_ITEMS", {"sokoban": ("Push X onto O.", "# is a wall.")})
        real = GameBatches.batch

        def watched(self, state, index_B, step):
            drawn = real(self, state, index_B, step)
            fed.append((step, jax.device_get(drawn.batch), drawn.detail))
            return drawn

        patch.setattr(GameBatches, "batch", watched)
        summary = train(game_config(), str(workdir))
    return workdir, summary, fed


def test_a_run_plays_trains_and_evaluates_both_views(finished):
    workdir, summary, _ = finished
    assert summary.startswith("summary method=nca_constant no_context=")
    steps = [r for r in records(workdir) if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    np.testing.assert_allclose(steps[0]["nca"], steps[0]["opd"], rtol=1e-6)
    assert all(r["opd"] > 0 and r["grad_norm"] > 0 for r in steps)
    assert all(1 < r["rollout/turns"] <= 3 and 0 <= r["rollout/won"] <= 1 for r in steps)
    results = [json.loads(line) for line in (workdir / "evaluations/step_00000004.jsonl").read_text().splitlines()]
    assert [r["view"] for r in results] == ["no_context"] * 6 + ["with_context"] * 6
    assert [r["id"] for r in results[:6]] == [r["id"] for r in results[6:]]
    for result in results:
        assert result["correct"] == (result["answer"] == "won")
        assert result["answer"] in ("won", "lost", "invalid", "turns")
        assert 1 <= len(result["turns"]) <= 3 and result["length"] >= len(result["turns"])
    assert any(len(result["turns"]) > 2 for result in results)
    samples = records(workdir, "samples")
    assert [s["step"] for s in samples] == [2, 2, 4, 4]
    assert samples[0]["no_context"].startswith("[turn 1] ")


def test_every_turn_is_a_row_and_the_others_have_no_token(finished):
    _, _, fed = finished
    for step, batch, episodes in fed:
        turns = sum(len(e.turns) for e in episodes)
        rows = batch.response_mask_BxR.any(axis=1)
        assert rows.shape == (12,) and rows.sum() == turns
        assert rows[:turns].all(), "rows without a token come last"
        logged = next(r for r in records(finished[0]) if r["step"] == step and "loss" in r)
        assert logged["tokens"] == batch.response_mask_BxR.sum()
        assert logged["rollout/turns"] == turns / 4
    shapes = {tuple(map(np.shape, jax.tree.leaves(batch))) for _, batch, _ in fed}
    assert len(shapes) == 1, "whatever the games were"
    assert any(len(e.turns) < 3 for _, _, episodes in fed for e in episodes)
    # Both views of a row are the same prompt: what follows the context is equal, token by token.
    _, batch, _ = fed[0]
    for row in range(12):
        x, c = (view.prompt_BxP[row, : view.prompt_length_B[row]] for view in (batch.no_context, batch.with_context))
        shared = min(len(x), len(c))
        assert shared > 60
        np.testing.assert_array_equal(x[-shared:], c[-shared:])


@pytest.mark.slow
def test_a_run_in_two_parts_equals_the_straight_run_bitwise(finished, tmp_path):
    straight, _, _ = finished
    train(game_config(steps=2), str(tmp_path))
    train(game_config(), str(tmp_path))
    assert records(tmp_path) == records(straight)
    assert records(tmp_path, "samples") == records(straight, "samples")


@pytest.mark.slow
def test_eight_devices_play_and_train_as_one(tmp_path, monkeypatch):
    overrides = {"steps": 2, "batch_size": 8, "accumulation": 3, "evaluation.batch_size": 8}
    train(game_config(**overrides), str(tmp_path / "one"))
    take_devices(monkeypatch, 8)
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    train(game_config(**overrides, **mesh), str(tmp_path / "eight"))
    for one, eight in zip(records(tmp_path / "one"), records(tmp_path / "eight"), strict=True):
        for name, value in one.items():
            np.testing.assert_allclose(eight[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        pytest.param(
            "off_policy",
            {"rollout.policy": "teacher", "loss.divergence": "forward_kl", "anchor.beta": 0.0},
            marks=pytest.mark.slow,
        ),
        ("nca_constant_retention", {"retention.gamma": 0.5, "retention.contexts": ("brief",), "teacher.kind": "ema"}),
        pytest.param("nca_constant", {"anchor.every": 2, "teacher.kind": "live"}, marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_variants(method, overrides, tmp_path):
    short = {"steps": 2, "evaluation.max_items": 1, "evaluation.every": 9, "log.samples_every": 9}
    assert train(game_config(**short | overrides), str(tmp_path)).startswith(f"summary method={method} ")
    steps = [r for r in records(tmp_path) if "loss" in r]
    assert len(steps) == 2 and all(np.isfinite(r["loss"]) for r in steps)
    if "retention" in method:
        assert abs(steps[0]["retention"]) < 1e-6 < steps[1]["retention"]


def test_the_workdir_keeps_the_context_and_refuses_another(finished, tmp_path):
    workdir, summary, _ = finished
    (message,) = json.loads((workdir / "context.json").read_text())
    assert message["content"].count("EXPERIENCE ITEM") == 2
    assert train(game_config(), str(workdir)) == summary
    kept = (workdir / "context.json").read_text()
    (workdir / "context.json").write_text(kept.replace("wall", "door"))
    with pytest.raises(UserError, match="another context"):
        train(game_config(), str(workdir))
    (workdir / "context.json").write_text(kept)


def test_a_game_is_printed(finished, capsys):
    workdir, _, _ = finished
    results = [json.loads(line) for line in (workdir / "evaluations/step_00000004.jsonl").read_text().splitlines()]
    assert show.main([str(workdir), "--game=1"]) == 0
    printed = capsys.readouterr().out
    for result in (results[1], results[7]):
        assert f"game {result['id']}, {result['view']}: {result['answer']}, {len(result['turns'])} turns" in printed
        assert all(turn["board"] in printed for turn in result["turns"])
    assert show.main([str(workdir), f"--game={results[2]['id']}", "--view=with_context", "--step=2"]) == 0
    assert capsys.readouterr().out.count(f"game {results[2]['id']}") == 1
    assert show.main([str(workdir), "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
    for wrong, reason in {
        "--game=99": "no game '99'",
        "--view=other": "no view 'other'",
        "--step=3": "of step 3",
    }.items():
        assert show.main([str(workdir), wrong]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"accumulation": 7}, "batch_size 4 x 3 turns does not divide into 7"),
        ({"data.max_prompt_tokens": 300}, "max_prompt_tokens"),
        ({"data.too_long": "skip"}, "too_long=error"),
        ({"retention.gamma": 0.5, "retention.contexts": ("brief",), "retention.samples": "cached"}, "samples=step"),
    ],
)
def test_what_cannot_work_with_games_is_refused_before_anything_is_written(overrides, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(game_config(**overrides), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_rows_are_turns_of_games():
    assert settings.rows(game_config()) == 12

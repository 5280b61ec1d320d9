"""Gathering experience and comparing contexts, with a model that answers by fixed rules."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import byte_tokenizer, take_devices

from configs import frozenlake, medmcqa
from nca_jax.data.chat import ChatFormat
from nca_jax.domains import experience, make_domain, select_context
from nca_jax.domains.base import find_context
from nca_jax.domains.experience import newest_within, read_items
from nca_jax.rollout import Rollout
from nca_jax.sharding import make_mesh

CHAT = ChatFormat(byte_tokenizer())
GOOD = "Go right or down, never into H."
ANSWER_A, ANSWER_B, REFLECT, WALL, WAY = 10, 11, 12, 13, 100


class RuleModel:
    """Wins FrozenLake if it has seen GOOD, else walks into the wall; writes GOOD into its fourth reflection.

    On questions it answers B where the context says so, else A. A response is one token, which `decode` spells out.
    """

    def __init__(self):
        self.prompts, self.reflections, self.opened = [], 0, 0

    def __call__(self, params, prefix, prompt_BxP, prompt_length_B, active_B, key_B, sampling):
        token_B = []
        for row, length, active in zip(prompt_BxP, prompt_length_B, active_B, strict=True):
            text = CHAT.decode([*prefix, *row[:length].tolist()])
            if active:
                self.prompts.append(text)
            token_B.append(self.answer(text) if active else 0)
        response_BxR = np.array(token_B)[:, None]
        mask_BxR = np.asarray(active_B)[:, None]
        return Rollout(response_BxR, mask_BxR, np.zeros(mask_BxR.shape), np.zeros(len(token_B), bool))

    def answer(self, text: str) -> int:
        if "The game is over" in text:
            self.reflections += 1
            return REFLECT + 1000 * self.reflections
        if "<answer>" in text:
            return ANSWER_B if "say B" in text else ANSWER_A
        if GOOD not in text:
            return WALL
        return WAY + self.way(text)

    def way(self, text: str) -> int:
        """Right if the cell there is free, or down."""
        rows = [line.split("|")[1:-1] for line in text.split("<|im_start|>user")[1].split("\n") if line.startswith("|")]
        size = len(rows[0])
        board = [[cell.strip() for cell in row] for row in rows[-size:]]
        ((r, c),) = [(i, j) for i, row in enumerate(board) for j, cell in enumerate(row) if cell == "P"]

        # A depth-first search over right and down.
        def leads(i, j):
            if i >= size or j >= size or board[i][j] == "H":
                return False
            return (i, j) == (size - 1, size - 1) or leads(i, j + 1) or leads(i + 1, j)

        return 0 if leads(r, c + 1) else 1

    def decode(self, ids) -> str:
        token = int(ids[0])
        if token % 1000 == REFLECT:
            number = token // 1000
            item = GOOD if number == 4 else f"lesson {number}"
            return (
                f"<think>- EXPERIENCE ITEM: no</think>\n- EXPERIENCE ITEM: {item}\n- EXPERIENCE ITEM: same\nand so on"
            )
        texts = {
            ANSWER_A: "<answer>A</answer>",
            ANSWER_B: "<answer>B</answer>",
            WALL: "[up]",
            WAY: "[right]",
            WAY + 1: "[down]",
        }
        return texts[token]

    def session(self, config):
        self.opened += 1
        answering = SimpleNamespace(
            divergence=None,  # never asked for
            mesh=make_mesh({"data": 1, "fsdp": 1, "tensor": 1}),
            sampler=lambda top_k: self,
            encode=lambda params, prefix_C: [int(token) for token in prefix_C],
        )
        model = SimpleNamespace(tokenizer=byte_tokenizer())
        return SimpleNamespace(model=model, chat=CHAT, answering=answering, decode=self.decode, params=None)


@pytest.fixture
def model(monkeypatch):
    rules = RuleModel()
    take_devices(monkeypatch, 1)
    monkeypatch.setattr(experience, "open_session", rules.session)
    monkeypatch.setattr(select_context, "open_session", rules.session)
    return rules


def gather(output, *more: str) -> int:
    config = ["--config=configs/frozenlake.py:tiny", "--config.evaluation.max_items=8"]
    arguments = [*config, f"--output={output}", "--games=6", "--every=2", *more]
    return experience.main(arguments)


def rounds(output) -> list[dict]:
    return [json.loads(line) for line in (output / "rounds.jsonl").read_text().splitlines()]


def test_the_list_that_wins_on_validation_is_kept(model, tmp_path, capsys):
    assert gather(tmp_path) == 0
    found = rounds(tmp_path)
    played = [r for r in found if "round" in r]
    assert [r["new"] for r in played] == [
        ["lesson 1", "same"], ["lesson 2"], ["lesson 3"], [GOOD], ["lesson 5"], ["lesson 6"]
    ]  # fmt: skip
    assert played[-1]["items"] == ["lesson 1", "same", "lesson 2", "lesson 3", GOOD, "lesson 5", "lesson 6"]
    assert [g["ending"] for r in played for g in r["games"]] == ["invalid"] * 4 + ["won"] * 2
    trials = {r["trial"]: r["won"] for r in found if "trial" in r}
    assert trials == {0: 0.0, 2: 0.0, 4: 1.0, 6: 1.0}
    context = find_context(make_domain("frozenlake", max_turns=5), str(tmp_path / "context.json"))
    lines = context.messages[0]["content"].split("\n")[1:]
    assert lines == [f"- EXPERIENCE ITEM: {i}" for i in played[3]["items"]]  # the first of two equal lists
    assert "1.000 of 8 validation games (0.000 without experience)" in capsys.readouterr().out


def test_games_are_played_on_training_boards_and_tried_on_validation_boards_only(model, tmp_path):
    gather(tmp_path)
    config = frozenlake.get_config("tiny")
    domain = make_domain("frozenlake", **config.domain.settings)
    boards = {split: {e.prompt for e in domain.examples(split)} for split in ("train", "validation", "test")}
    trained = {e.id for e in domain.examples("train")}
    assert {g["id"] for r in rounds(tmp_path) if "round" in r for g in r["games"]} <= trained
    seen = [prompt for prompt in model.prompts]
    assert any(any(b in p for b in boards["validation"]) for p in seen)
    assert not any(f"\n\n{b}" in p.split("example [up].")[1][: len(b) + 2] for p in seen for b in boards["test"])
    reflections = [p for p in seen if "The game is over" in p]
    assert len(reflections) == 6
    assert not any(b in p for p in reflections for b in boards["validation"] | boards["test"])


def test_a_stopped_command_continues_and_ends_the_same(model, tmp_path, monkeypatch):
    assert gather(tmp_path / "straight") == 0
    model.reflections = 0
    real, calls = experience.Experience._record, []

    def stops(self, record):
        real(self, record)
        calls.append(record)
        if len(calls) in (3, 6):
            raise KeyboardInterrupt

    monkeypatch.setattr(experience.Experience, "_record", stops)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            gather(tmp_path / "parts")
    with (tmp_path / "parts" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 9, "items": [')  # killed while it wrote
    assert gather(tmp_path / "parts") == 0
    assert rounds(tmp_path / "parts") == rounds(tmp_path / "straight")
    opened = model.opened
    assert gather(tmp_path / "parts") == 0
    assert model.opened == opened, "nothing is left to play, so no model is loaded"


def test_another_command_does_not_continue_it(model, tmp_path, capsys):
    assert gather(tmp_path) == 0
    before = (tmp_path / "rounds.jsonl").read_bytes()
    for other in ("--config.seed=1", "--every=3", "--config.domain.settings.holes=1"):
        assert gather(tmp_path, other) == 2
        assert "is of another model, game or command" in capsys.readouterr().err
    assert (tmp_path / "rounds.jsonl").read_bytes() == before
    assert gather(tmp_path, "--games=7") == 0
    assert rounds(tmp_path)[-2]["round"] == 7


def test_the_directory_has_a_name_of_the_config(model, tmp_path, monkeypatch):
    config = Path(frozenlake.__file__).resolve()
    monkeypatch.chdir(tmp_path)
    assert experience.main([f"--config={config}:tiny", "--games=4", "--every=4"]) == 0
    assert (tmp_path / "experience/frozenlake_tiny/context.json").exists()


def test_parallel_games_share_a_list(model, tmp_path):
    assert gather(tmp_path, "--parallel=3") == 0
    played = [r for r in rounds(tmp_path) if "round" in r]
    assert [len(r["games"]) for r in played] == [3, 3]
    assert played[0]["items"] == ["lesson 1", "same", "lesson 2", "lesson 3"]


def test_the_oldest_items_go_first():
    session = SimpleNamespace(model=SimpleNamespace(tokenizer=byte_tokenizer()))
    line = len("- EXPERIENCE ITEM: abc\n")
    items = ["aaa", "bbb", "ccc"]
    assert newest_within(items, 3 * line, session) == items
    assert newest_within(items, 3 * line - 1, session) == ["bbb", "ccc"]
    assert newest_within(items, line - 1, session) == []


@pytest.mark.parametrize(
    ("response", "items"),
    [
        ("- EXPERIENCE ITEM: one\n- EXPERIENCE ITEM:  two \n- EXPERIENCE ITEM: three", ["one", "two"]),
        ("  -  EXPERIENCE ITEM: a - b", ["a - b"]),
        ("EXPERIENCE ITEM: no dash\n- EXPERIENCE ITEM:\n- Experience item: case", []),
        ("<think>- EXPERIENCE ITEM: thought</think>\n- EXPERIENCE ITEM: said", ["said"]),
        ("<think>- EXPERIENCE ITEM: cut", []),
        ("", []),
    ],
)
def test_items_of_a_reflection(response, items):
    assert read_items(response, 2) == items


def test_a_model_that_writes_nothing_is_said(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(experience, "read_items", lambda response, at_most: [])
    assert gather(tmp_path) == 2
    assert "has written no line that begins with" in capsys.readouterr().err
    assert not (tmp_path / "context.json").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--config=configs/medmcqa.py:tiny"], "is no game"),
        (["--config=configs/sokoban.py:tiny", "--games=0"], "at least 1"),
        (["--config=configs/sokoban.py:tiny", "--config.typo=1"], "no key --config.typo"),
        ([], "--config is missing"),
    ],
)
def test_mistakes_are_one_line(arguments, reason, tmp_path, capsys):
    assert experience.main([f"--output={tmp_path}/o", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and reason in error and error.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_the_best_of_several_contexts_is_written(model, tmp_path, capsys):
    (tmp_path / "b.txt").write_text("Always say B.\n")
    (tmp_path / "a.json").write_text(json.dumps([{"role": "system", "content": "Be kind."}]))
    candidates = [str(tmp_path / "a.json"), "own", str(tmp_path / "b.txt")]
    command = ["--config=configs/medmcqa.py:tiny", "--config.evaluation.max_items=24", f"--output={tmp_path}/best.json"]
    domain = make_domain("medmcqa", data_dir="tiny")
    share = {x: sum(e.answer == x for e in domain.examples("validation")) / 24 for x in "AB"}
    contexts = {c: domain.context if c == "own" else find_context(domain, c) for c in candidates}
    config = medmcqa.get_config("tiny")
    config.evaluation.max_items = 24
    results = select_context.compare(config, domain, contexts)
    assert {name: found["accuracy"] for name, found in results.items()} == {
        "no_context": share["A"], candidates[0]: share["A"], "own": share["A"], candidates[2]: share["B"]
    }  # fmt: skip
    assert select_context.main([*command, "--candidates", *candidates]) == 0
    # The tiny set has as many of each letter: the first of equals is kept.
    assert json.loads((tmp_path / "best.json").read_text())[0]["content"] == "Be kind."
    printed = capsys.readouterr().out
    assert printed.count("0.250") == 4 and f"the context of {candidates[0]}" in printed


def test_contexts_of_a_game_are_compared_by_games_won(model, tmp_path):
    (tmp_path / "good.txt").write_text(GOOD)
    command = ["--config=configs/frozenlake.py:tiny", f"--output={tmp_path}/best.json"]
    assert select_context.main([*command, "--candidates", "own", str(tmp_path / "good.txt")]) == 0
    assert json.loads((tmp_path / "best.json").read_text())[0]["content"] == GOOD


def test_select_context_refuses_what_is_no_context_or_output(model, tmp_path, capsys):
    command = ["--config=configs/medmcqa.py:tiny", f"--output={tmp_path}/best.json"]
    assert select_context.main([*command, "--candidates", "nobody"]) == 2
    assert "'nobody'" in capsys.readouterr().err
    assert select_context.main([*command[:1], f"--output={tmp_path}/best.txt", "--candidates", "own"]) == 2
    assert "must end in .json" in capsys.readouterr().err
    assert not model.opened and not list(tmp_path.iterdir())


def test_sokoban_gathers_too(model, tmp_path, monkeypatch):
    monkeypatch.setattr(RuleModel, "way", lambda self, text: 1)
    assert experience.main(["--config=configs/sokoban.py:tiny", f"--output={tmp_path}", "--games=2"]) == 0

"""Workdirs made by hand for the tests of the report: what they say can be counted here.

24 questions of two subjects with the answers A to D in turn. Without the context both runs end with the first 20 right.
With it OPD is wrong on the first 8 and right on the next 12 (8 of 20 harmed, none of 4 helped); NCA is wrong on the
first alone and right on questions 21 to 23 (1 of 20 harmed, 3 of 4 helped).
"""

import dataclasses
import json
from pathlib import Path

from configs import conventions
from nca_jax.items import GameResult, ItemResult

ITEMS = 24
EVIL = "</script><img src=x onerror=alert(1)>"
STEPS = (0, 2, 4)
# View -> which questions are right, from the first; before training, half-way and at the end.
OPD = {
    "no_context": ("0" * 24, "1" * 10 + "0" * 14, "1" * 20 + "0" * 4),
    "with_context": ("1" * 18 + "0" * 6, "1" * 16 + "0" * 8, "0" * 8 + "1" * 12 + "0" * 4),
    "paraphrased": ("1" * 18 + "0" * 6, "1" * 16 + "0" * 8, "0" * 6 + "1" * 14 + "0" * 4),
    "other_task": ("1" * 24, "1" * 20 + "0" * 4, "1" * 12 + "0" * 12),
}
NCA = OPD | {"with_context": ("1" * 18 + "0" * 6, "1" * 4 + "0" * 20, "0" + "1" * 22 + "0")}


def write_run(path: Path, right: dict[str, tuple[str, ...]], beta: float, seed: int = 0, **overrides) -> Path:
    """A finished training run."""
    config = conventions.get_config()
    config.update_from_flattened_dict({"anchor.beta": beta, "seed": seed, "steps": STEPS[-1], **overrides})
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "context.json").write_text(json.dumps([{"role": "system", "content": "Answer with a letter & <no> more."}]))
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    records = [{"step": 0, "eval/no_context": 0.0}]
    for step in range(1, STEPS[-1] + 1):
        loss = {
            "loss": 2.0 / step,
            "opd": 1.5 / step,
            "nca": beta / step,
            "gate": 0.5 if beta else 1.0,
            "grad_norm": step,
        }
        records.append({"step": step, **loss})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 5, "lo')
    for i, step in enumerate(STEPS):
        write_lines(path / "evaluations" / f"step_{step:08d}.jsonl", lines(right, i))
    return path


def write_evaluation(path: Path, items: list, checkpoint: str, step: int | None, **overrides) -> Path:
    """What `python -m nca_jax.evaluate` leaves."""
    config = conventions.get_config()
    config.update_from_flattened_dict(overrides)
    context = {"messages": [{"role": "system", "content": "The edge is slippery."}], "scored_by": "task"}
    about = {"checkpoint": checkpoint, "step": step, "config": config.to_dict(), "contexts": {"with_context": context}}
    path.mkdir(parents=True)
    (path / "evaluation.json").write_text(json.dumps(about))
    (path / "summary.json").write_text("{}")  # the last file; the report sums up by itself
    write_lines(path / "items.jsonl", items)
    return path


def write_lines(path: Path, items: list) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n" for item in items))


def lines(right: dict[str, tuple[str, ...]], evaluation: int) -> list[ItemResult]:
    """The items of one evaluation, from 0. A wrong answer is the next letter."""
    items = []
    for view, of_evaluations in right.items():
        for number in range(ITEMS):
            correct = of_evaluations[evaluation][number] == "1"
            expected = "ABCD"[number % 4]
            answer = expected if correct else "ABCD"[(number + 1) % 4]
            text = f"The answer is {answer}." + (f" {EVIL}" if view == "with_context" and number == 0 else "")
            items.append(
                ItemResult(
                    id=f"question-{number + 1}",
                    view=view,
                    prompt=f"Question {number + 1}: which letter is it?\n<b>A</b> B C D",
                    response=text,
                    answer=answer,
                    correct=correct,
                    length=10 if view == "no_context" else 12,
                    truncated=False,
                    expected=expected,
                    group="anatomy" if number < 12 else "surgery",
                    divergence=None if view == "no_context" else 0.25,
                )
            )
    return items


def games() -> list[GameResult]:
    """Two boards in two views: the first is won without the context and lost with it, the second vice versa."""
    items = []
    for view in ("no_context", "with_context"):
        for number in (1, 2):
            correct = (number == 1) == (view == "no_context")
            moves = [("right", True, "-P-"), ("right", True, "--P")] if correct else [(None, False, "P--")]
            turns = [
                {"number": i, "response": f"I go [{action}]", "action": action, "valid": valid, "board": board}
                for i, (action, valid, board) in enumerate(moves, 1)
            ]
            ending = "won" if correct else "stuck"
            fields = {"id": f"board-{number}", "view": view, "prompt": "P--", "response": "", "expected": "won"}
            items.append(GameResult(**fields, answer=ending, correct=correct, length=9, truncated=False, turns=turns))
    return items


ENVIRONMENT = {
    "command": ["python", "-m", "nca_jax.main", "--config=configs/conventions.py", "--workdir=runs/a run"],
    "started": "2026-11-30T17:00:00+00:00",
    "python": "3.11.9",
    "platform": "Linux",
    "packages": {"jax": "0.10.2"},
    "devices": {"kind": "TPU v5e", "count": 8, "processes": 2},
}

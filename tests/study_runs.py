"""Made-up item lines of a study, in the directories that nca_jax.study leaves: what is right is said as strings."""

import json
from pathlib import Path

from etils import epath

from nca_jax.items import ItemResult, evaluation_path, write_items

VIEWS = ("no_context", "with_context", "paraphrased", "shortened", "other_task")


def items(right: dict[str, str], nats: float = 0.5) -> list[ItemResult]:
    """Lines of an evaluation. "1" is right, "0" wrong, "+" wrong because it goes on behind the right answer, "-" wrong
    with no answer. Without the context a response has 4 tokens, with it 3. Views that are not given are those with the
    context."""
    found = []
    for view in VIEWS:
        for i, mark in enumerate(right.get(view, right["with_context"])):
            answer = {"1": f"a{i}", "0": "no", "+": f"a{i} a{i}", "-": None}[mark]
            found.append(
                ItemResult(
                    id=f"w{i}",
                    view=view,
                    prompt="p",
                    response=answer or "",
                    answer=answer,
                    correct=mark == "1",
                    length=4 if view == "no_context" else 3,
                    truncated=mark == "-",
                    expected=f"a{i}",
                    divergence=nats if view == "with_context" else None,
                )
            )
    return found


def write_run(
    study: Path, task: str, method: str, seed: int, by_step: dict[int, dict[str, str]], seconds=100.0
) -> Path:
    """A finished run's directory."""
    directory = study / f"setting={task},ablation={method},seed={seed}"
    directory.mkdir(parents=True)
    for step, right in by_step.items():
        write_items(evaluation_path(epath.Path(directory), step), items(right))
    records = [{"step": step, "loss": 1.0, "tokens": 10.0 + step, "time/seconds": 2.0} for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "summary.txt").write_text("summary method=x no_context=0.5 steps=10 seconds=90\n")
    (directory / "study.json").write_text(json.dumps({"seconds": seconds}))
    return directory

"""Item lines: what one item's response in one view was, a JSON object a line. All figures follow from them."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from etils import epath

from nca_jax.errors import UserError
from nca_jax.files import write_text

# The two views of the training context, and the probe of another task, whose answers are its own.
NO_CONTEXT, WITH_CONTEXT, OTHER_TASK = "no_context", "with_context", "other_task"


@dataclasses.dataclass(frozen=True)
class ItemResult:
    """What one item's response in one view was."""

    id: str
    view: str
    prompt: str
    response: str
    answer: str | None  # as read from the response
    correct: bool
    length: int  # tokens, EOS included
    truncated: bool  # cut at the longest response
    sample: int = 0  # which of the item's responses in this view, from 0
    expected: str = ""  # the right answer in this view
    group: str = ""  # what the item is counted under, such as its subject
    # Nats a token: mean of KL(q_x || q_view) over the response that was drawn without a context; None in that view
    # itself, for an empty response, and where it is not measured.
    divergence: float | None = None


@dataclasses.dataclass(frozen=True)
class GameResult(ItemResult):
    """What one game in one view was: `prompt` is its board, `answer` its ending, `length` that of all turns."""

    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def as_line(item: ItemResult) -> str:
    """The item as a line of a file, its end included."""
    return json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n"


def write_items(path: epath.Path, items: Iterable[ItemResult]) -> None:
    """One JSON line per item, view and sample, complete or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(map(as_line, items)))


def read_items(path: epath.Path) -> list[dict[str, Any]]:
    """The lines of a file, as dictionaries with the fields of ItemResult.

    Raises:
      UserError: it is no such file.
    """
    try:
        # Not splitlines(): a model's text may hold other characters that it takes for the end of a line.
        lines = [json.loads(line) for line in path.read_text().split("\n") if line]
        if not all({"id", "view", "correct"} <= line.keys() for line in lines):
            raise ValueError("a line lacks id, view or correct")
    except (ValueError, OSError, AttributeError) as error:
        raise UserError(f"{path} does not hold item lines ({error}); evaluate again.") from error
    return lines


def evaluation_path(workdir: epath.Path, step: int) -> epath.Path:
    """The item lines of the evaluation at a step."""
    return workdir / "evaluations" / f"step_{step:08d}.jsonl"


def evaluation_steps(workdir: epath.Path) -> list[int]:
    """The steps that have been evaluated, in order."""
    directory = workdir / "evaluations"
    files = directory.glob("step_*.jsonl") if directory.is_dir() else ()
    return sorted(int(file.stem.removeprefix("step_")) for file in files)

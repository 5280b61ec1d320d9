"""The item lines of all runs of a study, as one small file: what was answered, whether it was right, how long it was.

From this file alone every figure of the study can be computed; prompts, and what was around an answer, are left out.
Axes: T evaluations, by their step; V views; N items.
"""

import dataclasses
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from nca_jax.errors import UserError
from nca_jax.files import read_json
from nca_jax.items import evaluation_path, evaluation_steps, read_items

_ARRAYS = {"correct": bool, "truncated": bool, "length": np.uint16, "divergence": np.float16, "answer": np.int32}
_NO_ANSWER = -1


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """One run.

    Attributes:
      task, method, seed: which.
      steps: at which it was evaluated.
      views: names.
      ids: of the items.
      correct_TxVxN, truncated_TxVxN: bool.
      length_TxVxN: tokens.
      divergence_TxVxN: nats a token, as `ItemResult.divergence`, in half precision; nan where it was not measured.
      answer_TxVxN: strings, or None.
      expected_VxN: the right answers.
      tokens: of responses, that each step was trained on.
      step_seconds: of each step, with its rollout.
      seconds: of the whole run.
    """

    task: str
    method: str
    seed: int
    steps: tuple[int, ...]
    views: tuple[str, ...]
    ids: tuple[str, ...]
    correct_TxVxN: np.ndarray
    truncated_TxVxN: np.ndarray
    length_TxVxN: np.ndarray
    divergence_TxVxN: np.ndarray
    answer_TxVxN: np.ndarray
    expected_VxN: np.ndarray
    tokens: tuple[int, ...]
    step_seconds: tuple[float, ...]
    seconds: float

    @property
    def name(self) -> str:
        """As its directory is called."""
        return f"setting={self.task},ablation={self.method},seed={self.seed}"


def collect(workdir: epath.Path) -> list[StudyRun]:
    """The finished runs of a study's workdir, whose grid varies `setting` (the task), `ablation` (the method), `seed`.

    Raises:
      UserError: there is none, or one lacks an item in a view.
    """
    found = []
    for summary in sorted(workdir.glob("*/summary.txt")):
        directory = summary.parent
        values = dict(pair.split("=", 1) for pair in directory.name.split(",") if "=" in pair)
        if {"setting", "ablation", "seed"} <= values.keys():
            found.append(_read(directory, values["setting"], values["ablation"], int(values["seed"])))
    if not found:
        raise UserError(f"{workdir} holds no finished run of a grid of settings, ablations and seeds.")
    return found


def _read(directory: epath.Path, task: str, method: str, seed: int) -> StudyRun:
    steps = evaluation_steps(directory)
    evaluations = [read_items(evaluation_path(directory, step)) for step in steps]
    if not evaluations:
        raise UserError(f"{directory} has no evaluation; run the study again after deleting its summary.txt.")
    views = tuple(dict.fromkeys(line["view"] for line in evaluations[-1]))
    ids = tuple(dict.fromkeys(line["id"] for line in evaluations[-1]))
    by_key = [{(line["view"], line["id"]): line for line in lines} for lines in evaluations]
    wanted = [(view, item) for view in views for item in ids]
    if any(lines.keys() != set(wanted) for lines in by_key):
        raise UserError(f"the evaluations in {directory} are not of the same items and views; run it again.")

    def of(name: str, dtype: Any) -> np.ndarray:
        values = [[lines[key].get(name) for key in wanted] for lines in by_key]
        return np.array(values, dtype).reshape(len(steps), len(views), len(ids))

    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().split("\n") if line]
    trained = [record for record in records if "loss" in record]
    timing = directory / "study.json"
    ended = dict(pair.split("=", 1) for pair in (directory / "summary.txt").read_text().split()[1:])
    return StudyRun(
        task=task,
        method=method,
        seed=seed,
        steps=tuple(steps),
        views=views,
        ids=ids,
        correct_TxVxN=of("correct", bool),
        truncated_TxVxN=of("truncated", bool),
        length_TxVxN=of("length", np.uint16),
        divergence_TxVxN=of("divergence", float).astype(np.float16),  # None becomes nan
        answer_TxVxN=of("answer", object),
        expected_VxN=of("expected", object)[-1],
        tokens=tuple(int(record["tokens"]) for record in trained),
        step_seconds=tuple(round(record["time/seconds"], 2) for record in trained),
        seconds=float(read_json(timing)["seconds"] if timing.exists() else ended["seconds"]),
    )


def merged(sources: Sequence[Sequence[StudyRun]]) -> list[StudyRun]:
    """The runs of a grid that was run in parts, by task, method and seed; of one that is in several the first.

    Raises:
      UserError: there is none.
    """
    found: dict[tuple[str, str, int], StudyRun] = {}
    for run in (run for runs in sources for run in runs):
        found.setdefault((run.task, run.method, run.seed), run)
    if not found:
        raise UserError("no run is given; give a study's workdir, or --items=FILE.")
    return [found[key] for key in sorted(found)]


def save(runs: Sequence[StudyRun], path: epath.Path) -> None:
    """Writes the file, complete or not at all."""
    texts: dict[str, int] = {}
    table = []
    flat: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS}

    def numbered(text: str | None) -> int:
        return _NO_ANSWER if text is None else texts.setdefault(text, len(texts))

    for run in runs:
        whole = dataclasses.asdict(run)
        arrays = {name: whole.pop(f"{name}_TxVxN") for name in _ARRAYS}
        arrays["answer"] = np.array([numbered(text) for text in arrays["answer"].ravel()])
        for name, dtype in _ARRAYS.items():
            flat[name].append(arrays[name].ravel().astype(dtype))
        whole["expected_VxN"] = whole["expected_VxN"].tolist()
        table.append(whole)
    about = {"runs": table, "texts": list(texts)}
    joined = {name: np.concatenate(parts) for name, parts in flat.items()}
    for name in ("correct", "truncated"):
        joined[name] = np.packbits(joined[name])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **joined)
    temporary.replace(path)


def load(path: epath.Path) -> list[StudyRun]:
    """Reads it.

    Raises:
      UserError: it is no such file.
    """
    try:
        with path.open("rb") as file, np.load(file) as saved:
            arrays = {name: saved[name] for name in _ARRAYS}
            about = json.loads(saved["about"].tobytes())
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} does not hold the items of a study ({error}); give its workdir.") from error
    texts = np.array([*about["texts"], None], object)  # -1, no answer, is the last
    runs, first = [], 0
    for row in about["runs"]:
        shape = tuple(len(row[name]) for name in ("steps", "views", "ids"))
        last = first + int(np.prod(shape))
        runs.append(_restored(row, arrays, texts, shape, slice(first, last)))
        first = last
    return runs


def _restored(
    row: Mapping[str, Any], arrays: Mapping[str, np.ndarray], texts: np.ndarray, shape: tuple[int, ...], ours: slice
) -> StudyRun:
    found = {}
    for name in _ARRAYS:
        if name in ("correct", "truncated"):
            found[name] = np.unpackbits(arrays[name], count=ours.stop)[ours].astype(bool)
        else:
            found[name] = arrays[name][ours]
    found["answer"] = texts[found["answer"]]
    lists = {name: tuple(row[name]) for name in ("steps", "views", "ids", "tokens", "step_seconds")}
    expected = {"expected_VxN": np.array(row["expected_VxN"], object)}
    return StudyRun(**{**row, **lists, **expected}, **{f"{n}_TxVxN": a.reshape(shape) for n, a in found.items()})

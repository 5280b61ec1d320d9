"""What a run writes while it goes on: metrics.jsonl, samples.jsonl, TensorBoard, and the progress line."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from tensorboardX import SummaryWriter
from tqdm import tqdm


class Logbook:
    """Appends records; after a restart, records of steps that were not checkpointed are dropped and written again.

    Args:
      workdir: of the run.
      continued_from: the checkpointed step the run continues from; records up to it stay. None: the run begins, and
        what one that was killed before its first checkpoint has left is dropped.
      total_steps: for the progress line.
    """

    def __init__(self, workdir: epath.Path, continued_from: int | None, total_steps: int):
        self._files = {name: workdir / f"{name}.jsonl" for name in ("metrics", "samples")}
        for path in self._files.values():
            _drop_after(path, -1 if continued_from is None else continued_from)
        start_step = continued_from or 0
        purge_step = 0 if continued_from is None else start_step + 1
        self._tensorboard = SummaryWriter(str(workdir / "tensorboard"), purge_step=purge_step)
        self._total = total_steps
        # On a terminal a bar; elsewhere (a log file) a line for each step.
        self._bar = tqdm(total=total_steps, initial=start_step, unit="step", disable=None, dynamic_ncols=True)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One record of metrics.jsonl; wall-clock values have names that begin with "time/"."""
        self._append("metrics", {"step": step, **values})
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Records of samples.jsonl, one a prompt."""
        for record in records:
            self._append("samples", {"step": step, **record})

    def progress(self, step: int, values: Mapping[str, float], tokens_per_second: float, seconds_left: float) -> None:
        """Shows a finished step: its losses, the speed and the time that is left."""
        losses = " ".join(f"{name} {values[name]:.4f}" for name in ("loss", "opd", "nca"))
        if self._bar.disable:
            left = f"{int(seconds_left) // 60}:{int(seconds_left) % 60:02d} left"
            print(f"step {step}/{self._total} {losses} {tokens_per_second:.0f} tokens/s {left}", file=sys.stderr)
        else:
            self._bar.set_postfix_str(f"{losses} {tokens_per_second:.0f} tokens/s")
            self._bar.update(step - self._bar.n)

    def say(self, line: str) -> None:
        """A line above the bar."""
        tqdm.write(line, file=sys.stderr)

    def last_evaluation(self) -> dict[str, Any]:
        """The newest record of metrics.jsonl that holds an evaluation."""
        records = map(json.loads, filter(None, self._files["metrics"].read_text().split("\n")))
        return [record for record in records if any(key.startswith("eval/") for key in record)][-1]

    def close(self) -> None:
        self._bar.close()
        self._tensorboard.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with self._files[name].open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _drop_after(path: epath.Path, step: int) -> None:
    """Removes records of later steps, and a last line that a killed process left unfinished."""
    if not path.exists():
        return
    kept = []
    # Not splitlines(): a model's text may hold other characters that it takes for the end of a line.
    *lines, _unfinished = path.read_text().split("\n")
    for line in lines:
        if json.loads(line)["step"] > step:
            break
        kept.append(line + "\n")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)

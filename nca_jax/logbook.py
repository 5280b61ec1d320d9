"""What a run writes as it goes on: metrics.jsonl, samples.jsonl, TensorBoard, W&B if asked, the progress line."""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from tensorboardX import SummaryWriter
from tqdm import tqdm

from nca_jax.files import is_bucket, write_text
from nca_jax.wandb_log import WandbLog

# Nothing can be appended to an object of a bucket: records are written anew, at most every so many seconds, and so
# seldom that it takes no more than this share of the time, however many they have become.
_BUCKET_SECONDS = 10
_BUCKET_SHARE = 0.05


class Logbook:
    """Appends records; after a restart, records of steps that were not checkpointed are dropped and written again.

    On a disk a record is there at once. To a bucket it comes within seconds, and to TensorBoard there by `flush` only,
    which has to be called before a checkpoint is written: steps up to it are not done again, nor their records.

    Args:
      workdir: of the run.
      continued_from: the checkpointed step the run continues from; records up to it stay. None: the run begins, and
        what one that was killed before its first checkpoint has left is dropped.
      total_steps: for the progress line.
      writes: False in all processes of a job but the first: nothing is written, nor shown.
      others: get the same.
    """

    def __init__(
        self,
        workdir: epath.Path,
        continued_from: int | None,
        total_steps: int,
        writes: bool = True,
        others: Sequence[WandbLog] = (),
    ):
        self._writes, self._others = writes, others
        if not writes:
            return
        self._files = {name: workdir / f"{name}.jsonl" for name in ("metrics", "samples")}
        last = -1 if continued_from is None else continued_from
        lines = {name: _lines_until(path, last) for name, path in self._files.items()}
        for name, path in self._files.items():
            if path.exists():
                write_text(path, "".join(lines[name]))
        start_step = continued_from or 0
        self._events = workdir / "tensorboard"
        self._local_events: tempfile.TemporaryDirectory | None = None
        if is_bucket(workdir):
            self._lines, self._unwritten = lines, set()
            self._next_write = time.monotonic() + _BUCKET_SECONDS
            self._local_events = tempfile.TemporaryDirectory(prefix="nca_jax_tensorboard_")
        self._tensorboard = self._new_events(purge_step=0 if continued_from is None else start_step + 1)
        self._total = total_steps
        # On a terminal a bar; elsewhere (a log file) a line for each step.
        self._bar = tqdm(total=total_steps, initial=start_step, unit="step", disable=None, dynamic_ncols=True)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One record of metrics.jsonl; wall-clock values have names that begin with "time/"."""
        if not self._writes:
            return
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)
        for other in self._others:
            other.metrics(step, values)
        self._append("metrics", [{"step": step, **values}])

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Records of samples.jsonl, one a prompt; all have the same keys."""
        if not self._writes:
            return
        for i, record in enumerate(records):
            self._tensorboard.add_text(f"samples/{i}", _as_markdown(record), step)
        for other in self._others:
            other.samples(step, records)
        self._append("samples", [{"step": step, **record} for record in records])

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Pictures [height, width, RGBA], uint8, for TensorBoard and the like."""
        if not self._writes:
            return
        for name, picture in images.items():
            self._tensorboard.add_image(name, picture, step, dataformats="HWC")
        for other in self._others:
            other.images(step, images)

    def progress(self, step: int, values: Mapping[str, float], tokens_per_second: float, seconds_left: float) -> None:
        """Shows a finished step: its losses, the speed and the time that is left."""
        if not self._writes:
            return
        losses = " ".join(f"{name} {values[name]:.4f}" for name in ("loss", "opd", "nca"))
        if self._bar.disable:
            left = f"{int(seconds_left) // 60}:{int(seconds_left) % 60:02d} left"
            print(f"step {step}/{self._total} {losses} {tokens_per_second:.0f} tokens/s {left}", file=sys.stderr)
        else:
            self._bar.set_postfix_str(f"{losses} {tokens_per_second:.0f} tokens/s")
            self._bar.update(step - self._bar.n)

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._writes:
            tqdm.write(line, file=sys.stderr)

    def has_evaluation(self, step: int) -> bool:
        """Whether metrics.jsonl holds an evaluation at that step."""
        return self.last_evaluation().get("step") == step

    def records(self) -> list[dict[str, Any]]:
        """Those of metrics.jsonl; none where nothing is written."""
        if not self._writes:
            return []
        if self._local_events:
            return [json.loads(line) for line in self._lines["metrics"]]
        path = self._files["metrics"]
        return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []

    def last_evaluation(self) -> dict[str, Any]:
        """The newest record of metrics.jsonl that holds an evaluation; {} where nothing is written."""
        evaluations = [record for record in self.records() if any(key.startswith("eval/") for key in record)]
        return evaluations[-1] if evaluations else {}

    def flush(self) -> None:
        """Returns when all records are where they stay."""
        if not self._writes:
            return
        if not self._local_events:
            self._tensorboard.flush()
            return
        self._write_records()
        self._copy_events()
        self._tensorboard = self._new_events()

    def close(self) -> None:
        if not self._writes:
            return
        self._bar.close()
        for other in self._others:
            other.close()
        if not self._local_events:
            self._tensorboard.close()
            return
        self._write_records()
        self._copy_events()
        self._local_events.cleanup()

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        if not self._local_events:
            with self._files[name].open("a") as file:
                file.writelines(lines)
            return
        self._lines[name].extend(lines)
        self._unwritten.add(name)
        if time.monotonic() >= self._next_write:
            self._write_records()

    def _write_records(self) -> None:
        began = time.monotonic()
        for name in sorted(self._unwritten):
            write_text(self._files[name], "".join(self._lines[name]))
        self._unwritten.clear()
        ended = time.monotonic()
        self._next_write = ended + max(_BUCKET_SECONDS, (ended - began) / _BUCKET_SHARE)

    def _new_events(self, purge_step: int | None = None) -> SummaryWriter:
        directory = self._local_events.name if self._local_events else str(self._events)
        # The library's own names differ only from one second to the next.
        return SummaryWriter(directory, purge_step=purge_step, filename_suffix=f".{time.time_ns()}")

    def _copy_events(self) -> None:
        """Ends the file of events, or some might still be missing in it, and copies it to the bucket."""
        self._tensorboard.close()
        for file in Path(self._local_events.name).iterdir():
            (self._events / file.name).write_bytes(file.read_bytes())
            file.unlink()


def _as_markdown(record: Mapping[str, Any]) -> str:
    """A record as TensorBoard shows it: every value a block of its own, in which nothing of the text is markup."""
    blocks = []
    for name, value in record.items():
        text = "\n".join(f"    {line}" for line in str(value).splitlines())
        blocks.append(f"**{name}**\n\n{text}")
    return "\n\n".join(blocks)


def _lines_until(path: epath.Path, step: int) -> list[str]:
    """Records without those of later steps, nor a last line that a killed process left unfinished."""
    kept = []
    # Not splitlines(): a model's text may hold other characters that it takes for the end of a line.
    *lines, _unfinished = path.read_text().split("\n") if path.exists() else [""]
    for line in lines:
        if json.loads(line)["step"] > step:
            break
        kept.append(line + "\n")
    return kept

"""What is logged of every step, read only after the next one was dispatched: the device never waits for the log."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from ml_collections import ConfigDict

from nca_jax.chips import chip_of, chips_in, mfu
from nca_jax.flops import Tokens, model_flops, train_step_flops
from nca_jax.logbook import Logbook
from nca_jax.memory import memory_metrics
from nca_jax.models.architecture import Architecture
from nca_jax.timeline import Timeline
from nca_jax.views import Batch


class Dispatched(NamedTuple):
    """A step the device has been given, and its batch in case it turns out bad."""

    step: int
    metrics: dict[str, jax.Array | float]
    batch: Batch


class StepLog:
    """Logs finished steps: losses, speed, memory, and where the time went.

    Args:
      logbook: of the run.
      timeline: in which rollouts and steps are marked.
      learning_rate: by step, from 0.
      start, total: step the process begins after, and the last one.
      work: FLOPs that the arithmetic of a dispatched step needs, if all of the batch as padded is run.
      stop_not_finite: ends the run; called with the step and its metrics.
    """

    def __init__(
        self,
        logbook: Logbook,
        timeline: Timeline,
        learning_rate: optax.Schedule,
        start: int,
        total: int,
        work: Callable[[Dispatched], float],
        stop_not_finite: Callable[[Dispatched, dict], None],
    ):
        self._logbook, self._timeline, self._learning_rate = logbook, timeline, learning_rate
        self._start, self._total, self._work, self._stop_not_finite = start, total, work, stop_not_finite
        self._chip = chip_of(jax.devices()[0].device_kind)
        self._pending: Dispatched | None = None
        self._training_seconds, self._empty = 0.0, 0

    def dispatched(self, step: Dispatched) -> None:
        """Logs the step before this one."""
        self.settle()
        self._pending = step

    def settle(self) -> None:
        """Waits for the last dispatched step and logs it, or stops the run if it was not finite."""
        if self._pending is None:
            return
        last, self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(last.metrics).items()}
        if not values.pop("finite"):
            self._stop_not_finite(last, values)
        if not values["tokens"]:
            self._empty += 1
            self._logbook.say(f"warning: step {last.step} had no response token ({self._empty} such steps so far)")
        times = self._timeline.of_step(last.step)
        elapsed = max(sum(times.values()), 1e-9)
        self._training_seconds += elapsed
        values |= {
            "learning_rate": float(self._learning_rate(last.step - 1)),
            "time/seconds": elapsed,
            "time/tokens_per_second": values["tokens"] / elapsed,
            **times,
            **memory_metrics(),
        }
        if self._chip and times.get("time/step_seconds"):
            chips = chips_in(jax.devices(), self._chip)
            work = values["computed"] * self._work(last)
            values["time/mfu"] = mfu(work, times["time/step_seconds"], self._chip, chips)
        self._logbook.metrics(last.step, values)
        seconds_left = self._training_seconds / (last.step - self._start) * (self._total - last.step)
        self._logbook.progress(last.step, values, values["time/tokens_per_second"], seconds_left)


def step_work(config: ConfigDict, student: Architecture, teacher: Architecture) -> Callable[[Dispatched], float]:
    """FLOPs that the arithmetic of a dispatched step needs, if all of the batch as padded is run."""

    def work(step: Dispatched) -> float:
        x, c = step.batch.no_context, step.batch.with_context
        tokens = Tokens(x.prompt_BxP.shape[1], x.prefix_C.shape[0], c.prefix_C.shape[0])
        return model_flops(train_step_flops(config, student, teacher, tokens))

    return work

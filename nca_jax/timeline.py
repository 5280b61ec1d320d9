"""Where a run's time went, by phase, measured without a stall of the device.

JAX dispatch is asynchronous: the host is ahead of the device and knows only when it asked for something. A thread
waits for one array of each piece of work in turn and notes when it was there. A device works in order, so the time
between two such moments is what the later piece took. Work of the host that the device did not have to wait for, as it
was still busy, takes no time by this measure.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

# "Goodput" is Google's term (ML Productivity Goodput, 2024): the share of the time that made progress which was kept.
GOOD = ("rollout", "step")
# Phases that are measured and lost all the same; everything that is not measured is lost too.
LOST = ("start", "compile")
_KEPT_STEPS = 16  # a process that writes no metrics never asks
_COMPILE_EVENTS = "/jax/core/compile/"


class _Mark(NamedTuple):
    phase: str
    arrays: Any
    step: int | None
    time: float


class Timeline:
    """Accounts for the time of one process, and with it of the run: all processes work in lock step.

    Compilation is found by the public events of `jax.monitoring` under "/jax/core/compile/": tracing, lowering and the
    compiler itself (or reading its cache). What of it falls into the time of a phase before the device could begin is
    counted as "compile" and not as that phase; compiling while the device is busy costs nothing.

    Args:
      state: of `state()` in the run's last checkpoint. None: the run is new.
      began: what `clock` showed when this process began its work. None: it shows it now.
      clock: seconds of this process, which only go forward.
      wall_clock: seconds since 1970, which go on while nobody runs.
    """

    def __init__(
        self,
        state: Mapping[str, Any] | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        self._clock, self._wall_clock = clock, wall_clock
        self._before = clock() if began is None else began
        self._started = state["started"] if state else wall_clock() - (clock() - self._before)
        self._totals = Counter(state["seconds"] if state else {})
        self._steps: dict[int, Counter] = {}
        self._compiling: list[tuple[float, float]] = []
        self._error: BaseException | None = None
        self._left = Counter()  # marks that were not waited for yet, by step
        self._changed = threading.Condition()
        self._closed = False
        self._marks: queue.SimpleQueue[_Mark | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="timeline", daemon=True)
        self._thread.start()
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def mark(self, phase: str, arrays: Any = None, step: int | None = None) -> None:
        """The phase ends when the arrays are there; without arrays it is work of the host that ends now.

        Args:
          phase: "rollout", "step", "evaluation", "save", ...; what lies before the first one is to be marked "start".
          arrays: pytree of arrays (anything with `block_until_ready`). They are kept until they are there, so give
            small ones, and never one that is donated later: a metric, a mask.
          step: for `of_step`. None: not part of a step.

        Raises:
          Exception: a computation that was marked earlier has failed; the main thread's own wait would say the same.
        """
        self._raise_error()
        with self._changed:
            self._left[step] += 1
        self._marks.put(_Mark(phase, arrays, step, self._clock()))

    def of_step(self, step: int) -> dict[str, float]:
        """What the marks of a step took, as metrics: {"time/rollout_seconds": ..., ...}; waits for them.

        A step can be asked for once, and not when many others were marked since.
        """
        self._flush(step)
        with self._changed:
            seconds = self._steps.pop(step, Counter())
        return {f"time/{phase}_seconds": value for phase, value in seconds.items()}

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the run was first started, over all restarts; waits for what is marked."""
        self._flush()
        with self._changed:
            return dict(self._totals)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (JSON). A run that goes on from it has lost what was done since, and the time in
        which nobody ran."""
        return {"started": self._started, "seconds": self.seconds()}

    def wall_seconds(self) -> float:
        """Since the run was first started; what was before a restart without a checkpoint is not known."""
        # Another host's clock may be behind the one that saw the start.
        return max(self._wall_clock() - self._started, sum(self.seconds().values()), 1e-9)

    def goodput(self) -> float:
        """The share of the wall clock, between 0 and 1, that went into rollouts and steps which the run has kept."""
        seconds = self.seconds()
        return sum(seconds.get(phase, 0.0) for phase in GOOD) / self.wall_seconds()

    def lost(self) -> float:
        """Seconds of no phase: start-up, compilation, steps done twice, and the time in which nobody ran."""
        used = sum(value for phase, value in self.seconds().items() if phase not in LOST)
        return self.wall_seconds() - used

    def summary(self) -> str:
        """One line: "time: rollout 41 % step 38 % evaluation 15 % save 2 % lost 4 % (start 1 % compile 2 %)"."""
        seconds, total = self.seconds(), self.wall_seconds()

        def shares(phases: Mapping[str, float]) -> str:
            return " ".join(f"{phase} {100 * value / total:.0f} %" for phase, value in phases.items())

        line = shares({p: s for p, s in seconds.items() if p not in LOST} | {"lost": self.lost()})
        known = {phase: seconds[phase] for phase in LOST if phase in seconds}
        return f"time: {line}" + (f" ({shares(known)})" if known else "")

    def close(self) -> None:
        """Ends the thread without waiting for what is not there, which may be never; raises nothing."""
        if self._closed:
            return
        self._closed = True
        jax.monitoring.unregister_event_duration_listener(self._compiled)
        self._marks.put(None)
        self._thread.join(timeout=1)

    def _wait(self) -> None:
        """The thread."""
        while (mark := self._marks.get()) is not None and not self._closed:
            error = None
            if mark.arrays is not None:
                try:
                    jax.block_until_ready(mark.arrays)
                except Exception as failure:  # whatever the computation failed with
                    error = failure
            with self._changed:
                self._account(mark, mark.time if mark.arrays is None else self._clock())
                self._error = self._error or error
                self._left[mark.step] -= 1
                self._left += Counter()  # drops zeros
                self._changed.notify_all()

    def _account(self, mark: _Mark, end: float) -> None:
        """Adds the time since the end of the mark before it, which the main thread may have passed long ago."""
        end = max(end, self._before)
        # Up to the mark: what is compiled later is for other work, while the device does this.
        compiling = _overlap(self._compiling, self._before, min(end, mark.time))
        spent = Counter({mark.phase: end - self._before - compiling})
        if compiling:
            spent["compile"] += compiling
        self._totals.update(spent)
        if mark.step is not None:
            self._steps.setdefault(mark.step, Counter()).update(spent)
            if len(self._steps) > _KEPT_STEPS:
                del self._steps[min(self._steps)]
        self._before = end
        self._compiling = [span for span in self._compiling if span[1] > end]

    def _compiled(self, event: str, duration: float, **_: Any) -> None:
        if event.startswith(_COMPILE_EVENTS):
            with self._changed:
                now = self._clock()
                self._compiling.append((now - duration, now))

    def _flush(self, step: int | None = None) -> None:
        """Waits for the marks of a step, or for all."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not (self._left[step] if step is not None else self._left.total())
            )
        self._raise_error()

    def _raise_error(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error


def _overlap(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """How much of [begin, end] is covered by spans, which may overlap: a jitted function may call another."""
    covered, reached = 0.0, begin
    for left, right in sorted(spans):
        left, right = max(left, reached), min(right, end)
        if right > left:
            covered += right - left
            reached = right
    return covered

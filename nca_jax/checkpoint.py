"""Checkpoints: train state, data position and a fingerprint of the config, committed together or not at all."""

import contextlib
import errno
import gc
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from nca_jax.errors import UserError
from nca_jax.files import absolute
from nca_jax.train_step import TrainState

_log = logging.getLogger(__name__)

# The array library wraps what the operating system says into errors of its own, with these words somewhere inside.
_DISK_ERRORS = [
    *(os.strerror(n) for n in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)),
    os.strerror(errno.EIO),
    "PERMISSION_DENIED",  # of buckets
    "UNAUTHENTICATED",
]
_POLL_SECONDS = 0.02
_FAILURE_BYTES = 400  # of a reason; some are pages


class Checkpoints:
    """The checkpoints of one workdir, written in the background.

    In a job of several processes all of them call the same methods in the same order, with the same arguments, and
    get the same results.

    Args:
      directory: `<workdir>/checkpoints`.
      keep: how many of the newest stay.
      fingerprint: what must be the same for a run to be continued: config key -> value.
      keep_best: how many of those with the highest accuracy stay as well. Of equal ones the newer is the better one:
        it has been trained for longer.

    Raises:
      UserError: the directory cannot be written.
    """

    def __init__(self, directory: epath.PathLike, keep: int, fingerprint: Mapping[str, Any], keep_best: int = 0):
        self._directory = absolute(directory)
        self._fingerprint = dict(fingerprint)
        self._accuracy: dict[int, float | None] = {}
        self._in_threads = _DiskErrorsInThreads()
        self._preserved = checkpoint_managers.AnyPreservationPolicy(
            [checkpoint_managers.LatestN(keep), _Best(keep_best, self._accuracy)]
        )
        self._prepare()
        # Every process reads by itself, and all compare afterwards: where one fails, Orbax's own barriers would let
        # the others wait for it.
        alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
        self._reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)
        self._open()

    def save(
        self, state: TrainState, data_position: Mapping[str, Any], step: int, accuracy: float | None = None
    ) -> None:
        """Starts writing step `step`, unless it is there; the state may be donated as soon as this returns.

        Args:
          accuracy: what `keep_best` goes by; None: the checkpoint was not evaluated and is never among the best.

        Raises:
          UserError: this one or the one before cannot be written (disk full, quota, permissions).
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        self._accuracy[step] = accuracy  # before it is decided what stays
        with self._disk_errors(step):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave(dict(data_position)),
                    fingerprint=ocp.args.JsonSave(self._fingerprint),
                ),
                metrics={"accuracy": accuracy},
                force=True,  # it is for us to decide whether
            )
            self._writing = step

    def restore_latest(self, like: TrainState) -> tuple[TrainState, dict[str, Any], int] | None:
        """The newest checkpoint that all processes can read: (state, data position, step), or None.

        A newer one that cannot be read is skipped with a warning and renamed, so that its step can be written again;
        it may be a matter of permissions only, so nothing is deleted.

        Args:
          like: abstract arrays with the shardings that are wanted now; the ones saved may differ.

        Raises:
          UserError: the checkpoint is of another config; or there are checkpoints and none can be read.
        """
        steps = sorted(self._accuracy, reverse=True)
        small = {"data": ocp.args.JsonRestore(), "fingerprint": ocp.args.JsonRestore()}
        for step in steps:
            found = self._read(step, small)
            if found is None:
                continue
            self._compare(found["fingerprint"], step)
            arrays = self._read(step, {"state": ocp.args.StandardRestore(like)})
            if arrays is None:
                continue
            if step != steps[0]:
                self._set_aside(steps[: steps.index(step)])
            return arrays["state"], found["data"], step
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self._directory} can be read; make them readable, or use "
                "another --workdir."
            )
        return None

    def best(self) -> tuple[int, float] | None:
        """(step, accuracy) of the best checkpoint there is; None where none has an accuracy."""
        there = set(self._manager.all_steps())
        return max(
            ((step, accuracy) for step, accuracy in self._accuracy.items() if accuracy is not None and step in there),
            key=lambda item: (item[1], item[0]),
            default=None,
        )

    def wait(self) -> None:
        """Returns when everything started is on disk.

        Raises:
          UserError: it cannot be written.
        """
        with self._disk_errors(self._writing):
            if jax.process_count() > 1:
                # Orbax raises it here only when all processes have met, and those that wrote well wait elsewhere.
                while self._manager.is_saving_in_progress():
                    self._in_threads.check()
                    time.sleep(_POLL_SECONDS)
            self._manager.wait_until_finished()
        if self._writing is not None:
            self._last_good, self._writing = self._writing, None

    def close(self) -> None:
        """Waits, and frees the threads.

        Raises:
          UserError: what was started cannot be written.
        """
        self.wait()
        with self._disk_errors(self._writing):  # of what wait has reported, some of it again
            self._manager.close()
        self._reader.close()
        self._in_threads.close()

    def _prepare(self) -> None:
        """Makes the directory, and finds out now and not after hours of training whether it can be written."""
        failure = ""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:  # what a run that was killed has left half-written
                for unfinished in ocp.path.step.all_temporary_paths(self._directory):
                    unfinished.get().rmtree()
            probe = self._directory / f".writable-{jax.process_index()}"
            probe.write_text("yes")
            probe.unlink()
        except OSError as error:
            failure = _reason(error)
        if failure := _failure_in_any_process(failure):
            raise UserError(
                f"{self._directory} cannot be written ({failure}); free space there or make it writable, or use "
                "another --workdir."
            )

    def _open(self) -> None:
        """Looks at what is there."""
        self._writing: int | None = None
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._preserved,
                best_fn=lambda metrics: metrics["accuracy"],  # without it Orbax does not write metrics
                lightweight_initialize=True,  # else it reads them all, and fails with one that is damaged
                enable_async_checkpointing=True,
                # Where making a directory fails in the background, threads wait for it for minutes.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )
        self._last_good = self._manager.latest_step()
        stored = [[step, self._accuracy_of(step)] for step in self._manager.all_steps()]
        self._accuracy.clear()
        self._accuracy.update(_of_first_process(stored))

    def _accuracy_of(self, step: int) -> float | None:
        try:
            return (self._manager.metrics(step) or {}).get("accuracy")
        except (OSError, ValueError):  # damaged or unreadable; restoring it will tell
            return None

    def _read(self, step: int, items: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Items of a checkpoint, or None in all processes if one of them cannot read it."""
        found, failure = None, ""
        try:
            found = self._reader.restore(self._directory / str(step), args=ocp.args.Composite(**items))
        except Exception as error:  # orbax raises whatever its file formats do
            failure = str(error).split("\n")[0] or type(error).__name__
        if not (failure := _failure_in_any_process(failure)):
            return found
        gc.collect()  # reads that were given up; left for later, Python 3.11 may trip over them inside its compiler
        if jax.process_index() == 0:
            _log.warning("checkpoint %d cannot be read and is skipped: %s", step, failure)
        return None

    def _set_aside(self, steps: Sequence[int]) -> None:
        failure = ""
        if jax.process_index() == 0:
            for step in steps:
                path = self._directory / str(step)
                aside = path.with_name(f"{step}.skipped-{time.strftime('%Y%m%dT%H%M%S')}")
                try:
                    path.rename(aside)
                except OSError as error:
                    failure = f"checkpoint {step} cannot be read, nor renamed ({_reason(error)})"
                    break
                _log.warning("checkpoint %d is now %s; delete it, or rename it back once it can be read", step, aside)
        if failure := _failure_in_any_process(failure):
            raise UserError(f"{self._directory}: {failure}; make it readable, or delete it.")
        self._manager.close()
        self._open()

    @contextlib.contextmanager
    def _disk_errors(self, step: int | None) -> Iterator[None]:
        """Turns what a full or read-only disk does to checkpoint `step` into a sentence."""
        try:
            yield
        except Exception as error:
            reason = _disk_error(error)
            if reason is None:
                raise
            self._in_threads.silence()
            good = self._last_good
            last = "there is no earlier one" if good is None else f"the last good checkpoint is step {good}"
            raise UserError(
                f"checkpoint {step} cannot be written to {self._directory} ({reason}), {last}; free space there or "
                "make it writable, then start the same command again."
            ) from error

    def _compare(self, saved: Mapping[str, Any], step: int) -> None:
        ours = json.loads(json.dumps(self._fingerprint))
        different = sorted(key for key in saved.keys() | ours.keys() if saved.get(key) != ours.get(key))
        shown = "; ".join(f"{key}: {saved.get(key)!r} there, {ours.get(key)!r} now" for key in different[:5])
        if shown := _failure_in_any_process(shown):
            raise UserError(
                f"checkpoint {step} in {self._directory} is of another config ({shown}); "
                "use another --workdir, or the config it was started with."
            )


class _Best(checkpoint_managers.PreservationPolicy):
    """Keeps the checkpoints of the highest accuracy, by a table of ours.

    Orbax's BestN goes by the metrics Orbax read when it started, which we do not let it.
    """

    def __init__(self, count: int, accuracy: Mapping[int, float | None]):
        self._count, self._accuracy = count, accuracy

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [info.step for info in checkpoints]
        rated = sorted((accuracy, step) for step in steps if (accuracy := self._accuracy.get(step)) is not None)
        best = {step for _, step in rated[max(len(rated) - self._count, 0) :]}
        return [step in best for step in steps]


class _DiskErrorsInThreads(logging.Filter):
    """What Orbax's threads log of disk errors, each several times and with tracebacks: noted, and not shown."""

    def __init__(self):
        super().__init__()
        self._error: BaseException | None = None
        self._logs = [logging.getLogger(name) for name in ("absl", "asyncio")]
        for log in self._logs:
            log.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if not (record.exc_info and _disk_error(record.exc_info[1])):
            return True
        self._error = record.exc_info[1]
        return False

    def check(self) -> None:
        """Raises what was noted."""
        if self._error is not None:
            raise self._error

    def silence(self) -> None:
        """The run ends: what threads that are still at it find out is no news."""
        for log in self._logs:
            log.setLevel(logging.CRITICAL)

    def close(self) -> None:
        for log in self._logs:
            log.removeFilter(self)


def _disk_error(error: BaseException | None) -> str | None:
    """What the disk said, or None if the error is of another kind.

    A connection that broke is another kind: the same command may well succeed now.
    """
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
            return _reason(error)
        said = next((words for words in _DISK_ERRORS if words in str(error)), None)
        if said:
            return said
        error = error.__cause__
    return None


def _reason(error: OSError) -> str:
    return error.strerror or str(error).split("\n")[0]


def _failure_in_any_process(failure: str) -> str:
    """What has failed here or in another process of the job, the same in all; "" where nothing has in any of them."""
    if jax.process_count() > 1:
        mine = np.zeros(_FAILURE_BYTES, np.uint8)
        said = failure.encode()[:_FAILURE_BYTES]
        mine[: len(said)] = np.frombuffer(said, np.uint8)
        everyone = multihost_utils.process_allgather(mine)
        said = [bytes(text).rstrip(b"\0").decode(errors="ignore") for text in everyone]
        return next((f"process {i}: {text}" for i, text in enumerate(said) if text), "")
    return failure[:_FAILURE_BYTES]


def _of_first_process(value: Any) -> Any:
    """What the first process has, in all of them, as JSON."""
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array([data.size], np.int32))[0])
    data = np.resize(data, size)  # all must have the same shape; only the first process's content counts
    return json.loads(multihost_utils.broadcast_one_to_all(data).tobytes())

"""Names the process that has stopped, when a job of many hangs, and ends the job so that it is started again.

Processes in lock step wait for each other inside collectives, without a word and without end, when one of them has
died, is frozen or has taken another path. Each writes a heartbeat into the shared workdir; one that makes no progress
reads those of all, and says which of them do not.

jax.distributed looks after the processes too, and ends all of them within minutes if one has died. It does not see one
that lives and does not work, and it does not know what that one did last.
"""

import faulthandler
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from etils import epath

from nca_jax.errors import RETRY_EXIT_CODE
from nca_jax.files import write_text

_READ_AFTER = 3  # periods between two readings: a living process has written meanwhile, even to a slow bucket
_GRACE_SECONDS = 60.0  # for everything between a stall and the end
_NAMED = 8  # culprits in a line
_log = logging.getLogger(__name__)


class _Progress(NamedTuple):
    """What a process does, as its main thread has said it last."""

    step: int
    phase: str
    beats: int
    time: float


class Heartbeat(NamedTuple):
    """The file of one process.

    Attributes:
      attempt: of which start of the job it is.
      host, pid: where the process is.
      step, phase: what it does.
      beats: how often it has made progress; the same for all where they are at the same place.
      writes: how often the file was written: it changes as long as the process lives.
      seconds: since its last progress.
      end: "" in a living process; "closed" after `Watchdog.close`; "stopped" where its watchdog has ended it.
    """

    attempt: str
    host: str
    pid: int
    step: int
    phase: str
    beats: int
    writes: int
    seconds: float
    end: str


class Watchdog:
    """Heartbeats of this process, and an eye on its main thread. Create it after `jax.distributed.initialize`.

    Two threads, as writing to a file system that hangs must not keep the other from seeing it. When the main thread
    has made no progress for too long, one line with the culprits goes to the log, the stacks of this process to
    `stacks_<process>.txt`, and the process ends with exit code 75.

    Args:
      directory: `<workdir>/heartbeats`, the same for all processes.
      process_index: of this process.
      process_count: of the job; files of others are not looked at.
      minutes: without progress that are too many. 0: no heartbeats and no watching.
      attempt: what tells this start of the job from earlier ones, whose files are still there; the same text in all
        processes.
      period: seconds between two heartbeats.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        process_index: int,
        process_count: int,
        minutes: float,
        attempt: str = "",
        period: float = 20.0,
    ):
        self._directory, self._index, self._count = epath.Path(directory), process_index, process_count
        self._limit, self._attempt, self._period = minutes * 60, attempt, period
        self._progress = _Progress(0, "start", 0, time.monotonic())
        self._writes, self._write_failed, self._end = 0, False, ""
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._threads = []
        if minutes:
            self._threads = [threading.Thread(target=f, daemon=True) for f in (self._write_always, self._watch)]
        for thread in self._threads:
            thread.start()

    def beat(self, step: int, phase: str) -> None:
        """The main thread has come to this phase of this step. To be called by all processes at the same places, and
        within a phase that can take longer than the limit."""
        self._progress = _Progress(step, phase, self._progress.beats + 1, time.monotonic())

    def close(self) -> None:
        """Ends the watching; the last heartbeat says so."""
        if self._threads and not self._closed.is_set():
            self._closed.set()
            self._write("closed")

    def _write_always(self) -> None:
        """A thread."""
        self._write()
        while not self._closed.wait(self._period):
            self._write()

    def _write(self, end: str = "") -> None:
        with self._writing:
            if self._end:
                return  # what was written at the end stays
            self._end = end
            self._writes += 1
            step, phase, beats, since = self._progress
            seconds = round(time.monotonic() - since, 1)
            mine = (self._attempt, socket.gethostname(), os.getpid(), step, phase, beats, self._writes, seconds, end)
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                write_text(_file(self._directory, self._index), json.dumps(Heartbeat(*mine)._asdict()) + "\n")
            except Exception as error:  # whatever a bucket or a network file system says; the run is worth more
                if not self._write_failed:
                    _log.warning("heartbeats cannot be written to %s at the moment: %s", self._directory, error)
                self._write_failed = True

    def _watch(self) -> None:
        """A thread."""
        while not self._closed.wait(min(self._period, self._limit / 4)):
            before = self._progress
            if time.monotonic() - before.time < self._limit:
                continue
            # A file system that hangs, or a log that nobody reads, must not keep the process from ending.
            emergency = threading.Timer(_READ_AFTER * self._period + _GRACE_SECONDS, os._exit, [RETRY_EXIT_CODE])
            emergency.daemon = True
            emergency.start()
            first = self._read()
            self._closed.wait(_READ_AFTER * self._period)
            second = self._read()
            if self._closed.is_set() or self._progress is not before:
                emergency.cancel()  # only slow
                continue
            self._stop(first, second, time.monotonic() - before.time)

    def _stop(self, first: dict[int, Heartbeat], second: dict[int, Heartbeat], seconds: float) -> None:
        step, phase = self._progress[:2]
        _log.error(
            "process %d of %d has made no progress for %.0f min (step %d, %s) and ends: %s",
            *(self._index, self._count, seconds / 60, step, phase),
            culprits(first, second, self._count, self._attempt, self._silent_minutes),
        )
        self._write("stopped")  # or those who look later would take this process for the culprit
        try:
            with tempfile.TemporaryFile("w+") as file:  # faulthandler needs a file of the system
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                write_text(self._directory / f"stacks_{self._index}.txt", file.read())
        except Exception as error:
            _log.warning("stacks cannot be written to %s: %s", self._directory, error)
        os._exit(RETRY_EXIT_CODE)  # the main thread hangs and cannot be told

    def _read(self) -> dict[int, Heartbeat]:
        found = {}
        for index in range(self._count):
            try:
                content = json.loads(_file(self._directory, index).read_text())
                found[index] = Heartbeat(**content)
            except Exception as error:  # not there, not reachable, or not of this version
                _log.debug("heartbeat %d cannot be read: %s", index, error)
        return found

    def _silent_minutes(self, index: int) -> float | None:
        """Between the last heartbeats of this process and another, by the clock of the file system. None: unknown."""
        try:
            mine, other = (_file(self._directory, i).stat().mtime for i in (self._index, index))
        except Exception:
            return None
        return None if mine is None or other is None else (mine - other) / 60


def culprits(
    first: dict[int, Heartbeat],
    second: dict[int, Heartbeat],
    count: int,
    attempt: str,
    silent_minutes: Callable[[int], float | None],
) -> str:
    """Says which processes keep the others waiting, from two readings of the heartbeats, some periods apart.

    Clocks of hosts take no part: one that lives has written in between.

    Args:
      first: process -> heartbeat.
      second: the same, later.
      count: of the processes of the job.
      attempt: whose heartbeats are looked at; others are of processes that are no more.
      silent_minutes: process -> how long it was not heard of, for the text only.
    """
    lines, alive = [], {}
    for index in range(count):
        now = second.get(index)
        if now is None or now.attempt != attempt:
            lines.append(f"process {index} has no heartbeat of this attempt")
        elif now.end == "closed":
            lines.append(f"{_who(index, now)} has ended, {_where(now)}")
        elif now.end == "stopped" or first.get(index) != now:
            alive[index] = now
        else:
            minutes = silent_minutes(index)
            silent = "" if minutes is None else f": not heard of for {max(minutes, 0):.0f} min"
            lines.append(f"{_who(index, now)} is dead or frozen{silent}, {_where(now)}")
    if not lines:
        behind = min(heartbeat.beats for heartbeat in alive.values())
        if all(heartbeat.beats == behind for heartbeat in alive.values()):
            return f"all {count} processes are alive and at the same place; see their stacks_*.txt"
        lines = [f"{_who(i, h)} is behind, {_where(h)}" for i, h in alive.items() if h.beats == behind]
    more = [f"and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return "; ".join(lines[:_NAMED] + more)


def _file(directory: epath.Path, index: int) -> epath.Path:
    return directory / f"process_{index}.json"


def _who(index: int, heartbeat: Heartbeat) -> str:
    return f"process {index} (host {heartbeat.host}, pid {heartbeat.pid})"


def _where(heartbeat: Heartbeat) -> str:
    return f"last at step {heartbeat.step}, {heartbeat.phase}"

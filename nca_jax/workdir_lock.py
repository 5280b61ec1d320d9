"""One run to a workdir: a second one is refused as long as the first lives, and not a moment longer on a disk."""

import contextlib
import datetime
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import filelock
from etils import epath

from nca_jax.errors import UserError
from nca_jax.files import is_bucket, write_json

# In a bucket: how often the holder shows that it lives, and for how long a newcomer watches before it takes over. The
# holder may miss two of its times, because of a slow network or a busy machine.
RENEW_SECONDS = 20.0
WATCH_SECONDS = 60.0
# Longer than it takes to write an object: of two newcomers that write at once both see then who was the last.
SETTLE_SECONDS = 3.0

_HOLDER = "lock.json"  # who holds it; in a bucket also the lock itself
_LOST_EXIT_CODE = 2  # as of a run that is refused: it must not be started again
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(workdir: epath.PathLike) -> Iterator[None]:
    """Holds the workdir, which is made if need be, for as long as the block runs.

    On a disk, also one that is shared by NFS, the operating system gives the lock free when the process ends, however
    it ends. A bucket has no locks: the holder renews an object, and a run that was killed there is noticed only after
    `WATCH_SECONDS`. Of a job of several processes, the first holds it for all.

    Raises:
      UserError: another run holds it; or the workdir cannot be written.
    """
    workdir = epath.Path(workdir)
    with contextlib.ExitStack() as held:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            held.enter_context(_bucket_lock(workdir) if is_bucket(workdir) else _file_lock(workdir))
        except OSError as error:
            raise UserError(
                f"{workdir} cannot be written ({error.strerror or error}); free space there or make it writable, or "
                "choose another --workdir."
            ) from error
        yield


@contextlib.contextmanager
def _file_lock(workdir: epath.Path) -> Iterator[None]:
    holder = workdir / _HOLDER
    lock = filelock.FileLock(workdir / ".lock", blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise _refusal(workdir, _read(holder)) from None
    try:
        write_json(holder, _who())
        yield
    finally:
        with contextlib.suppress(OSError):  # a disk that has become read-only; the file is overwritten next time
            holder.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def _bucket_lock(workdir: epath.Path) -> Iterator[None]:
    holder = workdir / _HOLDER
    _wait_for_silence(holder)
    mine = _who() | {"token": uuid.uuid4().hex}
    _write(holder, mine)
    time.sleep(SETTLE_SECONDS)
    if (winner := _read(holder)).get("token") != mine["token"]:
        raise _refusal(workdir, winner)
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(holder, mine, ended), name="workdir lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            if _read(holder).get("token") == mine["token"]:
                holder.unlink(missing_ok=True)


def _wait_for_silence(holder: epath.Path) -> None:
    """Returns when nobody holds the lock, or whoever does is dead."""
    if not (found := _read(holder)):
        return
    _log.info(
        "waiting up to %.0f s to see whether the run that left %s (process %s on %s) still lives",
        WATCH_SECONDS,
        holder,
        found.get("pid"),
        found.get("host"),
    )
    until = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        time.sleep(RENEW_SECONDS / 4)
        now = _read(holder)
        if not now:
            return
        if now != found:
            raise _refusal(holder.parent, now)
    _log.info("it does not; its lock is taken over")


def _renew(holder: epath.Path, mine: dict[str, Any], ended: threading.Event) -> None:
    """Rewrites the lock every `RENEW_SECONDS`, until it has ended or somebody else has taken it.

    That somebody has watched in vain, so this process was frozen, or cut off, for long. It ends at once: whatever it
    would still write, it would write among the files of the other run.
    """
    renewals = 0
    while not ended.wait(RENEW_SECONDS):
        try:
            found = _read(holder)
            if found and found.get("token") != mine["token"]:
                print(f"error: the lock was not renewed in time: {_refusal(holder.parent, found)}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(_LOST_EXIT_CODE)
            renewals += 1
            _write(holder, mine | {"renewals": renewals})
        except Exception as error:  # whatever the library for the bucket raises; the next time may go well
            _log.warning("%s could not be renewed (%s); trying again", holder, error)


def _who() -> dict[str, Any]:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": started}


def _write(holder: epath.Path, content: dict[str, Any]) -> None:
    holder.write_text(json.dumps(content))  # in one step: an object appears whole


def _read(holder: epath.Path) -> dict[str, Any]:
    """What is known of the holder; {} where there is none, or it has not said yet."""
    try:
        return json.loads(holder.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def _refusal(workdir: epath.Path, holder: dict[str, Any]) -> UserError:
    who = "process {pid} on {host} (started {started})".format_map(holder) if holder else "another run"
    return UserError(
        f"{workdir} is in use by {who}; wait until that run ends, or stop it, or choose another --workdir."
    )

"""Stopping in time: which signal asks for it, and how the processes of a job agree on the step to stop after."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# EX_TEMPFAIL of sysexits.h: nothing is wrong with the input, and the same command will go on from here. Launchers and
# batch systems can tell it from a crash (1, or a signal's 128 + n) and from input that cannot work (2).
RETRY_EXIT_CODE = 75

# SIGTERM comes from clouds, Kubernetes and Slurm before they take the machine away; SIGUSR1 from Slurm where one asks
# for a warning (--signal=USR1@300). Not SIGINT: Ctrl-C ends the run at once with KeyboardInterrupt, as everywhere.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Batch systems signal a process and its group, so that one request arrives twice; a person needs longer than this.
_SAME_REQUEST_SECONDS = 1.0


class Preempted(Exception):
    """The run was asked to stop and has saved; its one line says after which step and how to go on."""


class StopSignals:
    """Notes a request to stop instead of dying of it, within its `with` block.

    A second SIGTERM ends the process as if nobody had caught it. Outside the main thread, where Python does not let
    one catch signals, it does nothing.

    Attributes:
      received: the first signal, or None so far.
      received_at: when, by time.monotonic().
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self.received_at: float | None = None
        self._previous = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self.received_at = signal.Signals(number), now
        elif number == signal.SIGTERM and now - self.received_at > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class Agreement:
    """Lets all processes of a job decide alike, though a signal may reach one of them only, and clocks differ.

    `cast` before a step is dispatched, `result` when it has been: what is agreed was computed on the device before the
    step, so nobody waits for the step. With one process the device has no part in it, and the result is what it wants
    by then.

    Args:
      mesh: of the job, over devices of all processes.
      wishes: what this process wants at the moment; equally many flags, in the same order, in all processes.
      processes: of the job; None: as many as there are.
    """

    def __init__(self, mesh: Mesh, wishes: Callable[[], tuple[bool, ...]], processes: int | None = None):
        self._wishes, self._alone = wishes, (processes or jax.process_count()) == 1
        self._by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._count = mesh.devices.size
        self._mine = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
        self._any = jax.jit(lambda flags: jnp.max(flags, 0), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._cast: jax.Array | None = None

    def cast(self) -> None:
        """Starts the agreement; all processes call this at the same step."""
        if self._alone:
            return
        flags = self._wishes()
        rows = np.tile(np.array(flags, np.int32), (self._mine, 1))
        shape = (self._count, len(flags))
        self._cast = self._any(jax.make_array_from_process_local_data(self._by_device, rows, shape))

    def result(self) -> tuple[bool, ...]:
        """For each flag, whether any process had set it at the last cast; the same in all processes."""
        if self._alone:
            return self._wishes()
        return tuple(bool(flag) for flag in np.asarray(self._cast))

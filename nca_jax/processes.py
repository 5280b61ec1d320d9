"""The processes of one job: how they find each other, and what they have to agree on.

On a pod every host runs the same command; all of them run the same loop in lock step over one mesh. Each computes and
transfers its part of every array, and the first alone writes reports.
"""

import glob
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from nca_jax.errors import UserError

_ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join() -> None:
    """Waits for the other processes of the job, if there are any; to be called before anything else of jax.

    They are told by the environment variables JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID; or else, where this is a Slurm step of several tasks or a host with TPUs, found by jax itself.
    JAX_NUM_PROCESSES=1 alone says that there are none.

    Raises:
      UserError: only some of the variables are set.
    """
    # It would catch SIGTERM, which `preemption.StopSignals` does.
    jax.config.update("jax_enable_preemption_service", False)
    given = {name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    if given == {"JAX_NUM_PROCESSES": "1"}:
        return
    if given:
        if len(given) < len(_ENVIRONMENT) or not all(given[name].isdigit() for name in _ENVIRONMENT[1:]):
            raise UserError(f"of {', '.join(_ENVIRONMENT)} all must be set, the last two to numbers, or none.")
        address, count, index = (given[name] for name in _ENVIRONMENT)
        jax.distributed.initialize(address, int(count), int(index))
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 or _has_tpu():
        jax.distributed.initialize()


def _has_tpu() -> bool:
    """Whether this is a host of Cloud TPUs, and they are wanted. Asked of anything else, jax would look for one."""
    wanted = "tpu" in (os.environ.get("JAX_PLATFORMS") or "tpu")
    return wanted and bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def is_first() -> bool:
    """Whether this process writes what there is only one of."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when all processes have come here; `name` must be the same in all."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def of_first(value: Any) -> Any:
    """The first process's value, in all of them; a pytree of numbers and arrays of the same shape everywhere."""
    return multihost_utils.broadcast_one_to_all(value) if jax.process_count() > 1 else value


def in_first(action: Callable[[], Any]) -> None:
    """Does something in the first process; the others wait for it.

    Raises:
      UserError: of the action; in the other processes, that there was one.
    """
    error = None
    if is_first():
        try:
            action()
        except UserError as caught:
            error = caught  # the others are waiting
    if of_first(np.array(error is not None)):
        raise error or UserError("the first process of the job has refused to go on; its log says why.")


def place(tree: Any, shardings: Any) -> Any:
    """Arrays of the host on the devices, each process giving only the parts that its own devices hold.

    Args:
      tree: arrays that are the same in all processes.
      shardings: of the same structure.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(one, tree, shardings)


def whole(array: jax.Array) -> np.ndarray:
    """The array on the host of every process, whichever devices hold it; all processes have to call this."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
        array = jax.jit(lambda x: x, out_shardings=everywhere)(array)
    return np.asarray(array)


Sequences = tuple[tuple[int, ...], ...]


def shared_out(make: Callable[[Any], Sequences], items: Sequence[Any]) -> list[Sequences]:
    """`[make(item) for item in items]`, of which each process makes its share and tells the others.

    Args:
      make: item -> token ids, the same number of sequences for each.
      items: at least one.

    Raises:
      UserError: of `make`, in whatever process.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return [make(item) for item in items]
    error, made = None, []
    try:
        made = [make(item) for item in items[index::count]]
    except UserError as caught:
        error = caught  # the others are waiting
    failed = multihost_utils.process_allgather(np.array(error is not None)).reshape(-1)
    if error:
        raise error
    if failed.any():
        raise UserError(f"process {int(np.argmax(failed))} has refused its share of the data; its log says why.")
    lengths = np.array([[len(sequence) for sequence in sequences] for sequences in made], np.int32)
    ids = np.array([i for sequences in made for sequence in sequences for i in sequence], np.int32)
    parts = zip(_gathered(lengths.reshape(-1)), _gathered(ids), strict=True)
    found: list[Any] = [None] * len(items)
    for process, (lengths, ids) in enumerate(parts):
        sequences = [tuple(part.tolist()) for part in np.split(ids, np.cumsum(lengths)[:-1])]
        mine = range(process, len(items), count)
        each = len(sequences) // max(len(mine), 1)
        for number, item in enumerate(mine):
            found[item] = tuple(sequences[number * each : (number + 1) * each])
    return found


def _gathered(array: np.ndarray) -> list[np.ndarray]:
    """The one-dimensional array of every process, of whatever length."""
    lengths = multihost_utils.process_allgather(np.array(len(array))).reshape(-1)
    padded = np.zeros(int(lengths.max()), array.dtype)
    padded[: len(array)] = array
    everyone = multihost_utils.process_allgather(padded)
    return [row[:length] for row, length in zip(everyone, lengths, strict=True)]

"""Weights alone, as an Orbax checkpoint: what `convert import` writes, and what is in every training checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding, SingleDeviceSharding

from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, weight_table


def save_params(directory: epath.Path, params: Params) -> None:
    """Writes the weights; returns when they are committed. `directory` must not exist."""
    # Orbax refuses a limit below the largest array; without one it has a second copy of everything in memory.
    largest = max(array.nbytes for array in params.values())
    handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=1 + math.ceil(largest / 2**30))
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(params))


def weight_reader(
    directory: epath.Path,
    arch: Architecture,
    dtype: jnp.dtype = jnp.float32,
    sharding: Mapping[str, Sharding] | None = None,
    within: Sequence[str] = (),
) -> Callable[[str], jax.Array]:
    """A function that restores one weight by our name, and holds none.

    Args:
      directory: an Orbax checkpoint of a tree of arrays.
      arch: must fit it exactly.
      dtype: of the result.
      sharding: our name -> where its array goes; default: the first device.
      within: keys that lead to the dictionary of weights; ("params",) in a train state.

    Raises:
      UserError: it cannot be read, or its weights are not those of `arch`.
    """
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    table = weight_table(arch, dtype)
    try:
        found = checkpointer.metadata(directory.absolute()).item_metadata.tree
        for key in within:
            found = found[key]
        shapes = {name: tuple(array.shape) for name, array in found.items()}
    except Exception as error:  # orbax raises whatever its file formats do
        raise UserError(f"{directory} cannot be read as a checkpoint ({_first_line(error)}).") from error
    expected = {name: spec.shape for name, spec in table.items()}
    if shapes != expected:
        different = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        shown = "; ".join(f"{name}: {shapes.get(name)} there, {expected.get(name)} expected" for name in different)
        raise UserError(f"{directory} does not hold the weights that the config.json beside it describes: {shown}.")

    def read(name: str) -> jax.Array:
        where = sharding[name] if sharding else SingleDeviceSharding(jax.devices()[0])
        item = {name: jax.ShapeDtypeStruct(table[name].shape, dtype, sharding=where)}
        for key in reversed(within):
            item = {key: item}
        restore = ocp.args.PyTreeRestore(
            item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        try:
            tree = checkpointer.restore(directory.absolute(), args=restore)
        except Exception as error:
            raise UserError(f"{directory}: weight {name} cannot be read ({_first_line(error)}).") from error
        for key in within:
            tree = tree[key]
        return tree[name]

    return read


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]

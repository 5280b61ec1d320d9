"""Weights alone, as an Orbax checkpoint: what `convert import` writes, and what is in every training checkpoint.

An imported model is a tree {name: array, "layers": {"0": {name: array}}}, so that it can be read layer by layer. A
training checkpoint holds the stacked weights, as the step has them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding

from nca_jax.errors import UserError
from nca_jax.files import absolute
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import weight_table
from nca_jax.models.layers import Piece, is_stacked, layer_sharding, layer_spec, piece_names

# Where `convert import` puts the weights, beside the checkpoint's other files.
ORBAX_PARAMS = "params"


def save_pieces(directory: epath.Path, pieces: Iterable[Piece]) -> tuple[int, int]:
    """Writes the weights; returns when they are committed: (number of arrays, their bytes).

    `directory` must not exist. All pieces are held until they are written, as Orbax commits them together.
    """
    tree: dict[str, Any] = {"layers": {}}
    for name, layer, array in pieces:
        place = tree if layer is None else tree["layers"].setdefault(str(layer), {})
        place[name] = array
    # Compressing would hold gigabytes of its own (1.4 GB for a 1.7B model) and take twice the time.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(absolute(directory), args=ocp.args.PyTreeSave(tree))
    arrays = jax.tree.leaves(tree)
    return len(arrays), sum(array.nbytes for array in arrays)


def check_pieces(directory: epath.Path, arch: Architecture) -> None:
    """Raises a UserError unless `save_pieces` wrote weights of that architecture there; reads no weight."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    _check_shapes(directory, _stored_tree(checkpointer, directory), _abstract_tree(arch, jnp.float32, None))


def read_pieces(
    directory: epath.Path,
    arch: Architecture,
    dtype: jnp.dtype = jnp.float32,
    sharding: Mapping[str, Sharding] | None = None,
) -> Iterator[Piece]:
    """The weights that `save_pieces` wrote, layer by layer, in the order of `piece_names(arch, by_layer=True)`.

    Args:
      directory: of the checkpoint.
      arch: must fit it exactly.
      dtype: of the result.
      sharding: our name -> where its stack is to go; default: the first device.

    Raises:
      UserError: it cannot be read, or its weights are not those of `arch`.
    """
    expected = _abstract_tree(arch, dtype, sharding)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    _check_shapes(directory, _stored_tree(checkpointer, directory), expected)
    layers, held_layer, held = expected.pop("layers"), None, _restore(checkpointer, directory, expected)
    for name, layer in piece_names(arch, by_layer=True):
        if layer != held_layer:
            held_layer, held = layer, None
            held = _restore(checkpointer, directory, {"layers": {str(layer): layers[str(layer)]}})["layers"][str(layer)]
        yield Piece(name, layer, held.pop(name))


def stacked_reader(
    directory: epath.Path, arch: Architecture, within: Sequence[str] = ("params",)
) -> Callable[[str, int | None], np.ndarray]:
    """A function from (name, layer) to the piece of a training checkpoint, on the host.

    It holds the last weight it was asked for, all layers of it: ask in the order of `piece_names`.

    Args:
      directory: an Orbax checkpoint of a train state.
      arch: must fit it exactly.
      within: keys that lead to the dictionary of weights.

    Raises:
      UserError: as `read_pieces`.
    """
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    table = weight_table(arch)
    _check_shapes(directory, _params_of(checkpointer, directory, within), table)
    held: dict[str, np.ndarray] = {}

    def read(name: str, layer: int | None) -> np.ndarray:
        if name not in held:
            held.clear()
            # To a host array: restoring to a device would hold it twice on a machine whose device is its host.
            item: Any = {name: 0}
            for key in reversed(within):
                item = {key: item}
            tree = _restore(checkpointer, directory, item)
            for key in within:
                tree = tree[key]
            held[name] = tree[name]
        return held[name][layer] if is_stacked(table[name]) else held[name]

    return read


def read_stacked(
    directory: epath.Path, arch: Architecture, dtype: jnp.dtype, sharding: Mapping[str, Sharding]
) -> dict[str, jax.Array]:
    """The weights of a training checkpoint, stacked, each device only its part; arguments and errors as `read_pieces`,
    of which `directory` is that of the train state."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    table = weight_table(arch, dtype)
    _check_shapes(directory, _params_of(checkpointer, directory, ("params",)), table)
    weights = {name: jax.ShapeDtypeStruct(w.shape, dtype, sharding=sharding[name]) for name, w in table.items()}
    return _restore(checkpointer, directory, {"params": weights})["params"]


def _abstract_tree(arch: Architecture, dtype: jnp.dtype, sharding: Mapping[str, Sharding] | None) -> dict[str, Any]:
    """What `save_pieces` writes, as abstract arrays with the shardings that each layer's array is to have."""
    table = weight_table(arch)
    tree: dict[str, Any] = {"layers": {}}
    for name, layer in piece_names(arch):
        place = tree if layer is None else tree["layers"].setdefault(str(layer), {})
        where = layer_sharding(table[name], sharding[name] if sharding else None)
        place[name] = jax.ShapeDtypeStruct(layer_spec(table[name]).shape, dtype, sharding=where)
    return tree


def _params_of(checkpointer: ocp.Checkpointer, directory: epath.Path, within: Sequence[str]) -> Any:
    found = _stored_tree(checkpointer, directory)
    try:
        for key in within:
            found = found[key]
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory} is no checkpoint of a training run; it has no {'.'.join(within)}.") from error
    return found


def _stored_tree(checkpointer: ocp.Checkpointer, directory: epath.Path) -> Any:
    try:
        return checkpointer.metadata(absolute(directory)).item_metadata.tree
    except Exception as error:  # orbax raises whatever its file formats do
        raise UserError(f"{directory} cannot be read as a checkpoint ({_first_line(error)}).") from error


def _check_shapes(directory: epath.Path, found: Any, expected: Any) -> None:
    def shapes(tree):
        has_shape = lambda x: hasattr(x, "shape")  # noqa: E731, used once, below
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=has_shape)
        return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}

    there, wanted = shapes(found), shapes(expected)
    different = sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name))
    if different:
        shown = "; ".join(f"{name}: {there.get(name)} there, {wanted.get(name)} expected" for name in different)
        raise UserError(f"{directory} does not hold the weights that the config.json beside it describes: {shown}.")


def _restore(checkpointer: ocp.Checkpointer, directory: epath.Path, item: Any) -> Any:
    """A part of a checkpoint: leaves that are abstract arrays go to their shardings, others to the host."""

    def how(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
        return ocp.RestoreArgs(restore_type=np.ndarray)

    arguments = ocp.args.PyTreeRestore(item, restore_args=jax.tree.map(how, item), partial_restore=True)
    try:
        return checkpointer.restore(absolute(directory), args=arguments)
    except Exception as error:
        raise UserError(f"{directory} cannot be read ({_first_line(error)}).") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]

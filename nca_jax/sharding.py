"""The mesh, and where parameters, optimizer states and batches lie on it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from nca_jax.axes import RULES, named, parts
from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import weight_table
from nca_jax.train_step import Batch, Retained, View


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh over all devices, axes "data", "fsdp" and "tensor"; at most one size is -1, which means all the rest.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    names = ("data", "fsdp", "tensor")
    shape = [sizes[name] for name in names]
    count = jax.device_count()
    given = [size for size in shape if size != -1]
    known = int(np.prod(given))
    fits = min(given, default=1) >= 1 and (count % known == 0 if -1 in shape else known == count)
    if shape.count(-1) > 1 or not fits:
        raise UserError(f"mesh sizes {dict(sizes)} do not fit {count} devices; set one of them to -1.")
    shape = [count // known if s == -1 else s for s in shape]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def make_decode_mesh(mesh: Mesh, arch: Architecture, dtype: np.dtype, tensor: int, budget_gb: float) -> Mesh:
    """The mesh on which a model answers: the same devices, of which groups of a few hold the weights together.

    Nothing is gathered for a token: heads, mlp and vocabulary are split over a group, and groups share out the rows.

    Args:
      mesh: the training mesh.
      arch: the model's.
      dtype: of the weights while sampling.
      tensor: devices of a group; 0: the fewest on which the weights take at most `budget_gb` each, and if there is no
        such number, the most that divide the model.
      budget_gb: GB of weights a device.

    Raises:
      UserError: `tensor` divides the devices or a weight not.
    """
    devices = mesh.devices.reshape(-1)  # in the training mesh's order, so that arrays can move within one program

    def of(size: int) -> Mesh:
        shape = (len(devices) // size, 1, size)
        return Mesh(devices.reshape(shape), mesh.axis_names, axis_types=(AxisType.Auto,) * len(shape))

    if tensor:
        if len(devices) % tensor:
            raise UserError(
                f"config.mesh.decode_tensor {tensor} does not divide {len(devices)} devices; choose another."
            )
        params_sharding(of(tensor), arch)
        return of(tensor)
    total_gb = sum(int(np.prod(spec.shape)) for spec in weight_table(arch).values()) * np.dtype(dtype).itemsize / 1e9
    chosen = 1
    for size in range(1, len(devices) + 1):
        if len(devices) % size == 0 and _divides(of(size), arch):
            chosen = size
            if total_gb / size <= budget_gb:
                break
    return of(chosen)


def _divides(mesh: Mesh, arch: Architecture) -> bool:
    try:
        params_sharding(mesh, arch)
    except UserError:
        return False
    return True


def params_sharding(mesh: Mesh, arch: Architecture) -> dict[str, NamedSharding]:
    """Weight name -> sharding.

    Raises:
      UserError: a dimension that its mesh axes do not divide, with the sizes.
    """
    shardings = {}
    for name, spec in weight_table(arch).items():
        for size, axis in zip(spec.shape, spec.axes, strict=True):
            if size % parts(mesh, axis):
                raise UserError(
                    f"weight {name}: its {axis} dimension of {size} does not divide by {parts(mesh, axis)} devices "
                    f"({'x'.join(RULES[axis])}); choose other config.mesh sizes."
                )
        shardings[name] = named(mesh, *spec.axes)
    return shardings


def like_params(tree: Any, shardings: Mapping[str, NamedSharding], replicated: NamedSharding) -> Any:
    """Shardings for a tree that holds dicts of the parameters' names (an optimizer state); the rest is replicated."""

    def where(path, _):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return next((shardings[name] for name in names if name in shardings), replicated)

    return jax.tree_util.tree_map_with_path(where, tree)


def batch_sharding(mesh: Mesh) -> Batch:
    """The sharding of every array of a Batch: examples over the data axes, shared prefixes everywhere."""
    rows, examples = named(mesh, "batch", None), named(mesh, "batch")
    view = View(prefix_C=named(mesh, None), prompt_BxP=rows, prompt_length_B=examples)
    return Batch(view, view, rows, rows, Retained(view, rows, rows))

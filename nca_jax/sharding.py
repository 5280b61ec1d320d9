"""The mesh, and where parameters, optimizer states and batches lie on it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from nca_jax.axes import MESH_AXES, RULES, named, parts
from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import parameter_count, weight_table
from nca_jax.views import Batch, Retained, View


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The training mesh, axes `MESH_AXES`.

    Args:
      sizes: of each axis. At most one is -1, which means all devices that are left. "replica" 0 or missing means one
        replica for each slice, so that only gradients go over the network between slices.
      devices: all of which are used; None: those of all processes.

    Raises:
      UserError: the sizes do not multiply to the number of devices, or a replica would span slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    shape = [sizes.get("replica", 0) or slices, *(sizes[name] for name in MESH_AXES[1:])]
    given = [size for size in shape if size != -1]
    known, count = int(np.prod(given)), len(devices)
    fits = min(given, default=1) >= 1 and (count % known == 0 if -1 in shape else known == count)
    if shape.count(-1) > 1 or not fits:
        where = f"{count} devices" + (f" in {slices} slices" if slices > 1 else "")
        raise UserError(f"mesh sizes {dict(sizes)} do not fit {where}; set one of them to -1.")
    shape = [count // known if size == -1 else size for size in shape]
    if shape[0] % slices:
        raise UserError(
            f"config.mesh.replica {shape[0]} is no multiple of the {slices} slices, so weights would be gathered over "
            "the network between them; set it to 0, one replica for each slice."
        )
    # Two logical axes may share a physical one: without that, 8 x 2 would be refused on 4 x 4 chips.
    if slices == 1:
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        within = (shape[0] // slices, *shape[1:])
        arranged = mesh_utils.create_hybrid_device_mesh(
            within, (slices, 1, 1, 1), devices, allow_split_physical_axes=True
        )
    return _mesh(arranged)


def _mesh(devices: np.ndarray) -> Mesh:
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


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
    near = len(devices) // mesh.shape["replica"]  # a group does not span slices

    def of(size: int) -> Mesh:
        return _mesh(devices.reshape(1, len(devices) // size, 1, size))

    if tensor:
        if near % tensor:
            raise UserError(
                f"config.mesh.decode_tensor {tensor} does not divide the {near} devices of a replica; choose another."
            )
        params_sharding(of(tensor), arch)
        return of(tensor)
    total_gb = parameter_count(arch) * np.dtype(dtype).itemsize / 1e9
    chosen = 1
    for size in range(1, near + 1):
        if near % size == 0 and _divides(of(size), arch):
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
                (over,) = RULES[axis]  # a weight's dimension is split over one axis
                fine = ", ".join(str(n) for n in range(1, mesh.size + 1) if mesh.size % n == 0 and size % n == 0)
                raise UserError(
                    f"weight {name}: its {axis} dimension of {size} does not divide by {parts(mesh, axis)} devices "
                    f"({over}); set config.mesh.{over} to one of {fine}."
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

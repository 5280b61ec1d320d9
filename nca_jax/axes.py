"""The one table that says which mesh axes each logical axis is split over, and what follows from it.

Mesh axes, from the slowest network to the fastest: "replica" (across slices, over the data-centre network), "data",
"fsdp", "tensor".
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("replica", "data", "fsdp", "tensor")

# Logical axis -> mesh axes; None is replicated. Axes of weights are named in `decoder.weight_table`.
RULES: dict[str, tuple[str, ...] | None] = {
    "batch": ("replica", "data", "fsdp"),
    "layers": None,
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": None,
    "mlp": ("tensor",),
    "norm": None,
    # In the loss each device takes a part of the vocabulary, for the positions of all devices of its data group: moving
    # hidden states costs a fraction of gathering the head and reducing its float32 gradient.
    "loss_rows": ("replica", "data"),
    "head_vocab": ("tensor", "fsdp"),
    "loss_rows_whole": ("replica", "data", "tensor", "fsdp"),  # whole rows of logits, where one needs all of a row
    # Tokens of a prefix that all examples share: the work of encoding it is divided, not repeated, within a slice.
    "prefix": ("data", "fsdp"),
}


def named(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """The sharding of an array whose dimensions carry these logical axes."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] if axis else None for axis in axes)))


def parts(mesh: Mesh, axis: str | None) -> int:
    """How many devices a logical axis is split over."""
    return int(np.prod([mesh.shape[name] for name in (RULES[axis] if axis else None) or ()], dtype=int))


def constrain(mesh: Mesh | None, array: jax.Array, *axes: str | None) -> jax.Array:
    """Tells the compiler where an intermediate array lies; a dimension that its devices do not divide stays whole.

    Without a mesh, or on one device, the array is returned as it is.
    """
    if mesh is None or mesh.size == 1:
        return array
    fitting = [axis if size % parts(mesh, axis) == 0 else None for size, axis in zip(array.shape, axes, strict=True)]
    return jax.lax.with_sharding_constraint(array, named(mesh, *fitting))

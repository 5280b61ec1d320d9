"""Entries of distributions whose vocabulary is split over devices: chosen, read and left out where they lie.

Left to itself the compiler may put the whole distribution together on every device, and again for its gradient: on v5p
it does where the vocabulary is split over "tensor" and "fsdp". Without a mesh, or where its devices do not divide the
vocabulary, these are the plain functions of jax.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from nca_jax.axes import RULES, constrain, parts

_ROWS, _VOCABULARY = "loss_rows", "head_vocab"


def top_k_ids(log_p: jax.Array, k: int, mesh: Mesh | None = None) -> jax.Array:
    """The k highest entries, [..., V] -> int32 [..., k], without gradient; of equal ones the first.

    Every device gets whole rows, its share of them: one all-to-all.
    """
    log_p = jax.lax.stop_gradient(log_p)
    if not _is_split(mesh, log_p):
        return jax.lax.top_k(log_p, k)[1]
    # Said once more, or else the next layout would be taken for the distribution's own.
    log_p_nxV = constrain(mesh, log_p.reshape(-1, log_p.shape[-1]), _ROWS, _VOCABULARY)
    axis = "loss_rows_whole" if log_p_nxV.shape[0] % parts(mesh, "loss_rows_whole") == 0 else _ROWS
    ids_nxk = jax.lax.top_k(constrain(mesh, log_p_nxV, axis, None), k)[1]
    return constrain(mesh, ids_nxk, _ROWS, None).reshape(*log_p.shape[:-1], k)


def take(log_p: jax.Array, ids: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """Entries at the ids: [B, ..., V], [B, ..., k] -> [B, ..., k]."""
    if not _is_split(mesh, log_p):
        return jnp.take_along_axis(log_p, ids, axis=-1)

    def local(log_p, ids):
        here, own = _own(ids, log_p.shape[-1])
        found = jnp.take_along_axis(log_p, jnp.where(here, own, 0), axis=-1)
        # Of each id one device knows, and to the others it is 0: the sum is exact, and its gradient stays here.
        return jax.lax.psum(jnp.where(here, found, 0), RULES[_VOCABULARY])

    return _per_device(local, mesh, log_p, ids, whole=True)


def without(log_p: jax.Array, ids: jax.Array, value: float, mesh: Mesh | None = None) -> jax.Array:
    """[B, ..., V] with `value` in place of the entries at the ids [B, ..., k]."""
    if not _is_split(mesh, log_p):
        return jnp.put_along_axis(log_p, ids, value, axis=-1, inplace=False)

    def local(log_p, ids):
        V = log_p.shape[-1]
        here, own = _own(ids, V)
        padded = jnp.pad(log_p, [(0, 0)] * (log_p.ndim - 1) + [(0, 1)])  # one more, for what lies elsewhere
        return jnp.put_along_axis(padded, jnp.where(here, own, V), value, axis=-1, inplace=False)[..., :V]

    return _per_device(local, mesh, log_p, ids, whole=False)


def _is_split(mesh: Mesh | None, log_p: jax.Array) -> bool:
    return mesh is not None and parts(mesh, _VOCABULARY) > 1 and log_p.shape[-1] % parts(mesh, _VOCABULARY) == 0


def _own(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Which ids are among the `size` entries of this device, and where they are there."""
    own = ids - jax.lax.axis_index(RULES[_VOCABULARY]) * size
    return (own >= 0) & (own < size), own


def _per_device(local: Callable, mesh: Mesh, log_p: jax.Array, ids: jax.Array, whole: bool) -> jax.Array:
    """`local` on each device's part; its result is `whole` on each, or split as `log_p` is."""
    rows = RULES[_ROWS] if log_p.shape[0] % parts(mesh, _ROWS) == 0 else None
    between = [None] * (log_p.ndim - 2)
    split, all_of_them = PartitionSpec(rows, *between, RULES[_VOCABULARY]), PartitionSpec(rows, *between, None)
    run = jax.shard_map(local, mesh=mesh, in_specs=(split, all_of_them), out_specs=all_of_them if whole else split)
    return run(log_p, ids)

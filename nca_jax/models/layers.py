"""Weights one layer at a time: how they are read, written and moved, since the stack of all layers may be large.

The decoder holds each weight of the layers stacked, [L, ...]; files hold one array a layer. A *piece* is what a file
holds: (our name, layer or None for a weight outside the layers, array of one layer).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, WeightSpec, weight_table


class Piece(NamedTuple):
    """One layer of one weight, or a weight outside the layers."""

    name: str
    layer: int | None
    array: jax.Array


def is_stacked(spec: WeightSpec) -> bool:
    """Whether the weight has one array for each layer."""
    return spec.axes[0] == "layers"


def layer_spec(spec: WeightSpec) -> WeightSpec:
    """The row of one layer's array; of a weight outside the layers the row itself."""
    return spec._replace(shape=spec.shape[1:], axes=spec.axes[1:]) if is_stacked(spec) else spec


def layer_sharding(spec: WeightSpec, sharding: Sharding | None) -> Sharding:
    """Where one layer's array goes if the stack goes to `sharding`; None is the first device."""
    if sharding is None:
        return SingleDeviceSharding(jax.devices()[0])
    if is_stacked(spec) and isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def piece_names(arch: Architecture, by_layer: bool = False) -> Iterator[tuple[str, int | None]]:
    """(name, layer) of every piece: all layers of one weight together, or all weights of one layer."""
    table = weight_table(arch)
    stacked = [name for name, spec in table.items() if is_stacked(spec)]
    if by_layer:
        yield from ((name, None) for name in table if name not in stacked)
        yield from ((name, layer) for layer in range(arch.num_layers) for name in stacked)
        return
    for name in table:
        yield from ((name, layer) for layer in (range(arch.num_layers) if name in stacked else [None]))


def stack(
    pieces: Iterable[Piece], arch: Architecture, dtype: jnp.dtype, sharding: Mapping[str, Sharding] | None = None
) -> Params:
    """The decoder's parameters from all their pieces, which may come in any order.

    Args:
      pieces: of `dtype`; each is dropped as soon as it is in its place.
      arch: of the weights.
      dtype: of the weights.
      sharding: our name -> where its stack goes; None is the first device.
    """
    params, table = {}, weight_table(arch, dtype)
    for name, layer, array in pieces:
        if layer is None:
            params[name] = array
            continue
        spec = table[name]
        zeros, put = _stacking(spec.shape, spec.dtype, sharding[name] if sharding else layer_sharding(spec, None))
        params[name] = put(params[name] if name in params else zeros(), array, np.int32(layer))
        # Without waiting, reading would run ahead of the device and heap up pieces on the host.
        jax.block_until_ready(params[name])
    return {name: params[name] for name in table}


@jax.jit
def unstack(stacked: jax.Array, layer: jax.Array) -> jax.Array:
    """One layer of a stack."""
    return stacked[layer]


def pieces_of(params: Mapping[str, jax.Array]) -> Callable[[str, int | None], jax.Array]:
    """A function from (name, layer) to the piece of parameters that are in memory."""
    return lambda name, layer: params[name] if layer is None else unstack(params[name], np.int32(layer))


@cache  # weights of the same shapes, in this or another model, are not compiled again
def _stacking(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> tuple[Callable, Callable]:
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    put = jax.jit(lambda stacked, piece, layer: stacked.at[layer].set(piece), donate_argnums=0, out_shardings=sharding)
    return zeros, put


def in_turn(pieces: Iterable[Piece]) -> Callable[[str, int | None], jax.Array]:
    """A function that gives the next of the pieces, which are asked for in the order they come in."""
    iterator = iter(pieces)

    def piece(name: str, layer: int | None) -> jax.Array:
        found = next(iterator)
        if (found.name, found.layer) != (name, layer):
            raise RuntimeError(f"{name} of layer {layer} was asked for, {found.name} of layer {found.layer} came")
        return found.array

    return piece

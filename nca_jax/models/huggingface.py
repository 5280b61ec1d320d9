"""Weights between Hugging Face directories (safetensors) and the decoder's stacked arrays, both ways, streamed.

One tensor of the file is on the host at a time, and of it only what this host's devices need; each goes to its devices
in the file's layout and dtype, and is turned, converted and put at its layer there.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import PurePosixPath
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, weight_table
from nca_jax.models.layers import Piece, layer_sharding, layer_spec, piece_names, stack
from nca_jax.models.tensor_files import DTYPES, NewTensor, StoredTensor, read_blocks, read_header, read_parts
from nca_jax.processes import whole

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class NameRow(NamedTuple):
    """How one weight of ours is stored: its name, with {layer} where it is stacked, and what each dimension holds.

    A dimension is written as the axes of `weight_table` it consists of, outermost first: "heads head_dim" are the rows
    of a query projection, whose file shape is [heads * head_dim, embed].
    """

    name: str
    dims: tuple[str, ...]


def name_table(arch: Architecture) -> dict[str, NameRow]:
    """Our name -> its row, for every weight of `weight_table`."""
    layer = "model.layers.{layer}."
    rows = {
        "embedding": (_EMBEDDING, "vocab", "embed"),
        "attention_norm": (layer + "input_layernorm.weight", "norm"),
        "query": (layer + "self_attn.q_proj.weight", "heads head_dim", "embed"),
        "key": (layer + "self_attn.k_proj.weight", "kv_heads head_dim", "embed"),
        "value": (layer + "self_attn.v_proj.weight", "kv_heads head_dim", "embed"),
        "output": (layer + "self_attn.o_proj.weight", "embed", "heads head_dim"),
        "mlp_norm": (layer + "post_attention_layernorm.weight", "norm"),
        "gate": (layer + "mlp.gate_proj.weight", "mlp", "embed"),
        "up": (layer + "mlp.up_proj.weight", "mlp", "embed"),
        "down": (layer + "mlp.down_proj.weight", "embed", "mlp"),
        "final_norm": ("model.norm.weight", "norm"),
        "query_norm": (layer + "self_attn.q_norm.weight", "norm"),
        "key_norm": (layer + "self_attn.k_norm.weight", "norm"),
        "query_bias": (layer + "self_attn.q_proj.bias", "heads head_dim"),
        "key_bias": (layer + "self_attn.k_proj.bias", "kv_heads head_dim"),
        "value_bias": (layer + "self_attn.v_proj.bias", "kv_heads head_dim"),
        "head": (_HEAD, "vocab", "embed"),
    }
    return {name: NameRow(rows[name][0], rows[name][1:]) for name in weight_table(arch)}


class StoredName(NamedTuple):
    """One tensor of a checkpoint: its name and shape in the file, and which piece of our weights it is."""

    tensor: str
    shape: tuple[int, ...]
    name: str
    layer: int | None


def stored_names(arch: Architecture, by_layer: bool = False) -> Iterator[StoredName]:
    """Every tensor of a checkpoint of that architecture, in the order of `piece_names`."""
    table, rows = weight_table(arch), name_table(arch)
    for name, layer in piece_names(arch, by_layer):
        size = dict(zip(table[name].axes, table[name].shape, strict=True))
        shape = tuple(math.prod(size[axis] for axis in dim.split()) for dim in rows[name].dims)
        yield StoredName(rows[name].name.format(layer=layer), shape, name, layer)


def read_pieces(
    directory: str,
    arch: Architecture,
    dtype: jnp.dtype = jnp.float32,
    sharding: Mapping[str, Sharding] | None = None,
) -> Iterator[Piece]:
    """The weights of a directory piece by piece, each device only its own part of each.

    Args and errors as `load_params`.
    """
    stored = checked_tensors(directory, arch)
    table, rows = weight_table(arch, dtype), name_table(arch)
    for tensor, _, name, layer in stored_names(arch):
        spec = layer_spec(table[name])
        where = layer_sharding(table[name], sharding[name] if sharding else None)
        dims = rows[name].dims
        on_devices = _to_devices(stored[tensor], _stored_sharding(dims, spec.axes, where))
        piece = _converter(dims, spec.shape, spec.axes, spec.dtype, where)(on_devices)
        # Without waiting, reading would run ahead of the device and heap up tensors on the host.
        yield Piece(name, layer, jax.block_until_ready(piece))
        del on_devices, piece


def load_params(
    directory: str,
    arch: Architecture,
    dtype: jnp.dtype = jnp.float32,
    sharding: Mapping[str, Sharding] | None = None,
) -> Params:
    """Reads the weights, each device only its own part of each, in the layout of `weight_table`.

    Args:
      directory: local or gs://; holds `model.safetensors`, or `model.safetensors.index.json` and the files it names.
      arch: must fit the files exactly.
      dtype: of the result; float32 masters from bfloat16 files are exact.
      sharding: our name -> where its array goes; default: the first device.

    Raises:
      UserError: one sentence that lists every missing, unknown and misshapen tensor and every absent file.
    """
    return stack(read_pieces(directory, arch, dtype, sharding), arch, dtype, sharding)


def tensors_to_write(
    arch: Architecture,
    piece: Callable[[str, int | None], jax.Array],
    dtype: jnp.dtype,
    by_layer: bool = False,
) -> list[NewTensor]:
    """Every tensor of a Hugging Face checkpoint of these weights, made when it is written; a tied head is none.

    Args:
      arch: of the weights.
      piece: (our name, layer or None) -> array, sharded in whatever way; asked for in the order of `piece_names`.
      dtype: to be written in.
      by_layer: the order that is good for `piece`.
    """
    table, rows = weight_table(arch), name_table(arch)

    def values(name: str, layer: int | None) -> np.ndarray:
        axes = layer_spec(table[name]).axes
        return whole(_from_ours(piece(name, layer), rows[name].dims, axes, jnp.dtype(dtype)))

    return [
        NewTensor(tensor, shape, partial(values, name, layer))
        for tensor, shape, name, layer in stored_names(arch, by_layer)
    ]


def checked_tensors(directory: str, arch: Architecture) -> dict[str, StoredTensor]:
    """Where every tensor of the checkpoint lies; UserError as `load_params`."""
    path = epath.Path(directory)
    stored, absent_files = find_tensors(path)
    expected = {tensor: shape for tensor, shape, _, _ in stored_names(arch)}
    # Computed here, stored by old exporters.
    found = {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
    copied_head = found.pop(_HEAD, None) if arch.tied_head and _EMBEDDING in found else None
    problems = [f"absent file {name}" for name in absent_files]
    problems += [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unknown {name}" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        if found[name].shape != expected[name]:
            problems.append(f"{name} has shape {found[name].shape}, not {expected[name]}")
        if found[name].dtype not in DTYPES:
            problems.append(f"{name} is stored as {found[name].dtype}, not as one of {', '.join(DTYPES)}")
    if problems:
        raise UserError(f"{path} does not hold the weights its config.json describes: {'; '.join(problems)}.")
    # Some exporters write the tied head out; it must then be the embedding, or the config is wrong.
    if copied_head and not equal_tensors(copied_head, found[_EMBEDDING]):
        raise UserError(f"{path}: lm_head.weight differs from the embedding, but config.json ties them.")
    return found


def find_tensors(directory: epath.Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Every tensor in a directory's files, and the files that its index names and that are not there."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            outside = sorted(name for name in names if PurePosixPath(name).name != name or name in ("", ".", ".."))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{index} is not an index of safetensors files; download it again.") from error
        if outside:
            raise UserError(f"{index} names files outside its directory: {', '.join(outside)}; do not trust it.")
        if pickled := sorted(name for name in names if not name.endswith(".safetensors")):
            raise UserError(f"{index} names {', '.join(pickled)}, which is not safetensors; convert the weights first.")
        absent = sorted(name for name in names if not (directory / name).exists())
        tensors: dict[str, StoredTensor] = {}
        # What the files hold counts, and not what the index says of them.
        for name in sorted(names - set(absent)):
            header = read_header(directory / name)
            if twice := sorted(header.keys() & tensors.keys()):
                raise UserError(f"{directory / name} holds {', '.join(twice)} a second time; remove one of the copies.")
            tensors |= header
        return tensors, absent
    if not single.exists():
        pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern)]
        hint = "check the path"
        if pickled:
            hint = f"pickle files ({', '.join(sorted(pickled)[:3])}) are not read: convert them to safetensors first"
        raise UserError(f"{directory} has no model.safetensors and no model.safetensors.index.json; {hint}.")
    return read_header(single), []


def equal_tensors(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether dtype, shape and every bit are the same."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(np.array_equal(a, b) for a, b in zip(read_blocks(one), read_blocks(other), strict=True))


def _to_devices(tensor: StoredTensor, sharding: Sharding) -> jax.Array:
    """The tensor as it is stored, every device of this process with its part."""
    indices = {_hashable(i): i for i in sharding.addressable_devices_indices_map(tensor.shape).values()}
    parts = dict(zip(indices, read_parts(tensor, indices.values()), strict=True))
    return jax.make_array_from_callback(tensor.shape, sharding, lambda index: parts[_hashable(index)])


def _hashable(index: tuple[slice, ...]) -> tuple:
    return tuple((s.start, s.stop) for s in index)  # slices are hashable only from Python 3.12 on


@cache  # weights of the same shapes, in this or another model, are not compiled again
def _converter(
    dims: tuple[str, ...], shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype, sharding: Sharding
) -> Callable[[jax.Array], jax.Array]:
    """From a tensor as it is stored to our piece, compiled."""
    size, stored = dict(zip(axes, shape, strict=True)), _stored_axes(dims)
    order = [stored.index(axis) for axis in axes]

    def to_ours(tensor):
        return tensor.reshape([size[axis] for axis in stored]).transpose(order).astype(dtype)

    return jax.jit(to_ours, out_shardings=sharding)


def _stored_axes(dims: tuple[str, ...]) -> list[str]:
    """Our axes in the order of the file."""
    return [axis for dim in dims for axis in dim.split()]


def _stored_sharding(dims: tuple[str, ...], axes: tuple[str, ...], sharding: Sharding) -> Sharding:
    """Where the parts of the stored tensor go, so that nothing moves between devices when it becomes ours."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    over = dict(zip(axes, (*sharding.spec, *[None] * len(axes)), strict=False))
    # Of the axes that make up a dimension only the outermost may be split: each device then has whole rows.
    if any(over[axis] for dim in dims for axis in dim.split()[1:]):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return NamedSharding(sharding.mesh, PartitionSpec(*(over[dim.split()[0]] for dim in dims)))


@partial(jax.jit, static_argnames=("dims", "axes", "dtype"))
def _from_ours(piece: jax.Array, dims: tuple[str, ...], axes: tuple[str, ...], dtype) -> jax.Array:
    """The inverse of `_converter`."""
    size = dict(zip(axes, piece.shape, strict=True))
    stored = piece.transpose([axes.index(axis) for axis in _stored_axes(dims)])
    return stored.reshape([math.prod(size[axis] for axis in dim.split()) for dim in dims]).astype(dtype)

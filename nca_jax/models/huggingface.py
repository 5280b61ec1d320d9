"""Weights between Hugging Face directories (safetensors) and the decoder's stacked arrays, both ways, streamed.

One tensor of the file is on the host at a time, and of it only what this host's devices need; each goes to its devices
in the file's layout and dtype, and is turned, converted and put at its layer there.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import PurePosixPath
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, WeightSpec, weight_table
from nca_jax.models.tensor_files import DTYPES, NewTensor, StoredTensor, read_blocks, read_header, read_parts

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class NameRow(NamedTuple):
    """How one weight of ours is stored: its name, with {layer} where it is stacked, and what each dimension holds.

    A dimension is written as the axes of `weight_table` it consists of, outermost first: "heads head_dim" are the rows
    of a query projection, whose file shape is [heads * head_dim, embed].
    """

    name: str
    dims: tuple[str, ...]

    def shape(self, spec: WeightSpec) -> tuple[int, ...]:
        """The shape in the file."""
        size = dict(zip(spec.axes, spec.shape, strict=True))
        return tuple(int(np.prod([size[axis] for axis in dim.split()])) for dim in self.dims)


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


def stored_names(arch: Architecture) -> Iterator[tuple[str, str, int | None, tuple[int, ...]]]:
    """(name in the file, our name, layer or None, shape in the file) of every tensor of a checkpoint, in our order."""
    table = weight_table(arch)
    for ours, row in name_table(arch).items():
        for layer in range(arch.num_layers) if table[ours].axes[0] == "layers" else [None]:
            yield row.name.format(layer=layer), ours, layer, row.shape(table[ours])


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
    stored = checked_tensors(directory, arch)
    table, rows = weight_table(arch, dtype), name_table(arch)
    default = SingleDeviceSharding(jax.devices()[0])
    params = {}
    for tensor_name, ours, layer, _ in stored_names(arch):
        spec = table[ours]
        converter = _converter(
            rows[ours].dims, spec.shape, spec.axes, spec.dtype, sharding[ours] if sharding else default
        )
        tensor = _to_devices(stored[tensor_name], converter.stored_sharding)
        if layer is None:
            params[ours] = converter.to_ours(tensor)
        else:
            stacked = params.pop(ours) if layer else converter.zeros()
            params[ours] = converter.put_layer(stacked, tensor, jnp.int32(layer))
        # Without waiting, reading would run ahead of the device and heap up tensors on the host.
        jax.block_until_ready(params[ours])
    return params


def tensors_to_write(arch: Architecture, weight: Callable[[str], jax.Array], dtype: jnp.dtype) -> list[NewTensor]:
    """Every tensor of a Hugging Face checkpoint of these weights, made when it is written; a tied head is none.

    Args:
      arch: of the weights.
      weight: our name -> the array, sharded in whatever way. It is asked for once per weight, in the order of
        `weight_table`, and dropped before the next: who restores weights one by one never holds them all.
      dtype: to be written in.
    """
    table, rows = weight_table(arch), name_table(arch)
    held: dict[str, jax.Array] = {}

    def values(ours: str, layer: int | None) -> np.ndarray:
        if ours not in held:
            held.clear()
            held[ours] = weight(ours)
        stored = _from_ours(held[ours], jnp.int32(layer or 0), rows[ours].dims, table[ours].axes, jnp.dtype(dtype))
        return np.asarray(stored)

    return [NewTensor(name, shape, partial(values, ours, layer)) for name, ours, layer, shape in stored_names(arch)]


def checked_tensors(directory: str, arch: Architecture) -> dict[str, StoredTensor]:
    """Where every tensor of the checkpoint lies; UserError as `load_params`."""
    path = epath.Path(directory)
    stored, absent_files = find_tensors(path)
    expected = {name: shape for name, _, _, shape in stored_names(arch)}
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


class _Converter(NamedTuple):
    """Compiled functions from one kind of stored tensor to our weight."""

    stored_sharding: Sharding
    zeros: Callable[[], jax.Array]
    to_ours: Callable[[jax.Array], jax.Array]
    put_layer: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # donates the first


@cache  # weights of the same shapes, in this or another model, are not compiled again
def _converter(
    dims: tuple[str, ...], shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype, sharding: Sharding
) -> _Converter:
    size, stored = dict(zip(axes, shape, strict=True)), _stored_axes(dims)
    order = [stored.index(axis) for axis in axes if axis != "layers"]

    def to_ours(tensor):
        return tensor.reshape([size[axis] for axis in stored]).transpose(order).astype(dtype)

    def put_layer(stacked, tensor, layer):
        return stacked.at[layer].set(to_ours(tensor))

    return _Converter(
        stored_sharding=_stored_sharding(dims, axes, sharding),
        zeros=jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding),
        to_ours=jax.jit(to_ours, out_shardings=sharding),
        put_layer=jax.jit(put_layer, donate_argnums=0, out_shardings=sharding),
    )


def _stored_axes(dims: tuple[str, ...]) -> list[str]:
    """Our axes (without the layers) in the order of the file."""
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
def _from_ours(weight: jax.Array, layer: jax.Array, dims: tuple[str, ...], axes: tuple[str, ...], dtype) -> jax.Array:
    """A tensor as it is stored; `layer` counts only where the weight is stacked."""
    if axes[0] == "layers":
        weight, axes = weight[layer], axes[1:]
    size = dict(zip(axes, weight.shape, strict=True))
    weight = weight.transpose([axes.index(axis) for axis in _stored_axes(dims)])
    return weight.reshape([int(np.prod([size[axis] for axis in dim.split()])) for dim in dims]).astype(dtype)

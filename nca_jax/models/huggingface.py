"""Weights from a Hugging Face directory (safetensors, sharded or not) into the decoder's stacked arrays."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, weight_table


class NameRow(NamedTuple):
    """How one weight of ours is called in the file, its shape there, and how it becomes ours (per layer)."""

    name: str  # with {layer} where the weight is stacked
    shape: tuple[int, ...]
    to_ours: Callable[[np.ndarray], np.ndarray]


def name_table(arch: Architecture) -> dict[str, NameRow]:
    """Our name -> its row. A linear layer's file shape is [out, in], heads outermost in `out`."""
    D, F, V = arch.hidden_size, arch.mlp_size, arch.vocab_size
    H, K, Q = arch.num_heads, arch.num_kv_heads, arch.head_dim
    layer = "model.layers.{layer}."

    def into_heads(heads):  # [heads * Q, D] -> [D, heads, Q]
        return lambda w: w.reshape(heads, Q, D).transpose(2, 0, 1)

    rows = {
        "embedding": NameRow("model.embed_tokens.weight", (V, D), np.asarray),
        "attention_norm": NameRow(layer + "input_layernorm.weight", (D,), np.asarray),
        "query": NameRow(layer + "self_attn.q_proj.weight", (H * Q, D), into_heads(H)),
        "key": NameRow(layer + "self_attn.k_proj.weight", (K * Q, D), into_heads(K)),
        "value": NameRow(layer + "self_attn.v_proj.weight", (K * Q, D), into_heads(K)),
        "output": NameRow(
            layer + "self_attn.o_proj.weight", (D, H * Q), lambda w: w.reshape(D, H, Q).transpose(1, 2, 0)
        ),
        "mlp_norm": NameRow(layer + "post_attention_layernorm.weight", (D,), np.asarray),
        "gate": NameRow(layer + "mlp.gate_proj.weight", (F, D), np.transpose),
        "up": NameRow(layer + "mlp.up_proj.weight", (F, D), np.transpose),
        "down": NameRow(layer + "mlp.down_proj.weight", (D, F), np.transpose),
        "final_norm": NameRow("model.norm.weight", (D,), np.asarray),
        "query_norm": NameRow(layer + "self_attn.q_norm.weight", (Q,), np.asarray),
        "key_norm": NameRow(layer + "self_attn.k_norm.weight", (Q,), np.asarray),
        "query_bias": NameRow(layer + "self_attn.q_proj.bias", (H * Q,), lambda b: b.reshape(H, Q)),
        "key_bias": NameRow(layer + "self_attn.k_proj.bias", (K * Q,), lambda b: b.reshape(K, Q)),
        "value_bias": NameRow(layer + "self_attn.v_proj.bias", (K * Q,), lambda b: b.reshape(K, Q)),
        "head": NameRow("lm_head.weight", (V, D), np.asarray),
    }
    return {name: rows[name] for name in weight_table(arch)}


def load_params(
    directory: str,
    arch: Architecture,
    dtype: jnp.dtype = jnp.float32,
    sharding: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Params:
    """Reads the weights, each device only its own part of each, in the layout of `weight_table`.

    Args:
      directory: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names.
      arch: must fit the files exactly.
      dtype: of the result; float32 masters from bfloat16 files are exact.
      sharding: our name -> where its array goes; default: the first device.

    Raises:
      UserError: one sentence that lists every missing, unknown and misshapen tensor and every absent file.
    """
    path = Path(directory)
    file_of, absent_files = _find_tensors(path)
    files = {file: _open(file) for file in sorted(set(file_of.values()))}
    table, rows = weight_table(arch, dtype), name_table(arch)

    def slice_of(name):
        return files[file_of[name]].get_slice(name)

    expected = {}
    for ours, row in rows.items():
        stacked = table[ours].axes[0] == "layers"
        for layer in range(arch.num_layers) if stacked else [None]:
            expected[row.name.format(layer=layer)] = row.shape
    found = set(file_of)
    if arch.tied_head and {"lm_head.weight", "model.embed_tokens.weight"} <= found:
        # Some exporters write the tied head out; it must then be the embedding, or the config is wrong.
        if not np.array_equal(slice_of("lm_head.weight")[:], slice_of("model.embed_tokens.weight")[:]):
            raise UserError(f"{path}: lm_head.weight differs from the embedding, but config.json ties them.")
        found.remove("lm_head.weight")
    found -= {name for name in found if name.endswith("rotary_emb.inv_freq")}  # computed, stored by old exporters
    problems = [f"absent file {name}" for name in absent_files]
    problems += [f"missing {name}" for name in sorted(expected.keys() - found)]
    problems += [f"unknown {name}" for name in sorted(found - expected.keys())]
    for name in sorted(found & expected.keys()):
        shape = tuple(slice_of(name).get_shape())
        if shape != expected[name]:
            problems.append(f"{name} has shape {shape}, not {expected[name]}")
    if problems:
        raise UserError(f"{path} does not hold the weights its config.json describes: {'; '.join(problems)}.")

    params = {}
    for ours, row in rows.items():
        spec = table[ours]

        def read(index, row=row, spec=spec):
            if spec.axes[0] != "layers":
                return _to_dtype(row.to_ours(slice_of(row.name)[:])[index], spec.dtype)
            layers = range(*index[0].indices(spec.shape[0]))
            # Filled layer by layer: at most one tensor of the file is in memory besides the result.
            first = row.to_ours(slice_of(row.name.format(layer=layers[0]))[:])[index[1:]]
            out = np.empty((len(layers), *first.shape), spec.dtype)
            for i, layer in enumerate(layers):
                out[i] = row.to_ours(slice_of(row.name.format(layer=layer))[:])[index[1:]]
            return out

        where = sharding[ours] if sharding else jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params[ours] = jax.make_array_from_callback(spec.shape, where, read)
    return params


def _to_dtype(array: np.ndarray, dtype) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=dtype)


def _find_tensors(directory: Path) -> tuple[dict[str, Path], list[str]]:
    """Tensor name -> the file that holds it, and the files an index names that are not there."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{index} is not an index of safetensors files; download it again.") from error
        if outside := sorted(name for name in names if Path(name).name != name or name in ("", "..")):
            raise UserError(f"{index} names files outside its directory: {', '.join(outside)}; do not trust it.")
        absent = sorted(name for name in names if not (directory / name).is_file())
        # What the files hold counts, and not what the index says of them.
        files = [directory / name for name in sorted(names - set(absent))]
        return {tensor: file for file in files for tensor in _open(file).keys()}, absent  # noqa: SIM118
    if not single.exists():
        hint = "convert pickled weights to safetensors first" if list(directory.glob("*.bin")) else "check the path"
        raise UserError(f"{directory} has no model.safetensors and no model.safetensors.index.json; {hint}.")
    return dict.fromkeys(_open(single).keys(), single), []


def _open(file: Path):
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}); download it again.") from error

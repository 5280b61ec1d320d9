"""What a decoder is made of, read strictly from a Hugging Face `config.json`."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from nca_jax.errors import UserError
from nca_jax.files import read_json

_log = logging.getLogger(__name__)

# model_type -> (query/key norm, query/key/value bias). What a family fixes and its config.json does not say.
_FAMILIES = {"llama": (False, False), "qwen2": (False, True), "qwen3": (True, False)}

# Keys that would change the function the decoder computes, with the only values it is written for.
_REQUIRED_VALUES = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "pretraining_tp": (1, 0, None),
    "is_decoder": (True, False, None),
    "add_cross_attention": (False, None),
}

# Keys that describe the file, the training or the sampling, and not the function.
_IGNORED = frozenset(
    """_name_or_path architectures attention_dropout auto_map bos_token_id dtype eos_token_id initializer_range
    is_llama_config max_window_layers pad_token_id rope_interleaved sliding_window torch_dtype transformers_version
    transformers.js_config unsloth_fixed unsloth_version use_cache""".split()  # noqa: SIM905, a list of 18 lines
)

# Keys that are read below.
_READ = frozenset(
    """attention_bias head_dim hidden_size intermediate_size layer_types max_position_embeddings model_type
    num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta
    tie_word_embeddings vocab_size""".split()  # noqa: SIM905
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3 rope scaling: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a Llama/Qwen decoder. Letters are those of the shape legend in docs/design.md."""

    family: str
    vocab_size: int  # V, rows of the embedding; may be padded beyond the tokenizer's size
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # Q
    mlp_size: int  # F
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tied_head: bool
    qk_norm: bool
    qkv_bias: bool
    max_positions: int  # positions the model was trained for, prompt and response together


def load_architecture(directory: str) -> Architecture:
    """Reads `config.json` of a Hugging Face directory; UserError as `architecture_from_config`."""
    path = epath.Path(directory) / "config.json"
    if not path.exists():
        raise UserError(f"{path} does not exist; a model directory needs a config.json.")
    return architecture_from_config(read_json(path), where=str(path))


def architecture_from_config(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """The architecture a Hugging Face configuration describes.

    Args:
      config: the parsed `config.json`, as transformers 4 or 5 writes it.
      where: name of the file, for the error message.

    Raises:
      UserError: an unknown model type, a missing size, or a setting the decoder would compute wrongly.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UserError(f"{where}: model_type {family!r} is not supported; use one of {', '.join(_FAMILIES)}.")
    qk_norm, qkv_bias = _FAMILIES[family]

    for key, allowed in _REQUIRED_VALUES.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UserError(f"{where}: {key} = {config[key]!r} is not supported; only {allowed[0]!r} is.")
    # Qwen2's config.json does not carry the key although the family has q/k/v biases; elsewhere True adds an o bias.
    if config.get("attention_bias") not in (None, False):
        raise UserError(f"{where}: attention_bias = true is not supported; q/k/v biases belong to qwen2 only.")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UserError(f"{where}: layer_types has layers other than full_attention, which are not supported.")

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{where}: {key} is {value!r} but must be a positive whole number.")
        return value

    hidden_size, num_heads = size("hidden_size"), size("num_attention_heads")
    num_kv_heads = size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UserError(f"{where}: {num_heads} query heads cannot share {num_kv_heads} key/value heads evenly.")
    head_dim = size("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UserError(f"{where}: head_dim {head_dim} is odd, so rotary embeddings cannot split it in halves.")
    if config.get("rms_norm_eps") is None:
        raise UserError(f"{where}: rms_norm_eps is missing; copy it from the model's original config.json.")
    rms_norm_eps = _positive(config["rms_norm_eps"], "rms_norm_eps", where)
    theta, scaling = _rope(config, where)

    known = _IGNORED | _REQUIRED_VALUES.keys() | _READ
    if unknown := sorted(set(config) - known):
        _log.warning("%s: keys that nca_jax does not know are ignored: %s", where, ", ".join(unknown))

    return Architecture(
        family=family,
        vocab_size=size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_size=size("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=rms_norm_eps,
        # transformers' default where the key is absent is False for these three families.
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        max_positions=size("max_position_embeddings"),
    )


# transformers writes this into the dictionary where the whole head is rotated, as it is here.
_WHOLE_HEAD = ("partial_rotary_factor", 1.0)
_LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4)."""
    layouts = [config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(layout, Mapping) for layout in layouts):
        raise UserError(f"{where}: rope_scaling and rope_parameters must be dictionaries; copy them from the model.")
    settings = {**layouts[0], **layouts[1]}
    thetas = {layout["rope_theta"] for layout in (*layouts, config) if layout.get("rope_theta") is not None}
    if len(thetas) != 1:
        found = "is missing" if not thetas else f"has two values {sorted(map(str, thetas))}"
        raise UserError(f"{where}: rope_theta {found}; give it once, in rope_parameters or at the top level.")
    theta = _positive(thetas.pop(), "rope_theta", where)

    kinds = {layout[key] for layout in layouts for key in ("rope_type", "type") if layout.get(key) is not None}
    kind = kinds.pop() if len(kinds) == 1 else ("default" if not kinds else sorted(kinds))
    if kind not in ("default", "llama3"):
        raise UserError(f"{where}: rope_type {kind!r} is not supported; only 'default' and 'llama3' are.")
    known = {"rope_theta", "rope_type", "type", *(_LLAMA3_SCALING if kind == "llama3" else ())}
    if unknown := sorted(key for key in settings.keys() - known if (key, settings[key]) != _WHOLE_HEAD):
        raise UserError(f"{where}: rope settings {', '.join(unknown)} are not supported for rope_type {kind!r}.")
    if kind == "default":
        return theta, None
    if missing := [key for key in _LLAMA3_SCALING if settings.get(key) is None]:
        raise UserError(f"{where}: rope scaling 'llama3' lacks {', '.join(missing)}; copy it from the model.")
    factor, low, high, original = (_positive(settings[key], key, where) for key in _LLAMA3_SCALING)
    if not low < high:
        raise UserError(f"{where}: low_freq_factor {low} must be below high_freq_factor {high}; copy both.")
    return theta, RopeScaling(factor, low, high, int(original))


def _positive(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(f"{where}: {key} is {value!r} but must be a number above 0.")
    return float(value)

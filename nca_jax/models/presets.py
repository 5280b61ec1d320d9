"""Published architectures by name, so that planning and random weights need no download.

Sizes are those of each model's published config.json; tests compare the parameter counts with the published ones.
"""

from typing import Any

from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture, RopeScaling

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def _llama3(factor: float, **sizes: Any) -> Architecture:
    return Architecture(
        family="llama",
        num_kv_heads=8,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
        rms_norm_eps=1e-5,
        qk_norm=False,
        qkv_bias=False,
        max_positions=131_072,
        **{"vocab_size": 128_256} | sizes,
    )


def _qwen2(**sizes: Any) -> Architecture:
    return Architecture(
        family="qwen2",
        head_dim=128,
        rope_theta=1_000_000.0,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        qk_norm=False,
        qkv_bias=True,
        max_positions=32_768,
        **sizes,
    )


def _qwen3(**sizes: Any) -> Architecture:
    defaults = {"vocab_size": 151_936, "rope_theta": 1_000_000.0, "max_positions": 40_960}
    return Architecture(
        family="qwen3",
        num_kv_heads=8,
        head_dim=128,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        qk_norm=True,
        qkv_bias=False,
        **defaults | sizes,
    )


def _smollm2(**sizes: Any) -> Architecture:
    return Architecture(
        family="llama",
        num_kv_heads=3,
        rope_theta=100_000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tied_head=True,
        qk_norm=False,
        qkv_bias=False,
        max_positions=8192,
        **sizes,
    )


_QWEN3_4B = {"hidden_size": 2560, "num_layers": 36, "num_heads": 32, "mlp_size": 9728, "tied_head": True}

PRESETS = {
    "llama3_2_1b": _llama3(
        32.0, hidden_size=2048, num_layers=16, num_heads=32, head_dim=64, mlp_size=8192, tied_head=True
    ),
    "llama3_2_3b": _llama3(
        32.0, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128, mlp_size=8192, tied_head=True
    ),
    "llama3_1_8b": _llama3(
        8.0, hidden_size=4096, num_layers=32, num_heads=32, head_dim=128, mlp_size=14_336, tied_head=False
    ),
    "qwen2_5_3b": _qwen2(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        mlp_size=11_008,
        tied_head=True,
    ),
    "qwen2_5_7b": _qwen2(
        vocab_size=152_064,
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        mlp_size=18_944,
        tied_head=False,
    ),
    "qwen3_1_7b": _qwen3(hidden_size=2048, num_layers=28, num_heads=16, mlp_size=6144, tied_head=True),
    "qwen3_4b": _qwen3(**_QWEN3_4B),
    # The 2507 release has the same sizes and reaches further.
    "qwen3_4b_2507": _qwen3(rope_theta=5_000_000.0, max_positions=262_144, **_QWEN3_4B),
    "qwen3_8b": _qwen3(hidden_size=4096, num_layers=36, num_heads=32, mlp_size=12_288, tied_head=False),
    "smollm2_135m": _smollm2(
        vocab_size=49_152, hidden_size=576, num_layers=30, num_heads=9, head_dim=64, mlp_size=1536
    ),
}

_TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "mlp_size": 96, "vocab_size": 512}
# One of each family with all its traits, for trying a conversion in seconds. No such models are published.
TINY_PRESETS = {
    "tiny_llama3": _llama3(8.0, head_dim=16, tied_head=True, **_TINY | {"num_heads": 8}),
    "tiny_qwen2_5": _qwen2(num_kv_heads=2, tied_head=False, **_TINY),
    "tiny_qwen3": _qwen3(tied_head=True, **_TINY | {"num_heads": 8}),
    "tiny_smollm2": _smollm2(head_dim=16, **_TINY | {"num_heads": 9, "hidden_size": 144}),
}


def preset(name: str) -> Architecture:
    """The architecture of that name.

    Raises:
      UserError: there is none, with the names that there are.
    """
    known = PRESETS | TINY_PRESETS
    if name not in known:
        raise UserError(f"there is no preset {name!r}; choose one of {', '.join(known)}.")
    return known[name]


def to_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    """The content of a `config.json` that describes the architecture, for transformers 4 and 5.

    Args:
      arch: of one of the three families.
      dtype: of the weights beside it, such as "bfloat16".
    """
    return {
        "architectures": [_CLASSES[arch.family]],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.mlp_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": arch.rms_norm_eps,
        **computed_keys(arch, dtype),
    }


def computed_keys(arch: Architecture, dtype: str) -> dict[str, Any]:
    """The keys of `config.json` that two versions of transformers read from different places; both are written."""
    scaling = None
    if arch.rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": arch.rope_scaling.factor,
            "low_freq_factor": arch.rope_scaling.low_freq_factor,
            "high_freq_factor": arch.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": arch.rope_scaling.original_max_positions,
        }
    return {
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": arch.rope_theta},
        "tie_word_embeddings": arch.tied_head,
        "dtype": dtype,
        "torch_dtype": dtype,
    }

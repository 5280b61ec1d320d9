"""From a Llama GGUF file to an ordinary Hugging Face directory, without torch and without network.

Everything written comes from the file's own metadata, whose keys are those of the GGUF specification. Only the
pre-tokenizer is named there and not contained: `tokenizer.ggml.pre = smollm` stands for "digits one by one, then
byte-level".
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nca_jax.errors import UserError

# Keys of the `llama.` section that a file must have, and the name that each has in config.json.
_CONFIG_KEYS = {
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "llama.rope.freq_base": "rope_theta",
    "llama.rope.dimension_count": "head_dim",
}
# Keys that a file may have as long as they repeat what is known already. Any other `llama.` key (RoPE scaling, experts,
# ...) changes what the network computes, so it is refused.
_REPEATED_KEYS = {
    "llama.vocab_size": "vocab_size",
    "llama.attention.key_length": "head_dim",
    "llama.attention.value_length": "head_dim",
}
_SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_MAX_LISTED = 10


def convert_to_hf_directory(gguf_path: str | os.PathLike, output_dir: str | os.PathLike) -> Path:
    """Writes config, float32 weights and tokenizer of a Llama GGUF file as a Hugging Face directory.

    Quantised tensors are dequantised to float32 [out, in], and the row order that llama.cpp gives to the query and key
    projections is undone. `AutoTokenizer` and `LlamaForCausalLM` load the result.

    Args:
        gguf_path: the GGUF file: architecture `llama`, tokenizer `gpt2` with pre-tokenizer `smollm`.
        output_dir: the directory to create. It appears complete or not at all.

    Returns:
        `output_dir` as a Path.

    Raises:
        UserError: the file is no such GGUF file, its tensors are not exactly those of the architecture (all deviations
            are listed), or `output_dir` exists.
    """
    gguf_path, output_dir = Path(gguf_path), Path(output_dir)
    if output_dir.exists():
        raise UserError(f"{output_dir} exists already: remove it or convert {gguf_path.name} to another directory.")
    try:
        reader = gguf.GGUFReader(gguf_path)
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"cannot read {gguf_path} as a GGUF file ({error}): is the download complete?") from error

    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_convertible(metadata, gguf_path)
    config = _config(metadata, tied="output.weight" not in tensors, path=gguf_path)
    names = _name_table(config)
    _check_tensors(tensors, names, gguf_path)
    tokenizer = _tokenizer(metadata)
    weights = {hf_name: _weight(tensors[name], config) for name, (hf_name, _) in names.items()}

    output_dir.parent.mkdir(parents=True, exist_ok=True)
    # The scratch directory is private to its owner; the one inside it, which stays, gets the usual permissions.
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}.") as scratch:
        building = Path(scratch) / output_dir.name
        building.mkdir()
        # transformers reads weights only from a file that says which framework's naming it follows.
        save_file(weights, building / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(building, save_jinja_files=False)
        _write_json(building / "config.json", config)
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        _write_json(building / "generation_config.json", generation)
        # safetensors makes its file readable by the owner only, which a shared cache cannot use.
        shutil.copymode(building / "config.json", building / "model.safetensors")
        os.rename(building, output_dir)
    return output_dir


def _config(metadata: dict[str, Any], *, tied: bool, path: Path) -> dict[str, Any]:
    """The content of config.json."""
    if missing := [key for key in _CONFIG_KEYS if not isinstance(metadata.get(key), int | float)]:
        raise UserError(f"{path} has no number for {_listed(missing)}: convert the model to GGUF again.")
    known = {name: metadata[key] for key, name in _CONFIG_KEYS.items()}
    known["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
    unsupported = [
        f"{key} = {value}"
        for key, value in metadata.items()
        if key.startswith("llama.") and key not in _CONFIG_KEYS and known.get(_REPEATED_KEYS.get(key)) != value
    ]
    if unsupported:
        raise UserError(f"{path} sets what the plain Llama architecture does not have: {_listed(unsupported)}.")
    # GGUF stores the epsilon as float32; its shortest decimal form is the number that the authors wrote.
    known["rms_norm_eps"] = float(str(np.float32(known["rms_norm_eps"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **known,
        "rope_parameters": {"rope_theta": known["rope_theta"], "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **{f"{role}_token_id": token_id for role, token_id in _special_ids(metadata).items() if role != "unk"},
    }


def _name_table(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF tensor name -> (Hugging Face name, shape)."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    HQ = config["num_attention_heads"] * config["head_dim"]
    KQ = config["num_key_value_heads"] * config["head_dim"]
    table = {
        "token_embd.weight": ("model.embed_tokens.weight", (V, D)),
        "output_norm.weight": ("model.norm.weight", (D,)),
    }
    if not config["tie_word_embeddings"]:
        table["output.weight"] = ("lm_head.weight", (V, D))
    layer_table = {
        "attn_norm": ("input_layernorm", (D,)),
        "attn_q": ("self_attn.q_proj", (HQ, D)),
        "attn_k": ("self_attn.k_proj", (KQ, D)),
        "attn_v": ("self_attn.v_proj", (KQ, D)),
        "attn_output": ("self_attn.o_proj", (D, HQ)),
        "ffn_norm": ("post_attention_layernorm", (D,)),
        "ffn_gate": ("mlp.gate_proj", (F, D)),
        "ffn_up": ("mlp.up_proj", (F, D)),
        "ffn_down": ("mlp.down_proj", (D, F)),
    }
    for l in range(config["num_hidden_layers"]):
        for name, (hf_name, shape) in layer_table.items():
            table[f"blk.{l}.{name}.weight"] = (f"model.layers.{l}.{hf_name}.weight", shape)
    return table


def _check_tensors(tensors: dict[str, gguf.ReaderTensor], names: dict, path: Path) -> None:
    problems = [f"{name} is missing" for name in names if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in names]
    for name, (_, expected) in names.items():
        if name in tensors and (shape := _shape(tensors[name])) != expected:
            problems.append(f"{name} has shape {shape} instead of {expected}")
    if problems:
        raise UserError(f"{path} is not a plain Llama model: {_listed(problems)}.")


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """The shape as numpy has it; GGUF stores the fastest axis first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _weight(tensor: gguf.ReaderTensor, config: dict[str, Any]) -> np.ndarray:
    """One tensor as contiguous float32, in the row order of Hugging Face."""
    try:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UserError(f"{tensor.name} has type {tensor.tensor_type.name}, which gguf cannot dequantise.") from error
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, n_heads in heads.items():
        if f".{name}." in tensor.name:
            # llama.cpp interleaves the two halves of each head, because it rotates neighbouring pairs of rows.
            pairs = weight.reshape(n_heads, config["head_dim"] // 2, 2, weight.shape[1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    # safetensors writes the memory from the array's first byte on, whatever its strides.
    return np.ascontiguousarray(weight)


def _check_convertible(metadata: dict[str, Any], path: Path) -> None:
    """Refuses another architecture, and a tokenizer that `_tokenizer` would build wrongly."""
    fixed = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    # These may be absent; where set, they ask for tokens that this tokenizer does not add.
    off = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix")
    wrong = {key: metadata.get(key) for key, value in fixed.items() if metadata.get(key) != value}
    problems = [f"{key} is {value!r} instead of {fixed[key]!r}" for key, value in wrong.items()]
    problems += [f"{key} is True instead of False" for key in off if metadata.get(key)]
    lists = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
    special = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
    problems += [f"{key} is missing" for key in (*lists, *special) if key not in metadata]
    if problems:
        raise UserError(f"{path} is not a model that can be converted: {_listed(problems)}.")

    tokens, types, merges = (metadata[key] for key in lists)
    plain = {gguf.TokenType.NORMAL, gguf.TokenType.CONTROL}
    vocabulary = set(tokens)
    bad_merges = [merge for merge in merges if not {*merge.split(" "), merge.replace(" ", "")} <= vocabulary]
    if len(vocabulary) != len(tokens):
        problems.append(f"{len(tokens) - len(vocabulary)} tokens occur twice")
    if len(types) != len(tokens) or not set(types) <= plain:
        problems.append("token_type is not one of normal and control for each token")
    if bad_merges:
        problems.append(f"{len(bad_merges)} merges use unknown tokens, the first is {bad_merges[0]!r}")
    if out_of_range := [role for role, token_id in _special_ids(metadata).items() if token_id >= len(tokens)]:
        problems.append(f"the ids of {_listed(out_of_range)} are not in the vocabulary")
    if problems:
        raise UserError(f"{path} has a broken tokenizer: {_listed(problems)}.")


def _tokenizer(metadata: dict[str, Any]):
    """The tokenizer as a `PreTrainedTokenizerFast`."""
    from transformers import PreTrainedTokenizerFast  # takes a second to import, and only a conversion needs it

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{role}_token": tokens[token_id] for role, token_id in _special_ids(metadata).items()},
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """bos, eos, unk, pad -> token id, for those that the file has."""
    ids = {role: metadata.get(f"tokenizer.ggml.{key}") for role, key in _SPECIAL_TOKENS.items()}
    return {role: token_id for role, token_id in ids.items() if token_id is not None}


def _listed(items: list[str]) -> str:
    more = [f"and {len(items) - _MAX_LISTED} more"] if len(items) > _MAX_LISTED else []
    return ", ".join(items[:_MAX_LISTED] + more)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

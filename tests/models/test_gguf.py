"""Conversion of a tiny GGUF file, written here tensor by tensor, with known weights."""

import json
import socket
import sys

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from nca_jax.errors import UserError
from nca_jax.models import gguf as converter

L, D, H, K, Q, F = 2, 64, 4, 2, 16, 96
# "1 2" is a merge that must never apply: digits are split before BPE sees them.
MERGES = ["h e", "1 2", "Ġ t"]
TOKENS = ["<unk>", "<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "12", "Ġt"]
V = len(TOKENS)
TEMPLATE = "{% for m in messages %}{{ '<|start|>' + m['role'] + ' ' + m['content'] + '<|end|>' }}{% endfor %}"

NAMES = {
    "attn_norm": ("input_layernorm", (D,)),
    "attn_q": ("self_attn.q_proj", (H * Q, D)),
    "attn_k": ("self_attn.k_proj", (K * Q, D)),
    "attn_v": ("self_attn.v_proj", (K * Q, D)),
    "attn_output": ("self_attn.o_proj", (D, H * Q)),
    "ffn_norm": ("post_attention_layernorm", (D,)),
    "ffn_gate": ("mlp.gate_proj", (F, D)),
    "ffn_up": ("mlp.up_proj", (F, D)),
    "ffn_down": ("mlp.down_proj", (D, F)),
}
QUANTISED = {"token_embd.weight", "blk.1.attn_q.weight", "blk.1.ffn_down.weight"}


def llama_cpp_rows(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Row order of llama.cpp, written out: row i of a head's first half and row i of its second half are neighbours."""
    permuted = np.empty_like(weight)
    for head in range(n_heads):
        for i in range(Q // 2):
            permuted[head * Q + 2 * i] = weight[head * Q + i]
            permuted[head * Q + 2 * i + 1] = weight[head * Q + Q // 2 + i]
    return permuted


def make_tensors() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Weights by GGUF name, as the Hugging Face model has them, and the Hugging Face name of each."""
    rng = np.random.default_rng(0)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    shapes = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    for l in range(L):
        for name, (hf_name, shape) in NAMES.items():
            names[f"blk.{l}.{name}.weight"] = f"model.layers.{l}.{hf_name}.weight"
            shapes[f"blk.{l}.{name}.weight"] = shape
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, names


def make_metadata() -> dict:
    return {
        "llama.block_count": L,
        "llama.context_length": 128,
        "llama.embedding_length": D,
        "llama.feed_forward_length": F,
        "llama.attention.head_count": H,
        "llama.attention.head_count_kv": K,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": Q,
        "llama.vocab_size": V,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (V - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(path, tensors, metadata, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, weight in tensors.items():
        if ".attn_q." in name or ".attn_k." in name:
            weight = llama_cpp_rows(weight, H if ".attn_q." in name else K)
        if name in QUANTISED:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", make_tensors()[0], make_metadata())
    return converter.convert_to_hf_directory(path, path.parent / "tiny")


def test_every_tensor_comes_back(converted):
    tensors, names = make_tensors()
    weights = load_file(converted / "model.safetensors")
    assert set(weights) == set(names.values())  # in particular no lm_head: the head is tied
    for name, expected in tensors.items():
        weight = weights[names[name]]
        assert weight.dtype == np.float32
        if name in QUANTISED:
            # Q8_0 rounds to 1/127 of the largest value of a block; its float16 scale adds less than a tenth of that.
            assert np.abs(weight - expected).max() <= 0.6 * np.abs(expected).max() / 127, name
        else:
            np.testing.assert_array_equal(weight, expected, err_msg=name)


def test_config_states_the_metadata(converted):
    config = json.loads((converted / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": L,
        "max_position_embeddings": 128,
        "hidden_size": D,
        "intermediate_size": F,
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "head_dim": Q,
        "vocab_size": V,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_tokenizer_loads_without_network_and_torch(converted, monkeypatch):
    def no_network(*_):
        raise AssertionError("the tokenizer asked for the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert "torch" not in sys.modules
    assert len(tokenizer) == V
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)

    def pieces(text):
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert pieces("he 12 t<|end|>") == ["he", "Ġ", "1", "2", "Ġt", "<|end|>"]
    assert pieces("é") == ["Ã", "©"]
    text = "  the 2012 – dü't\n\n日本 <|start|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|start|>user he<|end|>"


def test_an_untied_head_is_kept(tmp_path):
    tensors, _ = make_tensors()
    tensors["output.weight"] = np.full((V, D), 3.0, np.float32)
    directory = converter.convert_to_hf_directory(
        write_gguf(tmp_path / "a.gguf", tensors, make_metadata()), tmp_path / "a"
    )
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(
        load_file(directory / "model.safetensors")["lm_head.weight"], tensors["output.weight"]
    )


def convert_fails(path, output_dir) -> str:
    """The sentence of the UserError, after checking that the conversion left nothing behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(UserError) as caught:
        converter.convert_to_hf_directory(path, output_dir)
    assert sorted(path.parent.iterdir()) == before
    return str(caught.value)


def test_wrong_tensors_are_listed_together(tmp_path):
    tensors, _ = make_tensors()
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(H * Q, np.float32)
    tensors["blk.0.attn_v.weight"] = np.zeros((D, K * Q), np.float32)
    message = convert_fails(write_gguf(tmp_path / "a.gguf", tensors, make_metadata()), tmp_path / "a")
    assert "blk.1.ffn_up.weight is missing" in message
    assert "blk.0.attn_q.bias is unknown" in message
    assert f"blk.0.attn_v.weight has shape ({D}, {K * Q}) instead of ({K * Q}, {D})" in message


def test_a_long_list_is_cut(tmp_path):
    metadata = make_metadata() | {"llama.block_count": L + 2}
    message = convert_fails(write_gguf(tmp_path / "a.gguf", make_tensors()[0], metadata), tmp_path / "a")
    assert message.count("is missing") == 10 and "and 8 more" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama' instead of 'gpt2'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2' instead of 'smollm'"),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.add_bos_token is True"),
        ({"tokenizer.ggml.merges": ["h e", "h x"]}, "1 merges use unknown tokens, the first is 'h x'"),
        ({"tokenizer.ggml.token_type": [3] * (V - 1)}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": V}, "the ids of eos are not in the vocabulary"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "he"]}, "1 tokens occur twice"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"llama.rope.freq_base": None}, "llama.rope.freq_base"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type = linear"),
        ({"llama.vocab_size": V + 1}, f"llama.vocab_size = {V + 1}"),
    ],
)
def test_other_metadata_is_refused(tmp_path, change, said):
    metadata = {key: value for key, value in (make_metadata() | change).items() if value is not None}
    assert said in convert_fails(write_gguf(tmp_path / "a.gguf", make_tensors()[0], metadata), tmp_path / "a")


def test_another_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", make_tensors()[0], make_metadata(), architecture="qwen2")
    assert "general.architecture is 'qwen2' instead of 'llama'" in convert_fails(path, tmp_path / "a")


@pytest.mark.parametrize("size", [0, 3, 2000, -1000])
def test_a_broken_file_is_refused(tmp_path, size):
    path = write_gguf(tmp_path / "a.gguf", make_tensors()[0], make_metadata())
    path.write_bytes(path.read_bytes()[:size])
    assert "is the download complete?" in convert_fails(path, tmp_path / "a")


def test_an_existing_directory_is_kept(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", make_tensors()[0], make_metadata())
    (tmp_path / "a").mkdir()
    assert "exists already" in convert_fails(path, tmp_path / "a")
    assert not any((tmp_path / "a").iterdir())


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    path = write_gguf(tmp_path / "a.gguf", make_tensors()[0], make_metadata())
    monkeypatch.setattr(converter, "_write_json", interrupted)  # the weights are written by then
    with pytest.raises(KeyboardInterrupt):
        converter.convert_to_hf_directory(path, tmp_path / "a")
    assert list(tmp_path.iterdir()) == [path]

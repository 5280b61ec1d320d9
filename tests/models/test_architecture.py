"""Reading config.json: what is understood, what is refused, and what is said about it."""

import json

import pytest
from conftest import GOLDEN, TINY_CONFIG

from nca_jax.errors import UserError
from nca_jax.models.architecture import RopeScaling, architecture_from_config, load_architecture

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(without=(), **changes):
    return architecture_from_config({k: v for k, v in (TINY_CONFIG | changes).items() if k not in without})


def refusal(without=(), **changes) -> str:
    with pytest.raises(UserError) as caught:
        read(without, **changes)
    return str(caught.value)


def test_sizes_and_switches():
    arch = read(rms_norm_eps=2e-5, rope_theta=5e5)
    assert (arch.vocab_size, arch.hidden_size, arch.num_layers, arch.mlp_size) == (272, 32, 2, 64)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.max_positions) == (4, 2, 16, 1024)
    assert (arch.rms_norm_eps, arch.rope_theta, arch.rope_scaling, arch.tied_head) == (2e-5, 5e5, None, True)


@pytest.mark.parametrize(
    ("family", "qk_norm", "qkv_bias"), [("llama", False, False), ("qwen2", False, True), ("qwen3", True, False)]
)
def test_a_family_fixes_its_norms_and_biases(family, qk_norm, qkv_bias):
    arch = read(model_type=family)
    assert (arch.family, arch.qk_norm, arch.qkv_bias) == (family, qk_norm, qkv_bias)


@pytest.mark.parametrize("folder", ["llama3", "qwen2", "qwen3", "smollm2"])
def test_golden_configs_are_read_without_a_warning(folder, caplog):
    arch = load_architecture(str(GOLDEN / folder))
    assert arch.head_dim == (8 if folder in ("qwen2", "smollm2") else 16)  # there it is hidden / heads
    assert arch.tied_head == (folder != "qwen2")
    assert not caplog.records


def test_head_dim_is_not_hidden_by_heads_where_it_is_given():
    """Qwen3-0.6B: 16 heads of 128 on a hidden size of 1024."""
    arch = read(model_type="qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    assert (arch.num_heads * arch.head_dim, arch.hidden_size) == (2048, 1024)


def test_optional_keys_may_be_absent_or_null():
    for change in (dict(without=("head_dim", "num_key_value_heads")), dict(head_dim=None, num_key_value_heads=None)):
        arch = read(**change)
        assert (arch.head_dim, arch.num_kv_heads) == (8, 4)
    assert not read(without=("tie_word_embeddings",)).tied_head
    nulls = ["mlp_bias", "use_sliding_window", "quantization_config", "attention_bias", "layer_types"]
    nulls += ["partial_rotary_factor", "pretraining_tp", "rope_scaling", "rope_parameters"]
    assert read(**dict.fromkeys(nulls)) == read()


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 500000},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
    ids=["transformers 4", "transformers 5", "both", "old name of the type"],
)
def test_theta_in_every_layout(settings):
    arch = read(without=() if "rope_theta" in settings else ("rope_theta",), **settings)
    assert (arch.rope_theta, arch.rope_scaling) == (500000.0, None)


def test_theta_is_never_guessed():
    assert "rope_theta is missing" in refusal(without=("rope_theta",))
    assert "rope_theta is missing" in refusal(rope_theta=None, rope_parameters={"rope_type": "default"})


def test_two_thetas_are_refused():
    for settings in ({"rope_theta": 1e4}, {"rope_theta": None, "rope_scaling": {"rope_theta": 1e4}}):
        message = refusal(**settings, rope_parameters={"rope_theta": 5e5})
        assert "rope_theta has two values ['10000.0', '500000.0']" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"rope_scaling": "linear"}, "dictionaries"),
        ({"rope_scaling": {"factor": 2.0}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "lacks factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear"}, "rope_parameters": {"rope_type": "default"}}, "linear"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_rope_settings_that_make_no_sense_or_another_function(changes, named):
    assert named in refusal(**changes)


def test_a_configuration_that_is_no_dictionary(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="list"):
        load_architecture(str(tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_llama3_scaling_in_both_layouts(settings):
    arch = read(**settings)
    assert arch.rope_theta == 5e5
    assert arch.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("key", sorted(LLAMA3.keys() - {"rope_type"}))
def test_an_incomplete_llama3_scaling_is_refused(key):
    assert key in refusal(rope_scaling={k: v for k, v in LLAMA3.items() if k != key})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_rope_scalings_are_refused(kind, key):
    assert repr(kind) in refusal(rope_scaling={key: kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"quant_method": "awq"}),
        ("partial_rotary_factor", 0.5),
        ("pretraining_tp", 2),
        ("add_cross_attention", True),
        ("rms_norm_eps", None),
        ("head_dim", 15),
        ("vocab_size", 0),
        ("hidden_size", 32.0),
        ("num_hidden_layers", None),
        ("num_attention_heads", "4"),
        ("intermediate_size", True),
        ("max_position_embeddings", -1),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(key, value):
    assert key in refusal(**{key: value})


def test_heads_that_do_not_share_evenly_are_refused():
    assert "4 query heads cannot share 3 key/value heads" in refusal(num_key_value_heads=3)


def test_unknown_keys_are_named_in_a_warning(caplog):
    read(zebra=1, attention_chunk_size=None)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "attention_chunk_size, zebra" in record.getMessage()


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_dtype_key_of_transformers_4_and_5_says_nothing_about_the_function(key, caplog):
    assert read(**{key: "bfloat16"}) == read()
    assert not caplog.records


def test_the_message_names_the_file(tmp_path):
    path = tmp_path / "config.json"
    for content, said in [
        (None, "does not exist"),
        ('{"model_type": "llama"', "is not JSON"),
        (json.dumps(TINY_CONFIG | {"mlp_bias": True}), "mlp_bias"),
    ]:
        if content is not None:
            path.write_text(content)
        with pytest.raises(UserError, match=said) as caught:
            load_architecture(str(tmp_path))
        assert str(path) in str(caught.value)

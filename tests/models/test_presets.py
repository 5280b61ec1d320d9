"""Published sizes, and the config.json that is written for them."""

import math

import pytest

from nca_jax.errors import UserError
from nca_jax.models.architecture import architecture_from_config, load_architecture
from nca_jax.models.decoder import weight_table
from nca_jax.models.presets import PRESETS, TINY_PRESETS, preset, to_config
from nca_jax.models.source import resolve

# Elements in the published safetensors files, as their model pages state them.
PUBLISHED = {
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_1_8b": 8_030_261_248,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_4b_2507": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "smollm2_135m": 134_515_008,
}


def test_parameter_counts_are_the_published_ones():
    counts = {name: sum(math.prod(s.shape) for s in weight_table(arch).values()) for name, arch in PRESETS.items()}
    assert counts == PUBLISHED


@pytest.mark.parametrize("name", PRESETS | TINY_PRESETS)
def test_the_written_config_is_read_back_as_the_same_architecture(name, caplog):
    config = to_config(preset(name), "bfloat16")
    assert architecture_from_config(config) == preset(name)
    assert not caplog.records
    # Each version of transformers finds its own keys, and alone they say the same.
    for missing in (("rope_parameters", "dtype"), ("rope_theta", "rope_scaling", "torch_dtype")):
        rest = {key: value for key, value in config.items() if key not in missing}
        assert architecture_from_config(rest) == preset(name)


def test_the_packaged_model_is_the_preset():
    try:
        directory = resolve("smollm2_135m_instruct")
    except UserError:
        pytest.skip("the packaged model is not in the cache")
    assert load_architecture(directory) == preset("smollm2_135m")


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(UserError, match=r"no preset 'gpt2'; choose one of llama3_2_1b, .*tiny_qwen3"):
        preset("gpt2")

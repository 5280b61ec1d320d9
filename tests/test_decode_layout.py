"""The layout in which a model answers: which devices hold what, and the same samples on each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY_CONFIG, take_devices

from configs import conventions
from nca_jax.assembly import answering
from nca_jax.errors import UserError
from nca_jax.models.architecture import architecture_from_config
from nca_jax.models.decoder import random_params
from nca_jax.models.presets import preset
from nca_jax.rollout import Sampling, example_keys
from nca_jax.sharding import make_decode_mesh, make_mesh, params_sharding

# Heads, mlp and vocabulary that 1, 2 and 4 devices divide.
ARCH = architecture_from_config(TINY_CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 4})
TRAINING = {"data": 1, "fsdp": 4, "tensor": 2}
B, P, R, C = 8, 5, 6, 3


def config_with(**mesh):
    config = conventions.get_config()
    config.mesh.update(TRAINING | mesh)
    config.rollout.max_new_tokens = R
    return config


def draw(decode_tensor: int):
    """Samples on that layout, and its Answering."""
    mesh = make_mesh(TRAINING)
    functions = answering(config_with(decode_tensor=decode_tensor), ARCH, (2,), 259, mesh)
    params = jax.device_put(random_params(ARCH, 0), params_sharding(mesh, ARCH))
    params = functions.layout({name: 4 * weight for name, weight in params.items()})
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 259, (B, P)).astype(np.int32)
    length = rng.integers(1, P + 1, B).astype(np.int32)
    prefix = functions.encode(params, jnp.arange(3, 3 + C))
    arguments = (params, prefix, prompt, length, np.ones(B, bool), example_keys(0, 1, jnp.arange(B)), Sampling())
    return functions, params, functions.sampler(0), arguments


@pytest.fixture(scope="module")
def alone():
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 1})
    functions = answering(config_with(), ARCH, (2,), 259, mesh)
    params = {name: 4 * weight for name, weight in random_params(ARCH, 0).items()}
    assert functions.layout(params) is params, "one device and the right dtype: nothing is copied"
    *_, arguments = draw(1)
    prefix = functions.encode(params, jnp.arange(3, 3 + C))
    return jax.device_get(functions.sampler(0)(params, prefix, *arguments[2:]))


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_samples_are_those_of_one_device(tensor, alone):
    functions, params, sample, arguments = draw(tensor)
    assert tuple(functions.mesh.shape.values()) == (1, 8 // tensor, 1, tensor)
    for name, weight in params.items():
        assert weight.sharding.is_equivalent_to(functions.sharding[name], weight.ndim), name
    # Whole along what is summed over and along the rows of other groups: no device has to ask for a part of a weight.
    assert params["query"].addressable_shards[0].data.shape == (2, 32, 8 // tensor, 16)
    rollout = jax.device_get(sample(*arguments))
    np.testing.assert_array_equal(rollout.response_BxR, alone.response_BxR)
    np.testing.assert_array_equal(rollout.mask_BxR, alone.mask_BxR)
    np.testing.assert_allclose(rollout.log_prob_BxR, alone.log_prob_BxR, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [8, 3])
def test_rows_that_do_not_divide_are_computed_all_the_same(rows, alone):
    *_, sample, (params, prefix, prompt, length, active, keys, sampling) = draw(2)
    rollout = sample(params, prefix, prompt[:rows], length[:rows], active[:rows], keys[:rows], sampling)
    np.testing.assert_array_equal(rollout.response_BxR, alone.response_BxR[:rows])


def test_the_group_is_the_smallest_that_holds_the_weights():
    mesh = make_mesh({"data": 1, "fsdp": 8, "tensor": 1})

    def size(name: str, budget: float, dtype=jnp.bfloat16) -> int:
        return make_decode_mesh(mesh, preset(name), dtype, 0, budget).shape["tensor"]

    # 3.44, 6.43 and 16.4 GB in bfloat16.
    assert [size(name, 4.0) for name in ("qwen3_1_7b", "llama3_2_3b", "qwen3_8b")] == [1, 2, 8]
    assert size("qwen3_8b", 4.2) == 4 and size("qwen3_8b", 20.0) == 1
    assert size("qwen3_1_7b", 4.0, jnp.float32) == 2
    # Two key/value heads: no more than two devices can share them, whatever the budget.
    assert size("qwen2_5_3b", 0.1) == 2
    assert size("smollm2_135m", 0.001) == 1


def test_a_group_that_cannot_be_is_refused():
    mesh = make_mesh(TRAINING)
    with pytest.raises(UserError, match="decode_tensor 3 does not divide the 8 devices"):
        make_decode_mesh(mesh, ARCH, jnp.float32, 3, 4.0)
    with pytest.raises(UserError, match="kv_heads dimension of 4 does not divide by 8"):
        make_decode_mesh(mesh, ARCH, jnp.float32, 8, 4.0)


def test_weights_are_moved_in_the_compute_dtype():
    config = config_with(decode_tensor=2)
    config.model.compute_dtype = "bfloat16"
    mesh = make_mesh(TRAINING)
    functions = answering(config, ARCH, (2,), 259, mesh)
    params = jax.device_put(random_params(ARCH, 0), params_sharding(mesh, ARCH))
    moved = functions.layout(params)
    for name in params:
        dtype = jnp.float32 if name == "final_norm" else jnp.bfloat16
        assert moved[name].dtype == dtype
        np.testing.assert_array_equal(moved[name], params[name].astype(dtype), err_msg=name)
        assert not params[name].is_deleted()

"""The decoder against torch's logits, and what must and must not change them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from flax import nnx

from nca_jax.models.architecture import load_architecture
from nca_jax.models.decoder import Past, decoder_graph, encode_prefix, random_params, weight_table
from nca_jax.models.huggingface import load_params

FAMILIES = ["llama3", "qwen2", "qwen3", "smollm2"]


@functools.cache
def golden(family):
    """Architecture, weights, tokens and torch's logits."""
    arch = load_architecture(GOLDEN / family)
    fixture = np.load(GOLDEN / family / "fixture.npz")
    return arch, load_params(GOLDEN / family, arch), jnp.asarray(fixture["tokens"]), fixture["logits"]


@functools.partial(jax.jit, static_argnames="graph")
def logits_of(params, token_BxT, graph):
    model = nnx.merge(graph, params)
    hidden_BxTxD, _ = model(token_BxT, jnp.arange(token_BxT.shape[1])[None])
    return hidden_BxTxD @ model.head_VxD.T


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_torch(family):
    arch, params, token_BxT, logits = golden(family)
    np.testing.assert_allclose(logits_of(params, token_BxT, decoder_graph(arch)), logits, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False], ids=["shared prefix", "own past"])
def test_a_prefix_and_the_rest_equal_the_whole(family, shared):
    """Also with a past of each example's own, in a cache wider than what is filled, as in a rollout."""
    arch, params, token_BxT, logits = golden(family)
    token_BxT = token_BxT[:1].repeat(2, axis=0) if shared else token_BxT
    C = 40

    @jax.jit
    def with_past(params, token_BxT):
        model = nnx.merge(decoder_graph(arch), params)
        position_1xT = jnp.arange(token_BxT.shape[1])[None]
        if shared:
            past = encode_prefix(model, token_BxT[0, :C])
        else:
            _, (k, v) = model(token_BxT[:, :C], position_1xT[:, :C])
            k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, 3), (0, 0), (0, 0)], constant_values=9.0) for x in (k, v))
            past = Past(k, v, jnp.broadcast_to(jnp.arange(C + 3) < C, (1, token_BxT.shape[1] - C, C + 3)))
        hidden_BxTxD, _ = model(token_BxT[:, C:], position_1xT[:, C:], [past])
        whole_BxTxD, _ = model(token_BxT, position_1xT)
        return hidden_BxTxD, whole_BxTxD[:, C:], hidden_BxTxD @ model.head_VxD.T

    rest, whole, rest_logits = with_past(params, token_BxT)
    np.testing.assert_allclose(rest, whole, atol=1e-5)
    np.testing.assert_allclose(rest_logits, logits[[0, 0] if shared else [0, 1]][:, C:], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_every_layer_changes_the_logits(family):
    arch, params, token_BxT, _ = golden(family)
    run = functools.partial(logits_of, token_BxT=token_BxT[:, :8], graph=decoder_graph(arch))
    before, rng = run(params), np.random.default_rng(0)
    assert {"llama3": 11, "qwen2": 15, "qwen3": 13, "smollm2": 11}[family] == len(weight_table(arch))
    for name, spec in weight_table(arch).items():
        for where in range(arch.num_layers) if spec.axes[0] == "layers" else [slice(None)]:
            noise = rng.normal(0, 0.1, params[name][where].shape)
            after = run(params | {name: params[name].at[where].add(noise)})
            # Of the last position, which every weight reaches.
            assert np.abs(after - before)[:, -1].max() > 1e-3, (name, where)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weight_table_describes_the_parameters(family):
    arch = golden(family)[0]
    table = weight_table(arch, jnp.bfloat16)
    params = jax.eval_shape(lambda: random_params(arch, 0, jnp.bfloat16))
    assert {n: (s.shape, s.dtype) for n, s in table.items()} == {n: (p.shape, p.dtype) for n, p in params.items()}
    sizes = {
        "layers": {arch.num_layers},
        "vocab": {arch.vocab_size},
        "embed": {arch.hidden_size},
        "heads": {arch.num_heads},
        "kv_heads": {arch.num_kv_heads},
        "head_dim": {arch.head_dim},
        "mlp": {arch.mlp_size},
        "norm": {arch.hidden_size, arch.head_dim},
    }
    for name, spec in table.items():
        assert len(spec.shape) == len(spec.axes), name
        assert all(size in sizes[axis] for size, axis in zip(spec.shape, spec.axes, strict=True)), name


def test_random_weights_are_drawn_apart_and_by_seed():
    arch = golden("qwen2")[0]
    params, again, other = (random_params(arch, seed) for seed in (0, 0, 1))
    for name in params:
        np.testing.assert_array_equal(params[name], again[name])
    drawn = [name for name in params if "norm" not in name and "bias" not in name]
    assert all(np.any(params[name] != other[name]) for name in drawn)
    assert np.any(params["gate"] != params["up"]) and np.any(params["key"] != params["value"])
    assert np.all(params["final_norm"] == 1) and np.all(params["query_bias"] == 0)


def test_right_padding_and_later_tokens_change_no_earlier_position():
    arch, params, token_BxT, _ = golden("qwen3")
    run = functools.partial(logits_of, params, graph=decoder_graph(arch))
    before = run(token_BxT)
    after = run(token_BxT.at[:, 50:].set(0))
    np.testing.assert_array_equal(after[:, :50], before[:, :50])
    assert np.abs(after[:, 50:] - before[:, 50:]).max() > 0.1
    np.testing.assert_allclose(run(token_BxT[:, :50]), before[:, :50], atol=1e-4)


def test_remat_policies_give_one_gradient_and_differ_in_memory():
    arch, params, token_BxT, _ = golden("qwen3")
    token_BxT = token_BxT[:, :32]

    def compiled(remat):
        graph = decoder_graph(arch, remat=remat)
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(jax.nn.log_softmax(logits_of(p, token_BxT, graph))[..., 0])))
        return gradient.lower(params).compile()

    by_policy = {remat: compiled(remat) for remat in ("none", "dots", "full")}
    memory = [program.memory_analysis().temp_size_in_bytes for program in by_policy.values()]
    assert memory == sorted(memory, reverse=True) and len(set(memory)) == 3
    none, *others = (program(params) for program in by_policy.values())
    for other in others:
        for name, gradient in none.items():
            np.testing.assert_allclose(other[name], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


def test_bfloat16_compute_keeps_float32_weights_and_norms():
    arch, params, token_BxT, logits = golden("qwen3")
    model = nnx.merge(decoder_graph(arch, jnp.bfloat16), params)
    arguments = token_BxT[:, :8], jnp.arange(8)[None]
    hidden, (k, v) = jax.jit(model)(*arguments)
    assert {hidden.dtype, k.dtype, v.dtype} == {jnp.dtype(jnp.bfloat16)} and model.head_VxD.dtype == jnp.float32
    error = np.abs(hidden.astype(jnp.float32) @ model.head_VxD.T - logits[:, :8])
    assert error.mean() < 0.02 * np.abs(logits[:, :8]).mean()
    norms = [line for line in str(jax.make_jaxpr(model)(*arguments)).splitlines() if "= rsqrt" in line]
    assert norms and all(":f32[" in line for line in norms)

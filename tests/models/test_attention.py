"""Attention against a loop over examples, heads and queries in numpy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_jax.models.attention import KeyBlock, attend, attend_own

B, T, H, Q = 2, 3, 4, 8


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def random_block(S, K, seed, shared=False, visible=None):
    batch = () if shared else (B,)
    return KeyBlock(random(*batch, S, K, Q, seed=seed), random(*batch, S, K, Q, seed=seed + 1), visible)


def naive(q_BxTxHxQ, blocks):
    """Float64; every example, query and head by itself, all blocks laid out one after the other."""
    out = np.zeros((B, T, H, Q))
    for b, t, h in np.ndindex(B, T, H):
        keys, values = [], []
        for k, v, visible in blocks:
            k, v = (np.asarray(x if x.ndim == 3 else x[b], np.float64) for x in (k, v))
            seen = slice(None) if visible is None else np.asarray(visible)[b % len(visible), t]
            head = h * k.shape[1] // H
            keys.append(k[seen, head])
            values.append(v[seen, head])
        weights = np.exp(np.concatenate(keys) @ np.asarray(q_BxTxHxQ[b, t, h], np.float64) / np.sqrt(Q))
        out[b, t, h] = weights @ np.concatenate(values) / weights.sum()
    return out


CAUSAL = jnp.tril(jnp.ones((1, T, T), bool))
PER_EXAMPLE = jnp.array([[[1, 0, 1, 0]] * T, [[0, 1, 1, 1]] * T], bool)


@pytest.mark.parametrize("K", [4, 2, 1], ids=["one key head each", "two per key head", "one key head"])
def test_one_softmax_over_all_blocks(K):
    q = random(B, T, H, Q, seed=9)
    blocks = [
        random_block(5, K, 10, shared=True),
        random_block(4, K, 20, visible=PER_EXAMPLE),
        random_block(T, K, 30, visible=CAUSAL),
    ]
    np.testing.assert_allclose(jax.jit(attend)(q, blocks), naive(q, blocks), atol=1e-5)


def test_a_shared_block_equals_its_keys_repeated_for_every_example():
    """In values, and in the gradient, which adds up over the examples."""
    q, own = random(B, T, H, Q, seed=9), random_block(T, 2, 30, visible=CAUSAL)
    visible = jnp.array([[[1, 1, 0, 1, 1]] * T, [[0, 1, 1, 1, 0]] * T], bool)
    shared = random_block(5, 2, 10, shared=True)

    def run(repeat):
        def loss(k, v):
            if repeat:
                k, v = (jnp.broadcast_to(x, (B, *x.shape)) for x in (k, v))
            out = attend(q, [KeyBlock(k, v, visible), own])
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(shared.k, shared.v)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), run(False), run(True))


def test_a_query_that_sees_nothing_is_finite_in_value_and_gradient():
    visible = jnp.ones((B, T, 4), bool).at[1, 2].set(False)

    def loss(q, k, v):
        out = attend(q, [KeyBlock(k, v, visible)])
        return (out**2).sum(), out

    arguments = random(B, T, H, Q), random(B, 4, 2, Q, seed=1), random(B, 4, 2, Q, seed=2)
    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arguments)
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    mean = np.repeat(np.asarray(arguments[2][1]).mean(axis=0), 2, axis=0)
    np.testing.assert_allclose(out[1, 2], mean, atol=1e-6)
    np.testing.assert_array_equal(gradients[0][1, 2], 0)


def test_an_invisible_key_has_no_part_in_value_or_gradient():
    q, own = random(B, T, H, Q, seed=9), random_block(T, 2, 30, visible=CAUSAL)
    hidden = random_block(4, 2, 10, visible=jnp.zeros((1, T, 4), bool))
    np.testing.assert_allclose(attend(q, [hidden, own]), attend(q, [own]), atol=1e-6)
    loss = lambda k: (attend(q, [KeyBlock(k, hidden.v, hidden.visible), own]) ** 2).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(hidden.k)
    np.testing.assert_array_equal(gradient, 0)


def test_bfloat16_queries_give_bfloat16_from_float32_scores_and_softmax():
    """Said by the program: a CPU may keep more digits than it was asked for."""
    q, k = jnp.ones((1, 1, H, Q), jnp.bfloat16), jnp.ones((1, 1024, 2, Q), jnp.bfloat16)
    out = attend(q, [KeyBlock(k, k)])
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), 1, atol=2**-7)
    program = str(jax.make_jaxpr(attend)(q, [KeyBlock(k, k)]))
    assert "preferred_element_type=float32" in program and "f32[2,1,2,1024] = exp" in program


@pytest.mark.parametrize("tokens", [1, 128, 300])
def test_chunks_of_queries_give_what_one_piece_gives(tokens):
    """In values and gradients, behind a block that is shared and one whose visible keys differ by example and query."""
    q, own = random(B, tokens, H, Q, seed=9), (random(B, tokens, 2, Q, seed=seed) for seed in (30, 31))
    visible = jnp.asarray(np.random.default_rng(0).integers(0, 2, (B, tokens, 4)), bool)
    past = [random_block(5, 2, 10, shared=True), random_block(4, 2, 20, visible=visible)]

    def run(chunked):
        def loss(q, past_kv, k, v):
            past = [KeyBlock(*kv, mask) for kv, mask in zip(past_kv, (None, visible), strict=True)]
            out = attend_own(q, past, k, v, chunked=chunked)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))

    arguments = (q, [(block.k, block.v) for block in past], *own)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), run(True)(*arguments), run(False)(*arguments)
    )


def test_a_chunk_has_no_scores_of_later_tokens():
    q, own = random(B, 300, H, Q), random(B, 300, 2, Q)
    program = str(jax.make_jaxpr(lambda q, own: attend_own(q, [], own, own))(q, own))
    scores = {tuple(map(int, shape)) for shape in re.findall(r"f32\[2,2,(\d+),(\d+)\] = exp", program)}
    assert scores == {(256, 128), (256, 256), (88, 300)}
    program = str(jax.make_jaxpr(lambda q, own: attend_own(q, [], own, own, chunked=False))(q, own))
    assert "f32[2,2,600,300] = exp" in program

"""Attention of queries to several blocks of keys under one softmax."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Queries of one chunk, and the most chunks: each is a piece of the program, which has to be compiled.
CHUNK, MOST_CHUNKS = 128, 16


class KeyBlock(NamedTuple):
    """Keys and values that queries look at.

    `k` and `v` are [B, S, K, Q], or [S, K, Q] when all examples of the batch share them (a context prefix): shared
    blocks are broadcast by the matrix product and never copied per example. `visible` is bool [B, T, S] or [1, T, S],
    which keys each query sees; None means all of them.
    """

    k: jax.Array
    v: jax.Array
    visible: jax.Array | None = None


def attend(q_BxTxHxQ: jax.Array, blocks: Sequence[KeyBlock]) -> jax.Array:
    """Grouped-query softmax attention in plain XLA; query head h reads key head h // (H / K).

    Scores and softmax are float32. A query that sees no key at all gets the mean of the values: finite, never NaN.

    Key heads lead, and scores of the blocks stay apart: those of a shared block are then one plain product for each key
    head, of all its queries, whose result is neither transposed nor copied.

    Returns:
      [B, T, H, Q] in the dtype of the queries.
    """
    B, T, H, Q = q_BxTxHxQ.shape
    K = blocks[0].k.shape[-2]
    G = H // K
    q_KxBxTxGxQ = jnp.moveaxis(q_BxTxHxQ.reshape(B, T, K, G, Q) * (Q**-0.5), 2, 0)
    q_KxBxMxQ = q_KxBxTxGxQ.reshape(K, B, T * G, Q)  # M: all queries of a key head

    scores = []
    for k, _, visible in blocks:
        block_KxBxMxS = _by_key_head(q_KxBxMxQ, k, "sq")
        if visible is not None:
            # The lowest finite number, not -inf: a fully masked row then has finite values and gradients.
            seen_BxMxS = jnp.repeat(visible, G, axis=1)
            block_KxBxMxS = jnp.where(seen_BxMxS, block_KxBxMxS, jnp.finfo(jnp.float32).min)
        scores.append(block_KxBxMxS)
    # The highest score cancels out of the result, so no gradient goes through it.
    highest_KxBxMx1 = functools.reduce(jnp.maximum, (block.max(-1, keepdims=True) for block in scores))
    highest_KxBxMx1 = jax.lax.stop_gradient(highest_KxBxMx1)

    total_KxBxMx1, out_KxBxMxQ = 0.0, 0.0
    for (_, v, _), block_KxBxMxS in zip(blocks, scores, strict=True):
        weights_KxBxMxS = jnp.exp(block_KxBxMxS - highest_KxBxMx1)
        total_KxBxMx1 += weights_KxBxMxS.sum(-1, keepdims=True)
        out_KxBxMxQ += _by_key_head(weights_KxBxMxS.astype(q_BxTxHxQ.dtype), v, "qs")
    out_KxBxTxGxQ = (out_KxBxMxQ / total_KxBxMx1).reshape(K, B, T, G, Q)
    return jnp.moveaxis(out_KxBxTxGxQ, 0, 2).reshape(B, T, H, Q).astype(q_BxTxHxQ.dtype)


def _by_key_head(x_KxBxMxX: jax.Array, block: jax.Array, axes: str) -> jax.Array:
    """Products [K, B, M, Y] in float32 of rows and the keys or values [(B,) S, K, Q] of their head.

    `axes` names Y and X: "sq" for scores, "qs" for weighted values.
    """
    out, summed = axes
    if block.ndim == 4:
        equation = f"kbm{summed},bskq->kbm{out}"
        return jnp.einsum(equation, x_KxBxMxX, block, preferred_element_type=jnp.float32)
    # As many axes as a matrix product has: with more, the backward pass copies the scores.
    K, B, M, X = x_KxBxMxX.shape
    x_KxNxX = x_KxBxMxX.reshape(K, B * M, X)
    out_KxNxY = jnp.einsum(f"kn{summed},skq->kn{out}", x_KxNxX, block, preferred_element_type=jnp.float32)
    return out_KxNxY.reshape(K, B, M, -1)


def attend_own(
    q_BxTxHxQ: jax.Array, past: Sequence[KeyBlock], k_BxTxKxQ: jax.Array, v_BxTxKxQ: jax.Array, chunked: bool = True
) -> jax.Array:
    """`attend` to the past and causally to the tokens themselves, a chunk of queries after the other.

    A chunk does not look at tokens behind its last one, which are half of the work, and its scores are few enough to
    stay near the processor (`benchmarks/arrangement.py --only=attention`).

    Args:
      chunked: False where T is divided over devices, which a chunk would not be.
    """
    T = q_BxTxHxQ.shape[1]
    size = max(CHUNK, -(-T // MOST_CHUNKS)) if chunked else T
    outputs = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        before = [KeyBlock(k, v, visible if visible is None else visible[:, start:stop]) for k, v, visible in past]
        causal = jnp.arange(stop) <= jnp.arange(start, stop)[:, None]
        own = KeyBlock(k_BxTxKxQ[:, :stop], v_BxTxKxQ[:, :stop], causal[None])
        outputs.append(attend(q_BxTxHxQ[:, start:stop], [*before, own]))
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]

"""Attention of queries to several blocks of keys under one softmax."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


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

    Returns:
      [B, T, H, Q] in the dtype of the queries.
    """
    B, T, H, Q = q_BxTxHxQ.shape
    K = blocks[0].k.shape[-2]
    q_BxTxKxGxQ = q_BxTxHxQ.reshape(B, T, K, H // K, Q) * (Q**-0.5)

    scores = []
    for k, _, visible in blocks:
        keys = "skq" if k.ndim == 3 else "bskq"
        block = jnp.einsum(f"btkgq,{keys}->bkgts", q_BxTxKxGxQ, k, preferred_element_type=jnp.float32)
        if visible is not None:
            # The lowest finite number, not -inf: a fully masked row then has finite values and gradients.
            block = jnp.where(visible[:, None, None], block, jnp.finfo(jnp.float32).min)
        scores.append(block)
    weights_BxKxGxTxS = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BxTxHxQ.dtype)

    out_BxTxKxGxQ, start = 0, 0
    for _, v, _ in blocks:
        values = "skq" if v.ndim == 3 else "bskq"
        stop = start + v.shape[-3]
        out_BxTxKxGxQ += jnp.einsum(f"bkgts,{values}->btkgq", weights_BxKxGxTxS[..., start:stop], v)
        start = stop
    return out_BxTxKxGxQ.reshape(B, T, H, Q)

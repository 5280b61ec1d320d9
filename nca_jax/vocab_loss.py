"""From hidden states to per-token divergences, without an array of [tokens, vocabulary] over all tokens.

Response positions are taken in chunks; the logits of a chunk are computed, used and dropped, and computed again in the
backward pass. What is alive at one time is [chunk, V] for each of the (at most three) distributions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nca_jax import objectives
from nca_jax.objectives import Support


class Distribution(NamedTuple):
    """A next-token distribution before its head is applied: softmax(hidden @ head.T / temperature).

    `head_VxD` may have more rows than the tokenizer has tokens (padding); they are cut off before the softmax.
    """

    hidden_NxD: jax.Array
    head_VxD: jax.Array


def token_divergences(
    student: Distribution,
    teacher: Distribution,
    anchored: Distribution | None,
    valid_N: jax.Array,
    *,
    kind: str,
    support: Support,
    temperature: jax.Array | float,
    vocab_size: int,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
    """The two terms of the objective at each of N positions, float32, 0 where `valid_N` is false.

    Args:
      student: q_x, without the context; gets gradient from the first term only.
      teacher: f, with the context; never gets gradient.
      anchored: q_c, the student with the context; gets gradient from the second term only. None: no second term.
      valid_N: positions that hold a response token.
      kind: divergence of the first term, see `objectives.divergence`.
      support: for both terms; a top-k is that of q_x (the no-context view's ids).
      temperature: divides all logits before the softmax.
      vocab_size: the tokenizer's size, at most the rows of any head.
      chunk_size: positions whose logits are alive at one time.

    Returns:
      opd_N, D(q_x, f); and anchor_N, KL(stop_gradient(q_x) || q_c), zeros without `anchored`.
    """
    heads = [d.head_VxD[:vocab_size] for d in (student, teacher, anchored) if d is not None]
    hidden = [d.hidden_NxD for d in (student, teacher, anchored) if d is not None]
    N = valid_N.shape[0]
    chunk_size = min(chunk_size, N)
    padding = -N % chunk_size

    def in_chunks(x):
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunk_size, *x.shape[1:])

    @jax.checkpoint
    def of_chunk(heads, hidden_x, valid_n):
        # Zeros in place of unused positions: whatever stood there cannot reach a gradient, not even as 0 * NaN.
        hidden_x = [jnp.where(valid_n[:, None], h, 0) for h in hidden_x]
        log_p = []
        for hidden_nxD, head_VxD in zip(hidden_x, heads, strict=True):
            head_VxD = head_VxD.astype(hidden_nxD.dtype)
            logits_nxV = jnp.einsum("nd,vd->nv", hidden_nxD, head_VxD, preferred_element_type=jnp.float32)
            log_p.append(objectives.log_probabilities(logits_nxV, temperature))
        if support.kind == "top_k":
            ids_nxk = objectives.top_k_ids(log_p[0], min(support.k, vocab_size))
            log_p = [objectives.restrict(lp, ids_nxk, support.tail) for lp in log_p]
        opd_n = objectives.divergence(kind, log_p[0], jax.lax.stop_gradient(log_p[1]))
        anchor_n = jnp.zeros_like(opd_n)
        if anchored is not None:
            anchor_n = objectives.kl(jax.lax.stop_gradient(log_p[0]), log_p[2])
        return jnp.where(valid_n, opd_n, 0.0), jnp.where(valid_n, anchor_n, 0.0)

    chunks = ([in_chunks(h) for h in hidden], in_chunks(valid_N))
    _, (opd, anchor) = jax.lax.scan(lambda _, chunk: (None, of_chunk(heads, *chunk)), None, chunks)
    return opd.reshape(-1)[:N], anchor.reshape(-1)[:N]

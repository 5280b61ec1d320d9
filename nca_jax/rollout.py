"""Sampling with a key/value cache: prefill and decode under one jit, rows shared out over the model's mesh."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nca_jax.axes import constrain
from nca_jax.models.decoder import Params, Past
from nca_jax.objectives import log_probabilities


class Rollout(NamedTuple):
    """Sampled responses, right padded with 0.

    `mask_BxR` is true up to and including the first token of the EOS set; `truncated_B` says that none came within R
    tokens. `log_prob_BxR` is under softmax(logits / temperature) before top-k and top-p (temperature 1 for greedy
    sampling), 0 where masked.
    """

    response_BxR: jax.Array
    mask_BxR: jax.Array
    log_prob_BxR: jax.Array
    truncated_B: jax.Array


class Sampling(NamedTuple):
    """Values that may change between calls without a new compilation. Temperature 0 is greedy."""

    temperature: jax.Array | float = 1.0
    top_p: jax.Array | float = 1.0


def example_keys(seed: int, step: int | jax.Array, example_index_B: jax.Array) -> jax.Array:
    """One key per example, from (seed, step, index) alone: the same sample whatever the batch it is drawn in."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(step_key, example_index_B)


def response_mask(response_BxR: jax.Array, eos_ids: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Mask up to and including each row's first EOS, and whether there was none (`truncated_B`).

    Only EOS tokens count: padding that follows is to the right of one, whatever its id.
    """
    is_eos_BxR = jnp.isin(response_BxR, jnp.asarray(eos_ids))
    ended_before_BxR = jnp.cumsum(is_eos_BxR, axis=1) - is_eos_BxR > 0
    return ~ended_before_BxR, ~is_eos_BxR.any(axis=1)


def make_sampler(
    graph: nnx.GraphDef, *, max_new_tokens: int, eos_ids: Sequence[int], vocab_size: int, top_k: int = 0
) -> Callable[..., Rollout]:
    """Compiles once per shape of its arrays, and not for other lengths, temperatures, top-p or inactive rows.

    Args:
      graph: the decoder without weights.
      max_new_tokens: R, the longest response.
      eos_ids: any of them ends a response.
      vocab_size: the tokenizer's size; ids beyond it are never sampled.
      top_k: sample among so many most probable tokens only; 0 means all.

    Returns:
      sample(params, prefix, prompt_BxP, prompt_length_B, active_B, key_B, sampling) -> Rollout. `prefix` is a list with
      the shared `Past` or empty; `active_B` false gives an empty response and costs no decode step of its own. Every
      process gives all rows and gets all responses, whatever part of them its devices compute: they are small.
    """
    R = max_new_tokens
    eos_E = jnp.asarray(sorted(set(eos_ids)), jnp.int32)

    @jax.jit
    def sample(params: Params, prefix: list[Past], prompt_BxP, prompt_length_B, active_B, key_B, sampling: Sampling):
        model = nnx.merge(graph, params)
        B, P = prompt_BxP.shape
        rows = partial(constrain, model.mesh)
        prompt_BxP, prompt_length_B = rows(prompt_BxP, "batch", None), rows(prompt_length_B, "batch")
        start = prefix[0].k.shape[1] if prefix else 0

        hidden_BxPxD, (k_LxBxPxKxQ, v_LxBxPxKxQ) = model(prompt_BxP, start + jnp.arange(P)[None], prefix)
        last_Bx1xD = jnp.take_along_axis(hidden_BxPxD, (prompt_length_B - 1)[:, None, None], axis=1)
        own_prompt_Bx1xP = (jnp.arange(P) < prompt_length_B[:, None])[:, None]
        past = [*prefix, Past(k_LxBxPxKxQ, v_LxBxPxKxQ, own_prompt_Bx1xP)]
        cache_shape = (*k_LxBxPxKxQ.shape[:2], R, *k_LxBxPxKxQ.shape[3:])

        def choose(carry, hidden_Bx1xD):
            """Draws token t of every row that is not done and appends it."""
            logits_BxV = jnp.einsum(
                "bd,vd->bv",
                hidden_Bx1xD[:, 0],
                model.head_VxD[:vocab_size].astype(hidden_Bx1xD.dtype),
                preferred_element_type=jnp.float32,
            )
            t, done_B = carry["t"], carry["done_B"]
            keys = jax.vmap(jax.random.fold_in, (0, None))(key_B, t)
            token_B, log_prob_B = draw(logits_BxV, keys, sampling, top_k)
            return carry | {
                "t": t + 1,
                "token_B": token_B,
                "done_B": done_B | jnp.isin(token_B, eos_E),
                "response_BxR": carry["response_BxR"].at[:, t].set(jnp.where(done_B, 0, token_B)),
                "mask_BxR": carry["mask_BxR"].at[:, t].set(~done_B),
                "log_prob_BxR": carry["log_prob_BxR"].at[:, t].set(jnp.where(done_B, 0.0, log_prob_B)),
            }

        def decode(carry):
            """Feeds token t - 1, whose keys and values go to slot t - 1 of the response cache."""
            t = carry["t"]
            written_1x1xR = (jnp.arange(R) < t - 1)[None, None]
            hidden_Bx1xD, (k, v) = model(
                carry["token_B"][:, None],
                (start + prompt_length_B + t - 1)[:, None],
                [*past, Past(carry["k_LxBxRxKxQ"], carry["v_LxBxRxKxQ"], written_1x1xR)],
            )
            carry["k_LxBxRxKxQ"] = jax.lax.dynamic_update_slice_in_dim(carry["k_LxBxRxKxQ"], k, t - 1, axis=2)
            carry["v_LxBxRxKxQ"] = jax.lax.dynamic_update_slice_in_dim(carry["v_LxBxRxKxQ"], v, t - 1, axis=2)
            return choose(carry, hidden_Bx1xD)

        empty = {
            "t": jnp.int32(0),
            "token_B": jnp.zeros(B, jnp.int32),
            "done_B": ~active_B,
            "response_BxR": jnp.zeros((B, R), jnp.int32),
            "mask_BxR": jnp.zeros((B, R), bool),
            "log_prob_BxR": jnp.zeros((B, R), jnp.float32),
            "k_LxBxRxKxQ": jnp.zeros(cache_shape, k_LxBxPxKxQ.dtype),
            "v_LxBxRxKxQ": jnp.zeros(cache_shape, k_LxBxPxKxQ.dtype),
        }
        end = jax.lax.while_loop(lambda c: (c["t"] < R) & ~c["done_B"].all(), decode, choose(empty, last_Bx1xD))
        drawn = Rollout(end["response_BxR"], end["mask_BxR"], end["log_prob_BxR"], active_B & ~end["done_B"])
        return Rollout(*(rows(x, *[None] * x.ndim) for x in drawn))

    return sample


def draw(logits_BxV: jax.Array, key_B: jax.Array, sampling: Sampling, top_k: int = 0) -> tuple[jax.Array, jax.Array]:
    """One token per row and its log-probability at the sampling temperature; every row has its own key.

    Filters in the usual order (temperature, top-k, top-p), each on what the one before left. The most probable token is
    never filtered out.
    """
    greedy = sampling.temperature == 0
    log_p_BxV = log_probabilities(logits_BxV, jnp.where(greedy, 1.0, sampling.temperature))

    def filtered(log_p_BxV):
        if top_k:
            kth_Bx1 = jax.lax.top_k(log_p_BxV, min(top_k, log_p_BxV.shape[-1]))[0][:, -1:]
            log_p_BxV = jnp.where(log_p_BxV < kth_Bx1, -jnp.inf, log_p_BxV)
        return jax.lax.cond(sampling.top_p < 1.0, lambda lp: _nucleus(lp, sampling.top_p), lambda lp: lp, log_p_BxV)

    sampled_B = jax.vmap(jax.random.categorical)(key_B, filtered(log_p_BxV))
    token_B = jnp.where(greedy, jnp.argmax(log_p_BxV, axis=-1), sampled_B).astype(jnp.int32)
    return token_B, jnp.take_along_axis(log_p_BxV, token_B[:, None], axis=-1)[:, 0]


def _nucleus(log_p_BxV: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps the most probable tokens until their (renormalised) mass reaches top_p; the others become -inf."""
    descending_BxV = -jnp.sort(-log_p_BxV, axis=-1)
    p_BxV = jax.nn.softmax(descending_BxV, axis=-1)
    mass_before_BxV = jnp.cumsum(p_BxV, axis=-1) - p_BxV
    lowest_Bx1 = jnp.min(jnp.where(mass_before_BxV < top_p, descending_BxV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(log_p_BxV < lowest_Bx1, -jnp.inf, log_p_BxV)

"""Sampling with a key/value cache: prefill and decode under one jit, rows shared out over the model's mesh."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nca_jax.axes import constrain
from nca_jax.models.decoder import Decoder, Params, Past
from nca_jax.objectives import log_probabilities

# Tokens of the first block of the response cache. A smaller one reads less, and makes a larger program.
_FIRST_BLOCK = 64
# Tokens of a row among which top-p looks before it sorts the whole vocabulary.
_CANDIDATES = 4096
# More than float32 sums over a vocabulary are off by: where tokens hold so much more than top-p, none after them
# counts.
_MARGIN = 1e-5


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


def prefill(
    model: Decoder, prefix: Sequence[Past], prompt_BxP: jax.Array, prompt_length_B: jax.Array
) -> tuple[jax.Array, Past]:
    """The prompts behind the shared prefix, in one pass.

    Returns:
      last_Bx1xD, the hidden state that predicts each row's first token, and the prompts' keys and values, of which
      `visible` shows each row its own.
    """
    P = prompt_BxP.shape[1]
    start = prefix_length(prefix)
    hidden_BxPxD, (k_LxBxPxKxQ, v_LxBxPxKxQ) = model(prompt_BxP, start + jnp.arange(P)[None], prefix)
    last_Bx1xD = jnp.take_along_axis(hidden_BxPxD, (prompt_length_B - 1)[:, None, None], axis=1)
    return last_Bx1xD, Past(k_LxBxPxKxQ, v_LxBxPxKxQ, own_tokens(P, prompt_length_B))


def own_tokens(P: int, prompt_length_B: jax.Array) -> jax.Array:
    """Which of P prompt tokens are a row's own, [B, 1, P]."""
    return (jnp.arange(P) < prompt_length_B[:, None])[:, None]


def prefix_length(prefix: Sequence[Past]) -> int:
    """Tokens of the shared prefix, a list of one or none."""
    return prefix[0].k.shape[1] if prefix else 0


def next_logits(model: Decoder, hidden_Bx1xD: jax.Array, vocab_size: int) -> jax.Array:
    """Float32 logits [B, vocab_size] of the token that follows; the head's padding beyond has none."""
    return jnp.einsum(
        "bd,vd->bv",
        hidden_Bx1xD[:, 0],
        model.head_VxD[:vocab_size].astype(hidden_Bx1xD.dtype),
        preferred_element_type=jnp.float32,
    )


def block_sizes(R: int, first: int) -> list[int]:
    """Sizes that add up to R: `first`, then always as many as there are already, then what is left."""
    sizes = [min(first, R)]
    while sum(sizes) < R:
        sizes.append(min(sum(sizes), R - sum(sizes)))
    return sizes


def make_sampler(
    graph: nnx.GraphDef,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    vocab_size: int,
    top_k: int = 0,
    first_block: int = _FIRST_BLOCK,
    candidates: int = _CANDIDATES,
) -> Callable[..., Rollout]:
    """Compiles once per shape of its arrays, and not for other lengths, temperatures, top-p or inactive rows.

    The response's keys and values lie in blocks, each as large as those before it together, and there is one loop for
    each block: a step reads the blocks that have begun, so at most twice what is filled (or the first block), and
    shapes stay static. A loop of dynamic length inside of attention reads less still, but the scan over layers then
    copies a layer's whole cache first.

    Args:
      graph: the decoder without weights.
      max_new_tokens: R, the longest response.
      eos_ids: any of them ends a response.
      vocab_size: the tokenizer's size; ids beyond it are never sampled.
      top_k: sample among so many most probable tokens only; 0 means all.
      first_block: tokens of the first block of the response cache; from R on, there is one block.
      candidates: see `draw`.

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
        B = prompt_BxP.shape[0]
        rows = partial(constrain, model.mesh)
        prompt_BxP, prompt_length_B = rows(prompt_BxP, "batch", None), rows(prompt_length_B, "batch")
        last_Bx1xD, own_prompt = prefill(model, prefix, prompt_BxP, prompt_length_B)
        after_prompt_B = prefix_length(prefix) + prompt_length_B

        def choose(carry, hidden_Bx1xD):
            """Draws token t of every row that is not done and appends it."""
            t, done_B = carry["t"], carry["done_B"]
            keys = jax.vmap(jax.random.fold_in, (0, None))(key_B, t)
            token_B, log_prob_B = draw(next_logits(model, hidden_Bx1xD, vocab_size), keys, sampling, top_k, candidates)
            return carry | {
                "t": t + 1,
                "token_B": token_B,
                "done_B": done_B | jnp.isin(token_B, eos_E),
                "response_BxR": carry["response_BxR"].at[:, t].set(jnp.where(done_B, 0, token_B)),
                "mask_BxR": carry["mask_BxR"].at[:, t].set(~done_B),
                "log_prob_BxR": carry["log_prob_BxR"].at[:, t].set(jnp.where(done_B, 0.0, log_prob_B)),
            }

        def decode_block(carry, past: list[Past], begin: int, size: int):
            """Decodes until a block of so many tokens from `begin` on is full or all rows are done.

            Returns:
              carry, and the block's keys and values. Those of the last token are never needed.
            """

            def decode(state):
                """Feeds token t - 1, whose keys and values go to slot t - 1 of the response cache."""
                carry, k_LxBxSxKxQ, v_LxBxSxKxQ = state
                slot = carry["t"] - 1 - begin
                written_1x1xS = (jnp.arange(size) < slot)[None, None]
                hidden_Bx1xD, (k, v) = model(
                    carry["token_B"][:, None],
                    (after_prompt_B + carry["t"] - 1)[:, None],
                    [*past, Past(k_LxBxSxKxQ, v_LxBxSxKxQ, written_1x1xS)],
                )
                k_LxBxSxKxQ = jax.lax.dynamic_update_slice_in_dim(k_LxBxSxKxQ, k, slot, axis=2)
                v_LxBxSxKxQ = jax.lax.dynamic_update_slice_in_dim(v_LxBxSxKxQ, v, slot, axis=2)
                return choose(carry, hidden_Bx1xD), k_LxBxSxKxQ, v_LxBxSxKxQ

            L, B, _, K, Q = own_prompt.k.shape
            empty = jnp.zeros((L, B, size, K, Q), own_prompt.k.dtype)
            last = min(begin + size, R - 1)
            carry, k_LxBxSxKxQ, v_LxBxSxKxQ = jax.lax.while_loop(
                lambda state: (state[0]["t"] <= last) & ~state[0]["done_B"].all(), decode, (carry, empty, empty)
            )
            return carry, Past(k_LxBxSxKxQ, v_LxBxSxKxQ)

        empty = {
            "t": jnp.int32(0),
            "token_B": jnp.zeros(B, jnp.int32),
            "done_B": ~active_B,
            "response_BxR": jnp.zeros((B, R), jnp.int32),
            "mask_BxR": jnp.zeros((B, R), bool),
            "log_prob_BxR": jnp.zeros((B, R), jnp.float32),
        }
        end, past, begin = choose(empty, last_Bx1xD), [*prefix, own_prompt], 0
        for size in block_sizes(R, first_block):
            end, block = decode_block(end, past, begin, size)
            past, begin = [*past, block], begin + size
        drawn = Rollout(end["response_BxR"], end["mask_BxR"], end["log_prob_BxR"], active_B & ~end["done_B"])
        return Rollout(*(rows(x, *[None] * x.ndim) for x in drawn))

    return sample


def draw(
    logits_BxV: jax.Array, key_B: jax.Array, sampling: Sampling, top_k: int = 0, candidates: int = _CANDIDATES
) -> tuple[jax.Array, jax.Array]:
    """One token per row and its log-probability at the sampling temperature; every row has its own key.

    Filters in the usual order (temperature, top-k, top-p), each on what the one before left. The most probable token is
    never filtered out.

    Args:
      candidates: top-p looks among so many most probable tokens first, and sorts the vocabulary only where these do not
        hold the mass top-p in some row. It leaves the same tokens whatever this number.
    """
    greedy = sampling.temperature == 0
    log_p_BxV = log_probabilities(logits_BxV, jnp.where(greedy, 1.0, sampling.temperature))

    def sampled(log_p_BxV):
        if top_k:
            best_BxS = _highest(log_p_BxV, min(top_k, log_p_BxV.shape[-1]))
            kth_Bx1 = jnp.min(best_BxS, axis=-1, keepdims=True)
            log_p_BxV = jnp.where(log_p_BxV < kth_Bx1, -jnp.inf, log_p_BxV)
        left_BxV = jax.lax.cond(
            sampling.top_p < 1.0, lambda lp: _nucleus(lp, sampling.top_p, candidates), lambda lp: lp, log_p_BxV
        )
        return jax.vmap(jax.random.categorical)(key_B, left_BxV)

    # Random numbers for a whole vocabulary are not free, so greedy sampling draws none.
    token_B = jax.lax.cond(greedy, lambda lp: jnp.argmax(lp, axis=-1), sampled, log_p_BxV).astype(jnp.int32)
    return token_B, jnp.take_along_axis(log_p_BxV, token_B[:, None], axis=-1)[:, 0]


def _highest(log_p_BxV: jax.Array, k: int) -> jax.Array:
    """The k highest of each row, descending. Take the last one as their minimum: XLA for CPUs merges a slice with the
    selection and then sorts the whole row."""
    return jax.lax.top_k(log_p_BxV, k)[0]


def _nucleus(log_p_BxV: jax.Array, top_p: jax.Array, candidates: int) -> jax.Array:
    """Keeps the most probable tokens until their (renormalised) mass reaches top_p; the others become -inf.

    Tokens as probable as the last one are kept with it.
    """
    total_Bx1 = jax.nn.logsumexp(log_p_BxV, axis=-1, keepdims=True)

    def lowest(descending_BxS):
        """The last log-probability that is kept, and the mass of all that were looked at."""
        p_BxS = jnp.exp(descending_BxS - total_Bx1)
        mass_BxS = jnp.cumsum(p_BxS, axis=-1)
        kept_BxS = jnp.where(mass_BxS - p_BxS < top_p, descending_BxS, jnp.inf)
        return jnp.min(kept_BxS, axis=-1, keepdims=True), mass_BxS[:, -1]

    def of_all():
        return lowest(-jnp.sort(-log_p_BxV, axis=-1))[0]

    if candidates < log_p_BxV.shape[-1]:
        best_BxS = _highest(log_p_BxV, candidates)
        lowest_Bx1, mass_B = lowest(best_BxS)
        # Enough too where top-k has left nothing beyond these.
        enough_B = (mass_B > top_p + _MARGIN) | (jnp.min(best_BxS, axis=-1) == -jnp.inf)
        lowest_Bx1 = jax.lax.cond(enough_B.all(), lambda: lowest_Bx1, of_all)
    else:
        lowest_Bx1 = of_all()
    return jnp.where(log_p_BxV < lowest_Bx1, -jnp.inf, log_p_BxV)

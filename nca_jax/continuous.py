"""Sampling by continuous batching: a slot whose response has ended goes to the next prompt, in one jitted program.

N prompts are answered in B slots. A padded batch decodes until its longest response has ended; here a slot waits for no
other, so that steps are spent on tokens that count. Every response is that of `rollout.make_sampler`, token by token.
Of the axes, N are prompts, B slots and G the prompts that are taken up at once.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from nca_jax.axes import constrain
from nca_jax.models.decoder import Params, Past
from nca_jax.rollout import Rollout, Sampling, draw, next_logits, own_tokens, prefill, prefix_length


def make_continuous_sampler(
    graph: nnx.GraphDef,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    vocab_size: int,
    slots: int,
    refill: int,
    top_k: int = 0,
) -> Callable[..., Rollout]:
    """Compiles once per shape of its arrays, and not for other lengths, temperatures, top-p or inactive rows.

    Two loops: the outer one takes up G waiting prompts in free slots; the inner one decodes until G slots are free
    again, or all of them if nothing waits. All slots advance together, so the response cache is a ring: the step writes
    one column of it in every slot, and how many columns a slot sees depends on how long it has been running.

    Args:
      graph: the decoder without weights.
      max_new_tokens: R, the longest response.
      eos_ids: any of them ends a response.
      vocab_size: the tokenizer's size; ids beyond it are never sampled.
      slots: B, responses that are decoded side by side. On a mesh, devices share them out if they divide.
      refill: G, from 1 to B. A small one leaves slots idle for less long; a large one makes more of a prefill, whose
        rows too are shared out.
      top_k: sample among so many most probable tokens only; 0 means all.

    Returns:
      sample(params, prefix, prompt_NxP, prompt_length_N, active_N, key_N, sampling) -> Rollout of N rows, with
      arguments and results as those of `rollout.make_sampler`. Inactive rows take no slot.

    Raises:
      ValueError: `refill` is not between 1 and `slots`.
    """
    if not 1 <= refill <= slots:
        raise ValueError(f"refill {refill} is not between 1 and {slots} slots.")
    R, B, G = max_new_tokens, slots, refill
    eos_E = jnp.asarray(sorted(set(eos_ids)), jnp.int32)

    @jax.jit
    def sample(params: Params, prefix: list[Past], prompt_NxP, prompt_length_N, active_N, key_N, sampling: Sampling):
        model = nnx.merge(graph, params)
        N, P = prompt_NxP.shape
        rows = partial(constrain, model.mesh)
        start = prefix_length(prefix)
        queue_N = jnp.argsort(~active_N, stable=True)  # the active prompts in their order, then the others
        count = jnp.sum(active_N)

        def record(carry, row_X, t_X, hidden_Xx1xD):
            """Draws token t of each of these rows and keeps it with the row's results; a row of N is none at all.

            Returns:
              carry, the tokens, and whether the response goes on.
            """
            keys = jax.vmap(jax.random.fold_in)(key_N[jnp.minimum(row_X, N - 1)], t_X)
            token_X, log_prob_X = draw(next_logits(model, hidden_Xx1xD, vocab_size), keys, sampling, top_k)
            carry = carry | {
                name: carry[name].at[row_X, t_X].set(value, mode="drop")
                for name, value in (("response_NxR", token_X), ("mask_NxR", True), ("log_prob_NxR", log_prob_X))
            }
            return carry, token_X, (row_X < N) & (t_X + 1 < R) & ~jnp.isin(token_X, eos_E)

        def take_up(carry):
            """Prefills the next G prompts, or as many as wait, into free slots and draws their first tokens."""
            nth_G = carry["taken"] + jnp.arange(G)
            waits_G = nth_G < count
            row_G = queue_N[jnp.minimum(nth_G, N - 1)]
            length_G = rows(prompt_length_N[row_G], "batch")
            last_Gx1xD, own = prefill(model, prefix, rows(prompt_NxP[row_G], "batch", None), length_G)
            carry, token_G, goes_on_G = record(carry, jnp.where(waits_G, row_G, N), jnp.zeros(G, jnp.int32), last_Gx1xD)

            # A slot of B is none: nothing is written where no prompt waits or the first token has ended the response.
            slot_G = jnp.where(goes_on_G, jnp.nonzero(carry["row_B"] == N, size=G, fill_value=B)[0], B)
            taken_up = {"row_B": row_G, "t_B": 1, "token_B": token_G, "length_B": length_G}
            # Every device gets the keys and values of all G, and keeps what belongs into its slots.
            own_kv = {"prompt_k": own.k, "prompt_v": own.v}
            own_kv = {name: rows(x, None, None, None, "kv_heads", None) for name, x in own_kv.items()}
            return (
                carry
                | {"taken": carry["taken"] + G}
                | {name: carry[name].at[slot_G].set(value, mode="drop") for name, value in taken_up.items()}
                | {name: carry[name].at[:, slot_G].set(value, mode="drop") for name, value in own_kv.items()}
            )

        def decode(carry):
            """Feeds every slot its last token, t - 1, and draws token t."""
            row_B, t_B = carry["row_B"], carry["t_B"]
            # A slot's last t - 1 steps are its own response's, the columns before that an earlier one's.
            age_R = (carry["column"] - jnp.arange(R)) % R
            own_Bx1xR = ((age_R > 0) & (age_R < t_B[:, None]))[:, None]
            past = [
                *prefix,
                Past(carry["prompt_k"], carry["prompt_v"], own_tokens(P, carry["length_B"])),
                Past(carry["response_k"], carry["response_v"], own_Bx1xR),
            ]
            position_Bx1 = (start + carry["length_B"] + t_B - 1)[:, None]
            hidden_Bx1xD, (k, v) = model(carry["token_B"][:, None], position_Bx1, past)
            carry, token_B, goes_on_B = record(carry, row_B, t_B, hidden_Bx1xD)
            return carry | {
                "column": (carry["column"] + 1) % R,
                "row_B": jnp.where(goes_on_B, row_B, N),
                "t_B": t_B + 1,
                "token_B": token_B,
                "response_k": jax.lax.dynamic_update_slice_in_dim(carry["response_k"], k, carry["column"], axis=2),
                "response_v": jax.lax.dynamic_update_slice_in_dim(carry["response_v"], v, carry["column"], axis=2),
            }

        def waits(carry):
            return carry["taken"] < count

        def goes_on(carry):
            free = jnp.sum(carry["row_B"] == N)
            return (free < B) & ~(waits(carry) & (free >= G))

        def cache(length: int):
            shape = (model.arch.num_layers, B, length, model.arch.num_kv_heads, model.arch.head_dim)
            return rows(jnp.zeros(shape, model.compute_dtype), None, "batch", None, "kv_heads", None)

        def per_slot(value: int):
            return rows(jnp.full(B, value, jnp.int32), "batch")

        empty = {
            "taken": jnp.int32(0),
            "column": jnp.int32(0),  # of the response cache, which the next step writes
            "row_B": per_slot(N),  # the prompt that a slot answers; N: it is free
            "t_B": per_slot(0),  # tokens drawn of it
            "token_B": per_slot(0),
            "length_B": per_slot(1),
            "prompt_k": cache(P),
            "prompt_v": cache(P),
            "response_k": cache(R),
            "response_v": cache(R),
            "response_NxR": jnp.zeros((N, R), jnp.int32),
            "mask_NxR": jnp.zeros((N, R), bool),
            "log_prob_NxR": jnp.zeros((N, R), jnp.float32),
        }
        end = jax.lax.while_loop(waits, lambda carry: jax.lax.while_loop(goes_on, decode, take_up(carry)), empty)
        response_NxR, mask_NxR = end["response_NxR"], end["mask_NxR"]
        ended_N = (jnp.isin(response_NxR, eos_E) & mask_NxR).any(axis=1)
        drawn = Rollout(response_NxR, mask_NxR, end["log_prob_NxR"], active_N & ~ended_N)
        return Rollout(*(rows(x, *[None] * x.ndim) for x in drawn))

    return sample

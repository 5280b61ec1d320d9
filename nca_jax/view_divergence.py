"""How far two views of the same tokens are apart: KL(q_x || q_c) at every position of a response."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from nca_jax.axes import constrain
from nca_jax.models.decoder import Params, Past
from nca_jax.train_step import Sight, View, response_hidden
from nca_jax.vocab_loss import Hidden, Terms, weighted_loss


def make_view_divergence(graph: nnx.GraphDef, *, vocab_size: int, chunk_size: int) -> Callable[..., jax.Array]:
    """Compiles once per shape of its arrays.

    Args:
      graph: the decoder without weights.
      vocab_size: the tokenizer's size.
      chunk_size: response positions whose logits are in memory at one time.

    Returns:
      divergence(params, views, prefixes, response_BxR, mask_BxR) -> float32 [B, R], nats, 0 where the mask is false.
      `views` are two `train_step.View`s of the same prompts, first that of q_x, then that of q_c; `prefixes` are their
      encoded prefixes. At temperature 1 and over all tokens, whatever the response was sampled with. Every process
      gives all rows and gets all values.
    """
    terms = Terms(vocab_size, chunk_size=chunk_size)  # its first term is KL(q_x || f), here with f = q_c

    @jax.jit
    def divergence(params: Params, views: Sequence[View], prefixes: Sequence[list[Past]], response_BxR, mask_BxR):
        model = nnx.merge(graph, params)
        rows = partial(constrain, model.mesh)
        response_BxR = rows(response_BxR, "batch", None)
        sights = [
            Sight(
                View(v.prefix_C, rows(v.prompt_BxP, "batch", None), rows(v.prompt_length_B, "batch")),
                prefix,
                response_BxR,
            )
            for v, prefix in zip(views, prefixes, strict=True)
        ]
        x_BxRxD, c_BxRxD = response_hidden(model, sights)
        head_VxD = model.head_VxD
        hidden = Hidden(x_BxRxD, None, c_BxRxD)
        weight_BxR = mask_BxR.astype(jnp.float32)
        _, values = weighted_loss(hidden, head_VxD, head_VxD, response_BxR, weight_BxR, 0.0, terms, model.mesh)
        return rows(values.first, None, None)

    return divergence

"""How far two views of the same tokens are apart: KL(q_x || q_c) at every position of a response."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nca_jax.axes import constrain
from nca_jax.models.decoder import Params, Past
from nca_jax.views import Sight, View, response_hidden
from nca_jax.vocab_loss import Hidden, Terms, weighted_loss


class ViewDivergence(NamedTuple):
    """Two jitted functions, so that one view can be compared with several at the cost of one pass each.

    Every process gives all rows and gets all values.

    Attributes:
      hidden: (params, view, prefix, response_BxR) -> hidden_BxRxD that predict each response token; `view` is a
        `views.View` of the prompts, `prefix` what is encoded before it.
      compare: (params, hidden of q_x, hidden of q_c, mask_BxR) -> float32 [B, R], nats, 0 where the mask is false; at
        temperature 1 and over all tokens, whatever the response was sampled with.
    """

    hidden: Callable[[Params, View, list[Past], jax.Array], jax.Array]
    compare: Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]


def make_view_divergence(graph: nnx.GraphDef, *, vocab_size: int, chunk_size: int) -> ViewDivergence:
    """Both compile once per shape of their arrays.

    Args:
      graph: the decoder without weights.
      vocab_size: the tokenizer's size.
      chunk_size: response positions whose logits a data group has in memory at one time.
    """
    terms = Terms(vocab_size, chunk_size=chunk_size)  # its first term is KL(q_x || f), here with f = q_c

    @jax.jit
    def hidden(params: Params, view: View, prefix: list[Past], response_BxR):
        model = nnx.merge(graph, params)
        rows = partial(constrain, model.mesh)
        view = View(view.prefix_C, rows(view.prompt_BxP, "batch", None), rows(view.prompt_length_B, "batch"))
        (hidden_BxRxD,) = response_hidden(model, [Sight(view, prefix, rows(response_BxR, "batch", None))])
        return hidden_BxRxD

    @jax.jit
    def compare(params: Params, x_BxRxD, c_BxRxD, mask_BxR):
        model = nnx.merge(graph, params)
        head_VxD, weight_BxR = model.head_VxD, mask_BxR.astype(jnp.float32)
        no_tokens_BxR = jnp.zeros(mask_BxR.shape, jnp.int32)  # they do not matter to a divergence
        _, values = weighted_loss(
            Hidden(x_BxRxD, None, c_BxRxD), head_VxD, head_VxD, no_tokens_BxR, weight_BxR, 0.0, terms, model.mesh
        )
        return constrain(model.mesh, values.first, None, None)

    return ViewDivergence(hidden, compare)

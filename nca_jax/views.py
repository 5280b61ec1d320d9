"""What of a batch is run through the layers: its views, and where the response is in them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from nca_jax.models.decoder import Decoder, Past, Stream, encode_prefix, encode_prefixes, prefix_stream


@flax.struct.dataclass
class View:
    """Prompts of a batch as one side sees them: `prefix_C` leads every example, `prompt_BxP` follows, right padded."""

    prefix_C: jax.Array
    prompt_BxP: jax.Array
    prompt_length_B: jax.Array  # at least 1


@flax.struct.dataclass
class Retained:
    """The prompts of the batch under another context, with the teacher's responses to that."""

    view: View
    response_BxR: jax.Array
    response_mask_BxR: jax.Array


@flax.struct.dataclass
class Batch:
    """One step's examples: both views of the same prompts, and the response that all terms but retention are about."""

    no_context: View
    with_context: View
    response_BxR: jax.Array
    response_mask_BxR: jax.Array
    retained: Retained | None = None


class Sight(NamedTuple):
    """A view of some examples to be run: its prompts, the encoded prefix before them, the responses after them.

    `prefix` is None where the prefix is to be encoded in the same run. `length` is how many tokens of prompt and
    response are run of each row, if there are more; None: all.
    """

    view: View
    prefix: list[Past] | None
    response_BxR: jax.Array
    length: int | None = None


def response_streams(sights: Sequence[Sight]) -> list[Stream]:
    """The rows of each view as the decoder takes them: without gaps, prompt then response then padding, so that causal
    attention needs no mask."""
    streams = []
    for view, prefix, response_BxR, length in sights:
        P, R = view.prompt_BxP.shape[1], response_BxR.shape[1]
        T = min(length or P + R, P + R)
        from_response_BxT = jnp.arange(T) - view.prompt_length_B[:, None]
        prompt_BxT = jnp.pad(view.prompt_BxP, ((0, 0), (0, max(0, T - P))))[:, :T]
        response_BxT = jnp.take_along_axis(response_BxR, jnp.clip(from_response_BxT, 0, R - 1), axis=1)
        token_BxT = jnp.where(from_response_BxT < 0, prompt_BxT, response_BxT)
        streams.append(Stream(token_BxT, view.prefix_C.shape[0] + jnp.arange(T)[None], prefix or ()))
    return streams


def at_response(hidden_BxTxD: jax.Array, sight: Sight) -> jax.Array:
    """Of the hidden states of a view's rows those that predict each response token, [B, R, D].

    Token r of the response is predicted at the position before it: prompt_length - 1 + r.
    """
    index_BxR = sight.view.prompt_length_B[:, None] - 1 + jnp.arange(sight.response_BxR.shape[1])
    index_BxR = jnp.minimum(index_BxR, hidden_BxTxD.shape[1] - 1)  # beyond is padding
    return jnp.take_along_axis(hidden_BxTxD, index_BxR[..., None], axis=1)


def response_hidden(model: Decoder, sights: Sequence[Sight]) -> list[jax.Array]:
    """Final hidden states that predict each response token, [B, R, D] of each view; one run through the layers."""
    prefixes, streams = [], response_streams(sights)
    for i, sight in enumerate(sights):
        if sight.prefix is None and sight.view.prefix_C.shape[0]:
            streams[i] = streams[i]._replace(behind=len(prefixes))
            prefixes.append(prefix_stream(sight.view.prefix_C))
    outputs = model.together([*prefixes, *streams])[len(prefixes) :]
    return [at_response(hidden_BxTxD, sight) for (hidden_BxTxD, _), sight in zip(outputs, sights, strict=True)]


def shared_prefixes(model: Decoder, views: Mapping[str, View]) -> dict[str, list[Past]]:
    """The encoded prefix of each view as the list the decoder takes: empty where there is none."""
    names = [name for name, view in views.items() if view.prefix_C.shape[0]]
    encoded = encode_prefixes(model, [views[name].prefix_C for name in names]) if names else []
    return {name: [] for name in views} | {name: [past] for name, past in zip(names, encoded, strict=True)}


def shared_prefix(model: Decoder, prefix_C: jax.Array) -> list[Past]:
    """As `shared_prefixes`, of one."""
    return [encode_prefix(model, prefix_C)] if prefix_C.shape[0] else []

"""A model that answers: what evaluation and the commands around training need, and nothing that trains."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.assembly import Answering, answering
from nca_jax.data.chat import ChatFormat
from nca_jax.models.decoder import Params
from nca_jax.models.source import Model, load_weights, open_model, resolve
from nca_jax.sharding import make_mesh


def judged_text(model: Model, chat: ChatFormat, ids: Sequence[int]) -> str:
    """The text of a response as it is judged: special tokens removed, and with the thinking block that the generation
    prompt has opened, if it has."""
    return chat.opened + model.decode(ids)


@dataclasses.dataclass(frozen=True)
class Session:
    """A model in memory, in the decode layout, and its functions; `decode` is `judged_text` of it."""

    model: Model
    chat: ChatFormat
    answering: Answering
    decode: Callable[[Sequence[int]], str]
    params: Params


def open_session(config: ConfigDict) -> Session:
    """The student of a config, at its initial weights.

    Raises:
      UserError: as the training job.
    """
    settings.check(config)
    model = open_model(resolve(config.model.source), config.model.preset)
    chat = model.chat_format(config.chat)
    functions = answering(config, model.arch, model.eos_ids, len(model.tokenizer), make_mesh(config.mesh))
    params = load_weights(model.directory, model.arch, settings.dtype(config.model.compute_dtype), functions.sharding)
    return Session(model, chat, functions, partial(judged_text, model, chat), params)

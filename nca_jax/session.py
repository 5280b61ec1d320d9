"""A model that answers: what evaluation and the commands around training need, and nothing that trains."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.assembly import Answering, answering
from nca_jax.data.chat import ChatFormat
from nca_jax.models.decoder import Params
from nca_jax.models.source import Model, open_model
from nca_jax.sharding import make_mesh, params_sharding
from nca_jax.stored_model import StoredModel, find_model


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


def open_session(config: ConfigDict, stored: StoredModel | None = None) -> Session:
    """The student of a config with the weights of a checkpoint, brought to the decode layout as in training.

    Args:
      config: of the job.
      stored: the checkpoint; default: the student's initial weights.

    Raises:
      UserError: as the training job.
    """
    settings.check(config)
    stored = stored or find_model(config.model.source)
    model = open_model(stored.directory, config.model.preset, weights=stored.state is None)
    chat = model.chat_format(config.chat)
    mesh = make_mesh(config.mesh)
    functions = answering(config, model.arch, model.eos_ids, len(model.tokenizer), mesh)
    params = stored.load(settings.dtype(config.model.param_dtype), params_sharding(mesh, model.arch))
    return Session(model, chat, functions, partial(judged_text, model, chat), functions.layout(params))

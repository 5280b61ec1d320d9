"""What the studies have in common: the checkpoints, the items in both views, and sums over groups of weights."""

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.assembly import Answering, answering
from nca_jax.axes import parts
from nca_jax.data.chat import PackedView, pack_view
from nca_jax.data.pipeline import encode_pairs, fitting
from nca_jax.domains import domain_of
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, decoder_graph, weight_table
from nca_jax.models.fused_attention import attention_kind
from nca_jax.models.layers import is_stacked
from nca_jax.models.source import open_model
from nca_jax.rollout import Sampling, example_keys
from nca_jax.sharding import make_mesh
from nca_jax.stored_model import StoredModel

# Weight name -> what it is counted under.
_NORMS = ("attention_norm", "mlp_norm", "query_norm", "key_norm", "final_norm")
_MODULES = dict.fromkeys(_NORMS, "norms") | {f"{name}_bias": "biases" for name in ("query", "key", "value")}
# In the order in which they are shown.
MODULES = ("query", "key", "value", "output", "gate", "up", "down", "norms", "biases", "embedding", "head")
ALL, OUTSIDE = "all", "outside"  # the sum over layers or modules; what is in no layer
Group = tuple[int | str, str]  # layer, from 0, and module


class Checkpoint(NamedTuple):
    """A model that is looked at: what figures and sentences call it, and where it was found."""

    label: str
    path: str
    model: StoredModel


class Finding(NamedTuple):
    """What a study has found: a title, a sentence, the rows of its table, a figure."""

    title: str
    sentence: str
    rows: list[dict[str, Any]]
    figure: Figure


@dataclasses.dataclass(frozen=True)
class Subject:
    """The items that the models answer, and how the config computes.

    Attributes:
      config: of the job.
      mesh: of the job.
      arch: of all models.
      answering: samples from them.
      no_context, with_context: the items' prompts; of a game, its first turn.
      vocab_size: the tokenizer's.
    """

    config: ConfigDict
    mesh: Mesh
    arch: Architecture
    answering: Answering
    no_context: PackedView
    with_context: PackedView
    vocab_size: int

    @property
    def items(self) -> int:
        """How many there are."""
        return len(self.no_context.prompt_length_E)


def open_subject(config: ConfigDict, base: StoredModel, items: int) -> Subject:
    """The first `items` items of the config's evaluation split, as the base model's tokenizer renders them.

    Raises:
      UserError: as the training job; or the split does not exist.
    """
    model = open_model(base.directory)
    mesh = make_mesh(config.mesh)
    domain = domain_of(config)
    examples = domain.examples(config.evaluation.split)[:items]
    prompts = [domain.messages(example) for example in examples]
    pairs = encode_pairs(model.chat_format(config.chat), prompts, domain.context)
    kept = [pairs[i] for i in fitting(examples, [pairs], config.data.max_prompt_tokens, config.data.too_long)]
    views = [[pair.no_context for pair in kept], [pair.with_context for pair in kept]]
    no_context, with_context = (
        pack_view(view, config.data.length_multiple, prefix_multiple=parts(mesh, "prefix")) for view in views
    )
    vocab_size = len(model.tokenizer)
    functions = answering(config, model.arch, model.eos_ids, vocab_size, mesh)
    return Subject(config, mesh, model.arch, functions, no_context, with_context, vocab_size)


def decoder_on(config: ConfigDict, arch: Architecture, mesh: Mesh) -> nnx.GraphDef:
    """The decoder without weights, as the config computes it."""
    dtype = settings.dtype(config.model.compute_dtype)
    attention = attention_kind(config.model.attention, dtype)
    return decoder_graph(arch, dtype, config.model.remat, attention=attention, mesh=mesh)


def rows_at_once(subject: Subject, wanted: int, mesh: Mesh) -> int:
    """At most so many rows as wanted or as there are items, rounded up to what the devices can share out."""
    devices = parts(mesh, "batch")
    return -(-min(wanted, subject.items) // devices) * devices


def micro_batch_rows(subject: Subject, mesh: Mesh) -> int:
    """Rows of a training step's micro-batch, which have proved to fit into memory."""
    config = subject.config
    of_step = settings.rows(config) // config.accumulation if config.accumulation else 1
    return rows_at_once(subject, of_step, mesh)


def respond(subject: Subject, params: Params, sampling: ConfigDict) -> tuple[np.ndarray, np.ndarray]:
    """Responses to all items without the context.

    Args:
      params: in the decode layout.
      sampling: with temperature, top_p and top_k: `config.evaluation` or `config.rollout`.

    Returns:
      token ids [E, R] and their mask, true up to and including the end token.
    """
    sample = subject.answering.sampler(sampling.top_k)
    view = subject.no_context
    prefix = subject.answering.encode(params, jnp.asarray(view.prefix_C))
    size = rows_at_once(subject, subject.config.evaluation.batch_size, subject.answering.mesh)
    drawn = []
    for start in range(0, subject.items, size):
        # Rows past the end repeat the last item and are inactive.
        item = np.arange(start, start + size)
        rows = view.rows(np.minimum(item, subject.items - 1))
        rollout = sample(
            params,
            prefix,
            rows.prompt_ExP,
            rows.prompt_length_E,
            item < subject.items,
            example_keys(subject.config.seed, 0, jnp.asarray(item)),
            Sampling(float(sampling.temperature), float(sampling.top_p)),
        )
        drawn.append(jax.device_get((rollout.response_BxR, rollout.mask_BxR)))
    response_ExR, mask_ExR = (np.concatenate(parts)[: subject.items] for parts in zip(*drawn, strict=True))
    return response_ExR, mask_ExR


def sampling_words(sampling: ConfigDict) -> str:
    """How responses are drawn, for people."""
    return "greedily" if sampling.temperature == 0 else f"at temperature {sampling.temperature:g}"


def sums_by_group(values: Mapping[str, Any], arch: Architecture) -> dict[Group, Any]:
    """Sums over groups of weights, in float64.

    Args:
      values: weight name -> [L, ...], or [...] for a weight outside the layers; of the same shape but for L.
      arch: of the weights.

    Returns:
      (layer, module) -> sum, also for the layer OUTSIDE and, summed over either or both, ALL; in the order of tables.
    """
    table = weight_table(arch)
    found: dict[Group, Any] = {}
    for name, of_layers in values.items():
        module = _MODULES.get(name, name)
        layers = enumerate(of_layers) if is_stacked(table[name]) else [(OUTSIDE, of_layers)]
        for layer, value in layers:
            for group in ((layer, module), (layer, ALL), (ALL, module), (ALL, ALL)):
                found[group] = found.get(group, 0.0) + np.asarray(value, np.float64)

    def order(group: Group) -> tuple:
        layer, module = group
        place = (0, layer) if isinstance(layer, int) else (1, [OUTSIDE, ALL].index(layer))
        return *place, [*MODULES, ALL].index(module)

    return {group: found[group] for group in sorted(found, key=order)}


def with_gaps(values: Sequence[float | None]) -> list[float]:
    """Values for a figure, with gaps where there is none."""
    return [math.nan if value is None else value for value in values]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for programs; None is empty, and numbers have 7 digits, as many as float32."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.7g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def in_words(parts: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))

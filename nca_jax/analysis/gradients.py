"""What the terms of the loss pull at: their gradients at a checkpoint, and the angles between them.

Three terms, on the same responses, which the checkpoint draws without the context as in training:

    opd       D(q_x || f)          gradient through the view without the context
    nca       KL(sg[q_x] || q_c)   through the view with it (arXiv 2606.11627)
    fidelity  D(q_c || f)          through the view with it: what that view would have to keep

q_x and q_c are the student without and with the context; f is the model that training began with (or
`config.teacher.source`), frozen, with the context, also for runs whose teacher followed the student. D, support,
temperature and mean are the config's; where it trains by "nll", D is the reverse KL. A top-k support has the ids of
the view without the context in opd and nca, as in training; fidelity, which has no such view, those of q_c. With
"teacher_top_k" they are those of f in opd and fidelity, and in nca, which has no f, those of its own target q_x.

In memory are the parameters, the teacher and at most three gradients, of which the last is being summed. A training
step with micro-batches takes as much: it has two moments in the place of the other two.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from matplotlib.figure import Figure
from tqdm import tqdm

from nca_jax import settings
from nca_jax.analysis.common import (
    ALL,
    Checkpoint,
    Finding,
    Group,
    Subject,
    decoder_on,
    in_words,
    micro_batch_rows,
    respond,
    sampling_words,
    sums_by_group,
    with_gaps,
)
from nca_jax.axes import named
from nca_jax.data.chat import PackedView
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, Past, weight_table
from nca_jax.models.layers import is_stacked
from nca_jax.objectives import Divergence
from nca_jax.plotting import legend_below, new_figure, series, title
from nca_jax.processes import place
from nca_jax.sharding import batch_sharding, params_sharding
from nca_jax.stored_model import StoredModel
from nca_jax.train_step import Objective, Teacher, TrainState, make_loss_and_gradient
from nca_jax.views import Batch, View, shared_prefix

TITLE = "Gradients of the terms"
NAMES = {"opd": "OPD", "nca": "NCA", "fidelity": "fidelity"}
TERMS = tuple(NAMES)
PAIRS = tuple(itertools.combinations(TERMS, 2))


def term_objectives(objective: Objective) -> dict[str, Objective]:
    """For each term an objective whose first term it is, if the batch and the teacher are `term_inputs`."""
    terms = dataclasses.replace(objective.terms, anchor=None)
    if terms.first == "nll":
        terms = dataclasses.replace(terms, first=Divergence("reverse_kl"))
    support = terms.support
    if support.kind != "full":
        support = dataclasses.replace(support, kind="teacher_top_k")  # the target, which here is q_x
    nca = dataclasses.replace(terms, first=Divergence("forward_kl", entry_clip=terms.first.entry_clip), support=support)
    return {
        name: Objective(of_term, reduction=objective.reduction)
        for name, of_term in zip(TERMS, (terms, nca, terms), strict=True)
    }


def term_inputs(name: str, batch: Batch, teacher: Teacher, student: Teacher) -> tuple[Teacher, Batch]:
    """What the training step is given so that its OPD term is the one asked for.

    Args:
      name: of TERMS.
      batch: both views.
      teacher: f, with the context.
      student: the checkpoint as the target of nca, without the context.
    """
    if name == "opd":
        return teacher, batch
    trained = batch.replace(no_context=batch.with_context)
    if name == "nca":
        return student, trained.replace(with_context=batch.no_context)
    return teacher, trained


def make_products(arch: Architecture, mesh: Mesh) -> Callable[[Params, Params], dict[str, jax.Array]]:
    """A jitted function of two gradients to their dot products in float32: weight name -> [L], or one number for a
    weight outside the layers. Every process gets them all."""
    of_layers = {name for name, spec in weight_table(arch).items() if is_stacked(spec)}

    def products(one: Params, other: Params) -> dict[str, jax.Array]:
        found = {}
        for name, x in one.items():
            over = tuple(range(1, x.ndim)) if name in of_layers else None
            found[name] = jnp.sum(x.astype(jnp.float32) * other[name].astype(jnp.float32), axis=over)
        return found

    return jax.jit(products, out_shardings=named(mesh))


class Pull(NamedTuple):
    """What was measured at one checkpoint.

    Attributes:
      value: term -> its mean over the response tokens, in nats.
      product: pair of terms, or a term twice -> (layer, module) -> dot product of their gradients.
    """

    value: dict[str, float]
    product: dict[tuple[str, str], dict[Group, float]]

    def norm(self, term: str, group: Group) -> float:
        """Of a term's gradient."""
        return math.sqrt(self.product[term, term][group])

    def cosine(self, one: str, other: str, group: Group) -> float | None:
        """Of the gradients of two terms; None where one of them is 0."""
        norms = self.norm(one, group) * self.norm(other, group)
        return self.product[one, other][group] / norms if norms else None


def measure(subject: Subject, checkpoints: Sequence[Checkpoint], teacher: StoredModel) -> list[Pull]:
    """The gradients at each checkpoint, one model beside the teacher after the other, in the layout of training.

    Args:
      subject, checkpoints: what is looked at.
      teacher: f. At a checkpoint that is this model, fidelity is 0 by definition and not computed.
    """
    config, mesh = subject.config, subject.mesh
    size = micro_batch_rows(subject, mesh)
    parts = -(-subject.items // size)
    graph, teacher_graph = decoder_on(config, subject.arch, mesh), decoder_on(config, teacher.arch, mesh)
    sharding = params_sharding(mesh, subject.arch)
    objectives = term_objectives(settings.make_objective(config, subject.vocab_size))
    gradient_of = {
        name: jax.jit(
            make_loss_and_gradient(graph, graph if name == "nca" else teacher_graph, objective, parts, mesh),
            out_shardings=(named(mesh), sharding, named(mesh)),
        )
        for name, objective in objectives.items()
    }
    products = make_products(subject.arch, mesh)
    f_params = teacher.load(settings.dtype(config.teacher.dtype), params_sharding(mesh, teacher.arch))
    f = Teacher(f_params, _encoded(teacher_graph, f_params, subject.with_context))
    measured = []
    with tqdm(total=len(checkpoints) * len(TERMS), desc="gradients", unit="gradient", disable=None) as progress:
        for checkpoint in checkpoints:
            params = checkpoint.model.load(settings.dtype(config.model.param_dtype), sharding)
            response_ExR, mask_ExR = respond(subject, subject.answering.layout(params), config.rollout)
            batch = _batch(subject, response_ExR, mask_ExR, parts * size)
            student = Teacher(params, _encoded(graph, params, subject.no_context))
            state = TrainState(np.int32(0), params, None)
            gradients: dict[str, Params] = {}
            value = {}
            for name in TERMS:
                if name == "fidelity" and checkpoint.model == teacher:
                    value[name], gradients[name] = 0.0, jax.tree.map(jnp.zeros_like, params)
                else:
                    loss, gradients[name], _ = gradient_of[name](state, *term_inputs(name, batch, f, student))
                    value[name] = float(loss)
                progress.update()
            product = {}
            for a, b in itertools.combinations_with_replacement(TERMS, 2):
                of_weights = jax.device_get(products(gradients[a], gradients[b]))
                product[a, b] = sums_by_group(of_weights, subject.arch)
            measured.append(Pull(value, product))
            del params, student, state, gradients  # before the next one is loaded
    return measured


@partial(jax.jit, static_argnames="graph")
def _encode(graph: nnx.GraphDef, params: Params, prefix_C: jax.Array) -> list[Past]:
    return shared_prefix(nnx.merge(graph, params), prefix_C)


def _encoded(graph: nnx.GraphDef, params: Params, view: PackedView) -> list[Past]:
    return _encode(graph, params, jnp.asarray(view.prefix_C))


def _batch(subject: Subject, response_ExR: np.ndarray, mask_ExR: np.ndarray, rows: int) -> Batch:
    """All items on the mesh, and after them rows without a token."""
    index = np.minimum(np.arange(rows), subject.items - 1)
    mask_BxR = mask_ExR[index] & (np.arange(rows) < subject.items)[:, None]
    sharding = batch_sharding(subject.mesh)

    def view(packed: PackedView) -> View:
        rows = packed.rows(index)
        return place(View(rows.prefix_C, rows.prompt_ExP, rows.prompt_length_E), sharding.no_context)

    responses = (response_ExR[index], mask_BxR)
    placed = place(responses, (sharding.response_BxR, sharding.response_mask_BxR))
    return Batch(view(subject.no_context), view(subject.with_context), *placed)


def study(subject: Subject, checkpoints: Sequence[Checkpoint], teacher: StoredModel) -> Finding:
    """The cosines of the terms' gradients at each checkpoint, their norms and the terms' values; args as `measure`."""
    pulls = dict(zip((c.label for c in checkpoints), measure(subject, checkpoints, teacher), strict=True))
    rows = []
    for label, pull in pulls.items():
        for group in pull.product["opd", "opd"]:
            row = {"checkpoint": label, "layer": group[0], "module": group[1]}
            row |= {f"cosine_{a}_{b}": pull.cosine(a, b, group) for a, b in PAIRS}
            row |= {f"norm_{term}": pull.norm(term, group) for term in TERMS}
            rows.append(row | {f"value_{term}": pull.value[term] if group == (ALL, ALL) else None for term in TERMS})
    said = []
    for a, b in PAIRS:
        cosines = {label: pull.cosine(a, b, (ALL, ALL)) for label, pull in pulls.items()}
        where = in_words([f"{cosine:.3f} at {label}" for label, cosine in cosines.items() if cosine is not None])
        said.append(f"{NAMES[a]} and {NAMES[b]} {where or 'none'}")
    still = in_words([label for label, pull in pulls.items() if not pull.norm("fidelity", (ALL, ALL))])
    sentence = (
        f"Cosines of the gradients, on the responses to {subject.items} items drawn "
        f"{sampling_words(subject.config.rollout)}: {'; '.join(said)}"
        f"{f' (at {still}, which is the teacher itself, fidelity has no gradient)' if still else ''}."
    )
    return Finding(TITLE, sentence, rows, draw(pulls))


def draw(pulls: Mapping[str, Pull]) -> Figure:
    """For each pair of terms its cosine by layer and by module, a line or a row of marks for each checkpoint."""
    figure, axes = new_figure(9.0, 7.0, len(PAIRS), 2, sharex="col", sharey=True)
    groups = list(next(iter(pulls.values())).product["opd", "opd"])
    layers = [layer for layer, module in groups if module == ALL and isinstance(layer, int)]
    modules = [module for layer, module in groups if layer == ALL and module != ALL]
    for (a, b), (by_layer, by_module) in zip(PAIRS, axes, strict=True):
        for i, (label, pull) in enumerate(pulls.items()):
            of_layers = with_gaps([pull.cosine(a, b, (layer, ALL)) for layer in layers])
            of_modules = with_gaps([pull.cosine(a, b, (ALL, module)) for module in modules])
            by_layer.plot(layers, of_layers, label=label, **series(i))
            by_module.plot(range(len(modules)), of_modules, **series(i) | {"linestyle": "none"})
        title(by_layer, f"{NAMES[a]} and {NAMES[b]}")
        by_layer.set_ylabel("cosine")
        by_layer.set_ylim(-1.05, 1.05)
    axes[-1, 0].set_xlabel("layer")
    axes[-1, 1].set_xticks(range(len(modules)), modules, rotation=40, ha="right")
    legend_below(axes[0, 0])
    return figure

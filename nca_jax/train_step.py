"""The pure training step: all forward passes, the loss, its gradient and the optimizer update in one graph.

    loss = mean_t D(q_x || f)  +  beta * mean_t w_t KL(stop_gradient(q_x) || q_c)  +  gamma * mean_t KL(f' || g)

with q_x the student without the context, q_c the student with it and f the teacher with it, all on the response that
the student sampled without the context (OPD; NCA, arXiv 2606.11627); w_t = 1 and gamma = 0 is the paper's loss. The
last term (ours) is retention: f' and g are teacher and student with another context, on a response of the teacher.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from nca_jax import micro_batches
from nca_jax.models.decoder import Params, Past
from nca_jax.objectives import Divergence, reduction_weights, weighted_sum
from nca_jax.views import Batch, Sight, View, response_hidden, shared_prefixes
from nca_jax.vocab_loss import Hidden, Terms, weighted_loss


@flax.struct.dataclass
class TrainState:
    """All that a step changes. `params` are the float32 (or bfloat16) masters; `ema` an averaged teacher, if any."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    ema: Params | None = None


@flax.struct.dataclass
class Teacher:
    """A frozen teacher: its weights and, encoded once per run, its keys and values of the shared prefixes.

    A teacher that follows the student ("live", "ema") is in the state, and this is empty.
    """

    params: Params | None = None
    prefix: list[Past] | None = None  # of the with-context view: one, or none where the views share no prefix
    retained_prefix: list[Past] | None = None  # of the retained view


@dataclasses.dataclass(frozen=True)
class AnchorSchedule:
    """How much of the anchor acts at a step: 1, or with `warmup_steps` from 0 to 1 linearly after `start_step`."""

    start_step: int = 0
    warmup_steps: int = 0

    def weight(self, step: jax.Array) -> jax.Array:
        """A float32 scalar."""
        if not self.warmup_steps:
            return jnp.float32(1.0)
        return jnp.clip((step - self.start_step) / self.warmup_steps, 0.0, 1.0).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss as a value.

    Attributes:
      terms: what is computed at each response position; `terms.anchor` is None exactly if `beta` is 0, and the q_c
        forward pass is then left out of the graph.
      beta: weight of the anchor; 0 is plain OPD.
      schedule: of the anchor.
      anchor_stride: the anchor is computed for every so many-th example of the batch, unbiased and cheaper.
      gamma: weight of retention; 0 leaves it out.
      reduction: "token" or "sequence", see `objectives.reduction_weights`.
      teacher: "frozen"; "live", the student itself as it is; "ema", an exponential moving average of the student.
      ema_rate: share of the student that enters the average at each step.
    """

    terms: Terms
    beta: float = 0.0
    schedule: AnchorSchedule = AnchorSchedule()
    anchor_stride: int = 1
    gamma: float = 0.0
    reduction: Literal["token", "sequence"] = "token"
    teacher: Literal["frozen", "live", "ema"] = "frozen"
    ema_rate: float = 0.05


def make_loss_and_gradient(
    graph: nnx.GraphDef,
    teacher_graph: nnx.GraphDef,
    objective: Objective,
    accumulation: int = 1,
    mesh: Mesh | None = None,
    lengths: int = 1,
) -> Callable[[TrainState, Teacher, Batch], tuple[jax.Array, Params, dict[str, jax.Array]]]:
    """The step without its update, as a pure function; arguments as `make_train_step`.

    Returns:
      loss_and_gradient(state, teacher, batch) -> (loss, gradient, terms). The gradient has the parameters' dtype, and
      float32 where micro-batches are summed. `state.opt_state` is not looked at. The terms are means over the response
      tokens: "opd", "nca" (the anchor without its weight), "gate", "retention"; and "computed", the share of the batch,
      as padded, that was run.
    """
    needs_f = objective.terms.first != "nll" or (objective.beta > 0 and objective.terms.anchor.target == "teacher")
    retention = dataclasses.replace(objective.terms, first=Divergence("forward_kl"), anchor=None)

    def encoded(params: Params, views: Mapping[str, View]) -> dict[str, list[Past] | None]:
        """The views' prefixes: once per step if the batch is cut into micro-batches, or else in the run of the rows,
        which then gathers the weights once for both and has one gradient."""
        if accumulation == 1:
            return dict.fromkeys(views)
        return shared_prefixes(nnx.merge(graph, params), views)

    def prefixes_of(params: Params, batch: Batch) -> dict[str, list[Past] | None]:
        views = {"no_context": batch.no_context}
        if objective.beta or objective.teacher == "live":
            views["with_context"] = batch.with_context
        if objective.gamma:
            views["retained"] = batch.retained.view
        return encoded(params, views)

    def the_teacher(state: TrainState, teacher: Teacher, batch: Batch, prefixes) -> Teacher:
        if objective.teacher == "frozen":
            return teacher
        if objective.teacher == "live":
            return jax.lax.stop_gradient(Teacher(state.params, prefixes["with_context"], prefixes.get("retained")))
        views = {"with_context": batch.with_context}
        if objective.gamma:
            views["retained"] = batch.retained.view
        averaged = encoded(state.ema, views)
        return Teacher(state.ema, averaged["with_context"], averaged.get("retained"))

    def loss_of_part(params, prefixes, teacher: Teacher, part: tuple[Batch, Any], anchor_weight, length: int):
        batch, weights = part
        every = slice(None, None, objective.anchor_stride)
        student = nnx.merge(graph, params)
        Seen = functools.partial(Sight, length=length)
        sights = {"q_x": Seen(batch.no_context, prefixes["no_context"], batch.response_BxR)}
        if objective.beta:
            view, response_BxR = micro_batches.some_rows((batch.with_context, batch.response_BxR), every)
            sights["q_c"] = Seen(view, prefixes["with_context"], response_BxR)
        if objective.gamma:
            kept = batch.retained
            sights["g"] = Seen(kept.view, prefixes["retained"], kept.response_BxR)
        hidden = dict(zip(sights, response_hidden(student, list(sights.values())), strict=True))

        # With the live teacher, where q_c is the same pass, it is not run again.
        same_pass = objective.teacher == "live" and objective.beta and objective.anchor_stride == 1
        sights = {}
        if needs_f and not same_pass:
            sights["f"] = Seen(batch.with_context, teacher.prefix, batch.response_BxR)
        if objective.gamma:
            sights["f_retained"] = Seen(kept.view, teacher.retained_prefix, kept.response_BxR)
        teacher_head_VxD = None
        if needs_f or objective.gamma:
            model_f = nnx.merge(teacher_graph if objective.teacher == "frozen" else graph, teacher.params)
            teacher_head_VxD = model_f.head_VxD
            if sights:
                hidden |= dict(zip(sights, response_hidden(model_f, list(sights.values())), strict=True))
        if needs_f and same_pass:
            hidden["f"] = jax.lax.stop_gradient(hidden["q_c"])
        loss, values = weighted_loss(
            Hidden(hidden["q_x"], hidden.get("q_c"), hidden.get("f")),
            student.head_VxD,
            teacher_head_VxD if needs_f else None,
            batch.response_BxR,
            weights["response"],
            anchor_weight,
            objective.terms,
            mesh,
        )
        anchor_weights = weights["response"][every] * objective.anchor_stride
        terms = {
            "opd": weighted_sum(values.first, weights["response"]),
            "nca": weighted_sum(values.anchor, anchor_weights) if objective.beta else jnp.float32(0.0),
            # Without an anchor 1, as the sum of the weights: so it adds up over micro-batches like the others.
            "gate": weighted_sum(values.gate, anchor_weights) if objective.beta else weights["response"].sum(),
        }
        if objective.gamma:
            terms["retention"], _ = weighted_loss(
                Hidden(hidden["g"], None, hidden["f_retained"]),
                student.head_VxD,
                teacher_head_VxD,
                kept.response_BxR,
                weights["retained"],
                0.0,
                retention,
                mesh,
            )
            loss += objective.gamma * terms["retention"]
        return loss, jax.lax.stop_gradient(terms)

    def loss_and_gradient(state: TrainState, teacher: Teacher, batch: Batch):
        # Of the whole step's masks, so that micro-batches are summed and nothing is divided afterwards.
        weights = {"response": reduction_weights(batch.response_mask_BxR, objective.reduction)}
        if objective.gamma:
            weights["retained"] = reduction_weights(batch.retained.response_mask_BxR, objective.reduction)
        prefixes, pull_back = jax.vjp(lambda params: prefixes_of(params, batch), state.params)
        current = the_teacher(state, teacher, batch, prefixes)
        anchor_weight = objective.beta * objective.schedule.weight(state.step)

        longest = micro_batches.longest(batch)
        choices = micro_batches.lengths(longest, lengths)

        def at_length(length: int):
            def run(part):
                (loss, terms), gradients = jax.value_and_grad(loss_of_part, argnums=(0, 1), has_aux=True)(
                    state.params, prefixes, current, micro_batches.cut(*part, length), anchor_weight, length
                )
                return (loss, terms | {"computed": jnp.float32(length / longest / accumulation)}), gradients

            return run

        def of_part(part):
            if len(choices) == 1:
                return at_length(longest)(part)
            index = micro_batches.which(micro_batches.needed(part[0]), choices)
            return jax.lax.switch(index, [at_length(length) for length in choices], part)

        if accumulation == 1:
            (loss, terms), (gradient, _) = of_part((batch, weights))
            return loss, gradient, terms

        rows = (batch, weights)
        if len(choices) > 1:
            rows = micro_batches.longest_first(rows, micro_batches.needed(batch), mesh)
        parts = micro_batches.split(rows, accumulation)
        shapes = jax.eval_shape(of_part, jax.tree.map(lambda x: x[0], parts))
        # Accumulated in float32 also where the parameters are bfloat16.
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)

        def add(total, part):
            # Turns that no game has played are rows without a token, all in the last parts, which cost nothing.
            masks = [weight.any() for weight in jax.tree.leaves(part[1])]
            grown = jax.lax.cond(
                functools.reduce(jnp.logical_or, masks),
                lambda: jax.tree.map(jnp.add, total, of_part(part)),
                lambda: total,
            )
            return grown, None

        ((loss, terms), (gradient, prefix_gradient)), _ = jax.lax.scan(add, zeros, parts)
        prefix_gradient = jax.tree.map(lambda g, x: g.astype(x.dtype), prefix_gradient, prefixes)
        (through_prefix,) = pull_back(prefix_gradient)
        return loss, jax.tree.map(jnp.add, gradient, through_prefix), terms

    return loss_and_gradient


def make_train_step(
    graph: nnx.GraphDef,
    teacher_graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    accumulation: int = 1,
    mesh: Mesh | None = None,
    lengths: int = 1,
) -> Callable[[TrainState, Teacher, Batch], tuple[TrainState, dict[str, Any]]]:
    """The step as a pure function; the caller jits it, donates the state, and says where things live.

    Args:
      graph, teacher_graph: decoders without weights; the same one for self-distillation.
      optimizer: takes the mean gradient; clipping is its business.
      objective: the loss.
      accumulation: micro-batches the batch is cut into, along its examples; it must divide their number. The result is
        that of the whole batch, whatever the lengths of the responses.
      mesh: where the arrays live, for the intermediate ones; None: one device.
      lengths: programs that a micro-batch may run: for the longest prompt and response, for half as many tokens, a
        quarter, ... Rows are then put in the order of their length. The result is the same.

    Returns:
      train_step(state, teacher, batch) -> (state, metrics). The teacher is an argument of its own, since the state is
      donated and the teacher is not. Metrics are float32 scalars: "loss", its terms (see `make_loss_and_gradient`),
      "grad_norm" before clipping, "tokens" and "finite" (0 where the loss or the gradient is not).
    """
    loss_and_gradient = make_loss_and_gradient(graph, teacher_graph, objective, accumulation, mesh, lengths)

    def train_step(state: TrainState, teacher: Teacher, batch: Batch):
        loss, gradient, terms = loss_and_gradient(state, teacher, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if objective.teacher == "ema":
            ema = optax.incremental_update(params, ema, objective.ema_rate)
        grad_norm = optax.tree.norm(gradient)
        metrics = {
            "loss": loss,
            **terms,
            "grad_norm": grad_norm,
            "tokens": batch.response_mask_BxR.sum().astype(jnp.float32),
            "finite": (jnp.isfinite(loss) & jnp.isfinite(grad_norm)).astype(jnp.float32),
        }
        return TrainState(state.step + 1, params, opt_state, ema), metrics

    return train_step

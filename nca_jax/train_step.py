"""The pure training step: three forward passes, the two-term loss, its gradient and the optimizer update in one graph.

    loss = mean_t D(q_x || f)  +  beta * mean_t w_t KL(stop_gradient(q_x) || q_c)

with q_x the student without the context, q_c the student with it and f the teacher with it, all on the response that
the student sampled without the context (OPD; NCA, arXiv 2606.11627). w_t = 1 is the paper's loss.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nca_jax.models.decoder import Decoder, Params, Past, encode_prefix
from nca_jax.objectives import Support, reduction_weights, weighted_sum
from nca_jax.vocab_loss import Distribution, token_divergences


@flax.struct.dataclass
class View:
    """Prompts of a batch as one side sees them: `prefix_C` leads every example, `prompt_BxP` follows, right padded."""

    prefix_C: jax.Array
    prompt_BxP: jax.Array
    prompt_length_B: jax.Array  # at least 1


@flax.struct.dataclass
class Batch:
    """One step's examples: both views of the same prompts and the response sampled in the no-context view."""

    no_context: View
    with_context: View
    response_BxR: jax.Array
    response_mask_BxR: jax.Array


@flax.struct.dataclass
class TrainState:
    """All that a step changes. `params` are the float32 (or bfloat16) masters."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState


@flax.struct.dataclass
class Teacher:
    """A frozen teacher: its weights and, encoded once per run, its keys and values of the shared context."""

    params: Params
    prefix: list[Past]  # one, or none where the views share no prefix


@dataclasses.dataclass(frozen=True)
class AnchorSchedule:
    """When and where the anchor acts: the weight w_t of the loss above.

    Attributes:
      kind: "constant", 1 (the reference); "warmup", from 0 to 1 linearly over `warmup_steps` after `start_step`;
        "gated", exp(-sg[D(q_x || f)_t] / tau), small where the student has not learned yet.
      start_step, warmup_steps: in optimizer steps.
      tau: in nats.
    """

    kind: Literal["constant", "warmup", "gated"] = "constant"
    start_step: int = 0
    warmup_steps: int = 10
    tau: float = 0.25

    def weight(self, step: jax.Array, opd_BxR: jax.Array) -> jax.Array:
        """w_t, broadcastable to [B, R]."""
        if self.kind == "gated":
            return jnp.exp(-jax.lax.stop_gradient(opd_BxR) / self.tau)
        if self.kind == "warmup":
            return jnp.clip((step - self.start_step) / self.warmup_steps, 0.0, 1.0)
        return jnp.float32(1.0)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss as a value: which divergences, over which ids, how reduced.

    Attributes:
      divergence: of the OPD term, see `objectives.divergence`.
      beta: weight of the anchor; 0 is plain OPD and leaves the q_c forward pass out of the graph.
      anchor: schedule of the anchor.
      support: ids of both terms.
      temperature: divides all logits; the one the responses were sampled at (OPCD).
      reduction: "token" or "sequence", see `objectives.reduction_weights`.
      vocab_size: the tokenizer's size.
      chunk_size: response positions whose logits are alive at one time.
    """

    vocab_size: int
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    beta: float = 0.5
    anchor: AnchorSchedule = dataclasses.field(default_factory=AnchorSchedule)
    support: Support = dataclasses.field(default_factory=Support)
    temperature: float = 1.0
    reduction: Literal["token", "sequence"] = "token"
    chunk_size: int = 1024


def response_hidden(model: Decoder, view: View, prefix: list[Past], response_BxR: jax.Array) -> jax.Array:
    """Final hidden states that predict each response token: [B, R, D].

    The view is laid out without gaps, prompt then response then padding, so that causal attention needs no mask. Token
    r of the response is predicted at the position before it: prompt_length - 1 + r.
    """
    R = response_BxR.shape[1]
    T = view.prompt_BxP.shape[1] + R
    length_Bx1 = view.prompt_length_B[:, None]
    from_response_BxT = jnp.arange(T) - length_Bx1
    prompt_BxT = jnp.pad(view.prompt_BxP, ((0, 0), (0, R)))
    response_BxT = jnp.take_along_axis(response_BxR, jnp.clip(from_response_BxT, 0, R - 1), axis=1)
    token_BxT = jnp.where(from_response_BxT < 0, prompt_BxT, response_BxT)

    position_1xT = view.prefix_C.shape[0] + jnp.arange(T)[None]
    hidden_BxTxD, _ = model(token_BxT, position_1xT, prefix)
    return jnp.take_along_axis(hidden_BxTxD, (length_Bx1 - 1 + jnp.arange(R))[..., None], axis=1)


def shared_prefix(model: Decoder, prefix_C: jax.Array) -> list[Past]:
    """The encoded prefix as the list the decoder takes: empty where there is none."""
    return [encode_prefix(model, prefix_C)] if prefix_C.shape[0] else []


def loss_sums(
    params: Params,
    graph: nnx.GraphDef,
    teacher_graph: nnx.GraphDef,
    teacher: Teacher,
    batch: Batch,
    step: jax.Array,
    objective: Objective,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sums over the response tokens of a (micro-)batch, to be divided by the step's total weight.

    Returns:
      the loss sum, and the sums of each term: "opd", "nca" (the anchor without its weight), "gate", "weight".
    """
    student = nnx.merge(graph, params)

    def of_student(view: View):
        # The prefix is encoded once, inside the gradient: every example's gradient flows back through it.
        return response_hidden(student, view, shared_prefix(student, view.prefix_C), batch.response_BxR)

    frozen = nnx.merge(teacher_graph, teacher.params)
    hidden = {
        "q_x": of_student(batch.no_context),
        "f": response_hidden(frozen, batch.with_context, teacher.prefix, batch.response_BxR),
    }
    heads = {"q_x": student.head_VxD, "f": frozen.head_VxD}
    if objective.beta:
        hidden["q_c"], heads["q_c"] = of_student(batch.with_context), student.head_VxD
    by_name = {
        name: Distribution(hidden_BxRxD.reshape(-1, hidden_BxRxD.shape[-1]), heads[name])
        for name, hidden_BxRxD in hidden.items()
    }
    opd_N, anchor_N = token_divergences(
        by_name["q_x"],
        by_name["f"],
        by_name.get("q_c"),
        batch.response_mask_BxR.reshape(-1),
        kind=objective.divergence,
        support=objective.support,
        temperature=objective.temperature,
        vocab_size=objective.vocab_size,
        chunk_size=objective.chunk_size,
    )
    opd_BxR, anchor_BxR = (x.reshape(batch.response_mask_BxR.shape) for x in (opd_N, anchor_N))
    weights_BxR, total = reduction_weights(batch.response_mask_BxR, objective.reduction)
    gate_BxR = jnp.broadcast_to(objective.anchor.weight(step, opd_BxR), opd_BxR.shape)
    sums = {
        "opd": weighted_sum(opd_BxR, weights_BxR),
        "nca": weighted_sum(anchor_BxR, weights_BxR),
        "gate": weighted_sum(gate_BxR, weights_BxR),
        "weight": total,
    }
    return sums["opd"] + objective.beta * weighted_sum(gate_BxR * anchor_BxR, weights_BxR), sums


def make_train_step(
    graph: nnx.GraphDef,
    teacher_graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    accumulation: int = 1,
) -> Callable[[TrainState, Teacher, Batch], tuple[TrainState, dict[str, Any]]]:
    """The step as a pure function; the caller jits it, donates the state, and says where things live.

    Args:
      graph, teacher_graph: decoders without weights; the same one for self-distillation.
      optimizer: takes the mean gradient; clipping is its business.
      objective: the loss.
      accumulation: micro-batches the batch is cut into, along its examples; it must divide their number. Sums are
        added and divided once, so the result is that of the whole batch, whatever the lengths of the responses.

    Returns:
      train_step(state, teacher, batch) -> (state, metrics). The teacher is an argument of its own, since the state is
      donated and the teacher is not. Metrics are float32 scalars: the means "loss", "opd", "nca" and "gate",
      "grad_norm" before clipping, "tokens" and "finite" (0 where the loss or the gradient is not).
    """

    def train_step(state: TrainState, teacher: Teacher, batch: Batch):
        def sums_and_gradient(part: Batch):
            return jax.value_and_grad(loss_sums, has_aux=True)(
                state.params, graph, teacher_graph, teacher, part, state.step, objective
            )

        if accumulation == 1:
            (loss, sums), gradient = sums_and_gradient(batch)
        else:
            parts = _split_examples(batch, accumulation)
            shapes = jax.eval_shape(sums_and_gradient, jax.tree.map(lambda x: x[0], parts))
            # Accumulated in float32 also where the parameters are bfloat16.
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)

            def add(total, part):
                return jax.tree.map(jnp.add, total, sums_and_gradient(part)), None

            ((loss, sums), gradient), _ = jax.lax.scan(add, zeros, parts)

        # A step without any response token has sum 0 and gradient 0; only 0 / 0 must be avoided.
        total = jnp.maximum(sums["weight"], 1.0)
        gradient = jax.tree.map(lambda g: g / total, gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        grad_norm = optax.tree.norm(gradient)
        metrics = {
            "loss": loss / total,
            **{name: sums[name] / total for name in ("opd", "nca", "gate")},
            "grad_norm": grad_norm,
            "tokens": batch.response_mask_BxR.sum().astype(jnp.float32),
            "finite": (jnp.isfinite(loss) & jnp.isfinite(grad_norm)).astype(jnp.float32),
        }
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

    return train_step


def _split_examples(batch: Batch, parts: int) -> Batch:
    """[B, ...] -> [parts, B / parts, ...]; prefixes, which have no example axis, are repeated by reference."""

    def split(path, x):
        if any(getattr(key, "name", None) == "prefix_C" for key in path):
            return jnp.broadcast_to(x, (parts, *x.shape))
        return x.reshape(parts, -1, *x.shape[1:])

    return jax.tree_util.tree_map_with_path(split, batch)

"""From hidden states to the loss and its gradients in one pass over chunks of response positions.

Where logits exist, they exist for one chunk: the logits of up to three distributions are computed, compared, turned
into the gradient of the loss with respect to themselves, and that is multiplied back to hidden states and head weights
at once. Nothing is computed a second time in the backward pass, and no array of [positions, vocabulary] is alive. That
works because the weight of every position in the loss is known beforehand (the mask of the step), and the gate of the
anchor depends on the values of the same chunk only.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nca_jax import objectives
from nca_jax.axes import constrain, parts
from nca_jax.objectives import Divergence, Support
from nca_jax.split_vocabulary import top_k_ids

_REVERSE_KL, _FORWARD_KL, _FULL = Divergence("reverse_kl"), Divergence("forward_kl"), Support("full")


@dataclasses.dataclass(frozen=True)
class AnchorTerm:
    """The second term: how q_c, the student with the context, is tied.

    Attributes:
      target: "student", q_x, the student without the context (NCA, arXiv 2606.11627); or "teacher", f ("dual").
      divergence: of q_c from its target. The paper's KL(sg[q_x] || q_c) is its "forward_kl".
      stop_gradient: False lets the term pull q_x to q_c too.
      gate_tau: weight exp(-sg[D(q_x || f)] / tau) of each token, in nats; None: 1.
    """

    target: Literal["student", "teacher"] = "student"
    divergence: Divergence = _FORWARD_KL
    stop_gradient: bool = True
    gate_tau: float | None = None


@dataclasses.dataclass(frozen=True)
class Terms:
    """What is computed at each response position.

    Attributes:
      first: divergence of q_x from f, the teacher with the context; "nll" is the negative log-likelihood of the
        response's own token, which needs no teacher.
      anchor: the second term, or None.
      support: ids of both terms.
      temperature: divides all logits.
      vocab_size: the tokenizer's size; rows of a head beyond it are padding and get no probability.
      chunk_size: positions whose logits are alive at one time (at least one per example), in each data group.
    """

    vocab_size: int
    first: Divergence | Literal["nll"] = _REVERSE_KL
    anchor: AnchorTerm | None = None
    support: Support = _FULL
    temperature: float = 1.0
    chunk_size: int = 1024


class Hidden(NamedTuple):
    """Final hidden states at the response positions, [B, R, D] each; D of the teacher may be another.

    `q_c` may be of every s-th example only, [B / s, R, D]: the anchor on a subset of the rows. None: no such term.
    """

    q_x: jax.Array
    q_c: jax.Array | None
    f: jax.Array | None


class TokenValues(NamedTuple):
    """Per-token values [B, R], float32, without gradient, 0 where the weight is 0; of the anchor [B / s, R]."""

    first: jax.Array
    anchor: jax.Array
    gate: jax.Array


def weighted_loss(
    hidden: Hidden,
    head_VxD: jax.Array,
    teacher_head_VxD: jax.Array | None,
    token_BxR: jax.Array,
    weight_BxR: jax.Array,
    anchor_weight: jax.Array | float,
    terms: Terms,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, TokenValues]:
    """sum(weight * first) + anchor_weight * sum(weight * gate * anchor), differentiable in `hidden` and `head_VxD`.

    Where q_c is of every s-th example only, the second sum is over those and s times larger: the same in expectation.

    Args:
      hidden: q_x and q_c get gradients, f none.
      head_VxD: of the student, for q_x and q_c.
      teacher_head_VxD: of f.
      token_BxR: the response, for "nll".
      weight_BxR: float32, from `objectives.reduction_weights`; positions of weight 0 are not looked at, whatever they
        hold.
      anchor_weight: beta, times the schedule's value at this step.
      terms: what is computed.
      mesh: where the arrays live; every device then takes its part of the vocabulary in all positions of its data
        group. None: one device.

    Returns:
      the loss, float32, and the values it is made of.
    """
    arrays = _Arrays(hidden.f, teacher_head_VxD, token_BxR, weight_BxR, jnp.float32(anchor_weight))
    return _fused(terms, mesh, (hidden.q_x, hidden.q_c), head_VxD, arrays)


class _Arrays(NamedTuple):
    """Inputs without gradient."""

    f: jax.Array | None
    teacher_head: jax.Array | None
    token: jax.Array
    weight: jax.Array
    anchor_weight: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(terms: Terms, mesh: Mesh | None, student, head_VxD, arrays: _Arrays):
    loss, values, _ = _scan(terms, mesh, student, head_VxD, arrays, with_gradient=False)
    return loss, values


def _forward(terms, mesh, student, head_VxD, arrays):
    loss, values, gradients = _scan(terms, mesh, student, head_VxD, arrays, with_gradient=True)
    # The dtypes of the inputs are those of their gradients.
    like = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), (student, head_VxD))
    return (loss, values), (gradients, like)


def _backward(terms, mesh, residuals, cotangents):
    gradients, like = residuals
    scale = cotangents[0]  # the values are for looking at
    student, head = jax.tree.map(lambda g, x: (scale * g).astype(x.dtype), gradients, like)
    return student, head, None


_fused.defvjp(_forward, _backward)


def _scan(terms: Terms, mesh: Mesh | None, student, head_VxD, arrays: _Arrays, with_gradient: bool):
    """Loss, values, and (with_gradient) the gradients (hidden states as `student`, head float32)."""
    B, R = arrays.weight.shape
    groups = 1 if mesh is None else parts(mesh, "loss_rows")
    r = max(1, min(terms.chunk_size * groups // B, R))
    dtype = student[0].dtype
    lay_out = partial(constrain, mesh)
    head, teacher_head = (
        None if w is None else lay_out(w.astype(dtype), "head_vocab", None) for w in (head_VxD, arrays.teacher_head)
    )

    def in_chunks(x):  # [B, R, ...] -> [R / r, B, r, ...]; examples stay where they are
        x = jnp.pad(x, [(0, 0), (0, -R % r)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, r, *x.shape[2:]), 1, 0)

    def from_chunks(x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :R]

    def step(head_gradient, chunk):
        student, f, token, weight = chunk
        valid_BxRx1 = weight[..., None] > 0
        stride = None if student[1] is None else B // student[1].shape[0]

        def rows(x, every=1):
            # Zeros in place of unused positions: whatever stood there cannot reach a gradient, not even as 0 * NaN.
            x = jnp.where(valid_BxRx1[::every], x, 0)
            return lay_out(x.reshape(-1, x.shape[-1]), "loss_rows", None)

        student = (rows(student[0]), None if stride is None else rows(student[1], stride))
        logits = jax.tree.map(lambda hidden_nxD: _logits(hidden_nxD, head, lay_out), student)
        f_logits = None if f is None else _logits(rows(f), teacher_head, lay_out)

        def loss_of(logits):
            return _chunk_loss(terms, mesh, logits, f_logits, token, weight, arrays.anchor_weight, stride)

        if not with_gradient:
            loss, values = loss_of(logits)
            return None, (loss, values, None)
        (loss, values), gradient = jax.value_and_grad(loss_of, has_aux=True)(logits)
        gradient = jax.tree.map(lambda g: g.astype(dtype), gradient)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        head_gradient = _add_products(head_gradient, jax.tree.leaves(gradient), jax.tree.leaves(student))
        hidden_gradient = jax.tree.map(lambda g: product("nv,vd->nd", g, head), gradient)
        hidden_gradient = jax.tree.map(
            lambda g: lay_out(g, "loss_rows", None).reshape(-1, r, g.shape[-1]), hidden_gradient
        )
        return lay_out(head_gradient, "head_vocab", None), (loss, values, hidden_gradient)

    start = None
    if with_gradient:
        start = lay_out(jnp.zeros(head_VxD.shape, jnp.float32), "head_vocab", None)
    chunks = jax.tree.map(in_chunks, (student, arrays.f, arrays.token, arrays.weight))
    head_gradient, (loss, values, gradients) = jax.lax.scan(step, start, chunks)
    values, gradients = jax.tree.map(from_chunks, (values, gradients))
    return loss.sum(), values, (gradients, head_gradient)


def _logits(hidden_nxD: jax.Array, head_VxD: jax.Array, lay_out: Callable[..., jax.Array]) -> jax.Array:
    logits_nxV = jnp.einsum("nd,vd->nv", hidden_nxD, head_VxD, preferred_element_type=jnp.float32)
    return lay_out(logits_nxV, "loss_rows", "head_vocab")


def _add_products(total_VxD: jax.Array, gradients: list[jax.Array], hidden: list[jax.Array]) -> jax.Array:
    """total + sum of gradient.T @ hidden, in float32, with one array of the head's size alive besides the total."""
    if len({g.shape for g in gradients}) == 1:
        gradients, hidden = [jnp.stack(gradients)], [jnp.stack(hidden)]
    for i, (gradient, x) in enumerate(zip(gradients, hidden, strict=True)):
        if i:  # or else both products would be computed before either is added
            total_VxD, gradient = jax.lax.optimization_barrier((total_VxD, gradient))
        total_VxD += jnp.einsum("...nv,...nd->vd", gradient, x, preferred_element_type=jnp.float32)
    return total_VxD


def _chunk_loss(
    terms: Terms, mesh: Mesh | None, logits, f_logits_nxV, token_Bxr, weight_Bxr, anchor_weight, stride: int | None
):
    """The loss of one chunk and its values; `logits` are those of q_x and, or None, of q_c."""
    r = weight_Bxr.shape[1]
    # Heads may be padded to different sizes; what lies beyond the smaller one is padding in the larger one.
    V = min(x.shape[-1] for x in (*logits, f_logits_nxV) if x is not None)

    def log_probabilities(logits_nxV):
        if logits_nxV is None:
            return None
        logits_nxV = logits_nxV[:, :V]
        if terms.vocab_size < V:
            logits_nxV = jnp.where(jnp.arange(V) < terms.vocab_size, logits_nxV, -jnp.inf)
        return objectives.log_probabilities(logits_nxV, terms.temperature).reshape(-1, r, V)

    log_p = {name: log_probabilities(x) for name, x in (("q_x", logits[0]), ("q_c", logits[1]), ("f", f_logits_nxV))}
    first_Bxr = None
    if terms.first == "nll":
        first_Bxr = -jnp.take_along_axis(log_p["q_x"], token_Bxr[..., None], axis=-1)[..., 0]
    if terms.support.kind != "full":
        chooser = log_p["f" if terms.support.kind == "teacher_top_k" else "q_x"]
        ids = top_k_ids(chooser, min(terms.support.k, terms.vocab_size), mesh)
        for name, lp in log_p.items():
            if lp is not None:
                theirs = ids[::stride] if name == "q_c" else ids
                log_p[name] = objectives.restrict(lp, theirs, terms.support.tail, mesh)
    stop = jax.lax.stop_gradient
    if first_Bxr is None:
        first_Bxr = terms.first(log_p["q_x"], stop(log_p["f"]))
    valid_Bxr = weight_Bxr > 0
    first_Bxr = jnp.where(valid_Bxr, first_Bxr, 0.0)
    loss = jnp.sum(weight_Bxr * first_Bxr)
    if stride is None:
        nothing = jnp.zeros((1, r), jnp.float32)
        return loss, TokenValues(stop(first_Bxr), nothing, nothing)

    target = (log_p["q_x"] if terms.anchor.target == "student" else stop(log_p["f"]))[::stride]
    anchor = terms.anchor.divergence(log_p["q_c"], stop(target) if terms.anchor.stop_gradient else target)
    gate = jnp.ones_like(anchor)
    if terms.anchor.gate_tau is not None:
        gate = jnp.exp(-stop(first_Bxr)[::stride] / terms.anchor.gate_tau)
    anchor, gate = (jnp.where(valid_Bxr[::stride], x, 0.0) for x in (anchor, gate))
    loss += anchor_weight * stride * jnp.sum(weight_Bxr[::stride] * gate * anchor)
    return loss, TokenValues(*map(stop, (first_Bxr, anchor, gate)))

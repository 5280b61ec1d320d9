"""Per-token divergences between two next-token distributions, and their reduction to one number.

Pure functions of arrays; float32 at least, float64 where the inputs are. `student` is the distribution that is trained,
`teacher` the one it is compared with, for the OPD term. For the anchor the roles are the paper's (arXiv 2606.11627):
KL(sg[q_x] || q_c) is `kl(stop_gradient(q_x), q_c)`.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nca_jax.split_vocabulary import take, without

# exp(-1e4) is 0 in every float type, and differences of two such numbers are finite where those of -inf are NaN.
_LOWEST_LOGIT = -1e4


@dataclasses.dataclass(frozen=True)
class Support:
    """The token ids over which a divergence is summed.

    Attributes:
      kind: "full" vocabulary; or the k most probable ids at that position of the student's no-context distribution
        ("student_top_k": OPCD, NCA) or of the teacher's ("teacher_top_k").
      k: number of ids of a top-k.
      tail: what happens to the probability outside the ids. "none" drops it: a truncated sum, which is not a divergence
        and can be negative (OPCD's default). "renormalize" conditions both distributions on the ids (NCA). "bucket"
        adds it as one more outcome: a lower bound of the full divergence.
    """

    kind: Literal["full", "student_top_k", "teacher_top_k"] = "full"
    k: int = 256
    tail: Literal["none", "renormalize", "bucket"] = "renormalize"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How two next-token distributions are compared, p the trained one and q the other.

    Attributes:
      kind: "reverse_kl", KL(p || q), the OPD term; "forward_kl", KL(q || p); "symmetric_kl", the mean of both; "jsd",
        the generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649).
      jsd_weight: of p in the mixture of "jsd", inside (0, 1).
      entry_clip: upper bound of what one token id may add to the sum, in nats; None: no bound. Where it acts the result
        is no divergence any more, and the clipped ids have no gradient.
    """

    kind: Literal["reverse_kl", "forward_kl", "symmetric_kl", "jsd"] = "reverse_kl"
    jsd_weight: float = 0.5
    entry_clip: float | None = None

    def __call__(self, log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        """The divergence of log-probabilities over the last axis."""
        if self.kind == "reverse_kl":
            return kl(log_p, log_q, self.entry_clip)
        if self.kind == "forward_kl":
            return kl(log_q, log_p, self.entry_clip)
        if self.kind == "symmetric_kl":
            return 0.5 * (kl(log_p, log_q, self.entry_clip) + kl(log_q, log_p, self.entry_clip))
        if self.kind == "jsd":
            return jensen_shannon(log_p, log_q, self.jsd_weight, self.entry_clip)
        raise ValueError(f"unknown divergence {self.kind!r}")


def log_probabilities(logits: jax.Array, temperature: float | jax.Array = 1.0) -> jax.Array:
    """log softmax(logits / temperature) over the last axis, at least float32, finite also for -inf logits."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.nn.log_softmax(jnp.maximum(logits, _LOWEST_LOGIT) / temperature, axis=-1)


def restrict(log_p: jax.Array, ids: jax.Array, tail: str, mesh: Mesh | None = None) -> jax.Array:
    """Log-probabilities on the ids: [..., V], [..., k] -> [..., k], or [..., k + 1] with a tail bucket.

    `mesh`: over which V is split, see `split_vocabulary`.
    """
    kept = take(log_p, ids, mesh)
    if tail == "none":
        return kept
    if tail == "renormalize":
        return kept - jax.nn.logsumexp(kept, axis=-1, keepdims=True)
    if tail == "bucket":
        # Summed over what is left, and not 1 - sum(kept), which cancels when the ids hold nearly everything.
        rest = without(log_p, ids, _LOWEST_LOGIT, mesh)
        return jnp.concatenate([kept, jax.nn.logsumexp(rest, axis=-1, keepdims=True)], axis=-1)
    raise ValueError(f"unknown tail {tail!r}")


def kl(log_p: jax.Array, log_q: jax.Array, entry_clip: float | None = None) -> jax.Array:
    """KL(p || q) = sum p (log p - log q) over the last axis; `entry_clip` bounds each addend from above."""
    entries = jnp.exp(log_p) * (log_p - log_q)
    if entry_clip is not None:
        entries = jnp.minimum(entries, entry_clip)
    return jnp.sum(entries, axis=-1)


def jensen_shannon(
    log_p: jax.Array, log_q: jax.Array, weight: float = 0.5, entry_clip: float | None = None
) -> jax.Array:
    """weight KL(p || m) + (1 - weight) KL(q || m) with m = weight p + (1 - weight) q; 0 < weight < 1.

    Tends to 0, not to a KL, at both ends (GKD, arXiv 2306.13649); ask for the KLs by name.
    """
    if not 0.0 < weight < 1.0:
        raise ValueError(f"the weight of a Jensen-Shannon divergence lies inside (0, 1), not {weight}")
    log_m = jnp.logaddexp(log_p + jnp.log(weight), log_q + jnp.log1p(-weight))
    return weight * kl(log_p, log_m, entry_clip) + (1.0 - weight) * kl(log_q, log_m, entry_clip)


def reduction_weights(mask_BxR: jax.Array, reduction: str) -> jax.Array:
    """Weights [B, R] with which values are summed to the mean that is asked for; all 0 where the mask is empty.

    "token": the mean over all response tokens of the step. "sequence": the mean over responses of each one's mean;
    empty responses do not count. Made of the whole step's mask, so that sums over micro-batches add up to the mean.
    """
    mask_BxR = mask_BxR.astype(jnp.float32)
    if reduction == "token":
        return mask_BxR / jnp.maximum(mask_BxR.sum(), 1.0)
    if reduction == "sequence":
        length_B = mask_BxR.sum(axis=1)
        responses = jnp.maximum((length_B > 0).sum(), 1)
        return mask_BxR / jnp.maximum(length_B, 1.0)[:, None] / responses
    raise ValueError(f"unknown reduction {reduction!r}")


def weighted_sum(value: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(weights * value) in which a value of weight 0 does not count, even if it is NaN."""
    return jnp.sum(weights * jnp.where(weights > 0, value, 0.0))

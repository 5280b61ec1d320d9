"""Floating-point operations that the arithmetic of a job needs, from shapes alone; a multiply-add is two.

Matrix products and attention are counted, as in the PaLM paper's appendix B; norms, softmax, rotations and the update
are not, being a few per cent at most. (A compiler's own count takes a loop's body once and a kernel not at all.)
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.models.architecture import Architecture


class Tokens(NamedTuple):
    """Lengths of a batch: P of the prompts as padded, and of what leads every prompt without and with the context."""

    prompt: int
    template: int
    context: int


def layers_flops(arch: Architecture, tokens: int, prefix: int = 0) -> float:
    """Of all layers over one sequence of `tokens` behind `prefix` tokens whose keys and values are known."""
    D, F, HQ, KQ = arch.hidden_size, arch.mlp_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    matrices = 2 * (2 * D * HQ + 2 * D * KQ + 3 * D * F)
    pairs = tokens * prefix + tokens * (tokens + 1) / 2  # query and key, causal
    return arch.num_layers * (tokens * matrices + 4 * HQ * pairs)


def head_flops(arch: Architecture, positions: int) -> float:
    """Of logits at so many positions."""
    return 2.0 * positions * arch.hidden_size * arch.vocab_size


def train_step_flops(
    config: ConfigDict, student: Architecture, teacher: Architecture, tokens: Tokens
) -> dict[str, float]:
    """Of one training step over all devices, by what they are for.

    A gradient costs twice its forward pass.

    Returns:
      "q_x", "q_c", "f", "retention" (passes behind known prefixes), "prefixes" (the student's and an averaged
      teacher's; a frozen one's are made once per run), "heads", and apart from what the arithmetic needs "recomputed":
      the forward passes that `model.remat=full` makes a second time to save memory.
    """
    B, R = settings.rows(config), config.rollout.max_new_tokens
    T, share = tokens.prompt + R, 1 / config.anchor.every if config.anchor.beta else 0.0
    retained = B if config.retention.gamma else 0
    live, averaged = config.teacher.kind == "live", config.teacher.kind == "ema"
    without, behind = layers_flops(student, T, tokens.template), layers_flops(student, T, tokens.context)
    of_teacher = layers_flops(teacher, T, tokens.context)
    of_prefixes = layers_flops(student, tokens.template)
    if share or live:
        of_prefixes += layers_flops(student, tokens.context)
    if retained:
        of_prefixes += layers_flops(student, tokens.context)
    parts = {
        "q_x": 3 * B * without,
        "q_c": 3 * B * share * behind,
        "f": 0.0 if config.loss.divergence == "nll" and config.anchor.target == "student" else B * of_teacher,
        "retention": retained * (3 * behind + of_teacher),
        "prefixes": 3 * of_prefixes + averaged * (1 + bool(retained)) * layers_flops(student, tokens.context),
        "heads": (3 + 3 * share) * head_flops(student, B * R) + head_flops(teacher, B * R),
    }
    if retained:
        parts["heads"] += 3 * head_flops(student, B * R) + head_flops(teacher, B * R)
    if config.model.remat == "full":
        # The last product of a layer, from mlp to width, is in no gradient but its own.
        last = 2 * student.num_layers * student.hidden_size * student.mlp_size
        of_batch = B * (without - T * last) + (B * share + retained) * (behind - T * last)
        prefix_tokens = tokens.template + tokens.context * (bool(share or live) + bool(retained))
        parts["recomputed"] = of_batch + of_prefixes - prefix_tokens * last
    return parts


def model_flops(parts: dict[str, float]) -> float:
    """What the arithmetic needs: all but what is computed twice."""
    return sum(flops for name, flops in parts.items() if name != "recomputed")


def rollout_flops(arch: Architecture, rows: int, response: int, prompt: int, prefix: int) -> dict[str, float]:
    """Of drawing `response` tokens for each row: "prefill" of prompts behind a known prefix, and "decode"."""
    every = layers_flops(arch, prompt + response, prefix)
    first = layers_flops(arch, prompt, prefix)
    return {"prefill": rows * first, "decode": rows * (every - first) + head_flops(arch, rows * response)}

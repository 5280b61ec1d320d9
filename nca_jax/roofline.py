"""How long a step and a rollout take at best: work from shapes and from the compiled program over a chip's peaks."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.chips import Chip
from nca_jax.flops import Tokens, rollout_flops, train_step_flops
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import weight_table

# Shares of the published peaks that well-tuned programs reach. Assumptions: nothing was measured on hardware.
COMPUTE, MEMORY, NETWORK = 0.5, 0.8, 0.8
# What a collective costs however small it is, in seconds; decoding has two in every layer for every token.
LATENCY = 10e-6

ASSUMPTIONS = (
    f"{COMPUTE:.0%} of the peak FLOP/s, {MEMORY:.0%} of the memory's and {NETWORK:.0%} of the network's bytes/s, "
    f"{LATENCY * 1e6:.0f} us a collective; compute, memory and network overlap in training, the network does not in "
    "decoding; every response is the longest; host, input and compilation cost nothing"
)


class Seconds(NamedTuple):
    """What each resource alone would take, and the estimate made of them."""

    compute: float
    memory: float
    network: float
    total: float


def estimate(
    config: ConfigDict,
    student: Architecture,
    teacher: Architecture,
    tokens: Tokens,
    facts: Mapping[str, Any],
    chip: Chip,
    chips: float,
) -> dict[str, Seconds]:
    """Seconds of one "train_step" and of its "rollout".

    Args:
      config, student, teacher, tokens: of the job.
      facts: from `plan_compile.compiled_facts`: collectives, meshes, bytes.
      chip: whose peaks.
      chips: how many.
    """
    # A device may be half a chip.
    share = chips / facts["devices"]
    rates = ("hbm_bytes_per_second", "ici_bytes_per_second", "dcn_bytes_per_second")
    chip = chip._replace(**{rate: share * getattr(chip, rate) for rate in rates})
    step = sum(train_step_flops(config, student, teacher, tokens).values())
    compute = step / (chips * chip.flops_bf16 * COMPUTE)
    memory = _train_bytes(config, student, teacher, tokens, facts) / (chip.hbm_bytes_per_second * MEMORY)
    network = _network(facts["programs"]["train_step"], chip)
    train = Seconds(compute, memory, network, max(compute, memory, network))

    B, R = config.batch_size, config.rollout.max_new_tokens
    turns = settings.turns(config)  # played one after the other
    flops = sum(rollout_flops(student, B, R, tokens.prompt, tokens.template).values())
    compute = turns * flops / (chips * chip.flops_bf16 * COMPUTE)
    memory = turns * R * _decode_bytes(student, B, R, tokens, facts) / (chip.hbm_bytes_per_second * MEMORY)
    network = turns * _network(facts["programs"]["rollout"], chip)
    return {"train_step": train, "rollout": Seconds(compute, memory, network, max(compute, memory) + network)}


def _network(program: Mapping[str, Any], chip: Chip) -> float:
    seconds = 0.0
    for found in program.get("collectives", ()):
        rate = chip.dcn_bytes_per_second if found["between_slices"] else chip.ici_bytes_per_second
        seconds += found["nbytes"] / (rate * NETWORK) + found["count"] * LATENCY
    return seconds


def _train_bytes(config: ConfigDict, student: Architecture, teacher: Architecture, tokens: Tokens, facts) -> float:
    """Of a device's memory in one step: weights, gathered and read; gradients; the update; activations; logits."""
    mesh, parts = facts["meshes"]["train"], facts["micro_batches"]
    devices, tensor = facts["devices"], mesh["tensor"]
    own = facts["bytes_per_device"]["weights"] / 4  # parameters
    # Gathered (written) and read, by the forward pass, its repetition and the backward pass.
    weights = parts * 2 * 2 * (3 * _layer_parameters(student) + _layer_parameters(teacher)) / tensor
    gradients = parts * 3 * 4 * own if parts > 1 else 2 * 4 * own
    update = 7 * 4 * own  # reads gradient, parameter and two moments, writes the last three
    rows, R = settings.rows(config) / devices * tensor, config.rollout.max_new_tokens
    views = 2 + bool(config.anchor.beta) / config.anchor.every + 2 * bool(config.retention.gamma)
    D, F, heads = student.hidden_size, student.mlp_size, student.num_heads + 2 * student.num_kv_heads
    each = 2 * 2 * student.num_layers * (6 * D + (3 * F + 2 * heads * student.head_dim) / tensor)
    activations = rows * views * (tokens.prompt + R) * each * 3
    logits = 4 * 6 * 3 * settings.rows(config) * R * student.vocab_size / devices
    return weights + gradients + update + activations + logits


def _decode_bytes(student: Architecture, rows: int, response: int, tokens: Tokens, facts) -> float:
    """Of a device's memory for one token of every row: all weights, the prefix's keys and values, half-full caches."""
    mesh = facts["meshes"]["decode"]
    groups, tensor = facts["devices"] / mesh["tensor"], mesh["tensor"]
    of_token = 2 * 2 * student.num_layers * student.num_kv_heads * student.head_dim / tensor
    cached = max(1.0, rows / groups) * (tokens.prompt + response / 2) + tokens.template
    return facts["bytes_per_device"]["decode_weights"] + cached * of_token


def _layer_parameters(arch: Architecture) -> float:
    """Of the layers, which are what a step gathers over and over."""
    return float(sum(math.prod(spec.shape) for spec in weight_table(arch).values() if spec.axes[0] == "layers"))

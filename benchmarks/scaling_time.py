"""What a step and a decoded token cost on this machine: against one size at a time, and as shares of its limits.

The functions are those that training calls: the donated NCA step behind shared prefixes, and the sampler. Ids and
weights are random, since neither time nor arithmetic depends on what they mean, and no token ends a response.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from benchmarks.peers.inputs import HEADER, PROMPT, make_inputs
from benchmarks.peers.ours import make_batch
from benchmarks.rollout import interleaved
from configs import base
from nca_jax.flops import Tokens, model_flops, rollout_flops, train_step_flops
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, decoder_graph, parameter_count, random_params
from nca_jax.models.presets import preset
from nca_jax.rollout import Sampling, example_keys, make_sampler
from nca_jax.train_step import Objective, Teacher, TrainState, make_train_step
from nca_jax.views import shared_prefix
from nca_jax.vocab_loss import AnchorTerm, Terms

# Of the sweep: matrices wide enough for their products to be near the machine's rate, and seconds in all.
SMALL = dataclasses.replace(
    preset("smollm2_135m"), hidden_size=384, num_layers=4, num_heads=6, num_kv_heads=3, mlp_size=1024, vocab_size=16_384
)
BETA = 0.5


class Sizes(NamedTuple):
    """What is varied, one at a time. A decoded token is the mean of so many as `response` says, after the first."""

    batch: int = 8
    response: int = 32
    context: int = 128
    layers: int = SMALL.num_layers
    vocabulary: int = SMALL.vocab_size


# Where the base's own value is, it is among them.
SWEEPS = {
    "batch": (2, 4, 8, 16, 32),
    "response": (8, 32, 64, 128),
    "context": (32, 128, 512, 1024),
    "layers": (2, 4, 8, 12),
    "vocabulary": (4096, 16_384, 32_768, 65_536),
}


# Of SmolLM2-135M: what is timed, rows, tokens of the context.
MODEL_POINTS = (("step", 8, 64), ("step", 8, 512), ("decode", 1, 64), ("decode", 8, 64), ("decode", 32, 64))


class Cost(NamedTuple):
    """What the arithmetic of something needs, and the bytes that it cannot do without reading."""

    flops: float
    nbytes: float | None = None


def architecture(sizes: Sizes) -> Architecture:
    """The small model with so many layers and tokens."""
    return dataclasses.replace(SMALL, num_layers=sizes.layers, vocab_size=sizes.vocabulary)


def step_config(sizes: Sizes) -> ConfigDict:
    """What `nca_jax.flops` asks a config for."""
    config = base.get_config()
    config.batch_size, config.rollout.max_new_tokens, config.anchor.beta = sizes.batch, sizes.response, BETA
    return config


def step_cost(arch: Architecture, sizes: Sizes) -> Cost:
    """Of the NCA step, without what is computed twice."""
    tokens = Tokens(prompt=PROMPT[1], template=HEADER, context=sizes.context)
    return Cost(model_flops(train_step_flops(step_config(sizes), arch, arch, tokens)))


def decode_cost(arch: Architecture, sizes: Sizes) -> Cost:
    """Of one token of every row, on average over the `response` tokens after the first one.

    Read are every weight once (the head is the embedding, of which the looked-up rows are nothing beside it), the keys
    and values of the shared context once, and those of each row's prompt and response.
    """
    decoded = rollout_flops(arch, sizes.batch, sizes.response, PROMPT[1], sizes.context)["decode"]
    # Token t is fed behind the prompt and t - 1 others.
    cached = sizes.context + sizes.batch * (PROMPT[1] + (sizes.response - 1) / 2)
    of_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim
    nbytes = 4 * (parameter_count(arch) + cached * of_token)
    return Cost(decoded / sizes.response, nbytes)


def make_step(arch: Architecture, params: Params, sizes: Sizes) -> tuple[Callable, float]:
    """The step as training runs it, each call from what the one before has left; and seconds to compile it."""
    batch = make_batch(make_inputs(arch.vocab_size, sizes.batch, sizes.context, sizes.response))
    graph = decoder_graph(arch, remat="dots")  # the fastest: benchmarks/arrangement.py
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5))
    objective = Objective(Terms(vocab_size=arch.vocab_size, anchor=AnchorTerm()), beta=BETA)
    # Not donated, which makes copies: the teacher keeps the same weights.
    held = [jax.jit(lambda params: TrainState(jnp.int32(0), params, optimizer.init(params)))(params)]
    teacher = Teacher(params, shared_prefix(nnx.merge(graph, params), batch.with_context.prefix_C))
    step = jax.jit(make_train_step(graph, graph, optimizer, objective), donate_argnums=0)
    compiled, seconds = _compiled(step, held[0], teacher, batch)

    def run() -> jax.Array:
        state, metrics = compiled(held.pop(), teacher, batch)
        held.append(state)
        return jax.block_until_ready(metrics["loss"])

    return run, seconds


def make_decode(arch: Architecture, params: Params, sizes: Sizes) -> tuple[dict[str, Callable], float]:
    """Rollouts of 1 and of 1 + `response` tokens behind the context, and seconds to compile both."""
    V, B = arch.vocab_size, sizes.batch
    view = make_batch(make_inputs(V, B, sizes.context, sizes.response)).with_context
    graph = decoder_graph(arch, remat="none")
    prefix = shared_prefix(nnx.merge(graph, params), view.prefix_C)
    rows = view.prompt_BxP, view.prompt_length_B, np.ones(B, bool), example_keys(0, 0, jnp.arange(B))
    runs, total = {}, 0.0
    for name, tokens in (("prefill", 1), ("all", 1 + sizes.response)):
        sample = make_sampler(graph, max_new_tokens=tokens, eos_ids=[V], vocab_size=V)
        compiled, seconds = _compiled(sample, params, prefix, *rows, Sampling(1.0, 1.0))
        runs[name] = functools.partial(compiled, params, prefix, *rows, Sampling(1.0, 1.0))
        total += seconds
    return runs, total


def _compiled(function: Callable, *arguments: Any) -> tuple[Callable, float]:
    began = time.perf_counter()
    return function.lower(*arguments).compile(), time.perf_counter() - began


def token_seconds(prefill: Sequence[float], together: Sequence[float], tokens: int) -> float:
    """Of one token: the median over the rounds of what so many tokens have added to a rollout."""
    return statistics.median((b - a) / tokens for a, b in zip(prefill, together, strict=True))


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of a straight line through both on logarithmic axes: 1 where twice the size costs twice as much."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def line(sizes: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """A straight line through both: what one more of the size costs, and what is left at 0."""
    per_unit, fixed = np.polyfit(sizes, values, 1)
    return {"per unit": float(per_unit), "fixed": float(fixed)}


def reached(point: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, float]:
    """GFLOP/s of a point, and GB/s where its bytes are known, and their shares of the limits."""
    rates = {"GFLOP/s": 1e-9 * point["FLOPs"] / point["seconds"]}
    if "bytes" in point:
        rates["GB/s"] = 1e-9 * point["bytes"] / point["seconds"]
    return rates | {f"share of {unit}": rate / limits[unit] for unit, rate in rates.items()}


def floor_seconds(point: Mapping[str, float], limits: Mapping[str, float]) -> float:
    """What the limits leave: the longer one of arithmetic and reading."""
    return max(1e-9 * point["FLOPs"] / limits["GFLOP/s"], 1e-9 * point.get("bytes", 0.0) / limits["GB/s"])


def growth(sizes: Sequence[int], points: Sequence[Mapping[str, float]], limits: Mapping[str, float]) -> dict[str, Any]:
    """How the seconds of points, one for each size, grow with it; how their FLOPs do, and what the limits leave."""
    seconds = [point["seconds"] for point in points]
    return {
        "slope": slope(sizes, seconds),
        "slope of FLOPs": slope(sizes, [point["FLOPs"] for point in points]),
        "slope at the limits": slope(sizes, [floor_seconds(point, limits) for point in points]),
        "line": line(sizes, seconds),
    }


def sweep(name: str, values: Sequence[int], repeats: int) -> dict[str, Any]:
    """Step and decode at each of the values of one size, all others as in the base, in turn.

    Returns:
      "sizes", and for "step" and "decode" a point each: "seconds", "FLOPs", "bytes" (decode), "compile seconds".
    """
    runs, compiled = {}, {}
    for value in values:
        sizes = Sizes()._replace(**{name: value})
        arch = architecture(sizes)
        params = random_params(arch, 0)
        runs[f"{name} {value}, step"], compiled["step", value] = make_step(arch, params, sizes)
        rollouts, compiled["decode", value] = make_decode(arch, params, sizes)
        runs |= {f"{name} {value}, {part}": rollout for part, rollout in rollouts.items()}
    measured = interleaved(runs, repeats)
    found: dict[str, Any] = {"sizes": list(values), "step": [], "decode": []}
    for value in values:
        sizes = Sizes()._replace(**{name: value})
        arch = architecture(sizes)
        step, prefill, together = (measured[f"{name} {value}, {part}"] for part in ("step", "prefill", "all"))
        found["step"].append(_point(step_cost(arch, sizes), statistics.median(step), compiled["step", value]))
        seconds = token_seconds(prefill, together, sizes.response)
        found["decode"].append(_point(decode_cost(arch, sizes), seconds, compiled["decode", value]))
    return found


def _point(cost: Cost, seconds: float, compile_seconds: float) -> dict[str, float]:
    known = {} if cost.nbytes is None else {"bytes": cost.nbytes}
    return {"seconds": seconds, "FLOPs": cost.flops, **known, "compile seconds": compile_seconds}


def model_point(what: str, batch: int, context: int, repeats: int) -> dict[str, Any]:
    """The "step" or the "decode" of SmolLM2-135M, of so many rows behind a context of so many tokens."""
    arch, sizes = preset("smollm2_135m"), Sizes(batch=batch, context=context)
    params = random_params(arch, 0)
    if what == "step":
        run, compiled = make_step(arch, params, sizes)
        seconds = statistics.median(interleaved({what: run}, repeats)[what])
        point = _point(step_cost(arch, sizes), seconds, compiled)
    else:
        runs, compiled = make_decode(arch, params, sizes)
        measured = interleaved(runs, repeats)
        seconds = token_seconds(measured["prefill"], measured["all"], sizes.response)
        point = _point(decode_cost(arch, sizes), seconds, compiled)
    return {"what": what, "batch": batch, "response": sizes.response, "context": context} | point

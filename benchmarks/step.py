"""What the anchor costs: ratios of step times, rollout included, measured in one run on this machine.

    python -m nca_jax.models.packaged
    JAX_PLATFORMS=cpu python -m benchmarks.step [--steps=3] [--context=69] [--prompt=64] [--response=64]

The model is SmolLM2-135M-Instruct; ids are random, since the arithmetic does not depend on them, and no response ends
early. Variants run in turn, step by step, so that a noisy machine is equally noisy for all; compile time is apart.
Results: benchmarks/results/step.json.
"""

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nca_jax.models.architecture import load_architecture
from nca_jax.models.decoder import decoder_graph
from nca_jax.models.huggingface import load_params
from nca_jax.models.source import resolve
from nca_jax.rollout import Sampling, example_keys, make_sampler
from nca_jax.train_step import Objective, Teacher, TrainState, make_train_step
from nca_jax.views import Batch, View, shared_prefix
from nca_jax.vocab_loss import AnchorTerm, Terms

RESULTS = Path(__file__).parent / "results" / "step.json"
B, HEADER = 8, 24  # examples, and tokens of the template that lead every prompt


def make_batch(vocab_size: int, context: int, P: int, R: int, shared: bool) -> Batch:
    """A batch whose prefixes are kept once, or repeated in every example's prompt."""

    rng = np.random.default_rng(0)

    def view(prefix_length):
        prefix_C = rng.integers(3, vocab_size, prefix_length)
        prompt_BxP = rng.integers(3, vocab_size, (B, P))
        if not shared:
            prompt_BxP = np.concatenate([np.tile(prefix_C, (B, 1)), prompt_BxP], axis=1)
            prefix_C = prefix_C[:0]
        length_B = np.full(B, prompt_BxP.shape[1], np.int32)
        return View(jnp.asarray(prefix_C, jnp.int32), jnp.asarray(prompt_BxP, jnp.int32), jnp.asarray(length_B))

    response_BxR = jnp.asarray(rng.integers(3, vocab_size, (B, R)), jnp.int32)
    return Batch(view(HEADER), view(context), response_BxR, jnp.ones((B, R), bool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each variant, after one to warm up")
    parser.add_argument("--context", type=int, default=69, help="tokens of the shared context")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of each response")
    arguments = parser.parse_args()

    directory = resolve("smollm2_135m_instruct")
    arch = load_architecture(directory)
    params, graph = load_params(directory, arch), decoder_graph(arch)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-5))
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    terms = Terms(vocab_size=arch.vocab_size, chunk_size=128)
    anchored = dataclasses.replace(terms, anchor=AnchorTerm())
    objectives = {
        "opd": Objective(terms),
        "nca": Objective(anchored, beta=0.5),
        "nca, anchor on every 2nd row": Objective(anchored, beta=0.5, anchor_stride=2),
        "nca, prefixes repeated": Objective(anchored, beta=0.5),
    }
    sizes = (arch.vocab_size, arguments.context, arguments.prompt, arguments.response)
    steps, compile_seconds, memory = {}, {}, {}
    for name, objective in objectives.items():
        batch = make_batch(*sizes, shared=name != "nca, prefixes repeated")
        teacher = Teacher(params, shared_prefix(nnx.merge(graph, params), batch.with_context.prefix_C))
        # Not donated: all variants start every step from the same state.
        step = jax.jit(make_train_step(graph, graph, optimizer, objective))
        began = time.perf_counter()
        compiled = step.lower(state, teacher, batch).compile()
        compile_seconds[name] = round(time.perf_counter() - began, 1)
        memory[name] = compiled.memory_analysis().temp_size_in_bytes // 10**6
        steps[name] = functools.partial(compiled, state, teacher, batch)

    view = make_batch(*sizes, shared=True).no_context
    sample = make_sampler(
        graph, max_new_tokens=arguments.response, eos_ids=[arch.vocab_size], vocab_size=arch.vocab_size, top_k=0
    )
    prefix = shared_prefix(nnx.merge(graph, params), view.prefix_C)
    steps["rollout"] = lambda: sample(
        params,
        prefix,
        view.prompt_BxP,
        view.prompt_length_B,
        np.ones(B, bool),
        example_keys(0, 0, jnp.arange(B)),
        Sampling(1.0, 1.0),
    )
    seconds, losses = {name: [] for name in steps}, {}
    for i in range(arguments.steps + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            result = jax.block_until_ready(step())
            if i:  # the first call warms up
                seconds[name].append(time.perf_counter() - began)
            if name in objectives:
                losses[name] = float(result[1]["loss"])

    def ratio(one, other, rollout):
        rows = zip(seconds[one], seconds[other], seconds["rollout"], strict=True)
        return round(statistics.median((a + rollout * r) / (b + rollout * r) for a, b, r in rows), 3)

    result = {
        "sizes": {
            "batch": B,
            "header": HEADER,
            **{k: getattr(arguments, k) for k in ("context", "prompt", "response")},
        },
        "nca / opd, rollout included": ratio("nca", "opd", True),
        "nca / opd, update alone": ratio("nca", "opd", False),
        "nca on every 2nd row / opd, rollout included": ratio("nca, anchor on every 2nd row", "opd", True),
        "nca / nca with prefixes repeated, update alone": ratio("nca", "nca, prefixes repeated", False),
        "losses": losses,
        "median seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "compile seconds": compile_seconds,
        "temporary MB": memory,
        "machine": f"{platform.machine()}, {jax.default_backend()}, jax {jax.__version__}",
    }
    text = json.dumps(result, indent=2)
    print(text)
    RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()

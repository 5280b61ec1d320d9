"""Value and gradient of the loss over [positions, vocabulary]: one pass over chunks against the straightforward way.

    JAX_PLATFORMS=cpu python -m benchmarks.objective [--positions=512,2048] [--vocabulary=32000,151936]

The straightforward way computes the logits of q_x, f and q_c for all positions and differentiates the same divergences
automatically. Both run in turn in one process; compile time is apart; temporaries are what the compiler says.
Results: benchmarks/results/objective.json.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nca_jax import objectives
from nca_jax.vocab_loss import AnchorTerm, Hidden, Terms, weighted_loss

RESULTS = Path(__file__).parent / "results" / "objective.json"
BATCH, WIDTH, BETA = 8, 1024, 0.5


def straightforward(hidden: Hidden, head, teacher_head, weight_BxR):
    """The NCA loss from whole arrays of logits, as one would write it down."""
    log_p = [
        objectives.log_probabilities(jnp.einsum("brd,vd->brv", h, w, preferred_element_type=jnp.float32))
        for h, w in ((hidden.q_x, head), (hidden.f, teacher_head), (hidden.q_c, head))
    ]
    first = objectives.kl(log_p[0], jax.lax.stop_gradient(log_p[1]))
    anchor = objectives.kl(jax.lax.stop_gradient(log_p[0]), log_p[2])
    return jnp.sum(weight_BxR * (first + BETA * anchor))


def measure(N: int, V: int, chunk_size: int, repeats: int) -> dict:
    R = N // BATCH
    rng = np.random.default_rng(0)
    hidden = [jnp.asarray(rng.normal(size=(BATCH, R, WIDTH)), jnp.float32) for _ in range(3)]
    heads = [jnp.asarray(rng.normal(0, WIDTH**-0.5, (V, WIDTH)), jnp.float32) for _ in range(2)]
    weight_BxR = jnp.full((BATCH, R), 1 / N, jnp.float32)
    token_BxR = jnp.zeros((BATCH, R), jnp.int32)
    terms = Terms(vocab_size=V, anchor=AnchorTerm(), chunk_size=chunk_size)

    def chunked(q_x, q_c, head, f, teacher_head):
        return weighted_loss(Hidden(q_x, q_c, f), head, teacher_head, token_BxR, weight_BxR, BETA, terms)[0]

    def whole(q_x, q_c, head, f, teacher_head):
        return straightforward(Hidden(q_x, q_c, f), head, teacher_head, weight_BxR)

    inputs = (hidden[0], hidden[2], heads[0], hidden[1], heads[1])
    compiled, compile_seconds = {}, {}
    for name, function in (("chunked", chunked), ("straightforward", whole)):
        began = time.perf_counter()
        compiled[name] = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2))).lower(*inputs).compile()
        compile_seconds[name] = round(time.perf_counter() - began, 2)
    seconds, results = {name: [] for name in compiled}, {}
    for i in range(repeats + 1):
        for name, run in compiled.items():
            began = time.perf_counter()
            result = jax.block_until_ready(run(*inputs))
            if i:  # the first call warms up
                seconds[name].append(time.perf_counter() - began)
            elif name not in results:
                results[name] = jax.tree.map(np.asarray, result)
            del result
    difference = max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(*(jax.tree.leaves(results[name]) for name in ("chunked", "straightforward")), strict=True)
    )
    ratio = statistics.median(a / b for a, b in zip(seconds["chunked"], seconds["straightforward"], strict=True))
    temporaries = {name: run.memory_analysis().temp_size_in_bytes for name, run in compiled.items()}
    return {
        "positions": N,
        "vocabulary": V,
        "width": WIDTH,
        "chunk_size": chunk_size,
        "time ratio": round(ratio, 3),
        "temporaries ratio": round(temporaries["chunked"] / temporaries["straightforward"], 4),
        "largest relative difference": difference,
        "median seconds": {name: round(statistics.median(values), 2) for name, values in seconds.items()},
        "compile seconds": compile_seconds,
        "temporary MB": {name: round(value / 1e6) for name, value in temporaries.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", default="512,2048")
    parser.add_argument("--vocabulary", default="32000,151936")
    parser.add_argument("--chunk_size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    for V in map(int, arguments.vocabulary.split(",")):
        for N in map(int, arguments.positions.split(",")):
            rows.append(measure(N, V, arguments.chunk_size, arguments.repeats))
            print(json.dumps(rows[-1]), flush=True)
    machine = f"{platform.machine()}, {jax.default_backend()}, jax {jax.__version__}"
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

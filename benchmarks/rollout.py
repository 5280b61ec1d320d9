"""What sampling costs: ratios of times, each measured in one run on this machine.

    python -m nca_jax.models.packaged
    JAX_PLATFORMS=cpu python -m benchmarks.rollout [--repeats=3] [--only=steps|sampler|continuous]

The model is SmolLM2-135M-Instruct; ids of prompts are random. Variants run in turn, so that a noisy machine is equally
noisy for all; compile time is apart. Three comparisons:

steps: one decode step with the response cache in blocks and as a whole, for several sizes. Shapes are static within a
  block, so the mean over a batch that decodes all R tokens, or a quarter of them, follows from one time for each block.
  The model only, without head and sampling. Up to R = 64 there is one block, and nothing differs.
sampler: a whole rollout in which no response ends early, as it was (one block, top-p by a full sort) and as it is.
continuous: 64 prompts in 8 slots, in batches of 8 and by continuous batching. At a temperature of 10000 all tokens are
  equally probable, and an EOS set of every n-th id ends each response with probability n^-1 at every token: lengths are
  geometric, with a mean of a quarter of R (a little less, as R cuts them off), and both draw the same tokens.

Results: benchmarks/results/rollout.json.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nca_jax.continuous import make_continuous_sampler
from nca_jax.models.architecture import Architecture, load_architecture
from nca_jax.models.decoder import Past, decoder_graph
from nca_jax.models.huggingface import load_params
from nca_jax.models.source import resolve
from nca_jax.rollout import Sampling, block_sizes, example_keys, make_sampler, own_tokens
from nca_jax.views import shared_prefix

RESULTS = Path(__file__).parent / "results" / "rollout.json"
PROMPT, FIRST_BLOCK = 64, 64


def interleaved(variants: dict[str, Callable], repeats: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each repeat of each variant, one after the other in every round, after a round to warm up."""
    seconds = {name: [] for name in variants}
    for i in range(0 if warm_up else 1, repeats + 1):
        for name, run in variants.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            taken = time.perf_counter() - began
            print(f"{'round ' + str(i) if i else 'warm-up'}: {name}, {taken:.2f} s", file=sys.stderr, flush=True)
            if i:
                seconds[name].append(taken)
    return seconds


def ratio(one: list[float], other: list[float]) -> float:
    """The median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 3)


def rounded(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 4) for name, values in seconds.items()}


def random_ids(vocab_size: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab_size, shape).astype(np.int32)


def steps(arch: Architecture, params, graph, repeats: int) -> list[dict]:
    """The mean decode step, cache in blocks over cache as a whole."""
    sizes = block_sizes(1024, FIRST_BLOCK)

    @jax.jit
    def step(params, token_Bx1, position_Bx1, past):
        return nnx.merge(graph, params)(token_Bx1, position_Bx1, past)

    def kv(*shape):
        x = jnp.full((arch.num_layers, *shape, arch.num_kv_heads, arch.head_dim), 0.1)
        return x, x

    results = []
    for context in (64, 2048):
        for B in (1, 8, 32):

            def runs(lengths, B=B, context=context):
                """A step in the last of blocks of these lengths, half of which is filled."""
                blocks = [Past(*kv(B, n)) for n in lengths]
                half_1x1xS = (jnp.arange(lengths[-1]) < lengths[-1] // 2)[None, None]
                past = [
                    Past(*kv(context)),
                    Past(*kv(B, PROMPT), own_tokens(PROMPT, jnp.full(B, PROMPT))),
                    *blocks[:-1],
                    blocks[-1]._replace(visible=half_1x1xS),
                ]
                token_Bx1 = jnp.ones((B, 1), jnp.int32)
                return lambda: step(params, token_Bx1, token_Bx1 * (context + PROMPT + sum(lengths)), past)

            variants = {f"blocks to {sum(sizes[: i + 1])}": runs(sizes[: i + 1]) for i in range(len(sizes))}
            variants |= {f"whole {R}": runs([R]) for R in (256, 1024)}
            seconds = interleaved(variants, repeats)
            record = {"batch": B, "context": context, "median seconds": rounded(seconds)}
            for R in (256, 1024):
                for used in (R // 4, R):
                    begun = block_sizes(used, FIRST_BLOCK)
                    ends = np.cumsum(begun)
                    in_blocks = [
                        sum(size * seconds[f"blocks to {end}"][i] for size, end in zip(begun, ends, strict=True)) / used
                        for i in range(repeats)
                    ]
                    record[f"blocks / whole, {used} tokens of R = {R}"] = ratio(in_blocks, seconds[f"whole {R}"])
            print(record, flush=True)
            results.append(record)
    return results


def sampler(arch: Architecture, params, graph, repeats: int) -> list[dict]:
    """Whole rollouts, before and after."""
    R, B, V, context = 256, 8, arch.vocab_size, 64
    prefix = shared_prefix(nnx.merge(graph, params), jnp.asarray(random_ids(V, context)))
    length_B = np.full(B, PROMPT, np.int32)
    arguments = params, prefix, random_ids(V, B, PROMPT), length_B, np.ones(B, bool), example_keys(0, 0, jnp.arange(B))
    common = {"max_new_tokens": R, "eos_ids": [V], "vocab_size": V}
    before = make_sampler(graph, **common, first_block=R, candidates=V).lower(*arguments, Sampling(1.0, 1.0)).compile()
    after = make_sampler(graph, **common).lower(*arguments, Sampling(1.0, 1.0)).compile()
    results = []
    for top_p in (1.0, 0.95):
        tokens = {}

        def run(name, sample, top_p=top_p, tokens=tokens):
            tokens[name] = sample(*arguments, Sampling(1.0, top_p)).response_BxR
            return tokens[name]

        variants = {"before": lambda: run("before", before), "after": lambda: run("after", after)}
        seconds = interleaved(variants, repeats, warm_up=False)
        record = {
            "sizes": {"batch": B, "context": context, "prompt": PROMPT, "response": R},
            "top_p": top_p,
            "before / after": ratio(seconds["before"], seconds["after"]),
            "rows with other tokens": int((tokens["before"] != tokens["after"]).any(axis=1).sum()),
            "median seconds": rounded(seconds),
        }
        print(record, flush=True)
        results.append(record)
    return results


def continuous(arch: Architecture, params, graph, repeats: int) -> dict:
    """Continuous batching against batches that wait for their longest response."""
    N, B, R, V, header = 64, 8, 128, arch.vocab_size, 24
    mean = R // 4
    prefix = shared_prefix(nnx.merge(graph, params), jnp.asarray(random_ids(V, header)))
    prompt_NxP = random_ids(V, N, PROMPT)
    length_N = np.random.default_rng(1).integers(PROMPT // 2, PROMPT + 1, N).astype(np.int32)
    rows = prompt_NxP, length_N, np.ones(N, bool), example_keys(0, 0, jnp.arange(N))
    sampling = Sampling(1e4, 1.0)
    common = {"max_new_tokens": R, "eos_ids": range(0, V, mean), "vocab_size": V}
    batch = [x[:B] for x in rows]
    padded = make_sampler(graph, **common).lower(params, prefix, *batch, sampling).compile()
    refills = (1, 2)
    samplers = {
        refill: make_continuous_sampler(graph, slots=B, refill=refill, **common)
        .lower(params, prefix, *rows, sampling)
        .compile()
        for refill in refills
    }
    found = {}

    def in_batches():
        parts = [padded(params, prefix, *(x[i : i + B] for x in rows), sampling) for i in range(0, N, B)]
        found["batches"] = jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def by_slots(refill):
        found[refill] = jax.device_get(samplers[refill](params, prefix, *rows, sampling))

    variants = {"batches": in_batches} | {
        f"continuous, refill {refill}": lambda refill=refill: by_slots(refill) for refill in refills
    }
    seconds = interleaved(variants, repeats, warm_up=False)
    expected = found["batches"]
    lengths = expected.mask_BxR.sum(axis=1)
    result = {
        "sizes": {"prompts": N, "slots": B, "header": header, "prompt": PROMPT, "response": R},
        "lengths": {"mean": round(float(lengths.mean()), 1), "longest": int(lengths.max())},
        "decode steps of the batches": int(sum(lengths[i : i + B].max() - 1 for i in range(0, N, B))),
        "prompts with other tokens": {
            refill: int((found[refill].response_BxR != expected.response_BxR).any(axis=1).sum()) for refill in refills
        },
        "tokens/s, continuous / batches": {
            f"refill {refill}": ratio(seconds["batches"], seconds[f"continuous, refill {refill}"]) for refill in refills
        },
        "tokens/s": {name: round(float(lengths.sum()) / value, 1) for name, value in rounded(seconds).items()},
    }
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds of each comparison, after one to warm up")
    comparisons = {"steps": steps, "sampler": sampler, "continuous": continuous}
    parser.add_argument("--only", choices=comparisons, help="one of the comparisons; the others' results are kept")
    arguments = parser.parse_args()

    directory = resolve("smollm2_135m_instruct")
    arch = load_architecture(directory)
    params, graph = load_params(directory, arch), decoder_graph(arch)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [arguments.only] if arguments.only else comparisons:
        results[name] = {
            "results": comparisons[name](arch, params, graph, arguments.repeats),
            "repeats": arguments.repeats,
            "machine": f"{platform.machine()}, {jax.default_backend()}, jax {jax.__version__}",
        }
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

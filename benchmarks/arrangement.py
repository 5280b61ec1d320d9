"""How the work of a training step is best arranged: ratios of times, each measured in one run on this machine.

    python -m nca_jax.models.packaged
    JAX_PLATFORMS=cpu python -m benchmarks.arrangement [--repeats=3] [--only=products|views|attention|lengths]

The layers are those of SmolLM2-135M-Instruct, the ids random. Variants run in turn, so that a noisy machine is equally
noisy for all; compile time is apart. Four comparisons:

products: forward and backward pass of all layers over 8 x 64 tokens, with weight gradients as `models/contract.py`
  computes them and as jax does, under each remat policy.
views: two views of 8 x 64 tokens as two streams that share the weights of each layer, and as one of 16 rows.
attention: forward and backward pass of all layers over 1 x 2048 tokens, as a step has them in its prefix, with the
  queries in chunks and in one piece.
lengths: an NCA step's loss and gradient in 4 micro-batches of 2 rows, responses of geometric lengths with a mean of a
  quarter of the longest, with one, two and three lengths to run at.

Results: benchmarks/results/arrangement.json.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.rollout import interleaved, random_ids, ratio, rounded
from nca_jax.models import attention, decoder
from nca_jax.models.architecture import Architecture, load_architecture
from nca_jax.models.decoder import REMAT_POLICIES, Params, Stream, decoder_graph
from nca_jax.models.huggingface import load_params
from nca_jax.models.source import resolve
from nca_jax.train_step import Objective, Teacher, TrainState, make_loss_and_gradient
from nca_jax.views import Batch, View, shared_prefix
from nca_jax.vocab_loss import AnchorTerm, Terms

RESULTS = Path(__file__).parent / "results" / "arrangement.json"
ROWS, TOKENS = 8, 64


def measured(variants: dict[str, Callable], arguments: tuple, repeats: int) -> dict:
    """Compiles each variant for the arguments and runs them in turn."""
    programs, compile_seconds, temporary = {}, {}, {}
    for name, run in variants.items():
        began = time.perf_counter()
        programs[name] = jax.jit(run).lower(*arguments).compile()
        compile_seconds[name] = round(time.perf_counter() - began, 1)
        temporary[name] = programs[name].memory_analysis().temp_size_in_bytes // 10**6
    runs = {name: partial(program, *arguments) for name, program in programs.items()}
    seconds = interleaved(runs, repeats)
    first = next(iter(seconds))
    return {
        f"seconds / those of {first!r}": {name: ratio(values, seconds[first]) for name, values in seconds.items()},
        "median seconds": rounded(seconds),
        "temporary MB": temporary,
        "compile seconds": compile_seconds,
    }


def pass_of(arch: Architecture, remat: str, streams: int, product: Callable) -> Callable:
    """(params, token_BxT) -> gradient of a sum of final hidden states, with the rows in so many streams."""
    graph = decoder_graph(arch, remat=remat)

    def run(params: Params, token_BxT: jax.Array):
        def loss(params):
            model, position_1xT = nnx.merge(graph, params), jnp.arange(token_BxT.shape[1])[None]
            rows = jnp.split(token_BxT, streams)
            outputs = model.together([Stream(token_BxT, position_1xT) for token_BxT in rows])
            return sum((hidden_BxTxD**2).sum() for hidden_BxTxD, _ in outputs)

        with mock.patch.object(decoder, "contract", product):
            return jax.grad(loss)(params)

    return run


def products(arch: Architecture, params: Params, repeats: int) -> dict:
    """Weight gradients and remat policies."""
    made = {"contract": decoder.contract, "einsum": jnp.einsum}
    variants = {f"{name}, {remat}": pass_of(arch, remat, 1, made[name]) for remat in REMAT_POLICIES for name in made}
    return measured(variants, (params, random_ids(arch.vocab_size, ROWS, TOKENS)), repeats)


def views(arch: Architecture, params: Params, repeats: int) -> dict:
    """Two streams or one."""
    variants = {name: pass_of(arch, "dots", n, decoder.contract) for name, n in (("two streams", 2), ("one stream", 1))}
    return measured(variants, (params, random_ids(arch.vocab_size, 2 * ROWS, TOKENS)), repeats)


def chunks(arch: Architecture, params: Params, repeats: int) -> dict:
    """Queries of a long row in chunks and in one piece."""
    tokens = 2048
    in_chunks = pass_of(arch, "dots", 1, decoder.contract)

    def in_one_piece(params: Params, token_BxT: jax.Array):
        with mock.patch.object(attention, "CHUNK", tokens):
            return in_chunks(params, token_BxT)

    variants = {"in chunks": in_chunks, "in one piece": in_one_piece}
    return measured(variants, (params, random_ids(arch.vocab_size, 1, tokens)), repeats)


def lengths(arch: Architecture, params: Params, repeats: int) -> dict:
    """The same batch with one length and with more."""
    P, R, parts = 32, 96, 4
    graph = decoder_graph(arch, remat="dots")
    prompts = (random_ids(arch.vocab_size, ROWS, P), jnp.full(ROWS, P, jnp.int32))
    no_context, with_context = (View(random_ids(arch.vocab_size, n), *prompts) for n in (24, 64))
    length_B = np.minimum(np.random.default_rng(0).geometric(4 / R, ROWS), R)
    mask_BxR = jnp.arange(R) < jnp.asarray(length_B)[:, None]
    batch = Batch(no_context, with_context, random_ids(arch.vocab_size, ROWS, R), mask_BxR)
    teacher = Teacher(params, shared_prefix(nnx.merge(graph, params), with_context.prefix_C))
    state = TrainState(jnp.int32(0), params, None)
    objective = Objective(Terms(vocab_size=arch.vocab_size, anchor=AnchorTerm()), beta=0.5)
    variants = {f"lengths={n}": make_loss_and_gradient(graph, graph, objective, parts, lengths=n) for n in (1, 2, 3)}
    found = measured(variants, (state, teacher, batch), repeats)
    computed = {
        name: round(float(jax.jit(run)(state, teacher, batch)[2]["computed"]), 3) for name, run in variants.items()
    }
    return {"response lengths": length_B.tolist(), "computed": computed} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds of each comparison, after one to warm up")
    comparisons = {"products": products, "views": views, "attention": chunks, "lengths": lengths}
    parser.add_argument("--only", choices=comparisons, help="one of the comparisons; the others' results are kept")
    arguments = parser.parse_args()
    directory = resolve("smollm2_135m_instruct")
    arch = load_architecture(directory)
    params = load_params(directory, arch)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [arguments.only] if arguments.only else comparisons:
        found = comparisons[name](arch, params, arguments.repeats)
        machine = f"{platform.machine()}, {jax.default_backend()}, jax {jax.__version__}"
        results[name] = found | {"repeats": arguments.repeats, "machine": machine}
        print(json.dumps({name: results[name]}, indent=1), file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What this machine can do at best: its rate of matrix products and the bandwidth of its memory, in float32.

    JAX_PLATFORMS=cpu python -m benchmarks.machine

Every figure is the best of several repetitions, since others on the machine only take away from it, and comes from jax
and from numpy, which has a BLAS of its own: the higher one is the limit. Matrix products of the model's own shapes
say what of the limit is out of reach for their sizes.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nca_jax.models.architecture import Architecture
from nca_jax.models.presets import preset

SQUARE = 2048  # rows and columns: three such matrices are larger than caches, and a product takes tenths of a second
MEMORY_MB = 256  # of the array that is read or updated, several times the largest caches
REPEATS = 7


def best_seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Of the fastest call, after one to warm up. What it returns is waited for."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def matrix_rates(shapes: Iterable[tuple[int, int, int]], repeats: int = REPEATS) -> list[dict[str, Any]]:
    """GFLOP/s of products [m, k] @ [k, n], a multiply-add being two.

    Returns:
      For each shape "m k n" and what "jax" and "numpy" reach.
    """
    rng = np.random.default_rng(0)
    product = jax.jit(jnp.matmul)
    found = []
    for m, k, n in shapes:
        x, w = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
        on_device = jax.device_put((x, w))
        seconds = {
            "jax": best_seconds(lambda on_device=on_device: product(*on_device), repeats),
            "numpy": best_seconds(lambda x=x, w=w: x @ w, repeats),
        }
        found.append({"m k n": [m, k, n]} | {name: 2e-9 * m * k * n / s for name, s in seconds.items()})
    return found


def bandwidths(megabytes: float = MEMORY_MB, repeats: int = REPEATS) -> dict[str, dict[str, float]]:
    """GB/s, what is read and what is written added up.

    Returns:
      "read": a vector times a matrix of so many megabytes, which is read once; "update": an array of that size read
      and written in place; of each what "jax" and "numpy" reach.
    """
    columns = 4096
    rows = max(1, int(megabytes * 1e6 / (4 * columns)))
    w = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    x = np.ones(rows, np.float32)
    w_device, x_device = jax.device_put((w, x))
    product, negative = jax.jit(jnp.matmul), jax.jit(jnp.negative, donate_argnums=0)
    held = [jnp.copy(w_device)]

    def in_place() -> jax.Array:
        held.append(negative(held.pop()))  # donated: new memory would be asked for page by page
        return held[0]

    seconds = {
        "read": {
            "jax": best_seconds(lambda: product(x_device, w_device), repeats),
            "numpy": best_seconds(lambda: x @ w, repeats),
        },
        "update": {
            "jax": best_seconds(in_place, repeats),
            "numpy": best_seconds(lambda: np.negative(w, out=w), repeats),
        },
    }
    moved = {"read": w.nbytes, "update": 2 * w.nbytes}
    return {what: {by: 1e-9 * moved[what] / s for by, s in of.items()} for what, of in seconds.items()}


def model_shapes(arch: Architecture, tokens: int) -> list[tuple[int, int, int]]:
    """The different products of a forward pass over so many tokens: projections, mlp and head."""
    D, HQ, KQ = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    widths = {(D, HQ), (D, KQ), (HQ, D), (D, arch.mlp_size), (arch.mlp_size, D), (D, arch.vocab_size)}
    return [(tokens, k, n) for k, n in sorted(widths)]


def limits(repeats: int = REPEATS) -> dict[str, float]:
    """The two limits: "GFLOP/s" of a large square product and "GB/s" of reading, by whichever library reaches more."""
    (square,) = matrix_rates([(SQUARE,) * 3], repeats)
    return _limits(square, bandwidths(repeats=repeats))


def _limits(square: Mapping[str, float], moved: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {"GFLOP/s": max(square["jax"], square["numpy"]), "GB/s": max(moved["read"].values())}


def measure(arch: Architecture, tokens: int, repeats: int = REPEATS) -> dict[str, Any]:
    """All of it: limits, bandwidths, and the rates of the square product and of those of a model."""
    rates = matrix_rates([(SQUARE,) * 3, *model_shapes(arch, tokens)], repeats)
    moved = bandwidths(repeats=repeats)
    return {
        "limits": _limits(rates[0], moved),
        "matrix products, GFLOP/s": rates,
        "memory, GB/s": moved,
        "machine": description(),
    }


def description() -> str:
    """Which processor and library this was, for the results."""
    cpu = platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {jax.default_backend()}, jax {jax.__version__}, numpy {np.__version__}"


def table(found: Mapping[str, Any]) -> str:
    """The measurements in Markdown."""
    lines = ["| what | size | jax | numpy |", "|---|---|---|---|"]
    for row in found["matrix products, GFLOP/s"]:
        m, k, n = row["m k n"]
        lines.append(f"| matrix product, GFLOP/s | [{m}, {k}] @ [{k}, {n}] | {row['jax']:.0f} | {row['numpy']:.0f} |")
    names = {"read": "vector times matrix, which is read once", "update": "negation in place, read and written"}
    for what, of in found["memory, GB/s"].items():
        lines.append(f"| memory, GB/s | {MEMORY_MB} MB, {names[what]} | {of['jax']:.1f} | {of['numpy']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2_135m", help="the model whose products are measured")
    parser.add_argument("--tokens", type=int, default=512, help="rows of its products")
    arguments = parser.parse_args()
    print(json.dumps(measure(preset(arguments.preset), arguments.tokens), indent=2))


if __name__ == "__main__":
    main()
